// SPDX-License-Identifier: Apache-2.0

//! Endpoints written into the Service itself, for those who have no controller that makes EndpointSlices:
//!
//! ```yaml
//! metadata:
//!   annotations:
//!     portolan.dev/endpoints: 10.0.0.1:8080, 10.0.0.2:8080
//! ```
//!
//! Entries are separated by commas, blanks or line ends. An entry is `[PORT=]ADDRESS[:NUMBER][@NODE]`:
//!
//! | written | means |
//! |---|---|
//! | `10.0.0.1:8080` | the Service's port is served at port 8080 of 10.0.0.1; the Service has one port |
//! | `http=10.0.0.1:8080` | the same for the port named `http` of a Service with several |
//! | `10.0.0.1` | all ports of the Service are served at 10.0.0.1, each at its own number |
//! | `[fd00::1]:8080` | IPv6; without a number the brackets may be left out |
//! | `10.0.0.1:8080@worker-1` | it runs on the node worker-1, for the traffic policy Local |
//!
//! They are ready always. EndpointSlices for the same Service count as well.

use std::{net::IpAddr, sync::Arc};

use model::{
    Conditions, Endpoint, EndpointSlice, Family, Protocol, Service, ServicePort, SliceKey, SlicePort,
};

use crate::{
    intern::Interner,
    lower::parse_ip,
    problem::{Problem, Reason},
};

/// The annotation's key.
pub const ENDPOINTS: &str = "portolan.dev/endpoints";

/// The slices that stand for the annotation of `service`: one for each family, port and number.
pub(super) fn slices(
    service: &Service,
    annotation: &str,
    interner: &mut Interner,
    report: &mut dyn FnMut(Problem),
) -> Vec<EndpointSlice> {
    let mut found: Vec<Group> = Vec::new();
    let entries = annotation.split(|c: char| c == ',' || c.is_whitespace()).filter(|entry| !entry.is_empty());
    for text in entries {
        let placed = match parse(text) {
            Some(entry) => place(service, &entry, interner, &mut found),
            None => Err(Reason::BadEndpoints),
        };
        if let Err(reason) = placed {
            let field = format!("metadata.annotations[{ENDPOINTS}]");
            report(Problem::new(format!("Service {}", service.key), field, reason, text));
        }
    }
    found.into_iter().map(|group| group.into_slice(service)).collect()
}

struct Entry<'a> {
    port: Option<&'a str>,
    address: IpAddr,
    number: Option<u16>,
    node: Option<&'a str>,
}

fn parse(text: &str) -> Option<Entry<'_>> {
    let (text, node) = match text.rsplit_once('@') {
        Some((text, node)) => (text, Some(node).filter(|node| !node.is_empty())),
        None => (text, None),
    };
    let (port, text) = match text.split_once('=') {
        Some((port, text)) => (Some(port), text),
        None => (None, text),
    };
    let (address, number) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, rest) = rest.split_once(']')?;
            let number = if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) };
            (address, number)
        }
        // More than one colon is an IPv6 address without brackets, and that cannot have a number.
        None if text.matches(':').count() == 1 => {
            text.split_once(':').map(|(address, number)| (address, Some(number)))?
        }
        None => (text, None),
    };
    let number = match number {
        Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            Some(digits.parse().ok().filter(|number| *number != 0)?)
        }
        Some(_) => return None,
        None => None,
    };
    Some(Entry { port, address: parse_ip(address)?, number, node })
}

/// Sorts an entry into the groups of the ports it serves.
fn place(
    service: &Service,
    entry: &Entry<'_>,
    interner: &mut Interner,
    found: &mut Vec<Group>,
) -> Result<(), Reason> {
    let ports: Vec<&ServicePort> = match (entry.port, entry.number) {
        (Some(name), _) => service.ports.iter().filter(|port| &*port.name == name).collect(),
        (None, None) => service.ports.iter().collect(),
        // One number cannot be that of several ports.
        (None, Some(_)) if service.ports.len() > 1 => return Err(Reason::WhichPort),
        (None, Some(_)) => service.ports.iter().collect(),
    };
    if ports.is_empty() {
        return Err(Reason::UnknownPort);
    }
    for port in ports {
        let group = Group {
            family: Family::of(entry.address),
            name: port.name.clone(),
            protocol: port.protocol,
            number: entry.number.unwrap_or(port.port),
            endpoints: Vec::new(),
        };
        let at = found.iter().position(|known| known.is_like(&group)).unwrap_or_else(|| {
            found.push(group);
            found.len() - 1
        });
        found[at].endpoints.push(Endpoint {
            address: entry.address,
            conditions: Conditions::default(),
            node: entry.node.map(|node| interner.string(node)),
            zone: None,
            hints: None,
        });
    }
    Ok(())
}

struct Group {
    family: Family,
    name: Arc<str>,
    protocol: Protocol,
    number: u16,
    endpoints: Vec<Endpoint>,
}

impl Group {
    fn is_like(&self, other: &Group) -> bool {
        (self.family, &self.name, self.protocol, self.number)
            == (other.family, &other.name, other.protocol, other.number)
    }

