// SPDX-License-Identifier: Apache-2.0

//! Sockets, with all that they need.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use nix::{
    libc, setsockopt_impl, sockopt_impl,
    sys::socket::{setsockopt, sockopt},
};
use rustix::net as rnet;
use socket2::{Domain, Protocol, SockAddr, Socket, TcpKeepalive, Type};

use crate::relay::{Listen, Transport};

/// Connections that wait to be accepted. The kernel takes less where `net.core.somaxconn` says so.
const BACKLOG: i32 = 65_535;
/// For each UDP listener: datagrams of all clients that are not known yet.
const LISTENER_BUFFER: usize = 4 << 20;

/// A listener, bound and listening.
pub(crate) fn listener(listen: &Listen, address: SocketAddr) -> io::Result<OwnedFd> {
    let socket = open(address, listen.transport)?;
    if listen.transport == Transport::Tcp || listen.transparent {
        socket.set_reuse_port(true)?;
    } else {
        socket.set_reuse_address(true)?;
    }
    if listen.transport == Transport::Tcp {
        socket.set_reuse_address(true)?;
    }
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    if listen.transparent {
        transparent(&socket, address)?;
    }
    if listen.freebind {
        match address {
            SocketAddr::V4(_) => socket.set_freebind_v4(true)?,
            SocketAddr::V6(_) => socket.set_freebind_v6(true)?,
        }
    }
    match listen.transport {
        Transport::Tcp => {
            // Accepted sockets inherit these.
            socket.set_tcp_nodelay(true)?;
            keep_alive(&socket)?;
            socket.bind(&SockAddr::from(address))?;
            socket.listen(BACKLOG)?;
            // And this one, but only once it listens.
            put_acknowledgements_off(&socket);
            bound_unsent(&socket);
        }
        Transport::Udp => {
            // More than the limit needs a privilege; what can be had is enough.
            let _ = socket.set_recv_buffer_size(LISTENER_BUFFER);
            if listen.is_for_many() {
                destinations(&socket, address)?;
            }
            socket.bind(&SockAddr::from(address))?;
        }
    }
    Ok(socket.into())
}

/// Whether nobody has this address yet, not even somebody who would share it.
pub(crate) fn is_free(transport: Transport, address: SocketAddr) -> bool {
    open(address, transport).is_ok_and(|socket| socket.bind(&SockAddr::from(address)).is_ok())
}

/// Asks for the address each datagram was sent to.
fn destinations(socket: &Socket, address: SocketAddr) -> io::Result<()> {
    match address {
        SocketAddr::V4(_) => setsockopt(socket, sockopt::Ipv4OrigDstAddr, &true)?,
        SocketAddr::V6(_) => setsockopt(socket, sockopt::Ipv6OrigDstAddr, &true)?,
    }
    Ok(())
}

fn transparent(socket: &Socket, address: SocketAddr) -> io::Result<()> {
    match address {
        SocketAddr::V4(_) => socket.set_ip_transparent_v4(true),
        SocketAddr::V6(_) => socket.set_ip_transparent_v6(true),
    }
}

fn open(address: SocketAddr, transport: Transport) -> io::Result<Socket> {
    let (kind, protocol) = match transport {
        Transport::Tcp => (Type::STREAM, Protocol::TCP),
        Transport::Udp => (Type::DGRAM, Protocol::UDP),
    };
    Socket::new(Domain::for_address(address), kind.nonblocking().cloexec(), Some(protocol))
}

/// From which of its ports this node dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ports {
    /// As the kernel does it: first one half of them, and only then the other.
    ByHalves,
    /// The next that is free. Where the first half is in use, the kernel would look at all of it before each connection to the
    /// same endpoint, which costs several times the connection (bench/README.md).
    InTurn,
}

// The kernel's `IP_LOCAL_PORT_RANGE`, since Linux 6.3: the highest port in the upper half of the number, the lowest in the lower.
sockopt_impl!(PortRange, SetOnly, libc::IPPROTO_IP, PORT_RANGE, u32);
const PORT_RANGE: i32 = 51;

/// A socket on its way to an endpoint. Errors come later, when it is writable.
pub(crate) fn dial(endpoint: SocketAddr, ports: Ports) -> io::Result<OwnedFd> {
    let socket: OwnedFd = open(endpoint, Transport::Tcp)?.into();
    if ports == Ports::InTurn {
        // With a range of its own a socket gets no halves (since 6.8). Beyond that of the node no range goes; an older kernel
        // does as it always did.
        let _ = setsockopt(&socket, PortRange, &(u32::from(u16::MAX) << 16 | 1));
    }
    rnet::sockopt::set_tcp_nodelay(&socket, true)?;
    put_acknowledgements_off(&socket);
    match rnet::connect(&socket, &endpoint) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error.into()),
    }
}

