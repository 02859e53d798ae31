// SPDX-License-Identifier: Apache-2.0

//! What tables of the legacy variant look like when only we wrote, to see that somebody else did.
//!
//! ip_tables tells nobody of a change. So the tables are looked at: their shape several times a second, which costs a
//! system call; their rules where the shape is another, and now and then where it is the same, for an edit that left
//! none a byte longer. To read the rules costs a copy of the table, so it is done the rarer the larger that is.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use model::{Family, PerFamily};
use netlink::legacy::{Shape, Tables};

use super::{Table, leftovers::is_current};
use crate::{Drift, names::xt};

/// The tables in which something of ours can be harmed.
const WATCHED: [Table; 2] = [Table::Nat, Table::Filter];

/// How often shapes are looked at. What others do is to be noticed within a second.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How often rules are read without a reason: once in so much time, and in so many times what it takes.
const READ_EVERY: (Duration, u32) = (Duration::from_secs(1), 200);
/// How soon again after neighbours have changed the shape: in so many times what it takes.
const READ_AGAIN: u32 = 20;
/// How rare a comparison can become: every 16 seconds.
const LONGEST: u32 = 6;

/// See the module. Held while we write.
#[derive(Clone, Debug, Default)]
pub(super) struct Ledger(Arc<Mutex<PerFamily<Page>>>);

/// A look at the tables of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Look {
    shapes: [Shape; 2],
    /// Of our chains and the ways into them; `None` if they could not be read.
    rules: Option<u64>,
}

#[derive(Debug, Default)]
struct Page {
    /// Opened when first needed, in the network namespace of the thread that writes.
    tables: Option<Tables>,
    /// `None` where nothing of ours has been read or written yet.
    expected: Option<Look>,
    /// They looked otherwise when we came to write.
    surprised: bool,
    /// We have compared everything, and not written since.
    looked: bool,
    /// So often in a row everything was compared in vain: neighbours write to the same tables.
    in_vain: u32,
    /// Nothing is told before.
    quiet_until: Option<Instant>,
    /// What it took to read the rules the last time.
    read_took: Duration,
    /// When they were.
    read_at: Option<Instant>,
}

impl Page {
    fn tables(&mut self, family: Family) -> Option<&Tables> {
        if self.tables.is_none() {
            let family = match family {
                Family::V4 => netlink::Family::V4,
                Family::V6 => netlink::Family::V6,
            };
            self.tables = Tables::open(family).ok();
        }
        self.tables.as_ref()
    }

    /// The shapes now; `None` if that cannot be told.
    fn shapes(&mut self, family: Family) -> Option<[Shape; 2]> {
        let tables = self.tables(family)?;
        let [nat, filter] = WATCHED.map(|table| tables.shape(table.name()).ok());
        Some([nat?, filter?])
    }

    /// Shapes and rules now.
    fn look(&mut self, family: Family) -> Option<Look> {
        let begun = Instant::now();
        let tables = self.tables(family)?;
        let read = WATCHED.map(|table| {
            let entries = tables.read(table.name()).ok()?;
            Some((entries.shape(), entries.digest(is_watched)))
        });
        self.read_took = begun.elapsed();
        self.read_at = Some(Instant::now());
        match read {
            [Some((nat, nat_rules)), Some((filter, filter_rules))] => {
                let rules = nat_rules.rotate_left(1) ^ filter_rules;
                Some(Look { shapes: [nat, filter], rules: Some(rules) })
            }
            // A table too large for the memory there is.
            _ => self.shapes(family).map(|shapes| Look { shapes, rules: None }),
        }
    }

    fn may_read(&self, least: Duration, times: u32) -> bool {
        self.read_at.is_none_or(|at| at.elapsed() >= least.max(self.read_took * times))
    }

    /// Have others changed something of ours since the last look? They may go on doing so while we ask.
    fn differs(&mut self, family: Family) -> bool {
        let Some(expected) = self.expected else { return false };
        let Some(now) = self.look(family) else { return false };
        match (now.rules, expected.rules) {
            (Some(now), Some(expected)) => now != expected,
            _ => now.shapes != expected.shapes,
        }
    }

    /// The same, as often as it may be asked for.
    fn seems_to_differ(&mut self, family: Family) -> bool {
        let Some(expected) = self.expected else { return false };
        let is_other = self.shapes(family).is_some_and(|shapes| shapes != expected.shapes);
        let may_read = match is_other {
            true => self.may_read(LOOK_EVERY, READ_AGAIN),
            false => self.may_read(READ_EVERY.0, READ_EVERY.1),
        };
        if !may_read || (!is_other && expected.rules.is_none()) {
            return false;
        }
        let differs = self.differs(family);
        if !differs {
            // A neighbour's change, which is as it should be from now on.
            let shapes = self.shapes(family).unwrap_or(expected.shapes);
            self.expected = Some(Look { shapes, ..expected });
        }
        differs
    }
}

/// What is ours, or partly ours.
fn is_watched(name: &str) -> bool {
    is_current(name) || name == xt::FIREWALL
}

impl Ledger {
    fn lock(&self) -> MutexGuard<'_, PerFamily<Page>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Before we write. What others did until now would look like our own doing afterwards.
    pub(super) fn open(&self, family: Family) -> Entry<'_> {
        let mut pages = self.lock();
        let page = &mut pages[family];
        page.surprised |= page.differs(family);
        if std::mem::take(&mut page.looked) {
            page.in_vain = 0;
        }
        Entry { pages, family }
    }

    /// Before we compare everything.
    pub(super) fn look(&self, family: Family) {
        let mut pages = self.lock();
        let page = &mut pages[family];
        page.surprised = false;
        page.in_vain += u32::from(std::mem::replace(&mut page.looked, true));
        // A table that is not there is not made for the sake of looking: we are about to write it.
        if page.expected.is_some() {
            page.expected = page.look(family);
        }
    }

    /// What others have changed, if anything. Told once.
    pub(super) fn surprise(&self) -> Option<Drift> {
        let mut pages = self.0.try_lock().ok()?;
        for family in Family::BOTH {
            let page = &mut pages[family];
            if page.quiet_until.is_some_and(|until| Instant::now() < until) {
                continue;
            }
            if std::mem::take(&mut page.surprised) || page.seems_to_differ(family) {
                page.expected = page.look(family);
                // To compare costs more than to look: the more of it was in vain, the rarer it is done.
                page.quiet_until = Some(Instant::now() + LOOK_EVERY * (1 << page.in_vain.min(LONGEST)));
                let what = format!("something in the legacy tables of iptables ({family})");
                return Some(Drift { what, by: None, suspected: true });
            }
        }
        None
    }
}

/// We are writing.
pub(super) struct Entry<'a> {
    pages: MutexGuard<'a, PerFamily<Page>>,
    family: Family,
}

impl Entry<'_> {
    /// We have written.
    pub(super) fn close(&mut self) {
        let page = &mut self.pages[self.family];
        page.expected = page.look(self.family);
    }
}
