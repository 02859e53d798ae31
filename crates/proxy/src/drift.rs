// SPDX-License-Identifier: Apache-2.0

//! Somebody else changes what is ours in the kernel: noticed beside the loop, told, counted; the loop mends it.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
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

/// Rings when the kernel has to be compared with what it should hold.
#[derive(Debug, Default)]
pub struct Bell {
    pub rings: Notify,
    is_certain: AtomicBool,
}

impl Bell {
    /// Whether it has rung since this was last asked for what was certain, and told; not on a mere suspicion.
    pub fn take_certain(&self) -> bool {
        self.is_certain.swap(false, Ordering::Relaxed)
    }
}

/// Watches for a dataplane, in a thread of its own, until the bell is dropped; rings it when something is to be
/// mended. In the network namespace of the calling thread.
pub fn watch(dataplane: &dyn Dataplane, metrics: &Arc<Metrics>, events: &Recorder) -> Arc<Bell> {
    let bell = Arc::new(Bell::default());
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

fn follow(mut watch: Box<dyn Watch>, bell: &Weak<Bell>, (metrics, events): (&Metrics, &Recorder)) {
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
                    bell.is_certain.fetch_or(!drift.suspected, Ordering::Relaxed);
                    bell.rings.notify_one();
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
    metrics.drift.only().add(1);
    events.note(Note::warning(
        "RulesChanged",
        "Repair",
        Regarding::Node,
        format!("{by} changed rules of the service proxy ({what}); they are put right"),
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tells of one drift, and of nothing more.
    struct Once(Option<Drift>);

    impl Watch for Once {
        fn next(&mut self, _: Duration) -> Result<Option<Drift>, netlink::Error> {
            thread::sleep(Duration::from_millis(1));
            Ok(self.0.take())
        }
    }

    #[test]
    fn a_suspicion_rings_and_is_not_told() {
        for suspected in [true, false] {
            let drift = Drift { what: "a rule".to_owned(), by: None, suspected };
            let metrics = Metrics::new(std::time::SystemTime::now());
            let bell = Arc::new(Bell::default());
            let ear = Arc::downgrade(&bell);
            thread::scope(|scope| {
                scope.spawn(|| follow(Box::new(Once(Some(drift))), &ear, (&metrics, &Recorder::default())));
                let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
                runtime.block_on(bell.rings.notified());
                assert_eq!(bell.take_certain(), !suspected);
                drop(bell);
            });
            assert_eq!(metrics.render().contains("portolan_drift_total 1"), !suspected);
        }
    }
}
