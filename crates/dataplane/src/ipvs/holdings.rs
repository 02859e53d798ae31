// SPDX-License-Identifier: Apache-2.0

//! What the kernel holds for us of one family, and the steps from there to what it should hold. Pure.

use std::net::IpAddr;

use hashbrown::{HashMap, HashSet};
use model::{Address, Backend, FlowRule, Frontend, Protocol};
use netlink::{
    ipset::Element,
    ipvs::{Change, Dest, DestKey, Forward, Service, ServiceKey, flags},
};

use super::{
    marks::Marks,
    render::{Block, Item, Server},
    sets::Set,
};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Holdings {
    /// Those that go are among them until they have gone.
    pub(super) servers: HashMap<ServiceKey, Held>,
    /// How many need each.
    items: HashMap<Item, u32>,
    /// How many members each set should have.
    members: HashMap<Set, usize>,
    frontends: HashMap<Frontend, Owned>,
    /// How many frontends need each virtual server: a moment long two may, when one takes over from the other.
    wanted: HashMap<ServiceKey, u32>,
    pub(super) health: HashMap<model::ServiceKey, Item>,
    pub(super) common: Vec<Item>,
    pub(super) marks: Marks,
    /// Real servers and whole virtual ones that are to go.
    pub(super) leaving: HashMap<ServiceKey, Leaving>,
}

/// A virtual server as the kernel has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) service: Service,
    pub(super) dests: HashMap<DestKey, u32>,
}

/// What of a virtual server is to go.
#[derive(Debug, Default)]
pub(super) struct Leaving {
    pub(super) dests: HashSet<DestKey>,
    /// All of it; and what it needs until then.
    pub(super) whole: Option<Vec<Item>>,
}

#[derive(Debug, Default)]
struct Owned {
    servers: Box<[ServiceKey]>,
    items: Box<[Item]>,
}

/// Steps, in the order in which they are to be made.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Work {
    pub(super) add: Vec<Item>,
    pub(super) servers: Vec<Change>,
    /// Whole servers, with what each needs as long as it has connections.
    pub(super) doomed: Vec<(ServiceKey, Vec<Item>)>,
    pub(super) remove: Vec<Item>,
}

impl Work {
    pub(super) fn is_empty(&self) -> bool {
        self == &Work::default()
    }
}

/// Flags that only the kernel sets do not count.
pub(super) fn asked(service: &Service) -> Service {
    Service { flags: service.flags & !flags::HASHED, ..service.clone() }
}

pub(super) fn dest(key: DestKey, weight: u32) -> Dest {
    Dest { key, weight, forward: Forward::Nat }
}

impl Holdings {
    /// What is there already, and nobody has asked for yet.
    pub(super) fn found(servers: HashMap<ServiceKey, Held>, marks: Marks) -> Holdings {
        Holdings { servers, marks, ..Holdings::default() }
    }

    pub(super) fn has(&self, item: &Item) -> bool {
        self.items.contains_key(item)
    }

    /// How many members a set should have.
    pub(super) fn members(&self, set: Set) -> usize {
        self.members.get(&set).copied().unwrap_or(0)
    }

