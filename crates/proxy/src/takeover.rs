// SPDX-License-Identifier: Apache-2.0

//! Once ours serves, what another proxy left on the node goes.
//!
//! Not before: its rules carry the traffic until then. And not only once: it may still be running for a moment, and
//! write everything again. A connection that it translated keeps its translation, which the kernel remembers.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use dataplane::{
    Mode,
    leftovers::{self, Keep, Report},
    xtables::Variant,
};

use crate::{
    events::{Note, Recorder, Regarding},
    metrics::Metrics,
};

/// The waits between one look and the next; the last one for ever after.
const WAITS: [Duration; 4] =
    [Duration::from_secs(5), Duration::from_secs(30), Duration::from_secs(300), Duration::from_secs(3600)];
/// None is longer while something goes later by itself.
const WAITING: Duration = Duration::from_secs(30);

/// Ends the looking when dropped.
#[derive(Debug)]
pub struct Takeover {
    alive: Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl Takeover {
    /// Ends the looking, and returns when no look is under way any more.
    pub fn end(self) {
        let Takeover { alive, thread } = self;
        drop(alive);
        // What it did it has told; one that panicked removes nothing more.
        thread.map(JoinHandle::join);
    }
}

/// What serves now, and where to tell.
pub struct Successor {
    pub mode: Mode,
    /// The iptables it writes with, if it does.
    pub variant: Option<Variant>,
    /// What keeps open connections translated, where it has no chains to do so.
    pub keep: Option<Keep>,
    pub metrics: Arc<Metrics>,
    pub events: Recorder,
}

/// Starts to look, on a thread of its own, in the network namespace of this one.
pub fn begin(mut successor: Successor) -> Takeover {
    let (alive, ended) = channel();
    let thread = thread::Builder::new().name("takeover".to_owned());
    let thread = thread.spawn(move || look(&mut successor, &ended)).inspect_err(|error| {
        tracing::warn!(%error, "cannot start a thread; what another proxy left stays until the next start");
    });
    Takeover { alive, thread: thread.ok() }
}

fn look(successor: &mut Successor, ended: &Receiver<()>) {
    let mut looks = 0;
    let mut told = Report::default();
    loop {
        let mut report = Report::default();
        // First, so that what only the other variant's tables hold is not taken for in use by what goes with it.
        if let Some(variant) = successor.variant {
            report = leftovers::unite(variant);
            tell_split(successor, variant, &report);
        }
        let others = leftovers::remove(Some(successor.mode), successor.keep.as_mut());
        report.removed.extend(others.removed);
        report.kept.extend(others.kept);
        report.failed.extend(others.failed);
        report.harmed.extend(others.harmed);
        report.waits |= others.waits;
        tell(looks, &report, &told);
        let wait = pause(looks, &report);
        told = report;
        looks += 1;
        if ended.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}

/// How long after this look the next one is.
fn pause(looks: usize, report: &Report) -> Duration {
    let wait = WAITS[looks.min(WAITS.len() - 1)];
    if report.waits { wait.min(WAITING) } else { wait }
}

/// Rules in the tables of both variants: the kernel obeys both, and nobody sees the whole.
fn tell_split(Successor { metrics, events, .. }: &Successor, own: Variant, split: &Report) {
    if split.removed.is_empty() && split.failed.is_empty() {
        return;
    }
    let other = own.other();
    metrics.split.only().add(1);
    let outcome = if split.failed.is_empty() { "they are removed" } else { "they cannot be removed" };
    let words = format!(
        "a Kubernetes proxy has chains in the {other} tables of iptables, beside those in use, in the {own} tables, and \
         the kernel obeys both: {outcome}; if they come again, make all components use the {own} variant"
    );
    tracing::warn!("{words}");
    events.note(Note::warning("SplitIptables", "Repair", Regarding::Node, words));
}

fn tell(looks: usize, report: &Report, told: &Report) {
    let removed = report.removed.join(", ");
    match (looks, removed.is_empty()) {
        (_, true) => {}
        (0, _) => tracing::info!(removed, "removed what another proxy had left"),
        _ if told.waits => {
            tracing::info!(removed, "removed what another proxy had left, and nobody needs any more")
        }
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
    for harm in report.harmed.iter().filter(|harm| !told.harmed.contains(harm)) {
        tracing::warn!("{harm}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log;

    #[test]
    fn what_waits_is_looked_at_often() {
        let (done, waits) = (Report::default(), Report { waits: true, ..Report::default() });
        let pauses = |report: &Report| [0, 1, 2, 3, 9].map(|looks| pause(looks, report).as_secs());
        assert_eq!(pauses(&done), [5, 30, 300, 3600, 3600]);
        assert_eq!(pauses(&waits), [5, 30, 30, 30, 30]);
    }

    #[test]
    fn what_cannot_be_spared_is_told_once_and_as_it_is() {
        let harm = "connections may end, as a table cannot be written";
        let report = Report { harmed: vec![harm.to_owned()], ..Report::default() };
        let told = log::tests::told_by(|| tell(0, &report, &Report::default()));
        let lines: Vec<&str> = told.lines().collect();
        assert!(
            matches!(lines[..], [line] if line.starts_with('W') && line.ends_with(&format!("] {harm}"))),
            "{told}"
        );
        // By a log of its own, which has not seen it.
        assert_eq!(log::tests::told_by(|| tell(1, &report, &report)), "");
    }
}
