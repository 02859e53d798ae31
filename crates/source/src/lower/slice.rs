// SPDX-License-Identifier: Apache-2.0

use std::sync::Arc;

use model::{
    Conditions, Endpoint, EndpointSlice, Family, Hints, Kind, ServiceKey, SliceKey, SlicePort, Update,
};

use super::{
    HEADLESS, Lowered, Resource, SERVICE_NAME, Scope, Subject, TRIGGER_TIME, annotations, namespaced,
    parse_ip, port, time,
};
use crate::{
    object::{self, Metadata},
    problem::Reason,
};

impl Resource for object::EndpointSlice {
    const KIND: Kind = Kind::EndpointSlice;
    const NAME: &'static str = "EndpointSlice";

    fn metadata(&self) -> Option<&Metadata> {
        self.metadata.as_ref()
    }

    fn lower(&self, scope: &mut Scope<'_>) -> Lowered {
        let nameless = Metadata::default();
        let metadata = self.metadata.as_ref().unwrap_or(&nameless);
        let mut subject = Subject { kind: Self::NAME, metadata, scope };
        let Some((namespace, name)) = namespaced(&mut subject) else {
            return Lowered::Refused;
        };
        if metadata.label(HEADLESS).is_some() {
            return Lowered::Ignored;
        }
        let Some(service) = metadata.label(SERVICE_NAME).filter(|service| !service.is_empty()) else {
            subject.problem("metadata.labels", Reason::NoServiceName, "");
            return Lowered::Refused;
        };
        let family = match self.address_type.as_deref().unwrap_or_default() {
            "IPv4" => Family::V4,
            "IPv6" => Family::V6,
            "FQDN" => {
                subject.problem("addressType", Reason::FqdnSlice, "FQDN");
                return Lowered::Ignored;
            }
            other => {
                subject.problem("addressType", Reason::BadAddressType, other);
                return Lowered::Refused;
            }
        };
        let namespace = subject.string(namespace);
        Lowered::Object(Update::Slice(EndpointSlice {
            // Unlike the rest, the slice's own name occurs nowhere else.
            key: SliceKey { namespace: namespace.clone(), name: Arc::from(name) },
            service: ServiceKey { namespace, name: subject.string(service) },
            family,
            ports: ports(&mut subject, self),
            endpoints: endpoints(&mut subject, self, family),
            weight: annotations::slice_weight(&mut subject),
            trigger_time_nanos: trigger_time(&mut subject),
        }))
    }

    fn gone(metadata: &Metadata, scope: &mut Scope<'_>) -> Option<Update> {
        let mut subject = Subject { kind: Self::NAME, metadata, scope };
        let (namespace, name) = namespaced(&mut subject)?;
        let namespace = subject.string(namespace);
        Some(Update::SliceGone(SliceKey { namespace, name: Arc::from(name) }))
    }
}

fn ports(subject: &mut Subject<'_, '_>, slice: &object::EndpointSlice) -> Box<[SlicePort]> {
    // Without endpoints it is the controller's placeholder for a service nothing backs: all is well.
    if slice.ports.is_empty() && !slice.endpoints.is_empty() {
        subject.problem("ports", Reason::NoPorts, "");
    }
    let mut ports = Vec::with_capacity(slice.ports.len());
    for (at, written) in slice.ports.iter().enumerate() {
        let number = match written.port {
            None => {
                subject.problem(format!("ports[{at}].port"), Reason::NoPortNumber, "");
                continue;
            }
            Some(number) => port(number),
        };
        let Some(number) = number else {
            let value = written.port.unwrap_or_default();
            subject.problem(format!("ports[{at}].port"), Reason::BadPort, value);
            continue;
        };
        let field = || format!("ports[{at}].protocol").into();
        let Some(protocol) = subject.protocol(written.protocol.as_deref(), field) else {
            continue;
        };
        let name = subject.string(written.name.as_deref().unwrap_or_default());
        ports.push(SlicePort { name, protocol, port: number });
    }
    ports.into()
}

fn endpoints(
    subject: &mut Subject<'_, '_>,
    slice: &object::EndpointSlice,
    family: Family,
) -> Box<[Endpoint]> {
    let mut endpoints = Vec::with_capacity(slice.endpoints.len());
    for (at, written) in slice.endpoints.iter().enumerate() {
        // Only the first address counts; the API says they are fungible, and asks for no more than one.
        let Some(text) = written.addresses.first() else {
            subject.problem(format!("endpoints[{at}].addresses"), Reason::NoAddress, "");
            continue;
        };
        let Some(address) = parse_ip(text) else {
            subject.problem(format!("endpoints[{at}].addresses[0]"), Reason::BadAddress, text);
            continue;
        };
        if Family::of(address) != family {
            subject.problem(format!("endpoints[{at}].addresses[0]"), Reason::WrongFamily, text);
            continue;
        }
        let node = written.node_name.as_deref().filter(|node| !node.is_empty());
        let zone = written.zone.as_deref().filter(|zone| !zone.is_empty());
        endpoints.push(Endpoint {
            address,
            conditions: conditions(written.conditions.unwrap_or_default()),
            node: node.map(|node| subject.string(node)),
            zone: zone.map(|zone| subject.string(zone)),
            hints: written.hints.as_ref().and_then(|hints| lower_hints(subject, hints)),
        });
    }
    endpoints.into()
}

fn conditions(written: object::EndpointConditions) -> Conditions {
    let default = Conditions::default();
    Conditions {
        ready: written.ready.unwrap_or(default.ready),
        serving: written.serving.unwrap_or(default.serving),
        terminating: written.terminating.unwrap_or(default.terminating),
    }
}

fn lower_hints(subject: &mut Subject<'_, '_>, written: &object::EndpointHints) -> Option<Arc<Hints>> {
    let mut names = |list: &[object::Named]| -> Box<[Arc<str>]> {
        let named = list.iter().filter_map(|entry| entry.name.as_deref()).filter(|name| !name.is_empty());
        let mut names: Vec<_> = named.map(|name| subject.string(name)).collect();
        names.sort_unstable();
        names.dedup();
        names.into()
    };
    let hints = Hints { zones: names(&written.for_zones), nodes: names(&written.for_nodes) };
    let empty = hints.zones.is_empty() && hints.nodes.is_empty();
    (!empty).then(|| subject.scope.interner.hints(hints))
}

fn trigger_time(subject: &mut Subject<'_, '_>) -> Option<i64> {
    let text = subject.metadata.annotation(TRIGGER_TIME)?;
    let nanos = time::parse_nanos(text);
    if nanos.is_none() {
        subject.problem(format!("metadata.annotations[{TRIGGER_TIME}]"), Reason::BadTime, text);
    }
    nanos
}
