// SPDX-License-Identifier: Apache-2.0

//! One direction of a TCP connection.

use std::os::fd::BorrowedFd;

use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown},
    pipe::{SpliceFlags, splice},
};

use crate::pipe::{CAPACITY, Pipe, Pool};

/// Bytes on their way from one socket to another.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    /// Held while bytes are in it.
    pipe: Option<Pipe>,
    waiting: usize,
    /// The source has said its last byte.
    ended: bool,
    /// And the sink was told so.
    told: bool,
}

/// A socket, and what is known of it since the last event.
#[derive(Debug)]
pub(crate) struct Side<'a> {
    pub(crate) socket: BorrowedFd<'a>,
    pub(crate) ready: &'a mut bool,
}

/// Which socket broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    Source,
    Sink,
}

/// What a turn moved.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moved {
    pub(crate) bytes: u64,
    pub(crate) copied: u64,
    /// There is more to do, but others shall have their turn first.
    pub(crate) more: bool,
}

/// So many splices in one turn, or about so many bytes; then other connections have theirs.
const TURN: usize = 16;
const TURN_BYTES: u64 = 2 << 20;

impl Stream {
    /// All bytes have gone, and the sink knows that no more come.
    pub(crate) fn is_over(&self) -> bool {
        self.told
    }

    /// Moves what can be moved now. Nothing is read while the sink takes nothing: the source then waits as it would
    /// for a slow reader.
    pub(crate) fn turn(
        &mut self,
        mut source: Side<'_>,
        mut sink: Side<'_>,
        pool: &mut Pool,
    ) -> Result<Moved, Broken> {
        let mut moved = Moved::default();
        let outcome = self.steps(&mut source, &mut sink, pool, &mut moved);
        if self.waiting == 0
            && let Some(pipe) = self.pipe.take()
        {
            pool.give(pipe);
        }
        outcome.map(|()| moved)
    }

    fn steps(
        &mut self,
        source: &mut Side<'_>,
        sink: &mut Side<'_>,
        pool: &mut Pool,
        moved: &mut Moved,
    ) -> Result<(), Broken> {
        for _ in 0..TURN {
            if moved.bytes >= TURN_BYTES {
                break;
            }
            if self.waiting > 0 {
                if !*sink.ready {
                    return Ok(());
                }
                moved.bytes += self.write(sink)? as u64;
            } else if self.ended {
                self.tell(sink);
                return Ok(());
            } else if !*source.ready || !*sink.ready {
                return Ok(());
            } else if self.pipe.is_none() {
                self.pipe = pool.take();
                if self.pipe.is_none() {
                    let bytes = self.copy(source, sink)?;
                    moved.bytes += bytes;
                    moved.copied += bytes;
                }
            } else {
                self.read(source)?;
            }
        }
        moved.more = true;
        Ok(())
    }

    fn read(&mut self, source: &mut Side<'_>) -> Result<(), Broken> {
        let Some(pipe) = &self.pipe else { return Ok(()) };
        match splice(source.socket, None, &pipe.write, None, CAPACITY, FLAGS) {
            Ok(0) => self.ended = true,
            Ok(bytes) => self.waiting = bytes,
            Err(Errno::AGAIN) => *source.ready = false,
            Err(Errno::INTR) => (),
            Err(_) => return Err(Broken::Source),
        }
        Ok(())
    }

    fn write(&mut self, sink: &mut Side<'_>) -> Result<usize, Broken> {
        let Some(pipe) = &self.pipe else { return Ok(0) };
        match splice(&pipe.read, None, sink.socket, None, self.waiting, FLAGS) {
            Ok(bytes) => {
                self.waiting -= bytes.min(self.waiting);
                Ok(bytes)
            }
            Err(Errno::AGAIN) => {
                *sink.ready = false;
                Ok(0)
            }
            Err(Errno::INTR) => Ok(0),
            Err(_) => Err(Broken::Sink),
        }
    }

    /// Without a pipe: looks at bytes, sends what the sink takes, and only then takes as many from the source. Nothing
    /// is held in between, so that any number of connections can do without pipes.
    fn copy(&mut self, source: &mut Side<'_>, sink: &mut Side<'_>) -> Result<u64, Broken> {
        let mut buffer = [0_u8; 16 * 1024];
        let seen = match recv(source.socket, &mut buffer, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 0)) => {
                self.ended = true;
                return Ok(0);
            }
            Ok((_, seen)) => seen.min(buffer.len()),
            Err(Errno::AGAIN) => {
                *source.ready = false;
                return Ok(0);
            }
            Err(Errno::INTR) => return Ok(0),
            Err(_) => return Err(Broken::Source),
        };
        let sent = match send(sink.socket, &buffer[..seen], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) => sent,
            Err(Errno::AGAIN) => {
                *sink.ready = false;
                return Ok(0);
            }
            Err(Errno::INTR) => return Ok(0),
            Err(_) => return Err(Broken::Sink),
        };
        let mut left = sent;
        while left > 0 {
            match recv(source.socket, &mut buffer[..left], RecvFlags::DONTWAIT) {
                Ok((_, 0)) | Err(Errno::AGAIN) => return Err(Broken::Source),
                Ok((_, taken)) => left -= taken.min(left),
                Err(Errno::INTR) => (),
                Err(_) => return Err(Broken::Source),
            }
        }
        Ok(sent as u64)
    }

    fn tell(&mut self, sink: &Side<'_>) {
        if !self.told {
            self.told = true;
            // A sink that is gone already will say so by itself.
            let _ = shutdown(sink.socket, Shutdown::Write);
        }
    }

    /// Gives back what it holds.
    pub(crate) fn release(&mut self, pool: &mut Pool) {
        if let Some(pipe) = self.pipe.take() {
            if self.waiting == 0 {
                pool.give(pipe);
            } else {
                pool.discard(pipe);
            }
        }
    }
}

const FLAGS: SpliceFlags = SpliceFlags::NONBLOCK.union(SpliceFlags::MOVE);