/// A UDP socket to an endpoint.
pub(crate) fn toward(endpoint: SocketAddr) -> io::Result<OwnedFd> {
    let socket: OwnedFd = open(endpoint, Transport::Udp)?.into();
    rnet::connect(&socket, &endpoint)?;
    Ok(socket)
}

/// A UDP socket that speaks to a client as the address the client has sent to. `is_foreign`: it may be no address of
/// this node.
pub(crate) fn in_the_name_of(
    destination: SocketAddr,
    client: SocketAddr,
    is_foreign: bool,
) -> io::Result<OwnedFd> {
    let socket = open(destination, Transport::Udp)?;
    socket.set_reuse_address(true)?;
    if is_foreign {
        transparent(&socket, destination)?;
    }
    socket.bind(&SockAddr::from(destination))?;
    socket.connect(&SockAddr::from(client))?;
    Ok(socket.into())
}

/// Finds out about a peer that is gone without a word, before most middleboxes forget an idle connection.
fn keep_alive(socket: &Socket) -> io::Result<()> {
    let often =
        TcpKeepalive::new().with_time(KEEP_ALIVE).with_interval(Duration::from_secs(15)).with_retries(6);
    socket.set_tcp_keepalive(&often)
}

const KEEP_ALIVE: Duration = Duration::from_secs(60);

/// The same for a connection that lives long enough to be worth it.
pub(crate) fn keep_alive_on(socket: impl AsFd) {
    // An old kernel's defaults will do too.
    let _ = rnet::sockopt::set_socket_keepalive(&socket, true);
    let _ = rnet::sockopt::set_tcp_keepidle(&socket, KEEP_ALIVE);
    let _ = rnet::sockopt::set_tcp_keepintvl(&socket, Duration::from_secs(15));
    let _ = rnet::sockopt::set_tcp_keepcnt(&socket, 6);
}

/// The kernel acknowledges by a packet of its own only what waits for long; until then it goes with what is sent next.
fn put_acknowledgements_off(socket: impl AsFd) {
    // Otherwise there is a packet more, that is all.
    let _ = rnet::sockopt::set_tcp_quickack(socket, false);
}

/// Acknowledges what has come, now.
pub(crate) fn acknowledge(socket: impl AsFd) {
    let _ = rnet::sockopt::set_tcp_quickack(socket, true);
}

/// Megabytes that wait in buffers have left the processor's cache by the time somebody copies them (bench/README.md has
/// what it costs), so no more than this waits to be sent. What is under way does not count: a distant client gets as much
/// as ever.
fn bound_unsent(socket: &Socket) {
    const WAITING: u32 = 1 << 20;
    let _ = socket.set_tcp_notsent_lowat(WAITING);
}

/// Closes with a reset: the peer learns that this was no orderly end.
pub(crate) fn reset(socket: OwnedFd) {
    let _ = rnet::sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
    drop(socket);
}

/// The address a socket is bound to: of an accepted one, what the client wanted to reach.
pub(crate) fn local_address(socket: impl AsFd) -> Option<SocketAddr> {
    plain(rnet::getsockname(socket).ok()?)
}

pub(crate) fn plain(address: rnet::SocketAddrAny) -> Option<SocketAddr> {
    SocketAddr::try_from(address).ok().map(canonical)
}

fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V6(ip) => match ip.to_ipv4_mapped() {
            Some(four) => SocketAddr::new(four.into(), address.port()),
            None => address,
        },
        IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};

    use super::*;

    /// The kernel's halves are the even ports and the odd ones.
    #[test]
    fn ports_are_taken_in_turn() {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("a version");
        let numbers: Vec<u32> =
            release.split(['.', '-']).map_while(|part| part.parse().ok()).take(2).collect();
        if numbers < vec![6, 8] {
            println!("skipped: Linux {release} always goes by halves");
            return;
        }
        for ip in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
            let Ok(listener) = TcpListener::bind((ip, 0)) else {
                println!("skipped: there is no {ip}");
                continue;
            };
            let endpoint = listener.local_addr().expect("an address");
            let dial = |_| dial(endpoint, Ports::InTurn).expect("a socket");
            let sockets: Vec<OwnedFd> = (0..32).map(dial).collect();
            let ports = sockets.iter().filter_map(local_address).map(|address| address.port());
            let (odd, even): (Vec<u16>, Vec<u16>) = ports.partition(|port| port % 2 == 1);
            assert!(!odd.is_empty() && !even.is_empty(), "{ip}: {odd:?} {even:?}");
        }
    }
}
