// SPDX-License-Identifier: Apache-2.0

//! A request and its answer, over any transport: sequence numbers, acknowledgements, listings in many parts.

use std::time::Duration;

use rustix::io::Errno;

use crate::{
    attr::Writer,
    codec::{Message, Reader, each_attr},
    error::{Error, Op},
    socket::Transport,
};

const NLMSG_NOOP: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLMSG_OVERRUN: u16 = 4;

const NLM_F_DUMP_INTR: u16 = 0x10;
const NLM_F_CAPPED: u16 = 0x100;
const NLM_F_ACK_TLVS: u16 = 0x200;

const NLMSGERR_ATTR_MSG: u16 = 1;
const NLMSGERR_ATTR_OFFS: u16 = 2;

/// The kernel answers within `send`, so this passes only if an answer was lost.
const PATIENCE: Duration = Duration::from_secs(5);

/// Requests and answers over a transport, one at a time.
#[derive(Debug)]
pub(crate) struct Channel<T> {
    transport: T,
    seq: u32,
    /// Reused for all datagrams.
    buffer: Vec<u8>,
    /// Reused for small requests.
    writer: Writer,
    patience: Duration,
    /// The last answer was read to its end: nothing is left of it.
    is_clear: bool,
}

/// What the kernel says about one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ack {
    pub(crate) seq: u32,
    /// `None` if it was accepted.
    pub(crate) errno: Option<Errno>,
    pub(crate) extack: Option<String>,
    pub(crate) offset: Option<u32>,
}

impl<T: Transport> Channel<T> {
    pub(crate) fn new(transport: T) -> Channel<T> {
        Channel {
            transport,
            seq: 0,
            buffer: Vec::new(),
            writer: Writer::new(),
            patience: PATIENCE,
            is_clear: false,
        }
    }

    pub(crate) fn transport(&self) -> &T {
        &self.transport
    }

    pub(crate) fn transport_mut(&mut self) -> &mut T {
        &mut self.transport
    }

    /// The request of the last [`Channel::exchange`].
    pub(crate) fn last_request(&self) -> &[u8] {
        self.writer.bytes()
    }

