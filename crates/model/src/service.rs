// SPDX-License-Identifier: Apache-2.0

//! A Service as the cluster states it, with addresses parsed and everything else left out.

use std::{fmt, net::IpAddr, sync::Arc};

use ipnet::IpNet;

use crate::{
    family::{Family, PerFamily, Protocol},
    tuning::Tuning,
    weights::Weights,
};

/// Namespace and name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceKey {
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

impl fmt::Display for ServiceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// One Service. Fields hold what was written; the rules that combine them are methods or live in `expand`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    pub key: ServiceKey,
    /// Creation time in seconds since 1970, 0 if unknown. The older of two services that claim one address keeps it.
    pub created_secs: i64,
    pub kind: ServiceKind,
    /// The cluster IP of each family, as [`cluster_ips_by_family`] derives it.
    pub cluster_ips: PerFamily<Option<IpAddr>>,
    pub ports: Box<[ServicePort]>,
    pub external_ips: Box<[IpAddr]>,
    /// Addresses in status.loadBalancer.ingress that packets reach as they are (ipMode VIP or unset).
    pub load_balancer_ips: Box<[IpAddr]>,
    pub source_ranges: SourceRanges,
    pub internal_policy: TrafficPolicy,
    /// As written; the type condition is applied by the model.
    pub external_policy: TrafficPolicy,
    /// Session affinity by client IP: the timeout in seconds.
    pub affinity_secs: Option<u32>,
    /// As written; used only for type LoadBalancer with external policy Local.
    pub health_check_node_port: Option<u16>,
    /// Wishes beyond the spec; `None` for most.
    pub tuning: Option<Arc<Tuning>>,
    pub weights: Weights,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceKind {
    ClusterIp,
    NodePort,
    LoadBalancer,
    ExternalName,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrafficPolicy {
    Cluster,
    Local,
}

/// loadBalancerSourceRanges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceRanges {
    /// Nothing was written: no restriction.
    Any,
    /// In a box, as few services have them.
    Only(Box<WrittenRanges>),
}

impl SourceRanges {
    /// Ranges that could all be parsed.
    pub fn only(nets: impl Into<Box<[IpNet]>>) -> SourceRanges {
        SourceRanges::Only(Box::new(WrittenRanges { nets: nets.into(), unread: PerFamily::default() }))
    }
}

/// A typo in a firewall must not open it: a family in which something was written and nothing could be parsed lets
/// nobody in, and where nothing could be parsed at all, neither does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenRanges {
    /// What could be parsed, both families.
    pub nets: Box<[IpNet]>,
    /// Something that could not be parsed is, or may be, of this family.
    pub unread: PerFamily<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Empty for the unnamed port.
    pub name: Arc<str>,
    pub protocol: Protocol,
    pub port: u16,
    pub node_port: Option<u16>,
}

/// The identity of a service port, as people and logs write it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServicePortName {
    pub service: ServiceKey,
    pub port: Arc<str>,
    pub protocol: Protocol,
}

impl fmt::Display for ServicePortName {
    /// `ns/name:port`, or `ns/name` for the unnamed port; the protocol is not shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.port.is_empty() {
            write!(f, "{}", self.service)
        } else {
            write!(f, "{}:{}", self.service, self.port)
        }
    }
}

/// Which cluster IP belongs to which family: `clusterIPs[i]` where `ipFamilies[i]` is that family; with no
/// `ipFamilies`, `clusterIP` counts for the family it has.
pub fn cluster_ips_by_family(
    cluster_ip: Option<IpAddr>,
    cluster_ips: &[Option<IpAddr>],
    ip_families: &[Family],
) -> PerFamily<Option<IpAddr>> {
    let mut by_family = PerFamily::default();
    if ip_families.is_empty() {
        if let Some(ip) = cluster_ip {
            by_family[Family::of(ip)] = Some(ip);
        }
        return by_family;
    }
    for (family, ip) in ip_families.iter().zip(cluster_ips) {
        let fits = ip.filter(|ip| Family::of(*ip) == *family);
        if by_family[*family].is_none() {
            by_family[*family] = fits;
        }
    }
    by_family
}
