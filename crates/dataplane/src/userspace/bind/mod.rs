// SPDX-License-Identifier: Apache-2.0

//! Listens on the service addresses themselves, which a link of ours has. No packet filter is asked for anything.
//!
//! Pure: `spots` (from the Plan to places to listen). Effects: `link` (addresses), `flag` (who listens, who drains);
//! `surroundings` is asked by the relay about each client.

mod flag;
mod link;
mod served;
mod spots;
mod surroundings;
mod watch;

use std::{
    net::IpAddr,
    sync::{Arc, PoisonError},
    thread,
    time::{Duration, Instant},
};

use hashbrown::{HashMap, HashSet};
use model::{Changes, Decision, Family, FlowRule, Frontend, Plan, Protocol};
use netlink::route::{Route, Way};
use relay::{Listen, Transport};

use self::link::Addresses;
pub(super) use self::{
    flag::{Flag, is_raised},
    link::delete,
    spots::Spot,
    surroundings::Surroundings,
};
use super::{
    book::Side,
    gone, is_served,
    options::{Carrier, Running},
};
use crate::{
    Abilities, Applied, Audited, Config, Dataplane, Error, Scope, Unsupported,
    leftovers::{self, Keep},
    names::userspace::{DRAINS, LINK},
};

/// New addresses are waited for no longer than this, all together.
const REACHABLE: Duration = Duration::from_secs(5);

/// Carries what arrives at listeners on the service addresses.
#[derive(Debug)]
pub(crate) struct Bind {
    route: Route,
    config: Config,
    /// `None` when that is not known, at the start and after an error.
    known: Option<Known>,
}

/// What is in force.
#[derive(Debug)]
struct Known {
    addresses: Addresses,
    /// Which frontends need an address.
    users: HashMap<IpAddr, HashSet<Frontend>>,
    spots: HashMap<Frontend, Vec<Spot>>,
}

impl Bind {
    /// Connects in the network namespace of this thread.
    pub(crate) fn open(config: &Config) -> Result<Bind, Unsupported> {
        let route = Route::open().map_err(|error| {
            Unsupported(format!("no connection to the kernel's links and addresses (netlink): {error}"))
        })?;
        Ok(Bind { route, config: config.clone(), known: None })
    }

    fn carrier(&self) -> &Carrier {
        &self.config.userspace.carrier
    }

    fn is_ours(&self, frontend: &Frontend) -> bool {
        self.config.families[frontend.family()] && is_served(frontend)
    }

    fn everything(&mut self, plan: &Plan) -> Result<Applied, Error> {
        let mut applied = Applied::default();
        let failed = |error| Error::kernel("read the addresses of", LINK, error);
        let addresses = Addresses::read(&mut self.route).map_err(failed)?;
        let mut known = Known { addresses, users: HashMap::new(), spots: HashMap::new() };
        {
            let Carrier(inner) = self.carrier();
            let mut around = inner.book.surroundings.write().unwrap_or_else(PoisonError::into_inner);
            around.settle(plan, Route::open().ok());
        }
        let mut ranked: Vec<(&Frontend, &Decision)> =
            plan.frontends().filter(|(frontend, _)| self.is_ours(frontend)).collect();
        ranked.sort_by_key(|(_, decision)| decision.rank);
        for (frontend, decision) in ranked {
            self.put(plan, (frontend, decision), None, (&mut known, &mut applied))?;
        }
        self.await_addresses(&mut known);
        self.clear(plan, &mut known, &mut applied)?;
        let sctp = plan.frontends().filter(|(frontend, _)| !is_served(frontend)).count();
        applied.warnings.extend(super::says_of_sctp(sctp));
        applied.warnings.extend(super::says_of_low_ports());
        self.known = Some(known);
        Ok(applied)
    }

    /// Removes what no frontend needs: of the last process, or of a service that went while something failed.
    fn clear(&mut self, plan: &Plan, known: &mut Known, applied: &mut Applied) -> Result<(), Error> {
        let Carrier(inner) = &self.config.userspace.carrier;
        let wanted: HashSet<Spot> = known.spots.values().flatten().copied().collect();
        let listening: Vec<Spot> = inner.listeners().keys().copied().collect();
        for spot in listening.into_iter().filter(|spot| !wanted.contains(spot)) {
            inner.unlisten(&spot);
            applied.removed += 1;
        }
        for frontend in inner.book.frontends() {
            if plan.decision(&frontend).is_none() {
                inner.book.remove(&frontend);
            }
        }
        let held: Vec<IpAddr> = known.addresses.ours.iter().copied().collect();
        for address in held.into_iter().filter(|address| is_of_service(*address)) {
            let is_idle = !known.users.contains_key(&address);
            if self.config.families[Family::of(address)] && is_idle {
                let lingers = self.lingers(address);
                if self.may_go(address) {
                    // One that only waited for its last connection is no difference.
                    let mut of_it = Applied::default();
                    self.drop_address(address, known, if lingers { &mut of_it } else { applied })?;
                }
            }
        }
        Ok(())
    }

