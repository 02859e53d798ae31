// SPDX-License-Identifier: Apache-2.0

//! When a file may be read, and when it is gone. Without IO; time is given.
//!
//! ```text
//!            changed                    closed, renamed into place, or quiet for QUIET
//! read  ──────────────►  unsettled  ──────────────────────────────────────────────────►  read again
//!   │                        ▲ written to: not before it is closed
//!   └── missing ── for GRACE ──► gone          (an editor's rename leaves a gap of some milliseconds)
//! ```
//!
//! A file that is settled costs its name and eight bytes; only those in between have a state.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    time::Duration,
};

use hashbrown::HashMap;
use tokio::time::Instant;

use super::scan::{Name, Stamp};

/// What the kernel told about files since the last look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Notices {
    /// Whatever has changed may be read: all is new, or was swapped as a whole.
    pub all: bool,
    /// Notices were lost. Anything may have changed, and may still be being written.
    pub lost: bool,
    pub files: HashMap<OsString, Notice>,
}

/// What happened to one file last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// Something that says neither that it may be read nor that it may not.
    Touched,
    /// Written to and not closed since.
    Written,
    /// Closed after writing, renamed into place, or removed.
    Settled,
}

impl Notices {
    pub(super) fn settle(&mut self, name: OsString) {
        self.files.insert(name, Notice::Settled);
    }

    pub(super) fn write(&mut self, name: OsString) {
        self.files.insert(name, Notice::Written);
    }

    pub(super) fn touch(&mut self, name: OsString) {
        self.files.entry(name).or_insert(Notice::Touched);
    }

    /// Every file has to be looked at, not only those that are named.
    pub(super) fn concern_all(&self) -> bool {
        self.all || self.lost
    }

    /// What is known of one file.
    fn about(&self, name: &OsStr) -> News {
        match self.files.get(name) {
            // Also if it looks as it did: the clock of a file system may tick too seldom to show a change.
            Some(Notice::Settled) => News::Settled,
            Some(Notice::Written) => News::Written,
            _ if self.all => News::Swapped,
            _ if self.lost => News::Lost,
            _ => News::Nothing,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum News {
    Nothing,
    Written,
    Settled,
    Swapped,
    Lost,
}

/// What to do about a file now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Nothing,
    Read,
    Gone,
}

#[derive(Debug, Default)]
pub(super) struct Desk {
    /// The state each file was last read in.
    read: HashMap<Name, Stamp>,
    /// Files that are not settled.
    pending: BTreeMap<Name, Pending>,
}

#[derive(Debug)]
struct Pending {
    /// The state it was last seen in, none if it was missing; and since when.
    seen: Option<Stamp>,
    since: Instant,
    being_written: bool,
}

impl Desk {
    /// Decides about one file, given its state, or that it is missing. Gone files are forgotten here; those that
    /// are read have to be told of by [`Desk::was_read`] or [`Desk::give_up`], or they will be asked for again.
    pub(super) fn look(
        &mut self,
        name: &Name,
        stamp: Option<Stamp>,
        notices: &Notices,
        now: Instant,
    ) -> Verdict {
        let news = notices.about(name);
        let is_settled = matches!(news, News::Settled | News::Swapped);
        let before = self.pending.get(name);
        let being_written = match news {
            News::Nothing => before.is_some_and(|pending| pending.being_written),
            News::Written => true,
            News::Settled | News::Swapped | News::Lost => false,
        };
        let is_known = self.read.get(name).copied() == stamp && news != News::Settled;
        if is_known && !being_written {
            self.pending.remove(name);
            return Verdict::Nothing;
        }
        let since = before.filter(|pending| pending.seen == stamp).map_or(now, |pending| pending.since);
        let pending = Pending { seen: stamp, since, being_written };
        let due = pending.due();
        if stamp.is_none() && (due.is_some_and(|due| due <= now) || !self.read.contains_key(name)) {
            self.pending.remove(name);
            self.read.remove(name);
            return Verdict::Gone;
        }
        self.pending.insert(name.clone(), pending);
        let may_be_read = stamp.is_some() && !is_known;
        if may_be_read && (is_settled || due.is_some_and(|due| due <= now)) {
            return Verdict::Read;
        }
        Verdict::Nothing
    }

    /// Says that a file has been read in this state.
    pub(super) fn was_read(&mut self, name: &Name, stamp: Stamp) {
        self.pending.remove(name);
        self.read.insert(name.clone(), stamp);
    }

    /// Whether nothing is known of a file but that it is there.
    pub(super) fn is_unseen(&self, name: &Name) -> bool {
        self.pending.get(name).is_some_and(|pending| pending.seen == Some(Stamp::UNSEEN))
    }

    /// Says that a file cannot be read in the state it is in.
    pub(super) fn give_up(&mut self, name: &Name) {
        if let Some(seen) = self.pending.remove(name).and_then(|pending| pending.seen) {
            self.read.insert(name.clone(), seen);
        }
    }

    /// All files that were read and have not gone since, and those that are not settled.
    pub(super) fn names(&self) -> impl Iterator<Item = &Name> {
        self.read.keys().chain(self.pending.keys().filter(|name| !self.read.contains_key(*name)))
    }

    /// The name as it is kept, if it is known.
    pub(super) fn name(&self, name: &OsStr) -> Option<Name> {
        self.read.get_key_value(name).map(|(name, _)| name.clone())
    }

    /// The files that are due for another look without a notice.
    pub(super) fn due(&self, now: Instant) -> impl Iterator<Item = &Name> {
        let due = move |pending: &Pending| pending.due().is_some_and(|due| due <= now);
        self.pending.iter().filter(move |(_, pending)| due(pending)).map(|(name, _)| name)
    }

    /// When the next file will be due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.pending.values().filter_map(Pending::due).min()
    }

    /// Whether every file that is there has been read as it is.
    pub(super) fn is_settled(&self) -> bool {
        self.pending.values().all(|pending| pending.seen.is_none())
    }

    /// Frees what was only needed for growing.
    pub(super) fn shrink(&mut self) {
        self.read.shrink_to_fit();
    }
}

impl Pending {
    /// When there is something to be decided about it without a notice; never while it is being written.
    fn due(&self) -> Option<Instant> {
        match self.seen {
            None => Some(self.since + GRACE),
            Some(_) => (!self.being_written).then_some(self.since + QUIET),
        }
    }
}

/// A file that has changed without a word from the kernel (a network file system, a link to elsewhere) is read
/// once it has been the same for so long.
const QUIET: Duration = Duration::from_secs(2);
/// A file missing for so long is gone.
pub(super) const GRACE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::{
        super::scan::{Detail, scan},
        *,
    };

