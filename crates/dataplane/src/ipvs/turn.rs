// SPDX-License-Identifier: Apache-2.0

//! Carries work out, step by step: IPVS, sets and links know no transactions. So what lets traffic through comes before
//! what sends it there, and goes after it.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use model::{Family, Scheduler};
use netlink::{
    ipset::Element,
    ipvs::{Change, DestKey, HeldDest, ServiceKey},
};

use super::{
    holdings::{Held, Holdings, Work, dest},
    kernel::Machine,
    meter,
    render::Item,
    sets::Set,
};
use crate::{Applied, Error};

/// Where work is done.
pub(super) struct Site<'a> {
    pub(super) machine: &'a mut dyn Machine,
    pub(super) family: Family,
    pub(super) link: u32,
    /// Virtual servers that are never removed.
    pub(super) spared: &'a dyn Fn(&ServiceKey) -> bool,
    /// What real servers that were removed had counted, where anything is.
    pub(super) retired: Option<&'a mut Vec<(ServiceKey, SocketAddr, u64)>>,
    /// Schedulers that the kernel turned out not to have.
    pub(super) absent: Vec<Scheduler>,
}

impl Site<'_> {
    /// Does all of it. After an error nobody knows what was done.
    pub(super) fn carry_out(
        &mut self,
        mut work: Work,
        holdings: &mut Holdings,
        applied: &mut Applied,
    ) -> Result<(), Error> {
        holdings.settle(&mut work);
        if work.is_empty() {
            return Ok(());
        }
        applied.batches += 1;
        let (members, addresses) = split(&work.add);
        for (set, elements) in &members {
            self.add(*set, elements)?;
        }
        for (key, to) in self.change(&work.servers, applied)? {
            if let Some(held) = holdings.servers.get_mut(&key) {
                held.dests.remove(&to);
            }
        }
        for ip in &addresses {
            self.machine.bind(self.link, *ip).map_err(|error| Error::kernel("add", ip.to_string(), error))?;
        }
        applied.added += count(&members) + addresses.len() as u64;
        self.dismiss(&mut work, holdings, applied)?;
        let (members, addresses) = split(&work.remove);
        for ip in &addresses {
            self.machine
                .unbind(self.link, *ip)
                .map_err(|error| Error::kernel("remove", ip.to_string(), error))?;
        }
        for (set, elements) in &members {
            self.remove(*set, elements, &work.add)?;
        }
        applied.removed += count(&members) + addresses.len() as u64;
        Ok(())
    }

    fn add(&mut self, set: Set, elements: &[Element]) -> Result<(), Error> {
        let name = set.name(self.family);
        let family = crate::nftables::wire(self.family);
        self.machine.add(&name, family, elements).map_err(|error| Error::kernel("add to set", name, error))
    }

    /// A mark belongs to a place, and a place with a new mark must not be removed with the old one.
    fn remove(&mut self, set: Set, elements: &[Element], added: &[Item]) -> Result<(), Error> {
        let is_kept = |element: &Element| match element {
            Element::Marked { address, protocol, port, .. } => added.iter().any(|item| {
                matches!(item, Item::Member(_, Element::Marked { address: a, protocol: t, port: p, .. })
                    if (a, t, p) == (address, protocol, port))
            }),
            _ => false,
        };
        let gone: Vec<Element> = elements.iter().copied().filter(|element| !is_kept(element)).collect();
        let name = set.name(self.family);
        let family = crate::nftables::wire(self.family);
        self.machine
            .remove(&name, family, &gone)
            .map_err(|error| Error::kernel("remove from set", name, error))
    }

    /// Virtual and real servers. A refusal means that they are not what we thought; but real servers with an address that
    /// cannot be one are left out, and come back.
    pub(super) fn change(
        &mut self,
        changes: &[Change],
        applied: &mut Applied,
    ) -> Result<Vec<(ServiceKey, DestKey)>, Error> {
        let mut left_out = Vec::new();
        if changes.is_empty() {
            return Ok(left_out);
        }
        self.retire(changes);
        let failed = |error| Error::kernel("change", "virtual servers", error);
        let refusals = self.machine.change(changes).map_err(failed)?;
        for refusal in &refusals {
            // A server that is not there has another error.
            if let Some(Change::AddService(it) | Change::SetService(it)) = changes.get(refusal.index)
                && refusal.error.errno() == Some(netlink::Errno::NOENT)
            {
                self.absent.extend(Scheduler::parse(&it.scheduler));
            }
        }
        for refusal in refusals {
            let change = changes.get(refusal.index);
            let what = change.map(|change| Words(change).to_string()).unwrap_or_default();
            match change {
                // The address of a network, or a broadcast, of a link of this node.
                Some(Change::AddDest(key, to)) if refusal.error.errno() == Some(netlink::Errno::INVAL) => {
                    left_out.push((*key, to.key));
                    applied.warnings.push(format!("{what} is left out: the kernel refuses its address"));
                }
                _ => return Err(Error::kernel("change", what, refusal.error)),
            }
        }
        for change in changes {
            match change {
                Change::AddService(_) | Change::AddDest(..) => applied.added += 1,
                Change::SetService(_) | Change::SetDest(..) => {
                    applied.added += 1;
                    applied.removed += 1;
                }
                Change::RemoveService(_) | Change::RemoveDest(..) => applied.removed += 1,
            }
        }
        applied.added -= left_out.len() as u64;
        Ok(left_out)
    }

    /// Remembers what those that go have counted. What the kernel does not tell is left out.
    fn retire(&mut self, changes: &[Change]) {
        let Some(retired) = &mut self.retired else { return };
        let mut going: BTreeMap<ServiceKey, Option<Vec<DestKey>>> = BTreeMap::new();
        for change in changes {
            match change {
                Change::RemoveService(key) => drop(going.insert(*key, None)),
                Change::RemoveDest(key, dest) => {
                    if let Some(dests) = going.entry(*key).or_insert_with(|| Some(Vec::new())) {
                        dests.push(*dest);
                    }
                }
                _ => {}
            }
        }
        for (key, which) in going {
            let held = self.machine.dests(key).unwrap_or_default();
            let is_going = |held: &&HeldDest| which.as_ref().is_none_or(|it| it.contains(&held.dest.key));
            retired.extend(
                held.iter().filter(is_going).map(|it| (key, meter::place(it), it.counters.connections)),
            );
        }
    }

    /// Virtual servers that nobody needs. One with open connections stays for them, without taking new ones.
    fn dismiss(
        &mut self,
        work: &mut Work,
        holdings: &mut Holdings,
        applied: &mut Applied,
    ) -> Result<(), Error> {
        let mut changes = Vec::new();
        for (key, needs) in std::mem::take(&mut work.doomed) {
            if (self.spared)(&key) {
                holdings.servers.remove(&key);
                continue;
            }
            let is_kept = keeps_connections(&key) && self.is_busy(key)?;
            let Some(held) = holdings.servers.get_mut(&key) else { continue };
            if !is_kept {
                changes.push(Change::RemoveService(key));
                holdings.servers.remove(&key);
                holdings.leaving.remove(&key);
                continue;
            }
            let leaving = holdings.leaving.entry(key).or_default();
            changes.extend(quiesce(key, held));
            leaving.dests.extend(held.dests.keys().copied());
            let stay: Vec<Item> = needs;
            leaving.whole = Some(stay.clone());
            for item in stay {
                // It may have been released a moment ago, but is there still.
                let mut again = Work::default();
                holdings.hold(item, &mut again);
                work.remove.retain(|removed| !again.add.contains(removed));
            }
        }
        self.change(&changes, applied).map(drop)
    }

    fn is_busy(&mut self, key: ServiceKey) -> Result<bool, Error> {
        let failed = |error| Error::kernel("list", "real servers", error);
        Ok(self.machine.dests(key).map_err(failed)?.iter().any(|dest| dest.active > 0))
    }
}

