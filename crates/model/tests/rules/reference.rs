// SPDX-License-Identifier: Apache-2.0

//! The simplest thing that could be right: all objects in maps, nothing kept between questions.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;
use model::{
    Conflict, Decision, EndpointSlice, Family, FlowRule, Frontend, HealthCheck, Kind, Node, NodePortScope,
    PerFamily, Plan, PodTraffic, Protocol, Service, ServiceKey, Settings, SliceKey, Update, Verdict, World,
};

use crate::universe::Step;

/// What a source has told, and what it is in the middle of telling.
#[derive(Default)]
pub(crate) struct Known {
    services: BTreeMap<ServiceKey, Service>,
    slices: BTreeMap<SliceKey, EndpointSlice>,
    node: Option<Node>,
    cidrs: BTreeMap<Arc<str>, Box<[IpNet]>>,
    host_addresses: Option<Box<[IpAddr]>>,
    /// Names seen in a list that is under way.
    seen: BTreeMap<Kind, BTreeSet<String>>,
}

impl Known {
    /// What a step means in messages.
    pub(crate) fn updates(&self, step: &Step) -> Vec<Update> {
        let Step::Relist { kind, kept, is_finished } = step else {
            let Step::Tell(update) = step else { unreachable!("there are two kinds of step") };
            return vec![update.clone()];
        };
        let objects = self.objects(*kind).into_iter().enumerate();
        let kept = objects.filter(|(at, _)| kept >> (at % 8) & 1 == 1).map(|(_, update)| update);
        let mut updates: Vec<Update> = [Update::Begin(*kind)].into_iter().chain(kept).collect();
        updates.extend(is_finished.then_some(Update::End(*kind)));
        updates
    }

    pub(crate) fn apply(&mut self, update: Update) {
        match update {
            Update::Begin(kind) => {
                self.seen.insert(kind, BTreeSet::new());
            }
            Update::End(kind) => self.end(kind),
            Update::Service(service) => {
                self.see(Kind::Service, &service.key.to_string());
                self.services.insert(service.key.clone(), service);
            }
            Update::ServiceGone(key) => drop(self.services.remove(&key)),
            Update::Slice(slice) => {
                self.see(Kind::EndpointSlice, &slice.key.to_string());
                self.slices.insert(slice.key.clone(), slice);
            }
            Update::SliceGone(key) => drop(self.slices.remove(&key)),
            Update::Node(node) => {
                self.see(Kind::Node, "");
                self.node = Some(self.node.iter().fold(node, remember));
            }
            Update::NodeGone => self.lose_node(),
            Update::ServiceCidr { name, cidrs } => {
                self.see(Kind::ServiceCidr, &name);
                self.cidrs.insert(name, cidrs);
            }
            Update::ServiceCidrGone(name) => drop(self.cidrs.remove(&name)),
            Update::HostAddresses(addresses) => self.host_addresses = Some(addresses),
        }
    }

    /// A world that has heard all this in one go, each kind backwards if asked.
    pub(crate) fn world(&self, settings: Settings, is_backwards: bool) -> World {
        let mut world = World::new(settings);
        let mut kinds = Kind::ALL;
        if is_backwards {
            kinds.reverse();
        }
        for kind in kinds {
            world.apply(Update::Begin(kind));
            let mut objects = self.objects(kind);
            if is_backwards {
                objects.reverse();
            }
            objects.into_iter().for_each(|update| world.apply(update));
            world.apply(Update::End(kind));
        }
        world.apply(Update::HostAddresses(self.host_addresses.clone().unwrap_or_default()));
        world
    }

    /// Where flows to a frontend may go on: every endpoint of its service port that any slice calls serving.
    pub(crate) fn serving(&self, frontend: &Frontend, decision: &Decision) -> BTreeSet<(IpAddr, u16)> {
        let name = &decision.service;
        let is_of = |slice: &&EndpointSlice| {
            slice.service == name.service
                && slice.key.namespace == name.service.namespace
                && slice.family == frontend.family()
        };
        let mut serving = BTreeSet::new();
        for slice in self.slices.values().filter(is_of) {
            for port in slice.ports.iter().filter(|p| p.name == name.port && p.protocol == name.protocol) {
                let fits = slice.endpoints.iter().filter(|e| Family::of(e.address) == slice.family);
                let served = fits.filter(|e| e.conditions.serving);
                serving.extend(served.map(|endpoint| (endpoint.address, port.port)));
            }
        }
        serving
    }

