// SPDX-License-Identifier: Apache-2.0

//! What this node ought to do, in words no dataplane owns, kept up to date change by change.
//!
//! [`Plan::update`] looks again at what is dirty, and only at that, and tells exactly what became different. A
//! plan that has followed any sequence of updates equals the plan made from the final [`World`] at once.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use hashbrown::HashMap;
use ipnet::IpNet;

pub use crate::decision::{
    Address, Affinity, Backend, Decision, FlowRule, Forward, Frontend, HealthCheck, Masquerade,
    NodePortScope, PodTraffic, Pool, Role, Verdict,
};
use crate::{
    claims::Claims,
    counted::Counted,
    expand::{Expansion, expand},
    family::{Family, PerFamily},
    flows,
    service::{ServiceKey, ServicePortName},
    vantage::{self, Vantage},
    world::{Dirty, World},
};

/// What one [`Plan::update`] changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Added, removed or with another decision; sorted, without duplicates.
    pub frontends: Vec<Frontend>,
    /// Cluster IPs that came or went; sorted.
    pub cluster_ips: Vec<IpAddr>,
    /// Addresses of local backends that came or went; sorted.
    pub local_backends: Vec<IpAddr>,
    /// Pod traffic, node-port scope or service CIDRs are no longer what they were.
    pub node_wide: bool,
    /// Flows that became stale, by frontend.
    pub flows: Vec<FlowRule>,
    /// Services whose health check came, went or counts otherwise; sorted.
    pub health: Vec<ServiceKey>,
    /// Claims that became unserved, or have lost to another owner than before, by frontend.
    pub conflicts: Vec<Conflict>,
    /// Passed on from [`Dirty`]: when the changes that led here happened. Not a change by itself.
    pub trigger_times_nanos: Vec<i64>,
}

impl Changes {
    /// Nothing became different: no dataplane has work.
    pub fn is_empty(&self) -> bool {
        self.frontends.is_empty()
            && self.cluster_ips.is_empty()
            && self.local_backends.is_empty()
            && !self.node_wide
            && self.flows.is_empty()
            && self.health.is_empty()
            && self.conflicts.is_empty()
    }
}

/// Two service ports claim one frontend.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conflict {
    pub frontend: Frontend,
    /// Decides.
    pub owner: Arc<ServicePortName>,
    /// Has no say about this frontend; it gets it when all better claims are gone.
    pub loser: Arc<ServicePortName>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Plan {
    pub(crate) claims: Claims,
    /// What each service has in here, to be taken back when it changes; nothing of those that are not proxied.
    services: HashMap<ServiceKey, Box<[Owned]>>,
    pub(crate) cluster_ips: Counted<IpAddr>,
    pub(crate) local_backends: Counted<IpAddr>,
    pub(crate) health: BTreeMap<ServiceKey, HealthCheck>,
    pub(crate) node_wide: PerFamily<NodeWide>,
    has_begun: bool,
}

impl Plan {
    /// A plan that serves nothing, not even node ports.
    pub fn new() -> Plan {
        Plan::default()
    }

    /// The plan of a world, from scratch.
    pub fn from_world(world: &World) -> Plan {
        let mut plan = Plan::new();
        plan.update(world, world.everything());
        plan
    }

    /// Looks again at what is dirty. The first call takes everything it finds as never seen before, so it should
    /// be made with a complete world, and with all that was ever dirty in it.
    pub fn update(&mut self, world: &World, dirty: Dirty) -> Changes {
        let is_first = !std::mem::replace(&mut self.has_begun, true);
        let vantage = Vantage::of(world);
        let mut changes = Changes { trigger_times_nanos: dirty.trigger_times_nanos, ..Changes::default() };
        if dirty.node_wide {
            let node_wide = PerFamily::from_fn(|family| NodeWide::of(world, &vantage, family));
            changes.node_wide = node_wide != self.node_wide;
            self.node_wide = node_wide;
        }
        let mut gone = Vec::new();
        if dirty.all_services {
            gone.extend(self.services.keys().filter(|key| world.service(key).is_none()).cloned());
        }
        let renew = |key: &ServiceKey| {
            let expansion = world.service(key).map(|service| expand(service, world, &vantage));
            if self.replace(key, expansion.unwrap_or_default()) {
                changes.health.push(key.clone());
            }
        };
        if dirty.all_services {
            world.services().map(|service| &service.key).chain(&gone).for_each(renew);
        } else {
            dirty.services.iter().for_each(renew);
        }
        changes.health.sort();
        changes.cluster_ips = self.cluster_ips.settle();
        changes.local_backends = self.local_backends.settle();
        self.settle_frontends(is_first, &mut changes);
        changes
    }

    /// Every frontend with its decision, sorted.
    pub fn frontends(&self) -> impl Iterator<Item = (&Frontend, &Decision)> {
        self.claims.owners().iter().map(|(frontend, claim)| (frontend, &claim.decision))
    }

    /// How many frontends there are; known without counting.
    pub fn frontend_count(&self) -> usize {
        self.claims.owners().len()
    }

    pub fn decision(&self, frontend: &Frontend) -> Option<&Decision> {
        self.claims.owner(frontend).map(|claim| &claim.decision)
    }

    /// The cluster IPs of all proxied services, sorted. Ports of them that are no frontend are rejected.
    pub fn cluster_ips(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.cluster_ips.iter()
    }

    pub fn has_cluster_ip(&self, address: &IpAddr) -> bool {
        self.cluster_ips.contains(address)
    }

    /// Addresses of the backends on this node that some frontend reaches, sorted. A connection from one of them
    /// to itself is masqueraded.
    pub fn local_backends(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.local_backends.iter()
    }

    pub fn is_local_backend(&self, address: &IpAddr) -> bool {
        self.local_backends.contains(address)
    }

