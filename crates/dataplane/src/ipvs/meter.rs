// SPDX-License-Identifier: Apache-2.0

//! What the kernel has counted for each real server.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use hashbrown::HashMap;
use model::Frontend;
use netlink::ipvs::{HeldDest, Ipvs, ServiceKey};

use crate::{Error, Reading, Traffic};

/// Whose virtual servers are; several may be of one frontend. Empty where counting would cost too much.
pub(super) type Owners = Arc<Mutex<HashMap<ServiceKey, Frontend>>>;

/// See [`crate::Meter`]. Reads by a connection of its own, so that it never delays a write.
#[derive(Debug)]
pub(super) struct Meter {
    ipvs: Ipvs,
    owners: Owners,
    traffic: Vec<Traffic>,
}

impl Meter {
    pub(super) fn open(owners: &Owners) -> Result<Meter, Error> {
        let ipvs = Ipvs::open().map_err(|error| Error::kernel("read", "what was counted", error))?;
        Ok(Meter { ipvs, owners: Arc::clone(owners), traffic: Vec::new() })
    }
}

impl crate::Meter for Meter {
    fn read(&mut self) -> Result<Vec<Reading>, Error> {
        let owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut sums: HashMap<(Frontend, SocketAddr), (u64, Traffic)> = HashMap::new();
        for (key, frontend) in owners {
            let found = self.ipvs.dests(key);
            let found = found.map_err(|error| Error::kernel("read", "what was counted", error))?;
            for held in found {
                let endpoint = place(&held);
                let empty = || (0, Traffic::none(frontend, endpoint));
                let (connections, traffic) = sums.entry((frontend, endpoint)).or_insert_with(empty);
                *connections += held.counters.connections;
                traffic.packets_in += held.counters.packets_in;
                traffic.packets_out += held.counters.packets_out;
                traffic.bytes_in += held.counters.bytes_in;
                traffic.bytes_out += held.counters.bytes_out;
                traffic.active += u64::from(held.active);
                traffic.inactive += u64::from(held.inactive);
            }
        }
        self.traffic = sums.values().map(|(_, traffic)| *traffic).collect();
        let reading = |((frontend, endpoint), (connections, _))| Reading { frontend, endpoint, connections };
        Ok(sums.into_iter().map(reading).collect())
    }

    fn traffic(&mut self) -> Vec<Traffic> {
        std::mem::take(&mut self.traffic)
    }
}

pub(super) fn place(held: &HeldDest) -> SocketAddr {
    SocketAddr::new(held.dest.key.address, held.dest.key.port)
}
