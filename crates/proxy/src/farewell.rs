// SPDX-License-Identifier: Apache-2.0

//! The end of a process that carries connections itself.
//!
//! In userspace mode nothing is served without a process, and the next one may come seconds later. So when it is told to
//! end, the rules of nftables mode take over for new connections; open ones go on here, for a while. The next process
//! removes those rules once it serves.
//!
//! With `--userspace-bind` there may be no packet filter to take over. There we go on listening until another process
//! does, if one waits for our end, or until our last connection has ended.

use std::{
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use dataplane::{
    Mode, Scope,
    userspace::{self, Carrier, Succession},
};
use model::PerFamily;
use tokio::sync::Notify;

use crate::{app, claim, config::check::Checked, reconcile::Relief};

/// The rules of nftables mode are written within this, at the largest sizes too.
const RELIEF: Duration = Duration::from_secs(10);

/// A process that waits for our end has taken our place within this.
const HEIR: Duration = Duration::from_millis(200);

/// What carries connections, and how it ends.
pub struct Carried {
    pub carrier: Carrier,
    /// How long open connections may go on.
    bound: Duration,
    /// It listens on the service addresses themselves.
    listens: bool,
}

/// What carries connections; `None` in the other modes.
pub fn carried(checked: &Checked) -> Option<Carried> {
    let userspace::Options { carrier, bind, .. } = &checked.userspace;
    let carried = || Carried { carrier: carrier.clone(), bound: checked.drain, listens: *bind };
    (checked.mode == Mode::Userspace).then(carried)
}

/// Has the kernel serve new connections.
pub fn relief(checked: &Checked, families: PerFamily<bool>) -> Option<Relief> {
    if checked.mode != Mode::Userspace || checked.userspace.bind {
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
pub fn drain(carried: &Carried, stop: &Arc<Notify>, reconcile: Option<JoinHandle<()>>) {
    let Carried { carrier, bound, listens } = carried;
    let bound = *bound;
    let succession = listens.then(|| Succession::announce(carrier));
    stop.notify_one();
    let until = Instant::now() + RELIEF;
    while reconcile.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < until {
        thread::sleep(Duration::from_millis(5));
    }
    let open = carrier.open_connections();
    if open > 0 {
        tracing::info!(open, ?bound, "waiting for open connections");
    }
    let until = Instant::now() + bound;
    if let Some(succession) = succession {
        hand_over(&succession, carrier, until);
    }
    let left = carrier.drain(until.saturating_duration_since(Instant::now()), || false);
    if left > 0 {
        tracing::warn!(
            left,
            "closing connections that are still open; --userspace-drain says how long they may last"
        );
    }
}

/// Listens on until another process does. One that waited for our end has the claim by now; without one there is nobody to
/// wait for once the last connection has ended.
fn hand_over(succession: &Succession, carrier: &Carrier, until: Instant) {
    let begun = Instant::now();
    while Instant::now() < until {
        if succession.is_there() {
            tracing::info!("another process listens now");
            return succession.give_way(carrier);
        }
        let has_heir = claim::is_held() || begun.elapsed() < HEIR;
        if !has_heir && carrier.open_connections() == 0 {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
}
