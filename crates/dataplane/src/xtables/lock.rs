// SPDX-License-Identifier: Apache-2.0

//! The lock that all users of the legacy variant share.

use std::{
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::MetadataExt as _,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use super::Failure;

/// Where the tools have it, unless they were built otherwise.
const PATH: &str = "/run/xtables.lock";
/// How often it is tried. The tools try it as often.
const TRY_EVERY: Duration = Duration::from_millis(20);

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Lock {
    path: PathBuf,
}

impl Default for Lock {
    fn default() -> Lock {
        Lock { path: PATH.into() }
    }
}

impl Lock {
    #[cfg(test)]
    pub(super) fn at(path: PathBuf) -> Lock {
        Lock { path }
    }

    /// Waits until nobody holds it; it is not kept. A lock that cannot be looked at is left to the tool.
    pub(super) fn wait(&self, limit: Duration) -> Result<(), Failure> {
        let Ok(file) = File::open(&self.path) else { return Ok(()) };
        let begun = Instant::now();
        loop {
            match file.try_lock() {
                Err(TryLockError::WouldBlock) if begun.elapsed() < limit => thread::sleep(TRY_EVERY),
                Err(TryLockError::WouldBlock) => {
                    return Err(Failure::Locked { waited: begun.elapsed(), holder: self.holder() });
                }
                Ok(()) | Err(TryLockError::Error(_)) => return Ok(()),
            }
        }
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
        let held = File::create(&path).unwrap();
        let lock = Lock::at(path.clone());
        assert!(lock.wait(Duration::ZERO).is_ok());
        held.lock().unwrap();
        let failure = lock.wait(Duration::from_millis(50)).unwrap_err();
        held.unlock().unwrap();
        assert!(lock.wait(Duration::ZERO).is_ok());
        fs::remove_file(&path).unwrap();
        let Failure::Locked { waited, holder } = failure else { panic!("{failure}") };
        assert!(waited >= Duration::from_millis(50));
        let holder = holder.unwrap();
        assert!(holder.contains(&format!("({})", std::process::id())), "{holder}");
        assert!(lock.wait(Duration::ZERO).is_ok(), "a lock that is not there is not waited for");
    }
}
