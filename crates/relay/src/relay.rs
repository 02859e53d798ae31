// SPDX-License-Identifier: Apache-2.0

//! The handle on the whole: starts workers, adds listeners, drains.

use std::{
    io,
    net::SocketAddr,
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{
    balance,
    check::Checker,
    counters::{Counters, Refusal},
    service::Service,
    settings::Settings,
    socket,
    worker::{Command, Inbox, Listener, Shared, Worker},
};

/// Knows which service an arrival is for. Asked by every worker, for each new connection and flow.
pub trait Directory: Send + Sync {
    /// Or why the client is refused.
    fn find(&self, arrival: &Arrival) -> Result<Arc<Service>, Refusal>;
}

/// A client that has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// What the listener was given as [`Listen::tag`].
    pub tag: u32,
    /// How it came.
    pub transport: Transport,
    /// Who it is.
    pub client: SocketAddr,
    /// Whom it wanted to reach.
    pub destination: SocketAddr,
}

/// TCP or UDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Transport {
    Tcp,
    Udp,
}

/// A listener that is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    /// TCP or UDP.
    pub transport: Transport,
    /// Where; with port 0 the kernel chooses one.
    pub address: SocketAddr,
    /// If the port is 0: only from these.
    pub ports: Option<RangeInclusive<u16>>,
    /// Clients have sent to other addresses; needs CAP_NET_ADMIN.
    pub transparent: bool,
    /// Bind to an address that is not there yet.
    pub freebind: bool,
    /// One socket for all workers, where there are thousands of listeners; else each has its own, and they do not meet.
    pub shared: bool,
    /// Told to the [`Directory`] with each arrival.
    pub tag: u32,
}

impl Listen {
    /// A plain listener.
    pub fn at(transport: Transport, address: SocketAddr) -> Listen {
        Listen { transport, address, ports: None, transparent: false, freebind: false, shared: false, tag: 0 }
    }

    /// Clients have sent to many addresses: each flow needs to know to which, and answers as that one.
    pub(crate) fn is_for_many(&self) -> bool {
        self.transparent || self.address.ip().is_unspecified()
    }
}

/// A listener that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// For [`Relay::unlisten`].
    pub id: u64,
    /// Where it listens.
    pub address: SocketAddr,
}

/// See the module. When it is dropped, everything is closed.
#[derive(Debug)]
pub struct Relay {
    shared: Arc<Shared>,
    workers: Vec<(Arc<Inbox>, JoinHandle<()>)>,
    checker: Checker,
    next_id: AtomicU64,
}

impl Relay {
    /// Starts the workers, in the network namespace of this thread.
    pub fn start(settings: Settings, directory: Arc<dyn Directory>) -> io::Result<Relay> {
        let count = settings.workers.max(1);
        let shared = Arc::new(Shared { settings, counters: Counters::default(), directory });
        let checker = Checker::default();
        let mut relay =
            Relay { shared: Arc::clone(&shared), workers: Vec::new(), checker, next_id: AtomicU64::new(1) };
        for number in 0..count {
            let inbox = Arc::new(Inbox::new()?);
            let worker = Worker::new(Arc::clone(&shared), Arc::clone(&inbox))?;
            let thread =
                thread::Builder::new().name(format!("relay-{number}")).spawn(move || worker.run())?;
            relay.workers.push((inbox, thread));
        }
        Ok(relay)
    }

