// SPDX-License-Identifier: Apache-2.0

//! When a file may be read, and when it is gone. Without IO; time is given.
//!
//! ```text
//!            changed                    closed, renamed into place, or quiet for QUIET
//! read  ──────────────►  unsettled  ──────────────────────────────────────────────────►  read again
//!   │                        ▲ written to: not before it is closed
//!   └── missing ── for GRACE ──► gone          (an editor's rename leaves a gap of some milliseconds)
//! ```

use std::{collections::BTreeMap, ffi::OsString, path::Path, sync::Arc, time::Duration};

use hashbrown::HashSet;
use tokio::time::Instant;

use super::scan::{Files, Stamp};

/// What the kernel told about files since the last look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Notices {
    /// Whatever has changed may be read: all is new, or was swapped as a whole.
    pub all: bool,
    /// Names of files closed after writing, or renamed into place.
    pub settled: HashSet<OsString>,
    /// Names of files written to and not closed since.
    pub writing: HashSet<OsString>,
}

impl Notices {
    pub(super) fn settle(&mut self, name: OsString) {
        self.writing.remove(&name);
        self.settled.insert(name);
    }

    pub(super) fn write(&mut self, name: OsString) {
        self.settled.remove(&name);
        self.writing.insert(name);
    }
}

/// What to do about the files.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Decision {
    pub read: Vec<Arc<Path>>,
    pub gone: Vec<Arc<Path>>,
    /// When to look again at the latest.
    pub look_again: Option<Instant>,
}

#[derive(Debug, Default)]
pub(super) struct Desk {
    files: BTreeMap<Arc<Path>, Entry>,
}

#[derive(Debug)]
struct Entry {
    /// The state it was last read in.
    read: Option<Stamp>,
    /// The state it was last seen in, and since when.
    seen: Stamp,
    since: Instant,
    being_written: bool,
    missing_since: Option<Instant>,
}

impl Desk {
    /// Decides, given the files that are there.
    pub(super) fn look(&mut self, files: &Files, notices: &Notices, now: Instant) -> Decision {
        let mut decision = Decision::default();
        for (path, stamp) in files {
            let entry = self.files.entry(Arc::clone(path)).or_insert(Entry {
                read: None,
                seen: *stamp,
                since: now,
                being_written: false,
                missing_since: None,
            });
            entry.missing_since = None;
            if let Some(due) = entry.look(*stamp, notices, path, now) {
                if due <= now {
                    decision.read.push(Arc::clone(path));
                } else {
                    decision.wake(due);
                }
            }
        }
        let missing = self.files.iter_mut().filter(|(path, _)| !files.contains_key(*path));
        for (path, entry) in missing {
            let due = *entry.missing_since.get_or_insert(now) + GRACE;
            if due <= now {
                decision.gone.push(Arc::clone(path));
            } else {
                decision.wake(due);
            }
        }
        for path in &decision.gone {
            self.files.remove(path);
        }
        decision
    }

    /// Says that a file has been read in this state.
    pub(super) fn was_read(&mut self, path: &Path, stamp: Stamp) {
        if let Some(entry) = self.files.get_mut(path) {
            entry.read = Some(stamp);
        }
    }

    /// Says that a file cannot be read in the state it is in.
    pub(super) fn give_up(&mut self, path: &Path) {
        if let Some(entry) = self.files.get_mut(path) {
            entry.read = Some(entry.seen);
        }
    }
}

impl Entry {
    /// When the file is due to be read, if it is not up to date.
    fn look(&mut self, stamp: Stamp, notices: &Notices, path: &Path, now: Instant) -> Option<Instant> {
        let named = |names: &HashSet<OsString>| path.file_name().is_some_and(|name| names.contains(name));
        let settled = notices.all || named(&notices.settled);
        self.being_written = !settled && (self.being_written || named(&notices.writing));
        if stamp != self.seen {
            (self.seen, self.since) = (stamp, now);
        }
        if self.read == Some(stamp) {
            // A rename may have put another file in place of the one being written.
            return None;
        }
        if settled {
            return Some(now);
        }
        (!self.being_written).then_some(self.since + QUIET)
    }
}

