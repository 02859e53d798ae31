// SPDX-License-Identifier: Apache-2.0

//! Health-check node ports: load balancers ask them which nodes have endpoints of a service with
//! externalTrafficPolicy Local.
//!
//! The loop tells what there is after each successful write. A thread of its own, in the same network namespace,
//! opens and closes the listeners; nothing here can delay a write. Counts are read when somebody asks, so a change
//! of endpoints costs no more than a number.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, SystemTime},
};

use hyper::{Response, StatusCode};
use model::{Changes, Family, HealthCheck, NodePortScope, PerFamily, Plan, ServiceKey};
use tokio::{runtime::Builder, sync::Notify, task::JoinHandle};

use crate::{
    events::{Note, Recorder, Regarding},
    http::{self, Answer, body},
    metrics::{Metrics, ip_family},
    reconcile::Publish,
    status::Status,
};

/// The wait between two attempts to open a port that somebody else holds.
const RETRY: Duration = Duration::from_secs(5);

/// What is to be served; written by the loop, read by the servers.
struct Checks {
    wanted: Mutex<Wanted>,
    /// Rings when other listeners are wanted than before.
    bell: Notify,
    status: Arc<Status>,
    metrics: Arc<Metrics>,
    events: Recorder,
}

#[derive(Default)]
struct Wanted {
    checks: BTreeMap<ServiceKey, HealthCheck>,
    scopes: PerFamily<Option<NodePortScope>>,
    /// Nobody will tell anything any more: close everything.
    over: bool,
}

/// One listener: where, and for whom.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    address: SocketAddr,
    service: ServiceKey,
}

/// Starts the thread, in the network namespace of the calling one. It ends when the returned function is dropped.
pub fn publish(status: &Arc<Status>, metrics: &Arc<Metrics>, events: &Recorder) -> Publish {
    let checks = Arc::new(Checks {
        wanted: Mutex::default(),
        bell: Notify::new(),
        status: Arc::clone(status),
        metrics: Arc::clone(metrics),
        events: events.clone(),
    });
    let servers = Arc::clone(&checks);
    let started = thread::Builder::new().name("health-checks".to_owned()).spawn(move || run(&servers));
    if let Err(error) = started {
        tracing::error!(%error, "cannot start a thread; health-check node ports are not served");
    }
    let teller = Teller(checks);
    Box::new(move |plan, changes| teller.tell(plan, changes))
}

/// The loop's end of it.
struct Teller(Arc<Checks>);

impl Teller {
    fn tell(&self, plan: &Plan, changes: Option<&Changes>) {
        let mut wanted = self.0.lock();
        let moved = match changes {
            Some(changes) if !changes.node_wide => {
                let mut moved = false;
                for key in &changes.health {
                    moved |= wanted.put(key, plan.health().get(key));
                }
                moved
            }
            _ => {
                wanted.checks = plan.health().clone();
                wanted.scopes = PerFamily::from_fn(|family| Some(plan.node_ports(family).clone()));
                true
            }
        };
        drop(wanted);
        if moved {
            self.0.bell.notify_one();
        }
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        self.0.lock().over = true;
        self.0.bell.notify_one();
    }
}

impl Wanted {
    /// Returns whether other listeners are wanted than before.
    fn put(&mut self, key: &ServiceKey, check: Option<&HealthCheck>) -> bool {
        let before = match check {
            Some(check) => self.checks.insert(key.clone(), check.clone()),
            None => self.checks.remove(key),
        };
        let place = |check: &HealthCheck| (check.port, check.families);
        before.as_ref().map(place) != check.map(place)
    }

    /// One listener for each family on all addresses, or one for each address that serves node ports.
    fn places(&self) -> impl Iterator<Item = Place> + '_ {
        let families = |check: &HealthCheck| {
            let families = check.families;
            Family::BOTH.into_iter().filter(move |family| families[*family])
        };
        self.checks.iter().flat_map(move |(service, check)| {
            families(check).flat_map(move |family| {
                let addresses = match &self.scopes[family] {
                    None => Vec::new(),
                    Some(NodePortScope::All) => vec![wildcard(family)],
                    Some(NodePortScope::Only(addresses)) => addresses.iter().copied().collect(),
                };
                let port = check.port;
                addresses.into_iter().map(move |address| Place {
                    address: SocketAddr::new(address, port),
                    service: service.clone(),
                })
            })
        })
    }
}

fn wildcard(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    }
}

impl Checks {
    fn lock(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, place: &Place) -> Answer {
        let family = Family::of(place.address.ip());
        let count = self.lock().checks.get(&place.service).map_or(0, |check| check.local_endpoints[family]);
        let healthy = self.status.report(SystemTime::now()).healthy;
        let code = if count > 0 && healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        let response = Response::builder()
            .status(code)
            .header("Content-Type", "application/json")
            .header("X-Content-Type-Options", "nosniff")
            .header("X-Load-Balancing-Endpoint-Weight", count);
        response
            .body(body(text(&place.service, count, healthy)))
            .expect("constant names and a number are valid")
    }

    fn failed(&self, place: &Place, error: &io::Error) {
        let family = ip_family(Family::of(place.address.ip()));
        self.metrics.check_failures.with(&[family]).add(1);
        let Place { address, service } = place;
        self.events.note(Note::warning(
            "FailedToStartServiceHealthcheck",
            "Listen",
            Regarding::Service(service.clone()),
            format!(
                "node {} failed to start healthcheck {service} on port {}: {error}",
                self.events.node(),
                address.port()
            ),
        ));
        tracing::error!(%service, %address, %error, "cannot open the health-check node port, trying again");
    }
}

