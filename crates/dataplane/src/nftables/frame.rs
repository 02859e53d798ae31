// SPDX-License-Identifier: Apache-2.0

//! The rules. What of the table does not change with every service: sets without their elements, and chains.
//!
//! README.md says which hook does what, and why there.

use std::{collections::BTreeSet, num::NonZeroU32};

use ipnet::IpNet;
use model::{Family, Frontend, PodTraffic};

use super::{
    entry::Entry,
    layout::{Container, Kind, Mark, Side, Space, Way},
    program::{Chain, ChainKind, Field, Frame, Hook, Rule, Statement},
    slots::Class,
};
use crate::{
    Loopback,
    names::{chain, hook},
};

/// What the rules depend on, for all services at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Surroundings {
    pub(super) family: Family,
    /// The mark's bit that means "masquerade".
    pub(super) mark: u32,
    pub(super) pods: Option<PodTraffic>,
    /// Node ports are served on all addresses, not on chosen ones.
    pub(super) all_addresses: bool,
    /// What becomes of loopback addresses.
    pub(super) loopback: Loopback,
    pub(super) service_cidrs: Vec<IpNet>,
    /// Connections are counted.
    pub(super) counted: bool,
}

/// Chains and sets that exist because some frontend needs them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct InUse {
    pub(super) kinds: BTreeSet<Kind>,
    pub(super) timeouts_secs: BTreeSet<u32>,
    /// Some frontend has source ranges.
    pub(super) firewall: bool,
}

impl InUse {
    /// Adds what an entry needs. With the first entry of a map come its drawing chains of all usual classes: a rule
    /// that uses a map makes the kernel walk all elements, 0.2 s for 100,000, so it had better come early.
    pub(super) fn add(&mut self, frontend: &Frontend, entry: &Entry) {
        let space = Space::of(frontend);
        for side in Side::BOTH {
            let Some(kind) = entry.kind(frontend, side) else { continue };
            match kind.way {
                Way::Random(_) => {
                    let ways = Class::usual().map(Way::Random);
                    self.kinds.extend(ways.map(|way| Kind::drawing(space, side, way)));
                }
                Way::Hash { port, .. } => {
                    let ways = Class::usual().map(|class| Way::Hash { class, port });
                    self.kinds.extend(ways.map(|way| Kind::drawing(space, side, way)));
                }
                Way::Turns { .. } => {}
            }
            self.kinds.extend([Kind::drawing(space, side, kind.way), kind]);
        }
        self.timeouts_secs.extend(entry.sticky_secs.map(u32::from));
        self.firewall |= entry.sources.is_some();
    }

    /// All that an entry needs is here.
    pub(super) fn covers(&self, frontend: &Frontend, entry: &Entry) -> bool {
        let has = |side| entry.kind(frontend, side).is_none_or(|kind| self.kinds.contains(&kind));
        let remembers = |secs: NonZeroU32| self.timeouts_secs.contains(&secs.get());
        Side::BOTH.into_iter().all(has)
            && entry.sticky_secs.is_none_or(remembers)
            && (self.firewall || entry.sources.is_none())
    }
}

/// All sets and chains.
pub(super) fn frame(around: &Surroundings, in_use: &InUse) -> Frame {
    let mut containers = Container::FIXED.to_vec();
    let on_demand: BTreeSet<Container> = in_use.kinds.iter().map(Kind::container).collect();
    containers.extend(on_demand.into_iter().filter(|container| !Container::FIXED.contains(container)));
    for secs in &in_use.timeouts_secs {
        containers.extend(Space::BOTH.map(|space| Container::Sticky(space, *secs)));
    }
    let mut chains = Vec::new();
    chains.extend(firewall(around, in_use));
    chains.extend(translation(around));
    chains.extend(refusals(around, in_use));
    chains.extend(affinity(in_use));
    chains.push(masquerading(around));
    chains.push(mark_off_pods(around));
    chains.push(recall_affinity());
    chains.extend(in_use.kinds.iter().map(|kind| balancing(around, kind)));
    let definition = |container: &Container| container.definition(around.family, around.counted);
    Frame { sets: containers.iter().map(definition).collect(), chains }
}

