// SPDX-License-Identifier: Apache-2.0

//! Files as a source: no cluster needed.
//!
//! The target is a file, or a folder whose `*.yaml`, `*.yml` and `*.json` count (not those of folders in it, and
//! no hidden ones). They hold Services, EndpointSlices, Nodes and ServiceCIDRs as the API has them, one or more
//! to a file, or as a `List`; other kinds are passed over. Fields the API server would fill in may be missing,
//! but `spec.clusterIP` must be given. A Service may name its endpoints itself: see [`endpoints`].
//!
//! Large sets are read about five times faster from JSON than from YAML.
//!
//! Files are followed. Each change is read when its file is closed or renamed into place, and only what differs
//! is told.
//!
//! What is bad is reported with file, line and reason, and the rest is served. A file in which something cannot
//! be used, or that has become empty, takes nothing back of what it gave before; a file that is deleted does. A
//! folder that is away says nothing about its files. An object given twice counts once: the file whose name
//! sorts first has it.

pub mod endpoints;
mod manifest;
mod notify;
mod plain;
mod scan;
mod settle;
mod store;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod watch_tests;
mod yaml;

use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, BufReader},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use hashbrown::DefaultHashBuilder;
use model::{Kind, Update};
use tokio::{sync::mpsc::Sender, time::Instant};

use self::{
    manifest::ManifestScope,
    notify::Notifier,
    scan::Stamp,
    settle::{Desk, Notices},
    store::{Outcome, Store},
};
use crate::{
    intern::Interner,
    problem::{Problem, Problems, Reason},
};

/// Reads all files once: what [`run`] would tell first. An error if `target` cannot be looked into.
pub fn load(target: &Path, node_name: &str, problems: &Problems) -> io::Result<Vec<Update>> {
    scan::scan(target)?;
    let mut reader = Reader::new(target.to_owned(), node_name.into());
    reader.patience = Duration::ZERO;
    let look = reader.look(&Notices::default(), Instant::now(), problems);
    match look.error {
        Some(error) => Err(error),
        None => Ok(look.updates),
    }
}

/// Tells `out` all there is and then what changes. Returns when nobody receives any more; drop it to stop.
///
/// While `target` does not exist nothing is told, so nothing is removed.
pub async fn run(target: PathBuf, node_name: Arc<str>, problems: Arc<Problems>, out: Sender<Update>) {
    let mut notifier = Notifier::new(&target);
    let mut reader = Some(Reader::new(target, node_name));
    let mut notices = Notices { all: true, ..Notices::default() };
    loop {
        // Armed before looking: what changes in between is noticed.
        notifier.arm();
        let Some(mut owned) = reader.take() else {
            return;
        };
        let problems = Arc::clone(&problems);
        let looked = tokio::task::spawn_blocking(move || {
            let look = owned.look(&notices, Instant::now(), &problems);
            (owned, look)
        });
        // It fails only if the runtime is being shut down, or by a bug that has said what it is.
        let Ok((owned, look)) = looked.await else {
            return;
        };
        reader = Some(owned);
        for update in look.updates {
            if out.send(update).await.is_err() {
                return;
            }
        }
        notices = notifier.wait(look.look_again).await;
    }
}

/// Reads bytes as a file of that name would be, and keeps nothing.
pub(crate) fn read_bytes(path: &Path, mut bytes: &[u8]) {
    let mut scope = ManifestScope {
        interner: &mut Interner::default(),
        node_name: "node",
        hasher: &DefaultHashBuilder::default(),
        report: &mut |problem| drop(problem.to_string()),
    };
    // Reading from memory cannot fail.
    if let Ok(manifest) = manifest::read(path, &mut bytes, &mut scope) {
        Store::default().replace(&path.into(), manifest, &mut |problem| drop(problem.to_string()));
    }
}

/// Everything that is kept between two looks.
struct Reader {
    target: PathBuf,
    node_name: Arc<str>,
    interner: Interner,
    hasher: DefaultHashBuilder,
    desk: Desk,
    store: Store,
    listed: bool,
    first_look: Option<Instant>,
    /// How long the first look waits for files that are being written.
    patience: Duration,
    /// That the folder cannot be looked into is said once, not on each attempt.
    away: bool,
}

struct Look {
    updates: Vec<Update>,
    look_again: Instant,
    error: Option<io::Error>,
}

impl Reader {
    fn new(target: PathBuf, node_name: Arc<str>) -> Reader {
        Reader {
            target,
            node_name,
            interner: Interner::default(),
            hasher: DefaultHashBuilder::default(),
            desk: Desk::default(),
            store: Store::default(),
            listed: false,
            first_look: None,
            patience: PATIENCE,
            away: false,
        }
    }

