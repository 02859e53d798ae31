// SPDX-License-Identifier: Apache-2.0

//! Clients and the endpoint.

use std::{
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rustix::net;

use super::Places;

/// A process that sends without end on one port, and answers a byte on another.
pub(super) struct Endpoint {
    pub(super) bulk: SocketAddr,
    pub(super) short: SocketAddr,
    child: Child,
}

impl Endpoint {
    pub(super) fn start(places: &Places) -> Result<Endpoint> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("relay-endpoint").arg(places.endpoint_ip.to_string());
        let mut child = places.endpoint.spawn(command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("it is piped")?).read_line(&mut line)?;
        let (bulk, short) = line.trim().split_once(' ').context("the endpoint says where it listens")?;
        Ok(Endpoint { bulk: bulk.parse()?, short: short.parse()?, child })
    }

    pub(super) fn process(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What that process does, until it is ended.
pub(super) fn serve(ip: IpAddr) -> Result<()> {
    ::relay::relay::descriptors(1 << 20);
    let (sender, answerer) = (TcpListener::bind((ip, 0))?, TcpListener::bind((ip, 0))?);
    println!("{} {}", sender.local_addr()?, answerer.local_addr()?);
    // One thread for each processor is enough: a connection is served in the time of two system calls.
    for _ in 0..2 {
        let answerer = answerer.try_clone()?;
        thread::spawn(move || answer(&answerer));
    }
    for mut stream in sender.incoming().flatten() {
        thread::spawn(move || {
            let block = vec![0x5a; 256 * 1024];
            while stream.write_all(&block).is_ok() {}
        });
    }
    Ok(())
}

/// Answers the first byte if it is there within a moment, and keeps silent connections open.
fn answer(listener: &TcpListener) {
    let (mut silent, mut full) = (Vec::new(), 64);
    for mut stream in listener.incoming().flatten() {
        let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
        let mut byte = [0];
        match stream.read(&mut byte) {
            Ok(1) if byte == *b"i" => {
                let _ = stream.write_all(b"!");
                silent.push(stream);
            }
            Ok(1) => {
                let _ = stream.write_all(b"!");
            }
            _ => (),
        }
        // Each is looked at a few times only, however many there are.
        if silent.len() >= full {
            silent.retain(|stream| !has_ended(stream));
            full = (2 * silent.len()).max(64);
        }
    }
}

fn has_ended(stream: &TcpStream) -> bool {
    let _ = stream.set_nonblocking(true);
    !matches!((&*stream).read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
}

/// Bytes received by so many streams in so much time.
pub(super) fn bulk(places: &Places, from: SocketAddr, streams: usize, time: Duration) -> Result<u64> {
    let (stop, bytes) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut clients = Vec::new();
    for _ in 0..streams {
        let mut stream = places.client.run(|| TcpStream::connect(from))?.context("connecting for bulk")?;
        let (stop, bytes) = (Arc::clone(&stop), Arc::clone(&bytes));
        clients.push(thread::spawn(move || {
            let mut buffer = vec![0; 256 * 1024];
            while !stop.load(Ordering::Relaxed) {
                match stream.read(&mut buffer) {
                    Ok(len) if len > 0 => bytes.fetch_add(len as u64, Ordering::Relaxed),
                    _ => return false,
                };
            }
            true
        }));
    }
    thread::sleep(time);
    let received = bytes.load(Ordering::Relaxed);
    stop.store(true, Ordering::Relaxed);
    let all_well = clients.into_iter().all(|client| client.join().unwrap_or(false));
    anyhow::ensure!(all_well, "a bulk connection ended early");
    Ok(received)
}

/// Connections with one byte each way, so many at a time in so much time.
pub(super) fn short(places: &Places, to: SocketAddr, streams: usize, time: Duration) -> Result<u64> {
    let until = Instant::now() + time;
    let clients: Vec<_> = (0..streams)
        .map(|_| {
            let client = places.client.clone();
            thread::spawn(move || client.run(|| one_by_one(to, until))?)
        })
        .collect();
    let mut total = 0;
    for client in clients {
        total += client.join().map_err(|_| anyhow::anyhow!("a client panicked"))??;
    }
    Ok(total)
}

fn one_by_one(to: SocketAddr, until: Instant) -> Result<u64> {
    let mut count = 0;
    while Instant::now() < until {
        let mut stream = TcpStream::connect(to).context("connecting")?;
        stream.set_nodelay(true)?;
        stream.write_all(b"s")?;
        stream.read_exact(&mut [0]).context("waiting for the answer")?;
        count += 1;
    }
    Ok(count)
}

/// So many connections that have said one byte each way, and stay.
pub(super) fn idle(to: SocketAddr, count: usize) -> Result<Vec<TcpStream>> {
    let mut kept = Vec::with_capacity(count);
    for number in 0..count {
        let stream = if to.ip().is_loopback() { connect_as_many(to, number) } else { TcpStream::connect(to) };
        let mut stream = stream.with_context(|| format!("idle connection {number}"))?;
        stream.write_all(b"i")?;
        stream.read_exact(&mut [0]).with_context(|| format!("answer of idle connection {number}"))?;
        kept.push(stream);
    }
    Ok(kept)
}

/// Connects from one of several addresses, each with a part of the connections: from one alone the kernel would spend most of the
/// time on its search for a port, once half of them are in use.
fn connect_as_many(to: SocketAddr, number: usize) -> std::io::Result<TcpStream> {
    const EACH: usize = 10_000;
    let from = Ipv4Addr::new(127, 0, 1, 1 + (number / EACH) as u8);
    let socket = net::socket(net::AddressFamily::INET, net::SocketType::STREAM, None)?;
    net::bind(&socket, &SocketAddr::from((from, 0)))?;
    net::connect(&socket, &to)?;
    Ok(socket.into())
}
