// SPDX-License-Identifier: Apache-2.0

//! From what the table holds to what it should hold: which elements go, which come. Pure.

use std::cmp::Ordering;

use hashbrown::{HashMap, HashSet};
use model::Frontend;

use super::{
    entry::{self, Entry, Placed, Target},
    layout::{self, Container, Side, Space},
    program::{Bytes, Chain, Frame},
};

/// Elements that go and come. A key that is mapped to something new is in both: removed, then added.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Delta {
    pub(super) removed: Vec<Placed>,
    pub(super) added: Vec<Placed>,
}

impl Delta {
    pub(super) fn is_empty(&self) -> bool {
        self.removed.is_empty() && self.added.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.removed.len() + self.added.len()
    }

    fn replace(&mut self, old: Option<Placed>, new: Option<Placed>) {
        if old != new {
            self.removed.extend(old);
            self.added.extend(new);
        }
    }
}

/// What a frontend's elements must become. Costs as much as changes, apart from one look at each slot.
pub(super) fn entry(frontend: &Frontend, old: &Entry, new: &Entry) -> Delta {
    let mut delta = Delta::default();
    let space = Space::of(frontend);
    let key = layout::key(frontend);
    for side in Side::BOTH {
        let verdict = |entry: &Entry| Some(entry::verdict(key, entry.kind(frontend, side)?));
        delta.replace(verdict(old), verdict(new));
        slots(&mut delta, frontend, side, old.target(side), new.target(side));
    }
    let refusal = |entry: &Entry| Some(Placed::new(entry.refusal?.container(space), key));
    delta.replace(refusal(old), refusal(new));
    sticky(&mut delta, frontend, old, new);
    if old.sources != new.sources {
        sources(&mut delta, key, old, new);
    }
    delta
}

fn slots(delta: &mut Delta, frontend: &Frontend, side: Side, old: Option<&Target>, new: Option<&Target>) {
    let container = |target: &Target| layout::endpoints(target.draw, frontend, side);
    let (from, to) = (old.map(container), new.map(container));
    let is_same_map = from == to || from.is_none() || to.is_none();
    if !is_same_map {
        // From one map into another: out of the one, into the other.
        slots(delta, frontend, side, old, None);
        return slots(delta, frontend, side, None, new);
    }
    let Some(container) = from.or(to) else { return };
    let mut old = old.into_iter().flat_map(|target| target.slots.packed());
    let mut new = new.into_iter().flat_map(|target| target.slots.packed());
    for slot in 0.. {
        let (old, new) = (old.next(), new.next());
        if old.is_none() && new.is_none() {
            return;
        }
        if old != new {
            let placed = |packed| entry::endpoint(frontend, container, slot, packed);
            delta.replace(old.map(placed), new.map(placed));
        }
    }
}

fn sticky(delta: &mut Delta, frontend: &Frontend, old: &Entry, new: &Entry) {
    if old.sticky_secs.is_none() && new.sticky_secs.is_none() {
        return;
    }
    let pairs = |entry: &Entry| -> Vec<Placed> {
        let Some(secs) = entry.sticky_secs else { return Vec::new() };
        let endpoints = entry.sticky_endpoints();
        endpoints.iter().map(|endpoint| entry::sticky(frontend, secs, endpoint)).collect()
    };
    merge(delta, pairs(old), pairs(new));
}

fn sources(delta: &mut Delta, key: Bytes, old: &Entry, new: &Entry) {
    let firewalled = |entry: &Entry| entry.sources.as_ref().map(|_| Placed::new(Container::Firewalled, key));
    let ranges = |entry: &Entry| -> Vec<Placed> {
        entry.sources.iter().flat_map(|nets| nets.iter()).map(|net| entry::source(key, net)).collect()
    };
    delta.replace(firewalled(old), firewalled(new));
    merge(delta, ranges(old), ranges(new));
}

/// What elements must become, whatever they are. Neither list has a key twice.
pub(super) fn elements(old: Vec<Placed>, new: Vec<Placed>) -> Delta {
    let mut delta = Delta::default();
    merge(&mut delta, old, new);
    delta
}

fn merge(delta: &mut Delta, mut old: Vec<Placed>, mut new: Vec<Placed>) {
    let order = |a: &Placed, b: &Placed| a.container.cmp(&b.container).then(a.key.cmp(&b.key));
    old.sort_unstable_by(order);
    new.sort_unstable_by(order);
    let (mut old, mut new) = (old.into_iter().peekable(), new.into_iter().peekable());
    loop {
        let next = match (old.peek(), new.peek()) {
            (Some(a), Some(b)) => order(a, b),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => return,
        };
        let was = if next.is_le() { old.next() } else { None };
        let is = if next.is_ge() { new.next() } else { None };
        delta.replace(was, is);
    }
}

/// What must be done to the sets and chains of a table.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FrameDelta<'a> {
    pub(super) added_sets: Vec<&'a netlink::nft::Set>,
    /// Chains to be created, without their rules.
    pub(super) added_chains: Vec<&'a Chain>,
    /// Chains whose rules are to be written, all of them: new ones, and old ones with other rules.
    pub(super) written: Vec<Written<'a>>,
    pub(super) removed_chains: Vec<&'a str>,
    pub(super) removed_sets: Vec<&'a str>,
    /// A set or a hook is there under its name, but as something else. The table must be made anew.
    pub(super) conflict: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Written<'a> {
    pub(super) chain: &'a Chain,
    /// It has rules that must go first.
    pub(super) flush: bool,
}

/// What sets and chains must become. `has` may be anything that can be read from a kernel.
pub(super) fn frame<'a>(has: &'a Frame, wants: &'a Frame) -> FrameDelta<'a> {
    let mut delta = FrameDelta::default();
    let sets: HashMap<&str, _> = has.sets.iter().map(|set| (set.name.as_str(), set)).collect();
    let chains: HashMap<&str, _> = has.chains.iter().map(|chain| (chain.name.as_str(), chain)).collect();
    for set in &wants.sets {
        match sets.get(set.name.as_str()) {
            None => delta.added_sets.push(set),
            Some(old) => delta.conflict |= **old != *set,
        }
    }
    for chain in &wants.chains {
        let old = chains.get(chain.name.as_str());
        match old {
            None => delta.added_chains.push(chain),
            Some(old) => delta.conflict |= old.base != chain.base,
        }
        if old.is_none_or(|old| old.rules != chain.rules) {
            let flush = old.is_some_and(|old| !old.rules.is_empty());
            delta.written.push(Written { chain, flush });
        }
    }
    let wanted_sets: HashSet<&str> = wants.sets.iter().map(|set| set.name.as_str()).collect();
    let wanted_chains: HashSet<&str> = wants.chains.iter().map(|chain| chain.name.as_str()).collect();
    delta.removed_chains = chains.into_keys().filter(|name| !wanted_chains.contains(name)).collect();
    delta.removed_sets = sets.into_keys().filter(|name| !wanted_sets.contains(name)).collect();
    delta.removed_chains.sort_unstable();
    delta.removed_sets.sort_unstable();
    delta
}
