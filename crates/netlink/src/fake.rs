// SPDX-License-Identifier: Apache-2.0

//! Transports for tests: [`Recorder`] stands in for a kernel that accepts everything, [`Faulty`] makes a real one fail.

use std::{collections::VecDeque, fmt, time::Duration};

use rustix::io::Errno;

use crate::{
    attr::{NLM_F_ACK, NLM_F_DUMP},
    codec::{Message, Reader},
    error::Error,
    socket::{Socket, Transport},
};

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NFNL_MSG_BATCH_BEGIN: u16 = 0x10;

/// Remembers what is sent, and answers as a kernel does that accepts everything and holds nothing.
#[derive(Debug, Default)]
pub struct Recorder {
    sent: Vec<Vec<u8>>,
    scripts: VecDeque<Vec<Result<Vec<u8>, Error>>>,
    answers: VecDeque<Result<Vec<u8>, Error>>,
}

impl Recorder {
    /// Nothing sent yet.
    pub fn new() -> Recorder {
        Recorder::default()
    }

    /// All datagrams so far.
    pub fn sent(&self) -> &[Vec<u8>] {
        &self.sent
    }

    /// Answers the next request with these, instead of what it would say itself. Called twice, the second call is for
    /// the request after.
    pub fn answer_next(&mut self, datagrams: impl IntoIterator<Item = Result<Vec<u8>, Error>>) {
        self.scripts.push_back(datagrams.into_iter().collect());
    }

    /// Says something that nobody asked for.
    pub fn say(&mut self, datagram: Result<Vec<u8>, Error>) {
        self.answers.push_back(datagram);
    }
}

impl Transport for Recorder {
    fn send(&mut self, datagram: &[u8]) -> Result<(), Error> {
        self.sent.push(datagram.to_vec());
        if let Some(script) = self.scripts.pop_front() {
            self.answers.extend(script);
            return Ok(());
        }
        let mut messages = Reader::new(datagram);
        while let Some(message) = Message::next(&mut messages)? {
            if message.flags & NLM_F_ACK != 0 {
                self.answers.push_back(Ok(error_message(&message, 0)));
            } else if message.flags & NLM_F_DUMP == NLM_F_DUMP {
                self.answers.push_back(Ok(answer(NLMSG_DONE, message.seq, &0i32.to_ne_bytes())));
            }
        }
        Ok(())
    }

    fn recv(&mut self, buffer: &mut Vec<u8>, _wait: Duration) -> Result<bool, Error> {
        buffer.clear();
        match self.answers.pop_front() {
            None => Ok(false),
            Some(Ok(datagram)) => {
                buffer.extend_from_slice(&datagram);
                Ok(true)
            }
            Some(Err(error)) => Err(error),
        }
    }

    fn port(&self) -> u32 {
        RECORDER_PORT
    }
}

/// What goes wrong with one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The kernel never sees it: sending fails.
    Before(Errno),
    /// The kernel never does it: it answers with this error.
    Refused(Errno),
    /// The kernel does it, but its answer is lost: receiving fails. [`Errno::NOBUFS`] means that the answer did not
    /// fit, as an overrun does; [`Errno::TIMEDOUT`] that none comes.
    After(Errno),
}

/// What a schedule of faults may look at.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// How many were sent before it.
    pub index: usize,
    /// Whether it is a batch of changes, rather than a question.
    pub is_batch: bool,
    /// Its bytes.
    pub len: usize,
}

type Schedule = Box<dyn FnMut(Request) -> Option<Fault> + Send>;

/// Lets a transport fail on schedule.
pub struct Faulty<T> {
    inner: T,
    schedule: Schedule,
    /// What no batch may contain, and what is said of it then.
    refused: Option<(Vec<u8>, Errno)>,
    enabled: bool,
    requests: usize,
    faults: usize,
    pending: Option<Pending>,
}

enum Pending {
    Answer(Vec<u8>),
    Failure(Errno),
}

impl<T: Transport> Faulty<T> {
    /// Asks `schedule` about each request.
    pub fn new(inner: T, schedule: impl FnMut(Request) -> Option<Fault> + Send + 'static) -> Faulty<T> {
        let schedule = Box::new(schedule);
        Faulty { inner, schedule, refused: None, enabled: true, requests: 0, faults: 0, pending: None }
    }

    /// Lets the first requests go as `script` says, and all later ones well.
    pub fn scripted(inner: T, script: impl IntoIterator<Item = Option<Fault>>) -> Faulty<T> {
        let mut script: VecDeque<_> = script.into_iter().collect();
        Faulty::new(inner, move |_| script.pop_front().flatten())
    }

    /// Lets about one request in `one_in` fail, in a way that `seed` determines.
    pub fn seeded(inner: T, seed: u64, one_in: u64) -> Faulty<T> {
        let mut random = SplitMix(seed);
        Faulty::new(inner, move |_| {
            if !random.next().is_multiple_of(one_in.max(1)) {
                return None;
            }
            Some(match random.next() % 6 {
                0 => Fault::Before(Errno::NOBUFS),
                1 => Fault::Before(Errno::NOMEM),
                2 => Fault::Refused(Errno::NOMEM),
                3 => Fault::Refused(Errno::BUSY),
                4 => Fault::After(Errno::NOBUFS),
                _ => Fault::After(Errno::TIMEDOUT),
            })
        })
    }

