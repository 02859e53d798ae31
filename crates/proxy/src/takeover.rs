// SPDX-License-Identifier: Apache-2.0

//! Once ours serves, what another proxy left on the node goes.
//!
//! Not before: its rules carry the traffic until then. And not only once: it may still be running for a moment, and
//! write everything again. A connection that it translated keeps its translation, which the kernel remembers.

use std::{
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread,
    time::Duration,
};

use dataplane::{
    Mode,
    leftovers::{self, Report},
};

/// The waits between one look and the next; the last one for ever after.
const WAITS: [Duration; 4] =
    [Duration::from_secs(5), Duration::from_secs(30), Duration::from_secs(300), Duration::from_secs(3600)];

/// Ends the looking when dropped.
#[derive(Debug)]
pub struct Takeover {
    _alive: Sender<()>,
}

/// Starts to look, on a thread of its own, in the network namespace of this one.
pub fn begin(own: Mode) -> Takeover {
    let (alive, ended) = channel();
    let thread = thread::Builder::new().name("takeover".to_owned());
    if let Err(error) = thread.spawn(move || look(own, &ended)) {
        tracing::warn!(%error, "cannot start a thread; what another proxy left stays until the next start");
    }
    Takeover { _alive: alive }
}

fn look(own: Mode, ended: &Receiver<()>) {
    let mut looks = 0;
    let mut told = Report::default();
    loop {
        let report = leftovers::remove(Some(own));
        tell(looks, &report, &told);
        told = report;
        let wait = WAITS[looks.min(WAITS.len() - 1)];
        looks += 1;
        if ended.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}

fn tell(looks: usize, report: &Report, told: &Report) {
    let removed = report.removed.join(", ");
    match (looks, removed.is_empty()) {
        (_, true) => {}
        (0, _) => tracing::info!(removed, "removed what another proxy had left"),
        _ => tracing::warn!(
            removed,
            "another proxy writes its rules to this node again: stop it; removed them"
        ),
    }
    for reason in report.kept.iter().filter(|reason| !told.kept.contains(reason)) {
        tracing::warn!("something another proxy left stays: {reason}");
    }
    for failure in report.failed.iter().filter(|failure| !told.failed.contains(failure)) {
        tracing::warn!("something another proxy left cannot be removed: {failure}");
    }
}
