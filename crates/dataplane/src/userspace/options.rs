// SPDX-License-Identifier: Apache-2.0

//! What can be chosen, and the handle on what carries connections.

use std::{
    fmt,
    net::IpAddr,
    ops::RangeInclusive,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use hashbrown::HashMap;
use model::PerFamily;
use relay::{Counters, Relay, Service};

use super::{
    bind::{Flag, Spot},
    book::Book,
};
use crate::names::userspace::LISTENS;

/// What the userspace mode must know beyond the Plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Listeners get ports of this range; any if `None`.
    pub ports: Option<RangeInclusive<u16>>,
    /// Listen on the service addresses themselves, and ask no packet filter for anything.
    pub bind: bool,
    /// How the relay works. Its limits are set from the process's limit of descriptors.
    pub relay: relay::Settings,
    /// What carries connections; shared by all who have a copy.
    pub carrier: Carrier,
}

/// Carries connections, once the dataplane has started it.
#[derive(Clone, Default)]
pub struct Carrier(pub(super) Arc<Inner>);

#[derive(Default)]
pub(super) struct Inner {
    pub(super) book: Arc<Book>,
    pub(super) running: OnceLock<Running>,
    /// Where we listen, if on the service addresses themselves.
    listeners: Mutex<HashMap<Spot, u64>>,
    /// Addresses of services that are gone, with what may still have connections there.
    pub(super) lingering: Mutex<HashMap<IpAddr, Vec<Arc<Service>>>>,
    /// Raised while we listen there.
    flag: Mutex<Option<Flag>>,
    /// We are about to end: the flag is for others to raise.
    leaves: AtomicBool,
    /// The port of the connection by which we let go of the table in the end; 0 before. It tells that change from those
    /// of others.
    pub(super) farewell: Arc<AtomicU32>,
}

pub(super) struct Running {
    pub(super) relay: Relay,
    pub(super) ports: PerFamily<Ports>,
    /// Places to listen at most, where we listen on the service addresses themselves.
    pub(super) spots: usize,
}

impl Inner {
    pub(super) fn listeners(&self) -> MutexGuard<'_, HashMap<Spot, u64>> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn unlisten(&self, spot: &Spot) {
        if let (Some(id), Some(running)) = (self.listeners().remove(spot), self.running.get()) {
            running.relay.unlisten(id);
        }
    }

    /// From now on others can know that we listen. While one who is about to end still has the flag, it is tried again
    /// with the next change.
    pub(super) fn raise_flag(&self) {
        let mut flag = self.flag.lock().unwrap_or_else(PoisonError::into_inner);
        if flag.is_none() && !self.leaves.load(Ordering::Relaxed) {
            *flag = Flag::raise(LISTENS).ok();
        }
    }

    /// For good: a last write of ours must not raise it again.
    pub(super) fn lower_flag(&self) {
        let mut flag = self.flag.lock().unwrap_or_else(PoisonError::into_inner);
        self.leaves.store(true, Ordering::Relaxed);
        flag.take();
    }
}

/// Where listeners are, in one family; 0 where there is none. By [`super::book::Side`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ports {
    pub(super) tcp: [u16; 2],
    pub(super) udp: [u16; 2],
}

impl Carrier {
    /// What is counted; `None` before anything is served.
    pub fn counters(&self) -> Option<&Counters> {
        self.0.running.get().map(|running| running.relay.counters())
    }

    /// Each service with what is counted of it.
    pub fn services(&self) -> Vec<Arc<relay::Service>> {
        self.0.book.services()
    }

    /// Waits until no connection is open, `enough` says so, or the time is over. Returns how many are left.
    pub fn drain(&self, bound: Duration, enough: impl Fn() -> bool) -> usize {
        let Some(running) = self.0.running.get() else { return 0 };
        running.relay.drained(bound, enough);
        self.open_connections()
    }

    /// TCP connections that are open.
    pub fn open_connections(&self) -> usize {
        self.counters().map_or(0, |counters| counters.open_connections.value())
    }
}

impl PartialEq for Carrier {
    fn eq(&self, other: &Carrier) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Carrier {}

impl fmt::Debug for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Carrier").field("is_running", &self.0.running.get().is_some()).finish()
    }
}
