// SPDX-License-Identifier: Apache-2.0

//! Addresses of this machine.

use std::net::IpAddr;

use super::{Route, again, family_of, write_address};
use crate::{
    Family,
    attr::{NLM_F_CREATE, NLM_F_DUMP, NLM_F_REPLACE, Writer},
    codec::{Message, Reader, each_attr},
    error::Error,
    socket::Transport,
};

pub(super) const RTM_NEWADDR: u16 = 20;
pub(super) const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;

const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_FLAGS: u16 = 8;

/// No check whether another machine has it.
const IFA_F_NODAD: u32 = 0x02;
const IFA_F_DADFAILED: u32 = 0x08;
const IFA_F_TENTATIVE: u32 = 0x40;

/// An address of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// The index of its link.
    pub link: u32,
    /// The address.
    pub address: IpAddr,
    /// How many bits of it name its network.
    pub prefix_len: u8,
    /// How far it is valid: 0 everywhere, 253 on its link, 254 in this machine.
    pub scope: u8,
    /// What the kernel says of it, bit by bit.
    pub flags: u32,
}

impl Address {
    /// Whether it may be used: no other machine has it, as far as is known.
    pub fn is_usable(&self) -> bool {
        self.flags & (IFA_F_TENTATIVE | IFA_F_DADFAILED) == 0
    }

    /// `None` if the message is about something else.
    pub(crate) fn read(message: &Message<'_>) -> Result<Option<Address>, Error> {
        if message.kind != RTM_NEWADDR && message.kind != RTM_DELADDR {
            return Ok(None);
        }
        let mut body = Reader::new(message.body);
        let [family, prefix_len, flags, scope] = body.array()?;
        let link = u32::from_ne_bytes(body.array()?);
        if Family::from_number(family).is_none() {
            return Ok(None);
        }
        let mut flags = u32::from(flags);
        let (mut address, mut local) = (None, None);
        each_attr(body.rest(), |attr| {
            match attr.kind {
                IFA_ADDRESS => address = Some(attr.address()?),
                IFA_LOCAL => local = Some(attr.address()?),
                IFA_FLAGS => flags = attr.ne32()?,
                _ => {}
            }
            Ok(())
        })?;
        // On a link with two ends, the first of the two is the other end.
        let address = local.or(address).ok_or(Error::Malformed("an address message without address"))?;
        Ok(Some(Address { link, address, prefix_len, scope, flags }))
    }
}

impl<T: Transport> Route<T> {
    /// All addresses, IPv4 and IPv6.
    pub fn addresses(&mut self) -> Result<Vec<Address>, Error> {
        again(|| self.list_addresses())
    }

    fn list_addresses(&mut self) -> Result<Vec<Address>, Error> {
        let mut found = Vec::new();
        let any = |w: &mut Writer| w.raw(&[0; 8]);
        self.channel.exchange("list addresses", (RTM_GETADDR, NLM_F_DUMP), any, |message| {
            found.extend(Address::read(message)?);
            Ok(())
        })?;
        Ok(found)
    }

    /// Adds an address to a link, without asking whether another machine has it.
    ///
    /// An IPv4 address can be used at once. The kernel makes an IPv6 address reachable in the background, within
    /// milliseconds.
    pub fn add_address(&mut self, link: u32, address: IpAddr, prefix_len: u8) -> Result<(), Error> {
        self.change("add an address", RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE, |w| {
            write_message(w, link, address, prefix_len);
            w.ne32(IFA_FLAGS, IFA_F_NODAD);
        })
    }

    /// Takes an address from a link.
    pub fn delete_address(&mut self, link: u32, address: IpAddr, prefix_len: u8) -> Result<(), Error> {
        self.change("delete an address", RTM_DELADDR, 0, |w| write_message(w, link, address, prefix_len))
    }
}

fn write_message(w: &mut Writer, link: u32, address: IpAddr, prefix_len: u8) {
    w.raw(&[family_of(address).number(), prefix_len, 0, 0]);
    w.raw(&link.to_ne_bytes());
    write_address(w, IFA_LOCAL, address);
    write_address(w, IFA_ADDRESS, address);
}
