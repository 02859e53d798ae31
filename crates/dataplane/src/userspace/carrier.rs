// SPDX-License-Identifier: Apache-2.0

//! Starts the relay and its listeners, once.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use model::{Family, Frontend, PerFamily};
use relay::{Listen, Relay, Transport, relay::descriptors};

use super::{
    book::Side,
    options::{Carrier, Options, Ports, Running},
};
use crate::Error;

/// As many descriptors as we ask for. The kernel's own bound for one process is this by default.
const DESCRIPTORS: u64 = 1 << 20;

impl Options {
    /// Where the listeners are. Starts them in the network namespace of this thread, if they are not there yet.
    pub(super) fn start(&self, families: PerFamily<bool>) -> Result<PerFamily<Ports>, Error> {
        let Carrier(inner) = &self.carrier;
        if let Some(running) = inner.running.get() {
            return Ok(running.ports);
        }
        let relay = self.relay(0)?;
        let failed = |source| Error::Relay { act: "start", source };
        let mut ports = PerFamily::<Ports>::default();
        for family in Family::BOTH.into_iter().filter(|family| families[*family]) {
            for side in Side::BOTH {
                for transport in [Transport::Tcp, Transport::Udp] {
                    let bound = relay.listen(self.listen(family, side, transport)).map_err(failed)?;
                    let ports = &mut ports[family];
                    let place = match transport {
                        Transport::Tcp => &mut ports.tcp,
                        Transport::Udp => &mut ports.udp,
                    };
                    place[side as usize] = bound.address.port();
                }
            }
        }
        Ok(inner.running.get_or_init(|| Running { relay, ports, spots: 0 }).ports)
    }

    /// The same without listeners: they come with the services. A quarter of all descriptors is for them.
    pub(super) fn start_bound(&self) -> Result<(), Error> {
        let Carrier(inner) = &self.carrier;
        if inner.running.get().is_none() {
            let spots = limit() / 4;
            let relay = self.relay(spots)?;
            inner.running.get_or_init(|| Running { relay, ports: PerFamily::default(), spots });
        }
        Ok(())
    }

    /// The workers. So many descriptors are for others.
    fn relay(&self, others: usize) -> Result<Relay, Error> {
        let settings = self.relay.clone().within(limit() - others);
        let book = Arc::clone(&self.carrier.0.book);
        Relay::start(settings, book).map_err(|source| Error::Relay { act: "start", source })
    }

    fn listen(&self, family: Family, side: Side, transport: Transport) -> Listen {
        let loopback: IpAddr = match family {
            Family::V4 => Ipv4Addr::LOCALHOST.into(),
            Family::V6 => Ipv6Addr::LOCALHOST.into(),
        };
        Listen {
            transparent: true,
            ports: self.ports.clone(),
            tag: side as u32,
            ..Listen::at(transport, SocketAddr::new(loopback, 0))
        }
    }
}

/// Descriptors that we use at most, of those we may have.
fn limit() -> usize {
    descriptors(DESCRIPTORS).min(1 << 17)
}

impl Carrier {
    /// All UDP flows end now.
    pub(super) fn end_flows(&self) {
        if let Some(running) = self.0.running.get() {
            running.relay.end_flows();
        }
    }

    /// UDP flows to endpoints that are no more end now.
    pub(super) fn prune(&self) {
        if let Some(running) = self.0.running.get() {
            running.relay.prune();
        }
    }

    /// The services of a frontend are checked actively, where their settings say so.
    pub(super) fn check(&self, frontend: &Frontend) {
        let Some(running) = self.0.running.get() else { return };
        for service in self.0.book.of(frontend) {
            if service.roster().settings.check.is_some() {
                running.relay.check(&service);
            }
        }
    }
}
