// SPDX-License-Identifier: Apache-2.0

use std::net::IpAddr;

use hashbrown::{HashMap, HashSet};
use model::{
    Family, Kind, PerFamily, Service, ServiceKey, ServiceKind, ServicePort, SourceRanges, TrafficPolicy,
    Update, WrittenRanges, service::cluster_ips_by_family,
};

use super::{
    Lowered, Resource, SERVICE_PROXY_NAME, Scope, Subject, address::can_be_virtual, annotations::Wishes,
    namespaced, parse_cidr, parse_ip, port,
};
use crate::{
    object::{self, Metadata, ServiceSpec},
    problem::Reason,
};

impl Resource for object::Service {
    const KIND: Kind = Kind::Service;
    const NAME: &'static str = "Service";

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
        let Some(spec) = &self.spec else {
            subject.problem("spec", Reason::NoClusterIp, "");
            return Lowered::Refused;
        };
        if is_not_ours(metadata, spec) {
            return Lowered::Ignored;
        }
        if let Some(written) = impossible_cluster_ip(spec) {
            subject.problem("spec.clusterIP", Reason::BadClusterIp, written);
            return Lowered::Refused;
        }
        let cluster_ips = cluster_ips(&mut subject, spec);
        if cluster_ips.v4.is_none() && cluster_ips.v6.is_none() {
            let written = spec.cluster_ip.as_deref().unwrap_or_default();
            subject.problem("spec.clusterIP", Reason::NoClusterIp, written);
            return Lowered::Refused;
        }
        let key = ServiceKey { namespace: subject.string(namespace), name: subject.string(name) };
        let wishes = Wishes::of(&mut subject);
        Lowered::Object(Update::Service(Service {
            key,
            created_secs: metadata.creation_timestamp.and_then(|time| time.seconds).unwrap_or_default(),
            kind: kind(&mut subject, spec),
            cluster_ips,
            ports: ports(&mut subject, spec),
            external_ips: external_ips(&mut subject, spec),
            load_balancer_ips: load_balancer_ips(&mut subject, self),
            source_ranges: source_ranges(&mut subject, spec),
            internal_policy: policy(
                &mut subject,
                "spec.internalTrafficPolicy",
                spec.internal_traffic_policy.as_deref(),
            ),
            external_policy: policy(
                &mut subject,
                "spec.externalTrafficPolicy",
                spec.external_traffic_policy.as_deref(),
            ),
            affinity_secs: affinity_secs(&mut subject, spec),
            health_check_node_port: health_check_node_port(&mut subject, spec),
            tuning: wishes.tuning(),
            weights: wishes.weights,
        }))
    }

    fn gone(metadata: &Metadata, scope: &mut Scope<'_>) -> Option<Update> {
        let mut subject = Subject { kind: Self::NAME, metadata, scope };
        let (namespace, name) = namespaced(&mut subject)?;
        let key = ServiceKey { namespace: subject.string(namespace), name: subject.string(name) };
        Some(Update::ServiceGone(key))
    }
}

fn is_not_ours(metadata: &Metadata, spec: &ServiceSpec) -> bool {
    metadata.label(SERVICE_PROXY_NAME).is_some()
        || spec.kind.as_deref() == Some("ExternalName")
        || matches!(spec.cluster_ip.as_deref().unwrap_or_default(), "" | "None")
}

/// One is enough to refuse them all: who wrote it means something else than a Service.
fn impossible_cluster_ip(spec: &ServiceSpec) -> Option<&String> {
    let mut written = spec.cluster_ip.iter().chain(&spec.cluster_ips);
    written.find(|text| parse_ip(text).is_some_and(|ip| !can_be_virtual(ip)))
}

fn cluster_ips(subject: &mut Subject<'_, '_>, spec: &ServiceSpec) -> PerFamily<Option<IpAddr>> {
    let mut families = Vec::with_capacity(spec.ip_families.len());
    let mut addresses = Vec::with_capacity(spec.ip_families.len());
    for (at, family) in spec.ip_families.iter().enumerate() {
        let family = match family.as_str() {
            "IPv4" => Family::V4,
            "IPv6" => Family::V6,
            other => {
                subject.problem(format!("spec.ipFamilies[{at}]"), Reason::BadFamily, other);
                continue;
            }
        };
        let Some(text) = spec.cluster_ips.get(at) else {
            break;
        };
        let address = parse_ip(text);
        match address {
            None => subject.problem(format!("spec.clusterIPs[{at}]"), Reason::BadAddress, text),
            Some(ip) if Family::of(ip) != family => {
                subject.problem(format!("spec.clusterIPs[{at}]"), Reason::WrongFamily, text);
            }
            Some(_) => {}
        }
        families.push(family);
        addresses.push(address);
    }
    let primary = spec.cluster_ip.as_deref().and_then(parse_ip);
    cluster_ips_by_family(primary, &addresses, &families)
}

