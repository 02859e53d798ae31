// SPDX-License-Identifier: Apache-2.0

#![doc = include_str!("README.md")]
//!
//! # Layout of the code
//!
//! Pure: `elements` and `frame` (from the Plan to sets and rules). Effects: `kernel` reads and writes them, `routes` makes what
//! is steered the node's own, `book` tells the relay which frontend leads where, `carrier` starts it, `release` lets go, `watch` sees what others do.
//! `bind` is the other way: listeners on the service addresses themselves.

mod bind;
pub(crate) mod book;
mod carrier;
mod elements;
mod frame;
mod kernel;
mod options;
mod release;
mod routes;
mod watch;

use std::{
    collections::BTreeSet,
    io,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::Arc,
};

use model::{Address, Changes, Family, FlowRule, Frontend, PerFamily, Plan, Protocol};
use netlink::{
    Socket, Transport,
    conntrack::{Conntrack, Ends, Filter, Flow},
    nft::{Batch, Delete, Monitor, Nft},
};

pub(crate) use self::{
    bind::Bind,
    release::{leave, leave_steering},
    routes::widen,
};
use self::{elements::Placed, frame::Around, kernel::Holdings};
pub use relay::{Counters, Refusal};

pub use self::{
    options::{Carrier, Options},
    release::{Succession, stand_back},
};
use crate::{
    Abilities, Applied, Config, Dataplane, Error, Scope, Unsupported,
    loopback::Localnet,
    names::userspace::{LINK, TABLE},
    nftables::wire,
};

/// Steers traffic to a relay in this process.
#[derive(Debug)]
pub struct Userspace<T = Socket> {
    nft: Nft<T>,
    config: Config,
    /// What the tables hold; `None` when that is not known, at the start and after an error.
    known: Option<PerFamily<Holdings>>,
}

impl Userspace<Socket> {
    /// Connects in the network namespace of this thread, and asks whether the kernel can do what we need.
    pub fn open(config: &Config) -> Result<Userspace<Socket>, Unsupported> {
        let nft = Nft::open().map_err(|error| {
            Unsupported(format!("no connection to the kernel's packet filter (netlink): {error}"))
        })?;
        let mut userspace = Userspace { nft, config: config.clone(), known: None };
        userspace.probe()?;
        Ok(userspace)
    }

    /// Rehearses an empty table: nothing is committed.
    fn probe(&mut self) -> Result<(), Unsupported> {
        let empty = Plan::new();
        for family in self.families() {
            let around = Around {
                plan: &empty,
                family,
                ports: options::Ports { tcp: [1; 2], udp: [1; 2] },
                has_ipvs: true,
                loopback: Localnet::default().guard(family),
            };
            let batch = kernel::probe(family, &frame::chains(&around));
            self.nft.rehearse(&batch).map_err(|error| {
                Unsupported(format!(
                    "the kernel cannot give packets to a local socket ({} tproxy and socket of nftables are needed; load \
                     nft_tproxy and nft_socket): {error}",
                    wire(family)
                ))
            })?;
        }
        Ok(())
    }
}

fn around(plan: &Plan, family: Family, ports: PerFamily<options::Ports>) -> Around<'_> {
    let (has_ipvs, loopback) = (crate::leftovers::has_ipvs(), Localnet::of_kernel().guard(family));
    Around { plan, family, ports: ports[family], has_ipvs, loopback }
}

impl<T: Transport> Userspace<T> {
    fn families(&self) -> impl Iterator<Item = Family> + use<T> {
        let families = self.config.families;
        Family::BOTH.into_iter().filter(move |family| families[*family])
    }

    /// The relay learns where frontends lead before packets come, and what is gone after they no longer do.
    fn note(&self, plan: &Plan, frontends: &mut dyn Iterator<Item = Frontend>, flows: Option<&[FlowRule]>) {
        let Carrier(inner) = &self.config.userspace.carrier;
        for frontend in frontends {
            if let Some(decision) = plan.decision(&frontend).filter(|_| is_served(&frontend)) {
                let gone = flows.map(|flows| gone(flows, &frontend));
                inner.book.set(frontend, decision, gone.as_deref());
                self.config.userspace.carrier.check(&frontend);
            }
        }
    }

