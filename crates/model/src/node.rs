// SPDX-License-Identifier: Apache-2.0

//! This node, and what its operator decided.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;

use crate::family::{Family, PerFamily};

/// The Node object of the node we run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub name: Arc<str>,
    /// First InternalIP of each family, else first ExternalIP.
    pub addresses: PerFamily<Option<IpAddr>>,
    /// First of `spec.podCIDRs` of each family.
    pub pod_cidrs: PerFamily<Option<IpNet>>,
    /// Label `topology.kubernetes.io/zone`; never empty.
    pub zone: Option<Arc<str>>,
    /// False when the node is being deleted or tainted `ToBeDeletedByClusterAutoscaler`.
    pub eligible: bool,
}

impl Node {
    pub fn has_address(&self) -> bool {
        self.addresses.v4.is_some() || self.addresses.v6.is_some()
    }

    pub fn has_pod_cidr(&self) -> bool {
        self.pod_cidrs.v4.is_some() || self.pod_cidrs.v6.is_some()
    }

    /// The same, with the addresses and pod ranges last known where it has none at all. A Node that is registered anew
    /// gets them later, and the machine is the same. One that has a single family of a field means it.
    #[must_use]
    pub fn remembering(self, last: &Node) -> Node {
        let addresses = if self.has_address() { self.addresses } else { last.addresses };
        let pod_cidrs = if self.has_pod_cidr() { self.pod_cidrs } else { last.pod_cidrs };
        Node { addresses, pod_cidrs, ..self }
    }
}

/// What flags and configuration decided. Name and families are fixed for the life of a [`crate::World`]; for the
/// rest see [`crate::World::retune`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Trimmed and lower-cased; endpoints whose node is this one are local.
    pub node_name: Arc<str>,
    /// The families this host can serve.
    pub families: PerFamily<bool>,
    /// A specific `--bind-address` replaces the node's address of its family.
    pub node_ip_override: PerFamily<Option<IpAddr>>,
    pub detect_local: DetectLocal,
    /// Empty means all addresses of the node.
    pub node_port_addresses: Box<[NodePortAddress]>,
    /// Masquerade all traffic to cluster IPs.
    pub masquerade_all: bool,
    /// Serve `spec.externalIPs` (feature gate AllowServiceExternalIPs).
    pub external_ips: bool,
}

/// How traffic of this node's pods is told from other traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DetectLocal {
    /// Source address in the cluster's pod range; absent for a family without one.
    ClusterCidr(PerFamily<Option<IpNet>>),
    /// Source address in the pod range of this node.
    NodeCidr,
    /// Arrives on this interface.
    Bridge(Arc<str>),
    /// Arrives on an interface whose name starts so.
    InterfacePrefix(Arc<str>),
}

/// One entry of `--nodeport-addresses`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodePortAddress {
    Primary,
    Localhost,
    All,
    Cidr(IpNet),
    /// No address of this family. It is an entry all the same: a family without any would serve all of its addresses.
    Nothing(Family),
}

impl NodePortAddress {
    /// A keyword speaks of both families.
    pub fn speaks_of(&self, family: Family) -> bool {
        match self {
            NodePortAddress::Cidr(net) => Family::of(net.addr()) == family,
            NodePortAddress::Nothing(of) => *of == family,
            NodePortAddress::Primary | NodePortAddress::Localhost | NodePortAddress::All => true,
        }
    }

    /// Names loopback addresses of the family and nothing else. A wider range that happens to contain them does not.
    pub fn names_loopback(&self, family: Family) -> bool {
        match self {
            NodePortAddress::Localhost => true,
            NodePortAddress::Cidr(net) => {
                self.speaks_of(family) && net.network().is_loopback() && net.broadcast().is_loopback()
            }
            NodePortAddress::Primary | NodePortAddress::All | NodePortAddress::Nothing(_) => false,
        }
    }
}
