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
/// What a comparison has taken, so many times over, passes before the next of its kind: each of the two kinds takes a
/// quarter of a percent of a core, however large the cluster is, and less on a busy machine.
const SHARE: u32 = 400;
/// But no more, should the machine have stood still; for a part, whose size is bounded, less than for all virtual servers.
const LATEST_GLANCE: Duration = Duration::from_secs(60);
const LATEST_PART: Duration = Duration::from_secs(10);

/// How far it has come.
#[derive(Debug, Default)]
pub(super) struct Round {
    /// Addresses and virtual servers: a listing of each.
    glance: Pace,
    /// Sets and real servers, part by part.
    detail: Pace,
    /// Sets to compare.
    sets: VecDeque<(Family, Set)>,
    /// Virtual servers of which to compare the real servers.
    servers: VecDeque<ServiceKey>,
}

/// When to compare again, by what it has cost.
#[derive(Debug, Default)]
struct Pace {
    due: Option<Instant>,
}

impl Pace {
    fn is_due(&self, now: Instant) -> bool {
        self.due.is_none_or(|due| due <= now)
    }

    fn spent(&mut self, cost: Duration, latest: Duration, now: Instant) {
        self.due = Some(now + cost.saturating_mul(SHARE).min(latest));
    }
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
        let mut drift = Ok(None);
        if self.glance.is_due(now) {
            let began = Instant::now();
            drift = glance(machine, wanted);
            self.glance.spent(began.elapsed(), LATEST_GLANCE, now);
        }
        if matches!(drift, Ok(None)) && self.detail.is_due(now) {
            let began = Instant::now();
            drift = self.part(machine, wanted);
            self.detail.spent(began.elapsed(), LATEST_PART, now);
        }
        drift
    }

    /// The next part of what takes a request for each set and virtual server.
    fn part(&mut self, machine: &mut dyn Machine, wanted: &Wanted<'_>) -> Result<Option<String>, Error> {
        if self.sets.is_empty() && self.servers.is_empty() {
            let served = Family::BOTH.into_iter().filter(|family| wanted.families[*family]);
            self.sets = served.flat_map(|family| Set::ALL.map(|set| (family, set))).collect();
            let servers = Family::BOTH.into_iter().flat_map(|family| wanted.known[family].servers.keys());
            self.servers = servers.copied().collect();
        }
        let mut left = AT_ONCE;
        while left > 0 {
            let (drift, cost) = if let Some((family, set)) = self.sets.pop_front() {
                compare_set(machine, &wanted.known[family], family, set)?
            } else if let Some(key) = self.servers.pop_front() {
                compare_dests(machine, wanted.known, key)?
            } else {
                return Ok(None);
            };
            if drift.is_some() {
                return Ok(drift);
            }
            left = left.saturating_sub(cost + REQUEST);
        }
        Ok(None)
    }
}

/// What two listings show.
fn glance(machine: &mut dyn Machine, wanted: &Wanted<'_>) -> Result<Option<String>, Error> {
    if let Some(drift) = compare_addresses(machine, wanted)? {
        return Ok(Some(drift));
    }
    let found = machine.servers()?;
    let known = |key: &ServiceKey| wanted.known[family_of(key)].servers.get(key);
    let mut met = 0;
    for held in &found {
        // Those of others, and those that have gone since.
        let Some(ours) = known(&held.service.key) else { continue };
        if asked(&ours.service) != asked(&held.service) {
            return Ok(Some(format!("virtual server {} has changed", Place(&held.service.key))));
        }
        met += 1;
    }
    let ours = || Family::BOTH.into_iter().flat_map(|family| wanted.known[family].servers.keys());
    if met == ours().count() {
        return Ok(None);
    }
    let found: HashSet<ServiceKey> = found.iter().map(|held| held.service.key).collect();
    let missing = ours().filter(|key| !found.contains(*key)).min();
    Ok(missing.map(|key| format!("virtual server {} is gone", Place(key))))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_costs_more_is_done_less_often() {
        let now = Instant::now();
        let mut pace = Pace::default();
        assert!(pace.is_due(now), "nobody has looked yet");
        pace.spent(Duration::from_millis(10), LATEST_PART, now);
        let due = now + Duration::from_secs(4);
        assert!(!pace.is_due(due - Duration::from_millis(1)) && pace.is_due(due), "a four-hundredth");
        pace.spent(Duration::from_secs(3600), LATEST_GLANCE, now);
        assert!(pace.is_due(now + LATEST_GLANCE), "a machine that was asleep");
    }
}
