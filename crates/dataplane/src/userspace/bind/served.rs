// SPDX-License-Identifier: Apache-2.0

//! What is sent to us, at one moment. Whoever has it holds no lock.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::PoisonError,
};

use hashbrown::HashSet;
use model::Protocol;
use relay::Transport;

use super::Spot;
use crate::userspace::Carrier;

/// Service addresses, and places where we listen.
#[derive(Debug, Default)]
pub(crate) struct Served {
    services: HashSet<IpAddr>,
    spots: HashSet<Spot>,
}

impl Carrier {
    /// As it is now.
    pub(crate) fn served(&self) -> Served {
        let Carrier(inner) = self;
        let around = inner.book.surroundings.read().unwrap_or_else(PoisonError::into_inner);
        let services = around.services.clone();
        drop(around);
        Served { services, spots: inner.listeners().keys().copied().collect() }
    }
}

#[cfg(test)]
impl Carrier {
    /// Has these service addresses, and nobody who listens.
    pub(crate) fn pretend(&self, services: &[IpAddr]) {
        let mut around = self.0.book.surroundings.write().unwrap_or_else(PoisonError::into_inner);
        around.services = services.iter().copied().collect();
    }
}

impl Served {
    /// Whether it is for a service: anything to a service address, whether anybody listens or not, and to a node port.
    pub(crate) fn contains(&self, protocol: u8, to: SocketAddr) -> bool {
        if self.services.contains(&to.ip()) {
            return true;
        }
        let transport = match Protocol::from_number(protocol) {
            Some(Protocol::Tcp) => Transport::Tcp,
            Some(Protocol::Udp) => Transport::Udp,
            _ => return false,
        };
        let anywhere: IpAddr = match to {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let at = |ip| Spot { transport, address: SocketAddr::new(ip, to.port()) };
        self.spots.contains(&at(to.ip())) || self.spots.contains(&at(anywhere))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_ports_are_told_from_what_others_map() {
        let spot =
            |transport, address: &str| Spot { transport, address: address.parse().expect("an address") };
        let served = Served {
            services: ["10.96.0.10".parse().expect("an address")].into(),
            spots: [
                spot(Transport::Tcp, "10.96.0.10:80"),
                spot(Transport::Tcp, "0.0.0.0:30080"),
                spot(Transport::Udp, "[2001:db8::1]:30053"),
            ]
            .into(),
        };
        let contains = |protocol: Protocol, to: &str| {
            served.contains(protocol.number(), to.parse().expect("an address"))
        };
        // A frontend without endpoints has no listener.
        assert!(contains(Protocol::Tcp, "10.96.0.10:80") && contains(Protocol::Sctp, "10.96.0.10:132"));
        assert!(contains(Protocol::Tcp, "192.0.2.1:30080") && contains(Protocol::Udp, "[2001:db8::1]:30053"));
        for (protocol, to) in [
            (Protocol::Tcp, "192.0.2.1:8080"),
            (Protocol::Udp, "192.0.2.1:30080"),
            (Protocol::Tcp, "[2001:db8::1]:30080"),
            (Protocol::Udp, "[2001:db8::2]:30053"),
        ] {
            assert!(!contains(protocol, to), "{protocol:?} {to}");
        }
    }
}
