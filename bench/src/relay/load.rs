// SPDX-License-Identifier: Apache-2.0

//! Clients and the endpoint.

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

/// Sends without end on one port, and answers a byte on another.
pub(super) struct Endpoint {
    pub(super) bulk: SocketAddr,
    pub(super) short: SocketAddr,
}

impl Endpoint {
    pub(super) fn start() -> Result<Endpoint> {
        let (sender, answerer) = (TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?);
        let endpoint = Endpoint { bulk: sender.local_addr()?, short: answerer.local_addr()? };
        thread::spawn(move || {
            for mut stream in sender.incoming().flatten() {
                thread::spawn(move || {
                    let block = vec![0x5a; 256 * 1024];
                    while stream.write_all(&block).is_ok() {}
                });
            }
        });
        // One thread for each processor is enough: a connection is served in the time of two system calls.
        for _ in 0..2 {
            let answerer = answerer.try_clone()?;
            thread::spawn(move || answer(&answerer));
        }
        Ok(endpoint)
    }
}

/// Answers the first byte if it is there within a moment, and keeps silent connections open.
fn answer(listener: &TcpListener) {
    let mut silent = Vec::new();
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
        if silent.len() >= 64 && silent.len().is_multiple_of(64) {
            silent.retain(|stream| !has_ended(stream));
        }
    }
}

fn has_ended(stream: &TcpStream) -> bool {
    let _ = stream.set_nonblocking(true);
    !matches!((&*stream).read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
}

/// Bytes received by so many streams in so much time.
pub(super) fn bulk(from: SocketAddr, streams: usize, time: Duration) -> Result<u64> {
    let (stop, bytes) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut clients = Vec::new();
    for _ in 0..streams {
        let mut stream = TcpStream::connect(from).context("connecting for bulk")?;
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
pub(super) fn short(to: SocketAddr, streams: usize, time: Duration) -> Result<u64> {
    let until = Instant::now() + time;
    let clients: Vec<_> = (0..streams)
        .map(|_| {
            thread::spawn(move || -> Result<u64> {
                let mut count = 0;
                while Instant::now() < until {
                    let mut stream = TcpStream::connect(to).context("connecting")?;
                    stream.set_nodelay(true)?;
                    stream.write_all(b"s")?;
                    stream.read_exact(&mut [0]).context("waiting for the answer")?;
                    count += 1;
                }
                Ok(count)
            })
        })
        .collect();
    let mut total = 0;
    for client in clients {
        total += client.join().map_err(|_| anyhow::anyhow!("a client panicked"))??;
    }
    Ok(total)
}

/// So many connections that have said one byte each way, and stay.
pub(super) fn idle(to: SocketAddr, count: usize) -> Result<Vec<TcpStream>> {
    let mut kept = Vec::with_capacity(count);
    for number in 0..count {
        let mut stream = TcpStream::connect(to).with_context(|| format!("idle connection {number}"))?;
        stream.write_all(b"i")?;
        stream.read_exact(&mut [0]).with_context(|| format!("answer of idle connection {number}"))?;
        kept.push(stream);
    }
    Ok(kept)
}
