// SPDX-License-Identifier: Apache-2.0

//! The UDP flows of a worker: who a client is, which endpoint it got, and one socket towards each.
//!
//! Where clients of one listener have sent to many addresses, a flow has a socket that speaks in the name of the one its
//! client has sent to; the kernel gives it the client's later datagrams. Where a listener is bound to the address itself,
//! it speaks and hears for all of its flows.

use std::{
    io::IoSliceMut,
    net::{SocketAddr, SocketAddrV4, SocketAddrV6},
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
};

use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg};
use rustix::{
    event::epoll::EventFlags,
    io::Errno,
    net::{RecvFlags, SendFlags, recv, recvfrom, send, sendto},
};
use slab::Slab;

use crate::{
    clock::{Millis, millis},
    counters::Refusal,
    dial::is_ours,
    endpoint::Endpoint,
    lru::Lru,
    relay::{Arrival, Listen, Transport},
    service::{Asking, Service},
    socket,
    worker::{Context, Listener, Peer, Shared, Token},
};

/// So many datagrams of one socket before others have their turn.
const TURN: usize = 64;
const LARGEST: usize = 65_536;

/// See the module.
pub(crate) struct Udp {
    /// `None` for what was closed in this round.
    flows: Slab<Option<Flow>>,
    table: Lru<Key, usize>,
    closed: Vec<usize>,
    buffer: Box<[u8]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    client: SocketAddr,
    destination: SocketAddr,
    /// The place of the listener it came by.
    listener: usize,
}

struct Flow {
    key: Key,
    listener: u64,
    /// Speaks in the name of the destination; `None` where the listener does.
    front: Option<OwnedFd>,
    server: OwnedFd,
    service: Arc<Service>,
    endpoint: Arc<Endpoint>,
    active: Millis,
}

