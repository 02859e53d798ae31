// SPDX-License-Identifier: Apache-2.0

//! The binary as a daemon in a network namespace, with its log at hand.

#![allow(dead_code, reason = "each test program uses its own part")]

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use netlink::{Error, Netns};
use proxy::{
    app::{Proxy, Setup},
    config::check,
    flags::Options,
};
use rustix::process::{Pid, Signal, kill_process};

pub(crate) const BIN: &str = env!("CARGO_BIN_EXE_portolan");
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// `None`, with a word about it, where there are no privileges; but CI must have them.
pub(crate) fn privileged<T>(made: Result<T, impl std::fmt::Display>) -> Option<T> {
    match made {
        Ok(made) => Some(made),
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "this test must have privileges in CI: {error}");
            println!("skipped: {error}");
            None
        }
    }
}

/// A namespace with an address to serve on.
pub(crate) fn node() -> Result<Netns, Error> {
    let netns = Netns::new()?;
    netns.run(|| {
        let mut route = netlink::route::Route::open()?;
        let lo = route.link_index("lo")?;
        route.add_address(lo, [192, 0, 2, 5].into(), 32)?;
        route.set_up(lo, true)
    })??;
    Ok(netns)
}

#[track_caller]
pub(crate) fn until(what: &str, mut check: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !check() {
        assert!(Instant::now() < end, "not in time: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// The same inside this process, with what it counts at hand; all services are in force when it returns.
pub(crate) fn in_process(netns: &Netns, args: &[String]) -> Proxy {
    let (mut options, _) = Options::parse(args).expect("valid flags");
    options.complete().expect("no file to fail");
    let checked = check::check(&options.config).expect("valid");
    let flags = options.listing();
    let Options { config, source, master, .. } = options;
    let netns = Some(netns.try_clone().expect("a second handle"));
    let proxy = Proxy::start(Setup { config, checked, source, master, flags, netns }).expect("it starts");
    proxy.status.commit_after(0, PATIENCE).expect("a first commit");
    proxy
}

/// Ends the child, however the test ends.
pub(crate) struct Daemon {
    child: Child,
    log: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Daemon {
    pub(crate) fn spawn(netns: &Netns, args: &[&str]) -> Daemon {
        let mut command = Command::new(BIN);
        command.args(args);
        Daemon::of(netns, command)
    }

    /// Any command that becomes the daemon.
    pub(crate) fn of(netns: &Netns, mut command: Command) -> Daemon {
        // A child starts in the namespace of the thread that made it.
        let spawn = || command.stderr(Stdio::piped()).stdin(Stdio::null()).spawn();
        let mut child = netns.run(spawn).expect("entered").expect("spawned");
        let log = Arc::new(Mutex::new(String::new()));
        let (lines, sink) = (BufReader::new(child.stderr.take().expect("piped")).lines(), Arc::clone(&log));
        let read = move || {
            for line in lines.map_while(Result::ok) {
                let mut log = sink.lock().expect("unpoisoned");
                log.push_str(&line);
                log.push('\n');
            }
        };
        Daemon { child, log, reader: Some(thread::spawn(read)) }
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().expect("unpoisoned").clone()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it lives");
    }

    /// Its exit code and all it wrote, when it has ended.
    pub(crate) fn wait(mut self) -> (Option<i32>, String) {
        until("it ends", || self.child.try_wait().expect("a child").is_some());
        let status = self.child.wait().expect("it has ended");
        if let Some(reader) = self.reader.take() {
            reader.join().expect("it only reads");
        }
        (status.code(), self.log())
    }
}

/// The exit code and everything that was printed.
pub(crate) fn run_in(netns: &Netns, args: &[&str]) -> (Option<i32>, String) {
    let run = || Command::new(BIN).args(args).output();
    let output = netns.run(run).expect("entered").expect("it runs");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

pub(crate) fn fetch(netns: &Netns, port: u16, path: &str) -> Option<String> {
    let ask = || {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        Some(text)
    };
    netns.run(ask).expect("entered")
}
