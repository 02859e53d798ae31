// SPDX-License-Identifier: Apache-2.0

//! What stays the same whatever services there are: the way into our chains, and the chains with fixed rules.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use model::{Family, NodePortScope, Plan};

use super::{
    name::Name,
    rule::{Match, Rule, State, Target},
};
use crate::{Loopback, names::xt, xtables::Table};

/// What rules depend on beyond services.
#[derive(Clone, Copy, Debug)]
pub struct Scene<'a> {
    pub plan: &'a Plan,
    pub family: Family,
    /// The bit of the mark that means "masquerade".
    pub mark: u32,
    /// What becomes of loopback addresses.
    pub loopback: Loopback,
    /// The kernel takes packets out of a TCP window for valid, so that none are to be dropped for that.
    pub liberal: bool,
    /// Some rules count with counters of their own, see [`xt::ACCOUNTS`].
    pub accounts: bool,
    /// Rules for endpoints bear comments. They cost memory, so not where there are many.
    pub comments: bool,
}

/// A chain in which each service has lines of its own. Their order among services means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Top {
    /// Frontends with an address and endpoints.
    Services,
    /// Node ports with endpoints.
    NodePorts,
    /// Cluster IPs without endpoints.
    NoEndpoints,
    /// Other frontends without endpoints.
    NoExternalEndpoints,
    /// Frontends with source ranges.
    Firewalled,
    /// Health-check node ports.
    HealthChecks,
}

impl Top {
    pub const ALL: [Top; 6] = [
        Top::Services,
        Top::NodePorts,
        Top::NoEndpoints,
        Top::NoExternalEndpoints,
        Top::Firewalled,
        Top::HealthChecks,
    ];

    pub fn table(self) -> Table {
        match self {
            Top::Services | Top::NodePorts => Table::Nat,
            Top::NoEndpoints | Top::NoExternalEndpoints | Top::Firewalled | Top::HealthChecks => {
                Table::Filter
            }
        }
    }

    pub fn chain(self) -> Name {
        Name::known(match self {
            Top::Services | Top::NoEndpoints => xt::SERVICES,
            Top::NodePorts | Top::HealthChecks => xt::NODEPORTS,
            Top::NoExternalEndpoints => xt::EXTERNAL_SERVICES,
            Top::Firewalled => xt::PROXY_FIREWALL,
        })
    }

    /// The one of this name, if it is one.
    pub fn find(table: Table, chain: &str) -> Option<Top> {
        Top::ALL.into_iter().find(|top| top.table() == table && top.chain().as_str() == chain)
    }

    /// The rules after those of the services.
    pub(super) fn tail(self, scene: &Scene<'_>) -> Vec<Rule> {
        match self {
            Top::Services => node_port_ways(scene),
            // kube-proxy lets a process of the node that connects to an external address without endpoints run into
            // a timeout.
            Top::NoEndpoints => {
                vec![Rule::jump(Name::known(xt::EXTERNAL_SERVICES)).with([Match::comment(EXTERNAL)])]
            }
            _ => Vec::new(),
        }
    }
}

/// A rule in a chain that is not ours alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Foothold {
    pub(crate) table: Table,
    pub(crate) chain: &'static str,
    pub(crate) rule: Rule,
}

const PORTALS: &str = "kubernetes service portals";
const EXTERNAL: &str = "kubernetes externally-visible service portals";
const LOAD_BALANCERS: &str = "kubernetes load balancer firewall";
const HEALTH: &str = "kubernetes health check service ports";
const FORWARDING: &str = "kubernetes forwarding rules";
const POSTROUTING: &str = "kubernetes postrouting rules";

/// The ways from the built-in chains into ours, in the order in which they stand there.
pub(super) fn footholds(scene: &Scene<'_>) -> Vec<Foothold> {
    let mut footholds = guard(scene.family, scene.loopback);
    let mut add = |table, chain, rule| footholds.push(Foothold { table, chain, rule });
    let plain = |to: &str, comment: &str| Rule::jump(Name::known(to)).with([Match::comment(comment)]);
    let new = |to: &str, comment: &str| {
        Rule::jump(Name::known(to)).with([Match::state(State::New, true), Match::comment(comment)])
    };
    add(Table::Filter, "INPUT", new(xt::PROXY_FIREWALL, LOAD_BALANCERS));
    add(Table::Filter, "INPUT", plain(xt::NODEPORTS, HEALTH));
    add(Table::Filter, "INPUT", new(xt::EXTERNAL_SERVICES, EXTERNAL));
    add(Table::Filter, "FORWARD", new(xt::PROXY_FIREWALL, LOAD_BALANCERS));
    add(Table::Filter, "FORWARD", plain(xt::FORWARD, FORWARDING));
    add(Table::Filter, "FORWARD", new(xt::SERVICES, PORTALS));
    add(Table::Filter, "FORWARD", new(xt::EXTERNAL_SERVICES, EXTERNAL));
    add(Table::Filter, "OUTPUT", new(xt::PROXY_FIREWALL, LOAD_BALANCERS));
    add(Table::Filter, "OUTPUT", new(xt::SERVICES, PORTALS));
    add(Table::Nat, "PREROUTING", plain(xt::SERVICES, PORTALS));
    add(Table::Nat, "OUTPUT", plain(xt::SERVICES, PORTALS));
    add(Table::Nat, "POSTROUTING", plain(xt::POSTROUTING, POSTROUTING));
    footholds
}

