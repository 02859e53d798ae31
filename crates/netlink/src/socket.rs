// SPDX-License-Identifier: Apache-2.0

//! Sending and receiving datagrams: the seam at which tests put something else in the kernel's place.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    buffer::spare_capacity,
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType,
        netlink::{self, SocketAddrNetlink},
        sockopt,
    },
};

use crate::{error::Error, netns::Netns};

/// Sends and receives whole datagrams.
///
/// The real one is [`Socket`]; [`fake`](crate::fake) has others. An answer belongs to the request before it: the
/// kernel works on a request within `send`, so that what it says is ready when `send` returns.
pub trait Transport: Send {
    /// Sends one datagram, all of it or nothing.
    fn send(&mut self, datagram: &[u8]) -> Result<(), Error>;

    /// Replaces `buffer` by the next datagram. Waits no longer than `wait`; `false` if there was none.
    fn recv(&mut self, buffer: &mut Vec<u8>, wait: Duration) -> Result<bool, Error>;

    /// The kernel's number for this end. Notifications carry the number of who caused them.
    fn port(&self) -> u32;

    /// Another socket of the same kind in the same network namespace. `None` if this thread is in another one, and for
    /// what is no socket.
    fn sibling(&self) -> Result<Option<Socket>, Error> {
        Ok(None)
    }
}

impl<T: Transport + ?Sized> Transport for Box<T> {
    fn send(&mut self, datagram: &[u8]) -> Result<(), Error> {
        (**self).send(datagram)
    }

    fn recv(&mut self, buffer: &mut Vec<u8>, wait: Duration) -> Result<bool, Error> {
        (**self).recv(buffer, wait)
    }

    fn port(&self) -> u32 {
        (**self).port()
    }

    fn sibling(&self) -> Result<Option<Socket>, Error> {
        (**self).sibling()
    }
}

/// Which part of the kernel is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Links, addresses, routes.
    Route,
    /// nf_tables, connection tracking, IP sets.
    Netfilter,
    /// Protocols that have a name instead of a number, IPVS among them.
    Generic,
}

/// A netlink socket. It stays in the network namespace in which it was opened, whatever thread uses it.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    protocol: Protocol,
    port: u32,
    send_limit: usize,
}

impl Socket {
    /// Opens a socket in the network namespace of this thread.
    pub fn open(protocol: Protocol) -> Result<Socket, Error> {
        let number = match protocol {
            Protocol::Route => None,
            Protocol::Netfilter => Some(netlink::NETFILTER),
            Protocol::Generic => Some(netlink::GENERIC),
        };
        let flags = SocketFlags::CLOEXEC;
        let fd = net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, number)
            .map_err(|errno| Error::io("socket", errno))?;
        // Bound at once: before it is bound, a socket gets no notifications, whatever it subscribes to.
        net::bind(&fd, &SocketAddrNetlink::new(0, 0)).map_err(|errno| Error::io("bind", errno))?;
        let address = net::getsockname(&fd).map_err(|errno| Error::io("getsockname", errno))?;
        let address =
            SocketAddrNetlink::try_from(address).map_err(|errno| Error::io("getsockname", errno))?;
        let socket = Socket { send_limit: DEFAULT_SEND_LIMIT, port: address.pid(), protocol, fd };
        // Without these the kernel still answers, only with less to say (and, for strict checking, it ignores what it
        // does not know in a filter, which user space then checks). Kernels before 4.20 lack the last one.
        socket.option(libc::NETLINK_EXT_ACK, 1).ok();
        socket.option(libc::NETLINK_CAP_ACK, 1).ok();
        socket.option(libc::NETLINK_GET_STRICT_CHK, 1).ok();
        socket.grow_recv_buffer(RECV_BUFFER);
        Ok(socket)
    }

    /// Opens a socket in another network namespace.
    pub fn open_in(netns: &Netns, protocol: Protocol) -> Result<Socket, Error> {
        netns.run(|| Socket::open(protocol))?
    }

    /// Subscribes to the notifications of a group.
    pub(crate) fn join(&self, group: u32) -> Result<(), Error> {
        let group = libc::c_int::try_from(group).map_err(|_| Error::io("setsockopt", Errno::INVAL))?;
        self.option(libc::NETLINK_ADD_MEMBERSHIP, group)
    }

    /// Has the kernel keep back the notifications of what one socket did: nobody is woken for them, and they take no
    /// room. A datagram is judged by its first message; the notifications of one commit all carry the same port.
    pub(crate) fn pass_over(&self, port: u32) -> Result<(), Error> {
        const PORT_OFFSET: u32 = 12;
        let statement = |code: u32, jump_if_not: u8, k: u32| libc::sock_filter {
            code: code as u16,
            jt: 0,
            jf: jump_if_not,
            k,
        };
        // A filter reads words in network order, the header is in the machine's.
        let mut program = [
            statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, PORT_OFFSET),
            statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, port.to_be()),
            statement(libc::BPF_RET | libc::BPF_K, 0, 0),
            statement(libc::BPF_RET | libc::BPF_K, 0, u32::MAX),
        ];
        let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        // SAFETY: the descriptor is open as long as `self.fd` lives; pointer and length describe `filter`, which
        // describes `program`. Both outlive the call, and the kernel copies them.
        let result = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER,
                (&raw const filter).cast(),
                size_of_val(&filter) as libc::socklen_t,
            )
        };
        match result {
            0 => Ok(()),
            _ => Err(Error::io("setsockopt", last_errno())),
        }
    }

    /// Holds this many bytes of messages not received yet, or what the system allows.
    pub(crate) fn grow_recv_buffer(&self, bytes: usize) {
        if sockopt::set_socket_recv_buffer_size_force(&self.fd, bytes).is_err() {
            sockopt::set_socket_recv_buffer_size(&self.fd, bytes).ok();
        }
    }

    /// A datagram is copied whole into kernel memory that counts against the send buffer.
    fn grow_send_buffer(&mut self, len: usize) -> Result<(), Error> {
        if len <= self.send_limit {
            return Ok(());
        }
        // The kernel keeps some bytes for itself; twice the room spares a call for the next, larger datagram.
        let wanted = len.saturating_mul(2).min(i32::MAX as usize / 2);
        if sockopt::set_socket_send_buffer_size_force(&self.fd, wanted).is_err() {
            sockopt::set_socket_send_buffer_size(&self.fd, wanted).ok();
        }
        let room =
            sockopt::socket_send_buffer_size(&self.fd).map_err(|errno| Error::io("getsockopt", errno))?;
        self.send_limit = room.saturating_sub(SEND_RESERVE);
        if len > self.send_limit { Err(Error::TooLarge(len)) } else { Ok(()) }
    }

    fn option(&self, name: libc::c_int, value: libc::c_int) -> Result<(), Error> {
        // SAFETY: the descriptor is open as long as `self.fd` lives, and the pointer and length describe `value`,
        // which outlives the call. These options read one int and keep no pointer.
        let result = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_NETLINK,
                name,
                (&raw const value).cast(),
                size_of_val(&value) as libc::socklen_t,
            )
        };
        match result {
            0 => Ok(()),
            _ => Err(Error::io("setsockopt", last_errno())),
        }
    }

    /// The kernel's number for the network namespace; `None` before Linux 5.14, which does not tell.
    fn netns_cookie(&self) -> Option<u64> {
        let mut cookie = 0u64;
        let mut len = size_of_val(&cookie) as libc::socklen_t;
        // SAFETY: the descriptor is open as long as `self.fd` lives; pointer and length describe `cookie`, which the
        // kernel fills and keeps no pointer to.
        let result = unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_NETNS_COOKIE,
                (&raw mut cookie).cast(),
                &raw mut len,
            )
        };
        (result == 0).then_some(cookie)
    }

    /// Waits until there is something to receive; `false` when the time is over.
    fn wait(&self, deadline: Instant) -> Result<bool, Error> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let timeout = Timespec::try_from(left).ok();
            let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
            match poll(&mut fds, timeout.as_ref()) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(true),
                Err(errno) => return Err(Error::io("poll", errno)),
            }
        }
    }
}