    fn into_slice(self, service: &Service) -> EndpointSlice {
        // No object in a cluster can have such a name, so none can be in the way.
        let name =
            format!("{}@{}/{}/{}/{}", service.key.name, self.name, self.protocol, self.number, self.family);
        EndpointSlice {
            key: SliceKey { namespace: service.key.namespace.clone(), name: name.into() },
            service: service.key.clone(),
            family: self.family,
            ports: Box::new([SlicePort { name: self.name, protocol: self.protocol, port: self.number }]),
            endpoints: self.endpoints.into(),
            weight: model::DEFAULT_WEIGHT,
            trigger_time_nanos: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use model::{PerFamily, ServiceKey, ServiceKind, SourceRanges, TrafficPolicy};

    use super::*;

    fn service(ports: &[(&str, Protocol, u16)]) -> Service {
        let ports = ports.iter().map(|(name, protocol, port)| ServicePort {
            name: Arc::from(*name),
            protocol: *protocol,
            port: *port,
            node_port: None,
        });
        Service {
            key: ServiceKey { namespace: "shop".into(), name: "cart".into() },
            created_secs: 0,
            kind: ServiceKind::ClusterIp,
            cluster_ips: PerFamily::default(),
            ports: ports.collect(),
            external_ips: Box::new([]),
            load_balancer_ips: Box::new([]),
            source_ranges: SourceRanges::Any,
            internal_policy: TrafficPolicy::Cluster,
            external_policy: TrafficPolicy::Cluster,
            affinity_secs: None,
            health_check_node_port: None,
            tuning: None,
            weights: model::Weights::default(),
        }
    }

    /// `port/protocol/number address[@node] ...` of each slice, and the reasons of the problems.
    fn check(ports: &[(&str, Protocol, u16)], annotation: &str) -> (Vec<String>, Vec<Reason>) {
        let mut problems = Vec::new();
        let mut report = |problem: Problem| problems.push(problem.reason);
        let slices = slices(&service(ports), annotation, &mut Interner::default(), &mut report);
        let text = |slice: &EndpointSlice| {
            let port = &slice.ports[0];
            let mut text = format!("{}/{}/{}", port.name, port.protocol, port.port);
            for endpoint in &slice.endpoints {
                text.push_str(&format!(" {}", endpoint.address));
                text.extend(endpoint.node.iter().map(|node| format!("@{node}")));
            }
            text
        };
        (slices.iter().map(text).collect(), problems)
    }

    const ONE: &[(&str, Protocol, u16)] = &[("", Protocol::Tcp, 80)];
    const TWO: &[(&str, Protocol, u16)] = &[("http", Protocol::Tcp, 80), ("dns", Protocol::Udp, 53)];

    #[test]
    fn the_grammar() {
        for (ports, annotation, slices) in [
            (ONE, "10.0.0.1:8080, 10.0.0.2:8080", vec!["/tcp/8080 10.0.0.1 10.0.0.2"]),
            (ONE, "10.0.0.1:8080\n 10.0.0.2:9090 ,", vec!["/tcp/8080 10.0.0.1", "/tcp/9090 10.0.0.2"]),
            (ONE, "10.0.0.1 fd00::1 [fd00::2]", vec!["/tcp/80 10.0.0.1", "/tcp/80 fd00::1 fd00::2"]),
            (ONE, "[fd00::1]:8080@a 10.0.0.1@b", vec!["/tcp/8080 fd00::1@a", "/tcp/80 10.0.0.1@b"]),
            (TWO, "10.0.0.1", vec!["http/tcp/80 10.0.0.1", "dns/udp/53 10.0.0.1"]),
            (TWO, "http=10.0.0.1:8080,dns=10.0.0.1", vec!["http/tcp/8080 10.0.0.1", "dns/udp/53 10.0.0.1"]),
            (ONE, "", vec![]),
        ] {
            let slices: Vec<_> = slices.into_iter().map(str::to_owned).collect();
            assert_eq!(check(ports, annotation), (slices, vec![]), "{annotation}");
        }
    }

    #[test]
    fn what_is_refused_hurts_only_itself() {
        for (ports, entry, reason) in [
            (ONE, "example.com:80", Reason::BadEndpoints),
            (ONE, "10.0.0.1:0", Reason::BadEndpoints),
            (ONE, "10.0.0.1:65536", Reason::BadEndpoints),
            (ONE, "10.0.0.1:http", Reason::BadEndpoints),
            (ONE, "10.0.0.1:+80", Reason::BadEndpoints),
            (ONE, "10.0.0.1:", Reason::BadEndpoints),
            (ONE, "[fd00::1", Reason::BadEndpoints),
            (ONE, "[fd00::1]80", Reason::BadEndpoints),
            (ONE, "http=10.0.0.1:80", Reason::UnknownPort),
            (TWO, "10.0.0.1:80", Reason::WhichPort),
            (TWO, "https=10.0.0.1:80", Reason::UnknownPort),
            (&[], "10.0.0.1", Reason::UnknownPort),
            (&[], "10.0.0.1:80", Reason::UnknownPort),
        ] {
            assert_eq!(check(ports, entry), (vec![], vec![reason]), "{entry}");
        }
        let (slices, problems) = check(ONE, "10.0.0.1:80, x, 10.0.0.2:80");
        assert_eq!((slices.len(), problems.len()), (1, 1));
    }

    #[test]
    fn slices_have_names_of_their_own() {
        let slices = slices(&service(TWO), "10.0.0.1 fd00::1", &mut Interner::default(), &mut |problem| {
            panic!("{problem}")
        });
        let mut names: Vec<_> = slices.iter().map(|slice| slice.key.to_string()).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 4);
    }
}