    pub(crate) fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Sends one request and visits each message of the answer, until the kernel says it is complete.
    ///
    /// `fill` writes the message's body.
    pub(crate) fn exchange(
        &mut self,
        what: &'static str,
        (kind, flags): (u16, u16),
        fill: impl FnOnce(&mut Writer),
        mut visit: impl FnMut(&Message<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.seq = self.seq.wrapping_add(1).max(1);
        let seq = self.seq;
        self.writer.clear();
        let start = self.writer.begin_message(kind, flags, seq);
        fill(&mut self.writer);
        self.writer.end_message(start);
        if self.writer.spoiled() {
            return Err(Error::Unencodable(Op::Request(what)));
        }
        self.drain();
        self.is_clear = false;
        self.transport.send(self.writer.bytes())?;
        let mut interrupted = false;
        loop {
            if !self.transport.recv(&mut self.buffer, self.patience)? {
                return Err(Error::Timeout(self.patience));
            }
            let mut datagram = Reader::new(&self.buffer);
            while let Some(message) = Message::next(&mut datagram)? {
                if message.seq != seq {
                    continue;
                }
                interrupted |= message.flags & NLM_F_DUMP_INTR != 0;
                match message.kind {
                    NLMSG_NOOP => {}
                    NLMSG_OVERRUN => return Err(Error::Overrun),
                    NLMSG_ERROR | NLMSG_DONE => {
                        let ack = Ack::read(&message)?;
                        self.is_clear = true;
                        return match ack.errno {
                            Some(errno) => Err(ack.into_error(Op::Request(what), errno)),
                            None if interrupted => Err(Error::Interrupted),
                            None => Ok(()),
                        };
                    }
                    _ => visit(&message)?,
                }
            }
        }
    }

    /// Sends a batch whose last message but the end asks for an answer, and visits all that is said, in order.
    ///
    /// Ends when nothing more is there: the kernel has said all before `send` returns. An [`Error::Overrun`] is
    /// given back last, since what the kernel could still say comes before what it had to drop.
    pub(crate) fn batch(&mut self, bytes: &[u8], mut visit: impl FnMut(Ack)) -> Result<(), Error> {
        self.drain();
        self.is_clear = false;
        self.transport.send(bytes)?;
        let mut overrun = false;
        let mut wait = self.patience;
        loop {
            match self.transport.recv(&mut self.buffer, wait) {
                Ok(true) => {}
                Ok(false) if overrun => return Err(Error::Overrun),
                Ok(false) if wait.is_zero() => {
                    self.is_clear = true;
                    return Ok(());
                }
                Ok(false) => return Err(Error::Timeout(wait)),
                Err(Error::Overrun) => {
                    overrun = true;
                    wait = Duration::ZERO;
                    continue;
                }
                Err(error) => return Err(error),
            }
            wait = Duration::ZERO;
            let mut datagram = Reader::new(&self.buffer);
            while let Some(message) = Message::next(&mut datagram)? {
                match message.kind {
                    NLMSG_ERROR => visit(Ack::read(&message)?),
                    NLMSG_OVERRUN => overrun = true,
                    _ => {}
                }
            }
        }
    }

    /// Throws away what is left of an answer that was not read to its end. A listing that is not finished would make
    /// the kernel refuse the next one.
    fn drain(&mut self) {
        while !self.is_clear {
            match self.transport.recv(&mut self.buffer, Duration::ZERO) {
                Ok(true) | Err(Error::Overrun) => {}
                Ok(false) | Err(_) => return,
            }
        }
    }
}

impl Ack {
    /// Reads an error, an acknowledgement or the end of a listing.
    pub(crate) fn read(message: &Message<'_>) -> Result<Ack, Error> {
        let mut body = Reader::new(message.body);
        // The end of a listing came without a code before Linux 4.14.
        let code = if message.kind == NLMSG_DONE && body.rest().is_empty() {
            0
        } else {
            i32::from_ne_bytes(body.array()?)
        };
        let mut ack = Ack { seq: message.seq, errno: errno(code)?, extack: None, offset: None };
        if message.flags & NLM_F_ACK_TLVS == 0 {
            return Ok(ack);
        }
        if message.kind == NLMSG_ERROR {
            // The refused message follows: whole, or only its header if it is capped or was accepted.
            let whole = u32::from_ne_bytes(body.array()?) as usize;
            let capped = message.flags & NLM_F_CAPPED != 0 || ack.errno.is_none();
            let len = if capped { 16 } else { whole.max(16) };
            let padded = len.checked_next_multiple_of(4).ok_or(Error::Malformed("truncated"))?;
            body.take(padded - 4)?;
        }
        each_attr(body.rest(), |attr| {
            match attr.kind {
                // Only words: whatever they are, the error itself must not get lost over them.
                NLMSGERR_ATTR_MSG => {
                    let text = attr.payload.strip_suffix(&[0]).unwrap_or(attr.payload);
                    ack.extack = Some(String::from_utf8_lossy(text).into_owned());
                }
                NLMSGERR_ATTR_OFFS => ack.offset = attr.ne32().ok(),
                _ => {}
            }
            Ok(())
        })?;
        Ok(ack)
    }

    pub(crate) fn into_error(self, op: Op, errno: Errno) -> Error {
        Error::Kernel { op, errno, extack: self.extack, offset: self.offset, element: None }
    }
}

fn errno(code: i32) -> Result<Option<Errno>, Error> {
    match code {
        0.. => Ok(None),
        -4095..=-1 => Ok(Some(Errno::from_raw_os_error(-code))),
        _ => Err(Error::Malformed("an error number out of range")),
    }
}

#[cfg(test)]
mod tests;
