// SPDX-License-Identifier: Apache-2.0

//! Which frontend leads to which service of the relay: from the Plan, for the workers.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use hashbrown::HashMap;
use ipnet::IpNet;
use model::{Address, Decision, Family, Forward, Frontend, Protocol, Scheduler, Verdict};
use relay::{Algorithm, Arrival, Check, CheckKind, Directory, Refusal, Service, ServiceSettings, Transport};

use super::bind::Surroundings;

/// From where a client comes. The number is the listener's tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// From anywhere; from outside only, where inside differs.
    Everyone = 0,
    /// From this node's pods and processes, where that differs.
    Inside = 1,
    /// The listener does not know. No packet filter stands before it either, so that all is asked here.
    Unknown = 2,
}

impl Side {
    /// Those that listeners of their own know.
    pub(super) const BOTH: [Side; 2] = [Side::Everyone, Side::Inside];
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Book {
    entries: RwLock<HashMap<Frontend, Entry>>,
    /// For [`Side::Unknown`].
    pub(super) surroundings: RwLock<Surroundings>,
}

/// Where one frontend leads.
#[derive(Debug, Default)]
struct Entry {
    /// By [`Side`].
    services: [Option<Arc<Service>>; 2],
    /// Those that nobody new is led to, as long as they have flows: these end only when their endpoint is no more.
    resting: Vec<Arc<Service>>,
    /// Inside is not treated as everyone.
    differs: bool,
    /// Who may connect at all.
    ranges: Option<Arc<[IpNet]>>,
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
        entry.differs = decision.inside != decision.outside;
        entry.ranges.clone_from(&decision.source_ranges);
        for (place, forward) in entry.services.iter_mut().zip(forwards(decision)) {
            let Some(forward) = forward else {
                entry.resting.extend(place.take());
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
        entry.resting.retain(|service| {
            match void {
                Some(void) => service.update_gently(settings(decision), &[], void),
                None => service.close(),
            }
            service.open.value() > 0
        });
    }

    /// A frontend is gone.
    pub(crate) fn remove(&self, frontend: &Frontend) {
        let removed = self.entries.write().unwrap_or_else(PoisonError::into_inner).remove(frontend);
        if let Some(entry) = removed {
            entry.services.iter().flatten().chain(&entry.resting).for_each(|service| service.close());
        }
    }

    /// All frontends there are.
    pub(super) fn frontends(&self) -> Vec<Frontend> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).keys().copied().collect()
    }

    pub(super) fn services(&self) -> Vec<Arc<Service>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.values().flat_map(|entry| &entry.services).flatten().cloned().collect()
    }

    /// The services of a frontend.
    pub(super) fn of(&self, frontend: &Frontend) -> Vec<Arc<Service>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.get(frontend).into_iter().flat_map(|entry| &entry.services).flatten().cloned().collect()
    }
}

impl Directory for Book {
    fn find(&self, arrival: &Arrival) -> Result<Arc<Service>, Refusal> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let protocol = match arrival.transport {
            Transport::Tcp => Protocol::Tcp,
            Transport::Udp => Protocol::Udp,
        };
        let ip: IpAddr = arrival.destination.ip();
        let service = Frontend { address: Address::Ip(ip), protocol, port: arrival.destination.port() };
        let node_port = Frontend { address: Address::NodePort(Family::of(ip)), ..service };
        if arrival.tag == Side::Unknown as u32 {
            let around = self.surroundings.read().unwrap_or_else(PoisonError::into_inner);
            let node_port = || entries.get(&node_port).filter(|_| around.serves_node_ports(ip));
            let entry = entries.get(&service).or_else(node_port).ok_or(Refusal::Unknown)?;
            return entry.for_client(arrival, &around);
        }
        let entry = entries.get(&service).or_else(|| entries.get(&node_port)).ok_or(Refusal::Unknown)?;
        let [everyone, inside] = &entry.services;
        let wanted = inside.as_ref().filter(|_| arrival.tag == Side::Inside as u32).or(everyone.as_ref());
        wanted.cloned().ok_or(Refusal::Endpoints)
    }
}

