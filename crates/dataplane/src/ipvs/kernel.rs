// SPDX-License-Identifier: Apache-2.0

//! What the mode asks of the kernel: virtual servers, sets, and a link with addresses. In tests, a kernel in memory.

use std::{net::IpAddr, time::Duration};

use netlink::{
    Error, Family,
    ipset::{Element, Held, Ipset, Spec},
    ipvs::{Change, HeldDest, HeldService, Ipvs, Refusal, ServiceKey, Timeouts},
    route::{Address, AddressChange, AddressMonitor, LinkKind, Route},
};

use crate::names::IPVS_LINK;

/// See the module.
pub trait Machine: Send {
    fn servers(&mut self) -> Result<Vec<HeldService>, Error>;
    fn dests(&mut self, key: ServiceKey) -> Result<Vec<HeldDest>, Error>;
    /// Carries changes out; those that were refused come back.
    fn change(&mut self, changes: &[Change]) -> Result<Vec<Refusal>, Error>;
    fn set_timeouts(&mut self, timeouts: Timeouts) -> Result<(), Error>;

    /// One set with its elements; `None` if there is no such set.
    fn set(&mut self, name: &str) -> Result<Option<Held>, Error>;
    fn create(&mut self, spec: &Spec) -> Result<(), Error>;
    /// A set that is not there is no error.
    fn destroy(&mut self, set: &str) -> Result<(), Error>;
    /// Exchanges two sets of one kind: each has the other's name, for rules too.
    fn swap(&mut self, one: &str, other: &str) -> Result<(), Error>;
    fn add(&mut self, set: &str, family: Family, elements: &[Element]) -> Result<(), Error>;
    fn remove(&mut self, set: &str, family: Family, elements: &[Element]) -> Result<(), Error>;

    /// The index of our link, if there is one.
    fn find_link(&mut self) -> Result<Option<u32>, Error>;
    /// The index of our link, which is made if need be.
    fn link(&mut self) -> Result<u32, Error>;
    fn addresses(&mut self) -> Result<Vec<Address>, Error>;
    fn bind(&mut self, link: u32, address: IpAddr) -> Result<(), Error>;
    /// An address that is not there is no error.
    fn unbind(&mut self, link: u32, address: IpAddr) -> Result<(), Error>;
    /// Whether an address of another link has changed since this was last asked.
    fn has_news(&mut self, link: u32) -> Result<bool, Error>;
}

/// The kernel, in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Kernel {
    ipvs: Ipvs,
    ipset: Ipset,
    route: Route,
    monitor: AddressMonitor,
}

impl Kernel {
    pub(super) fn open() -> Result<Kernel, Error> {
        Ok(Kernel {
            ipvs: Ipvs::open()?,
            ipset: Ipset::open()?,
            route: Route::open()?,
            monitor: AddressMonitor::open()?,
        })
    }
}

fn full(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

impl Machine for Kernel {
    fn servers(&mut self) -> Result<Vec<HeldService>, Error> {
        self.ipvs.services()
    }

    fn dests(&mut self, key: ServiceKey) -> Result<Vec<HeldDest>, Error> {
        self.ipvs.dests(key)
    }

    fn change(&mut self, changes: &[Change]) -> Result<Vec<Refusal>, Error> {
        self.ipvs.apply(changes)
    }

    fn set_timeouts(&mut self, timeouts: Timeouts) -> Result<(), Error> {
        self.ipvs.set_timeouts(timeouts)
    }

    fn set(&mut self, name: &str) -> Result<Option<Held>, Error> {
        self.ipset.read(name)
    }

    fn create(&mut self, spec: &Spec) -> Result<(), Error> {
        self.ipset.create(spec)
    }

    fn destroy(&mut self, set: &str) -> Result<(), Error> {
        self.ipset.destroy(set).map(drop)
    }

    fn swap(&mut self, one: &str, other: &str) -> Result<(), Error> {
        self.ipset.swap(one, other)
    }

    fn add(&mut self, set: &str, family: Family, elements: &[Element]) -> Result<(), Error> {
        self.ipset.add(set, family, elements)
    }

    fn remove(&mut self, set: &str, family: Family, elements: &[Element]) -> Result<(), Error> {
        self.ipset.remove(set, family, elements)
    }

    fn find_link(&mut self) -> Result<Option<u32>, Error> {
        match self.route.link_index(IPVS_LINK) {
            Err(error) if error.is_not_found() => Ok(None),
            outcome => outcome.map(Some),
        }
    }

    fn link(&mut self) -> Result<u32, Error> {
        if let Some(link) = self.find_link()? {
            return Ok(link);
        }
        // Never switched on: its addresses are the node's all the same, and nothing is sent by it.
        self.route.add_link(IPVS_LINK, LinkKind::Dummy)?;
        self.route.link_index(IPVS_LINK)
    }

    fn addresses(&mut self) -> Result<Vec<Address>, Error> {
        self.route.addresses()
    }

    fn bind(&mut self, link: u32, address: IpAddr) -> Result<(), Error> {
        self.route.add_address(link, address, full(address))
    }

    fn unbind(&mut self, link: u32, address: IpAddr) -> Result<(), Error> {
        match self.route.delete_address(link, address, full(address)) {
            Err(error) if error.is_not_found() => Ok(()),
            outcome => outcome,
        }
    }

    fn has_news(&mut self, link: u32) -> Result<bool, Error> {
        let mut has_news = false;
        loop {
            match self.monitor.next(Duration::ZERO) {
                Ok(None) => return Ok(has_news),
                Ok(Some(AddressChange::Set(address) | AddressChange::Gone(address))) => {
                    has_news |= address.link != link;
                }
                Err(Error::Overrun) => has_news = true,
                Err(error) => return Err(error),
            }
        }
    }
}