fn kind(subject: &mut Subject<'_, '_>, spec: &ServiceSpec) -> ServiceKind {
    match spec.kind.as_deref().unwrap_or_default() {
        "" | "ClusterIP" => ServiceKind::ClusterIp,
        "NodePort" => ServiceKind::NodePort,
        "LoadBalancer" => ServiceKind::LoadBalancer,
        other => {
            subject.problem("spec.type", Reason::BadServiceType, other);
            ServiceKind::ClusterIp
        }
    }
}

/// Of two ports with one name and protocol the later one wins, at the place of the earlier.
fn ports(subject: &mut Subject<'_, '_>, spec: &ServiceSpec) -> Box<[ServicePort]> {
    let mut ports: Vec<ServicePort> = Vec::with_capacity(spec.ports.len());
    let mut places = HashMap::new();
    for (at, written) in spec.ports.iter().enumerate() {
        let Some(number) = written.port.and_then(port) else {
            let value = written.port.map(|port| port.to_string()).unwrap_or_default();
            subject.problem(format!("spec.ports[{at}].port"), Reason::BadPort, value);
            continue;
        };
        let field = || format!("spec.ports[{at}].protocol").into();
        let Some(protocol) = subject.protocol(written.protocol.as_deref(), field) else {
            continue;
        };
        let lowered = ServicePort {
            name: subject.string(written.name.as_deref().unwrap_or_default()),
            protocol,
            port: number,
            node_port: node_port(subject, || format!("spec.ports[{at}].nodePort").into(), written.node_port),
        };
        // One port cannot collide, and most services have one.
        if spec.ports.len() > 1
            && let Some(place) = places.insert((lowered.name.clone(), protocol), ports.len())
        {
            subject.problem(format!("spec.ports[{at}]"), Reason::DuplicatePort, &lowered.name);
            places.insert((lowered.name.clone(), protocol), place);
            ports[place] = lowered;
            continue;
        }
        ports.push(lowered);
    }
    ports.into()
}

/// 0 and absent mean none.
fn node_port(
    subject: &mut Subject<'_, '_>,
    field: impl FnOnce() -> std::borrow::Cow<'static, str>,
    number: Option<i32>,
) -> Option<u16> {
    let number = number.filter(|number| *number != 0)?;
    let checked = port(number);
    if checked.is_none() {
        subject.problem(field(), Reason::BadNodePort, number);
    }
    checked
}

/// The API server allocates one where it is needed, so that 0 there is somebody's mistake.
fn health_check_node_port(subject: &mut Subject<'_, '_>, spec: &ServiceSpec) -> Option<u16> {
    let is_needed = spec.kind.as_deref() == Some("LoadBalancer")
        && spec.external_traffic_policy.as_deref() == Some("Local");
    if is_needed && spec.health_check_node_port == Some(0) {
        subject.problem("spec.healthCheckNodePort", Reason::NoHealthCheckPort, 0);
    }
    node_port(subject, || "spec.healthCheckNodePort".into(), spec.health_check_node_port)
}

fn external_ips(subject: &mut Subject<'_, '_>, spec: &ServiceSpec) -> Box<[IpAddr]> {
    let mut ips = Vec::new();
    for (at, text) in spec.external_ips.iter().enumerate().filter(|(_, text)| !text.is_empty()) {
        match parse_ip(text) {
            Some(ip) if can_be_virtual(ip) => ips.push(ip),
            Some(_) => subject.problem(format!("spec.externalIPs[{at}]"), Reason::BadVip, text),
            None => subject.problem(format!("spec.externalIPs[{at}]"), Reason::BadAddress, text),
        }
    }
    distinct(ips)
}