    fn look(&mut self, notices: &Notices, now: Instant, problems: &Problems) -> Look {
        let files = match scan::scan(&self.target) {
            Ok(files) => files,
            Err(error) => return self.away(error, now, problems),
        };
        // A single file that was never there is not an empty one.
        if !self.listed && files.is_empty() && !self.target.is_dir() {
            return self.away(io::ErrorKind::NotFound.into(), now, problems);
        }
        if std::mem::take(&mut self.away) {
            tracing::info!(path = %self.target.display(), "files can be read now");
        }
        let first = *self.first_look.get_or_insert(now);
        let notices = if self.listed { notices.clone() } else { Notices { all: true, ..Notices::default() } };
        let decision = self.desk.look(&files, &notices, now);
        let mut updates = Vec::new();
        let mut to_read: BTreeSet<Arc<Path>> = decision.read.into_iter().collect();
        for path in &decision.gone {
            let outcome = self.store.remove(path);
            updates.extend(outcome.updates);
            to_read.extend(outcome.reread);
        }
        let unsettled = self.read_all(to_read, &mut updates, problems);
        // A file that is being written as we start may have what the kernel is serving: wait for it, but not
        // for ever.
        if !self.listed && (!unsettled || now >= first + self.patience) {
            self.listed = true;
            let begin = Kind::ALL.into_iter().map(Update::Begin);
            let end = Kind::ALL.into_iter().map(Update::End);
            updates = begin.chain(updates).chain(end).collect();
        } else if !self.listed {
            // Nothing has been told yet, so next time everything has to be read again.
            (self.desk, self.store, updates) = (Desk::default(), Store::default(), Vec::new());
        }
        let soon = if self.listed { REGULAR } else { SOON };
        let look_again = decision.look_again.unwrap_or(now + soon).min(now + soon);
        Look { updates, look_again, error: None }
    }

    /// Reads files, and those that have to be read because of what was in the first ones. True if one of them
    /// changed while it was being read.
    fn read_all(
        &mut self,
        mut paths: BTreeSet<Arc<Path>>,
        updates: &mut Vec<Update>,
        problems: &Problems,
    ) -> bool {
        let mut unsettled = false;
        while let Some(path) = paths.pop_first() {
            match self.read(&path, problems) {
                Ok(Some(outcome)) => {
                    updates.extend(outcome.updates);
                    paths.extend(outcome.reread);
                }
                Ok(None) => unsettled = true,
                Err(error) => {
                    let mut problem = Problem::new("", "", Reason::Unreadable, error);
                    problem.place = Some((path.to_path_buf(), 0));
                    problems.report(problem);
                    // It will not get better by being tried again: its state must change first.
                    self.desk.give_up(&path);
                }
            }
        }
        unsettled
    }

    /// Nothing if the file changed while it was being read: then it was half of one state and half of another.
    fn read(&mut self, path: &Arc<Path>, problems: &Problems) -> io::Result<Option<Outcome>> {
        let mut file = BufReader::with_capacity(64 << 10, File::open(path)?);
        let before = Stamp::of(&file.get_ref().metadata()?);
        let mut found = Vec::new();
        let mut scope = ManifestScope {
            interner: &mut self.interner,
            node_name: &self.node_name,
            hasher: &self.hasher,
            report: &mut |problem| found.push(problem),
        };
        let manifest = manifest::read(path, &mut file, &mut scope)?;
        if Stamp::of(&file.get_ref().metadata()?) != before {
            return Ok(None);
        }
        self.desk.was_read(path, before);
        let outcome = self.store.replace(path, manifest, &mut |problem| found.push(problem));
        found.into_iter().for_each(|problem| problems.report(problem));
        Ok(Some(outcome))
    }

    /// The folder cannot be looked into: all stays as it is.
    fn away(&mut self, error: io::Error, now: Instant, problems: &Problems) -> Look {
        if !std::mem::replace(&mut self.away, true) {
            let mut problem = Problem::new("", "", Reason::Away, &error);
            problem.place = Some((self.target.clone(), 0));
            problems.report(problem);
        }
        Look { updates: Vec::new(), look_again: now + SOON, error: Some(error) }
    }
}

/// How often the folder is looked at without cause; see `notify`.
const REGULAR: Duration = Duration::from_secs(5);
/// The same while there is nothing yet to look at.
const SOON: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(10);
