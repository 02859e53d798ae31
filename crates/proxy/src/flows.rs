// SPDX-License-Identifier: Apache-2.0

//! Stale flows are looked for beside the loop: a large connection table must not delay the next change.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use dataplane::conntrack::{Sweeper, Swept};

use crate::{
    metrics::Metrics,
    reconcile::{Look, Sweep},
    status::Status,
};

/// Starts in the network namespace of the calling thread. Without access to tracked connections it says so, and
/// the rest goes on.
pub fn sweep(status: &Arc<Status>, metrics: &Arc<Metrics>) -> Sweep {
    let asked: Arc<Mutex<Option<Instant>>> = Arc::default();
    let (since, status, metrics) = (Arc::clone(&asked), Arc::clone(status), Arc::clone(metrics));
    let report = move |outcome: Result<Swept, netlink::Error>| {
        let since = since.lock().unwrap_or_else(PoisonError::into_inner).take();
        let swept = match outcome {
            Ok(swept) => swept,
            Err(error) => {
                tracing::warn!(%error, "cannot look for stale flows; they may reach endpoints that are gone");
                return;
            }
        };
        tracing::debug!(seen = swept.seen, deleted = swept.deleted, "looked for stale flows");
        for family in status.served() {
            metrics.stale_flows.of(family).add(swept.by_family[family] as u64);
            if let Some(since) = since {
                metrics.sweep.of(family).observe(since.elapsed().as_secs_f64());
            }
        }
    };
    match Sweeper::start(report) {
        Ok(sweeper) => Box::new(move |plan, look| {
            asked.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Instant::now);
            match look {
                Look::Stale(rules) => sweeper.add(plan, rules),
                Look::Missed => sweeper.add_missed(plan),
            }
        }),
        Err(error) => {
            tracing::warn!(%error, "no access to tracked connections; stale UDP flows stay until they time out");
            Box::new(|_, _| {})
        }
    }
}
