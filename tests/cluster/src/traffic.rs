// SPDX-License-Identifier: Apache-2.0

//! Questions, and what is expected of the answers.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, ScopedJoinHandle},
    time::Duration,
};

use lab::{
    Answer, Lab, Route, Transport,
    address::{Version, address_of},
};

use crate::{eventually, manifest::POD_PORT, wait_for};

/// A packet that is dropped costs this much; on a busy machine an answer may take a while.
const PATIENCE: Duration = Duration::from_secs(2);
/// With three endpoints, one of them is missed once in five thousand times; then it is asked again.
const QUESTIONS: usize = 24;

/// Who asks, and what for.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    pub from: &'static str,
    pub to: SocketAddr,
    pub transport: Transport,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} asks {} by {:?}", self.from, self.to, self.transport)
    }
}

impl Target {
    /// TCP and UDP to an address, from one asker.
    pub fn both(from: &'static str, ip: IpAddr, port: u16) -> [Target; 2] {
        [Transport::Tcp, Transport::Udp].map(|transport| Target {
            from,
            to: SocketAddr::new(ip, port),
            transport,
        })
    }

    fn ask(&self, lab: &Lab) -> Answer {
        let version = Version::of(self.to.ip());
        let source = version.address(address_of(self.from).expect("somebody in the lab"));
        let route = Route { source, destination: self.to, transport: self.transport };
        lab.ask(self.from, route, PATIENCE).expect("the lab works")
    }

    /// Waits until exactly these answer, each of them.
    #[track_caller]
    pub fn expect(&self, lab: &Lab, pods: &[&str]) {
        self.expect_within(crate::PATIENCE, lab, pods);
    }

    /// The same with another patience, where something is known to take its time.
    #[track_caller]
    pub fn expect_within(&self, patience: Duration, lab: &Lab, pods: &[&str]) {
        let wanted: BTreeSet<String> = pods.iter().map(|pod| (*pod).to_owned()).collect();
        let answer = wait_for(patience, || {
            let mut seen = BTreeSet::new();
            for _ in 0..QUESTIONS {
                match self.ask(lab) {
                    Answer::Answered(reply) => seen.insert(reply.by),
                    other => return Err(format!("{other:?}")),
                };
            }
            if seen == wanted { Ok(()) } else { Err(format!("{seen:?}")) }
        });
        if let Err(last) = answer {
            panic!("{self}, served by {pods:?}: not within {patience:?}: {last}");
        }
    }

    /// Waits until the question is refused.
    #[track_caller]
    pub fn expect_refused(&self, lab: &Lab) {
        eventually(&format!("{self}, refused"), || match self.ask(lab) {
            Answer::Refused => Ok(()),
            other => Err(format!("{other:?}")),
        });
    }

    /// Waits until no pod answers any more: refused, dropped, or let through to the outside, which refuses.
    #[track_caller]
    pub fn expect_gone(&self, lab: &Lab) {
        eventually(&format!("{self}, gone"), || match self.ask(lab) {
            Answer::Answered(reply) => Err(format!("{} answers", reply.by)),
            _ => Ok(()),
        });
    }
}

/// Everybody answers on [`POD_PORT`].
pub fn answer_everywhere(lab: &mut Lab) {
    for pod in ["a1", "a2", "a3", "b1", "b2"] {
        for (version, transport) in Version::BOTH
            .iter()
            .flat_map(|version| [Transport::Tcp, Transport::Udp].map(|each| (*version, each)))
        {
            let at = SocketAddr::new(version.address(address_of(pod).expect("a pod")), POD_PORT);
            lab.respond(pod, transport, at).expect("a pod can answer");
        }
    }
}

/// New connections, one after the other, until it is ended: none of them may fail.
pub struct Steady<'scope> {
    stop: Arc<AtomicBool>,
    asked: Arc<AtomicU64>,
    threads: Vec<ScopedJoinHandle<'scope, Vec<String>>>,
}

impl<'scope> Steady<'scope> {
    /// Asks all `targets` over and over, each on a thread of its own.
    pub fn begin<'env>(
        scope: &'scope thread::Scope<'scope, 'env>,
        lab: &'env Lab,
        targets: &'env [Target],
    ) -> Steady<'scope> {
        let mut steady = Steady { stop: Arc::default(), asked: Arc::default(), threads: Vec::new() };
        for target in targets {
            let (stop, asked) = (steady.stop.clone(), steady.asked.clone());
            steady.threads.push(scope.spawn(move || {
                let mut failures = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    match target.ask(lab) {
                        Answer::Answered(_) => {}
                        other => failures.push(format!("{target}: {other:?}")),
                    }
                    asked.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(Duration::from_millis(5));
                }
                failures
            }));
        }
        steady
    }

    /// Waits until `count` more questions have been asked.
    pub fn go_on(&self, count: u64) {
        let wanted = self.asked.load(Ordering::Relaxed) + count;
        eventually("questions are asked", || match self.asked.load(Ordering::Relaxed) {
            asked if asked >= wanted => Ok(()),
            asked => Err(format!("{asked} of {wanted}")),
        });
    }

    /// Ends it; fails when any question had no answer.
    #[track_caller]
    pub fn end(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let join = |thread: ScopedJoinHandle<'scope, Vec<String>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        let failures: Vec<String> = std::mem::take(&mut self.threads).into_iter().flat_map(join).collect();
        let asked = self.asked.load(Ordering::Relaxed);
        assert!(asked > 0, "nothing was asked");
        assert!(failures.is_empty(), "{} of {asked} questions failed: {:?}", failures.len(), failures[0]);
    }
}

impl Drop for Steady<'_> {
    /// A test that fails must not wait for ever for its threads.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
