// SPDX-License-Identifier: Apache-2.0

//! What the userspace mode carries, and what it turns away.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use dataplane::userspace::{Carrier, Counters, Refusal};

use super::registry::About;

type Find = fn(&Counters) -> u64;

const SERIES: [(About, Find); 14] = [
    (gauge("portolan_relay_connections", "TCP connections open now (userspace)."), |counters| {
        counters.open_connections.value() as u64
    }),
    (gauge("portolan_relay_flows", "UDP flows remembered now (userspace)."), |counters| {
        counters.open_flows.value() as u64
    }),
    (gauge("portolan_relay_pipes", "Pipes made and not closed (userspace)."), |counters| {
        counters.pipes.value() as u64
    }),
    (counter("portolan_relay_accepted_total", "TCP connections accepted (userspace)."), |counters| {
        counters.accepted.value()
    }),
    (counter("portolan_relay_flows_total", "UDP flows begun (userspace)."), |counters| {
        counters.flows.value()
    }),
    (
        counter(
            "portolan_relay_failed_attempts_total",
            "Attempts to reach an endpoint that failed (userspace).",
        ),
        |counters| counters.failed_attempts.value(),
    ),
    (
        counter(
            "portolan_relay_retries_total",
            "Connections given to another endpoint after one failed (userspace).",
        ),
        |counters| counters.retries.value(),
    ),
    (
        counter("portolan_relay_ejections_total", "Times an endpoint was set aside for a while (userspace)."),
        |counters| counters.ejections.value(),
    ),
    (
        counter("portolan_relay_drained_total", "Connections closed as their endpoint had gone (userspace)."),
        |counters| counters.drained.value(),
    ),
    (
        counter(
            "portolan_relay_half_closed_total",
            "Connections closed as one direction had ended and nothing moved in the other (userspace).",
        ),
        |counters| counters.half_closed.value(),
    ),
    (
        counter("portolan_relay_evicted_flows_total", "UDP flows ended to make room (userspace)."),
        |counters| counters.evicted_flows.value(),
    ),
    (
        counter("portolan_relay_sent_bytes_total", "Bytes from clients to endpoints (userspace)."),
        |counters| counters.sent_bytes.value(),
    ),
    (
        counter("portolan_relay_received_bytes_total", "Bytes from endpoints to clients (userspace)."),
        |counters| counters.received_bytes.value(),
    ),
    (
        counter("portolan_relay_copied_bytes_total", "Bytes copied, as no pipe was left (userspace)."),
        |counters| counters.copied_bytes.value(),
    ),
];

const REFUSED: About = About {
    name: "portolan_relay_refused_total",
    kind: "counter",
    labels: &["reason"],
    help: "Clients turned away (userspace).",
};

const SERVICE_REFUSED: About = About {
    name: "portolan_relay_service_refused_total",
    kind: "counter",
    labels: &["service"],
    help: "Clients turned away, of services that had to (userspace).",
};

const SERVICE_RETRIES: About = About {
    name: "portolan_relay_service_retries_total",
    kind: "counter",
    labels: &["service"],
    help: "Connections given to another endpoint after one failed, of services that had any (userspace).",
};

const UNUSABLE: About = About {
    name: "portolan_relay_unusable_endpoints",
    kind: "gauge",
    labels: &["service", "why"],
    help: "Endpoints that get no new connections now: why is failed or check (userspace).",
};

const fn gauge(name: &'static str, help: &'static str) -> About {
    About { name, kind: "gauge", labels: &[], help }
}

const fn counter(name: &'static str, help: &'static str) -> About {
    About { name, kind: "counter", labels: &[], help }
}

pub(super) fn render(carrier: &Carrier, out: &mut String) {
    let Some(counters) = carrier.counters() else { return };
    for (about, find) in &SERIES {
        about.write(out, [(Vec::new(), find(counters) as f64)]);
    }
    let refused = Refusal::ALL.map(|why| (vec![why.name().to_owned()], counters.refused(why) as f64));
    REFUSED.write(out, refused);
    let mut by_service: BTreeMap<String, Tally> = BTreeMap::new();
    for service in carrier.services() {
        let tally = by_service.entry(service.name().to_owned()).or_default();
        tally.refused += service.refused.value();
        tally.retries += service.retries.value();
        for endpoint in service.roster().members.iter().map(|member| &member.endpoint) {
            if endpoint.is_set_aside() {
                tally.failed.insert(endpoint.address);
            }
            if !endpoint.is_healthy() {
                tally.unhealthy.insert(endpoint.address);
            }
        }
    }
    let of = |find: fn(&Tally) -> u64, why: Option<&str>| {
        let counted = by_service.iter().map(|(service, tally)| (service, find(tally)));
        let labels = |service: &String| {
            [Some(service.as_str()), why].into_iter().flatten().map(str::to_owned).collect()
        };
        let counted = counted.filter(|(_, count)| *count > 0);
        counted.map(|(service, count)| (labels(service), count as f64)).collect::<Vec<(Vec<String>, f64)>>()
    };
    SERVICE_REFUSED.write(out, of(|tally| tally.refused, None));
    SERVICE_RETRIES.write(out, of(|tally| tally.retries, None));
    let failed = of(|tally| tally.failed.len() as u64, Some("failed"));
    UNUSABLE.write(out, failed.into_iter().chain(of(|tally| tally.unhealthy.len() as u64, Some("check"))));
}

/// What is known of one port of a Service, over all its addresses.
#[derive(Default)]
struct Tally {
    refused: u64,
    retries: u64,
    failed: BTreeSet<SocketAddr>,
    unhealthy: BTreeSet<SocketAddr>,
}

/// The names that [`render`] writes.
pub(super) fn names() -> impl Iterator<Item = About> {
    SERIES.into_iter().map(|(about, _)| about).chain([REFUSED, SERVICE_REFUSED, SERVICE_RETRIES, UNUSABLE])
}
