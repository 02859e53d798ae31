// SPDX-License-Identifier: Apache-2.0

//! The link that has the service addresses.

use std::net::IpAddr;

use hashbrown::HashSet;
use netlink::{
    Error,
    route::{LinkKind, Route},
};

use crate::names::userspace::LINK;

/// The link, and who has which address.
#[derive(Debug)]
pub(super) struct Addresses {
    pub(super) link: u32,
    /// On our link.
    pub(super) ours: HashSet<IpAddr>,
    /// On other links: these are the node's anyway.
    pub(super) others: HashSet<IpAddr>,
    /// Added, and perhaps not reachable yet.
    pub(super) fresh: Vec<IpAddr>,
}

impl Addresses {
    /// Makes the link, if it is not there, and looks who has what.
    pub(super) fn read(route: &mut Route) -> Result<Addresses, Error> {
        let link = match route.link_index(LINK) {
            Err(error) if error.is_not_found() => {
                make(route)?;
                route.link_index(LINK)?
            }
            outcome => outcome?,
        };
        let all = route.addresses()?;
        let (ours, others): (Vec<_>, Vec<_>) = all.iter().partition(|entry| entry.link == link);
        let set =
            |entries: Vec<&netlink::route::Address>| entries.iter().map(|entry| entry.address).collect();
        Ok(Addresses { link, ours: set(ours), others: set(others), fresh: Vec::new() })
    }

    /// Gives the link an address. The kernel takes what comes for it from then on, by whatever link.
    pub(super) fn add(&mut self, route: &mut Route, address: IpAddr) -> Result<(), Error> {
        route.add_address(self.link, address, full(address))?;
        self.ours.insert(address);
        if address.is_ipv6() {
            self.fresh.push(address);
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, route: &mut Route, address: IpAddr) -> Result<(), Error> {
        self.ours.remove(&address);
        match route.delete_address(self.link, address, full(address)) {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }
}

/// It is never switched on: its addresses are the node's all the same, and nothing is sent by it. So where a kernel has
/// no dummy links, a bridge without ports does as well.
fn make(route: &mut Route) -> Result<(), Error> {
    route.add_link(LINK, LinkKind::Dummy).or_else(|error| match error.already_exists() {
        true => Ok(()),
        false => route.add_link(LINK, LinkKind::Bridge),
    })
}

/// Deletes the link with its addresses. Returns whether there was one.
pub(crate) fn delete() -> Result<bool, Error> {
    let mut route = Route::open()?;
    match route.link_index(LINK) {
        Ok(index) => route.delete_link(index).map(|()| true),
        Err(error) if error.is_not_found() => Ok(false),
        Err(error) => Err(error),
    }
}

fn full(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}
