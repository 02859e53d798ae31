// SPDX-License-Identifier: Apache-2.0

//! New connections with one request each, through service addresses and straight to the endpoints.
//!
//! Both are measured in turns, round by round, so that a machine that slows down slows both. The askers are
//! pinned to processors; services and endpoints are spread over all, because where a service stands in a
//! list of rules may matter.

use std::{
    net::SocketAddrV4,
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::{
    figures::{Connections, DataPath, Quantiles},
    ground::{Ground, Namespace},
    objects::{Objects, TARGET_PORT},
    responder::ask,
};

#[derive(Clone, Copy, Debug)]
pub struct Effort {
    pub threads: usize,
    pub rounds: usize,
    /// Of each thread in each round.
    pub connections: usize,
}

pub fn measure(ground: &Ground, objects: &Objects, effort: Effort) -> Result<DataPath> {
    let sample = objects.sample(64);
    let services: Vec<SocketAddrV4> = sample.iter().map(|entry| entry.frontend).collect();
    let straight: Vec<SocketAddrV4> =
        sample.iter().map(|entry| SocketAddrV4::new(entry.endpoints[0], TARGET_PORT)).collect();
    let (mut through, mut past) = (Rounds::default(), Rounds::default());
    for _ in 0..effort.rounds {
        through.add(round(&ground.client, &services, effort)?);
        past.add(round(&ground.client, &straight, effort)?);
    }
    Ok(DataPath { service: through.finish(effort), straight: past.finish(effort) })
}

struct Round {
    elapsed: Duration,
    latencies_ms: Vec<f64>,
    failed: u64,
}

fn round(client: &Namespace, targets: &[SocketAddrV4], effort: Effort) -> Result<Round> {
    let began = Instant::now();
    let askers = thread::scope(|scope| {
        let askers: Vec<_> = (0..effort.threads)
            .map(|number| scope.spawn(move || client.run(|| ask_many(targets, number, effort.connections))))
            .collect();
        let join = |asker: thread::ScopedJoinHandle<'_, Result<Round>>| {
            asker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        askers.into_iter().map(join).collect::<Result<Vec<Round>>>()
    })?;
    let mut round = Round { elapsed: began.elapsed(), latencies_ms: Vec::new(), failed: 0 };
    for asker in askers {
        round.latencies_ms.extend(asker.latencies_ms);
        round.failed += asker.failed;
    }
    Ok(round)
}

fn ask_many(targets: &[SocketAddrV4], number: usize, connections: usize) -> Round {
    pin(number);
    let began = Instant::now();
    let mut round =
        Round { elapsed: Duration::ZERO, latencies_ms: Vec::with_capacity(connections), failed: 0 };
    for turn in 0..connections {
        let target = targets[(turn + number) % targets.len()];
        let asked = Instant::now();
        match ask(target, Duration::from_secs(1)) {
            Ok(_) => round.latencies_ms.push(asked.elapsed().as_secs_f64() * 1e3),
            Err(_) => round.failed += 1,
        }
    }
    round.elapsed = began.elapsed();
    round
}

/// Best effort: a machine that forbids it only has more noise.
fn pin(number: usize) {
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
    let mut set = CpuSet::new();
    set.set(number % cores);
    let _ = sched_setaffinity(None, &set);
}

#[derive(Default)]
struct Rounds {
    per_second: Vec<f64>,
    latencies_ms: Vec<f64>,
    failed: u64,
}

impl Rounds {
    fn add(&mut self, round: Round) {
        self.per_second.push(round.latencies_ms.len() as f64 / round.elapsed.as_secs_f64());
        self.latencies_ms.extend(round.latencies_ms);
        self.failed += round.failed;
    }

    fn finish(mut self, effort: Effort) -> Connections {
        self.per_second.sort_by(f64::total_cmp);
        let nothing = Quantiles { count: 0, p50_ms: 0.0, p99_ms: 0.0, max_ms: 0.0 };
        Connections {
            threads: effort.threads,
            made: self.latencies_ms.len() as u64,
            failed: self.failed,
            per_second: self.per_second.get(self.per_second.len() / 2).copied().unwrap_or(0.0),
            latency: Quantiles::of(self.latencies_ms).unwrap_or(nothing),
        }
    }
}
