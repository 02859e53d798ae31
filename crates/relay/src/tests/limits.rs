// SPDX-License-Identifier: Apache-2.0

//! What is too much is refused and counted, and others are served.

use std::net::TcpStream;

use super::{Bench, Echo, ask, is_refused, until};
use crate::{
    counters::Refusal,
    relay::{Listen, Transport},
    settings::{ServiceSettings, Settings},
};

#[test]
fn a_service_has_a_limit_of_its_own() {
    let bench = Bench::new(Settings::default());
    let echo = Echo::start();
    let settings = ServiceSettings { connections: Some(3), ..ServiceSettings::default() };
    let (service, limited) = bench.serve(Transport::Tcp, settings, &[echo.address]);
    let (_, other) = bench.tcp(&[echo.address]);
    let kept: Vec<TcpStream> = (0..3).map(|_| ask(limited).expect("an answer")).collect();
    assert!(is_refused(limited));
    ask(other).expect("others are served");
    assert_eq!(bench.relay.counters().refused(Refusal::Service), 1);
    assert_eq!(service.refused.value(), 1);
    drop(kept);
    until("there is room again", || service.open.value() == 0);
    ask(limited).expect("an answer");
}

#[test]
fn one_service_cannot_take_everything() {
    let bench = Bench::new(Settings { connections: 8, ..Settings::default() });
    let echo = Echo::start();
    let (_, greedy) = bench.tcp(&[echo.address]);
    let (_, other) = bench.tcp(&[echo.address]);
    let _kept: Vec<TcpStream> = (0..6).map(|_| ask(greedy).expect("an answer")).collect();
    assert!(is_refused(greedy), "it has three quarters");
    let _others: Vec<TcpStream> = (0..2).map(|_| ask(other).expect("an answer")).collect();
    assert!(is_refused(other));
    let counters = bench.relay.counters();
    assert_eq!((counters.refused(Refusal::Service), counters.refused(Refusal::Connections)), (1, 1));
}

#[test]
fn nobody_is_where_nobody_is() {
    let bench = Bench::new(Settings::default());
    let listen = Listen::at(Transport::Tcp, "127.0.0.1:0".parse().expect("an address"));
    let bound = bench.relay.listen(listen).expect("a listener");
    assert!(is_refused(bound.address));
    let (_, empty) = bench.tcp(&[]);
    assert!(is_refused(empty));
    let counters = bench.relay.counters();
    assert_eq!((counters.refused(Refusal::Unknown), counters.refused(Refusal::Endpoints)), (1, 1));
    bench.relay.unlisten(bound.id);
    until("the listener is gone", || TcpStream::connect(bound.address).is_err());
}

#[test]
fn ports_come_from_the_range_that_is_asked_for() {
    let bench = Bench::new(Settings::default());
    // Three neighbours that are free now; others may take them meanwhile, so more than one try is allowed.
    let found = (0..50).any(|_| {
        let start = super::nobody().port().min(65_000);
        let ports = start..=start + 2;
        let address = "127.0.0.1:0".parse().expect("an address");
        let listen = Listen { ports: Some(ports.clone()), ..Listen::at(Transport::Tcp, address) };
        let bound: Vec<_> = (0..4).map(|_| bench.relay.listen(listen.clone())).collect();
        let ours: Vec<u16> = bound.iter().flatten().map(|bound| bound.address.port()).collect();
        assert!(ours.iter().all(|port| ports.contains(port)), "{ours:?} of {ports:?}");
        assert!(ours.len() <= 3 && bound.iter().any(Result::is_err), "{bound:?}");
        ours.len() == 3
    });
    assert!(found, "a port of the range is used only once");
}

#[test]
fn descriptors_are_divided() {
    for descriptors in [100, 1_024, 20_000, 1_000_000] {
        let Settings { connections, flows, pipes, .. } = Settings::default().within(descriptors);
        let used = 2 * (connections + flows + pipes);
        assert!(used <= descriptors && used >= descriptors / 3, "{used} of {descriptors}");
    }
}

/// Thousands of listeners cost one descriptor each, whatever the number of workers; and whoever waits at the door when one
/// is closed is still served.
#[test]
fn a_listener_can_be_shared_by_all_workers() {
    let bench = Bench::new(Settings { workers: 4, ..Settings::default() });
    let echo = Echo::start();
    let listen =
        Listen { shared: true, ..Listen::at(Transport::Tcp, "127.0.0.1:0".parse().expect("an address")) };
    let bound = bench.relay.listen(listen).expect("a listener");
    let service = bench.place(bound.address, &[echo.address]);
    let kept: Vec<TcpStream> = (0..200).map(|_| ask(bound.address).expect("an answer")).collect();
    assert_eq!(service.open.value(), 200);
    bench.relay.unlisten(bound.id);
    until("the listener is gone", || TcpStream::connect(bound.address).is_err());
    drop(kept);
    until("all are gone", || service.open.value() == 0);
}
