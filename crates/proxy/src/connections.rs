// SPDX-License-Identifier: Apache-2.0

//! New connections of each service and of each endpoint, as the kernel counts them where it sends them.
//!
//! Read when somebody asks for metrics, at most once a second, on a thread of its own and by a connection of its
//! own: no write waits for it. An element that is removed or replaced loses its count; the dataplane reads it
//! before, and here it is carried over. The series of an endpoint ends with the endpoint, and its count stays in
//! that of the service. Only what has counted something is told, so that a node tells of what it sends traffic to
//! and not of the whole cluster.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::SocketAddr,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use dataplane::{Meter, Reading, Traffic};
use model::{Changes, Frontend, Plan, ServicePortName};
use tokio::runtime::{Handle, RuntimeFlavor};

use crate::metrics::About;

/// A younger reading is good enough.
const FRESH: Duration = Duration::from_secs(1);
/// How long somebody who asks is made to wait for a new reading; then the last one is told.
const PATIENCE: Duration = Duration::from_millis(500);
/// So often a reading that a write has overtaken is tried again.
const ATTEMPTS: usize = 3;

pub(crate) const OF_SERVICES: About = About {
    name: "portolan_service_connections_total",
    kind: "counter",
    labels: &["namespace", "service", "port", "protocol"],
    help: "New connections to a service port that were sent to an endpoint; not those of remembered clients.",
};
pub(crate) const OF_ENDPOINTS: About = About {
    name: "portolan_endpoint_connections_total",
    kind: "counter",
    labels: &["namespace", "service", "port", "protocol", "endpoint"],
    help: "New connections to a service port that were sent to this endpoint; not those of remembered clients.",
};

/// Of services and of endpoints; and what the two values of each are.
const TRAFFIC: [([About; 2], [&str; 2]); 3] = [
    (
        [
            of_service("portolan_service_packets_total", "counter", "Packets of a service port, ipvs mode."),
            of_endpoint("portolan_endpoint_packets_total", "counter", "Packets of an endpoint, ipvs mode."),
        ],
        ["in", "out"],
    ),
    (
        [
            of_service("portolan_service_bytes_total", "counter", "Bytes of a service port, ipvs mode."),
            of_endpoint("portolan_endpoint_bytes_total", "counter", "Bytes of an endpoint, ipvs mode."),
        ],
        ["in", "out"],
    ),
    (
        [
            of_service(
                "portolan_service_open_connections",
                "gauge",
                "Connections of a service port now, ipvs mode.",
            ),
            of_endpoint(
                "portolan_endpoint_open_connections",
                "gauge",
                "Connections of an endpoint now, ipvs mode.",
            ),
        ],
        ["active", "inactive"],
    ),
];

const fn of_service(name: &'static str, kind: &'static str, help: &'static str) -> About {
    About { name, kind, labels: &["namespace", "service", "port", "protocol", "what"], help }
}

const fn of_endpoint(name: &'static str, kind: &'static str, help: &'static str) -> About {
    About { name, kind, labels: &["namespace", "service", "port", "protocol", "endpoint", "what"], help }
}

/// All series that are written here.
pub(crate) fn series() -> impl Iterator<Item = About> {
    [OF_SERVICES, OF_ENDPOINTS].into_iter().chain(TRAFFIC.into_iter().flat_map(|(abouts, _)| abouts))
}

/// The ledger; shared by the loop, the reader and who asks.
#[derive(Default)]
pub struct Connections {
    book: Mutex<Book>,
    read: Condvar,
    reader: Mutex<Option<mpsc::SyncSender<()>>>,
}

type Port = Arc<ServicePortName>;

#[derive(Default)]
struct Book {
    /// Whose each frontend is.
    owners: HashMap<Frontend, Port>,
    /// What elements that are no more had counted.
    retired: HashMap<(Port, SocketAddr), u64>,
    /// The same of endpoints that are no more.
    departed: HashMap<Port, u64>,
    endpoints: BTreeMap<(Port, SocketAddr), u64>,
    /// Packets, bytes and open connections, in and out or active and not.
    traffic: BTreeMap<(Port, SocketAddr), [[u64; 2]; 3]>,
    services: BTreeMap<Port, u64>,
    /// Changes with each retirement: a reading from before must not be added to it.
    epoch: u64,
    readings: u64,
    last: Option<Instant>,
}