/// What keeps strangers from loopback addresses; the first in their chains. The chain is shared with the kubelet, which
/// puts up the same.
pub(crate) fn guard(family: Family, loopback: Loopback) -> Vec<Foothold> {
    if family != Family::V4 || !loopback.is_guarded() {
        return Vec::new();
    }
    let add = |chain, rule| Foothold { table: Table::Filter, chain, rule };
    let jump = || Rule::jump(Name::known(xt::FIREWALL));
    vec![add(xt::FIREWALL, martians()), add("INPUT", jump()), add("OUTPUT", jump())]
}

/// Chains with fixed rules. Those of [`Top`] are not among them.
pub(super) fn fixed(scene: &Scene<'_>) -> Vec<(Table, Name, Vec<Rule>)> {
    let masquerade = Match::comment("kubernetes service traffic requiring SNAT");
    let marked = |is| Match::Marked(super::rule::Is { value: scene.mark, is });
    let mut forward = vec![
        Rule::to(Target::Accept).with([Match::comment(FORWARDING), marked(true)]),
        Rule::to(Target::Accept)
            .with([Match::comment("kubernetes forwarding conntrack rule"), Match::state(State::Known, true)]),
    ];
    if !scene.liberal {
        let counter = scene.accounts.then_some(Match::Counted(xt::INVALID_DROPPED));
        forward.insert(0, Rule::to(Target::Drop).with([Match::state(State::Invalid, true)]).with(counter));
    }
    let mut chains = vec![
        (Table::Filter, Name::known(xt::FORWARD), forward),
        (Table::Nat, Name::known(xt::MARK_MASQ), vec![Rule::to(Target::Mark(scene.mark))]),
        (
            Table::Nat,
            Name::known(xt::POSTROUTING),
            vec![
                Rule::to(Target::Return).with([marked(false)]),
                // So that a packet that comes by again is not masqueraded again.
                Rule::to(Target::Unmark(scene.mark)),
                Rule::to(Target::Masquerade).with([masquerade]),
            ],
        ),
    ];
    chains.extend(Table::ALL.map(|table| (table, Name::known(xt::PROXY_CANARY), Vec::new())));
    chains
}

/// What comes from elsewhere for a loopback address is not let in, although the kernel would route it now.
fn martians() -> Rule {
    let loopback = loopback_net(Family::V4);
    Rule::to(Target::Drop).from(loopback, false).toward(loopback, true).with([
        Match::comment("block incoming localnet connections"),
        Match::state(State::KnownOrTranslated, false),
    ])
}

pub(crate) fn loopback_net(family: Family) -> IpNet {
    match family {
        Family::V4 => {
            IpNet::new(Ipv4Addr::new(127, 0, 0, 0).into(), 8).expect("8 is a prefix length of IPv4")
        }
        Family::V6 => IpNet::from(IpAddr::from(Ipv6Addr::LOCALHOST)),
    }
}

/// Which destinations are node-port addresses: what a rule must have in addition, once for each way.
pub(super) fn node_port_destinations(scene: &Scene<'_>) -> Vec<Rule> {
    match scene.plan.node_ports(scene.family) {
        NodePortScope::All => {
            let local = Rule::default().with([Match::ToLocal]);
            let served = scene.loopback.is_served() && scene.family == Family::V4;
            vec![if served { local } else { local.toward(loopback_net(scene.family), false) }]
        }
        NodePortScope::Only(addresses) => {
            let is_served = |ip: &&IpAddr| scene.loopback.is_served() || !ip.is_loopback();
            let served = addresses.iter().filter(is_served);
            served.map(|ip| Rule::default().toward(IpNet::from(*ip), true)).collect()
        }
    }
}

fn node_port_ways(scene: &Scene<'_>) -> Vec<Rule> {
    let note = "kubernetes service nodeports; NOTE: this must be the last rule in this chain";
    let way = |mut rule: Rule| {
        rule.matches.insert(0, Match::comment(note));
        rule.target = Some(Target::Jump(Name::known(xt::NODEPORTS)));
        rule
    };
    node_port_destinations(scene).into_iter().map(way).collect()
}
