// SPDX-License-Identifier: Apache-2.0

//! Pipes, for bytes on their way from one socket to the other.

use std::{os::fd::OwnedFd, sync::Arc};

use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

use crate::worker::Shared;

/// What one splice takes at most.
pub(crate) const CAPACITY: usize = 256 * 1024;
/// So many idle pipes a worker keeps.
const SPARE: usize = 64;

/// An empty pipe, or one in use.
#[derive(Debug)]
pub(crate) struct Pipe {
    pub(crate) read: OwnedFd,
    pub(crate) write: OwnedFd,
}

/// A worker's pipes that are not in use.
#[derive(Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
    spare: Vec<Pipe>,
}

impl Pool {
    pub(crate) fn new(shared: Arc<Shared>) -> Pool {
        Pool { shared, spare: Vec::new() }
    }

    /// `None` when there are as many as there may be, or no descriptor is left.
    pub(crate) fn take(&mut self) -> Option<Pipe> {
        if let Some(pipe) = self.spare.pop() {
            return Some(pipe);
        }
        let Shared { settings, counters, .. } = &*self.shared;
        if !counters.pipes.enter(settings.pipes) {
            return None;
        }
        let Ok((read, write)) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK) else {
            counters.pipes.leave();
            return None;
        };
        // Without the privilege the kernel may say no; the pipe is then smaller, and works.
        let _ = fcntl_setpipe_size(&write, CAPACITY);
        Some(Pipe { read, write })
    }

    /// Takes an empty pipe back.
    pub(crate) fn give(&mut self, pipe: Pipe) {
        if self.spare.len() < SPARE {
            self.spare.push(pipe);
        } else {
            self.discard(pipe);
        }
    }

    /// Closes a pipe with what is in it.
    pub(crate) fn discard(&mut self, pipe: Pipe) {
        drop(pipe);
        self.shared.counters.pipes.leave();
    }

    /// Closes what is not in use: descriptors are needed elsewhere.
    pub(crate) fn shrink(&mut self) {
        while let Some(pipe) = self.spare.pop() {
            self.discard(pipe);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shrink();
    }
}