impl Connections {
    /// Starts to read by this meter, on a thread of its own that ends with the ledger.
    pub fn attach(self: &Arc<Self>, meter: Box<dyn Meter>) {
        let (bell, rings) = mpsc::sync_channel(1);
        let ledger = Arc::downgrade(self);
        let run = move || {
            let mut meter = meter;
            while rings.recv().is_ok() {
                let Some(ledger) = ledger.upgrade() else { return };
                ledger.take(&mut *meter);
            }
        };
        match thread::Builder::new().name("connections".to_owned()).spawn(run) {
            Ok(_) => *self.reader.lock().unwrap_or_else(PoisonError::into_inner) = Some(bell),
            Err(error) => {
                tracing::warn!(%error, "cannot start a thread; connections are not told in metrics")
            }
        }
    }

    /// Whose frontends are, from now on: what became different, or, with `None`, everything.
    pub fn follow(&self, plan: &Plan, changes: Option<&Changes>) {
        if self.reader.lock().unwrap_or_else(PoisonError::into_inner).is_none() {
            return;
        }
        let mut book = self.lock();
        match changes {
            None => {
                let owner = |(frontend, decision): (&Frontend, &model::Decision)| {
                    (*frontend, Arc::clone(&decision.service))
                };
                book.owners = plan.frontends().map(owner).collect();
            }
            Some(changes) => {
                for frontend in &changes.frontends {
                    match plan.decision(frontend) {
                        Some(decision) => book.owners.insert(*frontend, Arc::clone(&decision.service)),
                        None => book.owners.remove(frontend),
                    };
                }
            }
        }
    }

    /// Takes what elements had counted that are gone now. To be told before [`Connections::follow`].
    pub fn retire(&self, readings: &[Reading]) {
        if readings.is_empty() {
            return;
        }
        let mut book = self.lock();
        book.epoch += 1;
        for reading in readings.iter().filter(|reading| reading.connections > 0) {
            if let Some(owner) = book.owners.get(&reading.frontend).cloned() {
                *book.retired.entry((owner, reading.endpoint)).or_default() += reading.connections;
            }
        }
    }

