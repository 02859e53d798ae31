// SPDX-License-Identifier: Apache-2.0

//! How long to wait before the next try.

use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};

/// Doubles from a quarter of a second to half a minute. Jitter takes up to half away, so that thousands of nodes
/// that lost the same server do not come back at one moment.
#[derive(Debug)]
pub(crate) struct Backoff {
    tries: u32,
    random: Random,
}

impl Backoff {
    pub(crate) fn new() -> Backoff {
        Backoff { tries: 0, random: Random::new() }
    }

    /// The time to wait now; the next will be longer.
    pub(crate) fn wait(&mut self) -> Duration {
        let full = FIRST.saturating_mul(1 << self.tries.min(16)).min(LONGEST);
        self.tries = self.tries.saturating_add(1);
        full - full.mul_f64(self.random.fraction() / 2.0)
    }

    /// It works again.
    pub(crate) fn reset(&mut self) {
        self.tries = 0;
    }
}

/// Numbers nobody has to be unable to guess.
#[derive(Debug)]
pub(crate) struct Random {
    state: RandomState,
    count: u64,
}

impl Random {
    pub(crate) fn new() -> Random {
        Random { state: RandomState::new(), count: 0 }
    }

    /// From 0 to below 1.
    pub(crate) fn fraction(&mut self) -> f64 {
        self.count = self.count.wrapping_add(1);
        (self.state.hash_one(self.count) >> 11) as f64 / (1u64 << 53) as f64
    }
}

const FIRST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_a_bound_and_differ() {
        let mut backoff = Backoff::new();
        let mut full = FIRST;
        for _ in 0..100 {
            let wait = backoff.wait();
            assert!(wait <= full && wait >= full / 2, "{wait:?} of {full:?}");
            full = (full * 2).min(LONGEST);
        }
        backoff.reset();
        assert!(backoff.wait() <= FIRST);
        let waits: std::collections::HashSet<_> = (0..10).map(|_| Backoff::new().wait()).collect();
        assert!(waits.len() > 1);
    }
}
