// SPDX-License-Identifier: Apache-2.0

//! The IP sets of the mode: kube-proxy's own, and a few more for what kube-proxy's cannot say.

use model::{Family, Protocol};
use netlink::ipset::{SetKind, Spec};

/// A set, of either family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Set {
    /// Endpoints on this node, each paired with itself: it may be its own client.
    LoopBack,
    ClusterIp,
    ExternalIp,
    /// External IPs where inside and outside differ.
    ExternalIpLocal,
    /// All addresses of load balancers.
    LoadBalancer,
    /// Those where inside and outside differ.
    LoadBalancerLocal,
    /// Those with source ranges.
    LoadBalancerFw,
    /// Those with who may connect.
    LoadBalancerSourceCidr,
    /// Always empty: that an address may connect to itself is one of its ranges. kube-proxy's rules name it.
    LoadBalancerSourceIp,
    /// All node ports of a protocol.
    NodePort(Protocol),
    /// Those where inside and outside differ.
    NodePortLocal(Protocol),
    HealthCheckNodePort,
    /// All addresses on our link.
    IpvsIps,
    /// Ours: addresses that serve node ports.
    NodePortIps,
    /// Ours: cluster IPs all of whose clients are masqueraded, pods included.
    Masquerade,
    /// Ours: nobody gets through.
    Drop,
    /// Ours: nobody from outside gets through.
    DropOutside,
    /// Ours: traffic from inside gets a mark, and by it another virtual server.
    Inside,
}

impl Set {
    pub const ALL: [Set; 22] = [
        Set::LoopBack,
        Set::ClusterIp,
        Set::ExternalIp,
        Set::ExternalIpLocal,
        Set::LoadBalancer,
        Set::LoadBalancerLocal,
        Set::LoadBalancerFw,
        Set::LoadBalancerSourceCidr,
        Set::LoadBalancerSourceIp,
        Set::NodePort(Protocol::Tcp),
        Set::NodePortLocal(Protocol::Tcp),
        Set::NodePort(Protocol::Udp),
        Set::NodePortLocal(Protocol::Udp),
        Set::NodePort(Protocol::Sctp),
        Set::NodePortLocal(Protocol::Sctp),
        Set::HealthCheckNodePort,
        Set::IpvsIps,
        Set::NodePortIps,
        Set::Masquerade,
        Set::Drop,
        Set::DropOutside,
        Set::Inside,
    ];

    /// Those that kube-proxy does not have.
    pub const OWN: [Set; 5] = [Set::NodePortIps, Set::Masquerade, Set::Drop, Set::DropOutside, Set::Inside];

    /// Its name in IPv4.
    const fn base(self) -> &'static str {
        match self {
            Set::LoopBack => "KUBE-LOOP-BACK",
            Set::ClusterIp => "KUBE-CLUSTER-IP",
            Set::ExternalIp => "KUBE-EXTERNAL-IP",
            Set::ExternalIpLocal => "KUBE-EXTERNAL-IP-LOCAL",
            Set::LoadBalancer => "KUBE-LOAD-BALANCER",
            Set::LoadBalancerLocal => "KUBE-LOAD-BALANCER-LOCAL",
            Set::LoadBalancerFw => "KUBE-LOAD-BALANCER-FW",
            Set::LoadBalancerSourceCidr => "KUBE-LOAD-BALANCER-SOURCE-CIDR",
            Set::LoadBalancerSourceIp => "KUBE-LOAD-BALANCER-SOURCE-IP",
            Set::NodePort(Protocol::Tcp) => "KUBE-NODE-PORT-TCP",
            Set::NodePortLocal(Protocol::Tcp) => "KUBE-NODE-PORT-LOCAL-TCP",
            Set::NodePort(Protocol::Udp) => "KUBE-NODE-PORT-UDP",
            Set::NodePortLocal(Protocol::Udp) => "KUBE-NODE-PORT-LOCAL-UDP",
            Set::NodePort(Protocol::Sctp) => "KUBE-NODE-PORT-SCTP-HASH",
            Set::NodePortLocal(Protocol::Sctp) => "KUBE-NODE-PORT-LOCAL-SCTP-HASH",
            Set::HealthCheckNodePort => "KUBE-HEALTH-CHECK-NODE-PORT",
            Set::IpvsIps => "KUBE-IPVS-IPS",
            Set::NodePortIps => "KUBE-NODE-PORT-IPS",
            Set::Masquerade => "KUBE-MASQUERADE",
            Set::Drop => "KUBE-DROP",
            Set::DropOutside => "KUBE-DROP-OUTSIDE",
            Set::Inside => "KUBE-INSIDE",
        }
    }

    /// In IPv6 `KUBE-` is `KUBE-6-`, cut to what a name may have.
    pub fn name(self, family: Family) -> String {
        match family {
            Family::V4 => self.base().to_owned(),
            Family::V6 => self.base().replacen("KUBE-", "KUBE-6-", 1).chars().take(LONGEST_NAME).collect(),
        }
    }

    /// The one of this name.
    pub fn find(name: &str, family: Family) -> Option<Set> {
        Set::ALL.into_iter().find(|set| set.name(family) == name)
    }

    pub fn kind(self) -> SetKind {
        match self {
            Set::LoopBack | Set::LoadBalancerSourceIp => SetKind::HashIpPortIp,
            Set::LoadBalancerSourceCidr => SetKind::HashIpPortNet,
            Set::NodePort(Protocol::Tcp | Protocol::Udp)
            | Set::NodePortLocal(Protocol::Tcp | Protocol::Udp)
            | Set::HealthCheckNodePort => SetKind::BitmapPort,
            Set::IpvsIps | Set::NodePortIps => SetKind::HashIp,
            Set::Inside => SetKind::HashIpPortMark,
            _ => SetKind::HashIpPort,
        }
    }

    pub(super) fn spec(self, family: Family) -> Spec {
        Spec {
            name: self.name(family),
            kind: self.kind(),
            family: crate::nftables::wire(family),
            max_elements: super::room::USUAL,
        }
    }
}

const LONGEST_NAME: usize = 31;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_kube_proxys_and_differ() {
        assert_eq!(Set::LoadBalancerSourceCidr.name(Family::V6), "KUBE-6-LOAD-BALANCER-SOURCE-CID");
        assert_eq!(Set::NodePortLocal(Protocol::Sctp).name(Family::V6), "KUBE-6-NODE-PORT-LOCAL-SCTP-HAS");
        let names: HashSet<String> =
            Family::BOTH.into_iter().flat_map(|family| Set::ALL.map(|set| set.name(family))).collect();
        assert_eq!(names.len(), 2 * Set::ALL.len());
        assert!(names.iter().all(|name| name.len() <= LONGEST_NAME));
        assert_eq!(Set::find("KUBE-6-DROP", Family::V6), Some(Set::Drop));
        assert_eq!(Set::find("KUBE-6-DROP", Family::V4), None);
    }
}