    struct Bench {
        folder: tempfile::TempDir,
        desk: Desk,
        now: Instant,
    }

    impl Bench {
        fn new() -> Bench {
            Bench { folder: tempfile::tempdir().unwrap(), desk: Desk::default(), now: Instant::now() }
        }

        fn write(&self, name: &str, text: &str) {
            std::fs::write(self.folder.path().join(name), text).unwrap();
        }

        fn remove(&self, name: &str) {
            std::fs::remove_file(self.folder.path().join(name)).unwrap();
        }

        fn pass(&mut self, duration: Duration) {
            self.now += duration;
        }

        /// `+name` for each file read (and says so to the desk), `-name` for each gone.
        fn look(&mut self, notices: Notices) -> Vec<String> {
            let files = scan(self.folder.path(), Detail::States).unwrap().files;
            let missing = self.desk.names().filter(|name| !files.contains_key(*name)).cloned();
            let missing: Vec<Name> = missing.collect();
            let there = files.iter().map(|(name, stamp)| (name.clone(), Some(*stamp)));
            let mut found = Vec::new();
            for (name, stamp) in there.chain(missing.into_iter().map(|name| (name, None))) {
                let text = name.to_str().unwrap().to_owned();
                match self.desk.look(&name, stamp, &notices, self.now) {
                    Verdict::Nothing => {}
                    Verdict::Read => {
                        self.desk.was_read(&name, stamp.unwrap());
                        found.push(format!("+{text}"));
                    }
                    Verdict::Gone => found.push(format!("-{text}")),
                }
            }
            found.sort();
            found
        }
    }

    fn none() -> Notices {
        Notices::default()
    }

    fn all() -> Notices {
        Notices { all: true, ..none() }
    }

    fn lost() -> Notices {
        Notices { lost: true, ..none() }
    }

    fn settled(name: &str) -> Notices {
        Notices { files: [(name.into(), Notice::Settled)].into_iter().collect(), ..none() }
    }

    fn writing(name: &str) -> Notices {
        Notices { files: [(name.into(), Notice::Written)].into_iter().collect(), ..none() }
    }

