// SPDX-License-Identifier: Apache-2.0

//! Tells when somebody else changes our tables.

use std::time::Duration;

use netlink::{
    Error, Family, Transport,
    nft::{Change, Monitor, Object},
};

use crate::{Drift, names, notices::Notices};

/// Passes over all that is not ours or was done by us.
#[derive(Debug)]
pub(super) struct Watch<T> {
    notices: Notices<T>,
    /// Who we are to the kernel.
    port: u32,
    /// What may have happened before the watch began.
    before: Option<Drift>,
}

impl<T: Transport> Watch<T> {
    /// `port` is that of the connection we write by. `late`: somebody has written since we began to, and was not seen.
    pub(super) fn new(monitor: Monitor<T>, port: u32, late: bool) -> Watch<T> {
        let before = late.then(|| Drift {
            what: "something in nf_tables while we wrote".into(),
            by: None,
            suspected: true,
        });
        Watch { notices: Notices::new(monitor), port, before }
    }
}

impl<T: Transport> crate::Watch for Watch<T> {
    fn next(&mut self, wait: Duration) -> Result<Option<Drift>, Error> {
        if let Some(before) = self.before.take() {
            return Ok(Some(before));
        }
        let port = self.port;
        self.notices.next(wait, |change| {
            // Rules fill the affinity map, and whoever empties it does no harm.
            let is_affinity =
                change.object == Object::Elements && change.name.as_deref() == Some(names::set::AFFINITY);
            let is_harm = change.table == names::TABLE && change.port != port && !is_affinity;
            is_harm.then(|| describe(change))
        })
    }
}

fn describe(change: &Change) -> String {
    let verb = if change.added { "added to or changed" } else { "removed" };
    let object = match change.object {
        Object::Table => "the table",
        Object::Chain => "chain",
        Object::Rule => "a rule of chain",
        Object::Set => "set",
        Object::Elements => "elements of",
        Object::Other => "an object",
    };
    let name = change.name.as_deref().unwrap_or_default();
    let table = match change.family {
        Some(Family::V6) => "ip6",
        _ => "ip",
    };
    let words = [object, name].join(" ");
    format!("{} {verb} in table {table} {}", words.trim_end(), names::TABLE)
}