    /// Refuses every batch of which a message contains these bytes: the first such message.
    pub fn refusing(inner: T, bytes: &[u8], errno: Errno) -> Faulty<T> {
        let refused = Some((bytes.to_vec(), errno));
        Faulty { refused, ..Faulty::new(inner, |_| None) }
    }

    /// The kernel's word on a batch that contains what none may.
    fn refusal(&self, datagram: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        let Some((bytes, errno)) = self.refused.as_ref().filter(|_| self.enabled) else { return Ok(None) };
        let mut messages = Reader::new(datagram);
        while let Some(message) = Message::next(&mut messages)? {
            if message.body.windows(bytes.len()).any(|window| window == bytes) {
                return Ok(Some(error_message(&message, -errno.raw_os_error())));
            }
        }
        Ok(None)
    }

    /// Switches the faults off, or on again.
    pub fn set_enabled(&mut self, enabled: bool) {
        self.enabled = enabled;
    }

    /// How many requests were sent so far.
    pub fn requests(&self) -> usize {
        self.requests
    }

    /// How many of them failed by schedule.
    pub fn faults(&self) -> usize {
        self.faults
    }

    /// The transport below.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    /// The transport below.
    pub fn inner_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    /// Lets the kernel work, and throws its answer away.
    fn lose_answer(&mut self) -> Result<(), Error> {
        let mut buffer = Vec::new();
        loop {
            match self.inner.recv(&mut buffer, Duration::ZERO) {
                Ok(true) | Err(Error::Overrun) => {}
                Ok(false) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}

impl<T: Transport> Transport for Faulty<T> {
    fn send(&mut self, datagram: &[u8]) -> Result<(), Error> {
        let mut messages = Reader::new(datagram);
        let first = Message::next(&mut messages)?.ok_or(Error::Malformed("an empty request"))?;
        let is_batch = first.kind == NFNL_MSG_BATCH_BEGIN;
        let request = Request { index: self.requests, is_batch, len: datagram.len() };
        self.requests += 1;
        self.pending = None;
        if let Some(refusal) = self.refusal(datagram)?.filter(|_| is_batch) {
            self.faults += 1;
            self.pending = Some(Pending::Answer(refusal));
            return Ok(());
        }
        let Some(fault) = (if self.enabled { (self.schedule)(request) } else { None }) else {
            return self.inner.send(datagram);
        };
        self.faults += 1;
        match fault {
            Fault::Before(errno) => Err(Error::io("sendto", errno)),
            Fault::Refused(errno) => {
                let mut refused = first;
                while let Some(message) = Message::next(&mut messages)? {
                    if message.flags & NLM_F_ACK != 0 {
                        refused = message;
                    }
                }
                self.pending = Some(Pending::Answer(error_message(&refused, -errno.raw_os_error())));
                Ok(())
            }
            Fault::After(errno) => {
                self.inner.send(datagram)?;
                self.lose_answer()?;
                self.pending = Some(Pending::Failure(errno));
                Ok(())
            }
        }
    }

    fn recv(&mut self, buffer: &mut Vec<u8>, wait: Duration) -> Result<bool, Error> {
        match self.pending.take() {
            None => self.inner.recv(buffer, wait),
            Some(Pending::Answer(datagram)) => {
                *buffer = datagram;
                Ok(true)
            }
            Some(Pending::Failure(Errno::TIMEDOUT)) => Ok(false),
            Some(Pending::Failure(Errno::NOBUFS)) => Err(Error::Overrun),
            Some(Pending::Failure(errno)) => Err(Error::io("recvfrom", errno)),
        }
    }

    fn port(&self) -> u32 {
        self.inner.port()
    }

    fn sibling(&self) -> Result<Option<Socket>, Error> {
        self.inner.sibling()
    }
}

impl<T: fmt::Debug> fmt::Debug for Faulty<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faulty")
            .field("inner", &self.inner)
            .field("requests", &self.requests)
            .field("faults", &self.faults)
            .finish_non_exhaustive()
    }
}

/// A message of the kernel, of this kind.
fn answer(kind: u16, seq: u32, body: &[u8]) -> Vec<u8> {
    let mut message = Vec::new();
    message.extend_from_slice(&(16 + body.len() as u32).to_ne_bytes());
    message.extend_from_slice(&kind.to_ne_bytes());
    message.extend_from_slice(&0u16.to_ne_bytes());
    message.extend_from_slice(&seq.to_ne_bytes());
    message.extend_from_slice(&RECORDER_PORT.to_ne_bytes());
    message.extend_from_slice(body);
    message
}

/// What the kernel says of a message: 0, or a negative error number.
fn error_message(about: &Message<'_>, code: i32) -> Vec<u8> {
    let mut body = code.to_ne_bytes().to_vec();
    body.extend_from_slice(&(16 + about.body.len() as u32).to_ne_bytes());
    body.extend_from_slice(&about.kind.to_ne_bytes());
    body.extend_from_slice(&about.flags.to_ne_bytes());
    body.extend_from_slice(&about.seq.to_ne_bytes());
    body.extend_from_slice(&about.port.to_ne_bytes());
    answer(NLMSG_ERROR, about.seq, &body)
}

/// A small generator, so that a seed means the same everywhere and always.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

const RECORDER_PORT: u32 = 4711;
