// SPDX-License-Identifier: Apache-2.0

//! What others do to chains of ours.
//!
//! The nft variant's tables are nf_tables', and the kernel tells of every change. Of the legacy variant's it tells
//! nothing; there the shape of each table is looked at again and again, which costs a system call.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use model::{Family, PerFamily};
use netlink::{
    Error,
    legacy::{Shape, Shapes},
    nft::{Change, Monitor, Object},
};

use super::{Table, Writers, leftovers::is_current, words::is_built_in};
use crate::{Drift, names::xt, notices::Notices};

/// Passes over all that is not ours or was done by us.
#[derive(Debug)]
pub(super) struct NftWatch {
    notices: Notices,
    writers: Writers,
}

impl NftWatch {
    pub(super) fn open(writers: Writers) -> Result<NftWatch, Error> {
        Ok(NftWatch { notices: Notices::new(Monitor::open()?), writers })
    }
}

impl crate::Watch for NftWatch {
    fn next(&mut self, wait: Duration) -> Result<Option<Drift>, Error> {
        let writers = &self.writers;
        self.notices.next(wait, |change| if writers.contains(change.port) { None } else { harm(change) })
    }
}

/// What a change did to us, if it did. In built-in chains, only what goes can have been ours.
fn harm(change: &Change) -> Option<String> {
    let is_table = Table::ALL.iter().any(|table| table.to_string() == change.table);
    let family = match change.family? {
        netlink::Family::V4 => "ip",
        netlink::Family::V6 => "ip6",
    };
    let name = change.name.as_deref().unwrap_or_default();
    let is_ours = is_current(name);
    let lost = !change.added && (is_built_in(name) || name == xt::FIREWALL);
    let place = match change.object {
        Object::Table if !change.added => "the table".to_owned(),
        Object::Chain if is_ours || lost => format!("chain {name}"),
        Object::Rule if is_ours || lost => format!("a rule of chain {name}"),
        _ => return None,
    };
    let verb = if change.added { "added or changed" } else { "removed" };
    is_table.then(|| format!("{place} {verb} in table {family} {}", change.table))
}

/// The tables in which something of ours can be harmed.
const WATCHED: [Table; 2] = [Table::Nat, Table::Filter];

/// What tables of the legacy variant look like when only we wrote. Held while we write.
#[derive(Clone, Debug, Default)]
pub(super) struct Ledger(Arc<Mutex<PerFamily<Page>>>);

#[derive(Debug, Default)]
struct Page {
    /// Opened when first needed, in the network namespace of the thread that writes.
    shapes: Option<Shapes>,
    /// `None` where nothing of ours has been read or written yet.
    expected: Option<[Shape; 2]>,
    /// They looked otherwise when we came to write.
    surprised: bool,
    /// We have compared everything, and not written since.
    looked: bool,
    /// So often in a row everything was compared in vain: neighbours write to the same tables.
    in_vain: u32,
    /// Nothing is told before.
    quiet_until: Option<Instant>,
}

impl Page {
    /// What the tables look like now; `None` if that cannot be told.
    fn now(&mut self, family: Family) -> Option<[Shape; 2]> {
        if self.shapes.is_none() {
            let family = match family {
                Family::V4 => netlink::Family::V4,
                Family::V6 => netlink::Family::V6,
            };
            self.shapes = Shapes::open(family).ok();
        }
        let shapes = self.shapes.as_ref()?;
        let [nat, filter] = WATCHED.map(|table| shapes.of(&table.to_string()).ok());
        Some([nat?, filter?])
    }

    /// Have others changed something?
    fn differs(&mut self, family: Family) -> bool {
        let Some(expected) = self.expected else { return false };
        self.now(family).is_some_and(|now| now != expected)
    }
}

impl Ledger {
    fn lock(&self) -> MutexGuard<'_, PerFamily<Page>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Before we write.
    pub(super) fn open(&self, family: Family) -> Entry<'_> {
        let mut pages = self.lock();
        let page = &mut pages[family];
        page.surprised |= page.differs(family);
        if std::mem::take(&mut page.looked) {
            page.in_vain = 0;
        }
        Entry { pages, family }
    }

    /// Before we read.
    pub(super) fn look(&self, family: Family) {
        let mut pages = self.lock();
        let page = &mut pages[family];
        page.surprised = false;
        page.in_vain += u32::from(std::mem::replace(&mut page.looked, true));
        // A table that is not there is not made for the sake of looking: we are about to write it.
        if page.expected.is_some() {
            page.expected = page.now(family);
        }
    }

    /// What others have changed, if anything. Told once.
    fn surprise(&self) -> Option<Drift> {
        let mut pages = self.0.try_lock().ok()?;
        for family in Family::BOTH {
            let page = &mut pages[family];
            if page.quiet_until.is_some_and(|until| Instant::now() < until) {
                continue;
            }
            if std::mem::take(&mut page.surprised) || page.differs(family) {
                page.expected = page.now(family);
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
        page.expected = page.now(self.family);
    }
}

/// Looks at the shape of the tables several times a second.
#[derive(Debug)]
pub(super) struct LegacyWatch {
    ledger: Ledger,
}

/// How rare a comparison can become: every 16 seconds.
const LONGEST: u32 = 6;

/// How often. What others do is to be noticed within a second.
const LOOK_EVERY: Duration = Duration::from_millis(250);

impl LegacyWatch {
    pub(super) fn open(ledger: Ledger) -> Result<LegacyWatch, Error> {
        // Without the privileges it is better to say so now.
        Shapes::open(netlink::Family::V4)?;
        Ok(LegacyWatch { ledger })
    }
}

impl crate::Watch for LegacyWatch {
    fn next(&mut self, wait: Duration) -> Result<Option<Drift>, Error> {
        let begun = Instant::now();
        loop {
            if let Some(drift) = self.ledger.surprise() {
                return Ok(Some(drift));
            }
            let left = wait.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            thread::sleep(left.min(LOOK_EVERY));
        }
    }
}