/// Source ranges, and the guard of loopback addresses: both look at what the sender wrote, so they come before any
/// translation.
fn firewall(around: &Surroundings, in_use: &InUse) -> Vec<Chain> {
    let mut ranged = Space::Service.key();
    ranged.push(Field::Source);
    let ranges: Rule = [
        Statement::IsNew,
        contained(Space::Service.key(), Container::Firewalled, true),
        contained(ranged, Container::SourceRanges, false),
        Statement::Drop,
    ]
    .into();
    let mut prerouting = Vec::new();
    prerouting.extend(around.loopback.is_guarded().then(|| guard(around.family)));
    prerouting.extend(in_use.firewall.then_some(ranges.clone()));
    let mut chains = Vec::new();
    if !prerouting.is_empty() {
        chains.push(filter(hook::FIREWALL_PREROUTING, Hook::Prerouting, BEFORE_DSTNAT, prerouting));
    }
    if in_use.firewall {
        chains.push(filter(hook::FIREWALL_OUTPUT, Hook::Output, BEFORE_DSTNAT, vec![ranges]));
    }
    chains
}

/// The kernel refuses packets from the network to 127.0.0.0/8 unless told to route them; then we do. Answers to connections
/// from loopback still bear the node's address at this point.
pub(crate) fn guard(family: Family) -> Rule {
    [
        Statement::Arrives { on: "lo".into(), prefix: false, is: false },
        Statement::Within { field: Field::Destination, net: loopback_net(family), is: true },
        Statement::Drop,
    ]
    .into()
}

/// From frontends to balancing chains. Traffic from inside is looked up first in the maps of frontends that
/// treat it otherwise. These lookups are side by side and not one behind the other, since the kernel validates
/// every path through verdict maps: one map behind another would cost it the product of both.
fn translation(around: &Surroundings) -> [Chain; 2] {
    let vmap = |conditions: &[Statement], space: Space, side| {
        let map = Container::Verdicts(space, side).name().into_owned();
        let mut rule = conditions.to_vec();
        rule.push(Statement::Vmap { key: space.key(), map });
        Rule(rule)
    };
    let rules = |inside: Option<Statement>, node_port: Vec<Statement>| {
        let from_inside = inside.as_ref().map(|inside| [std::slice::from_ref(inside), &node_port].concat());
        let mut rules = Vec::new();
        rules.extend(inside.map(|inside| vmap(&[inside], Space::Service, Side::Inside)));
        rules.push(vmap(&[], Space::Service, Side::Everyone));
        rules.extend(from_inside.map(|conditions| vmap(&conditions, Space::NodePort, Side::Inside)));
        rules.push(vmap(&node_port, Space::NodePort, Side::Everyone));
        rules
    };
    let local = |loopback| match around.all_addresses {
        true => [vec![Statement::IsLocal(Field::Destination)], addresses(around, loopback)].concat(),
        false => addresses(around, loopback),
    };
    let pods = around.pods.as_ref().map(|pods| from_pods(pods, true));
    let own_process = Some(Statement::IsLocal(Field::Source));
    [
        nat(hook::NAT_PREROUTING, Hook::Prerouting, DSTNAT, rules(pods, local(false))),
        nat(hook::NAT_OUTPUT, Hook::Output, DSTNAT, rules(own_process, local(around.loopback.is_served()))),
    ]
}

/// The packet's destination is one of the addresses that serve node ports, given that it is local.
fn addresses(around: &Surroundings, loopback: bool) -> Vec<Statement> {
    let field = Field::Destination;
    if !around.all_addresses {
        return vec![contained(vec![field], Container::NodePortAddresses, true)];
    }
    let outside = Statement::Within { field, net: loopback_net(around.family), is: false };
    if loopback { Vec::new() } else { vec![outside] }
}

