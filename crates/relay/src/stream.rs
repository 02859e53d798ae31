// SPDX-License-Identifier: Apache-2.0

//! One direction of a TCP connection.

use std::os::fd::BorrowedFd;

use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown},
    pipe::{SpliceFlags, splice},
};

use crate::pipe::{CAPACITY, FEW, Pipe, Pool};

/// Bytes on their way from one socket to another.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    /// Held while bytes are in it.
    pipe: Option<Pipe>,
    waiting: usize,
    /// As much came last time as is worth a splice.
    flows: bool,
    /// The source has said its last byte.
    ended: bool,
    /// And the sink was told so.
    told: bool,
}

/// A socket, and what is known of it.
#[derive(Debug)]
pub(crate) struct Side<'a> {
    pub(crate) socket: BorrowedFd<'a>,
    pub(crate) known: &'a mut Known,
}

/// What the last events said of a socket, unless a call has said otherwise since.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Known {
    pub(crate) reads: bool,
    pub(crate) writes: bool,
    /// Its last byte has arrived.
    pub(crate) hung_up: bool,
    /// It has urgent data, at which a splice would stop.
    pub(crate) urgent: bool,
    /// It was told that nothing more comes.
    pub(crate) shut: bool,
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
        source: &mut Side<'_>,
        sink: &mut Side<'_>,
        pool: &mut Pool,
    ) -> Result<Moved, Broken> {
        let mut moved = Moved::default();
        let outcome = self.steps(source, sink, pool, &mut moved);
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
                if !sink.known.writes {
                    return Ok(());
                }
                moved.bytes += self.write(sink)? as u64;
            } else if self.ended {
                self.tell(source, sink);
                return Ok(());
            } else if !source.known.reads || !sink.known.writes {
                return Ok(());
            } else if self.pipe.is_none() {
                self.pipe = pool.take();
                if self.pipe.is_none() {
                    let bytes = self.copy(source, sink)?;
                    moved.bytes += bytes;
                    moved.copied += bytes;
                }
            } else if self.flows && !source.known.urgent {
                self.read(source)?;
                if self.waiting > 0 && source.known.hung_up {
                    self.look_for_the_end(source);
                }
            } else {
                moved.bytes += self.pass(source, sink, pool.buffer())?;
            }
        }
        moved.more = true;
        Ok(())
    }

    /// A few bytes: read and sent, which costs less than a splice into a pipe and one out of it. What the sink does not
    /// take now goes into the pipe.
    fn pass(&mut self, source: &mut Side<'_>, sink: &mut Side<'_>, buffer: &mut [u8]) -> Result<u64, Broken> {
        let seen = match recv(source.socket, &mut *buffer, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => {
                self.ended = true;
                return Ok(0);
            }
            Ok((_, seen)) => seen,
            Err(Errno::AGAIN) => {
                source.known.reads = false;
                return Ok(0);
            }
            Err(Errno::INTR) => return Ok(0),
            Err(_) => return Err(Broken::Source),
        };
        if seen == buffer.len() {
            self.flows = true;
        } else if source.known.hung_up {
            // If nothing comes after this, the sink gets it and the end in one packet.
            self.ended = has_ended(source.socket);
        } else if !source.known.urgent {
            source.known.reads = false;
        }
        let mut flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        flags.set(SendFlags::MORE, self.ended);
        let sent = match send(sink.socket, &buffer[..seen], flags) {
            Ok(sent) => sent,
            Err(Errno::AGAIN) => {
                sink.known.writes = false;
                0
            }
            Err(Errno::INTR) => 0,
            Err(_) => return Err(Broken::Sink),
        };
        let rest = &buffer[sent.min(seen)..seen];
        if let Some(pipe) = self.pipe.as_ref().filter(|_| !rest.is_empty()) {
            // It is empty, and holds as much in any case.
            self.waiting = rest.len();
            if rustix::io::write(&pipe.write, rest) != Ok(rest.len()) {
                return Err(Broken::Sink);
            }
        }
        Ok(sent as u64)
    }

    fn read(&mut self, source: &mut Side<'_>) -> Result<(), Broken> {
        let Some(pipe) = &self.pipe else { return Ok(()) };
        match splice(source.socket, None, &pipe.write, None, CAPACITY, FLAGS) {
            Ok(0) => self.end_or_mark(source),
            Ok(bytes) => {
                self.waiting = bytes;
                self.flows = bytes >= FEW;
            }
            Err(Errno::AGAIN) => source.known.reads = false,
            Err(Errno::INTR) => (),
            Err(_) => return Err(Broken::Source),
        }
        Ok(())
    }

    /// A splice also says 0 at urgent data if the end has come after it.
    fn end_or_mark(&mut self, source: &mut Side<'_>) {
        self.ended = has_ended(source.socket);
        source.known.urgent = !self.ended;
    }

    /// If nothing comes after what was just read, the sink gets it and the end in one packet.
    fn look_for_the_end(&mut self, source: &mut Side<'_>) {
        let Some(pipe) = &self.pipe else { return };
        // A pipe that is full says so as a source without bytes does; either is met again after the next write.
        match splice(source.socket, None, &pipe.write, None, CAPACITY, FLAGS) {
            Ok(0) => self.end_or_mark(source),
            Ok(bytes) => self.waiting += bytes,
            Err(_) => (),
        }
    }

    fn write(&mut self, sink: &mut Side<'_>) -> Result<usize, Broken> {
        let Some(pipe) = &self.pipe else { return Ok(0) };
        let flags = if self.ended { FLAGS.union(SpliceFlags::MORE) } else { FLAGS };
        match splice(&pipe.read, None, sink.socket, None, self.waiting, flags) {
            Ok(bytes) => {
                self.waiting -= bytes.min(self.waiting);
                Ok(bytes)
            }
            Err(Errno::AGAIN) => {
                sink.known.writes = false;
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
                source.known.reads = false;
                return Ok(0);
            }
            Err(Errno::INTR) => return Ok(0),
            Err(_) => return Err(Broken::Source),
        };
        let sent = match send(sink.socket, &buffer[..seen], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) => sent,
            Err(Errno::AGAIN) => {
                sink.known.writes = false;
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

    fn tell(&mut self, source: &Side<'_>, sink: &mut Side<'_>) {
        if self.told {
            return;
        }
        self.told = true;
        sink.known.shut = true;
        // Where the other direction is over as well, both are closed now, which says the same.
        if !source.known.shut {
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

/// Nothing is left to be read, and nothing comes.
fn has_ended(socket: BorrowedFd<'_>) -> bool {
    matches!(recv(socket, &mut [0; 1], RecvFlags::DONTWAIT | RecvFlags::PEEK), Ok((_, 0)))
}

const FLAGS: SpliceFlags = SpliceFlags::NONBLOCK.union(SpliceFlags::MOVE);
