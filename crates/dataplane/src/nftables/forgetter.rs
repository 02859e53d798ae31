// SPDX-License-Identifier: Apache-2.0

//! The thread that forgets clients whose endpoint is gone.
//!
//! The kernel walks a map from its beginning for every few hundred elements that it tells, so a look at the affinity map
//! costs with the square of its size: 0.3 s for 65,000 clients, 4.3 s for 260,000 (Linux 6.18). How many there are is up to
//! clients, so programming never waits for the end of it. As long as no more than [`FEW`] show it does wait nevertheless, so that
//! it is in force when a turn ends.

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use model::{Family, PerFamily};
use netlink::{
    Transport,
    nft::{Element, Nft},
};

use super::{
    affinity::{self, Departed, Remembered},
    holdings::Holdings,
};

/// Forgets in a thread of its own, or without one when it is asked to.
#[derive(Debug, Default)]
pub(super) struct Forgetter {
    queue: Arc<Queue>,
    is_threaded: bool,
    /// The last time it took too long to be waited for.
    is_slow: bool,
}

#[derive(Debug, Default)]
struct Queue {
    state: Mutex<State>,
    /// Something was asked for, or is done.
    news: Condvar,
    /// Held by whoever must not be disturbed, and for each deletion.
    quiet: Mutex<()>,
    commits: AtomicU32,
}

#[derive(Debug, Default)]
struct State {
    remembered: PerFamily<Remembered>,
    forgotten: u64,
    /// Clients that showed in the last look.
    seen: usize,
    failure: Option<netlink::Error>,
    is_closed: bool,
}

impl Forgetter {
    /// Starts in the network namespace of the calling thread.
    pub(super) fn start() -> Result<Forgetter, String> {
        let mut nft = Nft::open().map_err(|error| error.to_string())?;
        let queue = Arc::new(Queue::default());
        let worker = queue.clone();
        let run = move || worker.run(&mut nft);
        thread::Builder::new().name("affinity".into()).spawn(run).map_err(|error| error.to_string())?;
        Ok(Forgetter { queue, is_threaded: true, is_slow: false })
    }

    /// Takes over what a turn did in a family. To be called once it is in force.
    pub(super) fn follow(&self, family: Family, holdings: &Holdings, departed: &Departed, all: bool) {
        let mut state = self.queue.lock();
        if state.next().is_none() {
            state.seen = 0;
        }
        state.remembered[family].follow(family, holdings, departed, all);
        self.queue.news.notify_all();
    }

    /// Waits a little until all is forgotten. Clients forgotten since the last time, and what went wrong; whatever is
    /// left is tried again.
    pub(super) fn settle<T: Transport>(&mut self, nft: &mut Nft<T>) -> (u64, Option<netlink::Error>) {
        if self.is_threaded {
            self.wait();
        } else {
            self.queue.work(nft, LOOKS);
        }
        let mut state = self.queue.lock();
        (std::mem::take(&mut state.forgotten), state.failure.take())
    }

    fn wait(&mut self) {
        // Who was slow once is not waited for until it is done.
        let patience = if self.is_slow { Duration::ZERO } else { PATIENCE };
        let quick = |state: &mut State| state.next().is_some() && state.seen <= FEW;
        let waited = self.queue.news.wait_timeout_while(self.queue.lock(), patience, quick);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        self.is_slow = state.next().is_some();
    }

    /// Nothing is deleted as long as this is held: a listing that must be of one generation would begin anew.
    pub(super) fn quiet(&self) -> MutexGuard<'_, ()> {
        self.queue.quiet.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The commits made by the thread; see [`Nft::commits`].
    pub(super) fn commits(&self) -> u32 {
        self.queue.commits.load(Ordering::Acquire)
    }
}

impl Drop for Forgetter {
    /// Does not wait: what is left is found by whoever comes next.
    fn drop(&mut self) {
        self.queue.lock().is_closed = true;
        self.queue.news.notify_all();
    }
}

impl State {
    fn next(&self) -> Option<Family> {
        Family::BOTH.into_iter().find(|family| self.remembered[*family].has_work())
    }
}

impl Queue {
    /// What is in it is whole at any time, also after a panic.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run<T: Transport>(&self, nft: &mut Nft<T>) {
        loop {
            let idle = |state: &mut State| !state.is_closed && state.next().is_none();
            let state = self.news.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner);
            if state.is_closed {
                return;
            }
            drop(state);
            let began = Instant::now();
            let rest = if self.work(nft, 1) { began.elapsed() } else { AFTER_FAILURE };
            // Leaves at least half of the processor to others, and lets what is asked for meanwhile come together.
            let open = |state: &mut State| !state.is_closed && state.next().is_some();
            drop(self.news.wait_timeout_while(self.lock(), rest, open));
        }
    }

    /// Looks so many times in each family, or until all is forgotten. `false` if something went wrong.
    fn work<T: Transport>(&self, nft: &mut Nft<T>, looks: usize) -> bool {
        for family in Family::BOTH {
            for _ in 0..looks {
                if !self.lock().remembered[family].has_work() {
                    break;
                }
                if let Err(error) = self.look(nft, family) {
                    self.lock().failure = Some(error);
                    return false;
                }
            }
        }
        true
    }

    fn begin(&self, family: Family) -> u64 {
        let mut state = self.lock();
        state.seen = 0;
        state.remembered[family].asked()
    }

    fn look<T: Transport>(&self, nft: &mut Nft<T>, family: Family) -> Result<(), netlink::Error> {
        let asked = self.begin(family);
        let is_stale = |element: &Element<'_>| {
            let mut state = self.lock();
            state.seen += 1;
            if state.seen == FEW + 1 {
                self.news.notify_all();
            }
            state.remembered[family].is_stale(family, element)
        };
        let (keys, whole) = match affinity::stale(nft, family, is_stale) {
            // The table is gone, and with it all that was remembered.
            Err(error) if error.is_not_found() => (Vec::new(), true),
            outcome => outcome?,
        };
        for some in keys.chunks(AT_ONCE) {
            let _quiet = self.quiet.lock().unwrap_or_else(PoisonError::into_inner);
            if self.lock().is_closed {
                return Ok(());
            }
            let before = nft.commits();
            let outcome = affinity::delete(nft, family, some);
            self.commits.fetch_add(nft.commits().wrapping_sub(before), Ordering::AcqRel);
            outcome?;
            self.lock().forgotten += some.len() as u64;
        }
        self.lock().remembered[family].looked(asked, keys.is_empty(), whole);
        self.news.notify_all();
        Ok(())
    }
}

/// With more clients a turn does not wait. So many are looked through in some milliseconds.
const FEW: usize = 4_000;
/// So long a turn waits at most, also on a busy machine.
const PATIENCE: Duration = Duration::from_millis(100);
/// Other programs' commits wait meanwhile: some milliseconds.
const AT_ONCE: usize = 1_000;
/// Looks without a thread: one that finds all, one that finds none, and some for what came in between.
const LOOKS: usize = 5;
const AFTER_FAILURE: Duration = Duration::from_secs(1);
