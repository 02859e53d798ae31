// SPDX-License-Identifier: Apache-2.0

//! One turn: what is wanted goes in bit by bit, and atomic batches come out.
//!
//! A batch is collected as a [`Chunk`] and committed when it is large enough. Only what the kernel has
//! acknowledged enters the [`Holdings`]; after an error they are thrown away with the turn.

use std::net::IpAddr;

use model::{Family, Frontend, PerFamily, Plan};
use netlink::{Transport, nft::Nft};

use super::{
    affinity::Departed,
    diff::{self, Delta},
    entry::{Entry, Placed},
    frame::{self, InUse, Surroundings},
    holdings::{Held, Holdings},
    layout::{Container, Side, Way},
    meter, render,
    script::{Script, Subject},
};
use crate::{Applied, Error, Reading};

/// See the module.
pub(super) struct Turn<'a, T> {
    pub(super) nft: &'a mut Nft<T>,
    pub(super) plan: &'a Plan,
    /// In a box, as it goes from hand to hand.
    pub(super) known: Box<PerFamily<Holdings>>,
    pub(super) applied: Applied,
    pub(super) departed: Departed,
    pub(super) settings: Settings,
    /// Elements in one batch, about. `usize::MAX` where everything must take force at once.
    pub(super) limit: usize,
    chunk: Chunk,
}

/// What a turn needs to know beyond the Plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub(super) families: PerFamily<bool>,
    /// Where loopback addresses serve node ports.
    pub(super) loopback: PerFamily<bool>,
    /// The mark's bit that means "masquerade".
    pub(super) mark: u32,
    /// Where connections are counted.
    pub(super) counted: PerFamily<bool>,
}

/// What goes into the next batch.
#[derive(Default)]
pub(super) struct Chunk {
    around: PerFamily<Option<Surroundings>>,
    pub(super) units: Vec<Unit>,
    pub(super) addresses: Vec<AddressChange>,
    pub(super) strays: PerFamily<Vec<Placed>>,
    weight: usize,
}

/// A frontend that changes. Its elements stay together in one batch.
pub(super) struct Unit {
    pub(super) frontend: Frontend,
    /// What it has afterwards; `None` if it is gone.
    pub(super) entry: Option<Entry>,
    pub(super) delta: Delta,
}

/// An address that enters or leaves one of the sets of addresses.
#[derive(Clone, Copy)]
pub(super) struct AddressChange {
    pub(super) container: Container,
    pub(super) address: IpAddr,
    pub(super) added: bool,
}

