// SPDX-License-Identifier: Apache-2.0

//! What tables of the legacy variant look like when only we wrote, to see that somebody else did.
//!
//! ip_tables tells nobody of a change. So the tables are looked at: their shape several times a second, which costs a
//! system call; their rules where the shape is another, and where somebody ran a tool (`canary`), for an edit that left
//! none a byte longer; and now and then without a reason, for those who are not heard. To read the rules costs a copy of
//! the table, so it is done the rarer the larger that is, and never when we write: what we wrote is remembered, and left
//! out of the next comparison.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use hashbrown::{HashMap, HashSet};
use model::{Family, PerFamily};
use netlink::legacy::{Shape, Tables};

use super::{
    Table,
    leftovers::{is_current, is_per_service},
    words,
};
use crate::{Drift, names::xt};

/// The tables in which something of ours can be harmed.
const WATCHED: [Table; 2] = [Table::Nat, Table::Filter];

/// How often shapes are looked at. What others do is to be noticed within a second.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How often rules are read without a reason: once in so much time, and in so many times what it takes.
const READ_EVERY: (Duration, u32) = (Duration::from_secs(1), 200);
/// How soon again after neighbours have changed the shape: in so many times what it takes.
const READ_AGAIN: u32 = 20;
/// After somebody was heard, rules are read at once: so often in a row, and then for a fiftieth of the time at most. A
/// node on which tools are run all the time, if only to look, must not pay more than that.
const HEARD: (u32, u32) = (4, 50);
/// How rare a comparison can become: every 16 seconds.
const LONGEST: u32 = 6;

/// See the module. Held while we write.
#[derive(Clone, Debug, Default)]
pub(super) struct Ledger(Arc<Mutex<PerFamily<Page>>>);

/// The rules of our chains, and those that lead to them, by chain.
#[derive(Debug, Default)]
struct Rules(HashMap<u64, Print>);

#[derive(Debug)]
enum Print {
    /// A chain that we only write whole.
    Whole(u64),
    /// A chain in which we write lines; sorted.
    Lines(Vec<u64>),
}

/// What we wrote since rules were last read, by chain.
#[derive(Debug, Default)]
struct Own {
    /// Whole, or removed.
    rewritten: HashSet<u64>,
    /// Lines that came, and lines that went.
    lines: HashMap<u64, (usize, usize)>,
}

#[derive(Debug, Default)]
struct Page {
    /// Opened when first needed, in the network namespace of the thread that writes.
    tables: Option<Tables>,
    /// `None` where nothing of ours has been read or written yet.
    expected: Option<[Shape; 2]>,
    /// `None` until they have been read.
    rules: Option<Rules>,
    own: Own,
    /// The shape was another when we came to write.
    suspicious: bool,
    /// Somebody else ran a tool since rules were last read.
    heard: bool,
    allowance: Allowance,
    /// We have compared everything, and not written since.
    looked: bool,
    /// So often in a row everything was compared in vain: neighbours write to the same tables.
    in_vain: u32,
    /// Nothing is told before.
    quiet_until: Option<Instant>,
    /// What it took to read the rules the last time, and when that was.
    read_took: Duration,
    read_at: Option<Instant>,
}

/// What may be spent on looking after those who were heard.
#[derive(Debug, Default)]
struct Allowance {
    /// And has not been made up for by time.
    spent: Duration,
    at: Option<Instant>,
}

impl Allowance {
    /// May something be done that takes so long?
    fn has(&mut self, takes: Duration, now: Instant) -> bool {
        let (in_a_row, share) = HEARD;
        let passed = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        (self.spent, self.at) = (self.spent.saturating_sub(passed / share), Some(now));
        self.spent <= takes * (in_a_row - 1)
    }
}

fn key(table: usize, chain: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    (table, chain).hash(&mut hasher);
    hasher.finish()
}

/// What is ours, or partly ours.
fn is_watched(name: &str) -> bool {
    is_current(name) || name == xt::FIREWALL
}

impl Print {
    fn of(chain: &str, rules: &[u64]) -> Print {
        if is_per_service(chain) {
            let mut hasher = DefaultHasher::new();
            rules.hash(&mut hasher);
            return Print::Whole(hasher.finish());
        }
        let mut lines = rules.to_vec();
        lines.sort_unstable();
        Print::Lines(lines)
    }

    /// Is it the same, but for so many lines that came and went?
    fn follows(&self, before: &Print, (came, went): (usize, usize)) -> bool {
        match (self, before) {
            (Print::Whole(now), Print::Whole(before)) => now == before,
            (Print::Lines(now), Print::Lines(before)) => {
                let new = now.iter().filter(|line| before.binary_search(line).is_err()).count();
                let gone = before.iter().filter(|line| now.binary_search(line).is_err()).count();
                new <= came && gone <= went && now.len() + went == before.len() + came
            }
            _ => false,
        }
    }
}

