// SPDX-License-Identifier: Apache-2.0

//! Compares what the kernel holds with what it should hold, a part at a time. IPVS and sets tell nobody when they are
//! changed.

use std::collections::VecDeque;

use hashbrown::HashSet;
use model::{Family, PerFamily};
use netlink::{Error, ipvs::ServiceKey};

use super::{
    holdings::{Holdings, asked},
    kernel::Machine,
    render::Item,
    sets::Set,
    turn::Place,
};
use crate::Audited;

/// So many virtual servers have their real servers compared in one step.
const AT_ONCE: usize = 64;

/// How far a round has come.
#[derive(Debug, Default)]
pub(super) struct Round {
    has_begun: bool,
    /// Real servers to compare.
    servers: VecDeque<ServiceKey>,
    /// Sets to compare.
    sets: VecDeque<(Family, Set)>,
}

impl Round {
    pub(super) fn step(
        &mut self,
        machine: &mut dyn Machine,
        known: &PerFamily<Holdings>,
        families: PerFamily<bool>,
    ) -> Result<Audited, Error> {
        if !self.has_begun {
            *self = Round { has_begun: true, ..Round::default() };
            let served = Family::BOTH.into_iter().filter(|family| families[*family]);
            self.sets = served.flat_map(|family| Set::ALL.map(|set| (family, set))).collect();
            let drift = self.compare_servers(machine, known)?;
            return Ok(Audited { drift, more: true, ..Audited::default() });
        }
        let drift = if let Some((family, set)) = self.sets.pop_front() {
            compare_set(machine, &known[family], family, set)?
        } else {
            self.compare_dests(machine, known)?
        };
        let more = !self.sets.is_empty() || !self.servers.is_empty();
        self.has_begun = more;
        Ok(Audited { drift, more, ..Audited::default() })
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
            let family = if key.family() == netlink::Family::V4 { Family::V4 } else { Family::V6 };
            let Some(ours) = known[family].servers.get(&key) else { continue };
            if asked(&ours.service) != asked(&held.service) {
                return Ok(Some(format!("virtual server {} has changed", Place(&key))));
            }
            missing.remove(&key);
            self.servers.push_back(key);
        }
        Ok(missing.iter().min().map(|key| format!("virtual server {} is gone", Place(key))))
    }

    fn compare_dests(
        &mut self,
        machine: &mut dyn Machine,
        known: &PerFamily<Holdings>,
    ) -> Result<Option<String>, Error> {
        for _ in 0..AT_ONCE {
            let Some(key) = self.servers.pop_front() else { return Ok(None) };
            let family = if key.family() == netlink::Family::V4 { Family::V4 } else { Family::V6 };
            let Some(ours) = known[family].servers.get(&key) else { continue };
            let found = machine.dests(key)?;
            let is_same = found.len() == ours.dests.len()
                && found.iter().all(|held| ours.dests.get(&held.dest.key) == Some(&held.dest.weight));
            if !is_same {
                return Ok(Some(format!("the real servers of {} have changed", Place(&key))));
            }
        }
        Ok(None)
    }
}

fn compare_set(
    machine: &mut dyn Machine,
    known: &Holdings,
    family: Family,
    set: Set,
) -> Result<Option<String>, Error> {
    let name = set.name(family);
    let Some(held) = machine.set(&name)? else { return Ok(Some(format!("set {name} is gone"))) };
    let wanted = known.items().filter(|item| matches!(item, Item::Member(of, _) if *of == set)).count();
    let is_same = held.elements.len() == wanted
        && held.elements.iter().all(|element| known.has(&Item::Member(set, *element)));
    Ok((!is_same).then(|| format!("set {name} has changed")))
}
