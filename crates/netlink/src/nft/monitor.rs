// SPDX-License-Identifier: Apache-2.0

//! Who changes what in nf_tables, as it happens.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use super::{
    decode::Generic,
    encode::{self, msg},
};
use crate::{
    Family,
    codec::{Message, Reader, each_attr},
    error::Error,
    netns::Netns,
    socket::{Protocol, Socket, Transport},
};

const NFNLGRP_NFTABLES: u32 = 7;

/// Receives notifications of all changes to nf_tables in one network namespace.
///
/// The changes of a commit come one by one, then [`Event::Generation`] says who made them.
///
/// Being told has a price that whoever commits pays: as long as anybody listens, the kernel allocates a message of some
/// KiB for each element that changes, and keeps all of them until the commit is done. A load of 100,000 elements is
/// several times cheaper in batches of a few thousand than in one.
#[derive(Debug)]
pub struct Monitor<T = Socket> {
    transport: T,
    buffer: Vec<u8>,
    pending: VecDeque<Event>,
}

/// A notification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Part of a commit.
    Change(Change),
    /// The end of a commit.
    Generation {
        /// The number of commits there have been.
        id: u32,
        /// The port of the socket that made the commit: compare it with [`Nft::port`](super::Nft::port).
        port: u32,
        /// The thread that made it, as numbered outside all containers.
        pid: Option<u32>,
        /// The thread's name, which for most programs is the program's.
        process: Option<String>,
    },
}

impl Event {
    /// The port of the socket that caused it.
    pub fn port(&self) -> u32 {
        match self {
            Event::Change(change) => change.port,
            Event::Generation { port, .. } => *port,
        }
    }
}

/// One change of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// What was changed.
    pub object: Object,
    /// Added or changed, rather than removed.
    pub added: bool,
    /// `None` for a family that is neither `ip` nor `ip6`.
    pub family: Option<Family>,
    /// The table it belongs to.
    pub table: String,
    /// The chain (also of a rule), or the set (also of elements).
    pub name: Option<String>,
    /// The port of the socket that made the commit.
    pub port: u32,
}

/// What was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Object {
    /// A table.
    Table,
    /// A chain.
    Chain,
    /// A rule.
    Rule,
    /// A set or map.
    Set,
    /// Elements of a set or map. Also elements that rules add while packets pass, and that expire.
    Elements,
    /// Something this crate does not write.
    Other,
}

impl Monitor<Socket> {
    /// Subscribes in the network namespace of this thread.
    pub fn open() -> Result<Monitor<Socket>, Error> {
        Monitor::on(Socket::open(Protocol::Netfilter)?)
    }

    /// Subscribes by this socket.
    pub(super) fn on(socket: Socket) -> Result<Monitor<Socket>, Error> {
        socket.grow_recv_buffer(RECV_BUFFER);
        socket.join(NFNLGRP_NFTABLES)?;
        Ok(Monitor::over(socket))
    }

    /// Is not told of what one socket does: a writer need not be woken by its own commits.
    pub fn passing_over(self, port: u32) -> Result<Monitor<Socket>, Error> {
        self.transport.pass_over(port)?;
        Ok(self)
    }

    /// Subscribes in another network namespace.
    pub fn open_in(netns: &Netns) -> Result<Monitor<Socket>, Error> {
        netns.run(Monitor::open)?
    }

    #[cfg(test)]
    pub(super) fn shrink_for_test(&self) {
        self.transport.grow_recv_buffer(4096);
    }
}

impl<T: Transport> Monitor<T> {
    /// Reads notifications from any transport.
    pub fn over(transport: T) -> Monitor<T> {
        Monitor { transport, buffer: Vec::new(), pending: VecDeque::new() }
    }

    /// The next event; `None` if there was none within `wait`.
    ///
    /// After [`Error::Overrun`] events are missing, and the monitor can be used on: compare the tables with what they
    /// should be.
    pub fn next(&mut self, wait: Duration) -> Result<Option<Event>, Error> {
        while self.pending.is_empty() {
            if !self.transport.recv(&mut self.buffer, wait)? {
                return Ok(None);
            }
            let mut datagram = Reader::new(&self.buffer);
            while let Some(message) = Message::next(&mut datagram)? {
                self.pending.extend(event(&message)?);
            }
        }
        Ok(self.pending.pop_front())
    }
}

impl<T: AsFd> AsFd for Monitor<T> {
    /// Readable when the kernel has news. [`Monitor::next`] may have events when it is not.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.transport.as_fd()
    }
}

/// What a message says; `None` if it is no message of nf_tables.
pub(crate) fn event(message: &Message<'_>) -> Result<Option<Event>, Error> {
    if message.kind & 0xff00 != msg::NEWTABLE {
        return Ok(None);
    }
    let generic = Generic::read(message)?;
    if message.kind == msg::NEWGEN {
        return generation(message.port, generic.attrs).map(Some);
    }
    let (object, added) = match message.kind {
        msg::NEWTABLE => (Object::Table, true),
        msg::DELTABLE => (Object::Table, false),
        msg::NEWCHAIN => (Object::Chain, true),
        msg::DELCHAIN => (Object::Chain, false),
        msg::NEWRULE => (Object::Rule, true),
        msg::DELRULE => (Object::Rule, false),
        msg::NEWSET => (Object::Set, true),
        msg::DELSET => (Object::Set, false),
        msg::NEWSETELEM => (Object::Elements, true),
        msg::DELSETELEM => (Object::Elements, false),
        _ => (Object::Other, true),
    };
    let name_attr = match object {
        Object::Chain => Some(encode::CHAIN_NAME),
        Object::Rule => Some(encode::RULE_CHAIN),
        Object::Set => Some(encode::SET_NAME),
        Object::Elements => Some(encode::LIST_SET),
        Object::Table | Object::Other => None,
    };
    let mut change = Change {
        object,
        added,
        family: generic.family,
        table: String::new(),
        name: None,
        port: message.port,
    };
    each_attr(generic.attrs, |attr| {
        // Every object has the name of its table first, as a table has its own.
        if attr.kind == encode::TABLE_NAME {
            change.table = attr.str()?.to_owned();
        } else if Some(attr.kind) == name_attr {
            change.name = Some(attr.str()?.to_owned());
        }
        Ok(())
    })?;
    Ok(Some(Event::Change(change)))
}

fn generation(port: u32, attrs: &[u8]) -> Result<Event, Error> {
    let (mut id, mut pid, mut process) = (0, None, None);
    each_attr(attrs, |attr| {
        match attr.kind {
            1 => id = attr.be32()?,
            2 => pid = Some(attr.be32()?),
            3 => process = Some(attr.str()?.to_owned()),
            _ => {}
        }
        Ok(())
    })?;
    Ok(Event::Generation { id, port, pid, process })
}

/// The kernel packs many changes into one datagram, so that this holds what a commit of 100,000 elements announces.
/// What does not fit is an [`Error::Overrun`], which costs a full comparison.
const RECV_BUFFER: usize = 16 * 1024 * 1024;