impl Rules {
    /// Is it what was there before, but for what we wrote?
    fn follows(&self, before: &Rules, own: &Own) -> bool {
        let is_own = |chain: &u64| own.rewritten.contains(chain);
        let lines = |chain: &u64| own.lines.get(chain).copied().unwrap_or_default();
        let stays = |(chain, print): (&u64, &Print)| {
            is_own(chain) || self.0.get(chain).is_some_and(|now| now.follows(print, lines(chain)))
        };
        let is_known = |chain: &u64| before.0.contains_key(chain) || is_own(chain) || lines(chain).0 > 0;
        before.0.iter().all(stays) && self.0.keys().all(is_known)
    }
}

impl Own {
    /// We are about to write this.
    fn note(&mut self, input: &str) {
        let mut table = None;
        for line in input.lines() {
            if let Some(name) = line.strip_prefix('*') {
                table = WATCHED.iter().position(|watched| watched.name() == name);
            }
            let Some(table) = table else { continue };
            if let Some(chain) = words::chain(line) {
                self.rewritten.insert(key(table, chain));
            }
            let mut words = line.splitn(3, ' ');
            // What is added at the end is so to a chain that is written whole.
            if let (Some(verb @ ("-I" | "-D")), Some(chain)) = (words.next(), words.next()) {
                let (came, went) = self.lines.entry(key(table, chain)).or_default();
                *(if verb == "-I" { came } else { went }) += 1;
            }
        }
    }
}

impl Page {
    fn tables(&mut self, family: Family) -> Option<&Tables> {
        if self.tables.is_none() {
            let family = match family {
                Family::V4 => netlink::Family::V4,
                Family::V6 => netlink::Family::V6,
            };
            self.tables = Tables::open(family).ok();
        }
        self.tables.as_ref()
    }

    /// The shapes now; `None` if that cannot be told.
    fn shapes(&mut self, family: Family) -> Option<[Shape; 2]> {
        let tables = self.tables(family)?;
        let [nat, filter] = WATCHED.map(|table| tables.shape(table.name()).ok());
        Some([nat?, filter?])
    }

    /// Reads the rules, and takes them for what is to be from now on; those of before.
    fn read(&mut self, family: Family) -> (Option<Rules>, Own) {
        let begun = Instant::now();
        let mut rules = Rules::default();
        let tables = self.tables(family);
        let read = WATCHED.map(|table| tables.and_then(|tables| tables.read(table.name()).ok()));
        for (table, entries) in read.iter().enumerate() {
            if let Some(entries) = entries {
                entries.each_chain(is_watched, |chain, lines| {
                    rules.0.insert(key(table, chain), Print::of(chain, lines));
                });
            }
        }
        let shapes = match &read {
            [Some(nat), Some(filter)] => Some([nat.shape(), filter.shape()]),
            // A table too large for the memory there is.
            _ => None,
        };
        drop(read);
        self.read_took = begun.elapsed();
        self.read_at = Some(Instant::now());
        (self.suspicious, self.heard) = (false, false);
        self.expected = shapes.or_else(|| self.shapes(family));
        let before = std::mem::replace(&mut self.rules, shapes.map(|_| rules));
        (before, std::mem::take(&mut self.own))
    }

    fn may_read(&self, least: Duration, times: u32) -> bool {
        self.read_at.is_none_or(|at| at.elapsed() >= least.max(self.read_took * times))
    }

    /// Have others changed something of ours? Asked as often as it may be.
    fn is_drifted(&mut self, family: Family) -> bool {
        let Some(expected) = self.expected else { return false };
        let is_other = self.suspicious || self.shapes(family).is_some_and(|shapes| shapes != expected);
        let is_heard = self.heard;
        let may_read = match (is_other, is_heard) {
            (true, _) => self.may_read(LOOK_EVERY, READ_AGAIN),
            (false, true) => {
                self.may_read(LOOK_EVERY, 0) && self.allowance.has(self.read_took, Instant::now())
            }
            (false, false) => self.may_read(READ_EVERY.0, READ_EVERY.1),
        };
        if !may_read {
            return false;
        }
        let (before, own) = self.read(family);
        if is_heard {
            self.allowance.spent += self.read_took;
        }
        match (&self.rules, before) {
            (Some(now), Some(before)) => !now.follows(&before, &own),
            _ => is_other,
        }
    }
}

