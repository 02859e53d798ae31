// SPDX-License-Identifier: Apache-2.0

//! Where to listen. Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use model::{Address, Decision, Family, Frontend, NodePortScope, Plan, Protocol};
use relay::Transport;

use crate::userspace::book::forwards;

/// A place to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Spot {
    pub(crate) transport: Transport,
    pub(crate) address: SocketAddr,
}

/// Where to listen for a frontend. Nowhere if nobody gets an endpoint: the kernel then refuses by itself.
pub(super) fn of_frontend(plan: &Plan, frontend: &Frontend, decision: &Decision) -> Vec<Spot> {
    let transport = match frontend.protocol {
        Protocol::Tcp => Transport::Tcp,
        Protocol::Udp => Transport::Udp,
        Protocol::Sctp => return Vec::new(),
    };
    if forwards(decision).iter().all(Option::is_none) {
        return Vec::new();
    }
    let at = |ip: IpAddr| Spot { transport, address: SocketAddr::new(ip, frontend.port) };
    match frontend.address {
        Address::Ip(ip) => vec![at(ip)],
        Address::NodePort(family) => match plan.node_ports(family) {
            NodePortScope::Only(addresses) => {
                addresses.iter().filter(|ip| Family::of(**ip) == family).map(|ip| at(*ip)).collect()
            }
            NodePortScope::All => vec![at(match family {
                Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
                Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
            })],
        },
    }
}

/// The address that our link must have for a frontend.
pub(super) fn address(frontend: &Frontend) -> Option<IpAddr> {
    match frontend.address {
        Address::Ip(ip) if frontend.protocol != Protocol::Sctp => Some(ip),
        _ => None,
    }
}
