// SPDX-License-Identifier: Apache-2.0

//! Clients and endpoints that want no good, or are just slow: they take their share, and nobody else suffers.

use std::{
    io::{Read, Write},
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

use super::{Bench, Echo, ask, choose::silent, connect, is_refused, until};
use crate::{counters::Refusal, relay::Transport, settings::Settings};

/// As long as nobody waits for anybody. The machine may be busy, so it is not short.
const AT_ONCE: Duration = Duration::from_secs(4);

/// Clients whose endpoint never answers wait for it, up to the bound; more of them are turned away at once, and clients
/// of another service notice nothing.
#[test]
fn endpoints_that_never_answer_hold_up_nobody_else() {
    let bench = Bench::new(Settings {
        connections: 40,
        all_attempts: Duration::from_secs(5),
        workers: 1,
        ..Settings::default()
    });
    let (_socket, _taken, hangs) = silent();
    let (hung, at_hung) = bench.tcp(&[hangs]);
    let echo = Echo::start();
    let (_, other) = bench.tcp(&[echo.address]);
    let begin = Instant::now();
    let _waiting: Vec<TcpStream> = (0..30).map(|_| connect(at_hung)).collect();
    until("all of them wait", || hung.open.value() == 30);
    assert!(is_refused(at_hung), "the service has its share");
    for _ in 0..10 {
        ask(other).expect("others are served");
    }
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    let counters = bench.relay.counters();
    assert_eq!(counters.refused(Refusal::Service), 1);
    until("they are given up", || hung.open.value() == 0);
    assert_eq!(counters.refused(Refusal::Unreachable), 30);
    assert_eq!(counters.ejections.value(), 0, "it is the last one");
}

/// Clients that say a byte now and then, or nothing, hold a place each and no thread, no pipe, no turn of others.
#[test]
fn clients_that_dawdle_hold_up_nobody_else() {
    let bench = Bench::new(Settings { workers: 1, ..Settings::default() });
    let echo = Echo::start();
    let (slow, address) = bench.tcp(&[echo.address]);
    let (_, other) = bench.tcp(&[echo.address]);
    let mut dawdlers: Vec<TcpStream> = (0..200).map(|_| connect(address)).collect();
    until("all are there", || slow.open.value() == 200);
    let begin = Instant::now();
    for round in 0..5 {
        for stream in dawdlers.iter_mut().skip(round).step_by(7) {
            stream.write_all(b"x").expect("a byte");
        }
        for _ in 0..4 {
            ask(other).expect("others are served");
        }
    }
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    assert!(bench.relay.counters().pipes.value() < 20, "idle ones hold none");
    for stream in dawdlers.iter_mut().take(5) {
        stream.read_exact(&mut [0]).expect("its byte comes back");
    }
}

/// Clients that connect and are gone at once, as fast as they can.
#[test]
fn clients_that_come_and_go_leave_nothing_behind() {
    let bench = Bench::new(Settings::default());
    let echo = Echo::start();
    let (service, address) = bench.tcp(&[echo.address]);
    let (_, other) = bench.tcp(&[echo.address]);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..300).for_each(|_| drop(TcpStream::connect(address))));
        }
        for _ in 0..20 {
            ask(other).expect("others are served");
        }
    });
    until("all are gone", || service.open.value() == 0);
    let open = bench.relay.counters().open_connections.value();
    assert!(open <= 20, "{open}");
}

/// A UDP client that changes its port with every datagram gets a flow each, up to the bound.
#[test]
fn a_flood_of_flows_is_bounded() {
    let bench = Bench::new(Settings { flows: 32, workers: 1, ..Settings::default() });
    let sink = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let at = sink.local_addr().expect("an address");
    let (service, address) = bench.serve(Transport::Udp, Default::default(), &[at]);
    // Kept, or the kernel would give one port out twice.
    let clients: Vec<_> =
        (0..300).map(|_| std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket")).collect();
    for client in &clients {
        client.send_to(b"x", address).expect("sent");
    }
    let counters = bench.relay.counters();
    until("all were looked at", || {
        counters.flows.value() + counters.refused(Refusal::Service) + counters.refused(Refusal::Connections)
            == 300
    });
    assert!(counters.open_flows.value() <= 32 && service.open.value() <= 24);
}
