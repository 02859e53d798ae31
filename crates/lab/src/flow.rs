// SPDX-License-Identifier: Apache-2.0

//! Clients: one connection that asks who is there, once or as often as one likes.

use std::{
    io::{self, BufRead, BufReader, Write},
    net::{SocketAddr, TcpStream, UdpSocket},
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{RecvFlags, SendFlags, SocketFlags, SocketType, bind, connect, socket_with, sockopt},
};

use crate::{
    raw::{family, payload, raw_sctp},
    reply::Reply,
    respond::Transport,
    sctp::{Chunk, Segment},
};

/// From where to where, and how. The ports of the sources are chosen by the kernel, anew for each flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    pub source: std::net::IpAddr,
    pub destination: SocketAddr,
    pub transport: Transport,
}

/// What became of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Answered(Reply),
    /// ICMP port unreachable, or a TCP reset.
    Refused,
    TimedOut,
    Other(Errno),
}

/// One connection, or what stands for one: the same addresses and ports each time it is used.
#[derive(Debug)]
pub struct Flow {
    wire: Wire,
    route: Route,
    questions: u32,
}

#[derive(Debug)]
enum Wire {
    Tcp(BufReader<TcpStream>),
    Udp(UdpSocket),
    Sctp { socket: OwnedFd, port: u16 },
}

impl Flow {
    /// Opens a flow in the namespace of the calling thread; it can be used from any thread afterwards. Fails
    /// with the answer where opening already takes one: a TCP connection that is refused, or that times out.
    pub fn open(route: Route, patience: Duration) -> Result<Flow, Answer> {
        let wire = match route.transport {
            Transport::Tcp => dial(route, patience).map(|stream| Wire::Tcp(BufReader::new(stream))),
            Transport::Udp => UdpSocket::bind(SocketAddr::new(route.source, 0))
                .and_then(|socket| socket.connect(route.destination).map(|()| Wire::Udp(socket))),
            Transport::Sctp => raw_sctp(route.source).and_then(|socket| {
                connect(&socket, &SocketAddr::new(route.destination.ip(), 0))?;
                Ok(Wire::Sctp { socket, port: reserve_port(route.source)? })
            }),
        };
        Ok(Flow { wire: wire.map_err(|error| Answer::of(&error))?, route, questions: 0 })
    }

    /// Asks who is there, and waits so long for the answer.
    pub fn ask(&mut self, patience: Duration) -> Answer {
        self.questions += 1;
        match self.exchange(Instant::now() + patience) {
            Ok(reply) => Answer::Answered(reply),
            Err(error) => Answer::of(&error),
        }
    }

    fn exchange(&mut self, deadline: Instant) -> io::Result<Reply> {
        let question = self.questions;
        match &mut self.wire {
            Wire::Tcp(stream) => {
                stream.get_mut().write_all(format!("{question}\n").as_bytes())?;
                stream.get_ref().set_read_timeout(Some(left(deadline)?))?;
                let mut line = String::new();
                if stream.read_line(&mut line)? == 0 {
                    return Err(io::ErrorKind::ConnectionReset.into());
                }
                line.parse().map_err(|_| io::ErrorKind::InvalidData.into())
            }
            Wire::Udp(socket) => {
                // An error that is left from an earlier datagram belongs to that one.
                let _ = socket.take_error();
                repeat(
                    deadline,
                    || socket.send(question.to_string().as_bytes()).map(drop),
                    |wait| {
                        socket.set_read_timeout(Some(wait))?;
                        let mut buffer = [0; 2048];
                        let length = socket.recv(&mut buffer)?;
                        Ok(std::str::from_utf8(&buffer[..length]).ok().and_then(|line| line.parse().ok()))
                    },
                    question,
                )
            }
            Wire::Sctp { socket, port } => {
                let _ = sockopt::socket_error(&*socket);
                let init = Segment {
                    source_port: *port,
                    destination_port: self.route.destination.port(),
                    tag: 0,
                    chunk: Chunk::Init { tag: question },
                };
                let (packet, route, port) = (init.encode(), self.route, *port);
                repeat(
                    deadline,
                    || Ok(rustix::net::send(&*socket, &packet, SendFlags::empty()).map(drop)?),
                    |wait| {
                        sockopt::set_socket_timeout(&*socket, sockopt::Timeout::Recv, Some(wait))?;
                        let mut buffer = [0; 2048];
                        let (length, _) = rustix::net::recv(&*socket, &mut buffer, RecvFlags::empty())?;
                        Ok(greeting(&buffer[..length], route, port))
                    },
                    question,
                )
            }
        }
    }
}

