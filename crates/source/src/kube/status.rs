// SPDX-License-Identifier: Apache-2.0

//! How the connections to the API server fare; for health, metrics and people.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use model::Kind;
use tokio::time::Instant;

/// Shared with the tasks that follow each kind.
#[derive(Debug, Default)]
pub struct Status {
    kinds: [Mutex<KindStatus>; Kind::ALL.len()],
}

/// One kind's.
#[derive(Clone, Debug, Default)]
pub struct KindStatus {
    /// It has been listed to the end once.
    pub listed: bool,
    /// A watch or list is open now.
    pub connected: bool,
    /// Lists begun.
    pub lists: u64,
    /// Watches opened.
    pub watches: u64,
    /// Exchanges that ended otherwise than in good order.
    pub failures: u64,
    /// The last of these, until something is heard again.
    pub last_error: Option<String>,
    heard: Option<Instant>,
}

impl KindStatus {
    /// For how long nothing was heard, if ever something was. Quiet clusters send a bookmark each minute.
    pub fn silence(&self) -> Option<Duration> {
        self.heard.map(|heard| heard.elapsed())
    }
}

impl Status {
    pub fn of(&self, kind: Kind) -> KindStatus {
        self.lock(kind).clone()
    }

    pub(crate) fn note(&self, kind: Kind, note: impl FnOnce(&mut KindStatus)) {
        note(&mut self.lock(kind));
    }

    pub(crate) fn heard(&self, kind: Kind) {
        let mut status = self.lock(kind);
        status.heard = Some(Instant::now());
        status.connected = true;
        status.last_error = None;
    }

    fn lock(&self, kind: Kind) -> std::sync::MutexGuard<'_, KindStatus> {
        self.kinds[kind as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }
}
