// SPDX-License-Identifier: Apache-2.0

//! One turn: what is wanted goes in bit by bit, and atomic batches come out.
//!
//! A batch is collected as a [`Chunk`] and committed when it is large enough. Only what the kernel has
//! acknowledged enters the [`Holdings`]; after an error they are thrown away with the turn.
//!
//! Each family has batches of its own: what the kernel refuses in one does not keep the other from being served.

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
use crate::{Applied, Error, Loopback, Reading};

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
    pub(super) limit: PerFamily<usize>,
    /// Why a family is not worked on any more.
    pub(super) failed: PerFamily<Option<Error>>,
    /// What was left out of a batch since the kernel does not take it.
    pub(super) refused: PerFamily<Vec<Error>>,
    chunks: PerFamily<Chunk>,
}

/// What a turn needs to know beyond the Plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub(super) families: PerFamily<bool>,
    /// What becomes of loopback addresses.
    pub(super) loopback: PerFamily<Loopback>,
    /// The mark's bit that means "masquerade".
    pub(super) mark: u32,
    /// Where connections are counted.
    pub(super) counted: PerFamily<bool>,
    /// Whether the kernel can draw by a hash.
    pub(super) hashes: bool,
}

/// What goes into the next batch of a family.
#[derive(Default)]
pub(super) struct Chunk {
    around: Option<Surroundings>,
    pub(super) units: Vec<Unit>,
    addresses: Vec<AddressChange>,
    strays: Vec<Placed>,
    weight: usize,
}