/// Frontends without endpoints, ports that a cluster IP does not have, and free addresses of the service range.
fn refusals(around: &Surroundings, in_use: &InUse) -> Vec<Chain> {
    let refuse = |conditions: Vec<Statement>, space: Space, container, how| {
        let mut rule = conditions;
        rule.extend([contained(space.key(), container, true), how]);
        Rule(rule)
    };
    let check = |conditions: Vec<Statement>, space| {
        vec![
            refuse(conditions.clone(), space, Container::Reject(space), Statement::Reject),
            refuse(conditions, space, Container::Drop(space), Statement::Drop),
        ]
    };
    let field = Field::Destination;
    let mut cluster_ips: Vec<Rule> =
        vec![[contained(vec![field], Container::ClusterIps, true), Statement::Reject].into()];
    cluster_ips.extend(
        around
            .service_cidrs
            .iter()
            .map(|net| [Statement::Within { field, net: *net, is: true }, Statement::Drop].into()),
    );

    let jump = |to: &str| Rule::from([Statement::IsNew, Statement::Jump(to.into())]);
    let mut input = vec![jump(chain::CHECK_NODE_PORTS), jump(chain::CHECK_SERVICES)];
    // What is translated to an endpoint in the node's own network ends here and never sees postrouting.
    input.extend((!in_use.timeouts_secs.is_empty()).then(record));
    let pass = vec![jump(chain::CHECK_SERVICES), jump(chain::CHECK_CLUSTER_IPS)];
    // What this node's processes send, and userspace mode has steered to itself, still has the address of the service:
    // while one of the two modes takes over from the other, the rules of both are there.
    let unsteered = Statement::IsUnmarked(crate::names::userspace::MARK);
    let sent = vec![
        jump(chain::CHECK_SERVICES),
        [Statement::IsNew, unsteered, Statement::Jump(chain::CHECK_CLUSTER_IPS.into())].into(),
    ];
    let serves = around.loopback.is_served();
    vec![
        filter(hook::FILTER_INPUT, Hook::Input, FILTER, input),
        filter(hook::FILTER_FORWARD, Hook::Forward, FILTER, pass),
        filter(hook::FILTER_OUTPUT, Hook::Output, FILTER, sent),
        Chain::regular(chain::CHECK_NODE_PORTS, check(addresses(around, serves), Space::NodePort)),
        Chain::regular(chain::CHECK_SERVICES, check(Vec::new(), Space::Service)),
        Chain::regular(chain::CHECK_CLUSTER_IPS, cluster_ips),
    ]
}

/// Remembers the endpoint a client got. Only pairs of frontend and endpoint that are in force are remembered: a
/// connection under way while its endpoint is removed cannot bring the endpoint back.
fn affinity(in_use: &InUse) -> Vec<Chain> {
    if in_use.timeouts_secs.is_empty() {
        return Vec::new();
    }
    let update = |space: Space, secs| {
        let mut pair = space.original_key();
        pair.extend([Field::Destination, Field::Port]);
        let mut key = vec![Field::OriginalSource];
        key.extend(Space::Service.original_key());
        let update = Statement::Update {
            map: Container::Affinity.name().into_owned(),
            key,
            timeout_secs: secs,
            value: vec![Field::Destination, Field::Port],
        };
        [contained(pair, Container::Sticky(space, secs), true), update].into()
    };
    let timeouts = in_use.timeouts_secs.iter();
    let rules = timeouts.flat_map(|secs| Space::BOTH.map(|space| update(space, *secs))).collect();
    vec![
        filter(hook::AFFINITY_POSTROUTING, Hook::Postrouting, BEFORE_SRCNAT, vec![record()]),
        Chain::regular(chain::RECORD_AFFINITY, rules),
    ]
}

/// Sends a client that is remembered to its endpoint, which ends the balancing chain that jumped here.
fn recall_affinity() -> Chain {
    let mut key = vec![Field::Source];
    key.extend(Space::Service.key());
    let recall = Statement::Dnat { key, map: Container::Affinity.name().into_owned() };
    Chain::regular(chain::RECALL_AFFINITY, vec![[recall].into()])
}

fn record() -> Rule {
    [Statement::IsNew, Statement::IsTranslated, Statement::Jump(chain::RECORD_AFFINITY.into())].into()
}

fn masquerading(around: &Surroundings) -> Chain {
    let marked = [Statement::IsMarked(around.mark), Statement::Unmark(around.mark), Statement::Masquerade];
    let pair = vec![Field::Source, Field::Destination];
    let hairpin = [Statement::IsTranslated, contained(pair, Container::Hairpin, true), Statement::Masquerade];
    let mut rules = vec![marked.into(), hairpin.into()];
    if around.loopback.is_served() {
        // No answer would find its way back to 127.0.0.1.
        let net = loopback_net(around.family);
        let from_loopback = Statement::Within { field: Field::Source, net, is: true };
        rules.push([from_loopback, Statement::IsTranslated, Statement::Masquerade].into());
    }
    nat(hook::NAT_POSTROUTING, Hook::Postrouting, SRCNAT, rules)
}