impl Ledger {
    fn lock(&self) -> MutexGuard<'_, PerFamily<Page>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Before we write this. What others did to the shape would look like our own doing afterwards.
    pub(super) fn open(&self, family: Family, input: &str) -> Entry<'_> {
        let mut pages = self.lock();
        let page = &mut pages[family];
        if let Some(expected) = page.expected {
            page.suspicious |= page.shapes(family).is_some_and(|shapes| shapes != expected);
        }
        if page.rules.is_some() {
            page.own.note(input);
        }
        if std::mem::take(&mut page.looked) {
            page.in_vain = 0;
        }
        Entry { pages, family }
    }

    /// Before we compare everything.
    pub(super) fn look(&self, family: Family) {
        let mut pages = self.lock();
        let page = &mut pages[family];
        page.in_vain += u32::from(std::mem::replace(&mut page.looked, true));
        // A table that is not there is not made for the sake of looking: we are about to write it.
        if page.expected.is_some() {
            page.read(family);
        }
    }

    /// What others have changed, if anything. Told once. `is_heard`: somebody ran a tool; taken when it is noted.
    pub(super) fn surprise(&self, is_heard: &mut bool) -> Option<Drift> {
        let mut pages = self.0.try_lock().ok()?;
        if std::mem::take(is_heard) {
            Family::BOTH.into_iter().for_each(|family| pages[family].heard = true);
        }
        for family in Family::BOTH {
            let page = &mut pages[family];
            if page.quiet_until.is_some_and(|until| Instant::now() < until) {
                continue;
            }
            if page.is_drifted(family) {
                // To compare costs more than to look: the more of it was in vain, the rarer it is done.
                page.quiet_until = Some(Instant::now() + LOOK_EVERY * (1 << page.in_vain.min(LONGEST)));
                let what = format!("something in the legacy tables of iptables ({family})");
                return Some(Drift { what, by: None, suspected: true });
            }
        }
        None
    }
}

/// We are writing.
pub(super) struct Entry<'a> {
    pages: MutexGuard<'a, PerFamily<Page>>,
    family: Family,
}

impl Entry<'_> {
    /// We have written.
    pub(super) fn close(&mut self) {
        let page = &mut self.pages[self.family];
        page.expected = page.shapes(self.family);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(chains: &[(&str, &[u64])]) -> Rules {
        Rules(chains.iter().map(|(chain, rules)| (key(0, chain), Print::of(chain, rules))).collect())
    }

    #[test]
    fn those_who_run_tools_all_the_time_are_not_looked_after_all_the_time() {
        let (mut allowance, begun, takes) =
            (Allowance::default(), Instant::now(), Duration::from_millis(100));
        let mut reads = 0;
        let mut times = Vec::new();
        for tick in 0..400 {
            let now = begun + Duration::from_millis(250) * tick;
            if allowance.has(takes, now) {
                (reads, allowance.spent) = (reads + 1, allowance.spent + takes);
                times.push(tick);
            }
        }
        assert_eq!(times[..4], [0, 1, 2, 3], "at first at once");
        let share = reads * takes.as_millis() * 50 / (400 * 250);
        assert!((1..=2).contains(&share), "{reads} reads of 100 ms in 100 s");
        assert!(allowance.has(takes, begun + Duration::from_secs(1000)), "and at once again");
    }

    #[test]
    fn what_we_wrote_is_left_out_and_all_else_is_seen() {
        let before =
            || rules(&[("KUBE-SERVICES", &[1, 2, 3]), ("KUBE-SVC-A", &[4, 5]), ("KUBE-SEP-B", &[6])]);
        let own = |input: &str| {
            let mut own = Own::default();
            own.note(input);
            own
        };
        assert!(before().follows(&before(), &own("")));
        let edited = rules(&[("KUBE-SERVICES", &[1, 2, 3]), ("KUBE-SVC-A", &[4, 9]), ("KUBE-SEP-B", &[6])]);
        assert!(!edited.follows(&before(), &own("")));
        assert!(!edited.follows(&before(), &own("*filter\n:KUBE-SVC-A - [0:0]\nCOMMIT\n")), "another table");
        assert!(edited.follows(&before(), &own("*nat\n:KUBE-SVC-A - [0:0]\nCOMMIT\n")));
        let gone = rules(&[("KUBE-SERVICES", &[1, 2, 3]), ("KUBE-SVC-A", &[4, 5])]);
        assert!(!gone.follows(&before(), &own("")));
        assert!(gone.follows(&before(), &own("*nat\n:KUBE-SEP-B - [0:0]\n-X KUBE-SEP-B\nCOMMIT\n")));
        assert!(!before().follows(&gone, &own("")), "a chain came that we did not make");
        // A line of ours came, and nobody else's went with it.
        let line = "*nat\n-I KUBE-SERVICES -j X\nCOMMIT\n";
        let with =
            |lines: &[u64]| rules(&[("KUBE-SERVICES", lines), ("KUBE-SVC-A", &[4, 5]), ("KUBE-SEP-B", &[6])]);
        assert!(with(&[7, 1, 2, 3]).follows(&before(), &own(line)));
        assert!(!with(&[7, 1, 2, 8]).follows(&before(), &own(line)));
        assert!(!with(&[7, 1, 3]).follows(&before(), &own(line)));
        assert!(
            with(&[7, 1, 3])
                .follows(&before(), &own(&format!("*nat\n-D KUBE-SERVICES -j Y\nCOMMIT\n{line}")))
        );
    }
}
