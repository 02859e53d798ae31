// SPDX-License-Identifier: Apache-2.0

//! The end of a process that carries connections itself.
//!
//! In userspace mode nothing is served without a process, and the next one may come seconds later. So when it is told to
//! end, the rules of nftables mode take over for new connections; open ones go on here, for a while. The next process
//! removes those rules once it serves.

use std::{
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use dataplane::{
    Mode, Scope,
    userspace::{self, Carrier},
};
use model::PerFamily;
use tokio::sync::Notify;

use crate::{app, config::check::Checked, reconcile::Relief};

/// The rules of nftables mode are written within this, at the largest sizes too.
const RELIEF: Duration = Duration::from_secs(10);

/// What carries connections, and for how long it may at the end; `None` in the other modes.
pub fn carried(checked: &Checked) -> Option<(Carrier, Duration)> {
    (checked.mode == Mode::Userspace).then(|| (checked.userspace.carrier.clone(), checked.drain))
}

/// Has the kernel serve new connections.
pub fn relief(checked: &Checked, families: PerFamily<bool>) -> Option<Relief> {
    if checked.mode != Mode::Userspace {
        return None;
    }
    let carrier = checked.userspace.carrier.clone();
    let kernel = Checked { mode: Mode::Nftables, ..checked.clone() };
    Some(Box::new(move |plan| {
        let mut nftables = app::open(&kernel, families)?;
        nftables.apply(plan, Scope::All).map_err(|error| error.to_string())?;
        userspace::stand_back(plan, &carrier).map_err(|error| error.to_string())
    }))
}

/// Ends the loop, and waits for open connections.
pub fn drain((carrier, bound): (&Carrier, Duration), stop: &Arc<Notify>, reconcile: Option<JoinHandle<()>>) {
    stop.notify_one();
    let until = Instant::now() + RELIEF;
    while reconcile.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < until {
        thread::sleep(Duration::from_millis(5));
    }
    let open = carrier.counters().map_or(0, |counters| counters.open_connections.value());
    if open > 0 {
        tracing::info!(open, ?bound, "waiting for open connections");
    }
    let left = carrier.drain(bound, || false);
    if left > 0 {
        tracing::warn!(
            left,
            "closing connections that are still open; --userspace-drain says how long they may last"
        );
    }
}