    /// Listens, in the network namespace of this thread. Connections spread over all workers; so do the flows of a
    /// transparent listener, those of another one stay with one worker.
    pub fn listen(&self, listen: Listen) -> io::Result<Bound> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let wanted = port(&listen)?;
        let first = socket::listener(&listen, wanted)?;
        let address = socket::local_address(&first).unwrap_or(wanted);
        let mut sockets = vec![Arc::new(first)];
        if listen.transport == Transport::Tcp || listen.transparent {
            for _ in 1..self.workers.len() {
                sockets.push(match listen.shared {
                    true => Arc::clone(&sockets[0]),
                    false => Arc::new(socket::listener(&listen, address)?),
                });
            }
        }
        let listen = Arc::new(listen);
        for (place, socket) in sockets.into_iter().enumerate() {
            let (inbox, _) = &self.workers[(id as usize + place) % self.workers.len()];
            inbox.send(Command::Listen(Listener { id, listen: Arc::clone(&listen), address, socket }));
        }
        Ok(Bound { id, address })
    }

    /// Stops listening. Connections go on, also those that wait to be accepted; UDP flows of this listener end.
    pub fn unlisten(&self, id: u64) {
        self.workers.iter().for_each(|(inbox, _)| inbox.send(Command::Unlisten(id)));
    }

    /// Ends UDP flows to endpoints that are no more, now and not with their next datagram.
    pub fn prune(&self) {
        self.end_flows_of(false);
    }

    /// Ends all UDP flows, now.
    pub fn end_flows(&self) {
        self.end_flows_of(true);
    }

    fn end_flows_of(&self, all: bool) {
        let (done, all_done) = mpsc::channel();
        let command = || Command::Prune { all, done: done.clone() };
        self.workers.iter().for_each(|(inbox, _)| inbox.send(command()));
        drop(done);
        // A worker with its hands full does it later.
        let until = Instant::now() + Duration::from_millis(200);
        while all_done.recv_timeout(until.saturating_duration_since(Instant::now())).is_ok() {}
    }

    /// Asks the endpoints of this service whether they live, as long as its settings say so.
    pub fn check(&self, service: &Arc<Service>) {
        self.checker.watch(service);
    }

    /// What is counted.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// What it was started with.
    pub fn settings(&self) -> &Settings {
        &self.shared.settings
    }

    /// Waits until no connection is open, `enough` says so, or the time is over. Returns whether none is open.
    pub fn drained(&self, bound: Duration, enough: impl Fn() -> bool) -> bool {
        let until = Instant::now() + bound;
        let is_empty = || self.counters().open_connections.value() == 0;
        while !is_empty() && !enough() && Instant::now() < until {
            thread::sleep(Duration::from_millis(20));
        }
        is_empty()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.workers.iter().for_each(|(inbox, _)| inbox.send(Command::Stop));
        for (_, thread) in self.workers.drain(..) {
            // A worker that panicked has closed its sockets too.
            let _ = thread.join();
        }
    }
}

/// Where to bind: the address as it is, or with a free port of the range.
fn port(listen: &Listen) -> io::Result<SocketAddr> {
    let Some(ports) = listen.ports.as_ref().filter(|_| listen.address.port() == 0) else {
        return Ok(listen.address);
    };
    let count = usize::from(ports.end().saturating_sub(*ports.start())) + 1;
    let begin = balance::random() as usize % count;
    let candidates = (0..count).map(|at| ports.start() + ((begin + at) % count) as u16);
    let mut addresses = candidates.map(|port| SocketAddr::new(listen.address.ip(), port));
    addresses.find(|address| socket::is_free(listen.transport, *address)).ok_or_else(|| {
        let says = format!("no port from {} to {} is free", ports.start(), ports.end());
        io::Error::new(io::ErrorKind::AddrInUse, says)
    })
}

/// Raises the limit of descriptors of this process as far as it may, and returns what it is then.
pub fn descriptors(wanted: u64) -> usize {
    let now = getrlimit(Resource::Nofile);
    let (soft, hard) = (now.current.unwrap_or(wanted), now.maximum.unwrap_or(wanted));
    if soft >= wanted {
        return soft as usize;
    }
    let highest = hard.max(wanted);
    // More than the hard limit takes a privilege.
    for (limit, maximum) in [(wanted, highest), (wanted.min(hard), hard)] {
        let new = Rlimit { current: Some(limit), maximum: Some(maximum) };
        if setrlimit(Resource::Nofile, new).is_ok() {
            return limit as usize;
        }
    }
    soft as usize
}
