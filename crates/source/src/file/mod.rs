// SPDX-License-Identifier: Apache-2.0

//! Files as a source: no cluster needed.
//!
//! The target is a file, or a folder whose `*.yaml`, `*.yml` and `*.json` count (not those of folders in it, and
//! no hidden ones). They hold Services, EndpointSlices, Nodes and ServiceCIDRs as the API has them, one or more
//! to a file, or as a `List`; other kinds are passed over. Fields the API server would fill in may be missing,
//! but `spec.clusterIP` must be given. A Service may name its endpoints itself: see [`endpoints`].
//!
//! Files are followed. Each change is read as soon as its file is closed or renamed into place; that costs the file,
//! not the folder, and of a file that was read before only documents that differ are looked at, or are not well. Only what
//! differs is told. What the kernel gives no word of (a network file system, a link to elsewhere) is found by looking at
//! the whole folder now and then.
//!
//! What is bad is reported with file, line and reason, and the rest is served. Nobody has looked at a file before us, as
//! the API server does, so an object in which something is wrong does not take the place of a good version that is
//! served: that one stays, as a whole. Where there is none, what is good of it is served. A key or a kind that is nearly
//! one of those that are read counts as wrong. A file in which a document cannot be used, or that has become empty,
//! takes nothing back of what it gave before; a file that is deleted does. All this while the process runs: nothing is
//! kept on disk, so one that starts with a broken file serves the rest, and what only that file gave is gone.
//!
//! A file that is still open for writing is not read. A folder that is away says nothing about its files. An object given
//! twice counts once: the file whose name sorts first has it.

pub mod endpoints;
mod header;
mod keys;
mod manifest;
mod notify;
mod place;
mod plain;
mod read;
mod scan;
mod settle;
mod spelling;
mod store;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod watch_tests;
mod yaml;

#[cfg(test)]
mod sequence_tests;

use std::{
    collections::BTreeSet,
    ffi::OsString,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use hashbrown::DefaultHashBuilder;
use model::{Kind, Update};
use tokio::{sync::mpsc::Sender, time::Instant};

use self::{
    manifest::{Known, ManifestScope},
    notify::Notifier,
    read::{Parsed, Parser, Recipient},
    scan::{Detail, Identity, Name},
    settle::{Desk, Notices, Verdict},
    store::Store,
};
use crate::{
    intern::Interner,
    problem::{Problem, Problems, Reason, Subject},
};

/// Reads all files once: what [`run`] would tell first. An error if `target` cannot be looked into.
pub fn load(target: &Path, node_name: &str, problems: &Problems) -> io::Result<Vec<Update>> {
    let mut reader = Reader::new(target.to_owned(), node_name.into());
    reader.patience = Duration::ZERO;
    let mut updates = Vec::new();
    let notices = Notices { all: true, ..Notices::default() };
    match reader.look(&notices, Instant::now(), problems, &mut |update| updates.push(update)).error {
        Some(error) => Err(error),
        None => Ok(updates),
    }
}

/// Tells `out` all there is and then what changes. Returns when nobody receives any more; drop it to stop.
///
/// While `target` does not exist nothing is told, so nothing is removed.
pub async fn run(target: PathBuf, node_name: Arc<str>, problems: Arc<Problems>, out: Sender<Update>) {
    let mut notifier = Notifier::new(&target);
    let mut reader = Some(Reader::new(target, node_name));
    let mut notices = Notices { all: true, ..Notices::default() };
    while !out.is_closed() {
        // Armed before looking: what changes in between is noticed.
        if notices.concern_all() || notices.files.is_empty() {
            notices.all |= notifier.arm();
        }
        let Some(mut owned) = reader.take() else {
            return;
        };
        owned.hears = notifier.hears();
        if owned.is_brief(&notices, Instant::now()) {
            // To wake another thread would cost more than to read a small file.
            let mut updates = Vec::new();
            let look = owned.look(&notices, Instant::now(), &problems, &mut |update| updates.push(update));
            for update in updates {
                if out.send(update).await.is_err() {
                    return;
                }
            }
            reader = Some(owned);
            notices = notifier.wait(look.look_again).await;
            continue;
        }
        let (problems, out) = (Arc::clone(&problems), out.clone());
        let looked = tokio::task::spawn_blocking(move || {
            // Told one by one, as they are read: nothing else holds all of them. If nobody listens, the loop ends.
            let mut tell = |update| drop(out.blocking_send(update));
            let look = owned.look(&notices, Instant::now(), &problems, &mut tell);
            (owned, look)
        });
        // It fails only if the runtime is being shut down, or by a bug that has said what it is.
        let Ok((owned, look)) = looked.await else {
            return;
        };
        reader = Some(owned);
        notices = notifier.wait(look.look_again).await;
    }
}

/// Reads bytes as a file of that name would be, and keeps nothing.
pub(crate) fn read_bytes(path: &Path, mut bytes: &[u8]) {
    let mut scope = ManifestScope {
        interner: &mut Interner::default(),
        node_name: "node",
        hasher: &DefaultHashBuilder::default(),
        known: &Known::default(),
        report: &mut |problem| drop(problem.to_string()),
    };
    // Reading from memory cannot fail.
    if let Ok(manifest) = manifest::read(path, &mut bytes, &mut scope) {
        let name = path.file_name().unwrap_or_default().into();
        Store::default().replace(&name, manifest, &mut drop, &mut |_, problem| drop(problem.to_string()));
    }
}

/// Everything that is kept between two looks.
struct Reader {
    target: PathBuf,
    parser: Parser,
    desk: Desk,
    store: Store,
    /// The folder the files are in, as it was when it was last looked at as a whole.
    folder: PathBuf,
    identity: Identity,
    progress: Progress,
    /// How long the end of the first list waits for files that are being written.
    patience: Duration,
    next_audit: Instant,
    /// Somebody listens to what the kernel tells.
    hears: bool,
    /// That the folder cannot be looked into is said once, not on each attempt.
    away: bool,
    /// Something that does not count, if nothing in the folder does. Said when it comes to be so.
    stranger: Option<OsString>,
}

/// How far the first list is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// Nothing has been told.
    Silent,
    /// Everything but what is still being written.
    Listing {
        since: Instant,
    },
    Listed,
}