    /// Writes the series, with a new reading if the last one is old.
    pub fn render(&self, out: &mut String) {
        self.refresh();
        let book = self.lock();
        let labels = |port: &ServicePortName| {
            let ServicePortName { service, port, protocol } = port;
            let texts: [&dyn std::fmt::Display; 4] = [&service.namespace, &service.name, port, protocol];
            texts.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        OF_SERVICES.write(out, book.services.iter().map(|(port, count)| (labels(port), *count as f64)));
        let endpoints = book.endpoints.iter().map(|((port, endpoint), count)| {
            let mut labels = labels(port);
            labels.push(endpoint.to_string());
            (labels, *count as f64)
        });
        OF_ENDPOINTS.write(out, endpoints);
        TRAFFIC.iter().enumerate().for_each(|(index, _)| book.write_traffic(index, &labels, out));
    }

    fn refresh(&self) {
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(bell) = reader else { return };
        let book = self.lock();
        if book.last.is_some_and(|last| last.elapsed() < FRESH) {
            return;
        }
        let before = book.readings;
        // A bell that rings already will do.
        let _ = bell.try_send(());
        let unread = |book: &mut Book| book.readings == before;
        unhurried(|| {
            let _ = self.read.wait_timeout_while(book, PATIENCE, unread);
        });
    }

    /// Reads, and enters it into the book; when writes overtake it again and again, the next one has to do.
    fn take(&self, meter: &mut dyn Meter) {
        for _ in 0..ATTEMPTS {
            let epoch = self.lock().epoch;
            let readings = match meter.read() {
                Ok(readings) => readings,
                Err(error) => {
                    tracing::debug!(%error, "cannot read what was counted");
                    break;
                }
            };
            let mut book = self.lock();
            if book.epoch == epoch {
                book.enter(&readings);
                book.enter_traffic(&meter.traffic());
                break;
            }
        }
        let mut book = self.lock();
        book.readings += 1;
        book.last = Some(Instant::now());
        drop(book);
        self.read.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits without holding up the other tasks of a runtime, if this is a thread of one.
fn unhurried(wait: impl FnOnce()) {
    match Handle::try_current() {
        Ok(runtime) if runtime.runtime_flavor() == RuntimeFlavor::MultiThread => {
            tokio::task::block_in_place(wait);
        }
        _ => wait(),
    }
}

impl Book {
    /// Only of endpoints that have connections to tell of.
    fn enter_traffic(&mut self, traffic: &[Traffic]) {
        self.traffic.clear();
        for seen in traffic {
            let Some(owner) = self.owners.get(&seen.frontend) else { continue };
            let key = (Arc::clone(owner), seen.endpoint);
            if !self.endpoints.contains_key(&key) {
                continue;
            }
            let sums = self.traffic.entry(key).or_default();
            let values = [
                [seen.packets_in, seen.packets_out],
                [seen.bytes_in, seen.bytes_out],
                [seen.active, seen.inactive],
            ];
            for (sum, value) in sums.as_flattened_mut().iter_mut().zip(values.as_flattened()) {
                *sum += value;
            }
        }
    }

    fn write_traffic(
        &self,
        index: usize,
        labels: &dyn Fn(&ServicePortName) -> Vec<String>,
        out: &mut String,
    ) {
        let ([of_services, of_endpoints], words) = &TRAFFIC[index];
        let mut services: BTreeMap<&Port, [u64; 2]> = BTreeMap::new();
        for ((port, _), values) in &self.traffic {
            let sum = services.entry(port).or_default();
            (0..2).for_each(|side| sum[side] += values[index][side]);
        }
        let each = |mut head: Vec<String>, values: [u64; 2], side: usize| {
            head.push(words[side].to_owned());
            (head, values[side] as f64)
        };
        let of_each =
            services.iter().flat_map(|(port, values)| [0, 1].map(|s| each(labels(port), *values, s)));
        of_services.write(out, of_each);
        let of_each = self.traffic.iter().flat_map(|((port, endpoint), values)| {
            [0, 1].map(|side| {
                let mut head = labels(port);
                head.push(endpoint.to_string());
                each(head, values[index], side)
            })
        });
        of_endpoints.write(out, of_each);
    }

    fn enter(&mut self, readings: &[Reading]) {
        let mut live: HashMap<(Port, SocketAddr), u64> = HashMap::new();
        for reading in readings {
            if let Some(owner) = self.owners.get(&reading.frontend) {
                *live.entry((Arc::clone(owner), reading.endpoint)).or_default() += reading.connections;
            }
        }
        let departed: Vec<_> = self.retired.keys().filter(|key| !live.contains_key(*key)).cloned().collect();
        for key in departed {
            let count = self.retired.remove(&key).unwrap_or_default();
            *self.departed.entry(key.0).or_default() += count;
        }
        let owners: HashSet<&Port> = self.owners.values().collect();
        self.departed.retain(|port, _| owners.contains(port));
        self.endpoints.retain(|key, _| live.contains_key(key));
        let mut services: BTreeMap<Port, u64> =
            self.departed.iter().map(|(port, count)| (Arc::clone(port), *count)).collect();
        for (key, count) in live {
            let count = count + self.retired.get(&key).copied().unwrap_or_default();
            if count > 0 {
                *services.entry(Arc::clone(&key.0)).or_default() += count;
                let told = self.endpoints.entry(key).or_default();
                *told = count.max(*told);
            }
        }
        // Between a commit and its retirement a reading may miss a little; a counter never goes back.
        for (port, count) in &mut services {
            *count = self.services.get(port).copied().unwrap_or_default().max(*count);
        }
        self.services = services;
    }
}

#[cfg(test)]
mod tests {
    use model::{
        Address, Backend, Decision, Forward, Masquerade, PlanBuilder, Pool, Protocol, Reach, Role,
        ServiceKey, Verdict,
    };

    use super::*;

    /// A meter that tells what the test says, and does something while it reads.
    struct Script(Vec<Vec<Reading>>, Box<dyn FnMut() + Send>);

    impl Meter for Script {
        fn read(&mut self) -> Result<Vec<Reading>, dataplane::Error> {
            (self.1)();
            Ok(self.0.remove(0))
        }
    }

    fn frontend(last: u8) -> Frontend {
        Frontend { address: Address::Ip([10, 96, 0, last].into()), protocol: Protocol::Tcp, port: 80 }
    }

    fn reading(last: u8, endpoint: u8, connections: u64) -> Reading {
        let endpoint = SocketAddr::from(([10, 244, 0, endpoint], 8080));
        Reading { frontend: frontend(last), endpoint, connections }
    }

    fn plan(owners: &[(u8, &str)]) -> Plan {
        let backend = Backend { address: [10, 244, 0, 1].into(), port: 8080, local: false, weight: 1 };
        owners
            .iter()
            .fold(PlanBuilder::new(), |plan, (last, name)| {
                let service = ServiceKey { namespace: "shop".into(), name: (*name).into() };
                let service = ServicePortName { service, port: "http".into(), protocol: Protocol::Tcp };
                let pool = Arc::new(Pool { backends: Box::new([backend]) });
                let verdict = Verdict::Forward(Forward { pool, masquerade: Masquerade::Never });
                let decision = Decision {
                    service: Arc::new(service),
                    role: Role::ClusterIp,
                    inside: verdict.clone(),
                    outside: verdict,
                    affinity: None,
                    tuning: None,
                    source_ranges: None,
                    reach: Reach::Cluster,
                    rank: 0,
                };
                plan.frontend(frontend(*last), decision)
            })
            .build()
    }

    /// A ledger that follows this plan, without a thread.
    fn ledger(owners: &[(u8, &str)]) -> Arc<Connections> {
        let ledger = Arc::new(Connections::default());
        let (bell, rings) = mpsc::sync_channel(1);
        drop(rings);
        *ledger.reader.lock().expect("one thread") = Some(bell);
        ledger.follow(&plan(owners), None);
        ledger
    }

    fn take(ledger: &Connections, readings: &[Reading]) -> Vec<String> {
        ledger.take(&mut Script(vec![readings.to_vec()], Box::new(|| {})));
        lines(ledger)
    }

    fn lines(ledger: &Connections) -> Vec<String> {
        let mut out = String::new();
        ledger.render(&mut out);
        let shorter = |line: &str| {
            line.replace("namespace=\"shop\",", "").replace(",port=\"http\",protocol=\"tcp\"", "")
        };
        out.lines().filter(|line| !line.starts_with('#')).map(shorter).collect()
    }

    #[test]
    fn frontends_of_one_service_are_one_and_zeros_are_not_told() {
        let ledger = ledger(&[(1, "cart"), (2, "cart"), (3, "idle")]);
        assert_eq!(
            take(
                &ledger,
                &[reading(1, 1, 3), reading(2, 1, 4), reading(2, 2, 0), reading(3, 9, 0), reading(7, 7, 7)]
            ),
            [
                "portolan_service_connections_total{service=\"cart\"} 7",
                "portolan_endpoint_connections_total{service=\"cart\",endpoint=\"10.244.0.1:8080\"} 7",
            ]
        );
    }

    #[test]
    fn what_is_replaced_or_goes_is_carried_over() {
        let ledger = ledger(&[(1, "cart")]);
        take(&ledger, &[reading(1, 1, 10), reading(1, 2, 5)]);
        // Endpoint 1 moves to another slot, and counts from nothing; endpoint 2 goes.
        ledger.retire(&[reading(1, 1, 12), reading(1, 2, 6)]);
        assert_eq!(
            take(&ledger, &[reading(1, 1, 1)]),
            [
                "portolan_service_connections_total{service=\"cart\"} 19",
                "portolan_endpoint_connections_total{service=\"cart\",endpoint=\"10.244.0.1:8080\"} 13",
            ]
        );
        // The service goes, and all its series.
        ledger.follow(&plan(&[]), None);
        assert_eq!(take(&ledger, &[]), Vec::<String>::new());
        assert!(ledger.lock().departed.is_empty() && ledger.lock().retired.is_empty(), "memory is bounded");
    }

    #[test]
    fn a_reading_that_a_write_overtook_is_not_counted_twice() {
        let ledger = ledger(&[(1, "cart")]);
        let (overtaken, mut times) = (Arc::clone(&ledger), 0);
        let overtake = move || {
            if times == 0 {
                overtaken.retire(&[reading(1, 1, 10)]);
            }
            times += 1;
        };
        // The first reading is from before the element was replaced.
        ledger.take(&mut Script(vec![vec![reading(1, 1, 10)], vec![reading(1, 1, 2)]], Box::new(overtake)));
        assert_eq!(lines(&ledger)[0], "portolan_service_connections_total{service=\"cart\"} 12");
    }

    #[test]
    fn a_counter_never_goes_back() {
        let ledger = ledger(&[(1, "cart")]);
        take(&ledger, &[reading(1, 1, 10)]);
        assert_eq!(
            take(&ledger, &[reading(1, 1, 4)])[0],
            "portolan_service_connections_total{service=\"cart\"} 10"
        );
    }

    #[test]
    fn a_meter_is_read_when_asked() {
        let ledger = Arc::new(Connections::default());
        ledger.attach(Box::new(Script(vec![vec![reading(1, 1, 3)]], Box::new(|| {}))));
        ledger.follow(&plan(&[(1, "cart")]), None);
        assert_eq!(lines(&ledger)[0], "portolan_service_connections_total{service=\"cart\"} 3");
        assert_eq!(
            lines(&ledger)[0],
            "portolan_service_connections_total{service=\"cart\"} 3",
            "still fresh"
        );
    }
}
