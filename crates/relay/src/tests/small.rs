// SPDX-License-Identifier: Apache-2.0

//! A few bytes at a time: they are read and sent rather than spliced, and acknowledged with an answer if one comes soon.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use socket2::SockRef;

use super::{Bench, Echo, connect};
use crate::settings::Settings;

/// The median time of `work`, so that a busy machine does not matter.
fn usual(mut work: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..9)
        .map(|_| {
            let begun = Instant::now();
            work();
            begun.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

/// The second piece waits for the first to be acknowledged, as Nagle has it, and the answer waits for both.
#[test]
fn a_question_in_two_pieces_is_not_held_up() {
    let bench = Bench::new(Settings::default());
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let (_, address) = bench.tcp(&[listener.local_addr().expect("an address")]);
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut question = [0; 10];
            if stream.read_exact(&mut question).is_ok() {
                let _ = stream.write_all(b"!");
            }
        }
    });
    let time = usual(|| {
        let mut client = connect(address);
        client.write_all(b"hello").expect("sent");
        client.write_all(b"again").expect("sent");
        client.read_exact(&mut [0]).expect("an answer");
    });
    assert!(time < Duration::from_millis(30), "the kernel alone would wait for 40 ms: {time:?}");
}

/// The endpoint knows that it is connected before the client has said anything.
#[test]
fn an_endpoint_that_speaks_first_is_not_held_up() {
    let bench = Bench::new(Settings::default());
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let (_, address) = bench.tcp(&[listener.local_addr().expect("an address")]);
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.write_all(b"220 welcome\r\n");
        }
    });
    let time = usual(|| {
        let mut greeting = Vec::new();
        connect(address).read_to_end(&mut greeting).expect("a greeting");
        assert_eq!(greeting, b"220 welcome\r\n");
    });
    assert!(time < Duration::from_millis(30), "the kernel alone would wait for 200 ms: {time:?}");
}

/// Small pieces to a reader that is slow: what the socket does not take waits in a pipe, and nothing is lost or out of order.
#[test]
fn small_pieces_for_a_slow_reader_arrive_whole() {
    let bench = Bench::new(Settings::default());
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let (_, address) = bench.tcp(&[listener.local_addr().expect("an address")]);
    let text: Vec<u8> = (0..16_u32 << 20).map(|at| (at / 7 % 251) as u8).collect();
    let to_send = text.clone();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        stream.set_nodelay(true).expect("an option");
        to_send.chunks(3_001).for_each(|piece| stream.write_all(piece).expect("sent"));
    });
    let mut client = connect(address);
    let mut received = Vec::new();
    for _ in 0..20 {
        let mut some = [0; 5_000];
        client.read_exact(&mut some).expect("a part");
        received.extend_from_slice(&some);
        thread::sleep(Duration::from_millis(10));
    }
    client.read_to_end(&mut received).expect("the rest");
    server.join().expect("all is sent");
    assert!(received == text, "{} bytes of {}", received.len(), text.len());
    assert_eq!(bench.relay.counters().copied_bytes.value(), 0, "there was a pipe");
}

/// A splice stops at urgent data for ever. The byte itself is for whoever asks for it, as without a relay.
#[test]
fn urgent_data_does_not_stop_a_stream() {
    let bench = Bench::new(Settings::default());
    let echo = Echo::start();
    let (_, address) = bench.tcp(&[echo.address]);
    for len in [10, 300_000] {
        let mut client: TcpStream = connect(address);
        let mut writer = client.try_clone().expect("a clone");
        let sender = thread::spawn(move || {
            writer.write_all(&vec![b'a'; len]).expect("sent");
            SockRef::from(&writer).send_out_of_band(b"!").expect("sent");
            writer.write_all(&vec![b'b'; len]).expect("sent");
            writer.shutdown(std::net::Shutdown::Write).expect("ended");
        });
        let mut received = Vec::new();
        client.read_to_end(&mut received).expect("all of it");
        sender.join().expect("all is sent");
        let count = |byte| received.iter().filter(|it| **it == byte).count();
        assert_eq!((count(b'a'), count(b'b')), (len, len), "{} bytes", received.len());
    }
}
