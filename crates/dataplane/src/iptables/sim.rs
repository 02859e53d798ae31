// SPDX-License-Identifier: Apache-2.0

//! Walks a packet through a [`Program`], as the kernel would, and tells every way it can end and how likely.
//!
//! It knows iptables and the way of a packet through the hooks, and nothing else: what comes out is what the rules say.
//! Chance is not drawn but tried both ways, so the answer is exact.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use model::{Origin, Packet, Protocol};

use super::{
    name::Name,
    program::Program,
    rule::{Match, Rule, Sides, State as Tracked, Target},
};
pub use crate::nftables::sim::Fate;
use crate::xtables::Table;

/// One way the first packet of a connection can end.
#[derive(Clone, Debug, PartialEq)]
pub struct Ending {
    pub probability: f64,
    pub fate: Fate,
    /// Lists that remember the client from now on.
    pub remembered: BTreeSet<Name>,
}

/// Every way the packet can end. `is_local` tells which addresses are the node's; the lists in `memory` remember the
/// client already.
pub fn simulate(
    program: &Program,
    packet: &Packet,
    is_local: &dyn Fn(IpAddr) -> bool,
    memory: &BTreeSet<Name>,
) -> Vec<Ending> {
    let mut walk = Walk { program, is_local, memory, sets: &|_, _, _| None, endings: Vec::new() };
    let arrives = match &packet.origin {
        Origin::Node => None,
        Origin::Interface(name) => Some(name.clone()),
    };
    let from_node = arrives.is_none();
    let start = vec![Traveller::new(packet, arrives)];
    let first = if from_node { "OUTPUT" } else { "PREROUTING" };
    let mut travellers = walk.base(Table::Nat, first, start);
    if from_node {
        travellers = walk.base(Table::Filter, "OUTPUT", travellers);
        travellers = walk.base(Table::Nat, "POSTROUTING", travellers);
    }
    let (mut local, mut remote): (Vec<_>, Vec<_>) =
        travellers.into_iter().partition(|traveller| is_local(traveller.destination));
    if !from_node {
        remote = walk.base(Table::Filter, "FORWARD", remote);
        remote = walk.base(Table::Nat, "POSTROUTING", remote);
    }
    // What stays on the node comes back through its loopback interface; nat has seen it already.
    if from_node {
        local.iter_mut().for_each(|traveller| traveller.arrives = Some("lo".into()));
    }
    local = walk.base(Table::Filter, "INPUT", local);
    let mut endings = walk.endings;
    endings.extend(local.into_iter().chain(remote).map(Traveller::delivered));
    endings
}

/// A packet on its way.
#[derive(Clone, Debug)]
pub(crate) struct Traveller {
    pub(crate) probability: f64,
    pub(crate) arrives: Option<Arc<str>>,
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    pub(crate) protocol: Protocol,
    pub(crate) port: u16,
    pub(crate) mark: u32,
    pub(crate) translated: bool,
    pub(crate) masqueraded: bool,
    remembered: BTreeSet<Name>,
}

impl Traveller {
    pub(crate) fn new(packet: &Packet, arrives: Option<Arc<str>>) -> Traveller {
        Traveller {
            probability: 1.0,
            arrives,
            source: packet.source,
            destination: packet.destination,
            protocol: packet.protocol,
            port: packet.port,
            mark: 0,
            translated: false,
            masqueraded: false,
            remembered: BTreeSet::new(),
        }
    }

    pub(crate) fn delivered(self) -> Ending {
        let fate = Fate::Delivered {
            destination: self.destination,
            port: self.port,
            translated: self.translated,
            masqueraded: self.masqueraded,
        };
        self.ended(fate)
    }

    pub(crate) fn ended(self, fate: Fate) -> Ending {
        Ending { probability: self.probability, fate, remembered: self.remembered }
    }
}

/// How a chain is left.
enum Exit {
    /// At its end, or by RETURN.
    End,
    /// No further rule of the table looks at it.
    Accept,
}

/// The kernel refuses deeper nesting.
const DEEPEST: usize = 16;

/// Looks parts of a packet up in a set; the mark of what is found, or 0.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str, Sides, &Traveller) -> Option<u32>;

pub(crate) struct Walk<'a> {
    pub(crate) program: &'a Program,
    pub(crate) is_local: &'a dyn Fn(IpAddr) -> bool,
    pub(crate) memory: &'a BTreeSet<Name>,
    pub(crate) sets: Lookup<'a>,
    pub(crate) endings: Vec<Ending>,
}

