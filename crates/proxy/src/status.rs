// SPDX-License-Identifier: Apache-2.0

//! How the program is doing: written by the reconcile loop, read by the servers.

use std::{
    sync::{Condvar, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use model::{Family, PerFamily};

/// What the loop tells, and the servers ask.
pub struct Status {
    families: PerFamily<bool>,
    state: Mutex<State>,
    committed: Condvar,
}

#[derive(Clone, Default)]
struct State {
    /// How long work may wait, or fail, before the process counts as stuck: twice the sync period.
    patience: Duration,
    /// The last time the kernel held all we knew.
    programmed: Option<SystemTime>,
    /// The successful writes so far, and when the last one was done.
    commits: (u64, Option<Instant>),
    /// Since when something waits to be programmed.
    queued: Option<SystemTime>,
    /// Why the last attempt failed, if it did.
    failure: Option<String>,
    /// Whether traffic should still be sent to this node; `None` while there is no Node object.
    eligible: Option<bool>,
    /// A Node object will come; without one the node is not eligible.
    node_expected: bool,
}

/// One look at [`Status`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub now: SystemTime,
    pub families: PerFamily<bool>,
    pub programmed: Option<SystemTime>,
    /// Everything known is in force: the truth, also before the first programming and after a failure.
    pub healthy: bool,
    /// A restart would not help: there is nothing to do, or it is being done.
    pub alive: bool,
    pub eligible: bool,
    pub failure: Option<String>,
}

impl Status {
    /// `node_expected`: the source has Node objects, so that a missing one means something.
    pub fn new(families: PerFamily<bool>, sync_period: Duration, node_expected: bool) -> Status {
        let state = State { node_expected, patience: sync_period * 2, ..State::default() };
        Status { families, state: Mutex::new(state), committed: Condvar::new() }
    }

    /// Another sync period from now on.
    pub fn set_sync_period(&self, sync_period: Duration) {
        self.change(|state| state.patience = sync_period * 2);
    }

    /// Something is to be programmed.
    pub fn queued(&self, now: SystemTime) {
        self.change(|state| {
            state.queued.get_or_insert(now);
        });
    }

    /// The kernel holds all that was known.
    pub fn programmed(&self, now: SystemTime) {
        self.change(|state| {
            state.programmed = Some(now);
            state.queued = None;
            state.failure = None;
            state.commits = (state.commits.0 + 1, Some(Instant::now()));
        });
        self.committed.notify_all();
    }

    /// Waits for a successful write after the first `seen` ones. Returns how many there are now, and when the
    /// last one was done; `None` if there was none in time.
    pub fn commit_after(&self, seen: u64, patience: Duration) -> Option<(u64, Instant)> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let none_yet = |state: &mut State| state.commits.0 <= seen;
        let waited = self.committed.wait_timeout_while(state, patience, none_yet);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let (count, at) = state.commits;
        at.filter(|_| count > seen).map(|at| (count, at))
    }

    /// How many successful writes there have been.
    pub fn commits(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).commits.0
    }

    /// The kernel does not.
    pub fn failed(&self, now: SystemTime, reason: String) {
        self.change(|state| {
            state.queued.get_or_insert(now);
            state.failure = Some(reason);
        });
    }

    /// What the Node object says: `None` when there is none.
    pub fn node(&self, eligible: Option<bool>) {
        self.change(|state| state.eligible = eligible);
    }

    /// The families that are served.
    pub fn served(&self) -> impl Iterator<Item = Family> + use<> {
        let families = self.families;
        Family::BOTH.into_iter().filter(move |family| families[*family])
    }

    /// How things are at this time.
    pub fn report(&self, now: SystemTime) -> Report {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let waited = state.queued.and_then(|since| now.duration_since(since).ok()).unwrap_or_default();
        let alive = waited < state.patience;
        Report {
            now,
            families: self.families,
            programmed: state.programmed,
            healthy: alive && state.programmed.is_some() && state.failure.is_none(),
            alive,
            eligible: state.eligible.unwrap_or(!state.node_expected),
            failure: state.failure,
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Report {
    /// The families that are served.
    pub fn served(&self) -> impl Iterator<Item = Family> + '_ {
        Family::BOTH.into_iter().filter(|family| self.families[*family])
    }
}
