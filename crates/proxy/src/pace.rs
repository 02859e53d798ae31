// SPDX-License-Identifier: Apache-2.0

//! When to write to the kernel: at once when idle, seldom enough under load, later and later after errors.
//!
//! ```text
//!   idle:     change ── write                          no wait at all
//!   load:     write ── pause as long as it took ── write ── pause ...      never longer than `max_pause`
//!   errors:   try ── 0.1 s ── try ── 0.2 s ── try ── 0.4 s ...             never longer than `max_backoff`
//!   repairs:  somebody flushed our rules ── write                          a few at once, then as under load
//! ```
//!
//! A write that takes long is one that costs much, so the pause grows with it: programming never takes more
//! than half of the loop's time, what comes meanwhile is written together, and since the pause is bounded
//! nothing waits for ever. A complete write says nothing of what a change costs, so that changes do not wait for it. Where a
//! write costs the same whatever it changes, as with iptables, the pause is at least `max_pause`: the more is written
//! together, the better. No clock in here: the caller says what time it is.

use std::time::{Duration, Instant};

/// The first wait after an error; each further one doubles it.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);

/// No even pause is longer than this because a write took long.
const LONGEST_EVEN: Duration = Duration::from_secs(10);

/// So many repairs are made without a pause, whatever was written before: while rules are missing, nothing is served. Who goes
/// on breaking them shall not keep the node busy with repairs, though.
const REPAIRS_AT_ONCE: u32 = 5;
/// So soon another one may be made.
const REPAIR_EVERY: Duration = Duration::from_secs(10);

/// What is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// What has changed.
    Part,
    /// Everything.
    All,
    /// Everything, as somebody has changed what is in the kernel.
    Repair,
}

/// See the module.
#[derive(Debug)]
pub struct Pacer {
    max_pause: Duration,
    /// Every pause is at least `max_pause`.
    even: bool,
    max_backoff: Duration,
    /// When a part may be written again, and when everything.
    part: Option<Instant>,
    all: Option<Instant>,
    failures: u32,
    /// When the allowance of repairs will be whole again.
    whole_at: Option<Instant>,
}

impl Pacer {
    /// Idle from the beginning.
    pub fn new(max_pause: Duration, max_backoff: Duration) -> Pacer {
        Pacer { max_pause, even: false, max_backoff, part: None, all: None, failures: 0, whole_at: None }
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

    /// When this may be done: `now`, or later.
    pub fn due(&self, work: Work, now: Instant) -> Instant {
        let not_before = match work {
            Work::Part => self.part,
            Work::Repair if self.failures == 0 && self.may_repair(now) => None,
            Work::All | Work::Repair => self.all,
        };
        not_before.map_or(now, |not_before| not_before.max(now))
    }

    fn may_repair(&self, now: Instant) -> bool {
        self.whole_at.is_none_or(|whole_at| whole_at <= now + REPAIR_EVERY * (REPAIRS_AT_ONCE - 1))
    }

    /// A write went well.
    pub fn succeeded(&mut self, work: Work, start: Instant, end: Instant) {
        let took = end.saturating_duration_since(start);
        self.failures = 0;
        if work == Work::Repair {
            let whole_at = self.whole_at.map_or(start, |whole_at| whole_at.max(start));
            // A fight of days is forgotten as soon as one of minutes.
            self.whole_at = Some((whole_at + REPAIR_EVERY).min(start + REPAIR_EVERY * REPAIRS_AT_ONCE));
        }
        let even = self.even && !self.max_pause.is_zero();
        let pause = match even {
            true => self.max_pause.max(took.min(LONGEST_EVEN)),
            false => took.min(self.max_pause),
        };
        self.all = Some(end + pause);
        self.part = if work == Work::Part || even { self.all } else { None };
    }

    /// A write failed. `jitter` is a number from 0 to 1 and spreads retries of many nodes: half of the wait
    /// is fixed, half is by chance. Returns the wait.
    pub fn failed(&mut self, end: Instant, jitter: f64) -> Duration {
        let doubled = FIRST_BACKOFF.saturating_mul(1 << self.failures.min(16));
        self.failures = self.failures.saturating_add(1);
        let whole = doubled.min(self.max_backoff);
        let wait = whole.mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0);
        self.all = Some(end + wait);
        self.part = self.all;
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
        assert_eq!(pacer.due(Work::Part, start), start, "nothing happened yet");
        pacer.succeeded(Work::Part, start, start + 5 * MS);
        let later = start + 100 * MS;
        assert_eq!(pacer.due(Work::Part, later), later, "the pause is long over");
    }

