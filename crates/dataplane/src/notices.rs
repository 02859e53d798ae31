// SPDX-License-Identifier: Apache-2.0

//! What others do to nf_tables, commit by commit, as the kernel tells it. What of it is harm, each mode knows.

use std::time::Duration;

use netlink::{
    Error, Socket, Transport,
    nft::{Change, Event, Monitor},
};

use crate::Drift;

/// Follows the notifications.
#[derive(Debug)]
pub(crate) struct Notices<T = Socket> {
    monitor: Monitor<T>,
    /// What harm the commit that is being told of has done, as far as it has been told.
    harm: Option<String>,
}

impl<T: Transport> Notices<T> {
    pub(crate) fn new(monitor: Monitor<T>) -> Notices<T> {
        Notices { monitor, harm: None }
    }

    /// The next commit that did harm, with the first harm of it in words; `None` if none comes in time.
    pub(crate) fn next(
        &mut self,
        wait: Duration,
        harm: impl Fn(&Change) -> Option<String>,
    ) -> Result<Option<Drift>, Error> {
        loop {
            match self.monitor.next(wait) {
                Ok(Some(Event::Change(change))) => self.harm = self.harm.take().or_else(|| harm(&change)),
                Ok(Some(Event::Generation { pid, process, .. })) => {
                    if let Some(what) = self.harm.take() {
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