impl Decision {
    fn wake(&mut self, at: Instant) {
        self.look_again = Some(self.look_again.map_or(at, |earlier| earlier.min(at)));
    }
}

/// A file that has changed without a word from the kernel (a network file system, a link to elsewhere) is read
/// once it has been the same for so long.
const QUIET: Duration = Duration::from_secs(2);
/// A file missing for so long is gone.
pub(super) const GRACE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

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

        fn files(&self) -> Files {
            super::super::scan::scan(self.folder.path()).unwrap()
        }

        fn pass(&mut self, duration: Duration) {
            self.now += duration;
        }

        /// `+name` for each file read (and says so to the desk), `-name` for each gone.
        fn look(&mut self, notices: Notices) -> Vec<String> {
            let files = self.files();
            let decision = self.desk.look(&files, &notices, self.now);
            for path in &decision.read {
                self.desk.was_read(path, files[path]);
            }
            let name = |path: &Arc<Path>| path.file_name().unwrap().to_str().unwrap().to_owned();
            let read = decision.read.iter().map(|path| format!("+{}", name(path)));
            read.chain(decision.gone.iter().map(|path| format!("-{}", name(path)))).collect()
        }
    }

    fn none() -> Notices {
        Notices::default()
    }

    fn all() -> Notices {
        Notices { all: true, ..none() }
    }

    fn settled(name: &str) -> Notices {
        Notices { settled: [name.into()].into(), ..none() }
    }

    fn writing(name: &str) -> Notices {
        Notices { writing: [name.into()].into(), ..none() }
    }

    #[test]
    fn a_file_is_read_when_closed_and_only_if_it_changed() {
        let mut bench = Bench::new();
        bench.write("a.yaml", "1");
        bench.write("b.yaml", "1");
        assert_eq!(bench.look(all()), ["+a.yaml", "+b.yaml"]);
        assert_eq!(bench.look(all()), [""; 0]);
        bench.write("a.yaml", "22");
        assert_eq!(
            bench.look(settled("b.yaml")),
            [""; 0],
            "another file's notice says nothing about this one"
        );
        assert_eq!(bench.look(settled("a.yaml")), ["+a.yaml"]);
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
        assert_eq!(bench.look(settled("a.yaml")), ["+a.yaml"]);
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
        bench.pass(QUIET / 2);
        assert_eq!(bench.look(none()), ["+a.yaml"]);
    }

    #[test]
    fn a_gap_while_renaming_is_not_the_end() {
        let mut bench = Bench::new();
        bench.write("a.yaml", "1");
        bench.look(all());
        std::fs::remove_file(bench.folder.path().join("a.yaml")).unwrap();
        assert_eq!(bench.look(all()), [""; 0]);
        bench.pass(GRACE / 2);
        bench.write("a.yaml", "22");
        assert_eq!(bench.look(settled("a.yaml")), ["+a.yaml"]);
        std::fs::remove_file(bench.folder.path().join("a.yaml")).unwrap();
        assert_eq!(bench.look(all()), [""; 0]);
        let again = bench.desk.look(&bench.files(), &none(), bench.now).look_again;
        assert_eq!(again, Some(bench.now + GRACE));
        bench.pass(GRACE);
        assert_eq!(bench.look(none()), ["-a.yaml"]);
        assert_eq!(bench.look(none()), [""; 0]);
    }

    #[test]
    fn the_latest_notice_counts() {
        let mut notices = Notices::default();
        notices.settle("a".into());
        notices.write("a".into());
        assert_eq!(notices, writing("a"));
        notices.settle("a".into());
        assert_eq!(notices, settled("a"));
    }
}
