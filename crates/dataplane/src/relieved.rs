// SPDX-License-Identifier: Apache-2.0

//! Node ports on loopback addresses that the kernel cannot translate, beside any mode that writes rules: ::1 in all of
//! them, 127.0.0.1 in ipvs mode and where `route_localnet` may not be set. A relay in this process listens there.
//!
//! It works only while the process lives; nothing else on a loopback address could.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use hashbrown::HashMap;
use model::{Address, Family, Frontend, Plan, Protocol, Verdict};
use relay::{Listen, Relay, Settings, Transport};

use crate::{
    Abilities, Applied, Audited, Dataplane, Error, Listed, Meter, Scope, Watch,
    leftovers::Keep,
    userspace::book::{Book, Side},
    xtables::Variant,
};

/// A dataplane, and a relay for what it cannot do.
pub(crate) struct Relieved {
    inner: Box<dyn Dataplane>,
    book: Arc<Book>,
    /// Begins with the first node port that needs it.
    relay: Option<Relay>,
    listeners: HashMap<Frontend, u64>,
}

impl Relieved {
    pub(crate) fn new(inner: Box<dyn Dataplane>) -> Relieved {
        Relieved { inner, book: Arc::default(), relay: None, listeners: HashMap::new() }
    }

    /// Whether loopback addresses of a family are ours to serve.
    fn is_ours(&self, plan: &Plan, family: Family) -> bool {
        plan.loopback_node_ports(family) && !self.inner.serves_loopback(family)
    }

    fn serve(&mut self, plan: &Plan, scope: Scope<'_>) -> Vec<String> {
        let wanted = [Family::V4, Family::V6].map(|family| self.is_ours(plan, family));
        if wanted == [false; 2] && self.listeners.is_empty() {
            return Vec::new();
        }
        let is_wanted = |frontend: &Frontend| wanted[usize::from(frontend.family() == Family::V6)];
        let mut touched: Vec<Frontend> = match scope {
            Scope::Only(changes) if !changes.node_wide => changes.frontends.clone(),
            _ => plan
                .frontends()
                .map(|(frontend, _)| *frontend)
                .chain(self.listeners.keys().copied())
                .collect(),
        };
        touched.retain(|frontend| matches!(frontend.address, Address::NodePort(_)));
        let mut warnings = Vec::new();
        for frontend in touched {
            let decision = plan.decision(&frontend).filter(|decision| {
                is_wanted(&frontend)
                    && frontend.protocol != Protocol::Sctp
                    && matches!(decision.inside, Verdict::Forward(_))
            });
            match decision {
                Some(decision) => {
                    self.book.set(frontend, decision, None);
                    if let Err(error) = self.listen(frontend) {
                        let at = address(frontend);
                        warnings.push(format!("node port {frontend} is not served on {at}: {error}"));
                    }
                }
                None => self.leave(&frontend),
            }
        }
        if let Some(relay) = &self.relay {
            relay.prune();
        }
        warnings
    }

    fn listen(&mut self, frontend: Frontend) -> std::io::Result<()> {
        if self.listeners.contains_key(&frontend) {
            return Ok(());
        }
        let relay = match &self.relay {
            Some(relay) => relay,
            None => {
                let settings = Settings { workers: 1, ..Settings::default() };
                self.relay.insert(Relay::start(settings, Arc::clone(&self.book) as Arc<_>)?)
            }
        };
        let transport = if frontend.protocol == Protocol::Udp { Transport::Udp } else { Transport::Tcp };
        let listen = Listen { tag: Side::Inside as u32, ..Listen::at(transport, address(frontend)) };
        let bound = relay.listen(listen)?;
        self.listeners.insert(frontend, bound.id);
        Ok(())
    }

    fn leave(&mut self, frontend: &Frontend) {
        if let (Some(id), Some(relay)) = (self.listeners.remove(frontend), &self.relay) {
            relay.unlisten(id);
            self.book.remove(frontend);
        }
    }
}

fn address(frontend: Frontend) -> SocketAddr {
    let loopback: IpAddr = match frontend.family() {
        Family::V4 => Ipv4Addr::LOCALHOST.into(),
        Family::V6 => Ipv6Addr::LOCALHOST.into(),
    };
    SocketAddr::new(loopback, frontend.port)
}

// What has a default would otherwise hide what the mode itself says.
#[deny(clippy::missing_trait_methods)]
impl Dataplane for Relieved {
    fn apply(&mut self, plan: &Plan, scope: Scope<'_>) -> Result<Applied, Error> {
        let mut applied = self.inner.apply(plan, scope)?;
        // What it says of loopback addresses is no longer so.
        applied.warnings.retain(|warning| !warning.starts_with("node ports are not served on "));
        applied.warnings.extend(self.serve(plan, scope));
        Ok(applied)
    }

    fn cleanup(&mut self) -> Result<(), Error> {
        self.inner.cleanup()
    }

    fn dump(&mut self) -> Result<String, Error> {
        self.inner.dump()
    }

    fn listed(&mut self) -> Result<Vec<Listed>, Error> {
        self.inner.listed()
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    fn serves_loopback(&self, family: Family) -> bool {
        self.inner.serves_loopback(family)
    }

    fn audit(&mut self) -> Result<Audited, Error> {
        self.inner.audit()
    }

    fn is_untold(&self) -> bool {
        self.inner.is_untold()
    }

    fn take_lock_wait(&mut self) -> Duration {
        self.inner.take_lock_wait()
    }

    fn keep(&self) -> Option<Keep> {
        self.inner.keep()
    }

    fn variant(&self) -> Option<Variant> {
        self.inner.variant()
    }

    fn meter(&self) -> Result<Option<Box<dyn Meter>>, Error> {
        self.inner.meter()
    }

    fn watch(&self) -> Result<Option<Box<dyn Watch>>, Error> {
        self.inner.watch()
    }
}
