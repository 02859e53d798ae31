// SPDX-License-Identifier: Apache-2.0

//! Whether a service is in force, asked from outside with a connection: the same for every subject, and
//! free of cost for it.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;

use crate::{
    figures::{Change, InForce, Quantiles},
    objects::{Entry, Objects},
    responder::ask,
    store::Store,
};

/// A packet without a rule is refused at once; one that is dropped costs this much.
const PATIENCE: Duration = Duration::from_millis(20);
/// Services that stand for all: asked one after the other, so that the last answer is at most a few
/// milliseconds late.
pub const SAMPLE: usize = 64;
/// Between two questions while a change is awaited.
const PAUSE: Duration = Duration::from_micros(200);

/// When the node began to serve.
#[derive(Clone, Copy, Debug, Default)]
pub struct Served {
    pub first: Option<Instant>,
    pub all: Option<Instant>,
}

/// Asks until `default/kubernetes` and every service of the sample have answered. Runs in the client.
pub fn await_served(objects: &Objects, deadline: Instant) -> Served {
    let mut served = Served::default();
    while served.first.is_none() {
        if Instant::now() > deadline {
            return served;
        }
        match ask(objects.kubernetes.frontend, PATIENCE) {
            Ok(_) => served.first = Some(Instant::now()),
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
    for entry in [&objects.probe].into_iter().chain(objects.sample(SAMPLE)) {
        while ask(entry.frontend, PATIENCE).is_err() {
            if Instant::now() > deadline {
                return served;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
    served.all = Some(Instant::now());
    served
}

/// What [`await_outage`] saw.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outage {
    /// The last answer before the first failure; absent when no connection failed.
    pub failed: Option<Instant>,
    pub served: Served,
}

/// Asks until a connection fails, and then until all is served again. Runs in the client.
///
/// A repair that is faster than the time between two questions is not seen at all; then all is served.
pub fn await_outage(objects: &Objects, deadline: Instant) -> Outage {
    let mut last = Instant::now();
    // A flush that is mended before anybody notices ends the wait after this time.
    let unnoticed = deadline.min(last + Duration::from_secs(2));
    while ask(objects.kubernetes.frontend, PATIENCE).is_ok() {
        last = Instant::now();
        if last > unnoticed {
            return Outage { failed: None, served: await_served(objects, deadline) };
        }
        thread::sleep(PAUSE);
    }
    Outage { failed: Some(last), served: await_served(objects, deadline) }
}

/// How many of `count` services, spread over all, do not answer with one of their own endpoints.
pub fn unanswered(objects: &Objects, count: usize) -> (u64, u64) {
    let sample = objects.sample(count);
    let wrong = sample.iter().filter(|entry| {
        let reached = ask(entry.frontend, Duration::from_millis(500));
        !reached.is_ok_and(|reached| entry.endpoints.contains(&reached))
    });
    (sample.len() as u64, wrong.count() as u64)
}

/// Asks `frontend` until `wanted` answers; `None` after `limit`. Runs in the client.
pub fn await_endpoint(frontend: SocketAddrV4, wanted: Ipv4Addr, limit: Duration) -> Option<Instant> {
    let deadline = Instant::now() + limit;
    while Instant::now() < deadline {
        if ask(frontend, PATIENCE).is_ok_and(|reached| reached == wanted) {
            return Some(Instant::now());
        }
        thread::sleep(PAUSE);
    }
    None
}

/// Asks until `unwanted` has not answered for a while, and returns when it did for the last time.
///
/// With two endpoints it would answer every other time: 24 answers of the other one leave no doubt.
fn await_absence(frontend: SocketAddrV4, unwanted: Ipv4Addr, limit: Duration) -> Option<Instant> {
    let (began, mut others) = (Instant::now(), 0);
    let mut last = began;
    while began.elapsed() < limit {
        match ask(frontend, PATIENCE) {
            Ok(reached) if reached == unwanted => (last, others) = (Instant::now(), 0),
            Ok(_) => others += 1,
            Err(_) => {}
        }
        if others == 24 {
            return Some(last);
        }
        thread::sleep(PAUSE);
    }
    None
}

/// Asks for `frontend` until told to stop, and counts. Runs in the client.
pub fn count_failures(frontend: SocketAddrV4, stop: &AtomicBool) -> (u64, u64) {
    let (mut asked, mut failed) = (0, 0);
    while !stop.load(Ordering::Relaxed) {
        asked += 1;
        failed += u64::from(ask(frontend, Duration::from_millis(500)).is_err());
        thread::sleep(Duration::from_millis(2));
    }
    (asked, failed)
}

/// How often and how long a change is timed.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    pub samples: usize,
    /// No new sample after this.
    pub at_most: Duration,
    /// A change that is not in force by then is missed.
    pub limit: Duration,
}

/// Changes the probe service again and again, and times each until packets follow. Runs in the client.
pub fn time_changes(
    store: &Store<'_>,
    probe: &mut Entry,
    change: Change,
    timing: Timing,
) -> Result<Option<InForce>> {
    let (mut from_write, mut from_answer, mut missed) = (Vec::new(), Vec::new(), 0);
    let began = Instant::now();
    while from_write.len() < timing.samples && began.elapsed() < timing.at_most {
        prepare(store, probe, change, timing.limit)?;
        let touched = match change {
            Change::Swap | Change::Resize => Some(probe.swap(0)),
            Change::Add => Some(probe.grow()),
            Change::Remove => probe.shrink(),
        };
        let Some(touched) = touched else { break };
        let frontend = probe.frontend;
        let written = Instant::now();
        let pending = store.begin_write(probe)?;
        let seen = match change {
            Change::Remove => await_absence(frontend, touched, timing.limit),
            _ => await_endpoint(frontend, touched, timing.limit),
        };
        let answered = pending.wait()?;
        match seen {
            Some(seen) => {
                from_write.push(milliseconds(written, seen));
                from_answer.push(milliseconds(answered, seen));
            }
            None => missed += 1,
        }
        // Not in step with anything periodic, and not back to back.
        thread::sleep(Duration::from_millis(13 + (from_write.len() as u64 * 7) % 17));
    }
    let timed = Quantiles::of(from_write).zip(Quantiles::of(from_answer));
    Ok(timed.map(|(from_write, from_answer)| InForce { change, from_write, from_answer, missed }))
}

/// Brings the probe to the number of endpoints the change starts from, and waits until that is in force.
fn prepare(store: &Store<'_>, probe: &mut Entry, change: Change, limit: Duration) -> Result<()> {
    let wanted = if change == Change::Remove { 2 } else { 1 };
    if probe.endpoints.len() == wanted {
        return Ok(());
    }
    let frontend = probe.frontend;
    if wanted == 2 {
        let added = probe.grow();
        store.write(probe)?;
        await_endpoint(frontend, added, limit);
    } else if let Some(removed) = probe.shrink() {
        store.write(probe)?;
        await_absence(frontend, removed, limit);
    }
    Ok(())
}

fn milliseconds(from: Instant, to: Instant) -> f64 {
    match to.checked_duration_since(from) {
        Some(after) => after.as_secs_f64() * 1e3,
        None => -(from - to).as_secs_f64() * 1e3,
    }
}