fn load_balancer_ips(subject: &mut Subject<'_, '_>, service: &object::Service) -> Box<[IpAddr]> {
    let ingress = service
        .status
        .as_ref()
        .and_then(|status| status.load_balancer.as_ref())
        .map_or(&[][..], |load_balancer| &load_balancer.ingress);
    let mut ips = Vec::new();
    for (at, ingress) in ingress.iter().enumerate() {
        let text = ingress.ip.as_deref().unwrap_or_default();
        // By name only: there is no address to match packets with.
        if text.is_empty() {
            continue;
        }
        match ingress.ip_mode.as_deref() {
            None | Some("" | "VIP") => {}
            // The load balancer rewrites packets to the node port; packets to this address are its own affair.
            Some("Proxy") => continue,
            Some(other) => {
                let field = format!("status.loadBalancer.ingress[{at}].ipMode");
                subject.problem(field, Reason::BadIpMode, other);
                continue;
            }
        }
        match parse_ip(text) {
            Some(ip) if can_be_virtual(ip) => ips.push(ip),
            parsed => {
                let reason = if parsed.is_some() { Reason::BadVip } else { Reason::BadAddress };
                subject.problem(format!("status.loadBalancer.ingress[{at}].ip"), reason, text);
            }
        }
    }
    distinct(ips)
}

/// Each once, at its first place.
fn distinct(mut ips: Vec<IpAddr>) -> Box<[IpAddr]> {
    let mut seen = HashSet::with_capacity(ips.len());
    ips.retain(|ip| seen.insert(*ip));
    ips.into()
}

fn source_ranges(subject: &mut Subject<'_, '_>, spec: &ServiceSpec) -> SourceRanges {
    if spec.load_balancer_source_ranges.is_empty() {
        return SourceRanges::Any;
    }
    let mut nets = Vec::with_capacity(spec.load_balancer_source_ranges.len());
    let mut unread = PerFamily::default();
    for (at, text) in spec.load_balancer_source_ranges.iter().enumerate() {
        match parse_cidr(text.trim()) {
            Some(range) => nets.push(range),
            None => {
                subject.problem(format!("spec.loadBalancerSourceRanges[{at}]"), Reason::BadCidr, text);
                let seems = families_of_unread(text.trim());
                unread = PerFamily::from_fn(|family| unread[family] || seems[family]);
            }
        }
    }
    SourceRanges::Only(Box::new(WrittenRanges { nets: nets.into(), unread }))
}

/// The family that a range which is none was to be of, or both.
fn families_of_unread(text: &str) -> PerFamily<bool> {
    let address = text.split('/').next().and_then(parse_ip).map(Family::of);
    let seems = address.or_else(|| match (text.contains(':'), text.contains('.')) {
        (true, _) => Some(Family::V6),
        (false, true) => Some(Family::V4),
        (false, false) => None,
    });
    PerFamily::from_fn(|family| seems.is_none_or(|seems| seems == family))
}

fn policy(subject: &mut Subject<'_, '_>, field: &'static str, text: Option<&str>) -> TrafficPolicy {
    match text.unwrap_or_default() {
        "Local" => TrafficPolicy::Local,
        "" | "Cluster" => TrafficPolicy::Cluster,
        other => {
            subject.problem(field, Reason::BadPolicy, other);
            TrafficPolicy::Cluster
        }
    }
}

fn affinity_secs(subject: &mut Subject<'_, '_>, spec: &ServiceSpec) -> Option<u32> {
    match spec.session_affinity.as_deref().unwrap_or_default() {
        "" | "None" => return None,
        "ClientIP" => {}
        other => {
            subject.problem("spec.sessionAffinity", Reason::BadAffinity, other);
            return None;
        }
    }
    let written = spec
        .session_affinity_config
        .as_ref()
        .and_then(|config| config.client_ip.as_ref())
        .and_then(|client_ip| client_ip.timeout_seconds);
    let Some(secs) = written else {
        return Some(DEFAULT_AFFINITY_SECS);
    };
    if (1..=MAX_AFFINITY_SECS).contains(&secs) {
        return Some(secs.unsigned_abs());
    }
    subject.problem("spec.sessionAffinityConfig.clientIP.timeoutSeconds", Reason::BadTimeout, secs);
    Some(DEFAULT_AFFINITY_SECS)
}

/// What the API server fills in.
const DEFAULT_AFFINITY_SECS: u32 = 10_800;
const MAX_AFFINITY_SECS: i32 = 86_400;