impl Chunk {
    fn leave_out(&mut self, subject: Subject) {
        match subject {
            Subject::Unit(index) => drop(self.units.remove(index)),
            Subject::Address(address) => self.addresses.retain(|change| change.address != address),
            Subject::Strays => self.strays.clear(),
        }
    }
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
            limit: PerFamily { v4: BATCH_ELEMENTS, v6: BATCH_ELEMENTS },
            failed: PerFamily::default(),
            refused: PerFamily::default(),
            chunks: PerFamily::default(),
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
        self.chunks[family].around = Some(around);
    }

    /// The families to work on: those that nothing has failed in.
    pub(super) fn families(&self) -> impl Iterator<Item = Family> + use<T> {
        let works = PerFamily::from_fn(|family| self.works_on(family));
        Family::BOTH.into_iter().filter(move |family| works[*family])
    }

    fn works_on(&self, family: Family) -> bool {
        self.settings.families[family] && self.failed[family].is_none()
    }

    /// Makes a frontend what the Plan says.
    pub(super) fn frontend(&mut self, frontend: Frontend) {
        let family = frontend.family();
        if !self.works_on(family) {
            return;
        }
        let holdings = &self.known[family];
        let held = holdings.frontends.get(&frontend);
        let previous = held.and_then(Held::entry);
        let decision = self.plan.decision(&frontend);
        let mut entry = decision.map(|decision| render::entry(&frontend, decision, previous));
        entry.iter_mut().filter(|_| !self.settings.hashes).for_each(Entry::draw_at_random);
        let delta = holdings.delta(&frontend, entry.as_ref().unwrap_or(&Entry::default()));
        if delta.is_empty() {
            return;
        }
        self.chunks[family].weight += delta.len();
        self.chunks[family].units.push(Unit { frontend, entry, delta });
        self.flush_if_large(family);
    }

    /// Makes an address a member of a set of addresses, or makes it none.
    pub(super) fn address(&mut self, container: Container, address: IpAddr, wanted: bool) {
        let family = Family::of(address);
        if !self.works_on(family) {
            return;
        }
        let known = self.known[family].addresses(container);
        if known.is_none_or(|known| known.contains(&address) == wanted) {
            return;
        }
        self.chunks[family].weight += 1;
        self.chunks[family].addresses.push(AddressChange { container, address, added: wanted });
        self.flush_if_large(family);
    }

    /// Removes elements that no Plan could have put there.
    pub(super) fn strays(&mut self, family: Family) {
        self.chunks[family].strays = std::mem::take(&mut self.known[family].strays);
    }

    fn flush_if_large(&mut self, family: Family) {
        if self.chunks[family].weight >= self.limit[family] {
            self.flush_family(family);
        }
    }

    /// Commits what has been collected, if it is anything.
    pub(super) fn flush(&mut self) {
        self.families().for_each(|family| self.flush_family(family));
    }

    /// The same, but for families where everything must take force at once.
    pub(super) fn flush_early(&mut self) {
        for family in self.families() {
            if self.limit[family] < usize::MAX {
                self.flush_family(family);
            }
        }
    }

    fn flush_family(&mut self, family: Family) {
        let chunk = std::mem::take(&mut self.chunks[family]);
        if let Err(error) = self.post(family, chunk) {
            self.failed[family] = Some(error);
        }
    }

    /// Commits a chunk, if need be without what the kernel refuses: a bad object hurts only itself.
    fn post(&mut self, family: Family, mut chunk: Chunk) -> Result<(), Error> {
        loop {
            let framed = self.framed(family, &chunk);
            let mut script = self.script(family, &chunk, framed.as_ref());
            let retired = self.retire(family, &chunk);
            let Err(error) = self.commit_carrying(family, &mut script) else {
                self.applied.retired.extend(retired);
                self.acknowledge(family, chunk, framed);
                return Ok(());
            };
            let culprit = script.culprit(&error);
            let error = script.explain(error, &chunk, self.plan);
            match culprit {
                Some(subject) if self.refused[family].len() < REFUSALS => chunk.leave_out(subject),
                _ => return Err(error),
            }
            self.refused[family].push(error);
        }
    }

    fn script(&self, family: Family, chunk: &Chunk, framed: Option<&Framed>) -> Script {
        let mut script = Script::new(family);
        let delta = framed.map(|framed| diff::frame(&self.known[family].frame, &framed.frame));
        if let Some(delta) = &delta {
            script.begin_frame(&self.known[family], delta);
        }
        for (index, unit) in chunk.units.iter().enumerate() {
            script.remove(Subject::Unit(index), &unit.delta.removed);
            script.add(Subject::Unit(index), &unit.delta.added);
        }
        for change in &chunk.addresses {
            script.address(change);
        }
        script.remove(Subject::Strays, &chunk.strays);
        if let Some(delta) = &delta {
            script.end_frame(delta);
        }
        script
    }

    /// What the elements that are about to go have counted. Metrics are not worth a failed commit: where the kernel
    /// does not tell, nothing is carried over.
    fn retire(&mut self, family: Family, chunk: &Chunk) -> Vec<Reading> {
        if !self.settings.counted[family] || !self.known[family].exists {
            return Vec::new();
        }
        let removed: Vec<&Placed> = chunk.units.iter().flat_map(|unit| &unit.delta.removed).collect();
        meter::find(self.nft, family, &removed)
    }

    /// The rules a table needs after the chunk, if they are not those it has.
    fn framed(&self, family: Family, chunk: &Chunk) -> Option<Framed> {
        let holdings = &self.known[family];
        let mut in_use = None;
        for unit in &chunk.units {
            let at = &unit.frontend;
            if let Some(entry) = unit.entry.as_ref().filter(|entry| !holdings.installed.covers(at, entry)) {
                in_use.get_or_insert_with(|| holdings.installed.clone()).add(at, entry);
            }
        }
        let around = chunk.around.as_ref().or(holdings.around.as_ref())?;
        if in_use.is_none() && holdings.around.as_ref() == Some(around) {
            return None;
        }
        let in_use = in_use.unwrap_or_else(|| holdings.installed.clone());
        let frame = frame::frame(around, &in_use);
        Some(Framed { around: around.clone(), in_use, frame })
    }

    pub(super) fn commit(&mut self, script: &Script) -> Result<(), netlink::Error> {
        if script.batch.is_empty() {
            return Ok(());
        }
        self.nft.commit(&script.batch)?;
        self.applied.batches += 1;
        self.applied.added += script.added;
        self.applied.removed += script.removed;
        self.applied.chains += script.chains;
        Ok(())
    }

    /// The kernel has taken the chunk: from now on it is known.
    pub(super) fn acknowledge(&mut self, family: Family, chunk: Chunk, framed: Option<Framed>) {
        let holdings = &mut self.known[family];
        if let Some(Framed { around, in_use, frame }) = framed {
            holdings.set_frame(around, in_use, frame);
        }
        for unit in chunk.units {
            let old = holdings.frontends.get(&unit.frontend);
            self.departed.note(&unit.frontend, old, unit.entry.as_ref());
            let idle = idle_turns(&unit.frontend, old.and_then(Held::entry), unit.entry.as_ref());
            holdings.idle_turns += idle;
            holdings.set(unit.frontend, unit.entry);
        }
        for AddressChange { container, address, added } in chunk.addresses {
            if let Some(known) = holdings.addresses(container) {
                if added {
                    known.insert(address)
                } else {
                    known.remove(&address)
                };
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
pub(super) struct Framed {
    pub(super) around: Surroundings,
    pub(super) in_use: InUse,
    pub(super) frame: super::program::Frame,
}

/// So many objects may be left out of the batches of a family in one turn. Each costs a batch once more; when there are
/// more, something else is wrong than the objects.
const REFUSALS: usize = 16;
/// About 20 ms of the kernel's time. Packets go on meanwhile, but other programs' commits wait.
const BATCH_ELEMENTS: usize = 4_000;
