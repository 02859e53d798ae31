// SPDX-License-Identifier: Apache-2.0

//! Real requests, all the time, each on a new connection: who answered, and how fast.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use lab::{Answer, Flow, Lab, Route, Transport, address};

/// A request that takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(2);
/// Between two requests of one path.
const PAUSE: Duration = Duration::from_millis(8);

/// A way from a client to a service.
#[derive(Clone, Copy, Debug)]
pub(super) struct Path {
    /// Who asks, as the lab calls it.
    pub(super) from: &'static str,
    source: Ipv4Addr,
    to: (Ipv4Addr, u16),
    pub(super) transport: Transport,
    pub(super) service: &'static str,
    pub(super) kind: &'static str,
}

const CART: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
const DNS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 53);
const SHOP_LB: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 10);
const DNS_LB: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 53);
const POD: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 2);

/// The addresses are those of the manifests in `examples/`.
pub(super) const PATHS: [Path; 7] = [
    path("client", address::CLIENT, (SHOP_LB, 80), Transport::Tcp, ("shop", "LB")),
    path("client", address::CLIENT, (address::NODE_A, 30080), Transport::Tcp, ("web", "NodePort")),
    path("a2", POD, (CART, 80), Transport::Tcp, ("cart", "ClusterIP")),
    path("node-a", address::NODE_A, (CART, 80), Transport::Tcp, ("cart", "ClusterIP")),
    path("client", address::CLIENT, (DNS_LB, 53), Transport::Udp, ("dns", "LB")),
    path("client", address::CLIENT, (address::NODE_A, 30053), Transport::Udp, ("dns", "NodePort")),
    path("a2", POD, (DNS, 53), Transport::Udp, ("dns", "ClusterIP")),
];

const fn path(
    from: &'static str,
    source: Ipv4Addr,
    to: (Ipv4Addr, u16),
    transport: Transport,
    (service, kind): (&'static str, &'static str),
) -> Path {
    Path { from, source, to, transport, service, kind }
}

impl Path {
    pub(super) fn destination(&self) -> SocketAddr {
        SocketAddr::new(IpAddr::V4(self.to.0), self.to.1)
    }

    /// One request on a new connection; who answered, or why nobody did.
    fn ask(&self) -> Result<String, String> {
        let (source, transport) = (IpAddr::V4(self.source), self.transport);
        let route = Route { source, destination: self.destination(), transport };
        let answer = match Flow::open(route, PATIENCE) {
            Ok(mut flow) => flow.ask(PATIENCE),
            Err(answer) => answer,
        };
        match answer {
            Answer::Answered(reply) => Ok(reply.by),
            Answer::Refused => Err("refused".to_owned()),
            Answer::TimedOut => Err("no answer".to_owned()),
            Answer::Other(errno) => Err(errno.to_string()),
        }
    }
}

/// One request.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) start: Instant,
    pub(super) took: Duration,
    pub(super) outcome: Result<Who, String>,
}

/// The pod that answered, by its place in [`super::PODS`]; `None` for somebody who should not have.
pub(super) type Who = Option<usize>;

/// What happened on one path, as far as the table shows it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Summary {
    pub(super) requests: usize,
    pub(super) failed: usize,
    pub(super) p50: Option<Duration>,
    pub(super) answers: [usize; super::PODS.len()],
}

impl Summary {
    pub(super) fn of<'a>(samples: impl Iterator<Item = &'a Sample>) -> Summary {
        let mut summary = Summary::default();
        let mut times = Vec::new();
        for sample in samples {
            summary.requests += 1;
            match &sample.outcome {
                Ok(Some(pod)) => {
                    summary.answers[*pod] += 1;
                    times.push(sample.took);
                }
                _ => summary.failed += 1,
            }
        }
        times.sort_unstable();
        summary.p50 = times.get(times.len() / 2).copied();
        summary
    }

    /// Two together; a median of both cannot be told from their medians.
    pub(super) fn plus(mut self, other: Summary) -> Summary {
        self.requests += other.requests;
        self.failed += other.failed;
        self.answers.iter_mut().zip(other.answers).for_each(|(count, more)| *count += more);
        self.p50 = None;
        self
    }
}

/// All paths under load.
pub(super) struct Load {
    samples: Arc<[Mutex<Vec<Sample>>; PATHS.len()]>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    pub(super) fn start(lab: &Lab) -> Result<Load, String> {
        let mut load = Load { samples: Arc::default(), stop: Arc::default(), threads: Vec::new() };
        for (index, path) in PATHS.iter().enumerate() {
            let netns = lab.netns(path.from).and_then(|netns| Ok(netns.try_clone()?));
            let netns = netns.map_err(|error| error.to_string())?;
            let (samples, stop) = (Arc::clone(&load.samples), Arc::clone(&load.stop));
            load.threads.push(thread::spawn(move || {
                let entered = netns.enter().map_err(|error| error.to_string());
                while !stop.load(Relaxed) {
                    let start = Instant::now();
                    let outcome = entered.clone().and_then(|()| path.ask());
                    let outcome = outcome.map(|by| super::PODS.iter().position(|pod| *pod == by));
                    let sample = Sample { start, took: start.elapsed(), outcome };
                    samples[index].lock().unwrap_or_else(PoisonError::into_inner).push(sample);
                    thread::sleep(PAUSE);
                }
            }));
        }
        Ok(load)
    }

    /// Waits until every path has had its last answer.
    pub(super) fn stop(&mut self) {
        self.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }

    /// What of one path `choose` lets through.
    pub(super) fn summary(&self, path: usize, choose: impl Fn(&Sample) -> bool) -> Summary {
        let samples = self.samples[path].lock().unwrap_or_else(PoisonError::into_inner);
        Summary::of(samples.iter().filter(|sample| choose(sample)))
    }

    /// Why requests failed, and how often.
    pub(super) fn failures(&self) -> BTreeMap<String, usize> {
        let mut reasons = BTreeMap::new();
        for (path, samples) in PATHS.iter().zip(self.samples.iter()) {
            for sample in samples.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                let reason = match &sample.outcome {
                    Ok(Some(_)) => continue,
                    Ok(None) => "answered by somebody else",
                    Err(reason) => reason,
                };
                let reason = format!("{} to {}: {reason}", path.from, path.destination());
                *reasons.entry(reason).or_default() += 1;
            }
        }
        reasons
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_counts_and_takes_the_middle() {
        let start = Instant::now();
        let sample = |millis, outcome| Sample { start, took: Duration::from_millis(millis), outcome };
        let samples = [
            sample(9, Ok(Some(0))),
            sample(1, Ok(Some(2))),
            sample(5, Ok(Some(2))),
            sample(0, Ok(None)),
            sample(0, Err("no answer".into())),
        ];
        let summary = Summary::of(samples.iter());
        assert_eq!((summary.requests, summary.failed, summary.answers), (5, 2, [1, 0, 2]));
        assert_eq!(summary.p50, Some(Duration::from_millis(5)));
        assert_eq!(Summary::of([].iter()).p50, None);
    }
}