struct Look {
    look_again: Instant,
    error: Option<io::Error>,
}

/// What takes the updates.
type Tell<'a> = &'a mut dyn FnMut(Update);

impl Reader {
    fn new(target: PathBuf, node_name: Arc<str>) -> Reader {
        Reader {
            target,
            parser: Parser::new(node_name),
            desk: Desk::default(),
            store: Store::default(),
            folder: PathBuf::new(),
            identity: None,
            progress: Progress::Silent,
            patience: PATIENCE,
            next_audit: Instant::now(),
            hears: false,
            away: false,
            stranger: None,
        }
    }

    /// Looks at the files that notices name or that are due; at all of them if there is reason to, or if it is time.
    fn look(&mut self, notices: &Notices, now: Instant, problems: &Problems, tell: Tell<'_>) -> Look {
        let had_stranger = self.stranger.is_some();
        let decided = if self.is_partial(notices, now) { self.look_at_some(notices, now) } else { None };
        let (read, gone) = match decided {
            Some(decided) => decided,
            None => match self.look_at_all(notices, now) {
                Ok(decided) => decided,
                Err(error) => return self.away(error, now, problems),
            },
        };
        if std::mem::take(&mut self.away) {
            tracing::info!(path = %self.target.display(), "files can be read now");
            problems.settle(|| Subject::File(self.target.clone()), Vec::new());
        }
        if self.stranger.is_some() != had_stranger {
            let place = Some((self.target.clone(), 0));
            let said = |name: &OsString| Problem::new("", "", Reason::NoManifests, name.display());
            let found = self.stranger.iter().map(|name| Problem { place: place.clone(), ..said(name) });
            problems.settle(|| Subject::File(self.target.clone()), found.collect());
        }
        if self.progress == Progress::Silent {
            self.progress = Progress::Listing { since: now };
            Kind::ALL.into_iter().for_each(|kind| tell(Update::Begin(kind)));
        }
        let mut to_read: BTreeSet<Name> = read.into_iter().collect();
        for name in &gone {
            to_read.extend(self.store.remove(name, tell));
            problems.settle(|| Subject::File(self.folder.join(&**name)), Vec::new());
        }
        self.read_all(to_read, problems, tell);
        self.finish_list(now, tell);
        let pause = if self.progress == Progress::Listed { self.next_audit } else { now + SOON };
        let look_again = self.desk.next_due().map_or(pause, |due| due.min(pause));
        Look { look_again, error: None }
    }

