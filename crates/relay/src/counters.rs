// SPDX-License-Identifier: Apache-2.0

//! What is counted, for metrics.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// How many so far.
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How many there are now.
#[derive(Debug, Default)]
pub struct Level(AtomicUsize);

impl Level {
    /// One more, unless there are `limit` already.
    pub(crate) fn enter(&self, limit: usize) -> bool {
        let step = |now| (now < limit).then_some(now + 1);
        self.0.try_update(Ordering::Relaxed, Ordering::Relaxed, step).is_ok()
    }

    pub(crate) fn leave(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// How many there are.
    pub fn value(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// Why a client was turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// No descriptor was left.
    Descriptors,
    /// The relay has as many connections as it may.
    Connections,
    /// The service has as many connections as it may.
    Service,
    /// There is no service at this address.
    Unknown,
    /// The service has no endpoint.
    Endpoints,
    /// Every attempt to reach an endpoint failed.
    Unreachable,
    /// Another process has bound the address that we would answer as (UDP).
    Taken,
    /// The client is not one of those who may connect.
    Forbidden,
}

impl Refusal {
    /// All of them.
    pub const ALL: [Refusal; 8] = [
        Refusal::Descriptors,
        Refusal::Connections,
        Refusal::Service,
        Refusal::Unknown,
        Refusal::Endpoints,
        Refusal::Unreachable,
        Refusal::Taken,
        Refusal::Forbidden,
    ];

    /// One word.
    pub fn name(self) -> &'static str {
        match self {
            Refusal::Descriptors => "descriptors",
            Refusal::Connections => "connections",
            Refusal::Service => "service_limit",
            Refusal::Unknown => "unknown",
            Refusal::Endpoints => "no_endpoints",
            Refusal::Unreachable => "unreachable",
            Refusal::Taken => "address_in_use",
            Refusal::Forbidden => "source_ranges",
        }
    }
}

/// Of the whole relay.
#[derive(Debug, Default)]
pub struct Counters {
    /// TCP connections accepted.
    pub accepted: Counter,
    /// UDP flows begun.
    pub flows: Counter,
    /// TCP connections open.
    pub open_connections: Level,
    /// UDP flows open.
    pub open_flows: Level,
    /// Pipes made and not closed.
    pub pipes: Level,
    /// Attempts to reach an endpoint that failed.
    pub failed_attempts: Counter,
    /// Connections that were given to another endpoint.
    pub retries: Counter,
    /// Times an endpoint was set aside.
    pub ejections: Counter,
    /// Connections closed because their endpoint had gone.
    pub drained: Counter,
    /// Connections closed because one direction had ended and the other did not move.
    pub half_closed: Counter,
    /// UDP flows ended to make room.
    pub evicted_flows: Counter,
    /// Bytes from clients to endpoints.
    pub sent_bytes: Counter,
    /// Bytes from endpoints to clients.
    pub received_bytes: Counter,
    /// Bytes that went through this process because no pipe was left; part of the two above.
    pub copied_bytes: Counter,
    refused: [Counter; Refusal::ALL.len()],
}

impl Counters {
    pub(crate) fn refuse(&self, why: Refusal) {
        self.refused[why as usize].add(1);
    }

    /// How many clients were turned away.
    pub fn refused(&self, why: Refusal) -> u64 {
        self.refused[why as usize].value()
    }
}
