// SPDX-License-Identifier: Apache-2.0

//! Answers for every endpoint, and asks as a client: one connection, one request, one answer.
//!
//! The answer is the address the request reached, so the asker learns which endpoint a service chose. The
//! asker ends the connection with a reset: neither side keeps it in TIME_WAIT, and ports do not run out.

use std::{
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result};

use crate::{ground::Namespace, objects::TARGET_PORT};

/// Enough that one silent connection does not hold up the others.
const ACCEPTORS: usize = 4;
const REQUEST: &[u8; 16] = b"GET /who-are-you";

/// Listens until dropped.
pub struct Responder {
    stop: Arc<AtomicBool>,
    acceptors: Vec<JoinHandle<()>>,
    namespace: Namespace,
}

impl Responder {
    /// Starts answering on every address of `namespace`.
    pub fn start(namespace: &Namespace) -> Result<Responder> {
        let listener = namespace
            .run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, TARGET_PORT)))?
            .context("listening for the endpoints")?;
        let stop = Arc::new(AtomicBool::new(false));
        let mut acceptors = Vec::new();
        for _ in 0..ACCEPTORS {
            let (listener, stop) = (listener.try_clone()?, stop.clone());
            acceptors.push(thread::spawn(move || accept(&listener, &stop)));
        }
        Ok(Responder { stop, acceptors, namespace: namespace.clone() })
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Each connection wakes one acceptor, whichever it is: all are made before the first is waited for.
        for _ in &self.acceptors {
            let _ = self.namespace.run(|| TcpStream::connect((Ipv4Addr::LOCALHOST, TARGET_PORT)));
        }
        for acceptor in self.acceptors.drain(..) {
            let _ = acceptor.join();
        }
    }
}

fn accept(listener: &TcpListener, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let Ok((connection, _)) = listener.accept() else { continue };
        // An asker that went away is his own loss.
        let _ = answer(connection);
    }
}

fn answer(mut connection: TcpStream) -> std::io::Result<()> {
    connection.set_read_timeout(Some(Duration::from_millis(200)))?;
    let IpAddr::V4(reached) = connection.local_addr()?.ip() else { return Ok(()) };
    let mut request = [0; REQUEST.len()];
    connection.read_exact(&mut request)?;
    connection.write_all(&reached.octets())?;
    // Until the asker resets: who closes first would keep TIME_WAIT.
    connection.read(&mut request).map(|_| ())
}

/// Asks `frontend` who serves it. Must run inside the client's namespace.
pub fn ask(frontend: SocketAddrV4, patience: Duration) -> std::io::Result<Ipv4Addr> {
    let mut connection = TcpStream::connect_timeout(&SocketAddr::V4(frontend), patience)?;
    connection.set_read_timeout(Some(patience))?;
    connection.set_nodelay(true)?;
    rustix::net::sockopt::set_socket_linger(&connection, Some(Duration::ZERO))?;
    connection.write_all(REQUEST)?;
    let mut reached = [0; 4];
    connection.read_exact(&mut reached)?;
    Ok(Ipv4Addr::from(reached))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_names_the_address_that_was_reached() {
        let Ok(namespace) = Namespace::new() else {
            assert!(std::env::var_os("CI").is_none(), "CI must be able to make network namespaces");
            println!("skipped: network namespaces need root");
            return;
        };
        let responder = Responder::start(&namespace).unwrap();
        let asked = SocketAddrV4::new(Ipv4Addr::new(127, 1, 2, 3), TARGET_PORT);
        let reached = namespace.run(|| ask(asked, Duration::from_secs(5))).unwrap().unwrap();
        assert_eq!(reached, *asked.ip());
        drop(responder);
        assert!(namespace.run(|| ask(asked, Duration::from_secs(5))).unwrap().is_err());
    }
}