    fn is_partial(&self, notices: &Notices, now: Instant) -> bool {
        !notices.concern_all() && self.progress != Progress::Silent && !self.away && now < self.next_audit
    }

    /// Whether a look will be over so soon that nobody has to wait for it.
    fn is_brief(&self, notices: &Notices, now: Instant) -> bool {
        let is_small = |name: &std::ffi::OsString| {
            std::fs::metadata(self.folder.join(name)).map_or(true, |found| found.len() <= read::SMALL as u64)
        };
        self.is_partial(notices, now)
            && !notices.files.is_empty()
            && notices.files.len() + self.desk.due(now).count() <= FEW
            && notices.files.keys().all(is_small)
    }

    /// A file that is being written as we start may have what the kernel is serving: wait for it, but not for ever.
    fn finish_list(&mut self, now: Instant, tell: Tell<'_>) {
        if let Progress::Listing { since } = self.progress
            && (self.desk.is_settled() || now >= since + self.patience)
        {
            self.progress = Progress::Listed;
            Kind::ALL.into_iter().for_each(|kind| tell(Update::End(kind)));
            self.desk.shrink();
            self.store.shrink();
        }
    }

    /// Which files to read and which are gone, of those that there is news of. Nothing if that cannot be told
    /// without looking at all: the folder is no longer the same.
    fn look_at_some(&mut self, notices: &Notices, now: Instant) -> Option<(Vec<Name>, Vec<Name>)> {
        let is_ours = |name: &&std::ffi::OsString| match self.target == self.folder {
            true => scan::is_manifest(Path::new(name)),
            false => self.target.file_name() == Some(name),
        };
        let named = notices.files.keys().filter(is_ours);
        let mut names: BTreeSet<Name> =
            named.map(|name| self.desk.name(name).unwrap_or_else(|| name.as_os_str().into())).collect();
        names.extend(self.desk.due(now).cloned());
        let (mut read, mut gone) = (Vec::new(), Vec::new());
        for name in names {
            let stamp = scan::stamp(&self.folder.join(&*name));
            if stamp.is_none() && scan::identity(&self.folder) != self.identity {
                return None;
            }
            match self.desk.look(&name, stamp, notices, now) {
                Verdict::Nothing => {}
                Verdict::Read => read.push(name),
                Verdict::Gone => gone.push(name),
            }
        }
        Some((read, gone))
    }

    /// The same for all files. An error if the folder cannot be looked into.
    fn look_at_all(&mut self, notices: &Notices, now: Instant) -> io::Result<(Vec<Name>, Vec<Name>)> {
        let begun = Instant::now();
        let detail = match self.progress {
            Progress::Silent => Detail::Names,
            _ => Detail::States,
        };
        let scan = scan::scan(&self.target, detail)?;
        // A single file that was never there is not an empty one.
        if self.progress == Progress::Silent && scan.files.is_empty() && scan.folder != self.target {
            return Err(io::ErrorKind::NotFound.into());
        }
        (self.folder, self.identity) = (scan.folder, scan.identity);
        self.stranger = scan.other.filter(|_| scan.files.is_empty());
        let told = scan.told;
        let missing = self.desk.names().filter(|name| !scan.files.contains_key(*name)).cloned();
        let missing: Vec<Name> = missing.collect();
        let (mut read, mut gone) = (Vec::new(), Vec::new());
        let there = scan.files.into_iter().map(|(name, stamp)| (name, Some(stamp)));
        for (name, stamp) in there.chain(missing.into_iter().map(|name| (name, None))) {
            match self.desk.look(&name, stamp, notices, now) {
                Verdict::Nothing => {}
                Verdict::Read => read.push(name),
                Verdict::Gone => gone.push(name),
            }
        }
        gone.sort_unstable();
        let ease = if self.hears && told { EASE } else { 1 };
        self.next_audit = now + (begun.elapsed() * AUDIT_SHARE).clamp(REGULAR, SELDOM) * ease;
        Ok((read, gone))
    }

