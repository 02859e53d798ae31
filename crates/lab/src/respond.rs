// SPDX-License-Identifier: Apache-2.0

//! Servers in pods: they answer each line, datagram or INIT with one line about themselves.
//!
//! All of a lab's responders are sockets in one thread: a socket stays in the namespace it was made in, whoever
//! uses it. They end with the [`Responders`].

use std::{
    collections::HashMap,
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::mpsc::{self, Receiver, Sender},
    thread::JoinHandle,
};

use netlink::Netns;
use rustix::{
    event::{EventfdFlags, epoll, eventfd},
    net::{RecvFlags, SendFlags},
};

use crate::{
    Error,
    raw::raw_sctp,
    reply::Reply,
    sctp::{Chunk, Segment},
};

/// How packets are carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    Tcp,
    Udp,
    Sctp,
}

/// The thread of all responders of a lab.
#[derive(Debug)]
pub(crate) struct Responders {
    /// `None` once it is to end.
    inbox: Option<Sender<(u64, Responder)>>,
    bell: OwnedFd,
    thread: Option<JoinHandle<()>>,
    next: u64,
}

impl Responders {
    pub(crate) fn start() -> Result<Responders, Error> {
        let (inbox, outbox) = mpsc::channel();
        let bell = eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| Error::os("eventfd", errno))?;
        let ear = bell.try_clone().map_err(|error| Error::io("dup", error))?;
        let poll =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|errno| Error::os("epoll_create", errno))?;
        listen(&poll, &ear, BELL).map_err(|errno| Error::os("epoll_ctl", errno))?;
        let table = Table { poll, bell: ear, inbox: outbox, responders: HashMap::new(), next: CONNECTIONS };
        let thread = std::thread::Builder::new()
            .name("responders".to_owned())
            .spawn(move || table.run())
            .map_err(|error| Error::io("clone", error))?;
        Ok(Responders { inbox: Some(inbox), bell, thread: Some(thread), next: BELL + 1 })
    }

    /// Answers on this address from now on, in the name of `by`. The socket is ready when this returns.
    pub(crate) fn add(
        &mut self,
        netns: &Netns,
        by: &str,
        transport: Transport,
        at: SocketAddr,
    ) -> Result<(), Error> {
        let socket = netns.run(|| Socket::bind(transport, at))?.map_err(|error| Error::io("bind", error))?;
        self.next += 1;
        if let Some(inbox) = &self.inbox {
            // The thread ends only after the sender is gone.
            let _ = inbox.send((self.next, Responder { by: by.to_owned(), at, socket }));
        }
        self.ring();
        Ok(())
    }

    fn ring(&self) {
        // It can only fail when the counter is full, and then the bell rings already.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

impl Drop for Responders {
    fn drop(&mut self) {
        self.inbox = None;
        self.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

const BELL: u64 = 0;
/// Numbers from here on are accepted connections, below it what was asked for.
const CONNECTIONS: u64 = 1 << 32;

/// What the thread works on.
struct Table {
    poll: OwnedFd,
    bell: OwnedFd,
    inbox: Receiver<(u64, Responder)>,
    responders: HashMap<u64, Responder>,
    next: u64,
}

impl Table {
    fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            match epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
            for event in &events {
                match event.data.u64() {
                    BELL if !self.collect() => return,
                    BELL => {}
                    number => self.serve(number),
                }
            }
        }
    }

    /// Takes new responders in; false when there will be no more.
    fn collect(&mut self) -> bool {
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        loop {
            match self.inbox.try_recv() {
                Ok((number, responder)) => self.insert(number, responder),
                Err(mpsc::TryRecvError::Empty) => return true,
                Err(mpsc::TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn insert(&mut self, number: u64, responder: Responder) {
        if listen(&self.poll, responder.socket.as_fd(), number).is_ok() {
            self.responders.insert(number, responder);
        }
    }

    fn serve(&mut self, number: u64) {
        let Some(responder) = self.responders.get(&number) else { return };
        match responder.serve() {
            Ok(None) => {}
            Ok(Some(connection)) => {
                self.next += 1;
                self.insert(self.next, connection);
            }
            // A connection that ended. Closing the socket takes it out of the poll.
            Err(_) if number > CONNECTIONS => drop(self.responders.remove(&number)),
            // An error of one peer says nothing about the next.
            Err(_) => {}
        }
    }
}

fn listen(poll: &OwnedFd, fd: impl AsFd, number: u64) -> rustix::io::Result<()> {
    epoll::add(poll, fd, epoll::EventData::new_u64(number), epoll::EventFlags::IN)
}

/// A socket, and who it speaks for.
struct Responder {
    by: String,
    at: SocketAddr,
    socket: Socket,
}

enum Socket {
    Listener(TcpListener),
    Connection(TcpStream, SocketAddr),
    Udp(UdpSocket),
    Sctp(OwnedFd),
}

impl Socket {
    fn bind(transport: Transport, at: SocketAddr) -> io::Result<Socket> {
        Ok(match transport {
            Transport::Tcp => {
                let listener = TcpListener::bind(at)?;
                listener.set_nonblocking(true)?;
                Socket::Listener(listener)
            }
            Transport::Udp => {
                let socket = UdpSocket::bind(at)?;
                socket.set_nonblocking(true)?;
                Socket::Udp(socket)
            }
            Transport::Sctp => {
                let socket = raw_sctp(at.ip())?;
                rustix::io::ioctl_fionbio(&socket, true)?;
                Socket::Sctp(socket)
            }
        })
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Socket::Listener(socket) => socket.as_fd(),
            Socket::Connection(socket, _) => socket.as_fd(),
            Socket::Udp(socket) => socket.as_fd(),
            Socket::Sctp(socket) => socket.as_fd(),
        }
    }
}

impl Responder {
    /// Answers what is there; a listener returns the connection it accepted.
    fn serve(&self) -> io::Result<Option<Responder>> {
        let reply = |question, source_seen| Reply { by: self.by.clone(), at: self.at, source_seen, question };
        let mut buffer = [0; 2048];
        match &self.socket {
            Socket::Listener(listener) => {
                let (stream, peer) = listener.accept()?;
                stream.set_nonblocking(true)?;
                return Ok(Some(Responder {
                    by: self.by.clone(),
                    at: self.at,
                    socket: Socket::Connection(stream, peer),
                }));
            }
            Socket::Connection(stream, peer) => {
                let mut stream: &TcpStream = stream;
                let length = stream.read(&mut buffer)?;
                if length == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                // A question is short and sent at once, so it comes in one piece.
                let question = question(&buffer[..length]).ok_or(io::ErrorKind::InvalidData)?;
                stream.write_all(format!("{}\n", reply(question, *peer)).as_bytes())?;
            }
            Socket::Udp(socket) => {
                let (length, peer) = socket.recv_from(&mut buffer)?;
                if let Some(question) = question(&buffer[..length]) {
                    socket.send_to(reply(question, peer).to_string().as_bytes(), peer)?;
                }
            }
            Socket::Sctp(socket) => {
                let (received, _, peer) = rustix::net::recvfrom(socket, &mut buffer, RecvFlags::empty())?;
                let peer = peer
                    .and_then(|peer| SocketAddr::try_from(peer).ok())
                    .ok_or(io::ErrorKind::InvalidData)?;
                if let Some((to, answer)) = self.greet(&buffer[..received], peer.ip()) {
                    rustix::net::sendto(socket, &answer, SendFlags::empty(), &SocketAddr::new(to, 0))?;
                }
            }
        }
        Ok(None)
    }

    /// The answer to an INIT for our port, if it is one. The initiate tag is the question's number.
    fn greet(&self, packet: &[u8], from: IpAddr) -> Option<(IpAddr, Vec<u8>)> {
        let init = Segment::decode(crate::raw::payload(from, packet)?)?;
        let Chunk::Init { tag } = init.chunk else { return None };
        if init.destination_port != self.at.port() {
            return None;
        }
        let source_seen = SocketAddr::new(from, init.source_port);
        let reply = Reply { by: self.by.clone(), at: self.at, source_seen, question: tag };
        let answer = Segment {
            source_port: init.destination_port,
            destination_port: init.source_port,
            tag,
            chunk: Chunk::InitAck { tag: tag.wrapping_add(1).max(1), cookie: reply.to_string().into_bytes() },
        };
        Some((from, answer.encode()))
    }
}

fn question(bytes: &[u8]) -> Option<u32> {
    std::str::from_utf8(bytes).ok()?.trim().parse().ok()
}
