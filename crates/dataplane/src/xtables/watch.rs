// SPDX-License-Identifier: Apache-2.0

//! What others do to chains of ours.
//!
//! The nft variant's tables are nf_tables', and the kernel tells of every change. Of the legacy variant's it tells
//! nothing; there they are looked at again and again, and when somebody has run a tool.

use std::time::{Duration, Instant};

use netlink::{
    Error, legacy,
    nft::{Change, Monitor, Object},
};

use super::{
    Table, Writers,
    canary::Canary,
    ledger::{LOOK_EVERY, Ledger},
    leftovers::is_current,
    lock::Lock,
    words::is_built_in,
};
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

/// Looks at the tables several times a second, and whenever somebody else ran a tool.
#[derive(Debug)]
pub(super) struct LegacyWatch {
    ledger: Ledger,
    lock: Lock,
    canary: Canary,
    /// Somebody was there since the tables were last looked at.
    is_heard: bool,
}

impl LegacyWatch {
    pub(super) fn open(ledger: Ledger, lock: Lock) -> Result<LegacyWatch, Error> {
        // Without the privileges it is better to say so now.
        legacy::Tables::open(netlink::Family::V4)?;
        let canary = Canary::at(lock.path().to_owned());
        Ok(LegacyWatch { ledger, lock, canary, is_heard: false })
    }
}

impl crate::Watch for LegacyWatch {
    fn next(&mut self, wait: Duration) -> Result<Option<Drift>, Error> {
        let begun = Instant::now();
        loop {
            if let Some(drift) = self.ledger.surprise(&mut self.is_heard) {
                return Ok(Some(drift));
            }
            let left = wait.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            let is_heard = self.canary.wait(left.min(LOOK_EVERY));
            // If our own tool takes the lock, others cannot be told from it.
            self.is_heard |= is_heard && !self.lock.is_left_to_tool();
        }
    }
}
