// SPDX-License-Identifier: Apache-2.0

//! Hears that somebody ran a tool of the legacy variant.
//!
//! Each run of such a tool opens the lock, and closes it when its work is done, to look as well as to write. Ours do
//! neither, see `lock`. So a closing tells that a table may be another now, whatever its shape, and costs nothing
//! while there is none. Who does not share our lock is not heard: a container without it, or a program that writes
//! tables without a lock.

use std::{os::fd::OwnedFd, path::PathBuf, thread, time::Duration};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::inotify::{self, CreateFlags, WatchFlags},
    io::Errno,
};

/// See the module.
#[derive(Debug)]
pub(super) struct Canary {
    path: PathBuf,
    /// `None` where the kernel gives none.
    ear: Option<OwnedFd>,
    is_armed: bool,
}

impl Canary {
    pub(super) fn at(path: PathBuf) -> Canary {
        let ear = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
        let mut canary = Canary { path, ear, is_armed: false };
        canary.arm();
        canary
    }

    /// Listens to the file that is at the path now. Where it was listened to already, nothing changes.
    fn arm(&mut self) {
        let flags = WatchFlags::CLOSE_WRITE | WatchFlags::CLOSE_NOWRITE | WatchFlags::DELETE_SELF;
        let armed = |ear: &OwnedFd| inotify::add_watch(ear, &self.path, flags).is_ok();
        self.is_armed = self.ear.as_ref().is_some_and(armed);
    }

    /// Waits for so long, or until it is heard that somebody was there; whether it was.
    pub(super) fn wait(&mut self, wait: Duration) -> bool {
        let limit = Timespec::try_from(wait).ok();
        match &self.ear {
            // Signals may end it early.
            Some(ear) => drop(poll(&mut [PollFd::new(ear, PollFlags::IN)], limit.as_ref())),
            None => thread::sleep(wait),
        }
        let is_heard = self.is_heard();
        if is_heard || !self.is_armed {
            // The file may have come, or be another.
            self.arm();
        }
        is_heard
    }

    fn is_heard(&self) -> bool {
        let Some(ear) = &self.ear else { return false };
        let mut notices = [0; 4096];
        let mut is_heard = false;
        loop {
            // All mean the same.
            match rustix::io::read(ear, &mut notices[..]) {
                Ok(length) if length > 0 => is_heard = true,
                Err(Errno::INTR) => {}
                _ => return is_heard,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::{super::lock::Lock, *};

    #[test]
    fn others_are_heard_and_we_are_not() {
        let path = std::env::temp_dir().join(format!("portolan-canary-{}", std::process::id()));
        let mut canary = Canary::at(path.clone());
        let moment = Duration::from_millis(20);
        assert!(!canary.wait(moment), "there is no such file yet");
        let mut lock = Lock::at(path.clone());
        for _ in 0..3 {
            drop(lock.take(Duration::ZERO).unwrap().expect("nobody else has it"));
            assert!(!canary.wait(moment), "our own locking is no news");
        }
        for _ in 0..2 {
            drop(File::open(&path).unwrap());
            assert!(canary.wait(moment), "somebody was there");
            assert!(!canary.wait(moment), "told once");
        }
        // Another file in its place.
        fs::remove_file(&path).unwrap();
        File::create(&path).unwrap();
        drop(lock.take(Duration::ZERO).unwrap());
        while canary.wait(moment) {}
        drop(File::open(&path).unwrap());
        assert!(canary.wait(moment), "it is followed");
        fs::remove_file(&path).unwrap();
    }
}
