// SPDX-License-Identifier: Apache-2.0

//! One endpoint of one service: how busy it is, and whether it lives.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use crate::{
    clock::{self, Millis, millis},
    counters::{Counter, Level},
    settings::Settings,
};

/// See the module.
#[derive(Debug)]
pub struct Endpoint {
    /// Where it is.
    pub address: SocketAddr,
    /// Connections or flows now.
    pub open: Level,
    /// Connections that were made, flows that were begun.
    pub connections: Counter,
    /// Attempts that failed.
    pub failures: Counter,
    /// Failures in a row.
    strikes: AtomicU32,
    ejected_until: AtomicU64,
    /// Active checks say no.
    unhealthy: AtomicBool,
    /// When it left its service; 0 while it is there.
    gone_at: AtomicU64,
    /// It is no more: nothing sent to it arrives.
    void: AtomicBool,
}

impl Endpoint {
    pub(crate) fn new(address: SocketAddr) -> Endpoint {
        Endpoint {
            address,
            open: Level::default(),
            connections: Counter::default(),
            failures: Counter::default(),
            strikes: AtomicU32::new(0),
            ejected_until: AtomicU64::new(0),
            unhealthy: AtomicBool::new(false),
            gone_at: AtomicU64::new(0),
            void: AtomicBool::new(false),
        }
    }

    /// Neither set aside nor found dead.
    pub(crate) fn is_usable(&self, now: Millis) -> bool {
        self.ejected_until.load(Ordering::Relaxed) <= now && self.is_healthy()
    }

    /// Active checks have nothing against it.
    pub fn is_healthy(&self) -> bool {
        !self.unhealthy.load(Ordering::Relaxed)
    }

    /// It failed, and gets no new connections for a while.
    pub fn is_set_aside(&self) -> bool {
        self.ejected_until.load(Ordering::Relaxed) > clock::now()
    }

    /// It is no longer one of its service's.
    pub fn is_gone(&self) -> bool {
        self.gone_at.load(Ordering::Relaxed) != 0
    }

    /// It left its service, and nothing sent to it arrives.
    pub fn is_void(&self) -> bool {
        self.void.load(Ordering::Relaxed)
    }

    pub(crate) fn make_void(&self) {
        self.void.store(true, Ordering::Relaxed);
    }

    pub(crate) fn gone_for(&self, now: Millis) -> Option<Millis> {
        match self.gone_at.load(Ordering::Relaxed) {
            0 => None,
            at => Some(now.saturating_sub(at)),
        }
    }

    pub(crate) fn leave(&self, now: Millis) {
        self.gone_at.store(now, Ordering::Relaxed);
    }

    pub(crate) fn set_healthy(&self, healthy: bool) {
        self.unhealthy.store(!healthy, Ordering::Relaxed);
    }

    pub(crate) fn succeeded(&self) {
        self.connections.add(1);
        if self.strikes.load(Ordering::Relaxed) != 0 {
            self.strikes.store(0, Ordering::Relaxed);
            self.ejected_until.store(0, Ordering::Relaxed);
        }
    }

    /// Counts a failure, and returns for how long the endpoint should be set aside.
    pub(crate) fn failed(&self, settings: &Settings) -> Duration {
        self.failures.add(1);
        let strikes = self.strikes.fetch_add(1, Ordering::Relaxed).min(16);
        settings.ejection.saturating_mul(1 << strikes).min(settings.longest_ejection)
    }

    /// Sets it aside, and returns whether it was not already.
    pub(crate) fn eject(&self, now: Millis, time: Duration) -> bool {
        self.ejected_until.swap(now + millis(time), Ordering::Relaxed) <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_fails_again_is_set_aside_for_longer_up_to_a_bound() {
        let settings = Settings {
            ejection: Duration::from_secs(1),
            longest_ejection: Duration::from_secs(5),
            ..Settings::default()
        };
        let endpoint = Endpoint::new("192.0.2.1:80".parse().expect("an address"));
        let times: Vec<u64> = (0..5).map(|_| endpoint.failed(&settings).as_secs()).collect();
        assert_eq!(times, [1, 2, 4, 5, 5]);
        assert!(endpoint.eject(100, Duration::from_millis(50)));
        assert!(!endpoint.is_usable(149) && endpoint.is_usable(150));
        endpoint.succeeded();
        assert!(endpoint.is_usable(120), "who answers is back at once");
        assert_eq!(endpoint.failed(&settings).as_secs(), 1, "and begins anew");
    }
}
