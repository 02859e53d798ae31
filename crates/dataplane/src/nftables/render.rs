// SPDX-License-Identifier: Apache-2.0

//! From the Plan to what the table should hold. Pure.

use std::{collections::BTreeSet, net::IpAddr};

use model::{
    Algorithm, Decision, Family, Forward, Frontend, Masquerade, NodePortScope, Plan, PodTraffic, Scheduler,
    SchedulerFlags, Verdict,
};

use super::{
    entry::{Entry, Placed, Refusal, Target},
    frame::{self, InUse, Surroundings},
    layout::{Container, Mark, Side, Space},
    program::{Bytes, Program},
    slots::{self, Class, Draw},
};
use crate::Loopback;

/// What a frontend should put into the table. Endpoints keep the slots they have in `previous`.
pub(super) fn entry(frontend: &Frontend, decision: &Decision, previous: Option<&Entry>) -> Entry {
    let mut entry = Entry { sources: decision.source_ranges.clone(), ..Entry::default() };
    if entry.sources.is_some() && Space::of(frontend) == Space::NodePort {
        // No Plan has that. Should one ever, it is better closed than open to all.
        return Entry { refusal: Some(Refusal::Drop), ..Entry::default() };
    }
    let target = |side, forward: &Forward| {
        let previous = previous.and_then(|entry| entry.target(side));
        let pool = &forward.pool.backends;
        let Algorithm { scheduler, .. } = decision.algorithm();
        let shares = slots::shares(pool, scheduler.is_none_or(Scheduler::weighs));
        let slots = slots::assign(frontend.family(), previous.map(|target| &target.slots), pool, &shares);
        let class = Class::of(slots.len(), previous.and_then(|target| target.draw.class()));
        let draw = draw(decision.algorithm(), class);
        let mark = match forward.masquerade {
            Masquerade::Never => Mark::Never,
            Masquerade::OffPods => Mark::OffPods,
            Masquerade::Always => Mark::Always,
        };
        Some(Target { mark, draw, slots }).filter(|target| !target.slots.is_empty())
    };
    match &decision.outside {
        Verdict::Forward(forward) => entry.everyone = target(Side::Everyone, forward),
        Verdict::Reject => entry.refusal = Some(Refusal::Reject),
        Verdict::Drop => entry.refusal = Some(Refusal::Drop),
    }
    if let Verdict::Forward(forward) = &decision.inside
        && decision.inside != decision.outside
    {
        entry.inside = target(Side::Inside, forward);
    }
    if entry.everyone.is_none() && entry.refusal.is_none() {
        // A pool without endpoints of this family: no Plan has that either.
        entry.refusal = Some(Refusal::Reject);
    }
    if entry.everyone.is_some() || entry.inside.is_some() {
        entry.sticky_secs = decision.affinity.map(|affinity| affinity.timeout_secs);
    }
    entry
}

/// The schedulers that are followed. What others ask for is drawn at random.
pub(super) const SCHEDULERS: [Scheduler; 5] = [
    Scheduler::Random,
    Scheduler::RoundRobin,
    Scheduler::WeightedRoundRobin,
    Scheduler::SourceHash,
    Scheduler::Maglev,
];

/// Whether a scheduler is followed by drawing by a hash of the client.
pub(super) fn is_by_hash(scheduler: Scheduler) -> bool {
    matches!(scheduler, Scheduler::SourceHash | Scheduler::Maglev)
}

/// An endpoint keeps its slot while others come and go, so a hash of the client is all that Maglev's table is for.
/// That another endpoint is taken where one is not available needs no flag: such a one has no slot.
fn draw(algorithm: Algorithm, class: Class) -> Draw {
    match algorithm.scheduler {
        Some(Scheduler::RoundRobin | Scheduler::WeightedRoundRobin) => Draw::Turns,
        Some(scheduler) if is_by_hash(scheduler) => {
            Draw::Hash { class, port: algorithm.flags.contains(SchedulerFlags::PORT) }
        }
        _ => Draw::Random(class),
    }
}

/// What holds for all services, as the rules need it.
pub(super) fn surroundings(plan: &Plan, family: Family, mark: u32, loopback: Loopback) -> Surroundings {
    Surroundings {
        family,
        mark,
        pods: plan.pod_traffic(family).filter(|pods| tells_something(pods)).cloned(),
        all_addresses: matches!(plan.node_ports(family), NodePortScope::All),
        loopback,
        service_cidrs: plan.service_cidrs(family).to_vec(),
        counted: false,
    }
}

/// The kernel does not compare with nothing. An empty name would be every interface, and so tells no pods.
fn tells_something(pods: &PodTraffic) -> bool {
    match pods {
        PodTraffic::Source(_) => true,
        PodTraffic::Interface(name) | PodTraffic::InterfacePrefix(name) => !name.is_empty(),
    }
}

/// The addresses that serve node ports, where not all do. Loopback only where it can be served.
pub(super) fn node_port_addresses(plan: &Plan, family: Family, loopback: Loopback) -> BTreeSet<IpAddr> {
    match plan.node_ports(family) {
        NodePortScope::All => BTreeSet::new(),
        NodePortScope::Only(addresses) => addresses
            .iter()
            .filter(|address| loopback.is_served() || !address.is_loopback())
            .copied()
            .collect(),
    }
}

/// The whole table of one family, from scratch: for the simulator, for people, and to compare with.
pub fn program(plan: &Plan, family: Family, mark: u32, loopback: Loopback) -> Program {
    let mut in_use = InUse::default();
    let mut elements = Vec::new();
    let of_family = |address: &IpAddr| Family::of(*address) == family;
    for (frontend, decision) in plan.frontends().filter(|(frontend, _)| frontend.family() == family) {
        let entry = entry(frontend, decision, None);
        in_use.add(frontend, &entry);
        elements.extend(entry.elements(frontend));
    }
    elements.extend(plan.cluster_ips().filter(of_family).map(|ip| plain(Container::ClusterIps, ip)));
    elements.extend(plan.local_backends().filter(of_family).map(|ip| plain(Container::Hairpin, ip)));
    let addresses = node_port_addresses(plan, family, loopback);
    elements.extend(addresses.into_iter().map(|ip| plain(Container::NodePortAddresses, ip)));

    let frame = frame::frame(&surroundings(plan, family, mark, loopback), &in_use);
    let mut program = Program { family, frame, elements: Default::default() };
    for placed in elements {
        let set = program.elements.entry(placed.container.name().into_owned()).or_default();
        set.insert(placed.key, placed.element());
    }
    program
}

/// An element of a set of addresses, or of pairs of one address with itself.
pub(super) fn plain(container: Container, address: IpAddr) -> Placed {
    let key = Bytes::EMPTY.address(address);
    let key = if container == Container::Hairpin { key.address(address) } else { key };
    Placed::new(container, key)
}

/// A frontend in words, for an error message.
pub(super) fn describe(frontend: &Frontend, decision: Option<&Decision>) -> String {
    match decision {
        Some(decision) => format!("service {} at {frontend}", decision.service),
        None => format!("{frontend}, which is being removed"),
    }
}
