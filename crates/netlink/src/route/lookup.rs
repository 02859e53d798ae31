// SPDX-License-Identifier: Apache-2.0

//! Where the kernel would send a packet.

use std::net::IpAddr;

use super::{RTA_DST, RTA_OIF, RTM_GETROUTE, RTM_NEWROUTE, Route, RouteKind, family_of, write_address};
use crate::{
    attr::{NLM_F_ACK, Writer},
    codec::{Message, Reader, each_attr},
    error::Error,
    socket::Transport,
};

/// Where a packet would go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Nowhere: the address is this machine's own.
    Here,
    /// By the link with this index.
    Link(u32),
}

impl<T: Transport> Route<T> {
    /// Where a packet of this machine to an address would go.
    pub fn way_to(&mut self, address: IpAddr) -> Result<Way, Error> {
        let mut found = None;
        let ask = |w: &mut Writer| {
            let bits = if address.is_ipv4() { 32 } else { 128 };
            w.raw(&[family_of(address).number(), bits, 0, 0, 0, 0, 0, 0]);
            w.raw(&[0; 4]);
            write_address(w, RTA_DST, address);
        };
        self.channel.exchange("find a route", (RTM_GETROUTE, NLM_F_ACK), ask, |message| {
            found = read(message)?.or(found);
            Ok(())
        })?;
        found.ok_or(Error::Malformed("an answer without a route"))
    }
}

fn read(message: &Message<'_>) -> Result<Option<Way>, Error> {
    if message.kind != RTM_NEWROUTE {
        return Ok(None);
    }
    let mut body = Reader::new(message.body);
    let header: [u8; 8] = body.array()?;
    body.take(4)?;
    let mut link = None;
    each_attr(body.rest(), |attr| {
        if attr.kind == RTA_OIF {
            link = Some(attr.ne32()?);
        }
        Ok(())
    })?;
    Ok(if header[7] == RouteKind::Local as u8 { Some(Way::Here) } else { link.map(Way::Link) })
}
