// SPDX-License-Identifier: Apache-2.0

//! Which frontend leads to which service of the relay: from the Plan, for the workers.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use hashbrown::HashMap;
use model::{Address, Decision, Family, Forward, Frontend, Protocol, Scheduler, Verdict};
use relay::{Algorithm, Arrival, Check, CheckKind, Directory, Service, ServiceSettings, Transport};

/// From where a client comes. The number is the listener's tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// From anywhere; from outside only, where inside differs.
    Everyone = 0,
    /// From this node's pods and processes, where that differs.
    Inside = 1,
}

impl Side {
    pub(super) const BOTH: [Side; 2] = [Side::Everyone, Side::Inside];
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Book {
    entries: RwLock<HashMap<Frontend, [Option<Arc<Service>>; 2]>>,
}

/// The verdicts that lead to endpoints, by side.
pub(super) fn forwards(decision: &Decision) -> [Option<&Forward>; 2] {
    fn forward(verdict: &Verdict) -> Option<&Forward> {
        match verdict {
            Verdict::Forward(forward) => Some(forward),
            Verdict::Reject | Verdict::Drop => None,
        }
    }
    let inside = forward(&decision.inside).filter(|_| decision.inside != decision.outside);
    [forward(&decision.outside), inside]
}

impl Book {
    /// Makes a frontend lead where the Plan says. What it led to before goes on with the connections it has.
    ///
    /// `void`: those of its endpoints that are no more; all that are not among the new ones, if `None`.
    pub(crate) fn set(&self, frontend: Frontend, decision: &Decision, void: Option<&[SocketAddr]>) {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.entry(frontend).or_default();
        for (place, forward) in entry.iter_mut().zip(forwards(decision)) {
            let Some(forward) = forward else {
                place.take().iter().for_each(|service| service.close());
                continue;
            };
            let backends = forward.pool.backends.iter();
            let weighs = decision.algorithm().scheduler.is_none_or(Scheduler::weighs);
            let weight = |weight: u16| if weighs { u32::from(weight) } else { 1 };
            let endpoints: Vec<(SocketAddr, u32)> = backends
                .map(|backend| (SocketAddr::new(backend.address, backend.port), weight(backend.weight)))
                .collect();
            let service = place.get_or_insert_with(|| Arc::new(Service::new(decision.service.to_string())));
            match void {
                Some(void) => service.update_gently(settings(decision), &endpoints, void),
                None => service.update(settings(decision), &endpoints),
            }
        }
    }

    /// A frontend is gone.
    pub(crate) fn remove(&self, frontend: &Frontend) {
        let removed = self.entries.write().unwrap_or_else(PoisonError::into_inner).remove(frontend);
        removed.iter().flatten().flatten().for_each(|service| service.close());
    }

    /// All frontends there are.
    pub(super) fn frontends(&self) -> Vec<Frontend> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).keys().copied().collect()
    }

    pub(super) fn services(&self) -> Vec<Arc<Service>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.values().flatten().flatten().cloned().collect()
    }

    /// The services of a frontend.
    pub(super) fn of(&self, frontend: &Frontend) -> Vec<Arc<Service>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.get(frontend).into_iter().flatten().flatten().cloned().collect()
    }
}

impl Directory for Book {
    fn find(&self, arrival: &Arrival) -> Option<Arc<Service>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let protocol = match arrival.transport {
            Transport::Tcp => Protocol::Tcp,
            Transport::Udp => Protocol::Udp,
        };
        let ip: IpAddr = arrival.destination.ip();
        let service = Frontend { address: Address::Ip(ip), protocol, port: arrival.destination.port() };
        let node_port = Frontend { address: Address::NodePort(Family::of(ip)), ..service };
        let [everyone, inside] = entries.get(&service).or_else(|| entries.get(&node_port))?;
        let wanted = if arrival.tag == Side::Inside as u32 {
            inside.as_ref().or(everyone.as_ref())
        } else {
            everyone.as_ref()
        };
        wanted.cloned()
    }
}

/// How often endpoints are asked where a service wishes it, how long an answer may take, and how many in a row count.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);
const CHECK_THRESHOLD: u32 = 2;

/// What the relay follows. What it does not ends with the least busy endpoint.
pub(super) const SCHEDULERS: [Scheduler; 8] = [
    Scheduler::Random,
    Scheduler::RoundRobin,
    Scheduler::WeightedRoundRobin,
    Scheduler::LeastConnections,
    Scheduler::WeightedLeastConnections,
    Scheduler::SourceHash,
    Scheduler::Maglev,
    Scheduler::RandomOfTwo,
];

fn settings(decision: &Decision) -> ServiceSettings {
    let algorithm = match decision.algorithm().scheduler {
        None | Some(Scheduler::RoundRobin | Scheduler::WeightedRoundRobin) => Algorithm::RoundRobin,
        Some(Scheduler::Random) => Algorithm::Random,
        Some(Scheduler::RandomOfTwo) => Algorithm::RandomOfTwo,
        Some(Scheduler::SourceHash | Scheduler::Maglev) => Algorithm::SourceHash,
        // All of them look at how busy endpoints are; so does this one.
        Some(_) => Algorithm::LeastConnections,
    };
    let affinity =
        decision.affinity.map(|affinity| Duration::from_secs(u64::from(affinity.timeout_secs.get())));
    let wishes = decision.tuning.as_deref().map(|tuning| tuning.relay.clone()).unwrap_or_default();
    let check = wishes.check.map(|kind| Check {
        kind: match kind {
            model::Check::Tcp => CheckKind::Connect,
            model::Check::Http(path) => CheckKind::Http(path.to_string()),
        },
        interval: CHECK_INTERVAL,
        timeout: CHECK_TIMEOUT,
        threshold: CHECK_THRESHOLD,
    });
    ServiceSettings {
        algorithm,
        affinity,
        proxy_protocol: wishes.proxy_protocol,
        connections: wishes.connections.map(u32::from),
        check,
    }
}