impl Udp {
    pub(crate) fn new() -> Udp {
        Udp {
            flows: Slab::new(),
            table: Lru::new(),
            closed: Vec::new(),
            buffer: vec![0; LARGEST].into_boxed_slice(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    /// Datagrams of clients have arrived at a listener.
    pub(crate) fn receive(&mut self, context: &Context, listeners: &Slab<Listener>, index: usize) {
        let Some(listener) = listeners.get(index) else { return };
        for _ in 0..TURN {
            let mut buffer = std::mem::take(&mut self.buffer);
            let datagram = if listener.listen.is_for_many() {
                datagram_and_destination(&listener.socket, &mut buffer)
            } else {
                plain_datagram(&listener.socket, &mut buffer)
                    .map(|(len, client)| (len, client, listener.address))
            };
            let goes_on = match datagram {
                Ok((len, client, destination)) => {
                    let key = Key { client, destination, listener: index };
                    self.forward(context, listener, key, &buffer[..len]);
                    true
                }
                Err(Errno::AGAIN) => false,
                // An error of a datagram sent earlier, or one without a destination: the next one is another matter.
                Err(_) => true,
            };
            self.buffer = buffer;
            if !goes_on {
                return;
            }
        }
    }

    /// A datagram of a client, to its endpoint.
    fn forward(&mut self, context: &Context, listener: &Listener, key: Key, datagram: &[u8]) {
        let known = self.table.touch(&key).copied().filter(|index| match &self.flows[*index] {
            Some(flow) => !flow.endpoint.is_void(),
            None => false,
        });
        let index = match known {
            Some(index) => index,
            None => {
                if let Some(index) = self.table.peek(&key).copied() {
                    self.end(context, index);
                }
                let Some(index) = self.begin(context, listener, key) else { return };
                index
            }
        };
        let Some(Some(flow)) = self.flows.get_mut(index) else { return };
        flow.active = context.now;
        match send(&flow.server, datagram, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(bytes) => {
                context.shared.counters.sent_bytes.add(bytes as u64);
                flow.service.sent_bytes.add(bytes as u64);
            }
            // As on any way: what finds no room is lost.
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::MSGSIZE) => (),
            Err(_) => self.lost(context, index),
        }
    }

    fn begin(&mut self, context: &Context, listener: &Listener, key: Key) -> Option<usize> {
        let Shared { settings, counters, directory } = &*context.shared;
        let Key { client, destination, .. } = key;
        let tag = listener.listen.tag;
        let arrival = Arrival { tag, transport: Transport::Udp, client, destination };
        let service = directory.find(&arrival).map_err(|why| counters.refuse(why)).ok()?;
        let refuse = |why| {
            counters.refuse(why);
            service.refused.add(1);
        };
        if !service.enter(settings.flows) {
            refuse(Refusal::Service);
            return None;
        }
        if !counters.open_flows.enter(settings.flows) {
            if let Some(oldest) = self.table.oldest().map(|(_, index)| *index) {
                counters.evicted_flows.add(1);
                self.end(context, oldest);
            }
            if !counters.open_flows.enter(settings.flows) {
                service.open.leave();
                refuse(Refusal::Connections);
                return None;
            }
        }
        match self.open(context, listener, key, &service) {
            Ok(index) => {
                counters.flows.add(1);
                Some(index)
            }
            Err(why) => {
                counters.open_flows.leave();
                service.open.leave();
                refuse(why);
                None
            }
        }
    }

    fn open(
        &mut self,
        context: &Context,
        listener: &Listener,
        key: Key,
        service: &Arc<Service>,
    ) -> Result<usize, Refusal> {
        let settings = &context.shared.settings;
        let mut tried = Vec::new();
        let (endpoint, server) = loop {
            let (client, now) = (key.client.ip(), context.now);
            let asking = Asking { client, tried: &tried, now, remembered: settings.remembered };
            let endpoint = service.pick(asking).ok_or(Refusal::Endpoints)?;
            match socket::toward(endpoint.address) {
                Ok(server) => break (endpoint, server),
                Err(error) if is_ours(&error) => return Err(Refusal::Descriptors),
                // No way there: known at once, and nothing was sent.
                Err(_) if tried.len() + 1 < settings.attempts as usize => {
                    service.failed(&endpoint, client, (settings, &context.shared.counters));
                    tried.push(endpoint.address);
                }
                Err(_) => return Err(Refusal::Unreachable),
            }
        };
        let Listen { transparent, .. } = *listener.listen;
        let speak = || socket::in_the_name_of(key.destination, key.client, transparent);
        let front = match listener.listen.is_for_many() {
            true => Some(speak().map_err(|error| why(&error))?),
            false => None,
        };
        let entry = self.flows.vacant_entry();
        let index = entry.key();
        let follow = |socket, peer| context.follow(socket, Token::Udp(index, peer), EventFlags::IN);
        let is_followed = follow(&server, Peer::Server).is_ok()
            && front.as_ref().is_none_or(|front| follow(front, Peer::Client).is_ok());
        if !is_followed {
            return Err(Refusal::Descriptors);
        }
        endpoint.open.enter(usize::MAX);
        endpoint.succeeded();
        let service = Arc::clone(service);
        let active = context.now;
        entry.insert(Some(Flow { key, listener: listener.id, front, server, service, endpoint, active }));
        self.table.insert(key, index);
        Ok(index)
    }

    /// Something happened to one of a flow's sockets.
    pub(crate) fn event(&mut self, context: &Context, listeners: &Slab<Listener>, at: (usize, Peer)) {
        let (index, peer) = at;
        for _ in 0..TURN {
            let Some(Some(flow)) = self.flows.get(index) else { return };
            let (key, id) = (flow.key, flow.listener);
            let mut buffer = std::mem::take(&mut self.buffer);
            let socket = match peer {
                Peer::Server => Some(&flow.server),
                Peer::Client => flow.front.as_ref(),
            };
            let heard =
                socket.map(|socket| recv(socket, &mut *buffer, RecvFlags::DONTWAIT).map(|(_, len)| len));
            match (heard, peer) {
                (None | Some(Err(Errno::AGAIN)), _) => {
                    self.buffer = buffer;
                    return;
                }
                (Some(Ok(len)), Peer::Server) => self.answer(context, listeners, index, &buffer[..len]),
                (Some(Ok(len)), Peer::Client) => {
                    if let Some(listener) = listeners.get(key.listener).filter(|listener| listener.id == id) {
                        self.forward(context, listener, key, &buffer[..len]);
                    }
                }
                // The endpoint's host says that nobody is there.
                (Some(Err(_)), Peer::Server) => self.lost(context, index),
                // The client is gone. Its flow ends by itself, and it may come back before.
                (Some(Err(_)), Peer::Client) => (),
            }
            self.buffer = buffer;
        }
    }

    /// A datagram of an endpoint, to its client.
    fn answer(&mut self, context: &Context, listeners: &Slab<Listener>, index: usize, datagram: &[u8]) {
        let Some(Some(flow)) = self.flows.get_mut(index) else { return };
        flow.active = context.now;
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = match (&flow.front, listeners.get(flow.key.listener)) {
            (Some(front), _) => send(front, datagram, flags),
            (None, Some(listener)) => sendto(&listener.socket, datagram, flags, &flow.key.client),
            (None, None) => return,
        };
        if let Ok(bytes) = sent {
            context.shared.counters.received_bytes.add(bytes as u64);
            flow.service.received_bytes.add(bytes as u64);
        }
        let key = flow.key;
        self.table.touch(&key);
    }

    /// The endpoint cannot be reached. The client's next datagram gets another one.
    fn lost(&mut self, context: &Context, index: usize) {
        let Some(Some(flow)) = self.flows.get(index) else { return };
        let around = (&context.shared.settings, &context.shared.counters);
        flow.service.failed(&flow.endpoint, flow.key.client.ip(), around);
        self.end(context, index);
    }

    /// Ends flows that nobody has used for long enough.
    pub(crate) fn sweep(&mut self, context: &Context) {
        let timeout = millis(context.shared.settings.udp_timeout);
        while let Some(index) = self.table.oldest().map(|(_, index)| *index) {
            match &self.flows[index] {
                Some(flow) if flow.active + timeout > context.now => return,
                _ => self.end(context, index),
            }
        }
    }

    fn end(&mut self, context: &Context, index: usize) {
        let Some(flow) = self.flows.get_mut(index).and_then(Option::take) else { return };
        self.table.remove(&flow.key);
        self.closed.push(index);
        flow.endpoint.open.leave();
        flow.service.open.leave();
        context.shared.counters.open_flows.leave();
    }

    /// Ends flows to endpoints that are no more: a socket that speaks for an address would keep the address's packets.
    pub(crate) fn prune(&mut self, context: &Context) {
        let of_void = |(index, flow): (usize, &Option<Flow>)| {
            flow.as_ref().is_some_and(|flow| flow.endpoint.is_void()).then_some(index)
        };
        let flows: Vec<usize> = self.flows.iter().filter_map(of_void).collect();
        flows.into_iter().for_each(|index| self.end(context, index));
    }

    /// Flows of a listener that goes have nobody who speaks for them.
    pub(crate) fn forget_listener(&mut self, context: &Context, id: u64) {
        let of_it = |(index, flow): (usize, &Option<Flow>)| {
            flow.as_ref().is_some_and(|flow| flow.listener == id).then_some(index)
        };
        let flows: Vec<usize> = self.flows.iter().filter_map(of_it).collect();
        flows.into_iter().for_each(|index| self.end(context, index));
    }

    pub(crate) fn reclaim(&mut self) {
        for index in self.closed.drain(..) {
            self.flows.try_remove(index);
        }
    }

    pub(crate) fn close_all(&mut self, context: &Context) {
        let all: Vec<usize> = self.flows.iter().map(|(index, _)| index).collect();
        all.into_iter().for_each(|index| self.end(context, index));
    }
}

/// Why there is no socket that speaks in the name of an address.
fn why(error: &std::io::Error) -> Refusal {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => Refusal::Taken,
        _ => Refusal::Descriptors,
    }
}

/// A datagram at a listener bound to the address it was sent to.
fn plain_datagram(socket: &OwnedFd, buffer: &mut [u8]) -> Result<(usize, SocketAddr), Errno> {
    let (len, _, client) = recvfrom(socket, buffer, RecvFlags::DONTWAIT)?;
    let client = client.and_then(socket::plain).ok_or(Errno::DESTADDRREQ)?;
    Ok((len, client))
}

/// A datagram that was sent to another address, which the kernel tells.
fn datagram_and_destination(
    socket: &OwnedFd,
    buffer: &mut [u8],
) -> Result<(usize, SocketAddr, SocketAddr), Errno> {
    let mut control = [0_u8; 128];
    let mut slices = [IoSliceMut::new(buffer)];
    let received = recvmsg::<SockaddrStorage>(
        socket.as_raw_fd(),
        &mut slices,
        Some(&mut control),
        MsgFlags::MSG_DONTWAIT,
    );
    let message = received.map_err(errno)?;
    let client = message.address.as_ref().and_then(address);
    let destination = message.cmsgs().map_err(errno)?.find_map(|control| match control {
        ControlMessageOwned::Ipv4OrigDstAddr(to) => {
            let ip = u32::from_be(to.sin_addr.s_addr);
            Some(SocketAddrV4::new(ip.into(), u16::from_be(to.sin_port)).into())
        }
        ControlMessageOwned::Ipv6OrigDstAddr(to) => {
            Some(SocketAddrV6::new(to.sin6_addr.s6_addr.into(), u16::from_be(to.sin6_port), 0, 0).into())
        }
        _ => None,
    });
    let (client, destination) = client.zip(destination).ok_or(Errno::DESTADDRREQ)?;
    Ok((message.bytes, client, destination))
}

fn address(storage: &SockaddrStorage) -> Option<SocketAddr> {
    if let Some(four) = storage.as_sockaddr_in() {
        return Some(SocketAddrV4::new(four.ip(), four.port()).into());
    }
    storage.as_sockaddr_in6().map(|six| SocketAddrV6::new(six.ip(), six.port(), 0, six.scope_id()).into())
}

fn errno(error: nix::errno::Errno) -> Errno {
    Errno::from_raw_os_error(error as i32)
}
