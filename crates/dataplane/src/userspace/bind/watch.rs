// SPDX-License-Identifier: Apache-2.0

//! Tells when somebody takes a service address away.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use netlink::route::{AddressChange, AddressMonitor};

use crate::{Drift, Error, userspace::book::Book};

struct Watch {
    monitor: AddressMonitor,
    book: Arc<Book>,
}

/// A watch in the network namespace of this thread.
pub(super) fn open(book: Arc<Book>) -> Result<Box<dyn crate::Watch>, Error> {
    let monitor = AddressMonitor::open().map_err(|error| Error::kernel("watch", "addresses", error))?;
    Ok(Box::new(Watch { monitor, book }))
}

impl crate::Watch for Watch {
    fn next(&mut self, wait: Duration) -> Result<Option<Drift>, netlink::Error> {
        let drift = |what: String| Some(Drift { what, by: None, suspected: false });
        match self.monitor.next(wait) {
            Ok(Some(AddressChange::Gone(gone))) => {
                // Those that we take away ourselves are no longer among them by then.
                let around = self.book.surroundings.read().unwrap_or_else(PoisonError::into_inner);
                let is_wanted = around.services.contains(&gone.address);
                Ok(is_wanted.then(|| drift(format!("address {} was taken away", gone.address))).flatten())
            }
            Ok(_) => Ok(None),
            Err(netlink::Error::Overrun) => Ok(drift("more addresses than could be followed".to_owned())),
            Err(error) => Err(error),
        }
    }
}