impl Walk<'_> {
    /// Lets a built-in chain work on packets, and returns those that go on.
    pub(crate) fn base(&mut self, table: Table, chain: &str, travellers: Vec<Traveller>) -> Vec<Traveller> {
        let through = travellers.into_iter().flat_map(|traveller| self.chain(table, chain, traveller, 0));
        through.map(|(traveller, _)| traveller).collect()
    }

    fn chain(&mut self, table: Table, chain: &str, start: Traveller, depth: usize) -> Vec<(Traveller, Exit)> {
        let program = self.program;
        let rules = program.tables.get(&table).and_then(|chains| chains.get(chain));
        let (mut left, mut travellers) = (Vec::new(), vec![start]);
        for rule in rules.into_iter().flatten().filter(|_| depth < DEEPEST) {
            let mut next = Vec::new();
            for traveller in travellers {
                let (hit, missed) = self.tried(rule, traveller);
                next.extend(missed);
                let Some(hit) = hit else { continue };
                for (traveller, exit) in self.target(table, rule, hit, depth) {
                    match exit {
                        None => next.push(traveller),
                        Some(exit) => left.push((traveller, exit)),
                    }
                }
            }
            travellers = next;
        }
        left.extend(travellers.into_iter().map(|traveller| (traveller, Exit::End)));
        left
    }

    /// Those that the rule is for, and those that it is not for.
    fn tried(&self, rule: &Rule, traveller: Traveller) -> (Option<Traveller>, Option<Traveller>) {
        let matched = |is: bool, holds: bool| is == holds;
        let arrives = |pattern: &str| {
            let name = traveller.arrives.as_deref().unwrap_or_default();
            match pattern.strip_suffix('+') {
                Some(prefix) => name.starts_with(prefix),
                None => name == pattern,
            }
        };
        let header = rule.source.as_ref().is_none_or(|s| matched(s.is, s.value.contains(&traveller.source)))
            && rule
                .destination
                .as_ref()
                .is_none_or(|d| matched(d.is, d.value.contains(&traveller.destination)))
            && rule.arrives.as_ref().is_none_or(|a| matched(a.is, arrives(&a.value)))
            && rule.protocol.is_none_or(|protocol| protocol == traveller.protocol);
        if !header {
            return (None, Some(traveller));
        }
        let (mut hit, mut missed) = (traveller, None);
        for part in &rule.matches {
            let holds = match part {
                Match::Comment(_) | Match::Protocol | Match::Counted(_) => true,
                Match::Port(port) => hit.port == *port,
                Match::FromLocal => (self.is_local)(hit.source),
                Match::ToLocal => (self.is_local)(hit.destination),
                Match::Remember(list, _) => {
                    hit.remembered.insert(*list);
                    true
                }
                Match::Remembered(list, _, _) => self.memory.contains(list),
                Match::Chance(share) => {
                    let chance = f64::from(*share) / f64::from(1_u32 << 31);
                    let mut unlucky = hit.clone();
                    unlucky.probability *= 1.0 - chance;
                    hit.probability *= chance;
                    missed = Some(unlucky);
                    true
                }
                Match::State(state) => matched(state.is, is_tracked_as(state.value, &hit)),
                Match::InSet(set, sides) => matched(set.is, (self.sets)(&set.value, *sides, &hit).is_some()),
                Match::Marked(mark) => matched(mark.is, hit.mark & mark.value != 0),
            };
            if !holds {
                return (None, Some(hit));
            }
        }
        (Some(hit), missed)
    }

    /// What becomes of a packet that a rule is for; `None` for those that go on with the next rule.
    fn target(
        &mut self,
        table: Table,
        rule: &Rule,
        mut hit: Traveller,
        depth: usize,
    ) -> Vec<(Traveller, Option<Exit>)> {
        let exit = match &rule.target {
            None => None,
            Some(Target::Jump(chain)) => {
                let through = self.chain(table, chain.as_str(), hit, depth + 1);
                let resume = |exit| match exit {
                    Exit::End => None,
                    Exit::Accept => Some(Exit::Accept),
                };
                return through.into_iter().map(|(traveller, exit)| (traveller, resume(exit))).collect();
            }
            Some(Target::Return) => Some(Exit::End),
            Some(Target::Accept) => Some(Exit::Accept),
            Some(Target::Drop) => {
                self.endings.push(hit.ended(Fate::Dropped));
                return Vec::new();
            }
            Some(Target::Reject(_)) => {
                self.endings.push(hit.ended(Fate::Rejected));
                return Vec::new();
            }
            Some(Target::Mark(bit)) => {
                hit.mark |= bit;
                None
            }
            Some(Target::Unmark(bit)) => {
                hit.mark ^= bit;
                None
            }
            Some(Target::MapMark(set)) => {
                hit.mark = (self.sets)(set, Sides::Place, &hit).unwrap_or(hit.mark);
                None
            }
            Some(Target::Masquerade) => {
                hit.masqueraded = true;
                Some(Exit::Accept)
            }
            Some(Target::Dnat(to)) => {
                (hit.destination, hit.port, hit.translated) = (to.ip(), to.port(), true);
                Some(Exit::Accept)
            }
        };
        vec![(hit, exit)]
    }
}

/// It is the first packet of a connection.
fn is_tracked_as(state: Tracked, traveller: &Traveller) -> bool {
    match state {
        Tracked::New => true,
        Tracked::Invalid | Tracked::Known => false,
        Tracked::KnownOrTranslated => traveller.translated,
    }
}
