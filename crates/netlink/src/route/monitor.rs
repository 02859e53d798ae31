// SPDX-License-Identifier: Apache-2.0

//! Changes of this machine's addresses, as they happen.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use super::{
    Address,
    address::{RTM_DELADDR, RTM_NEWADDR},
};
use crate::{
    codec::{Message, Reader},
    error::Error,
    netns::Netns,
    socket::{Protocol, Socket, Transport},
};

const RTNLGRP_IPV4_IFADDR: u32 = 5;
const RTNLGRP_IPV6_IFADDR: u32 = 9;

/// A change of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressChange {
    /// New, or changed in its flags.
    Set(Address),
    /// Gone.
    Gone(Address),
}

/// Receives notifications of all changes to addresses in one network namespace. Subscribe first, then list: no change
/// falls between.
#[derive(Debug)]
pub struct AddressMonitor<T = Socket> {
    transport: T,
    buffer: Vec<u8>,
    pending: VecDeque<AddressChange>,
}

impl AddressMonitor<Socket> {
    /// Subscribes in the network namespace of this thread.
    pub fn open() -> Result<AddressMonitor<Socket>, Error> {
        let socket = Socket::open(Protocol::Route)?;
        socket.join(RTNLGRP_IPV4_IFADDR)?;
        socket.join(RTNLGRP_IPV6_IFADDR)?;
        Ok(AddressMonitor::over(socket))
    }

    /// Subscribes in another network namespace.
    pub fn open_in(netns: &Netns) -> Result<AddressMonitor<Socket>, Error> {
        netns.run(AddressMonitor::open)?
    }
}

impl<T: Transport> AddressMonitor<T> {
    /// Reads notifications from any transport.
    pub fn over(transport: T) -> AddressMonitor<T> {
        AddressMonitor { transport, buffer: Vec::new(), pending: VecDeque::new() }
    }

    /// The next change; `None` if there was none within `wait`.
    ///
    /// After [`Error::Overrun`] changes are missing, and the monitor can be used on: list the addresses again.
    pub fn next(&mut self, wait: Duration) -> Result<Option<AddressChange>, Error> {
        while self.pending.is_empty() {
            if !self.transport.recv(&mut self.buffer, wait)? {
                return Ok(None);
            }
            let mut datagram = Reader::new(&self.buffer);
            while let Some(message) = Message::next(&mut datagram)? {
                self.pending.extend(change(&message)?);
            }
        }
        Ok(self.pending.pop_front())
    }
}

impl<T: AsFd> AsFd for AddressMonitor<T> {
    /// Readable when the kernel has news. [`AddressMonitor::next`] may have changes when it is not.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.transport.as_fd()
    }
}

/// What a message says; `None` if it is about something else.
pub(crate) fn change(message: &Message<'_>) -> Result<Option<AddressChange>, Error> {
    let Some(address) = Address::read(message)? else { return Ok(None) };
    Ok(match message.kind {
        RTM_NEWADDR => Some(AddressChange::Set(address)),
        RTM_DELADDR => Some(AddressChange::Gone(address)),
        _ => None,
    })
}
