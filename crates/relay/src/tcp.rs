// SPDX-License-Identifier: Apache-2.0

//! The TCP connections of a worker.
//!
//! ```text
//!   accepted -> dialling -> carried, both directions -> one direction over -> closed
//!                  |  ^          |
//!                  +--+ next     +-> reset, when one side resets
//! ```

use std::{
    collections::{BTreeSet, VecDeque},
    io,
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    thread,
    time::Duration,
};

use rustix::{
    event::{EventfdFlags, epoll::EventFlags, eventfd},
    io::Errno,
    net::{SocketFlags, acceptfrom_with, sockopt::socket_error},
};
use slab::Slab;

use crate::{
    clock::{Millis, millis},
    counters::Refusal,
    dial::Dial,
    endpoint::Endpoint,
    pipe::Pool,
    relay::{Arrival, Transport},
    service::Service,
    socket,
    stream::{Broken, Known, Moved, Side, Stream},
    worker::{Context, Listener, Peer, Shared, Token},
};

/// So many clients are let in before others have their turn.
const ACCEPTS: usize = 64;
/// How long is waited when not even one client can be turned away.
const BREATH: Duration = Duration::from_millis(2);
/// So long the acknowledgement of a client's first bytes waits for an answer that it could go with. The kernel alone
/// would wait for 40 ms, and so would a client that sends its question in two pieces.
const ACKNOWLEDGE: Millis = 2;
/// A connection so old is worth keep-alive probes.
const LONG_LIVED: Millis = 5_000;

pub(crate) const EVENTS: EventFlags = EventFlags::IN
    .union(EventFlags::PRI)
    .union(EventFlags::OUT)
    .union(EventFlags::RDHUP)
    .union(EventFlags::ET);

/// See the module.
pub(crate) struct Tcp {
    /// `None` for what was closed in this round: events of the same round may still name it.
    pub(crate) connections: Slab<Option<Connection>>,
    closed: Vec<usize>,
    pub(crate) pool: Pool,
    /// When to give up an attempt.
    pub(crate) deadlines: BTreeSet<(Millis, usize)>,
    /// Connections whose client's first bytes are to be acknowledged by then.
    unacknowledged: VecDeque<(Millis, usize)>,
    /// Connections that had more to move when their turn was over.
    busy: Vec<usize>,
    /// Given up when no descriptor is left, so that one client can be accepted and told.
    reserve: Option<OwnedFd>,
}

pub(crate) struct Connection {
    pub(crate) client: OwnedFd,
    pub(crate) server: Option<OwnedFd>,
    pub(crate) service: Arc<Service>,
    pub(crate) endpoint: Option<Arc<Endpoint>>,
    /// While no endpoint has answered yet.
    pub(crate) dial: Option<Box<Dial>>,
    up: Stream,
    down: Stream,
    client_known: Known,
    pub(crate) server_known: Known,
    born: Millis,
    active: Millis,
    kept_alive: bool,
    acknowledged: Acknowledged,
}

/// What has become of the client's first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Acknowledged {
    /// They have not come.
    NotYet,
    /// They have, and wait to be acknowledged with an answer.
    WithAnswer,
    /// From here on the kernel does as it likes.
    Left,
}

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Orderly,
    Reset,
}

