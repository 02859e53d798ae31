// SPDX-License-Identifier: Apache-2.0

//! One thread, one epoll, its own listeners and connections. Nothing is shared with other workers but services and
//! counters.

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError, mpsc::Sender},
};

use rustix::{
    buffer::spare_capacity,
    event::{EventfdFlags, Timespec, epoll, eventfd},
    io::Errno,
};
use slab::Slab;

use crate::{
    clock::{self, Millis, millis},
    counters::Counters,
    relay::{Directory, Listen, Transport},
    settings::Settings,
    tcp::Tcp,
    udp::Udp,
};

/// What all workers share.
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) counters: Counters,
    pub(crate) directory: Arc<dyn Directory>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// How a worker is told what to do.
#[derive(Debug)]
pub(crate) struct Inbox {
    commands: Mutex<Vec<Command>>,
    wake: OwnedFd,
}

#[derive(Debug)]
pub(crate) enum Command {
    Listen(Listener),
    Unlisten(u64),
    /// Ends UDP flows to endpoints that are no more, or all of them, and says so.
    Prune {
        all: bool,
        done: Sender<()>,
    },
    /// Closes everything, and ends.
    Stop,
}

/// A listener of one worker.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) id: u64,
    pub(crate) listen: Arc<Listen>,
    pub(crate) address: SocketAddr,
    pub(crate) socket: Arc<OwnedFd>,
}