impl<'a, T: Transport> Turn<'a, T> {
    pub(super) fn new(
        nft: &'a mut Nft<T>,
        plan: &'a Plan,
        known: Box<PerFamily<Holdings>>,
        settings: Settings,
    ) -> Turn<'a, T> {
        Turn {
            nft,
            plan,
            known,
            settings,
            applied: Applied::default(),
            departed: Departed::default(),
            limit: BATCH_ELEMENTS,
            chunk: Chunk::default(),
        }
    }

    /// Makes the rules of a table fit what the Plan says of all services at once.
    pub(super) fn surround(&mut self, family: Family) {
        let Settings { mark, loopback, counted, .. } = self.settings;
        let around = render::surroundings(self.plan, family, mark, loopback[family]);
        let around = Surroundings { counted: counted[family], ..around };
        let known = &mut self.known[family];
        let conflicts = || diff::frame(&known.frame, &frame::frame(&around, &known.installed)).conflict;
        if known.exists && known.around.is_none() && conflicts() {
            *known = Holdings { replace: true, ..Holdings::default() };
        }
        self.chunk.around[family] = Some(around);
    }

    /// Makes a frontend what the Plan says.
    pub(super) fn frontend(&mut self, frontend: Frontend) -> Result<(), Error> {
        let holdings = &self.known[frontend.family()];
        let held = holdings.frontends.get(&frontend);
        let previous = held.and_then(Held::entry);
        let decision = self.plan.decision(&frontend);
        let entry = decision.map(|decision| render::entry(&frontend, decision, previous));
        let delta = holdings.delta(&frontend, entry.as_ref().unwrap_or(&Entry::default()));
        if delta.is_empty() {
            return Ok(());
        }
        self.chunk.weight += delta.len();
        self.chunk.units.push(Unit { frontend, entry, delta });
        self.flush_if_large()
    }

    /// Makes an address a member of a set of addresses, or makes it none.
    pub(super) fn address(
        &mut self,
        container: Container,
        address: IpAddr,
        wanted: bool,
    ) -> Result<(), Error> {
        let known = self.known[Family::of(address)].addresses(container);
        if known.is_none_or(|known| known.contains(&address) == wanted) {
            return Ok(());
        }
        self.chunk.weight += 1;
        self.chunk.addresses.push(AddressChange { container, address, added: wanted });
        self.flush_if_large()
    }

    /// Removes elements that no Plan could have put there.
    pub(super) fn strays(&mut self, family: Family) {
        self.chunk.strays[family] = std::mem::take(&mut self.known[family].strays);
    }

    fn flush_if_large(&mut self) -> Result<(), Error> {
        if self.chunk.weight >= self.limit { self.flush() } else { Ok(()) }
    }

    /// Commits what has been collected, if it is anything.
    pub(super) fn flush(&mut self) -> Result<(), Error> {
        let mut chunk = std::mem::take(&mut self.chunk);
        let framed = PerFamily::from_fn(|family| self.framed(family, &mut chunk));
        let mut script = Script::new();
        for family in Family::BOTH {
            if let Some(framed) = &framed[family] {
                let delta = diff::frame(&self.known[family].frame, &framed.frame);
                script.begin_frame(family, &self.known[family], &delta);
            }
        }
        for (index, unit) in chunk.units.iter().enumerate() {
            let family = unit.frontend.family();
            script.remove(family, Subject::Unit(index), &unit.delta.removed);
            script.add(family, Subject::Unit(index), &unit.delta.added);
        }
        for change in &chunk.addresses {
            script.address(change);
        }
        for family in Family::BOTH {
            script.remove(family, Subject::Strays, &chunk.strays[family]);
            if let Some(framed) = &framed[family] {
                let delta = diff::frame(&self.known[family].frame, &framed.frame);
                script.end_frame(family, &delta);
            }
        }
        let retired = self.retire(&chunk);
        self.commit(&script, &chunk)?;
        self.applied.retired.extend(retired);
        self.acknowledge(chunk, framed);
        Ok(())
    }

    /// What the elements that are about to go have counted. Metrics are not worth a failed commit: where the kernel
    /// does not tell, nothing is carried over.
    fn retire(&mut self, chunk: &Chunk) -> Vec<Reading> {
        let mut retired = Vec::new();
        for family in Family::BOTH.into_iter().filter(|family| self.settings.counted[*family]) {
            if !self.known[family].exists {
                continue;
            }
            let units = chunk.units.iter().filter(|unit| unit.frontend.family() == family);
            let removed: Vec<&Placed> = units.flat_map(|unit| &unit.delta.removed).collect();
            retired.extend(meter::find(self.nft, family, &removed));
        }
        retired
    }

    /// The rules a table needs after the chunk, if they are not those it has.
    fn framed(&self, family: Family, chunk: &mut Chunk) -> Option<Framed> {
        let holdings = &self.known[family];
        let mut in_use = None;
        for unit in chunk.units.iter().filter(|unit| unit.frontend.family() == family) {
            let at = &unit.frontend;
            if let Some(entry) = unit.entry.as_ref().filter(|entry| !holdings.installed.covers(at, entry)) {
                in_use.get_or_insert_with(|| holdings.installed.clone()).add(at, entry);
            }
        }
        let around = chunk.around[family].take().or_else(|| holdings.around.clone())?;
        if in_use.is_none() && holdings.around.as_ref() == Some(&around) {
            return None;
        }
        let in_use = in_use.unwrap_or_else(|| holdings.installed.clone());
        let frame = frame::frame(&around, &in_use);
        Some(Framed { around, in_use, frame })
    }

    fn commit(&mut self, script: &Script, chunk: &Chunk) -> Result<(), Error> {
        if script.batch.is_empty() {
            return Ok(());
        }
        self.nft.commit(&script.batch).map_err(|error| script.explain(error, chunk, self.plan))?;
        self.applied.batches += 1;
        self.applied.added += script.added;
        self.applied.removed += script.removed;
        self.applied.chains += script.chains;
        Ok(())
    }

    /// The kernel has taken the chunk: from now on it is known.
    fn acknowledge(&mut self, chunk: Chunk, framed: PerFamily<Option<Framed>>) {
        for (family, framed) in [(Family::V4, framed.v4), (Family::V6, framed.v6)] {
            if let Some(Framed { around, in_use, frame }) = framed {
                self.known[family].set_frame(around, in_use, frame);
            }
        }
        for unit in chunk.units {
            let holdings = &mut self.known[unit.frontend.family()];
            let old = holdings.frontends.get(&unit.frontend);
            self.departed.note(&unit.frontend, old, unit.entry.as_ref());
            let idle = idle_turns(&unit.frontend, old.and_then(Held::entry), unit.entry.as_ref());
            holdings.idle_turns += idle;
            holdings.set(unit.frontend, unit.entry);
        }
        for AddressChange { container, address, added } in chunk.addresses {
            if let Some(known) = self.known[Family::of(address)].addresses(container) {
                if added {
                    known.insert(address)
                } else {
                    known.remove(&address)
                };
            }
        }
    }

    /// Removes chains and sets that nothing needs any more, and those that are not ours.
    ///
    /// Kernels before 6.2 hold on to a chain for a moment after the last element that pointed to it is gone. Then
    /// nothing is removed, and the next full turn tries again: an idle chain does no harm.
    pub(super) fn tidy(&mut self) -> Result<(), Error> {
        Family::BOTH.into_iter().for_each(|family| self.known[family].idle_turns = 0);
        let mut script = Script::new();
        let mut framed = PerFamily { v4: None, v6: None };
        for family in Family::BOTH {
            let holdings = &self.known[family];
            let Some(around) = holdings.around.clone() else { continue };
            let in_use = holdings.in_use();
            let frame = frame::frame(&around, &in_use);
            let delta = diff::frame(&holdings.frame, &frame);
            script.begin_frame(family, holdings, &delta);
            script.end_frame(family, &delta);
            script.remove_frame(family, &holdings.foreign);
            framed[family] = Some(Framed { around, in_use, frame });
        }
        match self.commit(&script, &Chunk::default()) {
            Err(Error::Kernel { source, .. }) if source.errno() == Some(netlink::Errno::BUSY) => Ok(()),
            Err(error) => Err(error),
            Ok(()) => {
                self.acknowledge(Chunk::default(), framed);
                Family::BOTH.into_iter().for_each(|family| self.known[family].foreign = Default::default());
                Ok(())
            }
        }
    }
}

/// How many chains for turns a frontend leaves behind. Each has one of its own, so unlike the others they do not become
/// of use again.
fn idle_turns(frontend: &Frontend, old: Option<&Entry>, new: Option<&Entry>) -> usize {
    let kind = |entry: Option<&Entry>, side| entry.and_then(|entry| entry.kind(frontend, side));
    let is_idle = |side: &Side| {
        let was = kind(old, *side);
        was.is_some_and(|kind| matches!(kind.way, Way::Turns { .. })) && was != kind(new, *side)
    };
    Side::BOTH.iter().filter(|side| is_idle(side)).count()
}

/// Rules, and what they were rendered from.
struct Framed {
    around: Surroundings,
    in_use: InUse,
    frame: super::program::Frame,
}

/// About 20 ms of the kernel's time. Packets go on meanwhile, but other programs' commits wait.
const BATCH_ELEMENTS: usize = 4_000;
