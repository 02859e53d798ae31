// SPDX-License-Identifier: Apache-2.0

//! Tells when somebody else changes our tables.

use std::time::Duration;

use netlink::{
    Error, Family, Transport,
    nft::{Change, Event, Monitor, Object},
};

use crate::{Drift, names};

/// Follows the kernel's notifications, and passes over all that is not ours or was done by us.
#[derive(Debug)]
pub(super) struct Watch<T> {
    monitor: Monitor<T>,
    /// Who we are to the kernel.
    port: u32,
    /// What the commit that is being told of did to our tables, as far as it has been told.
    changed: Option<String>,
}

impl<T: Transport> Watch<T> {
    /// `port` is that of the connection we write by.
    pub(super) fn new(monitor: Monitor<T>, port: u32) -> Watch<T> {
        Watch { monitor, port, changed: None }
    }

    fn note(&mut self, change: &Change) {
        // Rules fill the affinity map, and whoever empties it does no harm.
        let is_affinity =
            change.object == Object::Elements && change.name.as_deref() == Some(names::set::AFFINITY);
        if change.table == names::TABLE && change.port != self.port && !is_affinity {
            self.changed.get_or_insert_with(|| describe(change));
        }
    }
}

impl<T: Transport> crate::Watch for Watch<T> {
    fn next(&mut self, wait: Duration) -> Result<Option<Drift>, Error> {
        loop {
            match self.monitor.next(wait) {
                Ok(Some(Event::Change(change))) => self.note(&change),
                Ok(Some(Event::Generation { pid, process, .. })) => {
                    if let Some(what) = self.changed.take() {
                        let name = process.unwrap_or_else(|| "unknown".into());
                        let by = pid.map(|pid| format!("{name} ({pid})"));
                        return Ok(Some(Drift { what, by, suspected: false }));
                    }
                }
                Ok(None) => return Ok(None),
                Err(Error::Overrun) => {
                    let what = "more changes at once than could be followed".into();
                    return Ok(Some(Drift { what, by: None, suspected: false }));
                }
                Err(error) => return Err(error),
            }
        }
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
