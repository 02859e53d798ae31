// SPDX-License-Identifier: Apache-2.0

//! Who gets whom: balance, affinity, retry, ejection, checks.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use socket2::{Domain, Socket, Type};

use super::{Bench, Echo, ask, connect, give, is_refused, nobody, until};
use crate::{
    counters::Refusal,
    relay::Transport,
    settings::{Algorithm, Check, CheckKind, ServiceSettings, Settings},
};

fn with(algorithm: Algorithm) -> ServiceSettings {
    ServiceSettings { algorithm, ..ServiceSettings::default() }
}

#[test]
fn round_robin_is_even_and_follows_weights() {
    let bench = Bench::new(Settings::default());
    let echoes = [Echo::start(), Echo::start(), Echo::start()];
    let addresses = echoes.each_ref().map(|echo| echo.address);
    let (service, address) = bench.tcp(&addresses);
    (0..12).for_each(|_| drop(ask(address)));
    assert_eq!(echoes.each_ref().map(Echo::met), [4, 4, 4]);
    service.update(ServiceSettings::default(), &[(addresses[0], 3), (addresses[1], 1), (addresses[2], 0)]);
    (0..12).for_each(|_| drop(ask(address)));
    assert_eq!(echoes.each_ref().map(Echo::met), [13, 7, 4]);
}

#[test]
fn the_least_busy_is_found() {
    for algorithm in [Algorithm::LeastConnections, Algorithm::RandomOfTwo] {
        let bench = Bench::new(Settings::default());
        let echoes = [Echo::start(), Echo::start()];
        let addresses = echoes.each_ref().map(|echo| echo.address);
        let (service, address) = bench.serve(Transport::Tcp, with(algorithm), &addresses[..1]);
        let kept: Vec<TcpStream> = (0..20).map(|_| ask(address).expect("an answer")).collect();
        give(&service, with(algorithm), &addresses);
        let more: Vec<TcpStream> = (0..16).map(|_| ask(address).expect("an answer")).collect();
        // Of two drawn at random both may be the busy one.
        let least = if algorithm == Algorithm::LeastConnections { 16 } else { 5 };
        assert!(echoes[1].met() >= least, "{algorithm:?}: {}", echoes[1].met());
        drop((kept, more));
    }
}

#[test]
fn the_same_client_gets_the_same_endpoint_by_hash() {
    let bench = Bench::new(Settings::default());
    let echoes = [Echo::start(), Echo::start(), Echo::start()];
    let addresses = echoes.each_ref().map(|echo| echo.address);
    let (_, address) = bench.serve(Transport::Tcp, with(Algorithm::SourceHash), &addresses);
    (0..9).for_each(|_| drop(ask(address)));
    let mut met = echoes.each_ref().map(Echo::met);
    met.sort_unstable();
    assert_eq!(met, [0, 0, 9]);
}

#[test]
fn a_client_is_remembered_until_it_is_forgotten() {
    let bench = Bench::new(Settings::default());
    let echoes = [Echo::start(), Echo::start()];
    let addresses = echoes.each_ref().map(|echo| echo.address);
    let affinity = Some(Duration::from_millis(400));
    let settings = ServiceSettings { affinity, ..ServiceSettings::default() };
    let (service, address) = bench.serve(Transport::Tcp, settings.clone(), &addresses);
    (0..6).for_each(|_| drop(ask(address)));
    let first = usize::from(echoes[0].met() == 0);
    assert_eq!((echoes[first].met(), echoes[1 - first].met()), (6, 0));
    thread::sleep(Duration::from_millis(600));
    drop(ask(address));
    assert_eq!(echoes[1 - first].met(), 1, "it is the other one's turn");
    // The endpoint goes: its clients are forgotten.
    give(&service, settings, &addresses[first..=first]);
    assert_eq!(service.remembered(), 0);
    drop(ask(address));
    assert_eq!(echoes[first].met(), 7);
}

#[test]
fn the_table_of_clients_is_bounded() {
    use crate::service::{Asking, Service};
    let service = Service::new("test");
    let affinity = Some(Duration::from_secs(60));
    give(&service, ServiceSettings { affinity, ..ServiceSettings::default() }, &[nobody()]);
    for client in 0..1_000_u32 {
        let asking = Asking { client: client.to_be_bytes().into(), tried: &[], now: 1, remembered: 100 };
        service.pick(asking).expect("an endpoint");
    }
    assert_eq!(service.remembered(), 100);
}

#[test]
fn who_refuses_is_followed_by_the_next_and_set_aside() {
    let bench = Bench::new(Settings::default());
    let echo = Echo::start();
    let affinity = Some(Duration::from_secs(60));
    let settings = ServiceSettings { affinity, ..ServiceSettings::default() };
    let (service, address) = bench.serve(Transport::Tcp, settings, &[nobody(), echo.address]);
    for _ in 0..10 {
        ask(address).expect("no client notices");
    }
    let counters = bench.relay.counters();
    assert_eq!(echo.met(), 10);
    let refused = Refusal::ALL.map(|why| counters.refused(why));
    assert_eq!(refused, [0; Refusal::ALL.len()]);
    assert!(counters.failed_attempts.value() <= 2, "it is asked only once in a while");
    assert_eq!(counters.retries.value(), counters.failed_attempts.value());
    let roster = service.roster();
    assert_eq!(roster.members[0].endpoint.failures.value(), counters.failed_attempts.value());
}

