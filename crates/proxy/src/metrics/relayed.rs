// SPDX-License-Identifier: Apache-2.0

//! What the userspace mode carries, and what it turns away.

use std::collections::BTreeMap;

use dataplane::userspace::{Carrier, Counters, Refusal};

use super::registry::About;

type Find = fn(&Counters) -> u64;

const SERIES: [(About, Find); 13] = [
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
    let mut by_service: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for service in carrier.services() {
        let (refused, retries) = by_service.entry(service.name().to_owned()).or_default();
        *refused += service.refused.value();
        *retries += service.retries.value();
    }
    let of = |find: fn(&(u64, u64)) -> u64| {
        let counted = by_service.iter().map(move |(service, counts)| (service, find(counts)));
        let counted = counted.filter(|(_, count)| *count > 0);
        counted.map(|(service, count)| (vec![service.clone()], count as f64)).collect::<Vec<_>>()
    };
    SERVICE_REFUSED.write(out, of(|(refused, _)| *refused));
    SERVICE_RETRIES.write(out, of(|(_, retries)| *retries));
}

/// The names that [`render`] writes.
pub(super) fn names() -> impl Iterator<Item = About> {
    SERIES.into_iter().map(|(about, _)| about).chain([REFUSED, SERVICE_REFUSED, SERVICE_RETRIES])
}