impl Entry {
    /// The service for a client of which nothing is known but its address.
    fn for_client(&self, arrival: &Arrival, around: &Surroundings) -> Result<Arc<Service>, Refusal> {
        let client = arrival.client.ip();
        if self.ranges.as_ref().is_some_and(|ranges| !ranges.iter().any(|net| net.contains(&client))) {
            return Err(Refusal::Forbidden);
        }
        let [everyone, inside] = &self.services;
        let is_inside = self.differs && around.is_inside(client, arrival.destination.ip());
        let service = if is_inside { inside } else { everyone };
        service.clone().ok_or(Refusal::Endpoints)
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

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use model::{
        Affinity, Backend, Masquerade, Pool, Reach, RelayWishes, Role, ServiceKey, ServicePortName, Tuning,
    };

    use super::*;

    fn forward(last: u8) -> Verdict {
        let backend = Backend { address: [10, 0, 0, last].into(), port: 8080, local: true, weight: 1 };
        let pool = Arc::new(Pool { backends: [backend].into_iter().collect() });
        Verdict::Forward(Forward { pool, masquerade: Masquerade::Never })
    }

    fn decision(inside: Verdict, outside: Verdict) -> Decision {
        let service = ServiceKey { namespace: "n".into(), name: "web".into() };
        Decision {
            service: Arc::new(ServicePortName { service, port: "".into(), protocol: Protocol::Tcp }),
            role: Role::ClusterIp,
            inside,
            outside,
            affinity: None,
            tuning: None,
            source_ranges: None,
            reach: Reach::Cluster,
            rank: 2,
        }
    }

    fn frontend() -> Frontend {
        Frontend { address: Address::Ip([10, 96, 0, 10].into()), protocol: Protocol::Tcp, port: 80 }
    }

    /// Whom a client gets, by the last byte of the endpoint's address.
    fn gets(book: &Book, client: &str, side: Side) -> Result<u8, Refusal> {
        let client = SocketAddr::new(client.parse().expect("an address"), 40_000);
        let destination = SocketAddr::new([10, 96, 0, 10].into(), 80);
        let arrival = Arrival { tag: side as u32, transport: Transport::Tcp, client, destination };
        let service = book.find(&arrival)?;
        match service.roster().members[0].endpoint.address.ip() {
            IpAddr::V4(ip) => Ok(ip.octets()[3]),
            IpAddr::V6(_) => unreachable!("the test has IPv4 only"),
        }
    }

    #[test]
    fn who_comes_from_inside_is_known_by_the_listener_or_by_the_address() {
        let book = Book::default();
        book.set(frontend(), &decision(forward(1), forward(2)), None);
        assert_eq!(gets(&book, "192.0.2.1", Side::Inside), Ok(1));
        assert_eq!(gets(&book, "192.0.2.1", Side::Everyone), Ok(2));
        assert_eq!(gets(&book, "192.0.2.1", Side::Unknown), Ok(2));
        assert_eq!(gets(&book, "10.96.0.10", Side::Unknown), Ok(1), "the node itself");
        book.set(frontend(), &decision(forward(1), Verdict::Drop), None);
        assert_eq!(gets(&book, "192.0.2.1", Side::Unknown), Err(Refusal::Endpoints));
        assert_eq!(gets(&book, "10.96.0.10", Side::Unknown), Ok(1));
    }

    #[test]
    fn without_a_packet_filter_source_ranges_are_kept_here() {
        let book = Book::default();
        let ranges = ["192.0.2.0/28".parse().expect("a range")];
        let decision = Decision { source_ranges: Some(ranges.into()), ..decision(forward(1), forward(1)) };
        book.set(frontend(), &decision, None);
        assert_eq!(gets(&book, "192.0.2.1", Side::Unknown), Ok(1));
        assert_eq!(gets(&book, "192.0.2.99", Side::Unknown), Err(Refusal::Forbidden));
        assert_eq!(gets(&book, "192.0.2.99", Side::Everyone), Ok(1), "the packet filter has let it in");
        book.remove(&frontend());
        assert_eq!(gets(&book, "192.0.2.1", Side::Unknown), Err(Refusal::Unknown));
    }

    #[test]
    fn what_a_service_asks_for_reaches_the_relay() {
        let asked = |scheduler| {
            let algorithm = model::Algorithm { scheduler, ..model::Algorithm::default() };
            let relay = RelayWishes {
                proxy_protocol: true,
                connections: NonZeroU32::new(7),
                check: Some(model::Check::Http("/healthz".into())),
            };
            let tuning = Some(Arc::new(Tuning { algorithm, relay }));
            let affinity = NonZeroU32::new(60).map(|timeout_secs| Affinity { timeout_secs });
            settings(&Decision { tuning, affinity, ..decision(forward(1), forward(1)) })
        };
        for (scheduler, algorithm) in [
            (None, Algorithm::RoundRobin),
            (Some(Scheduler::RoundRobin), Algorithm::RoundRobin),
            (Some(Scheduler::WeightedRoundRobin), Algorithm::RoundRobin),
            (Some(Scheduler::Random), Algorithm::Random),
            (Some(Scheduler::RandomOfTwo), Algorithm::RandomOfTwo),
            (Some(Scheduler::SourceHash), Algorithm::SourceHash),
            (Some(Scheduler::Maglev), Algorithm::SourceHash),
            (Some(Scheduler::LeastConnections), Algorithm::LeastConnections),
            (Some(Scheduler::WeightedLeastConnections), Algorithm::LeastConnections),
        ] {
            assert_eq!(asked(scheduler).algorithm, algorithm, "{scheduler:?}");
        }
        let all = asked(None);
        assert!(all.proxy_protocol);
        assert_eq!((all.connections, all.affinity), (Some(7), Some(Duration::from_secs(60))));
        assert_eq!(all.check.map(|check| check.kind), Some(CheckKind::Http("/healthz".to_owned())));
        let plain = settings(&decision(forward(1), forward(1)));
        assert_eq!(plain, ServiceSettings::default());
    }
}
