// SPDX-License-Identifier: Apache-2.0

//! When the audit looks at the next part of the kernel: slowly, and not while there is other work, but never put off
//! for ever. No clock in here: the caller says what time it is.

use std::time::{Duration, Instant};

/// Between two rounds of the audit, and between two steps of a round.
const ROUND: Duration = Duration::from_secs(60);
pub(super) const STEP: Duration = Duration::from_secs(1);
/// A write was just made: more may come. So long a step that is due waits at most until they cease.
const PATIENCE: Duration = Duration::from_secs(10);

/// See the module.
#[derive(Debug)]
pub(super) struct Rounds {
    due: Instant,
    wrote: Option<Instant>,
}

impl Rounds {
    pub(super) fn new(now: Instant) -> Rounds {
        Rounds { due: now + ROUND, wrote: None }
    }

    /// The kernel was written to.
    pub(super) fn wrote(&mut self, now: Instant) {
        self.wrote = Some(now);
    }

    /// Everything was written, and only the audit can tell what becomes of it.
    pub(super) fn hurry(&mut self, now: Instant) {
        self.due = self.due.min(now + STEP);
    }

    /// When the next step is to be made: `now`, or later.
    pub(super) fn next(&self, now: Instant) -> Instant {
        let calm = self.wrote.map_or(now, |wrote| wrote + STEP);
        calm.min(self.due + PATIENCE).max(self.due).max(now)
    }

    /// A step was made, and `more` are to follow in this round.
    pub(super) fn stepped(&mut self, now: Instant, more: bool) {
        self.due = now + if more { STEP } else { ROUND };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_waits_for_a_calm_moment_but_not_for_ever() {
        let start = Instant::now();
        let mut rounds = Rounds::new(start);
        assert_eq!(rounds.next(start), start + ROUND, "what was just read need not be looked at");
        let due = start + ROUND;
        assert_eq!(rounds.next(due), due);
        rounds.wrote(due);
        assert_eq!(rounds.next(due), due + STEP, "more may come");
        assert_eq!(rounds.next(due + STEP), due + STEP, "none came");
        for second in 1..60 {
            rounds.wrote(due + Duration::from_secs(second));
        }
        let late = due + Duration::from_secs(59);
        assert_eq!(rounds.next(due), due + PATIENCE);
        assert_eq!(rounds.next(late), late, "it has waited long enough");
        rounds.stepped(late, true);
        assert_eq!(rounds.next(late), late + STEP);
        rounds.stepped(late, false);
        assert_eq!(rounds.next(late), late + ROUND);
        rounds.hurry(late);
        assert_eq!(rounds.next(late), late + STEP);
    }
}