#[test]
fn the_last_ones_are_never_set_aside() {
    let bench = Bench::new(Settings { ejection: Duration::from_secs(60), ..Settings::default() });
    let at = nobody();
    let (_, address) = bench.tcp(&[at]);
    assert!(is_refused(address), "refused, as without us");
    let counters = bench.relay.counters();
    assert_eq!((counters.refused(Refusal::Unreachable), counters.ejections.value()), (1, 0));
    // It comes to life, and is asked at once.
    let listener = TcpListener::bind(at).expect("a listener");
    let _client = connect(address);
    listener.accept().expect("a connection");
}

/// Listens, but takes nobody in: connections to it hang.
pub(super) fn silent() -> (Socket, Vec<TcpStream>, SocketAddr) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.bind(&"127.0.0.1:0".parse::<SocketAddr>().expect("an address").into()).expect("bound");
    socket.listen(0).expect("listening");
    let address = socket.local_addr().expect("an address").as_socket().expect("an IP address");
    let mut taken = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(300)) {
        taken.push(stream);
        assert!(taken.len() < 100, "it takes everybody in");
    }
    (socket, taken, address)
}

#[test]
fn who_never_answers_is_followed_by_the_next() {
    let bench = Bench::new(Settings::default());
    let (_socket, _taken, hangs) = silent();
    let echo = Echo::start();
    let (service, address) = bench.tcp(&[hangs, echo.address]);
    let begin = Instant::now();
    for _ in 0..4 {
        ask(address).expect("an answer");
    }
    assert!(begin.elapsed() < Duration::from_secs(8), "{:?}", begin.elapsed());
    assert!(service.retries.value() >= 1);
    assert!(bench.relay.counters().ejections.value() >= 1);

    // Alone it has the whole budget, and no more.
    let bench = Bench::new(Settings { all_attempts: Duration::from_millis(600), ..Settings::default() });
    let (_, address) = bench.tcp(&[hangs]);
    assert!(is_refused(address));
    assert_eq!(bench.relay.counters().refused(Refusal::Unreachable), 1);
}

#[test]
fn attempts_are_counted() {
    let bench = Bench::new(Settings { attempts: 3, ..Settings::default() });
    let dead: Vec<SocketAddr> = (0..8).map(|_| nobody()).collect();
    let (_, address) = bench.tcp(&dead);
    assert!(is_refused(address));
    let counters = bench.relay.counters();
    until("given up", || counters.refused(Refusal::Unreachable) == 1);
    assert_eq!((counters.failed_attempts.value(), counters.retries.value()), (3, 2));
}

/// Answers every request with this status.
fn web(status: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().expect("an address");
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut request = [0; 1024];
            let _ = stream.read(&mut request);
            let _ = write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
        }
    });
    address
}

#[test]
fn checks_find_out_who_lives() {
    let bench = Bench::new(Settings::default());
    for (kind, bad) in
        [(CheckKind::Connect, nobody()), (CheckKind::Http("/healthz".into()), web("503 Service Unavailable"))]
    {
        let good = web("204 No Content");
        let interval = Duration::from_millis(50);
        let check = Some(Check { kind, interval, timeout: Duration::from_secs(5), threshold: 2 });
        let settings = ServiceSettings { check, ..ServiceSettings::default() };
        let (service, _) = bench.serve(Transport::Tcp, settings, &[bad, good]);
        let service = Arc::clone(&service);
        bench.relay.check(&service);
        let healthy =
            || service.roster().members.iter().map(|it| it.endpoint.is_healthy()).collect::<Vec<_>>();
        until("the bad one is found", || healthy() == [false, true]);
        // Without checks nobody is suspected.
        give(&service, ServiceSettings::default(), &[bad, good]);
        assert_eq!(healthy(), [true, true]);
    }
}

/// The better of two draws: nobody gets more than his share by much, and who is busy gets less.
#[test]
fn of_two_at_random_the_less_busy_is_taken() {
    let bench = Bench::new(Settings::default());
    let echoes = [Echo::start(), Echo::start(), Echo::start()];
    let endpoints = [0, 1, 2].map(|at: usize| echoes[at].address);
    let (service, address) = bench.serve(Transport::Tcp, with(Algorithm::RandomOfTwo), &endpoints);
    let kept: Vec<TcpStream> = (0..90).map(|_| ask(address).expect("an answer")).collect();
    let met = [0, 1, 2].map(|at: usize| echoes[at].met());
    assert!(met.iter().all(|count| (20..=40).contains(count)), "{met:?}");
    drop(kept);
    until("all are gone", || service.open.value() == 0);
}

/// Twice as much for twice the weight, and nothing for none.
#[test]
fn weights_count_for_chance_and_for_who_is_least_busy() {
    for algorithm in [Algorithm::Random, Algorithm::LeastConnections, Algorithm::RandomOfTwo] {
        let bench = Bench::new(Settings::default());
        let echoes = [Echo::start(), Echo::start(), Echo::start()];
        let endpoints: Vec<(SocketAddr, u32)> =
            echoes.iter().map(|echo| echo.address).zip([1, 3, 0]).collect();
        let (service, address) = bench.serve(Transport::Tcp, with(algorithm), &[]);
        service.update(with(algorithm), &endpoints);
        let _kept: Vec<TcpStream> = (0..80).map(|_| ask(address).expect("an answer")).collect();
        let met = [0, 1, 2].map(|at: usize| echoes[at].met());
        assert!(met[2] == 0 && met[0] * 3 / 2 < met[1], "{algorithm:?}: {met:?}");
    }
}
