// SPDX-License-Identifier: Apache-2.0

//! The lock that all users of the legacy variant share.
//!
//! We hold it ourselves while our tool runs, and have the tool lock nothing. So we can say how long and for whom we
//! waited, and whoever opens the file or closes it is somebody else: see `canary`.

use std::{
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::fs::{Mode, OFlags};

use super::Failure;

/// Where the tools have it, unless they were built otherwise.
const PATH: &str = "/run/xtables.lock";
/// How often it is tried. The tools try it as often.
const TRY_EVERY: Duration = Duration::from_millis(20);

/// See the module. A clone is the same lock.
#[derive(Clone, Debug)]
pub(super) struct Lock {
    path: PathBuf,
    /// Kept open, as each closing would be heard.
    file: Option<Arc<File>>,
    /// Older tools cannot be told not to lock.
    is_left_to_tool: Arc<AtomicBool>,
}

/// The lock is ours until this is dropped.
#[derive(Debug)]
pub(super) struct Held(Arc<File>);

impl Drop for Held {
    fn drop(&mut self) {
        // It cannot fail for a lock that is held; if it did, it would be free when the process ends.
        let _ = self.0.unlock();
    }
}

impl Default for Lock {
    fn default() -> Lock {
        Lock::at(PATH.into())
    }
}

impl Lock {
    pub(super) fn at(path: PathBuf) -> Lock {
        Lock { path, file: None, is_left_to_tool: Arc::default() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Our tool takes it, not we.
    pub(super) fn leave_to_tool(&self) {
        self.is_left_to_tool.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_left_to_tool(&self) -> bool {
        self.is_left_to_tool.load(Ordering::Relaxed)
    }

    /// Waits until nobody holds it, and takes it. `None`: the tool has to, since we may not open it.
    pub(super) fn take(&mut self, limit: Duration) -> Result<Option<Held>, Failure> {
        if self.is_left_to_tool() {
            return Ok(None);
        }
        let begun = Instant::now();
        loop {
            let Some(file) = self.opened() else { return Ok(None) };
            match file.try_lock() {
                Ok(()) => return Ok(Some(Held(file))),
                Err(TryLockError::Error(_)) => return Ok(None),
                Err(TryLockError::WouldBlock) if begun.elapsed() < limit => thread::sleep(TRY_EVERY),
                Err(TryLockError::WouldBlock) => {
                    return Err(Failure::Locked { waited: begun.elapsed(), holder: self.holder() });
                }
            }
        }
    }

    /// The file that is at the path now; somebody may have put another there.
    fn opened(&mut self) -> Option<Arc<File>> {
        let identity = |file: fs::Metadata| (file.dev(), file.ino());
        let there = fs::metadata(&self.path).ok().map(identity);
        let ours = self.file.as_ref().and_then(|file| file.metadata().ok()).map(identity);
        if there.is_none() || ours != there {
            // Our tool inherits it, and so the lock, in case that we are killed while it works.
            let flags = OFlags::RDONLY | OFlags::CREATE;
            let opened = rustix::fs::open(&self.path, flags, Mode::RUSR | Mode::WUSR);
            self.file = opened.ok().map(|file| Arc::new(File::from(file)));
        }
        self.file.clone()
    }

    /// Name and number of the process that holds it, where the kernel tells: not across process namespaces.
    pub(super) fn holder(&self) -> Option<String> {
        let inode = fs::metadata(&self.path).ok()?.ino().to_string();
        let locks = fs::read_to_string("/proc/locks").ok()?;
        let process = locks.lines().find_map(|line| holder_of(line, &inode))?;
        let name = fs::read_to_string(format!("/proc/{process}/comm"));
        let name = name.unwrap_or_else(|_: io::Error| "unknown".to_owned());
        Some(format!("{} ({process})", name.trim_end()))
    }
}

/// The process in a line of /proc/locks such as `1: FLOCK  ADVISORY  WRITE 28437 fe:00:9773057 0 EOF`, if it is for
/// this inode. The one who waits has `->` after the number.
fn holder_of<'a>(line: &'a str, inode: &str) -> Option<&'a str> {
    let mut words = line.split_whitespace().skip(1);
    if words.next()? != "FLOCK" {
        return None;
    }
    let (process, file) = (words.nth(2)?, words.next()?);
    (file.rsplit(':').next()? == inode && process != "0").then_some(process)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_is_found_by_the_inode() {
        let line = "1: FLOCK  ADVISORY  WRITE 28437 fe:00:9773057 0 EOF";
        assert_eq!(holder_of(line, "9773057"), Some("28437"));
        assert_eq!(holder_of(line, "773057"), None);
        assert_eq!(holder_of("1: -> FLOCK  ADVISORY  WRITE 28437 fe:00:9773057 0 EOF", "9773057"), None);
        assert_eq!(holder_of("2: POSIX  ADVISORY  WRITE 28437 fe:00:9773057 0 EOF", "9773057"), None);
        assert_eq!(holder_of("rubbish", "9773057"), None);
    }

    #[test]
    fn a_wait_has_an_end_and_names_the_holder() {
        let path = std::env::temp_dir().join(format!("portolan-lock-{}", std::process::id()));
        let mut lock = Lock::at(path.clone());
        let ours = lock.take(Duration::ZERO).unwrap().expect("the file is made, as the tools make it");
        let other = File::open(&path).unwrap();
        assert!(other.try_lock().is_err(), "it is held");
        drop(ours);
        other.lock().unwrap();
        let failure = lock.take(Duration::from_millis(50)).unwrap_err();
        other.unlock().unwrap();
        assert!(lock.take(Duration::ZERO).unwrap().is_some());

        // Another file in its place is another lock.
        fs::remove_file(&path).unwrap();
        let other = File::create(&path).unwrap();
        other.lock().unwrap();
        lock.take(Duration::ZERO).unwrap_err();
        lock.leave_to_tool();
        assert!(lock.take(Duration::ZERO).unwrap().is_none());
        fs::remove_file(&path).unwrap();
        let Failure::Locked { waited, holder } = failure else { panic!("{failure}") };
        assert!(waited >= Duration::from_millis(50));
        let holder = holder.unwrap();
        assert!(holder.contains(&format!("({})", std::process::id())), "{holder}");
        let mut nowhere = Lock::at("/nowhere/at/all".into());
        assert!(nowhere.take(Duration::ZERO).unwrap().is_none(), "then the tool has to know");
    }
}