    #[test]
    fn under_load_the_pause_is_as_long_as_the_write() {
        let start = Instant::now();
        let mut pacer = pacer();
        pacer.succeeded(Work::Part, start, start + 20 * MS);
        assert_eq!(pacer.due(Work::Part, start + 21 * MS), start + 40 * MS);
    }

    #[test]
    fn no_pause_is_longer_than_the_least_period() {
        let start = Instant::now();
        let end = start + Duration::from_secs(10);
        let mut slow = pacer();
        slow.succeeded(Work::Part, start, end);
        assert_eq!(slow.due(Work::Part, end), end + Duration::from_secs(1));
        let mut never = Pacer::new(Duration::ZERO, Duration::from_secs(30));
        never.succeeded(Work::Part, start, end);
        assert_eq!(never.due(Work::Part, end), end, "a least period of 0 means no pause");
    }

    #[test]
    fn changes_do_not_wait_for_a_complete_write() {
        let start = Instant::now();
        let end = start + 600 * MS;
        let mut pacer = pacer();
        pacer.succeeded(Work::All, start, end);
        assert_eq!(pacer.due(Work::Part, end), end);
        assert_eq!(pacer.due(Work::All, end), end + 600 * MS);
        pacer.succeeded(Work::Part, end, end + MS);
        assert_eq!(pacer.due(Work::All, end), end + 2 * MS, "as after any other change");
        pacer.pause_evenly();
        pacer.succeeded(Work::All, start, end);
        assert_eq!(pacer.due(Work::Part, end), end + 1000 * MS, "where all writes cost the same");
    }

    #[test]
    fn repairs_are_made_at_once_until_they_become_many() {
        let mut now = Instant::now();
        let mut pacer = pacer();
        let repair = |pacer: &mut Pacer, now: &mut Instant| {
            let waited = pacer.due(Work::Repair, *now) - *now;
            pacer.succeeded(Work::Repair, *now, *now + 600 * MS);
            *now += 700 * MS;
            waited
        };
        let waits: Vec<_> = (0..8).map(|_| repair(&mut pacer, &mut now)).collect();
        assert_eq!(waits, [[Duration::ZERO; 5].as_slice(), &[500 * MS; 3]].concat());
        now += REPAIR_EVERY;
        let waits: Vec<_> = (0..2).map(|_| repair(&mut pacer, &mut now)).collect();
        assert_eq!(waits, [Duration::ZERO, 500 * MS], "one more");
        now += REPAIR_EVERY * REPAIRS_AT_ONCE;
        let waits: Vec<_> = (0..6).map(|_| repair(&mut pacer, &mut now)).collect();
        assert_eq!(waits, [[Duration::ZERO; 5].as_slice(), &[500 * MS]].concat(), "no more than at first");
        pacer.failed(now, 1.0);
        now += REPAIR_EVERY;
        pacer.failed(now, 1.0);
        assert_eq!(pacer.due(Work::Repair, now), now + 200 * MS, "what fails is not hurried");
    }

    #[test]
    fn what_costs_the_same_each_time_is_done_seldom() {
        let start = Instant::now();
        let mut pacer = pacer();
        pacer.pause_evenly();
        assert_eq!(pacer.due(Work::Part, start), start, "idle is immediate");
        pacer.succeeded(Work::Part, start, start + 20 * MS);
        assert_eq!(pacer.due(Work::Part, start + 21 * MS), start + 1020 * MS);
        pacer.succeeded(Work::Part, start, start + 3000 * MS);
        assert_eq!(pacer.due(Work::Part, start), start + 6000 * MS, "half of the time at most");
        pacer.succeeded(Work::Part, start, start + 60_000 * MS);
        assert_eq!(pacer.due(Work::Part, start), start + 70_000 * MS);
        pacer.set_max_pause(Duration::ZERO);
        pacer.succeeded(Work::Part, start, start + 20 * MS);
        assert_eq!(
            pacer.due(Work::Part, start + 20 * MS),
            start + 20 * MS,
            "a least period of 0 means no pause"
        );
    }

    #[test]
    fn errors_back_off_and_a_success_forgets_them() {
        let now = Instant::now();
        let mut pacer = pacer();
        let waits: Vec<_> = (0..12).map(|_| pacer.failed(now, 1.0).as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000, 30000, 30000]);
        assert_eq!(pacer.due(Work::Part, now), now + Duration::from_secs(30));
        pacer.succeeded(Work::Part, now, now);
        assert_eq!((pacer.due(Work::Part, now), pacer.failures()), (now, 0));
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
