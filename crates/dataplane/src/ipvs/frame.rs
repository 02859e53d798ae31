// SPDX-License-Identifier: Apache-2.0

//! The rules beside the sets. They stay the same whatever services there are.
//!
//! A packet to a service address meets them like this. From elsewhere: mangle PREROUTING (marks what comes from inside),
//! nat PREROUTING (marks what to masquerade), filter INPUT (who may), IPVS, filter OUTPUT, nat POSTROUTING. From this
//! node: mangle OUTPUT (marks; and who may, since the filter comes after IPVS), nat OUTPUT, IPVS, the rest the same.

use model::Protocol;

use super::{marks, render::Scene, sets::Set};
use crate::{
    iptables::{
        frame::{Foothold, guard, loopback_net},
        name::Name,
        rule::{Is, Match, Rule, Sides, State, Target},
    },
    names::xt,
    xtables::Table,
};

const PORTALS: &str = "kubernetes service portals";
const POSTROUTING: &str = "kubernetes postrouting rules";
const FORWARDING: &str = "kubernetes forwarding rules";
const HEALTH: &str = "kubernetes health check rules";
const FIREWALL: &str = "kube-proxy firewall rules";
const ACCESS: &str = "kubernetes ipvs access filter";
const INSIDE: &str = "kubernetes traffic from inside";

/// The ways from the built-in chains into ours, in the order in which they stand there.
pub(super) fn footholds(scene: &Scene<'_>) -> Vec<Foothold> {
    let own = [
        (Table::Mangle, "PREROUTING", xt::INSIDE, INSIDE),
        (Table::Mangle, "OUTPUT", xt::INSIDE, INSIDE),
        (Table::Mangle, "OUTPUT", xt::OUTPUT_FIREWALL, FIREWALL),
        (Table::Nat, "PREROUTING", xt::SERVICES, PORTALS),
        (Table::Nat, "OUTPUT", xt::SERVICES, PORTALS),
        (Table::Nat, "POSTROUTING", xt::POSTROUTING, POSTROUTING),
        (Table::Filter, "INPUT", xt::IPVS_FILTER, ACCESS),
        (Table::Filter, "INPUT", xt::PROXY_FIREWALL, FIREWALL),
        (Table::Filter, "INPUT", xt::NODE_PORT, HEALTH),
        (Table::Filter, "FORWARD", xt::PROXY_FIREWALL, FIREWALL),
        (Table::Filter, "FORWARD", xt::FORWARD, FORWARDING),
        (Table::Filter, "FORWARD", xt::IPVS_OUT_FILTER, ACCESS),
        (Table::Filter, "OUTPUT", xt::IPVS_OUT_FILTER, ACCESS),
    ]
    .map(|(table, chain, to, comment)| Foothold {
        table,
        chain,
        rule: Rule::jump(Name::known(to)).with([Match::comment(comment)]),
    });
    guard(scene.family, scene.loopback).into_iter().chain(own).collect()
}

/// All our chains with their rules.
pub(super) fn chains(scene: &Scene<'_>) -> Vec<(Table, Name, Vec<Rule>)> {
    let writer = Writer { scene };
    let name = Name::known;
    vec![
        (Table::Mangle, name(xt::INSIDE), writer.inside()),
        (Table::Mangle, name(xt::OUTPUT_FIREWALL), writer.firewall(xt::OUTPUT_RANGES)),
        (Table::Mangle, name(xt::OUTPUT_RANGES), writer.source_ranges()),
        (Table::Nat, name(xt::MARK_MASQ), vec![Rule::to(Target::Mark(scene.mark))]),
        (Table::Nat, name(xt::SERVICES), writer.services()),
        (Table::Nat, name(xt::LOAD_BALANCER), writer.load_balancer()),
        (Table::Nat, name(xt::NODE_PORT), writer.node_port()),
        (Table::Nat, name(xt::POSTROUTING), writer.postrouting()),
        (Table::Filter, name(xt::PROXY_FIREWALL), writer.firewall(xt::SOURCE_RANGES)),
        (Table::Filter, name(xt::SOURCE_RANGES), writer.source_ranges()),
        (Table::Filter, name(xt::NODE_PORT), vec![writer.health()]),
        (Table::Filter, name(xt::FORWARD), writer.forward()),
        (Table::Filter, name(xt::IPVS_FILTER), writer.access()),
        (Table::Filter, name(xt::IPVS_OUT_FILTER), writer.free_addresses()),
    ]
}

