// SPDX-License-Identifier: Apache-2.0

//! Files to manifests: one by one, or many at once on more than one processor.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufRead, BufReader, Read},
    num::NonZero,
    os::unix::fs::OpenOptionsExt,
    panic,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use hashbrown::DefaultHashBuilder;

use super::{
    manifest::{self, Known, Manifest, ManifestScope},
    scan::{Name, Stamp},
};
use crate::{intern::Interner, problem::Problem};

/// Reads files; keeps what can be shared between them.
pub(super) struct Parser {
    interner: Interner,
    node_name: Arc<str>,
    hasher: DefaultHashBuilder,
    /// What small files are read into.
    buffer: Vec<u8>,
}

/// A file that has been read.
pub(super) struct Parsed {
    pub manifest: Manifest,
    pub problems: Vec<Problem>,
    /// The state it was read in; none if it changed meanwhile: then it was half of one state and half of another.
    pub stamp: Option<Stamp>,
}

/// Who gets what has been read.
pub(super) trait Recipient {
    /// The documents of a file that it has already.
    fn known(&self, name: &Name) -> Known;

    fn take(&mut self, name: &Name, parsed: io::Result<Parsed>);
}

impl<F: FnMut(&Name, io::Result<Parsed>)> Recipient for F {
    fn known(&self, _: &Name) -> Known {
        Known::default()
    }

    fn take(&mut self, name: &Name, parsed: io::Result<Parsed>) {
        self(name, parsed);
    }
}

impl Parser {
    pub(super) fn new(node_name: Arc<str>) -> Parser {
        Parser {
            interner: Interner::default(),
            node_name,
            hasher: DefaultHashBuilder::default(),
            buffer: Vec::new(),
        }
    }

    /// Reads a file, but for the documents that are known.
    pub(super) fn read(&mut self, path: &Path, known: &Known) -> io::Result<Parsed> {
        let mut file = open(path)?;
        let metadata = file.metadata()?;
        let before = Stamp::of(&metadata);
        // What says that it is empty may be a pipe.
        let small = usize::try_from(metadata.len()).ok().filter(|length| (1..=SMALL).contains(length));
        if let Some(length) = small {
            self.buffer.resize(length, 0);
            let length = fill(&mut file, &mut self.buffer)?;
            self.buffer.truncate(length);
        }
        let mut large = BufReader::with_capacity(if small.is_some() { 0 } else { CHUNK }, &file);
        let mut whole = &self.buffer[..];
        let text: &mut dyn BufRead = if small.is_some() { &mut whole } else { &mut large };
        let mut problems = Vec::new();
        let mut scope = ManifestScope {
            interner: &mut self.interner,
            node_name: &self.node_name,
            hasher: &self.hasher,
            known,
            report: &mut |problem| problems.push(problem),
        };
        let manifest = manifest::read(path, text, &mut scope)?;
        let stamp =
            Some(before).filter(|before| file.metadata().is_ok_and(|after| Stamp::of(&after) == *before));
        Ok(Parsed { manifest, problems, stamp })
    }

    /// Reads all of them, on more than one processor if they are many, and hands them over in their order.
    pub(super) fn read_all(&mut self, folder: &Path, names: &[Name], recipient: &mut impl Recipient) {
        // Asking for the processors reads a handful of files: not for a single change.
        let processors = || thread::available_parallelism().map_or(1, NonZero::get);
        let threads = if names.len() < MANY { 1 } else { processors().min(MAX_THREADS) };
        let mut take = |name: &Name, parsed| recipient.take(name, parsed);
        if threads == 1 || !self.read_side_by_side(threads, (folder, names), &mut take) {
            for name in names {
                let known = recipient.known(name);
                recipient.take(name, self.read(&folder.join(&**name), &known));
            }
        }
    }

    /// False, and nothing is done, if there are no threads to be had.
    fn read_side_by_side(
        &mut self,
        threads: usize,
        (folder, names): (&Path, &[Name]),
        take: &mut dyn FnMut(&Name, io::Result<Parsed>),
    ) -> bool {
        let chunks: Vec<&[Name]> = names.chunks(AT_ONCE).collect();
        let (chunks, next) = (&chunks, &AtomicUsize::new(0));
        let (sender, receiver) = mpsc::sync_channel(threads);
        thread::scope(|scope| {
            let work = |mut parser: Parser, sender: mpsc::SyncSender<_>| {
                while let Some((at, chunk)) = claim(chunks, next) {
                    let read = |name: &Name| parser.read(&folder.join(&**name), &Known::default());
                    let parsed: Vec<_> = chunk.iter().map(read).collect();
                    if sender.send((at, parsed)).is_err() {
                        break;
                    }
                }
                parser.interner
            };
            let mut running = Vec::new();
            for _ in 0..threads {
                let (parser, sender) = (self.sibling(), sender.clone());
                let builder = thread::Builder::new().name("files".to_owned());
                running.extend(builder.spawn_scoped(scope, move || work(parser, sender)));
            }
            drop(sender);
            if running.is_empty() {
                return false;
            }
            // They end in another order than they began.
            let (mut early, mut wanted) = (BTreeMap::new(), 0);
            for (at, parsed) in receiver {
                early.insert(at, parsed);
                while let Some(parsed) = early.remove(&wanted) {
                    chunks[wanted].iter().zip(parsed).for_each(|(name, parsed)| take(name, parsed));
                    wanted += 1;
                }
            }
            for thread in running {
                match thread.join() {
                    Ok(interner) => self.interner.absorb(interner),
                    Err(bug) => panic::resume_unwind(bug),
                }
            }
            true
        })
    }