impl Inbox {
    pub(crate) fn new() -> io::Result<Inbox> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Inbox { commands: Mutex::default(), wake })
    }

    pub(crate) fn send(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        // It can only fail when so many wakes wait that one more makes no difference.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    fn take(&self) -> Vec<Command> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
        std::mem::take(&mut *self.commands.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Whose event it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Token {
    Wake,
    Listener(usize),
    Tcp(usize, Peer),
    Udp(usize, Peer),
}

/// One of the two that are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    Client,
    Server,
}

impl Token {
    fn number(self) -> u64 {
        let side = |index: usize, peer: Peer| (index as u64) << 1 | u64::from(peer == Peer::Server);
        match self {
            Token::Wake => 0,
            Token::Listener(index) => 1 << 60 | index as u64,
            Token::Tcp(index, peer) => 2 << 60 | side(index, peer),
            Token::Udp(index, peer) => 3 << 60 | side(index, peer),
        }
    }

    fn from_number(number: u64) -> Token {
        let rest = number & ((1 << 60) - 1);
        let peer = if rest & 1 == 1 { Peer::Server } else { Peer::Client };
        match number >> 60 {
            0 => Token::Wake,
            1 => Token::Listener(rest as usize),
            2 => Token::Tcp((rest >> 1) as usize, peer),
            _ => Token::Udp((rest >> 1) as usize, peer),
        }
    }
}

/// What everything in a worker needs.
#[derive(Debug)]
pub(crate) struct Context {
    epoll: OwnedFd,
    pub(crate) shared: Arc<Shared>,
    /// When this round began.
    pub(crate) now: Millis,
}

impl Context {
    /// Events of this socket are told from now on, until it is closed.
    pub(crate) fn follow(&self, socket: impl AsFd, token: Token, what: epoll::EventFlags) -> io::Result<()> {
        let data = epoll::EventData::new_u64(token.number());
        epoll::add(&self.epoll, socket, data, what).map_err(Into::into)
    }
}

/// See the module.
pub(crate) struct Worker {
    context: Context,
    inbox: Arc<Inbox>,
    listeners: Slab<Listener>,
    tcp: Tcp,
    udp: Udp,
    swept: Millis,
}

impl Worker {
    pub(crate) fn new(shared: Arc<Shared>, inbox: Arc<Inbox>) -> io::Result<Worker> {
        let context = Context {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            shared: Arc::clone(&shared),
            now: clock::now(),
        };
        context.follow(&inbox.wake, Token::Wake, epoll::EventFlags::IN)?;
        Ok(Worker {
            context,
            inbox,
            listeners: Slab::new(),
            tcp: Tcp::new(&shared)?,
            udp: Udp::new(),
            swept: 0,
        })
    }

    pub(crate) fn run(mut self) {
        let mut events = Vec::with_capacity(512);
        while self.round(&mut events) {}
        self.tcp.close_all(&self.context);
        self.udp.close_all(&self.context);
    }

    /// Waits, and does what there is to do. `false` when it is time to end.
    fn round(&mut self, events: &mut Vec<epoll::Event>) -> bool {
        events.clear();
        let wait = self.wait().map(timespec);
        match epoll::wait(&self.context.epoll, spare_capacity(events), wait.as_ref()) {
            Ok(_) | Err(Errno::INTR) => (),
            // Nothing that is passed in can be wrong; a kernel that says so is asked again, but not in a hurry.
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(10)),
        }
        self.context.now = clock::now();
        let mut goes_on = true;
        for event in events.iter() {
            let (data, flags) = (event.data, event.flags);
            match Token::from_number(data.u64()) {
                Token::Wake => goes_on &= self.commands(),
                Token::Listener(index) => self.arrivals(index),
                Token::Tcp(index, peer) => self.tcp.event(&self.context, index, peer, flags),
                Token::Udp(index, peer) => self.udp.event(&self.context, &self.listeners, (index, peer)),
            }
        }
        self.tcp.resume(&self.context);
        self.tcp.expire(&self.context);
        self.tcp.acknowledge(self.context.now);
        if self.context.now >= self.swept + self.sweep_period() {
            self.swept = self.context.now;
            self.tcp.sweep(&self.context);
            self.udp.sweep(&self.context);
        }
        self.tcp.reclaim();
        self.udp.reclaim();
        goes_on
    }

    fn wait(&self) -> Option<Millis> {
        if self.tcp.is_busy() {
            return Some(0);
        }
        let now = clock::now();
        let has_work = !self.tcp.is_empty() || !self.udp.is_empty();
        let sweep = has_work.then(|| (self.swept + self.sweep_period()).saturating_sub(now));
        let dial = self.tcp.next_deadline().map(|at| at.saturating_sub(now));
        sweep.into_iter().chain(dial).min()
    }

    fn sweep_period(&self) -> Millis {
        (millis(self.context.shared.settings.udp_timeout) / 2).clamp(25, 1_000)
    }

    fn commands(&mut self) -> bool {
        for command in self.inbox.take() {
            match command {
                Command::Listen(listener) => {
                    let entry = self.listeners.vacant_entry();
                    let token = Token::Listener(entry.key());
                    let mut flags = epoll::EventFlags::IN;
                    // Of those who share a socket, one is woken for a client.
                    flags.set(epoll::EventFlags::EXCLUSIVE, listener.listen.shared);
                    // Out of memory at worst: then this worker serves no new clients here, but others do.
                    let _ = self.context.follow(&listener.socket, token, flags);
                    entry.insert(listener);
                }
                Command::Unlisten(id) => {
                    let of_it = self.listeners.iter().find(|(_, listener)| listener.id == id);
                    if let Some(index) = of_it.map(|(index, _)| index) {
                        // Whoever waits at the door would be reset with it.
                        self.arrivals(index);
                    }
                    self.udp.forget_listener(&self.context, id);
                    let Context { epoll, .. } = &self.context;
                    self.listeners.retain(|_, listener| {
                        if listener.id == id {
                            // Another worker may hold it for a moment longer.
                            let _ = epoll::delete(epoll, &listener.socket);
                        }
                        listener.id != id
                    });
                }
                Command::Prune { all, done } => {
                    if all {
                        self.udp.close_all(&self.context);
                    } else {
                        self.udp.prune(&self.context);
                    }
                    let _ = done.send(());
                }
                Command::Stop => return false,
            }
        }
        true
    }

    fn arrivals(&mut self, index: usize) {
        let Some(listener) = self.listeners.get(index) else { return };
        match listener.listen.transport {
            Transport::Tcp => self.tcp.accept(&self.context, listener),
            Transport::Udp => self.udp.receive(&self.context, &self.listeners, index),
        }
    }
}

fn timespec(wait: Millis) -> Timespec {
    Timespec { tv_sec: (wait / 1_000) as i64, tv_nsec: (wait % 1_000 * 1_000_000) as i64 }
}
