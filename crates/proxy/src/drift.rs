// SPDX-License-Identifier: Apache-2.0

//! Somebody else changes what is ours in the kernel: noticed beside the loop, told, counted; the loop mends it.

use std::{
    sync::{Arc, Weak},
    thread,
    time::Duration,
};

use dataplane::{Dataplane, Drift, Watch};
use tokio::sync::Notify;

use crate::{
    events::{Note, Recorder, Regarding},
    metrics::Metrics,
};

/// How soon the thread notices that nobody listens any more.
const TICK: Duration = Duration::from_secs(5);
/// The wait after an error.
const AGAIN: Duration = Duration::from_secs(1);

/// Watches for a dataplane, in a thread of its own, until the bell is dropped; rings it when something is to be
/// mended. In the network namespace of the calling thread.
pub fn watch(dataplane: &dyn Dataplane, metrics: &Arc<Metrics>, events: &Recorder) -> Arc<Notify> {
    let bell = Arc::new(Notify::new());
    let (ear, metrics, events) = (Arc::downgrade(&bell), Arc::clone(metrics), events.clone());
    let watch = match dataplane.watch() {
        Ok(Some(watch)) => watch,
        Ok(None) => return bell,
        Err(error) => {
            tracing::warn!(%error, "cannot watch the kernel; what others change is mended only with the next error");
            return bell;
        }
    };
    let work = move || follow(watch, &ear, (&metrics, &events));
    let thread = thread::Builder::new().name("drift".to_owned()).spawn(work);
    if let Err(error) = thread {
        tracing::warn!(%error, "cannot start a thread; what others change is mended only with the next error");
    }
    bell
}

fn follow(mut watch: Box<dyn Watch>, bell: &Weak<Notify>, (metrics, events): (&Metrics, &Recorder)) {
    while bell.strong_count() > 0 {
        match watch.next(TICK) {
            Ok(None) => {}
            Ok(Some(drift)) => {
                match drift.suspected {
                    // The loop finds out.
                    true => tracing::debug!(what = drift.what, "somebody changed something; comparing"),
                    false => tell(&drift, metrics, events),
                }
                if let Some(bell) = bell.upgrade() {
                    bell.notify_one();
                }
            }
            Err(error) => {
                tracing::warn!(%error, "cannot watch the kernel, trying again");
                thread::sleep(AGAIN);
            }
        }
    }
}

/// Says and counts that somebody changed what is ours.
pub fn tell(Drift { what, by, .. }: &Drift, metrics: &Metrics, events: &Recorder) {
    let by = by.as_deref().unwrap_or("unknown");
    tracing::warn!(what, by, "somebody else changed what is ours; putting it right");
    metrics.drift.with(&[]).add(1);
    events.note(Note::warning(
        "RulesChanged",
        "Repair",
        Regarding::Node,
        format!("{by} changed rules of the service proxy ({what}); they are put right"),
    ));
}