    /// One whose hashes can be compared with those of this one.
    fn sibling(&self) -> Parser {
        Parser { hasher: self.hasher.clone(), ..Parser::new(self.node_name.clone()) }
    }
}

/// The next chunk that nobody has begun.
fn claim<'a>(chunks: &[&'a [Name]], next: &AtomicUsize) -> Option<(usize, &'a [Name])> {
    let at = next.fetch_add(1, Ordering::Relaxed);
    chunks.get(at).map(|chunk| (at, *chunk))
}

/// Opens a file without leaving a trace: who notes that it was read, as most file systems do after a change, writes to the disk
/// for it. Not everybody may ask for that of a file that is not their own.
fn open(path: &Path) -> io::Result<File> {
    let without_trace = File::options().read(true).custom_flags(NO_ACCESS_TIME).open(path);
    match without_trace {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => File::open(path),
        opened => opened,
    }
}

/// Reads until the buffer is full or the file ends.
fn fill(file: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut length = 0;
    while length < buffer.len() {
        match file.read(&mut buffer[length..]) {
            Ok(0) => break,
            Ok(more) => length += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

const NO_ACCESS_TIME: i32 = rustix::fs::OFlags::NOATIME.bits() as i32;
/// Files up to this size are read at once, others piece by piece.
pub(super) const SMALL: usize = 256 << 10;
const CHUNK: usize = 64 << 10;
/// From so many files on, more than one processor reads them,
const MANY: usize = 256;
/// but not all of a large machine, which has other things to do,
const MAX_THREADS: usize = 4;
/// so many files at a time.
const AT_ONCE: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_leaves_no_trace() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.yaml");
        std::fs::write(&path, "kind: ConfigMap\n").unwrap();
        // Older than the last change: nearly every file system would note the next reading.
        let long_ago = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
        let times = std::fs::FileTimes::new().set_accessed(long_ago);
        File::options().write(true).open(&path).unwrap().set_times(times).unwrap();
        Parser::new("worker-1".into()).read(&path, &Known::default()).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().accessed().unwrap(), long_ago);
    }

    #[test]
    fn many_files_come_in_their_order_and_share_their_strings() {
        let folder = tempfile::tempdir().unwrap();
        let mut names: Vec<Name> = Vec::new();
        for n in 0..MANY + AT_ONCE + 1 {
            let name = format!("{n:04}.yaml");
            let text = format!(
                "kind: Service\nmetadata:\n  name: s{n}\n  namespace: n\nspec:\n  clusterIP: 10.0.0.1\n  ports: [{{port: 80}}]\n"
            );
            std::fs::write(folder.path().join(&name), text).unwrap();
            names.push(std::ffi::OsStr::new(&name).into());
        }
        names.push(std::ffi::OsStr::new("missing.yaml").into());
        let mut parser = Parser::new("worker-1".into());
        for threads in [1, 3] {
            let mut found = Vec::new();
            let mut take = |name: &Name, parsed: io::Result<Parsed>| {
                let parsed = parsed.ok().map(|parsed| parsed.manifest.found[0].key.describe());
                found.push((name.clone(), parsed));
            };
            assert!(parser.read_side_by_side(threads, (folder.path(), &names), &mut take));
            assert_eq!(
                found.iter().map(|(name, _)| name).collect::<Vec<_>>(),
                names.iter().collect::<Vec<_>>()
            );
            assert_eq!(found[300.min(MANY)].1.as_deref(), Some(&*format!("Service n/s{}", 300.min(MANY))));
            assert_eq!(found.last().unwrap().1, None);
        }
        let mut found = 0;
        let mut count = |_: &Name, parsed: io::Result<Parsed>| found += usize::from(parsed.is_ok());
        parser.read_all(folder.path(), &names, &mut count);
        assert_eq!(found, names.len() - 1);
    }
}
