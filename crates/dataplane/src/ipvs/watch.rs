// SPDX-License-Identifier: Apache-2.0

//! Tells when somebody changes our chains, or when an address of the node comes or goes: node ports are served on each.
//! Of virtual servers and sets the kernel tells nobody; see `audit`.

use std::time::{Duration, Instant};

use netlink::route::{AddressChange, AddressMonitor, Route};

use crate::{Drift, Error, Watch, names::IPVS_LINK};

/// Neither of the two is kept waiting for longer.
const SLICE: Duration = Duration::from_millis(100);

struct Both {
    tables: Option<Box<dyn Watch>>,
    addresses: AddressMonitor,
    route: Route,
}

/// A watch in the network namespace of this thread.
pub(super) fn open(tables: Option<Box<dyn Watch>>) -> Result<Option<Box<dyn Watch>>, Error> {
    let failed = |error| Error::kernel("watch", "addresses", error);
    let addresses = AddressMonitor::open().map_err(failed)?;
    let route = Route::open().map_err(failed)?;
    Ok(Some(Box::new(Both { tables, addresses, route })))
}

impl Both {
    /// The next change that is not of our own link.
    fn address(&mut self, wait: Duration) -> Result<Option<Drift>, netlink::Error> {
        let drift = |what: String| Some(Drift { what, by: None, suspected: true });
        match self.addresses.next(wait) {
            Ok(None) => Ok(None),
            Ok(Some(AddressChange::Set(address) | AddressChange::Gone(address))) => {
                let ours = self.route.link_index(IPVS_LINK).ok();
                let is_ours = ours == Some(address.link);
                Ok(if is_ours { None } else { drift(format!("address {} of this node", address.address)) })
            }
            Err(netlink::Error::Overrun) => Ok(drift("more addresses than could be followed".to_owned())),
            Err(error) => Err(error),
        }
    }
}

impl Watch for Both {
    fn next(&mut self, wait: Duration) -> Result<Option<Drift>, netlink::Error> {
        let end = Instant::now() + wait;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if let Some(drift) = self.address(left.min(SLICE))? {
                return Ok(Some(drift));
            }
            if let Some(tables) = &mut self.tables
                && let Some(drift) = tables.next(Duration::ZERO)?
            {
                return Ok(Some(drift));
            }
            if left.is_zero() {
                return Ok(None);
            }
        }
    }
}
