// SPDX-License-Identifier: Apache-2.0

//! Tells when somebody else changes our tables.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

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
    /// Who we are when we let go in the end.
    farewell: Arc<AtomicU32>,
}

impl<T: Transport> Watch<T> {
    pub(super) fn new(monitor: Monitor<T>, port: u32, farewell: Arc<AtomicU32>) -> Watch<T> {
        Watch { notices: Notices::new(monitor), port, farewell }
    }
}

impl<T: Transport> crate::Watch for Watch<T> {
    fn next(&mut self, wait: Duration) -> Result<Option<Drift>, Error> {
        let (port, farewell) = (self.port, &self.farewell);
        self.notices.next(wait, |change: &Change| {
            let is_own = [port, farewell.load(Ordering::Relaxed)].contains(&change.port);
            let is_harm = change.table == TABLE && !is_own;
            is_harm.then(|| format!("something was changed in table {TABLE}"))
        })
    }
}
