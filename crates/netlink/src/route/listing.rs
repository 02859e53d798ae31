// SPDX-License-Identifier: Apache-2.0

//! The routes of a table.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{RTA_DST, RTA_TABLE, RTM_GETROUTE, RTM_NEWROUTE, Route, RouteKind, again, table_in_header};
use crate::{
    Family,
    attr::{NLM_F_DUMP, Writer},
    codec::{Message, Reader, each_attr},
    error::Error,
    socket::Transport,
};

/// A route as the kernel lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedRoute {
    /// Address and prefix length of the destinations.
    pub destination: (IpAddr, u8),
    /// What happens to packets; `None` if it is nothing that [`RouteKind`] has a word for.
    pub kind: Option<RouteKind>,
    /// The table.
    pub table: u32,
    /// Who wrote it, by a number; see [`RouteSpec`](super::RouteSpec).
    pub origin: u8,
}

impl ListedRoute {
    /// `None` if the message is about something else.
    pub(crate) fn read(message: &Message<'_>) -> Result<Option<ListedRoute>, Error> {
        if message.kind != RTM_NEWROUTE {
            return Ok(None);
        }
        let mut body = Reader::new(message.body);
        let [family, prefix_len, _, _, table, origin, _, kind]: [u8; 8] = body.array()?;
        body.take(4)?;
        let (mut address, mut table): (IpAddr, u32) = match Family::from_number(family) {
            Some(Family::V4) => (Ipv4Addr::UNSPECIFIED.into(), table.into()),
            Some(Family::V6) => (Ipv6Addr::UNSPECIFIED.into(), table.into()),
            _ => return Ok(None),
        };
        each_attr(body.rest(), |attr| {
            match attr.kind {
                RTA_DST => address = attr.address()?,
                RTA_TABLE => table = attr.ne32()?,
                _ => {}
            }
            Ok(())
        })?;
        let kind = RouteKind::from_number(kind);
        Ok(Some(ListedRoute { destination: (address, prefix_len), kind, table, origin }))
    }
}

impl<T: Transport> Route<T> {
    /// The routes of a table; none where there is no such table.
    pub fn routes(&mut self, family: Family, table: u32) -> Result<Vec<ListedRoute>, Error> {
        match again(|| self.list_routes(family, table)) {
            Err(error) if error.is_not_found() => Ok(Vec::new()),
            outcome => outcome,
        }
    }

    fn list_routes(&mut self, family: Family, table: u32) -> Result<Vec<ListedRoute>, Error> {
        let mut found = Vec::new();
        let of_table = |w: &mut Writer| {
            w.raw(&[family.number(), 0, 0, 0, table_in_header(table), 0, 0, 0]);
            w.raw(&[0; 4]);
            w.ne32(RTA_TABLE, table);
        };
        self.channel.exchange("list routes", (RTM_GETROUTE, NLM_F_DUMP), of_table, |message| {
            // A kernel that does not know the restriction lists every table.
            found.extend(ListedRoute::read(message)?.filter(|route| route.table == table));
            Ok(())
        })?;
        Ok(found)
    }
}
