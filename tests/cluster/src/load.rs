// SPDX-License-Identifier: Apache-2.0

//! Traffic that goes on while something happens, and the count of what suffered.
//!
//! For each target there are open TCP streams, open UDP flows, and new TCP connections one after the other. A stream
//! or flow must be answered by the same endpoint from the same source port each time: if its tracking entry had been
//! thrown away, another endpoint or another masqueraded port would show.

use std::{
    fmt,
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, ScopedJoinHandle},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use lab::{
    Answer, Flow, Lab, Route, Transport,
    address::{NODE_A, Version, address_of},
};
use testkit::pace::slowness;

use crate::{eventually, manifest};

/// A connection that is not there by then has failed. A lost packet is sent again after a second, so most are only slow.
const PATIENCE: Duration = Duration::from_secs(5);
/// A connection that took so long has lost a packet, or the machine is very busy.
const SLOW: Duration = Duration::from_secs(1);
/// Open streams, and open UDP flows, for each target.
const STREAMS: usize = 4;
const FLOWS: usize = 8;
/// Between two questions of one thread.
const PAUSE: Duration = Duration::from_millis(3);

/// Who talks to what.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    pub from: &'static str,
    pub to: SocketAddr,
}

/// From everywhere to the service `web`: a pod, a process of the node, and a client from outside by the node port.
pub fn everywhere(node_port: u16) -> Vec<Line> {
    let cluster_ip = |version| SocketAddr::new(manifest::cluster_ip(version, 10), 80);
    let node_port = |version: Version| SocketAddr::new(version.address(NODE_A), node_port);
    vec![
        Line { from: "a3", to: cluster_ip(Version::V4) },
        Line { from: "a3", to: cluster_ip(Version::V6) },
        Line { from: "node-a", to: cluster_ip(Version::V4) },
        Line { from: "client", to: node_port(Version::V4) },
        Line { from: "client", to: node_port(Version::V6) },
    ]
}

/// What became of the load.
#[derive(Debug, Default)]
pub struct Counts {
    /// New TCP connections that were tried.
    pub connections: u64,
    /// Those that took over a second; not a failure by itself, as a busy machine causes it too.
    pub slow: u64,
    /// TCP streams that were open all the time, and questions on them.
    pub streams: u64,
    pub stream_questions: u64,
    /// UDP flows that were open all the time, and questions on them.
    pub flows: u64,
    pub flow_questions: u64,
    /// Each connection that failed, stream that broke, and flow that broke or moved; in words.
    pub failures: Vec<String>,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} connections tried ({} slow), {} streams ({} questions), {} UDP flows ({} questions): {} failures",
            self.connections,
            self.slow,
            self.streams,
            self.stream_questions,
            self.flows,
            self.flow_questions,
            self.failures.len(),
        )
    }
}

/// Runs until [`Load::end`].
pub struct Load<'scope> {
    stop: Arc<AtomicBool>,
    /// New connections so far, to wait by.
    made: Arc<AtomicU64>,
    counts: Arc<Mutex<Counts>>,
    threads: Vec<ScopedJoinHandle<'scope, ()>>,
}