    fn changes(&mut self, plan: &Plan, changes: &Changes, mut known: Known) -> Result<Applied, Error> {
        let mut applied = Applied::default();
        // Flows may become stale while the frontend stays as it is.
        let flows = changes.flows.iter().map(|rule| &rule.frontend);
        for frontend in changes.frontends.iter().chain(flows) {
            if !self.is_ours(frontend) {
                continue;
            }
            match plan.decision(frontend) {
                Some(decision) => {
                    let at = (frontend, decision);
                    self.put(plan, at, Some(&changes.flows), (&mut known, &mut applied))?;
                }
                None => self.remove(frontend, &mut known, &mut applied)?,
            }
        }
        if changes.frontends.iter().any(|frontend| frontend.protocol == Protocol::Udp) {
            self.carrier().prune();
        }
        self.await_addresses(&mut known);
        self.known = Some(known);
        Ok(applied)
    }

    /// The kernel makes an IPv6 address reachable in the background. Until then packets would go elsewhere.
    fn await_addresses(&mut self, known: &mut Known) {
        let until = Instant::now() + REACHABLE;
        for address in known.addresses.fresh.drain(..) {
            while self.route.way_to(address) != Ok(Way::Here) && Instant::now() < until {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Makes a frontend what the plan says. The relay knows it before anybody listens, somebody listens before the address
    /// is there, and so nobody who comes is refused.
    fn put(
        &mut self,
        plan: &Plan,
        (frontend, decision): (&Frontend, &Decision),
        flows: Option<&[FlowRule]>,
        (known, applied): (&mut Known, &mut Applied),
    ) -> Result<(), Error> {
        let carrier = self.carrier().clone();
        let gone = flows.map(|flows| gone(flows, frontend));
        carrier.0.book.set(*frontend, decision, gone.as_deref());
        carrier.check(frontend);
        let spots = spots::of_frontend(plan, frontend, decision);
        for spot in &spots {
            match self.listen(*spot) {
                Ok(is_new) => applied.added += u64::from(is_new),
                Err(error) => applied.warnings.push(format!("{frontend} is not served: {error}")),
            }
        }
        let before = known.spots.insert(*frontend, spots.clone()).unwrap_or_default();
        for spot in before.iter().filter(|spot| !spots.contains(spot)) {
            carrier.0.unlisten(spot);
            applied.removed += 1;
        }
        let Some(address) = spots::address(frontend).filter(|address| is_of_service(*address)) else {
            return Ok(());
        };
        known.users.entry(address).or_default().insert(*frontend);
        if known.addresses.others.contains(&address) {
            return Ok(());
        }
        let mut around = carrier.0.book.surroundings.write().unwrap_or_else(PoisonError::into_inner);
        around.services.insert(address);
        drop(around);
        if !known.addresses.ours.contains(&address) {
            let failed = |error| Error::kernel("add an address to", format!("{LINK}: {address}"), error);
            known.addresses.add(&mut self.route, address).map_err(failed)?;
            (applied.added, applied.batches) = (applied.added + 1, applied.batches + 1);
        }
        Ok(())
    }

    fn remove(&mut self, frontend: &Frontend, known: &mut Known, applied: &mut Applied) -> Result<(), Error> {
        let Carrier(inner) = &self.config.userspace.carrier;
        for spot in known.spots.remove(frontend).unwrap_or_default() {
            inner.unlisten(&spot);
            applied.removed += 1;
        }
        let services = inner.book.of(frontend);
        inner.book.remove(frontend);
        let Some(address) = spots::address(frontend) else { return Ok(()) };
        if frontend.protocol == Protocol::Tcp {
            let mut lingering = inner.lingering.lock().unwrap_or_else(PoisonError::into_inner);
            lingering.entry(address).or_default().extend(services);
        }
        if let Some(users) = known.users.get_mut(&address) {
            users.remove(frontend);
            if users.is_empty() {
                known.users.remove(&address);
            }
        }
        match known.users.contains_key(&address) || !self.may_go(address) {
            true => Ok(()),
            false => self.drop_address(address, known, applied),
        }
    }

    fn lingers(&self, address: IpAddr) -> bool {
        let lingering = self.carrier().0.lingering.lock().unwrap_or_else(PoisonError::into_inner);
        lingering.contains_key(&address)
    }

    /// While connections to an address are open it stays, or they would hang.
    fn may_go(&self, address: IpAddr) -> bool {
        let mut lingering = self.carrier().0.lingering.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(services) = lingering.get_mut(&address) {
            services.retain(|service| service.open.value() > 0);
            if !services.is_empty() {
                return false;
            }
            lingering.remove(&address);
        }
        !is_raised(DRAINS)
    }

    /// Nobody serves there any more.
    fn drop_address(
        &mut self,
        address: IpAddr,
        known: &mut Known,
        applied: &mut Applied,
    ) -> Result<(), Error> {
        let Carrier(inner) = &self.config.userspace.carrier;
        let mut around = inner.book.surroundings.write().unwrap_or_else(PoisonError::into_inner);
        around.services.remove(&address);
        drop(around);
        if known.addresses.ours.contains(&address) {
            let failed = |error| Error::kernel("remove an address of", format!("{LINK}: {address}"), error);
            known.addresses.remove(&mut self.route, address).map_err(failed)?;
            (applied.removed, applied.batches) = (applied.removed + 1, applied.batches + 1);
        }
        Ok(())
    }

    /// Returns whether nobody listened there before.
    fn listen(&self, spot: Spot) -> Result<bool, String> {
        let Carrier(inner) = self.carrier();
        let Some(Running { relay, spots, .. }) = inner.running.get() else { return Ok(false) };
        let mut listeners = inner.listeners();
        if listeners.contains_key(&spot) {
            return Ok(false);
        }
        if listeners.len() >= *spots {
            return Err(format!(
                "there are {spots} listeners already, as many as the limit of open files leaves room for; raise it \
                 (LimitNOFILE of the unit, or of the container runtime), or do without --userspace-bind"
            ));
        }
        let Spot { transport, address } = spot;
        let listen = Listen {
            freebind: true,
            shared: transport == Transport::Tcp,
            tag: Side::Unknown as u32,
            ..Listen::at(transport, address)
        };
        let bound = relay.listen(listen).map_err(|error| format!("cannot listen on {address}: {error}"))?;
        listeners.insert(spot, bound.id);
        Ok(true)
    }
}

/// Loopback addresses are the node's, whatever a Service says.
fn is_of_service(address: IpAddr) -> bool {
    let is_link_local = matches!(address, IpAddr::V6(ip) if ip.is_unicast_link_local());
    !address.is_loopback() && !is_link_local
}

impl Dataplane for Bind {
    fn apply(&mut self, plan: &Plan, scope: Scope<'_>) -> Result<Applied, Error> {
        // Whoever leaves by `?` leaves nothing known behind.
        let known = self.known.take();
        self.config.userspace.start_bound()?;
        let applied = match (scope, known) {
            (Scope::Only(changes), Some(known)) if !changes.node_wide => {
                self.changes(plan, changes, known)?
            }
            _ => self.everything(plan)?,
        };
        self.carrier().0.raise_flag();
        Ok(applied)
    }

    fn abilities(&self) -> Abilities {
        super::abilities()
    }

    fn cleanup(&mut self) -> Result<(), Error> {
        self.known = None;
        let deleted = delete().map_err(|error| Error::kernel("delete", LINK, error));
        let failed = leftovers::remove_kept().failed.into_iter().map(Error::Setting);
        Error::collect(deleted.err().into_iter().chain(failed).collect())
    }

    fn dump(&mut self) -> Result<String, Error> {
        let failed = |error| Error::kernel("read the addresses of", LINK, error);
        let mut text = leftovers::kept();
        let Ok(link) = self.route.link_index(LINK) else { return Ok(text) };
        text.push_str(&format!("link {LINK}\n"));
        let mut addresses: Vec<IpAddr> = self
            .route
            .addresses()
            .map_err(failed)?
            .iter()
            .filter(|entry| entry.link == link)
            .map(|entry| entry.address)
            .collect();
        addresses.sort_unstable();
        addresses.iter().for_each(|address| text.push_str(&format!("  {address}\n")));
        Ok(text)
    }

    fn keep(&self) -> Option<Keep> {
        Some(Keep::new(self.carrier().clone()))
    }

    /// Takes away addresses whose last connection has ended meanwhile.
    fn audit(&mut self) -> Result<Audited, Error> {
        let Some(mut known) = self.known.take() else { return Ok(Audited::default()) };
        let held: Vec<IpAddr> =
            known.addresses.ours.iter().copied().filter(|it| is_of_service(*it)).collect();
        for address in held {
            let is_idle = !known.users.contains_key(&address);
            if is_idle && self.config.families[Family::of(address)] && self.may_go(address) {
                self.drop_address(address, &mut known, &mut Applied::default())?;
            }
        }
        self.known = Some(known);
        Ok(Audited::default())
    }

    fn watch(&self) -> Result<Option<Box<dyn crate::Watch>>, Error> {
        let book = Arc::clone(&self.carrier().0.book);
        watch::open(book).map(Some)
    }
}
