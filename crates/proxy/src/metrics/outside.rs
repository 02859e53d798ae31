// SPDX-License-Identifier: Apache-2.0

//! Series of what others count: bad objects, and how the connections to the API server fare.

use std::sync::Arc;

use model::Kind;
use source::{Problems, kube};

use super::{Accounted, Metrics, registry::About, relayed};
use crate::{
    config::{Config, gates},
    connections::{self, Connections},
};

const BAD_OBJECTS: About = About {
    name: "portolan_bad_objects_total",
    kind: "counter",
    labels: &["reason"],
    help: "Objects, or parts of them, that could not be used.",
};

type Find = fn(&kube::KindStatus) -> Option<f64>;

/// What is told of each kind that is followed, and where it is found.
const API: [(About, Find); 5] = [
    (api("portolan_api_connected", "gauge", "A list or watch is open now."), |status| {
        Some(f64::from(u8::from(status.connected)))
    }),
    (
        api(
            "portolan_api_failures_total",
            "counter",
            "Lists and watches that ended otherwise than in good order.",
        ),
        |status| Some(status.failures as f64),
    ),
    (api("portolan_api_lists_total", "counter", "Lists begun; more than one means a new start."), |status| {
        Some(status.lists as f64)
    }),
    (
        api(
            "portolan_api_silence_seconds",
            "gauge",
            "Since when nothing was heard; a server sends something each minute.",
        ),
        |status| status.silence().map(|silence| silence.as_secs_f64()),
    ),
    (
        api("portolan_api_watches_total", "counter", "Watches opened; servers end each after some minutes."),
        |status| Some(status.watches as f64),
    ),
];

const fn api(name: &'static str, kind: &'static str, help: &'static str) -> About {
    About { name, kind, labels: &["kind"], help }
}

/// Who counts it.
pub struct Outside {
    pub problems: Arc<Problems>,
    /// How the connections to the API server fare, if there are any.
    pub api: Option<Arc<kube::Status>>,
    /// What the kernel counted.
    pub connections: Arc<Connections>,
    /// What rules of the iptables mode counted, in that mode.
    pub accounted: Option<Accounted>,
    /// What carries connections, in userspace mode.
    pub carried: Option<dataplane::userspace::Carrier>,
}

impl Outside {
    /// Of these, and nothing else.
    pub fn new(
        problems: &Arc<Problems>,
        api: Option<Arc<kube::Status>>,
        connections: &Arc<Connections>,
    ) -> Outside {
        let (problems, connections) = (Arc::clone(problems), Arc::clone(connections));
        Outside { problems, api, connections, accounted: None, carried: None }
    }

    /// Adds the series to those of [`super::Metrics::render`].
    pub fn render(&self, out: &mut String) {
        let problems = self.problems.counts().filter(|(_, count)| *count > 0);
        BAD_OBJECTS
            .write(out, problems.map(|(reason, count)| (vec![reason.label().to_owned()], count as f64)));
        self.connections.render(out);
        if let Some(accounted) = &self.accounted {
            accounted.render(out);
        }
        if let Some(carrier) = &self.carried {
            relayed::render(carrier, out);
        }
        let Some(api) = &self.api else { return };
        let kinds = Kind::ALL.map(|kind| (label(kind), api.of(kind)));
        for (about, value) in &API {
            let samples =
                kinds.iter().filter_map(|(kind, status)| Some(((*kind).to_owned(), value(status)?)));
            about.write(out, samples.map(|(kind, value)| (vec![kind], value)));
        }
    }
}

/// Counts the requests to the API server from now on.
pub fn requests(metrics: &Arc<Metrics>, access: &kube::Access) {
    let metrics = Arc::clone(metrics);
    access.observe(move |exchange| {
        let code = exchange.code.map_or("<error>".to_owned(), |code| code.to_string());
        metrics.api_requests.with(&[&code, exchange.host, exchange.method]).add(1);
        metrics.api_latency.with(&[exchange.host, exchange.method]).observe(exchange.took.as_secs_f64());
    });
}

/// Tells which feature gates are on.
pub fn features(metrics: &Metrics, config: &Config) {
    for gate in gates::known() {
        let stage = if gate.stage == "ga" { String::new() } else { gate.stage.to_uppercase() };
        let value = f64::from(u8::from(config.gate(gate.name)));
        metrics.features.with(&[gate.name, &stage]).set(value);
    }
}

/// The names that [`Outside::render`] writes.
pub(super) fn names() -> impl Iterator<Item = About> {
    API.into_iter()
        .map(|(about, _)| about)
        .chain(relayed::names())
        .chain([BAD_OBJECTS])
        .chain(connections::series())
}

fn label(kind: Kind) -> &'static str {
    match kind {
        Kind::Service => "Service",
        Kind::EndpointSlice => "EndpointSlice",
        Kind::Node => "Node",
        Kind::ServiceCidr => "ServiceCIDR",
    }
}