struct Writer<'a> {
    scene: &'a Scene<'a>,
}

impl Writer<'_> {
    fn in_set(&self, set: Set, sides: Sides) -> Match {
        Match::InSet(Is { value: set.name(self.scene.family).into(), is: true }, sides)
    }

    fn place(&self, set: Set) -> Match {
        self.in_set(set, Sides::Place)
    }

    /// The rule, for pods only or for all others only; `None` where they cannot be told.
    fn pods(&self, rule: Rule, is: bool) -> Option<Rule> {
        Some(rule.of_pods(self.scene.plan.pod_traffic(self.scene.family)?, is))
    }

    /// Nothing arrives where a process of this node sends from.
    fn inside(&self) -> Vec<Rule> {
        let set = Set::Inside.name(self.scene.family);
        let map = || Rule::to(Target::MapMark(set.clone().into()));
        let mut rules: Vec<Rule> = self.pods(map(), true).into_iter().collect();
        rules.push(map().with([Match::FromLocal]));
        rules
    }

    fn services(&self) -> Vec<Rule> {
        let mark = || Rule::jump(Name::known(xt::MARK_MASQ));
        let accept = |set| Rule::to(Target::Accept).with([self.place(set)]);
        let bits = marks::bits(self.scene.mark);
        let mut rules = vec![
            Rule::to(Target::Return).from(loopback_net(self.scene.family), true),
            // Decided by its mark, after IPVS; another bit now, and IPVS would not know it.
            Rule::to(Target::Accept).with([marked(bits.inside, true)]),
            mark().with([self.place(Set::Masquerade)]),
            // A process of this node that has not chosen an address connects to a service from the service's own.
            mark().with([
                self.in_set(Set::IpvsIps, Sides::Source),
                self.in_set(Set::IpvsIps, Sides::Destination),
            ]),
            Rule::jump(Name::known(xt::LOAD_BALANCER)).with([self.place(Set::LoadBalancer)]),
        ];
        rules.extend(self.pods(mark().with([self.place(Set::ClusterIp)]), false));
        rules.extend([
            mark().with([self.place(Set::ExternalIp)]),
            mark().with([self.place(Set::ExternalIpLocal), Match::FromLocal]),
            Rule::jump(Name::known(xt::NODE_PORT)).with([self.in_set(Set::NodePortIps, Sides::Destination)]),
            accept(Set::ClusterIp),
            accept(Set::LoadBalancer),
            accept(Set::ExternalIp),
            accept(Set::ExternalIpLocal),
        ]);
        rules
    }

    fn load_balancer(&self) -> Vec<Rule> {
        let mark = || Rule::jump(Name::known(xt::MARK_MASQ));
        vec![
            mark().with([self.place(Set::LoadBalancerLocal), Match::FromLocal]),
            Rule::to(Target::Return).with([self.place(Set::LoadBalancerLocal)]),
            mark(),
        ]
    }

    fn node_port(&self) -> Vec<Rule> {
        let mark = || Rule::jump(Name::known(xt::MARK_MASQ));
        let mut rules = Vec::new();
        for protocol in Protocol::ALL {
            let sides = if protocol == Protocol::Sctp { Sides::Place } else { Sides::Destination };
            let all = self.in_set(Set::NodePort(protocol), sides);
            let local = self.in_set(Set::NodePortLocal(protocol), sides);
            rules.extend([
                mark().over(protocol).with([local.clone(), Match::FromLocal]),
                Rule::to(Target::Return).over(protocol).with([local]),
                mark().over(protocol).with([all]),
            ]);
        }
        rules
    }

    fn postrouting(&self) -> Vec<Rule> {
        let masquerade = || Rule::to(Target::Masquerade);
        let bits = marks::bits(self.scene.mark);
        let snat = Match::comment("kubernetes service traffic requiring SNAT");
        vec![
            masquerade().with([
                Match::comment("Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose"),
                self.in_set(Set::LoopBack, Sides::PlaceAndSource),
            ]),
            masquerade().with([marked(bits.inside, true), marked(bits.always, true)]),
            masquerade().with([marked(bits.inside, true), marked(bits.never, false), Match::FromLocal]),
            Rule::to(Target::Return).with([marked(self.scene.mark, false)]),
            Rule::to(Target::Unmark(self.scene.mark)),
            masquerade().with([snat]),
        ]
    }

    fn firewall(&self, ranges: &str) -> Vec<Rule> {
        let to = Rule::jump(Name::known(ranges));
        vec![to.with([Match::state(State::New, true), self.place(Set::LoadBalancerFw)])]
    }

    fn source_ranges(&self) -> Vec<Rule> {
        let allow = |set| Rule::to(Target::Return).with([self.in_set(set, Sides::PlaceAndSource)]);
        vec![allow(Set::LoadBalancerSourceCidr), allow(Set::LoadBalancerSourceIp), Rule::to(Target::Drop)]
    }

    fn health(&self) -> Rule {
        let port = self.in_set(Set::HealthCheckNodePort, Sides::Destination);
        Rule::to(Target::Accept).over(Protocol::Tcp).with([port])
    }

    fn forward(&self) -> Vec<Rule> {
        let known = Match::comment("kubernetes forwarding conntrack rule");
        // The kernel takes some milliseconds until an IPv6 address is the node's; nobody else is to answer for it.
        let ours = self.in_set(Set::IpvsIps, Sides::Destination);
        vec![
            Rule::to(Target::Drop).with([Match::state(State::New, true), ours]),
            Rule::to(Target::Accept).with([Match::comment(FORWARDING), marked(self.scene.mark, true)]),
            Rule::to(Target::Accept).with([known, Match::state(State::Known, true)]),
        ]
    }

    /// Traffic from this node to a virtual server does not come by here.
    fn access(&self) -> Vec<Rule> {
        let new = || Match::state(State::New, true);
        let back = |part| Rule::to(Target::Return).with([part]);
        let mut rules = vec![Rule::to(Target::Drop).with([new(), self.place(Set::Drop)])];
        rules.extend(self.pods(back(self.place(Set::DropOutside)), true));
        rules.push(Rule::to(Target::Drop).with([new(), self.place(Set::DropOutside)]));
        rules.extend(
            [Set::LoadBalancer, Set::ClusterIp, Set::ExternalIp, Set::ExternalIpLocal]
                .map(|set| back(self.place(set))),
        );
        let health = self.in_set(Set::HealthCheckNodePort, Sides::Destination);
        rules.push(back(health).over(Protocol::Tcp));
        let ours = self.in_set(Set::IpvsIps, Sides::Destination);
        rules.push(Rule::to(Target::Reject(self.scene.family)).with([new(), ours]));
        rules
    }

    /// What is in the service network and no service would leave by the default route, and maybe come back.
    fn free_addresses(&self) -> Vec<Rule> {
        let set = Is { value: Set::IpvsIps.name(self.scene.family).into(), is: false };
        let free = Match::InSet(set, Sides::Destination);
        let cidrs = self.scene.plan.service_cidrs(self.scene.family).iter();
        cidrs
            .map(|net| {
                let matches = [Match::state(State::New, true), free.clone()];
                Rule::to(Target::Drop).toward(*net, true).with(matches)
            })
            .collect()
    }
}

fn marked(value: u32, is: bool) -> Match {
    Match::Marked(Is { value, is })
}

/// The chains of `iptables` mode that have another duty here, or none, but bear a name that is ours in another table.
pub(super) const EMPTIED: [(Table, &str); 1] = [(Table::Filter, xt::SERVICES)];

/// Is the chain one of this mode's?
pub(crate) fn is_own(name: &str) -> bool {
    const SHARED: [&str; 5] = [xt::SERVICES, xt::POSTROUTING, xt::MARK_MASQ, xt::FORWARD, xt::PROXY_FIREWALL];
    SHARED.contains(&name) || xt::IPVS.contains(&name)
}