impl Transport for Socket {
    fn send(&mut self, datagram: &[u8]) -> Result<(), Error> {
        self.grow_send_buffer(datagram.len())?;
        let kernel = SocketAddrNetlink::new(0, 0);
        loop {
            match net::sendto(&self.fd, datagram, SendFlags::empty(), &kernel) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::MSGSIZE) => return Err(Error::TooLarge(datagram.len())),
                Err(errno) => return Err(Error::io("sendto", errno)),
            }
        }
    }

    fn recv(&mut self, buffer: &mut Vec<u8>, wait: Duration) -> Result<bool, Error> {
        // Begins only when there is something to wait for.
        let mut deadline = None;
        loop {
            buffer.clear();
            buffer.reserve(DATAGRAM);
            let room = buffer.capacity();
            let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
            match net::recvfrom(&self.fd, spare_capacity(buffer), flags) {
                Ok((_, len, _)) if len > room => {
                    buffer.clear();
                    buffer.reserve(len);
                    return Err(Error::Overrun);
                }
                // Only the kernel has port 0. Another process could make up an answer.
                Ok((_, _, from)) => {
                    let from = from.and_then(|from| SocketAddrNetlink::try_from(from).ok());
                    if from.is_some_and(|from| from.pid() == 0) {
                        return Ok(true);
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::NOBUFS) => return Err(Error::Overrun),
                Err(Errno::AGAIN) if wait.is_zero() => return Ok(false),
                Err(Errno::AGAIN) => {
                    let deadline = *deadline.get_or_insert_with(|| Instant::now() + wait.min(LONGEST_WAIT));
                    if !self.wait(deadline)? {
                        return Ok(false);
                    }
                }
                Err(errno) => return Err(Error::io("recvfrom", errno)),
            }
        }
    }

    fn port(&self) -> u32 {
        self.port
    }

    fn sibling(&self) -> Result<Option<Socket>, Error> {
        let sibling = Socket::open(self.protocol)?;
        Ok((sibling.netns_cookie() == self.netns_cookie()).then_some(sibling))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// The kernel makes datagrams of a listing as large as the receiver showed it can take, up to 32 KiB.
const DATAGRAM: usize = 64 * 1024;
/// Room for some thousand answers and notifications.
const RECV_BUFFER: usize = 4 * 1024 * 1024;
/// Below the smallest default anywhere (`net.core.wmem_default`), so that small requests need no extra calls.
const DEFAULT_SEND_LIMIT: usize = 64 * 1024;
/// What the kernel takes off the send buffer before it compares (32 bytes), with room to spare.
const SEND_RESERVE: usize = 1024;
/// Keeps the sum with the clock in range.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);