/// Those of a protocol that has any.
fn keeps_connections(key: &ServiceKey) -> bool {
    match key {
        ServiceKey::At { protocol, .. } => *protocol == model::Protocol::Tcp.number(),
        ServiceKey::Mark { .. } => true,
    }
}

/// No new connections for any real server.
fn quiesce(key: ServiceKey, held: &mut Held) -> Vec<Change> {
    let open = held.dests.iter_mut().filter(|(_, weight)| **weight > 0);
    open.map(|(to, weight)| {
        *weight = 0;
        Change::SetDest(key, dest(*to, 0))
    })
    .collect()
}

fn split(items: &[Item]) -> (BTreeMap<Set, Vec<Element>>, Vec<IpAddr>) {
    let (mut members, mut addresses): (BTreeMap<Set, Vec<Element>>, _) = (BTreeMap::new(), Vec::new());
    for item in items {
        match item {
            Item::Member(set, element) => members.entry(*set).or_default().push(*element),
            Item::Address(ip) => addresses.push(*ip),
        }
    }
    (members, addresses)
}

fn count(members: &BTreeMap<Set, Vec<Element>>) -> u64 {
    members.values().map(|elements| elements.len() as u64).sum()
}

/// A change, for messages.
struct Words<'a>(&'a Change);

impl std::fmt::Display for Words<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Change::AddService(s) | Change::SetService(s) => {
                write!(f, "virtual server {} with scheduler {}", Place(&s.key), s.scheduler)
            }
            Change::RemoveService(key) => write!(f, "virtual server {}", Place(key)),
            Change::AddDest(key, to) | Change::SetDest(key, to) => {
                write!(f, "real server {}:{} of {}", to.key.address, to.key.port, Place(key))
            }
            Change::RemoveDest(key, to) => {
                write!(f, "real server {}:{} of {}", to.address, to.port, Place(key))
            }
        }
    }
}

/// A virtual server, for messages.
pub(super) struct Place<'a>(pub(super) &'a ServiceKey);

impl std::fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            ServiceKey::At { protocol, address, port } => {
                let name = model::Protocol::from_number(*protocol).map(|protocol| protocol.to_string());
                let at = std::net::SocketAddr::new(*address, *port);
                write!(f, "{at}/{}", name.unwrap_or_else(|| protocol.to_string()))
            }
            ServiceKey::Mark { mark, .. } => write!(f, "with mark {mark:#x}"),
        }
    }
}
