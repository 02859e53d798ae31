// SPDX-License-Identifier: Apache-2.0

//! Pipes, for bytes on their way from one socket to the other.

use std::{collections::VecDeque, os::fd::OwnedFd, sync::Arc};

use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

use crate::worker::Shared;

/// What one splice takes at most, and what a large pipe holds: a quarter less processor time for a gigabyte than with
/// 256 KiB (bench/README.md). More than that needs CAP_SYS_RESOURCE.
pub(crate) const CAPACITY: usize = 1 << 20;
/// So few bytes are not worth a splice. The smallest pipe the kernel makes holds as many.
pub(crate) const FEW: usize = 8 * 1024;
/// What any other pipe holds.
const USUAL: usize = 256 * 1024;
/// So many pipes are large. What a slow reader does not take waits in a pipe, which is memory; and a user without
/// privileges may have 64 MiB in all his pipes (`fs.pipe-user-pages-soft`), of which this is half.
const LARGE: usize = 32;
/// So many idle pipes a worker keeps.
const SPARE: usize = 64;

/// An empty pipe, or one in use.
#[derive(Debug)]
pub(crate) struct Pipe {
    pub(crate) read: OwnedFd,
    pub(crate) write: OwnedFd,
    is_large: bool,
}

/// A worker's pipes that are not in use.
#[derive(Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
    /// Large ones at the back, where they are taken from.
    spare: VecDeque<Pipe>,
    buffer: Box<[u8]>,
}

impl Pool {
    pub(crate) fn new(shared: Arc<Shared>) -> Pool {
        Pool { shared, spare: VecDeque::new(), buffer: vec![0; FEW].into() }
    }

    pub(crate) fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// `None` when there are as many as there may be, or no descriptor is left.
    pub(crate) fn take(&mut self) -> Option<Pipe> {
        if let Some(pipe) = self.spare.pop_back() {
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
        // Where a user has too much in pipes the kernel may say no; the pipe is then smaller, and works.
        let is_large = counters.pipes.value() <= LARGE && fcntl_setpipe_size(&write, CAPACITY).is_ok();
        if !is_large {
            let _ = fcntl_setpipe_size(&write, USUAL);
        }
        Some(Pipe { read, write, is_large })
    }

    /// Takes an empty pipe back.
    pub(crate) fn give(&mut self, pipe: Pipe) {
        match pipe.is_large {
            true => self.spare.push_back(pipe),
            false => self.spare.push_front(pipe),
        }
        if self.spare.len() > SPARE
            && let Some(one) = self.spare.pop_front()
        {
            self.discard(one);
        }
    }

    /// Closes a pipe with what is in it.
    pub(crate) fn discard(&mut self, pipe: Pipe) {
        drop(pipe);
        self.shared.counters.pipes.leave();
    }

    /// Closes what is not in use: descriptors are needed elsewhere.
    pub(crate) fn shrink(&mut self) {
        while let Some(pipe) = self.spare.pop_front() {
            self.discard(pipe);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shrink();
    }
}

#[cfg(test)]
mod tests {
    use rustix::pipe::fcntl_getpipe_size;

    use super::*;
    use crate::{counters::Counters, settings::Settings, tests::Places};

    /// A few are large, and those are used first; how many there are at all is bounded.
    #[test]
    fn the_first_are_large_and_are_taken_first() {
        let settings = Settings { pipes: LARGE + 8, ..Settings::default() };
        let directory = Arc::new(Places::default());
        let shared = Arc::new(Shared { settings, counters: Counters::default(), directory });
        let mut pool = Pool::new(Arc::clone(&shared));
        let size = |pipe: &Pipe| fcntl_getpipe_size(&pipe.write).expect("a size");
        let taken: Vec<Pipe> = std::iter::from_fn(|| pool.take()).collect();
        let sizes: Vec<usize> = taken.iter().map(size).collect();
        assert_eq!(sizes, [vec![CAPACITY; LARGE], vec![USUAL; 8]].concat());
        taken.into_iter().for_each(|pipe| pool.give(pipe));
        let again: Vec<usize> = (0..LARGE).filter_map(|_| pool.take()).map(|pipe| size(&pipe)).collect();
        assert_eq!(again, vec![CAPACITY; LARGE]);
        pool.shrink();
        assert_eq!(shared.counters.pipes.value(), LARGE, "those that were not given back");
    }
}
