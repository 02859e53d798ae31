// SPDX-License-Identifier: Apache-2.0

//! Datagrams.

use std::{
    net::{SocketAddr, UdpSocket},
    thread,
    time::Duration,
};

use super::{Bench, PATIENCE, give, until};
use crate::{
    counters::Refusal,
    relay::{Listen, Transport},
    settings::{ServiceSettings, Settings},
};

/// Answers with its own port.
fn answering() -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let address = socket.local_addr().expect("an address");
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((_, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&address.port().to_be_bytes(), from);
        }
    });
    address
}

fn client(to: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.connect(to).expect("connected");
    socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    socket
}

fn ask(socket: &UdpSocket) -> u16 {
    socket.send(b"who").expect("sent");
    let mut answer = [0; 2];
    socket.recv(&mut answer).expect("an answer");
    u16::from_be_bytes(answer)
}

fn bench(settings: Settings) -> Bench {
    Bench::new(settings)
}

#[test]
fn a_flow_stays_with_its_endpoint_until_it_is_idle() {
    let bench = bench(Settings { udp_timeout: Duration::from_millis(300), ..Settings::default() });
    let endpoints = [answering(), answering()];
    let (_, address) = bench.serve(Transport::Udp, ServiceSettings::default(), &endpoints);
    let (one, two) = (client(address), client(address));
    let (first, second) = (ask(&one), ask(&two));
    assert_ne!(first, second, "one after the other");
    for _ in 0..10 {
        assert_eq!((ask(&one), ask(&two)), (first, second));
    }
    assert_eq!(bench.relay.counters().flows.value(), 2);
    until("both are forgotten", || bench.relay.counters().open_flows.value() == 0);
    ask(&one);
    assert_eq!(bench.relay.counters().flows.value(), 3);
}

#[test]
fn a_flow_moves_when_its_endpoint_goes() {
    let bench = bench(Settings::default());
    let endpoints = [answering(), answering()];
    let (service, address) = bench.serve(Transport::Udp, ServiceSettings::default(), &endpoints);
    let socket = client(address);
    let first = ask(&socket);
    let left = endpoints.iter().find(|endpoint| endpoint.port() != first).expect("the other one");
    give(&service, ServiceSettings::default(), &[*left]);
    assert_eq!(ask(&socket), left.port());
    // With nobody left, nobody answers.
    give(&service, ServiceSettings::default(), &[]);
    socket.set_read_timeout(Some(Duration::from_millis(200))).expect("a timeout");
    socket.send(b"who").expect("sent");
    assert!(socket.recv(&mut [0; 2]).is_err());
    until("it is counted", || bench.relay.counters().refused(Refusal::Endpoints) >= 1);
}

#[test]
fn an_endpoint_that_is_not_there_is_left() {
    let bench = bench(Settings::default());
    let nobody = UdpSocket::bind("127.0.0.1:0").expect("a socket").local_addr().expect("an address");
    let there = answering();
    let (_, address) = bench.serve(Transport::Udp, ServiceSettings::default(), &[nobody, there]);
    // A datagram that meets nobody is lost, as any may be. Whose turn is first is not known, so two clients ask.
    let clients = [client(address), client(address)];
    until("the absence is noticed", || {
        clients.iter().for_each(|socket| drop(socket.send(b"who")));
        bench.relay.counters().ejections.value() == 1
    });
    for _ in 0..6 {
        assert_eq!(ask(&client(address)), there.port(), "it is set aside");
    }
}

#[test]
fn the_oldest_flow_makes_room() {
    let bench = bench(Settings { workers: 1, flows: 8, ..Settings::default() });
    let endpoint = answering();
    let services = [(); 2].map(|()| bench.serve(Transport::Udp, ServiceSettings::default(), &[endpoint]).1);
    let flood: Vec<UdpSocket> = (0..6).map(|_| client(services[0])).collect();
    flood.iter().for_each(|socket| assert_eq!(ask(socket), endpoint.port()));
    // A seventh of one service is one too many.
    let seventh = client(services[0]);
    seventh.set_read_timeout(Some(Duration::from_millis(200))).expect("a timeout");
    seventh.send(b"who").expect("sent");
    assert!(seventh.recv(&mut [0; 2]).is_err());
    let others: Vec<UdpSocket> = (0..4).map(|_| client(services[1])).collect();
    others.iter().for_each(|socket| assert_eq!(ask(socket), endpoint.port()));
    let counters = bench.relay.counters();
    assert_eq!((counters.open_flows.value(), counters.evicted_flows.value()), (8, 2));
    assert_eq!(counters.refused(Refusal::Service), 1);
}

/// A listener for all addresses of the node answers each client as the address it has sent to.
#[test]
fn a_listener_on_all_addresses_answers_as_the_right_one() {
    let bench = Bench::new(Settings::default());
    let server = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let endpoint = server.local_addr().expect("an address");
    thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((len, from)) = server.recv_from(&mut buffer) {
            let _ = server.send_to(&buffer[..len], from);
        }
    });
    let any = Listen::at(Transport::Udp, "0.0.0.0:0".parse().expect("an address"));
    let port = bench.relay.listen(any).expect("a listener").address.port();
    for address in ["127.0.0.1", "127.0.0.7"] {
        let at = SocketAddr::new(address.parse().expect("an address"), port);
        bench.place(at, &[endpoint]);
        let client = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        client.set_read_timeout(Some(super::PATIENCE)).expect("a timeout");
        for _ in 0..2 {
            client.send_to(b"hello", at).expect("sent");
            let (_, from) = client.recv_from(&mut [0; 64]).expect("an answer");
            assert_eq!(from, at);
        }
    }
    assert_eq!(bench.relay.counters().flows.value(), 2);
}
