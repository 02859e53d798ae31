// SPDX-License-Identifier: Apache-2.0

//! What a table is known to hold: acknowledged by the kernel, or read from it.
//!
//! At 10,000 services with 10 endpoints each this takes 2 to 3 MB: a frontend's elements are kept as one
//! [`Entry`], not one by one.

use std::{collections::BTreeSet, net::IpAddr};

use hashbrown::{HashMap, HashSet};
use model::Frontend;

use super::{
    diff::{self, Delta},
    entry::{Entry, Placed},
    frame::{InUse, Surroundings},
    layout::{Container, Kind},
    program::Frame,
};
use crate::names::hook;

/// One table.
#[derive(Debug, Default)]
pub(super) struct Holdings {
    pub(super) exists: bool,
    /// Sets and chains with their rules.
    pub(super) frame: Frame,
    /// What the rules were rendered from; `None` as long as they are only read.
    pub(super) around: Option<Surroundings>,
    /// Which chains and sets on demand exist.
    pub(super) installed: InUse,
    pub(super) frontends: HashMap<Frontend, Held>,
    pub(super) cluster_ips: HashSet<IpAddr>,
    pub(super) hairpin: HashSet<IpAddr>,
    pub(super) node_port_addresses: HashSet<IpAddr>,
    /// Chains for turns that nobody takes any more, about.
    pub(super) idle_turns: usize,
    /// Elements in sets of ours that no Plan could have put there.
    pub(super) strays: Vec<Placed>,
    /// Chains and sets that are not ours.
    pub(super) foreign: Frame,
    /// It is there, but not as something that could be mended: it must be deleted in the batch that makes it anew.
    pub(super) replace: bool,
}

/// What a table holds for one frontend.
#[derive(Debug, PartialEq)]
pub(super) enum Held {
    /// Exactly the elements of this entry.
    Entry(Entry),
    /// Elements that no entry stands for: somebody else had a hand in it.
    Irregular(Vec<Placed>),
}

impl Held {
    /// The entry, where there is one.
    pub(super) fn entry(&self) -> Option<&Entry> {
        match self {
            Held::Entry(entry) => Some(entry),
            Held::Irregular(_) => None,
        }
    }
}

impl Holdings {
    /// A set of single addresses.
    pub(super) fn addresses(&mut self, container: Container) -> Option<&mut HashSet<IpAddr>> {
        match container {
            Container::ClusterIps => Some(&mut self.cluster_ips),
            Container::Hairpin => Some(&mut self.hairpin),
            Container::NodePortAddresses => Some(&mut self.node_port_addresses),
            _ => None,
        }
    }

    /// What must change for `frontend` to have the elements of `wanted`.
    pub(super) fn delta(&self, frontend: &Frontend, wanted: &Entry) -> Delta {
        match self.frontends.get(frontend) {
            None => diff::entry(frontend, &Entry::default(), wanted),
            Some(Held::Entry(entry)) => diff::entry(frontend, entry, wanted),
            Some(Held::Irregular(elements)) => diff::elements(elements.clone(), wanted.elements(frontend)),
        }
    }

    /// Takes note that `frontend` now has the elements of `entry`.
    pub(super) fn set(&mut self, frontend: Frontend, entry: Option<Entry>) {
        match entry {
            Some(entry) => self.frontends.insert(frontend, Held::Entry(entry)),
            None => self.frontends.remove(&frontend),
        };
    }

    /// Takes note of the rules.
    pub(super) fn set_frame(&mut self, around: Surroundings, installed: InUse, frame: Frame) {
        self.frame = frame;
        self.around = Some(around);
        self.installed = installed;
        self.exists = true;
        self.replace = false;
    }

    /// What the entries need, and no more.
    pub(super) fn in_use(&self) -> InUse {
        let mut in_use = InUse::default();
        for (frontend, held) in &self.frontends {
            if let Held::Entry(entry) = held {
                in_use.add(frontend, entry);
            }
        }
        in_use
    }
}

/// Which chains and sets on demand a frame has, going by their names.
pub(super) fn installed(frame: &Frame) -> InUse {
    let timeouts = frame.sets.iter().filter_map(|set| match Container::parse(&set.name) {
        Some(Container::Sticky(_, secs)) => Some(secs),
        _ => None,
    });
    let kinds = frame.chains.iter().filter_map(|chain| Kind::parse(&chain.name));
    InUse {
        // A balancing chain goes on to the one that draws, which somebody may have deleted.
        kinds: kinds.flat_map(|kind| [kind, Kind::drawing(kind.space, kind.side, kind.way)]).collect(),
        timeouts_secs: timeouts.collect::<BTreeSet<u32>>(),
        firewall: frame.chains.iter().any(|chain| chain.name == hook::FIREWALL_OUTPUT),
    }
}
