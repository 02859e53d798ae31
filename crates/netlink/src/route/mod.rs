// SPDX-License-Identifier: Apache-2.0

//! Links, addresses and routes: what a proxy watches, and what a test network is built of.

mod address;
mod link;
mod listing;
mod lookup;
mod monitor;
mod rule;

pub use address::Address;
pub use link::{Link, LinkKind};
pub use listing::ListedRoute;
pub use lookup::Way;
pub use monitor::{AddressChange, AddressMonitor};
pub use rule::MarkRule;

pub(crate) use monitor::change as read_address_change;

use std::net::IpAddr;

use crate::{
    Family,
    attr::{NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, Writer},
    channel::Channel,
    error::Error,
    netns::Netns,
    socket::{Protocol, Socket, Transport},
};

const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_GETROUTE: u16 = 26;

const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PREFSRC: u16 = 7;
const RTA_TABLE: u16 = 15;

const RT_TABLE_UNSPEC: u8 = 0;
const RT_TABLE_MAIN: u8 = 254;
const RT_TABLE_LOCAL: u8 = 255;
/// Written by an administrator, or by a program that does not say which.
const RTPROT_BOOT: u8 = 3;
const RT_SCOPE_UNIVERSE: u8 = 0;
const RT_SCOPE_LINK: u8 = 253;
const RT_SCOPE_HOST: u8 = 254;
const RTNH_F_ONLINK: u32 = 4;

/// A connection to the part of the kernel that keeps links, addresses and routes.
#[derive(Debug)]
pub struct Route<T = Socket> {
    channel: Channel<T>,
}

impl Route<Socket> {
    /// Connects in the network namespace of this thread.
    pub fn open() -> Result<Route<Socket>, Error> {
        Ok(Route::over(Socket::open(Protocol::Route)?))
    }

    /// Connects in another network namespace.
    pub fn open_in(netns: &Netns) -> Result<Route<Socket>, Error> {
        Ok(Route::over(Socket::open_in(netns, Protocol::Route)?))
    }
}

/// A route in the main table (or, if it is local, in the local one), unless it names another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteSpec {
    /// Address and prefix length of the destinations.
    pub destination: (IpAddr, u8),
    /// What happens to packets.
    pub kind: RouteKind,
    /// The next router.
    pub gateway: Option<IpAddr>,
    /// The index of the link they leave by.
    pub link: Option<u32>,
    /// The gateway is on the link, even if no address there says so.
    pub onlink: bool,
    /// The source address that this machine's own packets get.
    pub source: Option<IpAddr>,
    /// Another table than usual.
    pub table: Option<u32>,
    /// Who wrote it, by a number that every program chooses for itself. Only a route with the same one is deleted.
    pub origin: u8,
}

/// What happens to packets on a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteKind {
    /// They are sent on.
    Unicast = 1,
    /// They are for this machine.
    Local = 2,
    /// They are dropped without a word.
    Blackhole = 6,
    /// They are dropped, and the sender is told.
    Unreachable = 7,
}

impl RouteKind {
    fn from_number(number: u8) -> Option<RouteKind> {
        [RouteKind::Unicast, RouteKind::Local, RouteKind::Blackhole, RouteKind::Unreachable]
            .into_iter()
            .find(|kind| *kind as u8 == number)
    }
}

/// The table of the addresses of this machine.
pub const LOCAL_TABLE: u32 = RT_TABLE_LOCAL as u32;
/// The table of routes that name no other.
pub const MAIN_TABLE: u32 = RT_TABLE_MAIN as u32;

impl RouteSpec {
    /// A route to these destinations, still without gateway and link.
    pub fn to(address: IpAddr, prefix_len: u8) -> RouteSpec {
        RouteSpec {
            destination: (address, prefix_len),
            kind: RouteKind::Unicast,
            gateway: None,
            link: None,
            onlink: false,
            source: None,
            table: None,
            origin: RTPROT_BOOT,
        }
    }

    /// The same by a gateway.
    pub fn via(self, gateway: IpAddr) -> RouteSpec {
        RouteSpec { gateway: Some(gateway), ..self }
    }

    /// The same by a link.
    pub fn dev(self, index: u32) -> RouteSpec {
        RouteSpec { link: Some(index), ..self }
    }

    fn write(&self, w: &mut Writer) {
        let (address, prefix_len) = self.destination;
        let usual = if self.kind == RouteKind::Local { RT_TABLE_LOCAL } else { RT_TABLE_MAIN };
        let scope = match (self.kind, self.gateway) {
            (RouteKind::Local, _) => RT_SCOPE_HOST,
            (RouteKind::Unicast, None) => RT_SCOPE_LINK,
            _ => RT_SCOPE_UNIVERSE,
        };
        let table = self.table.map_or(usual, table_in_header);
        let flags = if self.onlink { RTNH_F_ONLINK } else { 0 };
        w.raw(&[family_of(address).number(), prefix_len, 0, 0, table, self.origin, scope, self.kind as u8]);
        w.raw(&flags.to_ne_bytes());
        if prefix_len > 0 {
            write_address(w, RTA_DST, address);
        }
        if let Some(gateway) = self.gateway {
            write_address(w, RTA_GATEWAY, gateway);
        }
        if let Some(link) = self.link {
            w.ne32(RTA_OIF, link);
        }
        if let Some(table) = self.table {
            w.ne32(RTA_TABLE, table);
        }
        if let Some(source) = self.source {
            write_address(w, RTA_PREFSRC, source);
        }
    }
}

impl<T: Transport> Route<T> {
    /// A connection over any transport.
    pub fn over(transport: T) -> Route<T> {
        Route { channel: Channel::new(transport) }
    }

    /// Adds a route.
    pub fn add_route(&mut self, route: &RouteSpec) -> Result<(), Error> {
        self.change("add a route", RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, |w| route.write(w))
    }

    /// Deletes a route.
    pub fn delete_route(&mut self, route: &RouteSpec) -> Result<(), Error> {
        self.change("delete a route", RTM_DELROUTE, 0, |w| route.write(w))
    }

    fn change(
        &mut self,
        what: &'static str,
        kind: u16,
        flags: u16,
        fill: impl FnOnce(&mut Writer),
    ) -> Result<(), Error> {
        self.channel.exchange(what, (kind, flags | NLM_F_ACK), fill, |_| Ok(()))
    }
}

/// Lists again what changed while it was listed; [`Error::Interrupted`] if that goes on.
fn again<R>(mut list: impl FnMut() -> Result<R, Error>) -> Result<R, Error> {
    const ATTEMPTS: usize = 10;
    for _ in 1..ATTEMPTS {
        match list() {
            Err(Error::Interrupted) => {}
            outcome => return outcome,
        }
    }
    list()
}

/// What the header has place for; the rest is told by an attribute.
fn table_in_header(table: u32) -> u8 {
    u8::try_from(table).unwrap_or(RT_TABLE_UNSPEC)
}

fn write_address(w: &mut Writer, kind: u16, address: IpAddr) {
    match address {
        IpAddr::V4(address) => w.attr(kind, &address.octets()),
        IpAddr::V6(address) => w.attr(kind, &address.octets()),
    }
}

fn family_of(address: IpAddr) -> Family {
    match address {
        IpAddr::V4(_) => Family::V4,
        IpAddr::V6(_) => Family::V6,
    }
}

#[cfg(test)]
mod tests;
