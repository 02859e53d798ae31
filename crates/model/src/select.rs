// SPDX-License-Identifier: Apache-2.0

//! Which endpoints a service port may use, on this node.
//!
//! [`merge`] makes one list of all slices of a service, [`select`] chooses from it.
//! Both are pure, and neither depends on the order in which anything arrived.

use std::cmp::Reverse;

use crate::{
    decision::Backend,
    family::{Family, Protocol},
    slice::{Record, Slice},
};

/// An endpoint of a service port.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub(crate) backend: Backend,
    pub(crate) ready: bool,
    /// Going away, but still able to serve: the last resort.
    draining: bool,
    terminating: bool,
    /// Some record of it says that it serves, so flows to it may go on.
    pub(crate) serving: bool,
    node_hint: Option<bool>,
    zone_hint: Option<bool>,
}

/// All endpoints of a service port in one family, sorted by address and port.
///
/// While an endpoint moves from slice to slice it can occur twice. A record that is not terminating counts before
/// one that is (the address may have been given to a new pod), then a ready one, then a serving one; for the
/// rest, the slice that comes first by name. An endpoint of weight 0 gets nothing new, but what it has goes on.
pub(crate) fn merge(
    slices: &[Slice],
    (family, name, protocol): (Family, &str, Protocol),
    zone: Option<&str>,
    weigh: impl Fn(&Slice, Record) -> u16,
) -> Vec<Candidate> {
    let mut all = Vec::new();
    for slice in slices.iter().filter(|slice| slice.family == family) {
        for port in slice.ports.iter().filter(|port| *port.name == *name && port.protocol == protocol) {
            all.extend(slice.records(zone).map(|(record, zone_hint)| {
                let weight = weigh(slice, record);
                let (address, local) = (record.address, record.is_local());
                Candidate {
                    backend: Backend { address, port: port.port, local, weight },
                    ready: record.is_ready() && weight != 0,
                    draining: record.is_serving() && record.is_terminating() && weight != 0,
                    terminating: record.is_terminating(),
                    serving: record.is_serving(),
                    node_hint: record.node_hint(),
                    zone_hint,
                }
            }));
        }
    }
    let place = |candidate: &Candidate| (candidate.backend.address, candidate.backend.port);
    let merit = |candidate: &Candidate| (!candidate.terminating, candidate.ready, candidate.serving);
    all.sort_by_key(|candidate| (place(candidate), Reverse(merit(candidate))));
    all.dedup_by(|later, kept| {
        let is_same = place(later) == place(kept);
        kept.serving |= is_same && later.serving;
        is_same
    });
    all
}

/// Which lists the policies of a service port ask for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Uses {
    pub(crate) cluster: bool,
    pub(crate) local: bool,
}

/// What [`select`] chose; each list in the order of the candidates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Selection {
    /// For traffic that may go anywhere.
    pub(crate) cluster: Vec<Backend>,
    /// For traffic that must stay on this node.
    pub(crate) local: Vec<Backend>,
    /// Everything in either that traffic can reach.
    pub(crate) reachable: Vec<Backend>,
    /// The service port has a usable endpoint somewhere, if not for us.
    pub(crate) has_any: bool,
}

pub(crate) fn select(candidates: &[Candidate], uses: Uses) -> Selection {
    let mut chosen = Selection::default();

    // 1. The hints of ready endpoints say which of them are near; all or none must have hints, or somebody has
    //    not been told of a new endpoint yet.
    let topology = Topology::of(candidates);

    // 2. C: the ready ones that are near; if there is none, whatever still serves while it goes away.
    if uses.cluster {
        chosen.cluster = pick(candidates, |c| c.ready && topology.admits(c));
        if chosen.cluster.is_empty() {
            chosen.cluster = pick(candidates, |c| c.draining);
        }
        chosen.has_any = !chosen.cluster.is_empty();
    }

    // 3. Nothing has to stay on this node: done.
    if !uses.local {
        chosen.reachable = chosen.cluster.clone();
        return chosen;
    }

    // 4. L: the same among those on this node, whatever their hints and whatever there is elsewhere.
    chosen.has_any |= candidates.iter().any(|c| c.ready || c.draining);
    chosen.local = pick(candidates, |c| c.backend.local && c.ready);
    if chosen.local.is_empty() {
        chosen.local = pick(candidates, |c| c.backend.local && c.draining);
    }

    // 5. A: the union of those that are used.
    chosen.reachable = pick(candidates, |c| {
        chosen.cluster.binary_search(&c.backend).is_ok() || chosen.local.binary_search(&c.backend).is_ok()
    });
    chosen
}

fn pick(candidates: &[Candidate], admits: impl Fn(&Candidate) -> bool) -> Vec<Backend> {
    let mut picked = Vec::with_capacity(candidates.len());
    picked.extend(candidates.iter().filter(|candidate| admits(candidate)).map(|candidate| candidate.backend));
    picked
}

/// Which ready endpoints are near enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Topology {
    Anywhere,
    SameZone,
    SameNode,
}

impl Topology {
    /// The nearest for which every ready endpoint has a hint and one at least names us.
    fn of(candidates: &[Candidate]) -> Topology {
        let ready = || candidates.iter().filter(|candidate| candidate.ready);
        [Topology::SameNode, Topology::SameZone]
            .into_iter()
            .find(|topology| {
                ready().all(|c| topology.hint(c).is_some()) && ready().any(|c| topology.hint(c) == Some(true))
            })
            .unwrap_or(Topology::Anywhere)
    }

    fn admits(self, candidate: &Candidate) -> bool {
        self.hint(candidate) == Some(true)
    }

    fn hint(self, candidate: &Candidate) -> Option<bool> {
        match self {
            Topology::Anywhere => Some(true),
            Topology::SameZone => candidate.zone_hint,
            Topology::SameNode => candidate.node_hint,
        }
    }
}
