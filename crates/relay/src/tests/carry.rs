// SPDX-License-Identifier: Apache-2.0

//! Bytes, ends and resets.

use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use socket2::SockRef;

use super::{Bench, Echo, PATIENCE, ask, connect, give, until};
use crate::{
    relay::Transport,
    settings::{ServiceSettings, Settings},
};

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

/// Much in both directions at once, and an end that is passed on while the other direction goes on.
fn carries(settings: Settings) -> Bench {
    let bench = Bench::new(settings);
    let echo = Echo::start();
    let (_, address) = bench.tcp(&[echo.address]);
    let clients: Vec<_> = (0..4)
        .map(|_| {
            thread::spawn(move || {
                let stream = connect(address);
                let sent = pattern(3 << 20);
                let mut writer = stream.try_clone().expect("a clone");
                let to_send = sent.clone();
                let sender = thread::spawn(move || {
                    writer.write_all(&to_send).expect("sent");
                    writer.shutdown(Shutdown::Write).expect("half closed");
                });
                let mut received = Vec::new();
                (&stream).read_to_end(&mut received).expect("received");
                sender.join().expect("the sender is well");
                assert!(received == sent, "{} bytes of {}", received.len(), sent.len());
            })
        })
        .collect();
    clients.into_iter().for_each(|client| client.join().expect("all is well"));
    until("all are closed", || bench.relay.counters().open_connections.value() == 0);
    bench
}

#[test]
fn bytes_arrive_whole_and_ends_are_passed_on() {
    let bench = carries(Settings::default());
    let counters = bench.relay.counters();
    assert_eq!(counters.sent_bytes.value(), 4 * (3 << 20));
    assert_eq!(counters.received_bytes.value(), 4 * (3 << 20));
    assert_eq!(counters.copied_bytes.value(), 0, "nothing went through the process");
}

#[test]
fn without_pipes_bytes_are_copied() {
    let bench = carries(Settings { pipes: 0, ..Settings::default() });
    assert_eq!(bench.relay.counters().copied_bytes.value(), 8 * (3 << 20));
}

fn reset(stream: TcpStream) {
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).expect("linger");
}

#[test]
fn a_reset_is_passed_on_as_a_reset() {
    let bench = Bench::new(Settings::default());
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let (_, address) = bench.tcp(&[listener.local_addr().expect("an address")]);

    let mut client = connect(address);
    let (server, _) = listener.accept().expect("a connection");
    reset(server);
    let error = client.read(&mut [0; 8]).expect_err("a reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);

    let client = connect(address);
    let (mut server, _) = listener.accept().expect("a connection");
    server.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    reset(client);
    assert_eq!(server.read(&mut [0; 8]).expect_err("a reset").kind(), ErrorKind::ConnectionReset);
    until("all are closed", || bench.relay.counters().open_connections.value() == 0);
}

#[test]
fn a_slow_reader_holds_the_sender_back() {
    let bench = Bench::new(Settings::default());
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let (_, address) = bench.tcp(&[listener.local_addr().expect("an address")]);
    let client = connect(address);
    let (mut server, _) = listener.accept().expect("a connection");
    client.set_nonblocking(true).expect("nonblocking");
    let block = pattern(64 * 1024);
    let mut sent = 0;
    let mut idle = 0;
    while idle < 20 {
        match (&client).write(&block) {
            Ok(len) => (sent, idle) = (sent + len, 0),
            Err(_) => {
                idle += 1;
                thread::sleep(Duration::from_millis(10));
            }
        }
        assert!(sent < 256 << 20, "nothing holds the sender back");
    }
    assert!(bench.relay.counters().pipes.value() <= 2 * bench.relay.settings().workers);
    // Others are served meanwhile.
    let echo = Echo::start();
    let (_, other) = bench.tcp(&[echo.address]);
    ask(other).expect("an answer");
    drop(client);
    let mut received = 0;
    let mut buffer = vec![0; 1 << 20];
    while let Ok(len) = server.read(&mut buffer) {
        received += len;
        if len == 0 {
            break;
        }
    }
    assert_eq!(received, sent);
}

#[test]
fn an_endpoint_that_goes_keeps_its_connections_for_a_while() {
    let bench = Bench::new(Settings { drain: Duration::from_millis(700), ..Settings::default() });
    let (old, new) = (Echo::start(), Echo::start());
    let (service, address) = bench.tcp(&[old.address]);
    let mut stream = ask(address).expect("an answer");
    give(&service, ServiceSettings::default(), &[new.address]);
    stream.write_all(b"still").expect("sent");
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).expect("the old endpoint still answers");
    ask(address).expect("an answer");
    assert_eq!((old.met(), new.met()), (1, 1));
    assert_eq!(stream.read(&mut answer).expect("an orderly end, not a reset"), 0);
    until("it is counted", || bench.relay.counters().drained.value() == 1);
}

#[test]
fn half_of_a_connection_does_not_stay_for_ever() {
    let bench = Bench::new(Settings { half_closed: Duration::from_millis(300), ..Settings::default() });
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let (_, address) = bench.tcp(&[listener.local_addr().expect("an address")]);
    let client = connect(address);
    let (mut server, _) = listener.accept().expect("a connection");
    client.shutdown(Shutdown::Write).expect("half closed");
    assert_eq!(server.read(&mut [0; 8]).expect("the end"), 0);
    until("it is over", || bench.relay.counters().half_closed.value() == 1);
    assert_eq!((&client).read(&mut [0; 8]).expect("an orderly end"), 0);
}

#[test]
fn the_endpoint_learns_who_the_client_is() {
    let bench = Bench::new(Settings::default());
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let settings = ServiceSettings { proxy_protocol: true, ..ServiceSettings::default() };
    let endpoint: SocketAddr = listener.local_addr().expect("an address");
    let (_, address) = bench.serve(Transport::Tcp, settings, &[endpoint]);
    let mut client = connect(address);
    client.write_all(b"GET").expect("sent");
    let (mut server, _) = listener.accept().expect("a connection");
    let mut start = [0; 31];
    server.read_exact(&mut start).expect("a header and a request");
    let from = client.local_addr().expect("an address");
    assert_eq!(start[..28], crate::proxy_protocol::header(from, address)[..]);
    assert_eq!(&start[28..], b"GET");
}