impl Answer {
    fn of(error: &io::Error) -> Answer {
        match error.kind() {
            io::ErrorKind::ConnectionRefused => Answer::Refused,
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Answer::TimedOut,
            _ => Answer::Other(Errno::from_io_error(error).unwrap_or(Errno::PROTO)),
        }
    }
}

/// Sends now and once a second, and takes the first answer to this question.
fn repeat(
    deadline: Instant,
    mut send: impl FnMut() -> io::Result<()>,
    mut receive: impl FnMut(Duration) -> io::Result<Option<Reply>>,
    question: u32,
) -> io::Result<Reply> {
    // A packet filter that stops our own packet on its way out makes the call fail; whether it also sent an ICMP
    // error is seen when we listen, as for packets that are stopped farther away.
    let mut send = || match send() {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        sent => sent,
    };
    send()?;
    let mut sent = Instant::now();
    loop {
        if sent.elapsed() > RESEND {
            send()?;
            sent = Instant::now();
        }
        match receive(left(deadline)?.min(RESEND)) {
            Ok(Some(reply)) if reply.question == question => return Ok(reply),
            Ok(_) => {}
            Err(error) if is_too_early(error.kind()) => {}
            Err(error) => return Err(error),
        }
    }
}

const RESEND: Duration = Duration::from_secs(1);

/// Nothing was heard yet. A socket with a timeout is not asked again by the kernel when a signal comes.
fn is_too_early(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// The reply in an INIT ACK that is for this flow.
fn greeting(packet: &[u8], route: Route, port: u16) -> Option<Reply> {
    let segment = Segment::decode(payload(route.destination.ip(), packet)?)?;
    let Chunk::InitAck { cookie, .. } = segment.chunk else { return None };
    if segment.destination_port != port || segment.source_port != route.destination.port() {
        return None;
    }
    let reply: Reply = std::str::from_utf8(&cookie).ok()?.parse().ok()?;
    (reply.question == segment.tag).then_some(reply)
}

/// Raw sockets have no ports, so one is borrowed from UDP; nothing keeps it, and nothing else in a lab asks for
/// SCTP ports.
fn reserve_port(source: std::net::IpAddr) -> io::Result<u16> {
    Ok(UdpSocket::bind(SocketAddr::new(source, 0))?.local_addr()?.port())
}

/// A TCP connection from a chosen source. It is reset when it is closed, so that it leaves no TIME_WAIT behind:
/// a test that opens thousands would run out of ports.
fn dial(route: Route, patience: Duration) -> io::Result<TcpStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family(route.source), SocketType::STREAM, flags, None)?;
    bind(&socket, &SocketAddr::new(route.source, 0))?;
    match connect(&socket, &route.destination) {
        Ok(()) => {}
        Err(Errno::INPROGRESS) => {
            let deadline = Instant::now() + patience;
            loop {
                let wait = Timespec::try_from(left(deadline)?).map_err(|_| io::ErrorKind::InvalidInput)?;
                match poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&wait)) {
                    Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                    Ok(_) => break,
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
            sockopt::socket_error(&socket)??;
        }
        Err(errno) => return Err(errno.into()),
    }
    sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    let stream = TcpStream::from(socket);
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
