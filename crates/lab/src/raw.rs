// SPDX-License-Identifier: Apache-2.0

//! Raw sockets that carry SCTP.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, ipproto, socket_with};

/// A raw SCTP socket of the calling thread's namespace that receives only what is sent to `at`.
pub(crate) fn raw_sctp(at: IpAddr) -> io::Result<OwnedFd> {
    let socket = socket_with(family(at), SocketType::RAW, SocketFlags::CLOEXEC, Some(ipproto::SCTP))?;
    bind(&socket, &SocketAddr::new(at, 0))?;
    Ok(socket)
}

pub(crate) fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    }
}

/// What a raw socket received, without the IP header; only IPv4 hands it out.
pub(crate) fn payload(from: IpAddr, packet: &[u8]) -> Option<&[u8]> {
    match from {
        IpAddr::V4(_) => packet.get(usize::from(packet.first()? & 0xf) * 4..),
        IpAddr::V6(_) => Some(packet),
    }
}
