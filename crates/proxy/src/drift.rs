// SPDX-License-Identifier: Apache-2.0

//! Somebody else changes what is ours in the kernel: noticed beside the loop, told, counted; the loop mends it.

use std::{
    sync::{Arc, Weak},
    thread,
    time::Duration,
};

use dataplane::{Dataplane, Drift, Watch};
use tokio::sync::Notify;

use crate::metrics::Metrics;

/// How soon the thread notices that nobody listens any more.
const TICK: Duration = Duration::from_secs(5);
/// The wait after an error.
const AGAIN: Duration = Duration::from_secs(1);

/// Watches for a dataplane, in a thread of its own, until the bell is dropped; rings it when something is to be
/// mended. In the network namespace of the calling thread.
pub fn watch(dataplane: &dyn Dataplane, metrics: &Arc<Metrics>) -> Arc<Notify> {
    let bell = Arc::new(Notify::new());
    let (ear, metrics) = (Arc::downgrade(&bell), Arc::clone(metrics));
    let watch = match dataplane.watch() {
        Ok(Some(watch)) => watch,
        Ok(None) => return bell,
        Err(error) => {
            tracing::warn!(%error, "cannot watch the kernel; what others change is mended only with the next error");
            return bell;
        }
    };
    let thread = thread::Builder::new().name("drift".to_owned()).spawn(move || follow(watch, &ear, &metrics));
    if let Err(error) = thread {
        tracing::warn!(%error, "cannot start a thread; what others change is mended only with the next error");
    }
    bell
}

fn follow(mut watch: Box<dyn Watch>, bell: &Weak<Notify>, metrics: &Metrics) {
    while bell.strong_count() > 0 {
        match watch.next(TICK) {
            Ok(None) => {}
            Ok(Some(Drift { what, by })) => {
                let by = by.unwrap_or_else(|| "unknown".to_owned());
                tracing::warn!(what, by, "somebody else changed what is ours; putting it right");
                metrics.drift.with(&[]).add(1);
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