/// A chain of its own, so that a change of the pods' range rewrites one rule and not every balancing chain.
fn mark_off_pods(around: &Surroundings) -> Chain {
    let mut rule: Vec<Statement> = around.pods.iter().map(|pods| from_pods(pods, false)).collect();
    rule.push(Statement::Mark(around.mark));
    Chain::regular(chain::MARK_OFF_PODS, vec![Rule(rule)])
}

/// Marks, looks for the client's endpoint, and goes on to the chain that draws.
fn balancing(around: &Surroundings, kind: &Kind) -> Chain {
    let drawing = Kind::drawing(kind.space, kind.side, kind.way);
    if *kind == drawing {
        return Chain::regular(kind.name(), draws(kind));
    }
    let mut rules: Vec<Rule> = match kind.mark {
        Mark::Never => Vec::new(),
        Mark::OffPods => vec![[Statement::Jump(chain::MARK_OFF_PODS.into())].into()],
        Mark::Always => vec![[Statement::Mark(around.mark)].into()],
    };
    if kind.sticky {
        rules.push([Statement::Jump(chain::RECALL_AFFINITY.into())].into());
    }
    rules.push([Statement::Goto(drawing.name())].into());
    Chain::regular(kind.name(), rules)
}

/// Draws until a filled slot is met; see [`super::slots`].
fn draws(kind: &Kind) -> Vec<Rule> {
    let draw = |field| {
        let mut key = kind.space.key();
        key.push(field);
        let map = kind.container().name().into_owned();
        Rule::from([Statement::Dnat { key, map }])
    };
    let fields = |class: Class, field: &dyn Fn(u32, u32) -> Field| -> Vec<Rule> {
        let (size, tries) = (class.size(), class.tries());
        let last = (size > 1).then(|| field(class.last_draw(), tries));
        (0..tries).map(|attempt| field(size, attempt)).chain(last).map(draw).collect()
    };
    match kind.way {
        Way::Random(class) => fields(class, &|below, _| Field::Random(below)),
        // Each attempt is another hash, but the same for the same client.
        Way::Hash { class, port } => {
            fields(class, &|below, attempt| Field::Hash { below, seed: HASH_SEED + attempt, port })
        }
        Way::Turns { slots, .. } => vec![draw(Field::Turn(slots))],
    }
}

fn from_pods(pods: &PodTraffic, is: bool) -> Statement {
    match pods {
        PodTraffic::Source(net) => Statement::Within { field: Field::Source, net: *net, is },
        PodTraffic::Interface(name) => Statement::Arrives { on: name.to_string(), prefix: false, is },
        PodTraffic::InterfacePrefix(name) => Statement::Arrives { on: name.to_string(), prefix: true, is },
    }
}

fn contained(key: Vec<Field>, container: Container, is: bool) -> Statement {
    Statement::Contained { key, set: container.name().into_owned(), is }
}

fn filter(name: &str, hook: Hook, priority: i32, rules: Vec<Rule>) -> Chain {
    Chain::base(name, ChainKind::Filter, hook, priority, rules)
}

fn nat(name: &str, hook: Hook, priority: i32, rules: Vec<Rule>) -> Chain {
    Chain::base(name, ChainKind::Nat, hook, priority, rules)
}

/// The loopback addresses of a family.
pub(super) fn loopback_net(family: Family) -> IpNet {
    match family {
        Family::V4 => IpNet::new_assert([127, 0, 0, 0].into(), 8),
        Family::V6 => IpNet::new_assert(std::net::Ipv6Addr::LOCALHOST.into(), 128),
    }
}

/// `dstnat`, the priority at which every tool translates destinations.
const DSTNAT: i32 = -100;
const BEFORE_DSTNAT: i32 = DSTNAT - 10;
/// `srcnat`, the priority at which every tool translates sources.
const SRCNAT: i32 = 100;
const BEFORE_SRCNAT: i32 = SRCNAT - 10;
const FILTER: i32 = 0;

/// Any number but 0, for which the kernel would choose one itself. The same on all nodes and in all releases, so that a
/// client keeps its endpoint.
const HASH_SEED: u32 = 0x706f_7274;