    fn objects(&self, kind: Kind) -> Vec<Update> {
        match kind {
            Kind::Service => self.services.values().cloned().map(Update::Service).collect(),
            Kind::EndpointSlice => self.slices.values().cloned().map(Update::Slice).collect(),
            Kind::Node => self.node.clone().map(Update::Node).into_iter().collect(),
            Kind::ServiceCidr => {
                let objects = self.cidrs.clone().into_iter();
                objects.map(|(name, cidrs)| Update::ServiceCidr { name, cidrs }).collect()
            }
        }
    }

    fn see(&mut self, kind: Kind, name: &str) {
        if let Some(seen) = self.seen.get_mut(&kind) {
            seen.insert(name.to_owned());
        }
    }

    fn lose_node(&mut self) {
        if let Some(node) = &mut self.node {
            node.eligible = false;
        }
    }

    fn end(&mut self, kind: Kind) {
        let Some(seen) = self.seen.remove(&kind) else { return };
        match kind {
            Kind::Service => self.services.retain(|key, _| seen.contains(&key.to_string())),
            Kind::EndpointSlice => self.slices.retain(|key, _| seen.contains(&key.to_string())),
            Kind::Node if seen.is_empty() => self.lose_node(),
            Kind::Node => {}
            Kind::ServiceCidr => self.cidrs.retain(|name, _| seen.contains(&**name)),
        }
    }
}

/// What a Node does not say of itself at all is as it was last said.
fn remember(mut node: Node, last: &Node) -> Node {
    if node.addresses == PerFamily::default() {
        node.addresses = last.addresses;
    }
    if node.pod_cidrs == PerFamily::default() {
        node.pod_cidrs = last.pod_cidrs;
    }
    node
}

/// All that a plan says, comparable.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Picture {
    pub(crate) frontends: BTreeMap<Frontend, Decision>,
    pub(crate) cluster_ips: BTreeSet<IpAddr>,
    pub(crate) local_backends: BTreeSet<IpAddr>,
    pub(crate) node_wide: Vec<(Option<PodTraffic>, NodePortScope, bool, Vec<IpNet>)>,
    pub(crate) health: BTreeMap<ServiceKey, HealthCheck>,
    pub(crate) conflicts: BTreeSet<Conflict>,
    /// For frontends of protocols without connections.
    pub(crate) serving: BTreeMap<Frontend, BTreeSet<(IpAddr, u16)>>,
}

impl Picture {
    pub(crate) fn of(plan: &Plan, known: &Known) -> Picture {
        let tracked = plan.frontends().filter(|(frontend, _)| frontend.protocol != Protocol::Tcp);
        Picture {
            frontends: plan.frontends().map(|(frontend, decision)| (*frontend, decision.clone())).collect(),
            cluster_ips: plan.cluster_ips().collect(),
            local_backends: plan.local_backends().collect(),
            node_wide: Family::BOTH
                .map(|family| {
                    let cidrs = plan.service_cidrs(family).to_vec();
                    let pods = plan.pod_traffic(family).cloned();
                    (pods, plan.node_ports(family).clone(), plan.loopback_node_ports(family), cidrs)
                })
                .into(),
            health: plan.health().clone(),
            conflicts: plan.conflicts().collect(),
            serving: tracked.map(|(f, decision)| (*f, known.serving(f, decision))).collect(),
        }
    }

    /// What of the flow rules can be said from two pictures: frontend, serving, gone, untranslated.
    pub(crate) fn stale_since(&self, before: &Picture, is_first: bool) -> Vec<Stale> {
        let tracked = before.serving.keys().chain(self.serving.keys()).copied().collect::<BTreeSet<_>>();
        let rule = |frontend: Frontend| {
            let served = before.serving.get(&frontend).cloned().unwrap_or_default();
            let serving = self.serving.get(&frontend).cloned().unwrap_or_default();
            let gone: BTreeSet<_> = served.difference(&serving).copied().collect();
            let [was, is] = [before, self].map(|picture| {
                let decision = picture.frontends.get(&frontend);
                decision
                    .map_or([false; 2], |d| [&d.inside, &d.outside].map(|v| matches!(v, Verdict::Forward(_))))
            });
            let untranslated = (is[0] && !was[0]) || (is[1] && !was[1]);
            let concerns_any = is_first || !gone.is_empty() || untranslated;
            concerns_any.then_some((frontend, serving, (!is_first).then_some(gone), untranslated))
        };
        tracked.into_iter().filter_map(rule).collect()
    }
}

pub(crate) type Stale = (Frontend, BTreeSet<(IpAddr, u16)>, Option<BTreeSet<(IpAddr, u16)>>, bool);

pub(crate) fn stale(rule: &FlowRule) -> Stale {
    let places = |backends: &[model::Backend]| backends.iter().map(|b| (b.address, b.port)).collect();
    (rule.frontend, places(&rule.serving), rule.gone.as_deref().map(places), rule.untranslated)
}