    #[test]
    fn a_file_is_read_when_closed() {
        let mut bench = Bench::new();
        bench.write("a.yaml", "1");
        bench.write("b.yaml", "1");
        assert_eq!(bench.look(all()), ["+a.yaml", "+b.yaml"]);
        assert_eq!(bench.look(all()), [""; 0]);
        bench.write("a.yaml", "22");
        assert_eq!(
            bench.look(writing("b.yaml")),
            [""; 0],
            "another file's notice says nothing about this one"
        );
        assert_eq!(bench.look(settled("a.yaml")), ["+a.yaml"]);
        assert_eq!(bench.look(settled("b.yaml")), ["+b.yaml"], "its stamp may be too coarse to show it");
    }

    #[test]
    fn a_file_being_written_waits_for_its_close_however_long() {
        let mut bench = Bench::new();
        bench.write("a.yaml", "1");
        bench.look(all());
        bench.write("a.yaml", "22");
        assert_eq!(bench.look(writing("a.yaml")), [""; 0]);
        bench.pass(Duration::from_secs(3600));
        assert_eq!(bench.look(none()), [""; 0]);
        assert_eq!((bench.desk.next_due(), bench.desk.is_settled()), (None, false));
        assert_eq!(bench.look(settled("a.yaml")), ["+a.yaml"]);
        assert!(bench.desk.is_settled());
    }

    #[test]
    fn without_notices_a_file_is_read_once_it_is_quiet() {
        let mut bench = Bench::new();
        bench.look(all());
        bench.write("a.yaml", "1");
        assert_eq!(bench.look(none()), [""; 0]);
        bench.pass(QUIET / 2);
        bench.write("a.yaml", "22");
        assert_eq!(bench.look(none()), [""; 0]);
        bench.pass(QUIET / 2);
        assert_eq!(bench.look(none()), [""; 0], "it changed meanwhile");
        assert_eq!(bench.desk.due(bench.now).count(), 0);
        bench.pass(QUIET / 2);
        assert_eq!(bench.desk.due(bench.now).count(), 1);
        assert_eq!(bench.look(none()), ["+a.yaml"]);
    }

    #[test]
    fn when_notices_were_lost_a_file_must_be_quiet() {
        let mut bench = Bench::new();
        bench.write("a.yaml", "1");
        bench.look(all());
        bench.write("a.yaml", "22");
        assert_eq!(bench.look(writing("a.yaml")), [""; 0]);
        assert_eq!(bench.look(lost()), [""; 0], "perhaps its close was lost, perhaps it is still to come");
        bench.pass(QUIET);
        assert_eq!(bench.look(none()), ["+a.yaml"]);
    }

    #[test]
    fn a_gap_while_renaming_is_not_the_end() {
        let mut bench = Bench::new();
        bench.write("a.yaml", "1");
        bench.look(all());
        bench.remove("a.yaml");
        assert_eq!(bench.look(all()), [""; 0]);
        bench.pass(GRACE / 2);
        bench.write("a.yaml", "22");
        assert_eq!(bench.look(settled("a.yaml")), ["+a.yaml"]);
        bench.remove("a.yaml");
        assert_eq!(bench.look(settled("a.yaml")), [""; 0]);
        assert_eq!(bench.desk.next_due(), Some(bench.now + GRACE));
        bench.pass(GRACE);
        assert_eq!(bench.look(none()), ["-a.yaml"]);
        assert_eq!(bench.look(none()), [""; 0]);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_left_alone_until_it_changes() {
        let mut bench = Bench::new();
        let (name, one): (Name, Stamp) = (OsStr::new("a.yaml").into(), Stamp::from(1));
        assert_eq!(bench.desk.look(&name, Some(one), &all(), bench.now), Verdict::Read);
        bench.desk.give_up(&name);
        assert_eq!(bench.desk.look(&name, Some(one), &all(), bench.now), Verdict::Nothing);
        assert_eq!(bench.desk.look(&name, Some(Stamp::from(2)), &all(), bench.now), Verdict::Read);
    }

    #[test]
    fn the_latest_notice_counts() {
        let mut notices = Notices::default();
        notices.settle("a".into());
        notices.write("a".into());
        notices.touch("a".into());
        assert_eq!(notices, writing("a"));
        notices.settle("a".into());
        assert_eq!(notices, settled("a"));
    }
}