impl<'scope> Load<'scope> {
    /// Returns when all streams and flows have been answered once.
    pub fn begin<'env>(
        scope: &'scope thread::Scope<'scope, 'env>,
        lab: &'env Lab,
        routes: &[Line],
    ) -> Load<'scope> {
        Load::begin_parts(scope, lab, routes, &[Part::Connections, Part::Streams, Part::Flows])
    }

    /// New connections only: none that is kept open.
    pub fn begin_new<'env>(
        scope: &'scope thread::Scope<'scope, 'env>,
        lab: &'env Lab,
        routes: &[Line],
    ) -> Load<'scope> {
        Load::begin_parts(scope, lab, routes, &[Part::Connections])
    }

    fn begin_parts<'env>(
        scope: &'scope thread::Scope<'scope, 'env>,
        lab: &'env Lab,
        routes: &[Line],
        parts: &[Part],
    ) -> Load<'scope> {
        let mut load =
            Load { stop: Arc::default(), made: Arc::default(), counts: Arc::default(), threads: Vec::new() };
        let ready = Arc::new(AtomicU64::new(0));
        for route in routes {
            for part in parts.iter().copied() {
                let worker = Worker {
                    route: *route,
                    stop: Arc::clone(&load.stop),
                    made: Arc::clone(&load.made),
                    counts: Arc::clone(&load.counts),
                    ready: Arc::clone(&ready),
                };
                load.threads.push(scope.spawn(move || {
                    let netns = lab.netns(worker.route.from).expect("somebody in the lab");
                    netns.enter().expect("a thread of its own can enter any namespace");
                    worker.run(part);
                }));
            }
        }
        let all = load.threads.len() as u64;
        eventually("the load begins", || match ready.load(Ordering::Relaxed) {
            ready if ready == all => Ok(()),
            ready => {
                let failures = load.counts().failures.clone();
                assert!(failures.is_empty(), "the load cannot begin: {:?}", failures[0]);
                Err(format!("{ready} of {all} parts"))
            }
        });
        load
    }

    /// Waits until `count` more connections have been made.
    pub fn go_on(&self, count: u64) {
        let wanted = self.made.load(Ordering::Relaxed) + count;
        eventually("connections are made", || match self.made.load(Ordering::Relaxed) {
            made if made >= wanted => Ok(()),
            made => Err(format!("{made} of {wanted}")),
        });
    }

    /// Ends it, prints the counts after `what`, and fails when anything did.
    #[track_caller]
    pub fn end(mut self, what: &str) -> Counts {
        self.stop.store(true, Ordering::Relaxed);
        for thread in std::mem::take(&mut self.threads) {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
        let counts = std::mem::take(&mut *self.counts());
        println!("{what}: {counts}");
        let asked = |kept: u64, questions: u64| kept == 0 || questions > 0;
        assert!(
            counts.connections > 0
                && asked(counts.streams, counts.stream_questions)
                && asked(counts.flows, counts.flow_questions)
        );
        let shown = &counts.failures[..counts.failures.len().min(20)];
        assert!(counts.failures.is_empty(), "{what}: {counts}, of them {shown:#?}");
        counts
    }

    fn counts(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Load<'_> {
    /// A test that fails must not wait for ever for its threads.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[derive(Clone, Copy)]
enum Part {
    Connections,
    Streams,
    Flows,
}

/// One thread.
struct Worker {
    route: Line,
    stop: Arc<AtomicBool>,
    made: Arc<AtomicU64>,
    counts: Arc<Mutex<Counts>>,
    ready: Arc<AtomicU64>,
}

impl Worker {
    fn run(&self, part: Part) {
        match part {
            Part::Connections => self.connections(),
            Part::Streams => self.kept(Transport::Tcp, STREAMS),
            Part::Flows => self.kept(Transport::Udp, FLOWS),
        }
    }

    fn connections(&self) {
        let (mut tried, mut slow) = (0, 0);
        self.ready.fetch_add(1, Ordering::Relaxed);
        while !self.stop.load(Ordering::Relaxed) {
            let begun = Instant::now();
            let answer = match self.open(Transport::Tcp) {
                Ok(mut flow) => flow.ask(PATIENCE * slowness()),
                Err(answer) => answer,
            };
            tried += 1;
            slow += u64::from(begun.elapsed() > SLOW);
            if !matches!(answer, Answer::Answered(_)) {
                self.fail(format!("a connection: {answer:?}"));
            }
            self.made.fetch_add(1, Ordering::Relaxed);
            thread::sleep(PAUSE);
        }
        let mut counts = self.counts();
        counts.connections += tried;
        counts.slow += slow;
    }

    /// Flows that stay open, asked in turns.
    fn kept(&self, transport: Transport, count: usize) {
        let mut flows: Vec<(Flow, Answer)> = Vec::new();
        for _ in 0..count {
            match self.open(transport) {
                Ok(mut flow) => {
                    let first = flow.ask(PATIENCE * slowness());
                    flows.push((flow, first));
                }
                Err(answer) => return self.fail(format!("a {transport:?} flow does not open: {answer:?}")),
            }
        }
        self.ready.fetch_add(1, Ordering::Relaxed);
        let (kept, mut questions) = (flows.len() as u64, 0);
        while !self.stop.load(Ordering::Relaxed) {
            flows.retain_mut(|(flow, first)| {
                questions += 1;
                let answer = flow.ask(PATIENCE * slowness());
                let same = same_peer(first, &answer);
                if !same {
                    self.fail(format!("a {transport:?} flow: first {first:?}, then {answer:?}"));
                }
                thread::sleep(PAUSE);
                same
            });
        }
        let mut counts = self.counts();
        match transport {
            Transport::Tcp => {
                (counts.streams, counts.stream_questions) =
                    (counts.streams + kept, counts.stream_questions + questions)
            }
            _ => {
                (counts.flows, counts.flow_questions) =
                    (counts.flows + kept, counts.flow_questions + questions)
            }
        }
    }

    fn open(&self, transport: Transport) -> Result<Flow, Answer> {
        let Line { from, to } = self.route;
        let source = Version::of(to.ip()).address(address_of(from).expect("somebody in the lab"));
        Flow::open(Route { source, destination: to, transport }, PATIENCE * slowness())
    }

    fn fail(&self, what: String) {
        let Line { from, to } = self.route;
        self.counts().failures.push(format!("{}: {from} to {to}: {what}", time_of_day()));
    }

    fn counts(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As in the daemon's log, which tells what it did meanwhile.
fn time_of_day() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = now.as_secs() % 86_400;
    format!("{:02}:{:02}:{:02}.{:06}", seconds / 3600, seconds / 60 % 60, seconds % 60, now.subsec_micros())
}

/// The same endpoint, which sees the same source.
fn same_peer(first: &Answer, now: &Answer) -> bool {
    match (first, now) {
        (Answer::Answered(first), Answer::Answered(now)) => {
            (&first.by, first.at, first.source_seen) == (&now.by, now.at, now.source_seen)
        }
        _ => false,
    }
}