/// As kube-proxy lays it out, tabs and all: some load balancers compare text.
fn text(ServiceKey { namespace, name }: &ServiceKey, count: u32, healthy: bool) -> String {
    format!(
        "{{\n\t\"service\": {{\n\t\t\"namespace\": {namespace:?},\n\t\t\"name\": {name:?}\n\t}},\n\t\
         \"localEndpoints\": {count},\n\t\"serviceProxyHealthy\": {healthy}\n}}"
    )
}

fn run(checks: &Arc<Checks>) {
    let runtime = match Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "cannot start threads; health-check node ports are not served");
            return;
        }
    };
    runtime.block_on(async {
        let mut servers = Servers::default();
        loop {
            if servers.failing.is_empty() {
                checks.bell.notified().await;
            } else {
                // In time or not, the next look is the same.
                let _ = tokio::time::timeout(RETRY, checks.bell.notified()).await;
            }
            if checks.lock().over {
                return;
            }
            servers.follow(checks).await;
        }
    });
}

/// What is open, and what should be and is not.
#[derive(Default)]
struct Servers {
    open: BTreeMap<Place, JoinHandle<()>>,
    failing: BTreeMap<Place, io::ErrorKind>,
}

impl Servers {
    async fn follow(&mut self, checks: &Arc<Checks>) {
        let wanted: BTreeMap<Place, ()> = checks.lock().places().map(|place| (place, ())).collect();
        self.failing.retain(|place, _| wanted.contains_key(place));
        // First everything is closed that has to be: another service may want that port now.
        let gone: Vec<Place> =
            self.open.keys().filter(|place| !wanted.contains_key(place)).cloned().collect();
        for place in gone {
            if let Some(server) = self.open.remove(&place) {
                server.abort();
                // An aborted task ends with an error that says so.
                let _ = server.await;
                tracing::debug!(service = %place.service, address = %place.address, "health-check node port closed");
            }
        }
        for place in wanted.into_keys() {
            if !self.open.contains_key(&place) {
                self.start(checks, place);
            }
        }
        for family in checks.status.served() {
            let open = self.open.keys().filter(|place| Family::of(place.address.ip()) == family).count();
            checks.metrics.check_listeners.of(family).set(open as f64);
        }
    }

    fn start(&mut self, checks: &Arc<Checks>, place: Place) {
        let listener = match http::bind_family(place.address) {
            Ok(listener) => listener,
            Err(error) => {
                // Told when it begins and when the reason changes, not each time it is tried.
                if self.failing.insert(place.clone(), error.kind()) != Some(error.kind()) {
                    checks.failed(&place, &error);
                }
                return;
            }
        };
        match self.failing.remove(&place) {
            Some(_) => {
                tracing::info!(service = %place.service, address = %place.address, "health-check node port is open at last")
            }
            None => {
                tracing::debug!(service = %place.service, address = %place.address, "health-check node port open")
            }
        }
        let (checks, asked) = (Arc::clone(checks), place.clone());
        let route: Arc<http::Route> = Arc::new(move |_| Some(checks.answer(&asked)));
        let server = tokio::spawn(async move {
            if let Err(error) = http::accept(listener, route).await {
                tracing::error!(%error, "a health-check node port ended");
            }
        });
        self.open.insert(place, server);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> ServiceKey {
        ServiceKey { namespace: "shop".into(), name: name.into() }
    }

    fn check(port: u16, count: u32) -> HealthCheck {
        HealthCheck {
            port,
            local_endpoints: PerFamily { v4: count, v6: 0 },
            families: PerFamily { v4: true, v6: true },
        }
    }

    #[test]
    fn the_exact_body() {
        assert_eq!(
            text(&key("cart"), 3, true),
            "{\n\t\"service\": {\n\t\t\"namespace\": \"shop\",\n\t\t\"name\": \"cart\"\n\t},\n\t\"localEndpoints\": 3,\n\t\
             \"serviceProxyHealthy\": true\n}"
        );
    }

    #[test]
    fn only_another_port_or_family_moves_a_listener() {
        let mut wanted = Wanted::default();
        assert!(wanted.put(&key("a"), Some(&check(1, 0))));
        assert!(!wanted.put(&key("a"), Some(&check(1, 5))), "a count");
        assert!(wanted.put(&key("a"), Some(&check(2, 5))));
        assert!(wanted.put(&key("a"), None));
        assert!(!wanted.put(&key("a"), None));
    }

    #[test]
    fn a_listener_for_each_family_or_address() {
        let mut wanted = Wanted::default();
        wanted.put(&key("a"), Some(&check(1, 0)));
        assert_eq!(wanted.places().count(), 0, "the addresses are not known yet");
        let two = ["192.0.2.1", "192.0.2.2"].map(|ip| ip.parse().expect("valid"));
        wanted.scopes = PerFamily { v4: Some(NodePortScope::Only(two.into())), v6: Some(NodePortScope::All) };
        let places: Vec<_> = wanted.places().map(|place| place.address.to_string()).collect();
        assert_eq!(places, ["192.0.2.1:1", "192.0.2.2:1", "[::]:1"]);
    }
}
