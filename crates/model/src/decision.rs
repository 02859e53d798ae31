// SPDX-License-Identifier: Apache-2.0

//! The nouns of a [`crate::Plan`]: where packets go to, and what becomes of them.
//!
//! A [`Frontend`] is where packets go to; its [`Decision`] says what becomes of them: one [`Verdict`] for
//! traffic from inside (this node's pods and processes) and one for traffic from outside. Everything a
//! dataplane must know is here; it never looks at a traffic policy, a hint or a Kubernetes type.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    sync::Arc,
};

use ipnet::IpNet;

use crate::{
    family::{Family, PerFamily, Protocol},
    service::ServicePortName,
    tuning::{Algorithm, Tuning},
};

/// Where packets go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Frontend {
    pub address: Address,
    pub protocol: Protocol,
    pub port: u16,
}

impl Frontend {
    pub fn family(&self) -> Family {
        match self.address {
            Address::Ip(ip) => Family::of(ip),
            Address::NodePort(family) => family,
        }
    }
}

impl fmt::Display for Frontend {
    /// `10.96.0.10:80/tcp`, `[fd00::a]:80/tcp`, `nodeport:30080/tcp IPv4`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Address::Ip(IpAddr::V4(ip)) => write!(f, "{ip}:{}/{}", self.port, self.protocol),
            Address::Ip(IpAddr::V6(ip)) => write!(f, "[{ip}]:{}/{}", self.port, self.protocol),
            Address::NodePort(family) => write!(f, "nodeport:{}/{} {family}", self.port, self.protocol),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Address {
    Ip(IpAddr),
    /// Every address of the node that [`NodePortScope`] admits.
    NodePort(Family),
}

/// What becomes of packets to one frontend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub service: Arc<ServicePortName>,
    /// Why the frontend exists; for people, order and metrics, never for a packet.
    pub role: Role,
    /// From this node's pods (where they can be told, see [`PodTraffic`]) and from its own processes.
    pub inside: Verdict,
    /// From anywhere else. Equal to `inside` for most frontends.
    pub outside: Verdict,
    pub affinity: Option<Affinity>,
    /// What the service asks for beyond its spec; `None` for most, and then the mode does as it always does.
    pub tuning: Option<Arc<Tuning>>,
    /// Who may connect at all, checked on the original source before anything else; everyone else is dropped.
    /// Disjoint, sorted, of the frontend's family; `None` is no restriction, an empty list lets nobody in.
    pub source_ranges: Option<Arc<[IpNet]>>,
    /// Whose endpoints traffic from outside may get: what made `outside` as it is. For names and people, never for a
    /// packet.
    pub reach: Reach,
    /// Served in this order on a cold start; lower first: default/kubernetes, cluster DNS, the rest.
    pub rank: u8,
}

impl Decision {
    /// How a backend is to be chosen for connections of clients that are not remembered.
    pub fn algorithm(&self) -> Algorithm {
        self.tuning.as_deref().map(|tuning| tuning.algorithm).unwrap_or_default()
    }

    /// Whether anybody's traffic is sent on to endpoints.
    pub fn forwards(&self) -> bool {
        [&self.inside, &self.outside].iter().any(|verdict| matches!(verdict, Verdict::Forward(_)))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    ClusterIp,
    ExternalIp,
    LoadBalancer,
    NodePort,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::ClusterIp => "cluster-ip",
            Role::ExternalIp => "external-ip",
            Role::LoadBalancer => "load-balancer",
            Role::NodePort => "node-port",
        })
    }
}

/// Whose endpoints may be chosen from, by the service's policy. They may happen to be the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reach {
    Cluster,
    /// Those of this node.
    Node,
}

/// Invariant: where `inside` and `outside` of a [`Decision`] differ, `inside` is a `Forward`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Forward(Forward),
    /// Answered with ICMP port unreachable, new connections only.
    Reject,
    /// Silently dropped, new connections only.
    Drop,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forward {
    pub pool: Arc<Pool>,
    pub masquerade: Masquerade,
}

/// When the source address is replaced by the node's. A hairpin connection always is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Masquerade {
    Never,
    /// Unless it comes from a pod, as [`PodTraffic`] tells. Never used in a family without `PodTraffic`.
    OffPods,
    Always,
}

/// The endpoints to choose from: in proportion to their weights, as [`Decision::algorithm`] says. Never empty inside a
/// [`Forward`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Sorted by address and port, without duplicates.
    pub backends: Box<[Backend]>,
}

impl Pool {
    /// Some backend shall get more than another.
    pub fn is_weighted(&self) -> bool {
        self.backends.windows(2).any(|pair| pair[0].weight != pair[1].weight)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Backend {
    pub address: IpAddr,
    pub port: u16,
    /// It runs on this node, so it may be its own client (hairpin).
    pub local: bool,
    /// Its share of new connections, beside those of the others; never 0 in a pool, since an endpoint of weight 0 is
    /// not in it.
    pub weight: u16,
}

impl fmt::Display for Backend {
    /// `10.1.0.5:8080`, `[fd00::5]:8080`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        SocketAddr::new(self.address, self.port).fmt(f)
    }
}

/// Session affinity by client address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Affinity {
    pub timeout_secs: NonZeroU32,
}

/// How a packet of one of this node's (or the cluster's) pods is told from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodTraffic {
    Source(IpNet),
    Interface(Arc<str>),
    InterfacePrefix(Arc<str>),
}

/// Which of the node's addresses serve node ports, in one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodePortScope {
    /// Every local address; loopback only where [`crate::Plan::loopback_node_ports`] says so.
    All,
    /// These; loopback addresses among them only if the operator named loopback.
    Only(BTreeSet<IpAddr>),
}

/// The health-check node port of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    pub port: u16,
    /// Distinct addresses of local ready endpoints, by family.
    pub local_endpoints: PerFamily<u32>,
    /// The families the service has a cluster IP of, and so the families to listen in.
    pub families: PerFamily<bool>,
}

/// Tracked flows to `frontend` that may have become stale (protocols without connections only).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowRule {
    pub frontend: Frontend,
    /// Flows to these go on, whatever else is said.
    pub serving: Arc<[Backend]>,
    /// `Some`: flows translated to one of these are stale, and no others. `None`, when the frontend is seen for
    /// the first time and what went before is unknown: flows translated to anything not serving are stale.
    pub gone: Option<Box<[Backend]>>,
    /// Flows that were never translated are stale too: the frontend has just got its first endpoint.
    pub untranslated: bool,
}