    fn everything(&mut self, plan: &Plan, ports: PerFamily<options::Ports>) -> Result<Applied, Error> {
        let mut applied = Applied::default();
        let mut known = PerFamily::default();
        self.note(plan, &mut plan.frontends().map(|(frontend, _)| *frontend), None);
        for family in self.families() {
            routes::add(family)?;
            let mut holdings = kernel::read(&mut self.nft, family)?;
            let wanted = elements::all(plan, family);
            let removed: Vec<Placed> = holdings.elements.difference(&wanted).copied().collect();
            let added: Vec<Placed> = wanted.difference(&holdings.elements).copied().collect();
            let chains = frame::chains(&around(plan, family, ports));
            let wanted = match holdings.is_to_be_replaced(&chains) {
                true => (Some(chains), Vec::new(), wanted.into_iter().collect()),
                false => (Some(chains), removed, added),
            };
            kernel::write(&mut self.nft, family, &mut holdings, wanted, &mut applied)?;
            known[family] = holdings;
        }
        for frontend in self.config.userspace.carrier.0.book.frontends() {
            if plan.decision(&frontend).is_none() {
                self.config.userspace.carrier.0.book.remove(&frontend);
            }
        }
        let sctp = plan.frontends().filter(|(frontend, _)| !is_served(frontend)).count();
        applied.warnings.extend(says_of_sctp(sctp));
        applied.warnings.extend(says_of_low_ports());
        self.known = Some(known);
        Ok(applied)
    }

    fn changes(
        &mut self,
        plan: &Plan,
        changes: &Changes,
        (mut known, ports): (PerFamily<Holdings>, PerFamily<options::Ports>),
    ) -> Result<Applied, Error> {
        let mut applied = Applied::default();
        // Flows may become stale while the frontend stays as it is.
        let touched =
            || changes.frontends.iter().copied().chain(changes.flows.iter().map(|rule| rule.frontend));
        self.note(plan, &mut touched(), Some(&changes.flows));
        let mut stale = Vec::new();
        for family in self.families() {
            let holdings = &mut known[family];
            let (mut had, mut wants) = (BTreeSet::new(), BTreeSet::new());
            for frontend in changes.frontends.iter().filter(|frontend| frontend.family() == family) {
                let held = elements::held(&holdings.elements, frontend);
                let decision = plan.decision(frontend);
                let wanted = decision.map(|it| elements::of_frontend(frontend, it)).unwrap_or_default();
                if frontend.protocol == Protocol::Udp && held.iter().any(|placed| !wanted.contains(placed)) {
                    stale.push(*frontend);
                }
                had.extend(held);
                wants.extend(wanted);
            }
            if changes.node_wide || !changes.cluster_ips.is_empty() {
                had.extend(holdings.elements.iter().filter(|placed| elements::is_of_node(placed)));
                wants.extend(elements::of_node(plan, family));
            }
            let chains = changes.node_wide.then(|| frame::chains(&around(plan, family, ports)));
            let removed = had.difference(&wants).copied().collect();
            let added = wants.difference(&had).copied().collect();
            kernel::write(&mut self.nft, family, holdings, (chains, removed, added), &mut applied)?;
        }
        for frontend in changes.frontends.iter().filter(|frontend| plan.decision(frontend).is_none()) {
            self.config.userspace.carrier.0.book.remove(frontend);
        }
        self.known = Some(known);
        if touched().any(|frontend| frontend.protocol == Protocol::Udp) {
            self.config.userspace.carrier.prune();
        }
        forget_flows(&stale);
        Ok(applied)
    }
}

impl<T: Transport> Dataplane for Userspace<T> {
    fn apply(&mut self, plan: &Plan, scope: Scope<'_>) -> Result<Applied, Error> {
        // Whoever leaves by `?` leaves nothing known behind.
        let known = self.known.take();
        let ports = self.config.userspace.start(self.config.families)?;
        match (scope, known) {
            (Scope::Only(changes), Some(known)) => self.changes(plan, changes, (known, ports)),
            _ => self.everything(plan, ports),
        }
    }

