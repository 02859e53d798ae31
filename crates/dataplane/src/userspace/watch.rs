// SPDX-License-Identifier: Apache-2.0

//! Tells when somebody else changes our tables.

use std::time::Duration;

use netlink::{
    Error, Transport,
    nft::{Change, Monitor},
};

use crate::{Drift, names::userspace::TABLE, notices::Notices};

/// Passes over all that is not ours or was done by us.
#[derive(Debug)]
pub(super) struct Watch<T> {
    notices: Notices<T>,
    /// Who we are to the kernel.
    port: u32,
}

impl<T: Transport> Watch<T> {
    pub(super) fn new(monitor: Monitor<T>, port: u32) -> Watch<T> {
        Watch { notices: Notices::new(monitor), port }
    }
}

impl<T: Transport> crate::Watch for Watch<T> {
    fn next(&mut self, wait: Duration) -> Result<Option<Drift>, Error> {
        let port = self.port;
        self.notices.next(wait, |change: &Change| {
            let is_harm = change.table == TABLE && change.port != port;
            is_harm.then(|| format!("something was changed in table {TABLE}"))
        })
    }
}
