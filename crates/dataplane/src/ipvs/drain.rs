// SPDX-License-Identifier: Apache-2.0

//! Real servers that are going: no new connections, and none left or a bound passed before they are gone.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use hashbrown::HashMap;
use model::PerFamily;
use netlink::{
    Error as WireError,
    ipvs::{Change, DestKey, HeldDest, ServiceKey},
};

use super::{
    holdings::{Holdings, Work},
    turn::Site,
};
use crate::{Applied, Error};

/// As long as the kernel remembers an idle TCP connection. What is open then ends with its next packet.
const BOUND: Duration = Duration::from_secs(15 * 60);

/// So many virtual servers are asked for their connections in one step.
const AT_ONCE: usize = 128;

/// Since when each is going.
#[derive(Debug, Default)]
pub(super) struct Clock {
    since: HashMap<(ServiceKey, DestKey), Instant>,
    /// Those whose turn has not come yet.
    queue: PerFamily<VecDeque<ServiceKey>>,
}

impl Clock {
    /// Looks at those that are going, some at a time, and removes those that may go now.
    pub(super) fn step(
        &mut self,
        site: &mut Site<'_>,
        holdings: &mut Holdings,
        now: Instant,
    ) -> Result<(), Error> {
        let family = site.family;
        let queue = &mut self.queue[family];
        if queue.is_empty() {
            queue.extend(holdings.leaving.keys().copied());
        }
        let turn: Vec<ServiceKey> = queue.drain(..queue.len().min(AT_ONCE)).collect();
        self.since.retain(|(key, dest), _| {
            let is_other = key.family() != crate::nftables::wire(family);
            is_other || holdings.leaving.get(key).is_some_and(|leaving| leaving.dests.contains(dest))
        });
        let mut applied = Applied::default();
        for key in turn {
            let failed = |error: WireError| Error::kernel("list", "real servers", error);
            let found = site.machine.dests(key).map_err(failed)?;
            let ripe = self.ripe(key, &found, holdings, now);
            let changes: Vec<Change> = ripe.iter().map(|to| Change::RemoveDest(key, *to)).collect();
            site.change(&changes, &mut applied)?;
            let mut work = Work::default();
            forget(key, &ripe, holdings, &mut work);
            site.carry_out(work, holdings, &mut applied)?;
        }
        Ok(())
    }

    /// Those that have no connections any more, or have had time enough.
    fn ripe(
        &mut self,
        key: ServiceKey,
        found: &[HeldDest],
        holdings: &Holdings,
        now: Instant,
    ) -> Vec<DestKey> {
        let Some(leaving) = holdings.leaving.get(&key) else { return Vec::new() };
        let mut ripe = Vec::new();
        for held in found.iter().filter(|held| leaving.dests.contains(&held.dest.key)) {
            let since = *self.since.entry((key, held.dest.key)).or_insert(now);
            // With all of its virtual server, it waits for what is open, as if it had been found so.
            let is_idle = held.active == 0 && (held.inactive == 0 || leaving.whole.is_some());
            if is_idle || now.duration_since(since) >= BOUND {
                ripe.push(held.dest.key);
            }
        }
        ripe
    }
}

/// Takes out of the holdings what has gone; a virtual server with its last real one.
fn forget(key: ServiceKey, gone: &[DestKey], holdings: &mut Holdings, work: &mut Work) {
    if let Some(held) = holdings.servers.get_mut(&key) {
        held.dests.retain(|to, _| !gone.contains(to));
    }
    let Some(leaving) = holdings.leaving.get_mut(&key) else { return };
    leaving.dests.retain(|to| !gone.contains(to));
    if !leaving.dests.is_empty() {
        return;
    }
    let whole = leaving.whole.take();
    holdings.leaving.remove(&key);
    if let Some(items) = whole {
        work.servers.push(Change::RemoveService(key));
        holdings.servers.remove(&key);
        items.iter().for_each(|item| holdings.release(item, work));
    }
}
