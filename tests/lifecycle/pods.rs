// SPDX-License-Identifier: Apache-2.0

//! Servers in pods that a test can look into: what they were told, whom they met, and whether they are well.

use std::{
    io::{self, BufRead, BufReader, ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use serde_json::{Value, json};
use stage::manifest;

use crate::bed::Bed;

const PATIENCE: Duration = Duration::from_secs(20);

/// Answers each line with its name, and each GET with what its health is, on one port and in both families. Ends when it
/// is dropped: from then on clients are refused.
pub(crate) struct PodServer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    name: &'static str,
    /// A PROXY header is expected, and told in the answer.
    is_told: bool,
    met: AtomicUsize,
    checked: AtomicUsize,
    is_sick: AtomicBool,
    ends: AtomicBool,
}

impl PodServer {
    pub(crate) fn start(bed: &Bed, name: &'static str, port: u16, is_told: bool) -> PodServer {
        let shared = Arc::new(Shared {
            name,
            is_told,
            met: AtomicUsize::new(0),
            checked: AtomicUsize::new(0),
            is_sick: AtomicBool::new(false),
            ends: AtomicBool::new(false),
        });
        let pod = bed.lab.netns(name).expect("a pod");
        let listener = pod.run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))).expect("a pod");
        let listener = listener.expect("the port is free");
        listener.set_nonblocking(true).expect("it can be asked without waiting");
        let its = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            while !its.ends.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((stream, _)) => {
                        let its = Arc::clone(&its);
                        thread::spawn(move || its.serve(stream));
                    }
                    Err(_) => thread::sleep(Duration::from_millis(5)),
                }
            }
        });
        PodServer { shared, thread: Some(thread) }
    }

    /// Clients so far; who only asks for its health is none.
    pub(crate) fn met(&self) -> usize {
        self.shared.met.load(Ordering::Relaxed)
    }

    /// GETs so far.
    pub(crate) fn checked(&self) -> usize {
        self.shared.checked.load(Ordering::Relaxed)
    }

    pub(crate) fn be_sick(&self, is_sick: bool) {
        self.shared.is_sick.store(is_sick, Ordering::Relaxed);
    }
}

impl Drop for PodServer {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn serve(&self, stream: TcpStream) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut stream = BufReader::new(stream);
        let told = if self.is_told { told(&mut stream)? } else { None };
        let told = told.map_or_else(String::new, |(client, destination)| format!(" {client} {destination}"));
        let mut line = String::new();
        while stream.read_line(&mut line)? > 0 {
            if line.starts_with("GET ") {
                self.checked.fetch_add(1, Ordering::Relaxed);
                let status = match self.is_sick.load(Ordering::Relaxed) {
                    true => "503 Service Unavailable",
                    false => "200 OK",
                };
                return write!(stream.get_mut(), "HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
            }
            self.met.fetch_add(1, Ordering::Relaxed);
            writeln!(stream.get_mut(), "{}{told}", self.name)?;
            line.clear();
        }
        Ok(())
    }
}

/// Client and destination by the header of the PROXY protocol, version 2; `None` for a connection of the proxy's own.
fn told(stream: &mut impl Read) -> io::Result<Option<(SocketAddr, SocketAddr)>> {
    let mut head = [0; 16];
    stream.read_exact(&mut head)?;
    let mut body = vec![0; usize::from(u16::from_be_bytes([head[14], head[15]]))];
    stream.read_exact(&mut body)?;
    let ip = |at: usize, len: usize| -> IpAddr {
        match <[u8; 4]>::try_from(&body[at..at + len]) {
            Ok(four) => Ipv4Addr::from(four).into(),
            Err(_) => Ipv6Addr::from(<[u8; 16]>::try_from(&body[at..at + len]).expect("an address")).into(),
        }
    };
    let port = |at: usize| u16::from_be_bytes([body[at], body[at + 1]]);
    let len = match (&head[..12], head[12], head[13], body.len()) {
        (b"\r\n\r\n\0\r\nQUIT\n", 0x20, 0, 0) => return Ok(None),
        (b"\r\n\r\n\0\r\nQUIT\n", 0x21, 0x11, 12) => 4,
        (b"\r\n\r\n\0\r\nQUIT\n", 0x21, 0x21, 36) => 16,
        _ => return Err(ErrorKind::InvalidData.into()),
    };
    let client = SocketAddr::new(ip(0, len), port(2 * len));
    Ok(Some((client, SocketAddr::new(ip(len, len), port(2 * len + 2)))))
}

/// One connection of a client.
pub(crate) struct Client {
    stream: BufReader<TcpStream>,
    pub(crate) address: SocketAddr,
}

impl Client {
    pub(crate) fn connect(bed: &Bed, from: &str, to: SocketAddr) -> io::Result<Client> {
        let netns = bed.lab.netns(from).expect("somebody in the lab");
        let stream = netns.run(|| TcpStream::connect_timeout(&to, PATIENCE)).expect("it can be entered")?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Client { address: stream.local_addr()?, stream: BufReader::new(stream) })
    }

    /// What the server says of itself.
    pub(crate) fn ask(&mut self) -> io::Result<String> {
        self.stream.get_mut().write_all(b"who\n")?;
        let mut line = String::new();
        match self.stream.read_line(&mut line)? {
            0 => Err(ErrorKind::ConnectionReset.into()),
            _ => Ok(line.trim().to_owned()),
        }
    }
}

/// A Service with annotations, and its slices that lead to another port of these pods.
pub(crate) fn service(bed: &Bed, service: Value, annotations: &[(&str, &str)], (pods, port): (&[&str], u16)) {
    let mut service = service;
    for (name, value) in annotations {
        service["metadata"]["annotations"][format!("portolan.dev/{name}")] = json!(value);
    }
    let name = service["metadata"]["name"].as_str().expect("a name").to_owned();
    let mut slices = manifest::slices(&name, pods);
    slices.iter_mut().for_each(|slice| slice["ports"][0]["port"] = json!(port));
    bed.put([service]);
    bed.put(slices);
}