    /// How pods are told from others; `None` where they cannot be.
    pub fn pod_traffic(&self, family: Family) -> Option<&PodTraffic> {
        self.node_wide[family].pod_traffic.as_ref()
    }

    pub fn node_ports(&self, family: Family) -> &NodePortScope {
        &self.node_wide[family].node_ports
    }

    /// The operator named loopback among the node-port addresses. With [`NodePortScope::All`] node ports are then
    /// served on every loopback address too; with `Only`, on those in the set.
    pub fn loopback_node_ports(&self, family: Family) -> bool {
        self.node_wide[family].loopback
    }

    /// All service CIDRs, disjoint and sorted. Addresses in them that are no cluster IP are dropped.
    pub fn service_cidrs(&self, family: Family) -> &[IpNet] {
        &self.node_wide[family].service_cidrs
    }

    /// The health checks of all services that have one.
    pub fn health(&self) -> &BTreeMap<ServiceKey, HealthCheck> {
        &self.health
    }

    /// Every claim to a frontend that another service port owns, by frontend.
    pub fn conflicts(&self) -> impl Iterator<Item = Conflict> + '_ {
        self.claims.conflicts()
    }

    /// Puts what a service is now in the place of what it was, and returns whether its health check differs.
    fn replace(&mut self, key: &ServiceKey, new: Expansion) -> bool {
        if self.has_the_same(key, &new) {
            new.claims.into_iter().for_each(|(frontend, claim)| self.claims.renew(frontend, claim));
        } else {
            self.withdraw(key);
            let owned = Owned::of(&new).collect::<Box<_>>();
            if !owned.is_empty() {
                self.services.insert(key.clone(), owned);
            }
            new.claims.into_iter().for_each(|(frontend, claim)| self.claims.insert(frontend, claim));
            new.cluster_ips.iter().for_each(|ip| self.cluster_ips.add(*ip));
            new.local_backends.iter().for_each(|ip| self.local_backends.add(*ip));
        }
        let health = match new.health {
            Some(health) => self.health.insert(key.clone(), health),
            None => self.health.remove(key),
        };
        health.as_ref() != self.health.get(key)
    }

    /// Whether the service had just these frontends and addresses before, and shares the frontends with nobody: so it is
    /// when endpoints on other nodes come and go, which is nearly always.
    fn has_the_same(&self, key: &ServiceKey, new: &Expansion) -> bool {
        let same = |owned: &[Owned]| owned.iter().copied().eq(Owned::of(new));
        self.services.get(key).is_some_and(|owned| same(owned))
            && new.claims.iter().all(|(frontend, _)| self.claims.is_sole(frontend, key))
    }

    /// Takes back all that a service has in here, but for its health check.
    fn withdraw(&mut self, key: &ServiceKey) {
        for owned in self.services.remove(key).unwrap_or_default() {
            match owned {
                Owned::Frontend(frontend) => self.claims.remove(frontend, key),
                Owned::ClusterIp(ip) => self.cluster_ips.remove(ip),
                Owned::LocalBackend(ip) => self.local_backends.remove(ip),
            }
        }
    }

    /// Compares the touched frontends with what they were.
    fn settle_frontends(&mut self, is_first: bool, changes: &mut Changes) {
        self.claims.settle(|claims, frontend, before| {
            let was = before.map(|before| &before.owner);
            let is = claims.owner(&frontend);
            if was.map(|claim| &claim.decision) != is.map(|claim| &claim.decision) {
                changes.frontends.push(frontend);
            }
            changes.flows.extend(flows::stale(frontend, was, is, is_first));
            changes.conflicts.extend(claims.new_conflicts(frontend, before));
        });
    }
}

/// Something that a service has in the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owned {
    Frontend(Frontend),
    ClusterIp(IpAddr),
    LocalBackend(IpAddr),
}

impl Owned {
    fn of(expansion: &Expansion) -> impl Iterator<Item = Owned> {
        let frontends = expansion.claims.iter().map(|(frontend, _)| Owned::Frontend(*frontend));
        let cluster_ips = expansion.cluster_ips.iter().copied().map(Owned::ClusterIp);
        let local_backends = expansion.local_backends.iter().copied().map(Owned::LocalBackend);
        frontends.chain(cluster_ips).chain(local_backends)
    }
}

/// What holds for all services of one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeWide {
    pub(crate) pod_traffic: Option<PodTraffic>,
    pub(crate) node_ports: NodePortScope,
    pub(crate) loopback: bool,
    pub(crate) service_cidrs: Vec<IpNet>,
}

impl NodeWide {
    fn of(world: &World, vantage: &Vantage, family: Family) -> NodeWide {
        let (node_ports, loopback) = vantage::node_ports(world, vantage.node_ips[family], family);
        NodeWide {
            pod_traffic: vantage.pod_traffic[family].clone(),
            node_ports,
            loopback,
            service_cidrs: vantage::service_cidrs(world, family),
        }
    }
}

impl Default for NodeWide {
    fn default() -> NodeWide {
        let node_ports = NodePortScope::Only(BTreeSet::new());
        NodeWide { pod_traffic: None, node_ports, loopback: false, service_cidrs: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claims::Claim;

    /// Ten thousand services have ten thousand of each at least, and a hundred thousand backends.
    #[test]
    #[cfg(target_pointer_width = "64")]
    fn the_hot_types_stay_small() {
        assert_eq!(size_of::<Backend>(), 22);
        assert_eq!(size_of::<Frontend>(), 20);
        assert_eq!(size_of::<Owned>(), 20);
        assert_eq!(size_of::<Decision>(), 72);
        assert_eq!(size_of::<Claim>(), 96);
        assert_eq!(size_of::<crate::Service>(), 176);
    }
}
