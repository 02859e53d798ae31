// SPDX-License-Identifier: Apache-2.0

//! Network namespaces held by a file descriptor.
//!
//! An anonymous namespace has no name anywhere: it disappears with its last descriptor and process, also when its
//! owner is killed. Entering one changes the calling thread only.

use std::{
    fs::File,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    panic, thread,
};

use rustix::{
    io::Errno,
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};

use crate::error::Error;

/// A network namespace.
#[derive(Debug)]
pub struct Netns {
    fd: OwnedFd,
}

impl Netns {
    /// Makes a new, empty one. Needs CAP_SYS_ADMIN.
    pub fn new() -> Result<Netns, Error> {
        in_thread(|| {
            // SAFETY: the flag is not CLONE_FILES: descriptors stay shared with the other threads.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.map_err(|errno| Error::io("unshare", errno))?;
            Netns::current()
        })
    }

    /// The one of the calling thread.
    pub fn current() -> Result<Netns, Error> {
        Netns::open("/proc/thread-self/ns/net")
    }

    /// The one at a path, such as `/proc/PID/ns/net` or `/run/netns/NAME`.
    pub fn open(path: impl AsRef<std::path::Path>) -> Result<Netns, Error> {
        let file = File::open(path)
            .map_err(|error| Error::io("open", Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
        Ok(Netns { fd: file.into() })
    }

    /// Moves the calling thread into it, for good. Never on a thread of a pool that others use.
    pub fn enter(&self) -> Result<(), Error> {
        move_into_link_name_space(self.fd.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|errno| Error::io("setns", errno))
    }

    /// Runs `work` in it, in a thread of its own. A panic of `work` goes on in the caller.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> Result<R, Error> {
        in_thread(|| {
            self.enter()?;
            Ok(work())
        })
    }

    /// A second handle of the same namespace.
    pub fn try_clone(&self) -> Result<Netns, Error> {
        let fd = self.fd.try_clone();
        let fd = fd.map_err(|error| Error::io("dup", Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
        Ok(Netns { fd })
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn in_thread<R: Send>(work: impl FnOnce() -> Result<R, Error> + Send) -> Result<R, Error> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("netns".to_owned());
        match thread.spawn_scoped(scope, work) {
            Ok(thread) => thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic)),
            Err(error) => Err(Error::io("clone", Errno::from_io_error(&error).unwrap_or(Errno::IO))),
        }
    })
}

#[cfg(test)]
mod tests;
