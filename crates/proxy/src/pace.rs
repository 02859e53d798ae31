// SPDX-License-Identifier: Apache-2.0

//! When to write to the kernel: at once when idle, seldom enough under load, later and later after errors.
//!
//! ```text
//!   idle:     change ── write                          no wait at all
//!   load:     write ── pause as long as it took ── write ── pause ...      never longer than `max_pause`
//!   errors:   try ── 0.1 s ── try ── 0.2 s ── try ── 0.4 s ...             never longer than `max_backoff`
//! ```
//!
//! A write that takes long is one that costs much, so the pause grows with it: programming never takes more
//! than half of the loop's time, what comes meanwhile is written together, and since the pause is bounded
//! nothing waits for ever. Where a write costs the same whatever it changes, as with iptables, the pause is at least
//! `max_pause`: the more is written together, the better. No clock in here: the caller says what time it is.

use std::time::{Duration, Instant};

/// The first wait after an error; each further one doubles it.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);

/// No even pause is longer than this because a write took long.
const LONGEST_EVEN: Duration = Duration::from_secs(10);

/// See the module.
#[derive(Debug)]
pub struct Pacer {
    max_pause: Duration,
    /// Every pause is at least `max_pause`.
    even: bool,
    max_backoff: Duration,
    not_before: Option<Instant>,
    failures: u32,
}

impl Pacer {
    /// Idle from the beginning.
    pub fn new(max_pause: Duration, max_backoff: Duration) -> Pacer {
        Pacer { max_pause, even: false, max_backoff, not_before: None, failures: 0 }
    }

    /// From now on every pause is as long as the longest, and as the write before it: a write costs the same whatever it
    /// changes.
    pub fn pause_evenly(&mut self) {
        self.even = true;
    }

    /// From now on no pause is longer than this.
    pub fn set_max_pause(&mut self, max_pause: Duration) {
        self.max_pause = max_pause;
    }

    /// When what is to be done now may be done: `now`, or later.
    pub fn due(&self, now: Instant) -> Instant {
        self.not_before.map_or(now, |not_before| not_before.max(now))
    }

    /// A write went well.
    pub fn succeeded(&mut self, start: Instant, end: Instant) {
        let took = end.saturating_duration_since(start);
        self.failures = 0;
        let pause = match self.even && !self.max_pause.is_zero() {
            true => self.max_pause.max(took.min(LONGEST_EVEN)),
            false => took.min(self.max_pause),
        };
        self.not_before = Some(end + pause);
    }

    /// A write failed. `jitter` is a number from 0 to 1 and spreads retries of many nodes: half of the wait
    /// is fixed, half is by chance. Returns the wait.
    pub fn failed(&mut self, end: Instant, jitter: f64) -> Duration {
        let doubled = FIRST_BACKOFF.saturating_mul(1 << self.failures.min(16));
        self.failures = self.failures.saturating_add(1);
        let whole = doubled.min(self.max_backoff);
        let wait = whole.mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0);
        self.not_before = Some(end + wait);
        wait
    }

    /// Failures since the last success.
    pub fn failures(&self) -> u32 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn pacer() -> Pacer {
        Pacer::new(Duration::from_secs(1), Duration::from_secs(30))
    }

    #[test]
    fn idle_is_immediate() {
        let start = Instant::now();
        let mut pacer = pacer();
        assert_eq!(pacer.due(start), start, "nothing happened yet");
        pacer.succeeded(start, start + 5 * MS);
        let later = start + 100 * MS;
        assert_eq!(pacer.due(later), later, "the pause is long over");
    }

    #[test]
    fn under_load_the_pause_is_as_long_as_the_write() {
        let start = Instant::now();
        let mut pacer = pacer();
        pacer.succeeded(start, start + 20 * MS);
        assert_eq!(pacer.due(start + 21 * MS), start + 40 * MS);
    }

    #[test]
    fn no_pause_is_longer_than_the_least_period() {
        let start = Instant::now();
        let end = start + Duration::from_secs(10);
        let mut slow = pacer();
        slow.succeeded(start, end);
        assert_eq!(slow.due(end), end + Duration::from_secs(1));
        let mut never = Pacer::new(Duration::ZERO, Duration::from_secs(30));
        never.succeeded(start, end);
        assert_eq!(never.due(end), end, "a least period of 0 means no pause");
    }

    #[test]
    fn what_costs_the_same_each_time_is_done_seldom() {
        let start = Instant::now();
        let mut pacer = pacer();
        pacer.pause_evenly();
        assert_eq!(pacer.due(start), start, "idle is immediate");
        pacer.succeeded(start, start + 20 * MS);
        assert_eq!(pacer.due(start + 21 * MS), start + 1020 * MS);
        pacer.succeeded(start, start + 3000 * MS);
        assert_eq!(pacer.due(start), start + 6000 * MS, "half of the time at most");
        pacer.succeeded(start, start + 60_000 * MS);
        assert_eq!(pacer.due(start), start + 70_000 * MS);
        pacer.set_max_pause(Duration::ZERO);
        pacer.succeeded(start, start + 20 * MS);
        assert_eq!(pacer.due(start + 20 * MS), start + 20 * MS, "a least period of 0 means no pause");
    }

    #[test]
    fn errors_back_off_and_a_success_forgets_them() {
        let now = Instant::now();
        let mut pacer = pacer();
        let waits: Vec<_> = (0..12).map(|_| pacer.failed(now, 1.0).as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000, 30000, 30000]);
        assert_eq!(pacer.due(now), now + Duration::from_secs(30));
        pacer.succeeded(now, now);
        assert_eq!((pacer.due(now), pacer.failures()), (now, 0));
        assert_eq!(pacer.failed(now, 1.0), 100 * MS);
    }

    #[test]
    fn jitter_takes_at_most_half() {
        let now = Instant::now();
        for (jitter, wait) in [(0.0, 50), (0.5, 75), (1.0, 100), (-3.0, 50), (9.0, 100)] {
            assert_eq!(pacer().failed(now, jitter).as_millis(), wait, "{jitter}");
        }
    }
}
