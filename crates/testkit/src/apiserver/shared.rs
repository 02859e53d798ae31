// SPDX-License-Identifier: Apache-2.0

//! What the tasks of the server and its owner both hold.

use std::{
    collections::HashMap,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::Value;
use tokio::sync::watch;
use tokio_rustls::rustls::pki_types::CertificateDer;

use super::{
    log::{Credential, Request},
    mischief::Script,
    store::Store,
};

/// See the module. Locks are held for moments only, never across an await.
pub(super) struct Shared {
    store: Mutex<Store>,
    script: Mutex<Script>,
    log: Mutex<Vec<Request>>,
    access: Mutex<Access>,
    events: Mutex<Events>,
    speak_protobuf: AtomicBool,
    /// Kubernetes 1.this; 0 if the server does not say.
    minor: AtomicU32,
    mute: AtomicBool,
    pub(super) pulse: watch::Sender<Pulse>,
    pub(super) orders: watch::Sender<Orders>,
    /// Connections that are being served, by the orders there were when they began.
    served: Mutex<HashMap<Orders, usize>>,
    left: Condvar,
}

/// Wakes watches: something has changed.
#[derive(Clone, Copy, Default)]
pub(super) struct Pulse {
    /// How often bookmarks were ordered.
    pub(super) bookmarks: u64,
}

/// What open connections have to do: each number counts how often it was ordered.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Orders {
    pub(super) cuts: u64,
    pub(super) freezes: u64,
}

/// Events that clients have created.
#[derive(Default)]
pub(super) struct Events {
    pub(super) taken: Vec<Value>,
    /// The code to refuse them with.
    pub(super) refusal: Option<u16>,
}

/// Who is let in.
#[derive(Default)]
pub(super) struct Access {
    pub(super) token: String,
    pub(super) certificate: Option<CertificateDer<'static>>,
}

impl Shared {
    pub(super) fn new() -> Shared {
        Shared {
            store: Mutex::new(Store::new()),
            script: Mutex::default(),
            log: Mutex::default(),
            access: Mutex::default(),
            events: Mutex::default(),
            speak_protobuf: AtomicBool::new(true),
            minor: AtomicU32::new(0),
            mute: AtomicBool::new(false),
            pulse: watch::Sender::new(Pulse::default()),
            orders: watch::Sender::new(Orders::default()),
            served: Mutex::default(),
            left: Condvar::new(),
        }
    }

    pub(super) fn store(&self) -> MutexGuard<'_, Store> {
        lock(&self.store)
    }

    pub(super) fn script(&self) -> MutexGuard<'_, Script> {
        lock(&self.script)
    }

    pub(super) fn log(&self) -> MutexGuard<'_, Vec<Request>> {
        lock(&self.log)
    }

    pub(super) fn access(&self) -> MutexGuard<'_, Access> {
        lock(&self.access)
    }

    pub(super) fn events(&self) -> MutexGuard<'_, Events> {
        lock(&self.events)
    }

    pub(super) fn minor(&self) -> u32 {
        self.minor.load(Ordering::Relaxed)
    }

    pub(super) fn set_minor(&self, minor: u32) {
        self.minor.store(minor, Ordering::Relaxed);
    }

    pub(super) fn speaks_protobuf(&self) -> bool {
        self.speak_protobuf.load(Ordering::Relaxed)
    }

    pub(super) fn set_speaks_protobuf(&self, speaks: bool) {
        self.speak_protobuf.store(speaks, Ordering::Relaxed);
    }

    pub(super) fn is_mute(&self) -> bool {
        self.mute.load(Ordering::Relaxed)
    }

    pub(super) fn set_mute(&self, mute: bool) {
        self.mute.store(mute, Ordering::Relaxed);
    }

    pub(super) fn wake_watches(&self) {
        self.pulse.send_modify(|_| ());
    }

    /// Gives an order to all connections there are, and waits until they have obeyed: what changes afterwards is
    /// not sent on them.
    pub(super) fn order(&self, change: impl FnOnce(&mut Orders)) {
        self.orders.send_modify(change);
        let now = *self.orders.borrow();
        let is_obeyed = |served: &mut HashMap<Orders, usize>| served.keys().all(|begun| *begun == now);
        // Longer than any connection takes; if a test stops the runtime itself, it must not hang here.
        let limit = Duration::from_secs(5);
        let _ = self.left.wait_timeout_while(lock(&self.served), limit, |served| !is_obeyed(served));
    }

    /// A connection that begins now is being served until the guard goes.
    pub(super) fn serving(&self, begun: Orders) -> Serving<'_> {
        *lock(&self.served).entry(begun).or_default() += 1;
        Serving { shared: self, begun }
    }

    /// Notes a request; gives its place, for [`Shared::note_status`].
    pub(super) fn note(&self, request: Request) -> Place {
        let mut log = self.log();
        let place = Place { index: log.len(), at: request.at };
        log.push(request);
        place
    }

    /// Nothing if the log has been cleared since.
    pub(super) fn note_status(&self, place: Place, status: u16) {
        if let Some(request) = self.log().get_mut(place.index).filter(|request| request.at == place.at) {
            request.status = status;
        }
    }

    pub(super) fn admits(&self, credential: &Credential, certificate: Option<&CertificateDer<'_>>) -> bool {
        let access = self.access();
        match credential {
            Credential::Token(token) => *token == access.token,
            Credential::Certificate => certificate.is_some() && certificate == access.certificate.as_ref(),
            Credential::Nothing => false,
        }
    }
}

/// See [`Shared::serving`].
pub(super) struct Serving<'a> {
    shared: &'a Shared,
    begun: Orders,
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        let mut served = lock(&self.shared.served);
        if let Some(count) = served.get_mut(&self.begun) {
            *count -= 1;
            if *count == 0 {
                served.remove(&self.begun);
            }
        }
        self.shared.left.notify_all();
    }
}

/// Where a request is in the log.
#[derive(Clone, Copy)]
pub(super) struct Place {
    index: usize,
    at: Instant,
}

/// A test that panicked has failed anyway; what it left behind is still well-formed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