impl Tcp {
    pub(crate) fn new(shared: &Arc<Shared>) -> io::Result<Tcp> {
        Ok(Tcp {
            connections: Slab::new(),
            closed: Vec::new(),
            pool: Pool::new(Arc::clone(shared)),
            deadlines: BTreeSet::new(),
            unacknowledged: VecDeque::new(),
            busy: Vec::new(),
            reserve: Some(spare_descriptor()?),
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    pub(crate) fn is_busy(&self) -> bool {
        !self.busy.is_empty()
    }

    pub(crate) fn next_deadline(&self) -> Option<Millis> {
        let (attempt, acknowledgement) = (self.deadlines.first(), self.unacknowledged.front());
        attempt.into_iter().chain(acknowledgement).map(|(at, _)| *at).min()
    }

    /// Lets clients in.
    pub(crate) fn accept(&mut self, context: &Context, listener: &Listener) {
        for _ in 0..ACCEPTS {
            match acceptfrom_with(&listener.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok((client, peer)) => {
                    context.shared.counters.accepted.add(1);
                    let destination = match listener.listen.is_for_many() {
                        true => socket::local_address(&client),
                        false => Some(listener.address),
                    };
                    match peer.and_then(socket::plain).zip(destination) {
                        Some((from, to)) => self.admit(context, listener, client, (from, to)),
                        // Gone before we looked.
                        None => socket::reset(client),
                    }
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    return self.turn_away(context, listener);
                }
                // What goes wrong with one client must not stop the others.
                Err(_) => (),
            }
        }
    }

    /// No descriptor is left: frees what can be spared, and tells one client, so that it does not wait for nothing.
    fn turn_away(&mut self, context: &Context, listener: &Listener) {
        context.shared.counters.refuse(Refusal::Descriptors);
        self.pool.shrink();
        drop(self.reserve.take());
        match acceptfrom_with(&listener.socket, SocketFlags::CLOEXEC) {
            Ok((client, _)) => socket::reset(client),
            // Somebody else was faster. The client still waits, and asking at once again would only burn time.
            Err(_) => thread::sleep(BREATH),
        }
        self.reserve = spare_descriptor().ok();
    }

    fn admit(
        &mut self,
        context: &Context,
        listener: &Listener,
        client: OwnedFd,
        (from, to): (SocketAddr, SocketAddr),
    ) {
        let Shared { settings, counters, directory } = &*context.shared;
        let tag = listener.listen.tag;
        let arrival = Arrival { tag, transport: Transport::Tcp, client: from, destination: to };
        let service = match directory.find(&arrival) {
            Ok(service) => service,
            Err(why) => {
                counters.refuse(why);
                return socket::reset(client);
            }
        };
        let refusal = if !counters.open_connections.enter(settings.connections) {
            Some(Refusal::Connections)
        } else if !service.enter(settings.connections) {
            counters.open_connections.leave();
            Some(Refusal::Service)
        } else {
            None
        };
        if let Some(refusal) = refusal {
            counters.refuse(refusal);
            service.refused.add(1);
            return socket::reset(client);
        }
        let dial = Dial::new(from, to, context.now + millis(settings.all_attempts));
        let index = self.connections.insert(Some(Connection {
            client,
            server: None,
            service,
            endpoint: None,
            dial: Some(Box::new(dial)),
            up: Stream::default(),
            down: Stream::default(),
            client_known: Known { writes: true, ..Known::default() },
            server_known: Known::default(),
            born: context.now,
            active: context.now,
            kept_alive: false,
            acknowledged: Acknowledged::NotYet,
        }));
        let Some(connection) = &self.connections[index] else { return };
        if context.follow(&connection.client, Token::Tcp(index, Peer::Client), EVENTS).is_err() {
            return self.end(context, index, End::Reset);
        }
        self.dial(context, index);
    }

    /// Something happened to one of a connection's sockets.
    pub(crate) fn event(&mut self, context: &Context, index: usize, peer: Peer, flags: EventFlags) {
        let Some(Some(connection)) = self.connections.get_mut(index) else { return };
        let broken = flags.intersects(EventFlags::ERR | EventFlags::HUP);
        let reads = broken || flags.intersects(EventFlags::IN | EventFlags::RDHUP);
        let writes = broken || flags.contains(EventFlags::OUT);
        let known = match peer {
            Peer::Client => &mut connection.client_known,
            Peer::Server => &mut connection.server_known,
        };
        known.reads |= reads;
        known.writes |= writes;
        known.urgent = flags.contains(EventFlags::PRI);
        known.hung_up |= flags.contains(EventFlags::RDHUP);
        if connection.dial.is_some() {
            match peer {
                Peer::Server if writes => self.settle(context, index, broken),
                // The client has lost its patience.
                Peer::Client if broken => self.end(context, index, End::Reset),
                _ => (),
            }
            return;
        }
        self.turn(context, index);
        if flags.contains(EventFlags::ERR)
            && let Some(Some(connection)) = self.connections.get(index)
            && connection.has_failed(peer)
        {
            self.end(context, index, End::Reset);
        }
    }

    /// Moves what can be moved, in both directions, and returns how much came from the client.
    pub(crate) fn turn(&mut self, context: &Context, index: usize) -> u64 {
        let Some(Some(connection)) = self.connections.get_mut(index) else { return 0 };
        let mut from_client = 0;
        let counters = &context.shared.counters;
        let end = match connection.turn(&mut self.pool) {
            Err(_) => Some(End::Reset),
            Ok((sent, received)) => {
                from_client = sent.bytes;
                if connection.owes_acknowledgement(sent.bytes, received.bytes) {
                    self.unacknowledged.push_back((context.now + ACKNOWLEDGE, index));
                }
                if sent.bytes + received.bytes > 0 {
                    connection.active = context.now;
                    counters.sent_bytes.add(sent.bytes);
                    counters.received_bytes.add(received.bytes);
                    counters.copied_bytes.add(sent.copied + received.copied);
                    connection.service.sent_bytes.add(sent.bytes);
                    connection.service.received_bytes.add(received.bytes);
                }
                if sent.more || received.more {
                    self.busy.push(index);
                }
                (connection.up.is_over() && connection.down.is_over()).then_some(End::Orderly)
            }
        };
        if let Some(end) = end {
            self.end(context, index, end);
        }
        from_client
    }

    /// Acknowledges what has waited for an answer for long enough.
    pub(crate) fn acknowledge(&mut self, now: Millis) {
        while let Some((_, index)) = self.unacknowledged.pop_front_if(|(at, _)| *at <= now) {
            // If another connection has this place by now, it is acknowledged a moment early.
            if let Some(Some(connection)) = self.connections.get_mut(index)
                && connection.acknowledged == Acknowledged::WithAnswer
            {
                connection.acknowledged = Acknowledged::Left;
                socket::acknowledge(&connection.client);
            }
        }
    }

    /// Goes on with connections whose turn was over before their work was.
    pub(crate) fn resume(&mut self, context: &Context) {
        for index in std::mem::take(&mut self.busy) {
            self.turn(context, index);
        }
    }

    /// Looks at connections to endpoints that went, and at those that are half over.
    pub(crate) fn sweep(&mut self, context: &Context) {
        let Shared { settings, counters, .. } = &*context.shared;
        let (drain, half_closed) = (millis(settings.drain), millis(settings.half_closed));
        let mut ending = Vec::new();
        for (index, connection) in &mut self.connections {
            let Some(connection) = connection.as_mut().filter(|connection| connection.dial.is_none()) else {
                continue;
            };
            let gone = connection.endpoint.as_ref().and_then(|endpoint| endpoint.gone_for(context.now));
            if gone.is_some_and(|time| time >= drain) {
                counters.drained.add(1);
                ending.push(index);
            } else if (connection.up.is_over() || connection.down.is_over())
                && context.now.saturating_sub(connection.active) >= half_closed
            {
                counters.half_closed.add(1);
                ending.push(index);
            } else if !connection.kept_alive && context.now >= connection.born + LONG_LIVED {
                connection.kept_alive = true;
                connection.server.iter().for_each(socket::keep_alive_on);
            }
        }
        for index in ending {
            self.end(context, index, End::Orderly);
        }
    }

    pub(crate) fn end(&mut self, context: &Context, index: usize, end: End) {
        let Some(mut connection) = self.connections.get_mut(index).and_then(Option::take) else { return };
        self.closed.push(index);
        connection.up.release(&mut self.pool);
        connection.down.release(&mut self.pool);
        connection.leave_endpoint();
        connection.service.open.leave();
        context.shared.counters.open_connections.leave();
        if let Some(dial) = &connection.dial {
            self.deadlines.remove(&(dial.deadline, index));
        }
        if end == End::Reset {
            connection.server.into_iter().chain([connection.client]).for_each(socket::reset);
        }
    }

    /// Places of what was closed can be used again from now on.
    pub(crate) fn reclaim(&mut self) {
        for index in self.closed.drain(..) {
            self.connections.try_remove(index);
        }
        if self.connections.is_empty() && self.connections.capacity() > 1_024 {
            self.connections.shrink_to_fit();
        }
    }

    pub(crate) fn close_all(&mut self, context: &Context) {
        let all: Vec<usize> = self.connections.iter().map(|(index, _)| index).collect();
        for index in all {
            self.end(context, index, End::Orderly);
        }
    }
}

impl Connection {
    fn turn(&mut self, pool: &mut Pool) -> Result<(Moved, Moved), Broken> {
        let Some(server) = &self.server else { return Ok(Default::default()) };
        let mut client = Side { socket: self.client.as_fd(), known: &mut self.client_known };
        let mut server = Side { socket: server.as_fd(), known: &mut self.server_known };
        let sent = self.up.turn(&mut client, &mut server, pool)?;
        let received = self.down.turn(&mut server, &mut client, pool)?;
        Ok((sent, received))
    }

    /// Whether from now on the client waits for its first bytes to be acknowledged.
    fn owes_acknowledgement(&mut self, sent: u64, received: u64) -> bool {
        let before = self.acknowledged;
        if received > 0 {
            self.acknowledged = Acknowledged::Left;
        } else if sent > 0 && before == Acknowledged::NotYet {
            self.acknowledged = Acknowledged::WithAnswer;
        }
        before == Acknowledged::NotYet && self.acknowledged == Acknowledged::WithAnswer
    }

    fn has_failed(&self, peer: Peer) -> bool {
        let socket = match peer {
            Peer::Client => Some(&self.client),
            Peer::Server => self.server.as_ref(),
        };
        socket.is_some_and(|socket| !matches!(socket_error(socket), Ok(Ok(()))))
    }

    /// It is no longer counted at its endpoint.
    pub(crate) fn leave_endpoint(&mut self) -> Option<Arc<Endpoint>> {
        let endpoint = self.endpoint.take()?;
        endpoint.open.leave();
        Some(endpoint)
    }
}

fn spare_descriptor() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC)?)
}
