// SPDX-License-Identifier: Apache-2.0

//! What can be chosen, and the handle on what carries connections.

use std::{
    fmt,
    ops::RangeInclusive,
    sync::{Arc, OnceLock},
    time::Duration,
};

use model::PerFamily;
use relay::{Counters, Relay};

use super::book::Book;

/// What the userspace mode must know beyond the Plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Listeners get ports of this range; any if `None`.
    pub ports: Option<RangeInclusive<u16>>,
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
}

pub(super) struct Running {
    pub(super) relay: Relay,
    pub(super) ports: PerFamily<Ports>,
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
        running.relay.counters().open_connections.value()
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
