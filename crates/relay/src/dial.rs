// SPDX-License-Identifier: Apache-2.0

//! How a connection finds an endpoint: one after the other, until one answers or the budget is spent. Not a byte of the
//! client's has been read by then, so that nothing is sent twice.

use std::{io, net::SocketAddr};

use rustix::{
    io::Errno,
    net::{SendFlags, send, sockopt::socket_error},
};

use crate::{
    clock::{Millis, millis},
    counters::Refusal,
    proxy_protocol,
    service::Asking,
    socket::{self, Ports},
    stream::Known,
    tcp::{Connection, EVENTS, End, Tcp},
    worker::{Context, Peer, Token},
};

/// With so many connections to one endpoint, half of the ports may be in use before long. (There are 14,116 in half of what
/// Linux has without being told.)
const CROWD: usize = 4_096;

/// What is known while no endpoint has answered.
#[derive(Debug)]
pub(crate) struct Dial {
    client: SocketAddr,
    destination: SocketAddr,
    /// Endpoints that have failed.
    tried: Vec<SocketAddr>,
    /// When the attempt under way is given up.
    pub(crate) deadline: Millis,
    /// When all is given up.
    last: Millis,
}

impl Dial {
    pub(crate) fn new(client: SocketAddr, destination: SocketAddr, last: Millis) -> Dial {
        Dial { client, destination, tried: Vec::new(), deadline: last, last }
    }
}

impl Tcp {
    /// Tries endpoints until one is on its way, or none is left.
    pub(crate) fn dial(&mut self, context: &Context, index: usize) {
        loop {
            match self.attempt(context, index) {
                Attempt::UnderWay => return,
                Attempt::Failed if self.may_go_on(context, index) => (),
                Attempt::Failed => return self.give_up(context, index, Refusal::Unreachable),
                Attempt::NobodyLeft(why) => return self.give_up(context, index, why),
            }
        }
    }

    fn attempt(&mut self, context: &Context, index: usize) -> Attempt {
        let Some(Some(connection)) = self.connections.get_mut(index) else { return Attempt::UnderWay };
        let Some(dial) = connection.dial.as_mut() else { return Attempt::UnderWay };
        let settings = &context.shared.settings;
        let asking = Asking {
            client: dial.client.ip(),
            tried: &dial.tried,
            now: context.now,
            remembered: settings.remembered,
        };
        let Some(endpoint) = connection.service.pick(asking) else {
            let has_tried = !dial.tried.is_empty();
            return Attempt::NobodyLeft(if has_tried { Refusal::Unreachable } else { Refusal::Endpoints });
        };
        if !dial.tried.is_empty() {
            context.shared.counters.retries.add(1);
            connection.service.retries.add(1);
        }
        let address = endpoint.address;
        let others = connection.service.roster().members.len() > dial.tried.len() + 1;
        let may_retry = others && dial.tried.len() + 1 < settings.attempts as usize;
        let time = settings.first_attempt.saturating_mul(1 << dial.tried.len().min(8));
        dial.deadline = if may_retry { (context.now + millis(time)).min(dial.last) } else { dial.last };
        let deadline = dial.deadline;
        endpoint.open.enter(usize::MAX);
        let open = endpoint.open.value();
        connection.endpoint = Some(endpoint);
        let server = match socket::dial(address, ports(open)) {
            Ok(server) => server,
            Err(error) if is_ours(&error) => return Attempt::NobodyLeft(Refusal::Descriptors),
            Err(_) => {
                self.failed(context, index);
                return Attempt::Failed;
            }
        };
        if context.follow(&server, Token::Tcp(index, Peer::Server), EVENTS).is_err() {
            return Attempt::NobodyLeft(Refusal::Descriptors);
        }
        connection.server = Some(server);
        self.deadlines.insert((deadline, index));
        Attempt::UnderWay
    }

    /// The socket has something to say: the endpoint has answered, or the attempt has failed (`broken` says that it may
    /// have).
    pub(crate) fn settle(&mut self, context: &Context, index: usize, broken: bool) {
        let Some(Some(connection)) = self.connections.get_mut(index) else { return };
        let (Some(server), Some(dial)) = (&connection.server, &connection.dial) else { return };
        let mut is_good = !broken || matches!(socket_error(server), Ok(Ok(())));
        let tells_client = connection.service.roster().settings.proxy_protocol;
        if is_good && tells_client {
            let header = proxy_protocol::header(dial.client, dial.destination);
            // The socket is new and the header short: it fits, or something is wrong.
            is_good = send(server, &header, SendFlags::NOSIGNAL) == Ok(header.len());
        }
        self.deadlines.remove(&(dial.deadline, index));
        if !is_good {
            return self.next(context, index);
        }
        connection.dial = None;
        connection.server_known.writes = true;
        connection.endpoint.iter().for_each(|endpoint| endpoint.succeeded());
        // Its answer is acknowledged with the client's first bytes; where there are none it might be the endpoint who
        // speaks first, and waits for this.
        if self.turn(context, index) == 0
            && !tells_client
            && let Some(Some(Connection { server: Some(server), .. })) = self.connections.get(index)
        {
            socket::acknowledge(server);
        }
    }

    /// Gives up attempts that took too long.
    pub(crate) fn expire(&mut self, context: &Context) {
        while let Some((at, index)) = self.deadlines.first().copied().filter(|(at, _)| *at <= context.now) {
            self.deadlines.remove(&(at, index));
            self.next(context, index);
        }
    }

    fn next(&mut self, context: &Context, index: usize) {
        self.failed(context, index);
        if self.may_go_on(context, index) {
            self.dial(context, index);
        } else {
            self.give_up(context, index, Refusal::Unreachable);
        }
    }

    /// Remembers that the endpoint did not answer.
    fn failed(&mut self, context: &Context, index: usize) {
        let Some(Some(connection)) = self.connections.get_mut(index) else { return };
        connection.server = None;
        connection.server_known = Known::default();
        let endpoint = connection.leave_endpoint();
        if let (Some(endpoint), Some(dial)) = (endpoint, connection.dial.as_mut()) {
            dial.tried.push(endpoint.address);
            let around = (&context.shared.settings, &context.shared.counters);
            connection.service.failed(&endpoint, dial.client.ip(), around);
        }
    }

    fn may_go_on(&self, context: &Context, index: usize) -> bool {
        let Some(Some(connection)) = self.connections.get(index) else { return false };
        let Some(dial) = &connection.dial else { return false };
        context.now < dial.last && dial.tried.len() < context.shared.settings.attempts as usize
    }

    fn give_up(&mut self, context: &Context, index: usize, why: Refusal) {
        if let Some(Some(connection)) = self.connections.get(index) {
            context.shared.counters.refuse(why);
            connection.service.refused.add(1);
        }
        if why == Refusal::Descriptors {
            self.pool.shrink();
        }
        self.end(context, index, End::Reset);
    }
}

enum Attempt {
    UnderWay,
    Failed,
    NobodyLeft(Refusal),
}

/// It is we who lack something, not the endpoint.
pub(crate) fn is_ours(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM | Errno::ADDRNOTAVAIL))
}

/// From which ports to dial an endpoint to which there are so many connections, the new one included.
fn ports(open: usize) -> Ports {
    if open > CROWD { Ports::InTurn } else { Ports::ByHalves }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_crowd_takes_ports_in_turn() {
        assert_eq!(ports(1), Ports::ByHalves);
        assert_eq!(ports(CROWD), Ports::ByHalves);
        assert_eq!(ports(CROWD + 1), Ports::InTurn);
    }
}