    /// The addresses that our link should have.
    pub(super) fn addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.items.keys().filter_map(|item| if let Item::Address(ip) = item { Some(*ip) } else { None })
    }

    /// Whether a frontend needs this virtual server.
    pub(super) fn is_wanted(&self, key: &ServiceKey) -> bool {
        self.wanted.contains_key(key)
    }

    /// The virtual servers of a frontend.
    pub(super) fn servers_of(&self, frontend: &Frontend) -> &[ServiceKey] {
        self.frontends.get(frontend).map(|owned| &*owned.servers).unwrap_or_default()
    }

    /// Whose virtual servers are.
    pub(super) fn owners(&self) -> impl Iterator<Item = (ServiceKey, Frontend)> + '_ {
        self.frontends.iter().flat_map(|(frontend, owned)| owned.servers.iter().map(|key| (*key, *frontend)))
    }

    /// Leaves of the work only what it comes to: what went from one frontend to another neither comes nor goes.
    pub(super) fn settle(&self, work: &mut Work) {
        let mut net: HashMap<Item, i32> = HashMap::new();
        work.add.iter().for_each(|item| *net.entry(*item).or_default() += 1);
        work.remove.iter().for_each(|item| *net.entry(*item).or_default() -= 1);
        let mut keep = |items: &mut Vec<Item>, sign: i32| {
            items.retain(|item| match net.get_mut(item) {
                Some(count) if *count == sign => {
                    *count = 0;
                    true
                }
                _ => false,
            });
        };
        keep(&mut work.add, 1);
        keep(&mut work.remove, -1);
        work.doomed.retain(|(key, _)| !self.is_wanted(key));
    }

    /// One more needs it.
    pub(super) fn hold(&mut self, item: Item, work: &mut Work) {
        let count = self.items.entry(item).or_default();
        *count += 1;
        if *count == 1 {
            if let Item::Member(set, _) = item {
                *self.members.entry(set).or_default() += 1;
            }
            work.add.push(item);
        }
    }

    /// One less needs it.
    pub(super) fn release(&mut self, item: &Item, work: &mut Work) {
        let Some(count) = self.items.get_mut(item) else { return };
        *count -= 1;
        if *count == 0 {
            self.items.remove(item);
            if let Item::Member(set, _) = item {
                self.members.entry(*set).and_modify(|count| *count -= 1);
            }
            work.remove.push(*item);
        }
    }

    /// Puts what a frontend needs now, if it is still there, in the place of what it needed before. `flows` tells
    /// which of its endpoints no longer serve anybody.
    pub(super) fn replace(
        &mut self,
        frontend: Frontend,
        block: Option<Block>,
        flows: Option<&FlowRule>,
        work: &mut Work,
    ) {
        let is_gone = block.is_none();
        let Block { servers, items } = block.unwrap_or_default();
        let old = self.frontends.remove(&frontend).unwrap_or_default();
        items.iter().for_each(|item| self.hold(*item, work));
        let keys: Box<[ServiceKey]> = servers.iter().map(|server| server.service.key).collect();
        keys.iter().for_each(|key| *self.wanted.entry(*key).or_default() += 1);
        for server in servers {
            self.serve(server, &frontend, flows, work);
        }
        for key in &old.servers {
            if let Some(count) = self.wanted.get_mut(key) {
                *count -= 1;
                if *count == 0 {
                    self.wanted.remove(key);
                }
            }
            if keys.contains(key) {
                continue;
            }
            let needs = old.items.iter().filter(|item| is_needed_by(item, *key)).copied().collect();
            work.doomed.push((*key, needs));
        }
        old.items.iter().for_each(|item| self.release(item, work));
        if !is_gone {
            self.frontends.insert(frontend, Owned { servers: keys, items: items.into() });
        }
    }

    /// Makes a virtual server what it should be. Those who come, come first.
    fn serve(&mut self, server: Server, frontend: &Frontend, flows: Option<&FlowRule>, work: &mut Work) {
        let Server { service, dests } = server;
        let key = service.key;
        let held = self.servers.entry(key).or_insert_with(|| {
            work.servers.push(Change::AddService(service.clone()));
            Held { service: service.clone(), dests: HashMap::new() }
        });
        if asked(&held.service) != service {
            work.servers.push(Change::SetService(service.clone()));
            held.service = service;
        }
        let leaving = self.leaving.entry(key).or_default();
        // If it is needed again, its frontend holds what it needs.
        let spare = leaving.whole.take().unwrap_or_default();
        for (to, weight) in &dests {
            leaving.dests.remove(to);
            match held.dests.insert(*to, *weight) {
                None => work.servers.push(Change::AddDest(key, dest(*to, *weight))),
                Some(was) if was != *weight => work.servers.push(Change::SetDest(key, dest(*to, *weight))),
                Some(_) => {}
            }
        }
        // It knows no other choice than the one its hash leads to, even if that takes nobody.
        let cannot_wait = held.service.scheduler == "dh";
        let mut extra: Vec<DestKey> = held.dests.keys().copied().collect();
        extra.retain(|to| dests.binary_search_by_key(to, |(dest, _)| *dest).is_err());
        extra.sort_unstable();
        for to in extra {
            if cannot_wait || is_over(frontend, flows, to) {
                held.dests.remove(&to);
                leaving.dests.remove(&to);
                work.servers.push(Change::RemoveDest(key, to));
                continue;
            }
            leaving.dests.insert(to);
            if held.dests.insert(to, 0) != Some(0) {
                work.servers.push(Change::SetDest(key, dest(to, 0)));
            }
        }
        if leaving.dests.is_empty() {
            self.leaving.remove(&key);
        }
        spare.iter().for_each(|item| self.release(item, work));
    }
}

/// Flows of protocols without connections are to leave an endpoint that does not serve any more, at once: their clients
/// would go on sending to it. One that is terminating but still serves keeps them.
fn is_over(frontend: &Frontend, flows: Option<&FlowRule>, to: DestKey) -> bool {
    let is_it = |backend: &Backend| (backend.address, backend.port) == (to.address, to.port);
    match flows.filter(|_| frontend.protocol != Protocol::Tcp) {
        None => false,
        Some(FlowRule { gone: Some(gone), .. }) => gone.iter().any(is_it),
        Some(rule) => !rule.serving.iter().any(is_it),
    }
}

/// What a virtual server needs to be reached.
fn is_needed_by(item: &Item, key: ServiceKey) -> bool {
    let ServiceKey::At { address, .. } = key else { return false };
    match item {
        Item::Address(ip) | Item::Member(Set::IpvsIps, Element::Ip(ip)) => *ip == address,
        Item::Member(..) => false,
    }
}

/// The frontends that a change of others may concern: a node port gives way to an address of the node.
pub(super) fn neighbours(frontend: &Frontend, is_own: impl Fn(&IpAddr) -> bool) -> Option<Frontend> {
    match frontend.address {
        Address::Ip(ip) if is_own(&ip) => {
            Some(Frontend { address: Address::NodePort(frontend.family()), ..*frontend })
        }
        _ => None,
    }
}
