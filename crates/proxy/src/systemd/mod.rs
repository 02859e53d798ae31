// SPDX-License-Identifier: Apache-2.0

//! What systemd is told of us: ready, reloading, stopping, and that the loop still goes round.
//!
//! The protocol is a datagram of `KEY=value` lines to the socket that `NOTIFY_SOCKET` names (sd_notify(3)). The
//! loop itself feeds the watchdog, on its own thread, after each round: if it hangs, nobody feeds. Without
//! the variable, all of this does nothing. Telling never blocks and never fails anybody.

use std::{
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use rustix::time::{ClockId, clock_gettime};

/// What could not be said is said again so soon: its socket's queue is short, and full when a machine boots.
const AGAIN: Duration = Duration::from_millis(100);

/// The service manager's ear.
#[derive(Default)]
pub struct Systemd {
    socket: Option<UnixDatagram>,
    /// Without a word for so long, it takes us for dead.
    watchdog: Option<Duration>,
    told: Mutex<Told>,
}

#[derive(Default)]
struct Told {
    ready: bool,
    fed: Option<Instant>,
    status: String,
    /// The last word was not taken. Logged once, for the socket may be gone for good.
    failed: bool,
}

impl Systemd {
    /// As the environment of this process says. A value that cannot be used is told in the log.
    pub fn from_environment() -> Systemd {
        let Some(address) = std::env::var_os("NOTIFY_SOCKET").filter(|address| !address.is_empty()) else {
            return Systemd::default();
        };
        let watchdog = interval(|name| std::env::var(name).ok());
        Systemd::open(&address, watchdog).unwrap_or_else(|error| {
            tracing::warn!(?address, %error, "cannot use NOTIFY_SOCKET; systemd will not hear from us");
            Systemd::default()
        })
    }

    /// Speaks to the socket at `address`: a path, or `@` and the name of an abstract socket.
    pub fn open(address: &OsStr, watchdog: Option<Duration>) -> io::Result<Systemd> {
        let address = match address.as_bytes() {
            [b'@', name @ ..] if !name.is_empty() => SocketAddr::from_abstract_name(name)?,
            [b'/', ..] => SocketAddr::from_pathname(address)?,
            _ => return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a path nor @ and a name")),
        };
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address)?;
        // A manager that does not read must not stop us.
        socket.set_nonblocking(true)?;
        Ok(Systemd { socket: Some(socket), watchdog, told: Mutex::default() })
    }

    /// Is there anybody to tell?
    pub fn listens(&self) -> bool {
        self.socket.is_some()
    }

    /// The loop has gone round; `serving` once the kernel holds everything. Returns when to come round again at
    /// the latest so that the watchdog stays fed.
    pub fn round(&self, now: Instant, serving: bool) -> Option<Instant> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if serving && !told.ready {
            told.ready = self.send(&mut told, "READY=1");
        }
        let again = (serving && !told.ready).then(|| now + AGAIN);
        let feeding = self.watchdog.map(|interval| self.feed(&mut told, now, interval / 3));
        again.into_iter().chain(feeding).min()
    }

    fn feed(&self, told: &mut Told, now: Instant, period: Duration) -> Instant {
        match told.fed.map(|fed| fed + period) {
            Some(next) if next > now => next,
            _ if self.send(told, "WATCHDOG=1") => {
                told.fed = Some(now);
                now + period
            }
            _ => now + AGAIN.min(period),
        }
    }

    /// What `systemctl status` shows; sent only when it differs.
    pub fn status(&self, text: &str) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let line = text.lines().next().unwrap_or_default();
        if told.status != line && self.send(&mut told, &format!("STATUS={line}")) {
            line.clone_into(&mut told.status);
        }
    }

    /// The configuration is being read again. Must be followed by [`Systemd::reloaded`], whatever comes of it.
    pub fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let micros = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1000;
        self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={micros}"));
    }

    /// The reload is over. Before the first programming the start goes on, and nothing is said.
    pub fn reloaded(&self) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.ready {
            self.send(&mut told, "READY=1");
        }
    }

    /// We end because we were asked to.
    pub fn stopping(&self) {
        self.tell("STOPPING=1");
    }

    fn tell(&self, words: &str) {
        self.send(&mut self.told.lock().unwrap_or_else(PoisonError::into_inner), words);
    }

    /// Was it taken? With nobody to tell it counts as told.
    fn send(&self, told: &mut Told, words: &str) -> bool {
        let Some(socket) = &self.socket else { return true };
        let sent = socket.send(words.as_bytes());
        let failed_before = std::mem::replace(&mut told.failed, sent.is_err());
        match sent {
            Err(error) if !failed_before => tracing::warn!(%error, words, "systemd does not listen"),
            _ => {}
        }
        !told.failed
    }
}

/// The watchdog's interval, if it is this process it watches.
fn interval(variable: impl Fn(&str) -> Option<String>) -> Option<Duration> {
    let number = |name| variable(name).and_then(|value| value.trim().parse::<u64>().ok());
    let ours =
        variable("WATCHDOG_PID").is_none() || number("WATCHDOG_PID") == Some(std::process::id().into());
    number("WATCHDOG_USEC").filter(|micros| ours && *micros > 0).map(Duration::from_micros)
}

#[cfg(test)]
mod tests;
