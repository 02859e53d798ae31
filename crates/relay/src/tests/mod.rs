// SPDX-License-Identifier: Apache-2.0

//! Real sockets on loopback.

mod carry;
mod choose;
mod flood;
mod limits;
mod small;
mod udp;

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{
    counters::Refusal,
    relay::{Arrival, Directory, Listen, Relay, Transport},
    service::Service,
    settings::{ServiceSettings, Settings},
};

pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Which service is where.
#[derive(Default)]
pub(super) struct Places(Mutex<Vec<(SocketAddr, Arc<Service>)>>);

impl Directory for Places {
    fn find(&self, arrival: &Arrival) -> Result<Arc<Service>, Refusal> {
        let places = self.0.lock().expect("nobody panics in here");
        let place = places.iter().find(|(at, _)| *at == arrival.destination);
        place.map(|(_, service)| Arc::clone(service)).ok_or(Refusal::Unknown)
    }
}

/// A relay and its directory.
pub(super) struct Bench {
    pub(super) relay: Relay,
    places: Arc<Places>,
}

impl Bench {
    pub(super) fn new(settings: Settings) -> Bench {
        let places = Arc::new(Places::default());
        let directory: Arc<dyn Directory> = places.clone();
        Bench { relay: Relay::start(settings, directory).expect("a relay"), places }
    }

    /// A service on a loopback address, and where it is.
    pub(super) fn serve(
        &self,
        transport: Transport,
        settings: ServiceSettings,
        endpoints: &[SocketAddr],
    ) -> (Arc<Service>, SocketAddr) {
        let service = Arc::new(Service::new("test"));
        give(&service, settings, endpoints);
        let listen = Listen::at(transport, "127.0.0.1:0".parse().expect("an address"));
        let bound = self.relay.listen(listen).expect("a listener");
        self.places.0.lock().expect("not poisoned").push((bound.address, Arc::clone(&service)));
        (service, bound.address)
    }

    /// A service at an address where somebody listens already.
    pub(super) fn place(&self, at: SocketAddr, endpoints: &[SocketAddr]) -> Arc<Service> {
        let service = Arc::new(Service::new("placed"));
        give(&service, ServiceSettings::default(), endpoints);
        self.places.0.lock().expect("not poisoned").push((at, Arc::clone(&service)));
        service
    }

    pub(super) fn tcp(&self, endpoints: &[SocketAddr]) -> (Arc<Service>, SocketAddr) {
        self.serve(Transport::Tcp, ServiceSettings::default(), endpoints)
    }
}

pub(super) fn give(service: &Service, settings: ServiceSettings, endpoints: &[SocketAddr]) {
    let members: Vec<(SocketAddr, u32)> = endpoints.iter().map(|address| (*address, 1)).collect();
    service.update(settings, &members);
}

/// Says its name to everyone and then echoes; remembers how many came.
pub(super) struct Echo {
    pub(super) address: SocketAddr,
    pub(super) met: Arc<AtomicUsize>,
}

impl Echo {
    pub(super) fn start() -> Echo {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let address = listener.local_addr().expect("an address");
        let met = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&met);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                count.fetch_add(1, Ordering::Relaxed);
                thread::spawn(move || echo(stream));
            }
        });
        Echo { address, met }
    }

    pub(super) fn met(&self) -> usize {
        self.met.load(Ordering::Relaxed)
    }
}

fn echo(mut stream: TcpStream) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(len) = stream.read(&mut buffer) {
        if len == 0 || stream.write_all(&buffer[..len]).is_err() {
            break;
        }
    }
    let _ = stream.shutdown(std::net::Shutdown::Write);
}

pub(super) fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&to, PATIENCE).expect("connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream.set_write_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// The client gets a reset, which may come while it still connects.
pub(super) fn is_refused(to: SocketAddr) -> bool {
    let Ok(mut stream) = TcpStream::connect_timeout(&to, PATIENCE) else { return true };
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let error = stream.read(&mut [0; 1]).err();
    error.is_some_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
}

/// One question and its answer.
pub(super) fn ask(to: SocketAddr) -> std::io::Result<TcpStream> {
    let mut stream = connect(to);
    stream.write_all(b"hello")?;
    let mut answer = [0; 5];
    stream.read_exact(&mut answer)?;
    assert_eq!(&answer, b"hello");
    Ok(stream)
}

/// An address where nobody listens.
pub(super) fn nobody() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").expect("a listener").local_addr().expect("an address")
}

#[track_caller]
pub(super) fn until(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "never: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}