    fn abilities(&self) -> Abilities {
        abilities()
    }

    fn cleanup(&mut self) -> Result<(), Error> {
        self.known = None;
        let mut errors = Vec::new();
        for family in Family::BOTH {
            let mut batch = Batch::new();
            batch.delete_table(0, kernel::table(family), Delete::Existing);
            match self.nft.commit(&batch) {
                Err(error) if !error.is_not_found() => {
                    errors.push(Error::kernel("delete", format!("table {} {TABLE}", wire(family)), error));
                }
                _ => (),
            }
            errors.extend(routes::remove(family).err());
        }
        errors.extend(bind::delete().map_err(|error| Error::kernel("delete", LINK, error)).err());
        Error::collect(errors)
    }

    fn dump(&mut self) -> Result<String, Error> {
        let mut text = String::new();
        for family in self.families() {
            let holdings = kernel::read(&mut self.nft, family)?;
            if !holdings.exists {
                continue;
            }
            text.push_str(&format!("table {} {TABLE}\n", wire(family)));
            for written in &holdings.chains {
                text.push_str(&format!("  chain {}: {} rules\n", written.chain.name, written.rules.len()));
            }
            for placed in &holdings.elements {
                text.push_str(&format!("  {}: {}\n", placed.0.name(), elements::describe(family, placed)));
            }
        }
        Ok(text)
    }

    fn watch(&self) -> Result<Option<Box<dyn crate::Watch>>, Error> {
        let monitor = Monitor::open().map_err(|error| Error::kernel("watch", "our tables", error))?;
        let farewell = Arc::clone(&self.config.userspace.carrier.0.farewell);
        Ok(Some(Box::new(watch::Watch::new(monitor, self.nft.port(), farewell))))
    }
}

/// Endpoints of a frontend to which nothing may be sent any more.
fn gone(flows: &[FlowRule], frontend: &Frontend) -> Vec<SocketAddr> {
    let rules = flows.iter().filter(|rule| rule.frontend == *frontend);
    let gone = rules.filter_map(|rule| rule.gone.as_deref()).flatten();
    gone.map(|backend| SocketAddr::new(backend.address, backend.port)).collect()
}

fn abilities() -> Abilities {
    let schedulers = book::SCHEDULERS.to_vec();
    let instead = "the least busy endpoint is taken";
    Abilities { schedulers, weights: true, relay: true, instead, ..Abilities::default() }
}

fn says_of_sctp(count: usize) -> Option<String> {
    (count > 0).then(|| format!("the userspace mode does not serve SCTP: {count} frontends are left out"))
}

/// To answer as a service on a low port takes a privilege that this process may lack.
fn says_of_low_ports() -> Option<String> {
    let bound = UdpSocket::bind((Ipv4Addr::LOCALHOST, 1));
    let lacks = matches!(bound, Err(error) if error.kind() == io::ErrorKind::PermissionDenied);
    lacks.then(|| {
        "CAP_NET_BIND_SERVICE is missing: UDP clients of ports below 1024, the cluster DNS among them, get no answer; \
         with --userspace-bind no service on such a port is served"
            .to_owned()
    })
}

fn is_served(frontend: &Frontend) -> bool {
    frontend.protocol != Protocol::Sctp
}

/// Frontends whose UDP packets are treated otherwise from now on: the kernel must see the next packet of each client as
/// a first one, or it would not be refused. Nobody is harmed if it fails, or finds nothing.
fn forget_flows(frontends: &[Frontend]) {
    if frontends.is_empty() {
        return;
    }
    let Ok(mut conntrack) = Conntrack::open() else { return };
    for frontend in frontends {
        let mut filter = Filter::protocol(wire(frontend.family()), frontend.protocol.number());
        let dst = match frontend.address {
            Address::Ip(ip) => Some(ip),
            Address::NodePort(_) => None,
        };
        filter.original = Ends { dst, dport: Some(frontend.port), ..Ends::default() };
        let mut flows: Vec<Flow> = Vec::new();
        if conntrack.flows(&filter, |flow| flows.push(*flow)).is_ok() {
            flows.iter().for_each(|flow| drop(conntrack.delete(flow)));
        }
    }
}