    /// Reads files, and those that have to be read because of what was in the first ones.
    fn read_all(&mut self, names: BTreeSet<Name>, problems: &Problems, tell: Tell<'_>) {
        let mut names: Vec<Name> = names.into_iter().collect();
        while !names.is_empty() {
            let Reader { parser, desk, store, folder, .. } = self;
            let (again, unseen) = (BTreeSet::new(), Vec::new());
            let mut intake = Intake { desk, store, folder, problems, tell, again, unseen };
            parser.read_all(folder, &names, &mut intake);
            let Intake { mut again, unseen, .. } = intake;
            again.extend(unseen.into_iter().filter(|name| self.see(name)));
            names = again.into_iter().collect();
        }
    }

    /// Looks at the state of a file that could not be read. Whether it is to be tried once more: it may have gone.
    fn see(&mut self, name: &Name) -> bool {
        let stamp = scan::stamp(&self.folder.join(&**name));
        let lost = Notices { all: true, ..Notices::default() };
        self.desk.look(name, stamp, &lost, Instant::now()) == Verdict::Read
    }

    /// The folder cannot be looked into: all stays as it is.
    fn away(&mut self, error: io::Error, now: Instant, problems: &Problems) -> Look {
        if !std::mem::replace(&mut self.away, true) {
            let mut problem = Problem::new("", "", Reason::Away, &error);
            problem.place = Some((self.target.clone(), 0));
            problems.report(problem);
        }
        Look { look_again: now + SOON, error: Some(error) }
    }
}

/// Takes in files as they are read.
struct Intake<'a> {
    desk: &'a mut Desk,
    store: &'a mut Store,
    folder: &'a Path,
    problems: &'a Problems,
    tell: Tell<'a>,
    /// Files that have to be read because of what was in others.
    again: BTreeSet<Name>,
    /// Files that could not be read, and were never seen.
    unseen: Vec<Name>,
}

impl Recipient for Intake<'_> {
    fn known(&self, name: &Name) -> Known {
        self.store.known(name)
    }

    fn take(&mut self, name: &Name, parsed: io::Result<Parsed>) {
        let (problems, folder) = (self.problems, self.folder);
        let place = |line: usize| Some((folder.join(&**name), line));
        let parsed = match parsed {
            Ok(parsed) => parsed,
            // Which state it must leave to be tried again is not known yet.
            Err(_) if self.desk.is_unseen(name) => return self.unseen.push(name.clone()),
            Err(error) => {
                let mut problem = Problem::new("", "", Reason::Unreadable, error);
                problem.place = place(0);
                problems.report(problem);
                // It will not get better by being tried again: its state must change first.
                return self.desk.give_up(name);
            }
        };
        // A file that changed meanwhile is still pending.
        let Some(stamp) = parsed.stamp else { return };
        self.desk.was_read(name, stamp);
        let mut found = parsed.problems;
        let mut report = |line, mut problem: Problem| {
            problem.place = problem.place.or_else(|| place(line));
            found.push(problem);
        };
        self.again.extend(self.store.replace(name, parsed.manifest, self.tell, &mut report));
        // All of them: a document with which something is wrong is read whenever its file is.
        problems.settle(|| Subject::File(folder.join(&**name)), found);
    }
}

/// How often the folder is looked at without cause; see `notify`. A large one less often, so that it takes no more
/// than a thousandth of a processor,
const REGULAR: Duration = Duration::from_secs(5);
const AUDIT_SHARE: u32 = 1000;
/// but at least so often;
const SELDOM: Duration = Duration::from_secs(60);
/// and so much rarer where the kernel tells of all but a file that has a second name elsewhere.
const EASE: u32 = 10;
/// The same while there is nothing yet to look at, or the first list is not finished.
const SOON: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(10);
/// A look at so many small files is brief.
const FEW: usize = 4;
