// SPDX-License-Identifier: Apache-2.0

//! Compares what the kernel holds with what it should hold, a part at a time. IPVS and sets tell nobody when they are
//! changed.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use hashbrown::HashSet;
use model::{Family, PerFamily};
use netlink::{Error, ipvs::ServiceKey};

use super::{
    holdings::{Holdings, asked},
    kernel::Machine,
    readback::{Addresses, weight},
    render::Item,
    sets::Set,
    turn::Place,
};

/// So many members of sets and real servers are compared in one step, and what begins below that is ended.
const AT_ONCE: usize = 1024;
/// Each virtual server and each set is a request of its own.
const REQUEST: usize = 8;
/// From the end of a round to the next. A small cluster is gone through in one step, so that whatever somebody did is
/// found within about as long.
const PAUSE: Duration = Duration::from_secs(5);

/// How far a round has come.
#[derive(Debug, Default)]
pub(super) struct Round {
    due: Option<Instant>,
    /// Sets to compare.
    sets: VecDeque<(Family, Set)>,
    /// Virtual servers of which to compare the real servers.
    servers: VecDeque<ServiceKey>,
}

/// What the kernel is compared with.
pub(super) struct Wanted<'a> {
    pub(super) known: &'a PerFamily<Holdings>,
    pub(super) families: PerFamily<bool>,
    pub(super) link: u32,
}

impl Round {
    /// What is not as it should be, in words.
    pub(super) fn step(
        &mut self,
        machine: &mut dyn Machine,
        wanted: &Wanted<'_>,
        now: Instant,
    ) -> Result<Option<String>, Error> {
        if self.due.is_some_and(|due| now < due) {
            return Ok(None);
        }
        if self.sets.is_empty() && self.servers.is_empty() {
            let served = Family::BOTH.into_iter().filter(|family| wanted.families[*family]);
            self.sets = served.flat_map(|family| Set::ALL.map(|set| (family, set))).collect();
            if let Some(drift) = compare_addresses(machine, wanted)? {
                return Ok(Some(drift));
            }
            if let Some(drift) = self.compare_servers(machine, wanted.known)? {
                return Ok(Some(drift));
            }
        }
        let mut left = AT_ONCE;
        while left > 0 {
            let (drift, cost) = if let Some((family, set)) = self.sets.pop_front() {
                compare_set(machine, &wanted.known[family], family, set)?
            } else if let Some(key) = self.servers.pop_front() {
                compare_dests(machine, wanted.known, key)?
            } else {
                self.due = Some(now + PAUSE);
                return Ok(None);
            };
            if drift.is_some() {
                return Ok(drift);
            }
            left = left.saturating_sub(cost + REQUEST);
        }
        Ok(None)
    }

    fn compare_servers(
        &mut self,
        machine: &mut dyn Machine,
        known: &PerFamily<Holdings>,
    ) -> Result<Option<String>, Error> {
        let found = machine.servers()?;
        let mut missing: HashSet<ServiceKey> =
            Family::BOTH.into_iter().flat_map(|family| known[family].servers.keys().copied()).collect();
        for held in &found {
            let key = held.service.key;
            let Some(ours) = known[family_of(&key)].servers.get(&key) else { continue };
            if asked(&ours.service) != asked(&held.service) {
                return Ok(Some(format!("virtual server {} has changed", Place(&key))));
            }
            missing.remove(&key);
            self.servers.push_back(key);
        }
        Ok(missing.iter().min().map(|key| format!("virtual server {} is gone", Place(key))))
    }
}

fn family_of(key: &ServiceKey) -> Family {
    if key.family() == netlink::Family::V4 { Family::V4 } else { Family::V6 }
}

/// What else is on our link may be on its way out.
fn compare_addresses(machine: &mut dyn Machine, wanted: &Wanted<'_>) -> Result<Option<String>, Error> {
    let found = Addresses::read(machine, wanted.link)?.bound;
    let ours = Family::BOTH.into_iter().flat_map(|family| wanted.known[family].addresses());
    let missing = ours.filter(|ip| !found.contains(ip)).min();
    Ok(missing.map(|ip| format!("address {ip} of {} is gone", crate::names::IPVS_LINK)))
}

/// With how many real servers were looked at.
fn compare_dests(
    machine: &mut dyn Machine,
    known: &PerFamily<Holdings>,
    key: ServiceKey,
) -> Result<(Option<String>, usize), Error> {
    // It may have gone since the round began.
    let Some(ours) = known[family_of(&key)].servers.get(&key) else { return Ok((None, 0)) };
    let found = machine.dests(key)?;
    let is_same = found.len() == ours.dests.len()
        && found.iter().all(|held| ours.dests.get(&held.dest.key) == Some(&weight(held)));
    let drift = (!is_same).then(|| format!("the real servers of {} have changed", Place(&key)));
    Ok((drift, found.len()))
}

/// With how many members were looked at.
fn compare_set(
    machine: &mut dyn Machine,
    known: &Holdings,
    family: Family,
    set: Set,
) -> Result<(Option<String>, usize), Error> {
    let name = set.name(family);
    let Some(held) = machine.set(&name)? else { return Ok((Some(format!("set {name} is gone")), 0)) };
    let is_same = held.elements.len() == known.members(set)
        && held.elements.iter().all(|element| known.has(&Item::Member(set, *element)));
    Ok(((!is_same).then(|| format!("set {name} has changed")), held.elements.len()))
}
