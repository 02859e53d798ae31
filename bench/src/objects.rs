// SPDX-License-Identifier: Apache-2.0

//! The cluster that is measured: so many services with so many endpoints each, made from numbers alone, so
//! that two runs, two sources and two subjects see the same objects.
//!
//! | what | addresses |
//! |---|---|
//! | service `n` | 10.96.1.0 + n, port 80 |
//! | `default/kubernetes` | 10.96.0.1, port 443 |
//! | `bench/probe` | 10.96.0.200, port 80 |
//! | endpoint of service `n` | 10.128.0.0 + 64 n + (2 slot + turn), port 8080 |
//!
//! Each slot of a service has two addresses, so that an endpoint can be replaced for ever by taking turns.
//! Every endpoint answers (see [`crate::responder`]), so whether a service is in force can be asked with a
//! packet, whoever programmed it.

use std::{
    fmt,
    net::{Ipv4Addr, SocketAddrV4},
    str::FromStr,
};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Where every endpoint listens.
pub const TARGET_PORT: u16 = 8080;
/// The node the subject runs on.
pub const NODE: &str = "node-000";
/// The namespace of the generated services.
pub const NAMESPACE: &str = "bench";
/// All endpoints; the responder answers for every address in it.
pub const ENDPOINTS: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 128, 0, 0), 10);
/// All service addresses.
pub const SERVICES: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 96, 0, 0), 16);
/// All pods, the client among them: what the subject is told with `--cluster-cidr`.
pub const CLUSTER_CIDR: &str = "10.128.0.0/9";
/// Slots a service can have: two addresses each, 64 addresses for one service.
pub const MAX_ENDPOINTS: u32 = 31;
/// 10.96.0.0/16 less the first 256 addresses and the broadcast address.
pub const MAX_SERVICES: u32 = 65_536 - 256 - 1;

/// Real clusters spread a service over many nodes: decoding and topology have something to do.
const NODES: u32 = 500;

/// How many services, and how many endpoints each of them has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    pub services: u32,
    pub endpoints: u32,
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        let wrong = || format!("{text:?} is not a size such as 10000x10");
        let (services, endpoints) = text.split_once('x').ok_or_else(wrong)?;
        let services = services.trim().parse().map_err(|_| wrong())?;
        let endpoints = endpoints.trim().parse().map_err(|_| wrong())?;
        if !(1..=MAX_SERVICES).contains(&services) || !(1..=MAX_ENDPOINTS).contains(&endpoints) {
            return Err(format!("a size goes from 1x1 to {MAX_SERVICES}x{MAX_ENDPOINTS}"));
        }
        Ok(Size { services, endpoints })
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.services, self.endpoints)
    }
}

/// One service and the endpoints it has now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub namespace: &'static str,
    pub name: String,
    pub frontend: SocketAddrV4,
    pub endpoints: Vec<Ipv4Addr>,
    number: u32,
    /// Service and slice must agree on it.
    port_name: &'static str,
}

impl Entry {
    /// Replaces the endpoint in `slot` by the other address of that slot, which is returned.
    pub fn swap(&mut self, slot: usize) -> Ipv4Addr {
        let bits = self.endpoints[slot].to_bits();
        self.endpoints[slot] = Ipv4Addr::from_bits(bits ^ 1);
        self.endpoints[slot]
    }

    /// Adds an endpoint in the next slot and returns it.
    pub fn grow(&mut self) -> Ipv4Addr {
        let added = endpoint(self.number, self.endpoints.len() as u32);
        self.endpoints.push(added);
        added
    }

    /// Takes the last endpoint away and returns it.
    pub fn shrink(&mut self) -> Option<Ipv4Addr> {
        self.endpoints.pop()
    }

    /// The Service as the API takes it.
    pub fn service(&self) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"namespace": self.namespace, "name": self.name, "labels": {"app": self.name}},
            "spec": {
                "type": "ClusterIP", "clusterIP": self.frontend.ip(), "clusterIPs": [self.frontend.ip()],
                "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack", "selector": {"app": self.name},
                "ports": [{"name": self.port_name, "protocol": "TCP", "port": self.frontend.port(), "targetPort": TARGET_PORT}],
            },
        })
    }

    /// The one EndpointSlice of the service, with what the EndpointSlice controller would write.
    pub fn slice(&self) -> Value {
        let endpoints: Vec<Value> = self
            .endpoints
            .iter()
            .map(|address| {
                json!({
                    "addresses": [address], "nodeName": node_of(*address), "zone": "zone-a",
                    "conditions": {"ready": true, "serving": true, "terminating": false},
                    "targetRef": {"kind": "Pod", "namespace": self.namespace, "name": pod_of(*address)},
                })
            })
            .collect();
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {
                "namespace": self.namespace, "name": self.slice_name(),
                "labels": {
                    "kubernetes.io/service-name": self.name,
                    "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                },
            },
            "endpoints": endpoints,
            "ports": [{"name": self.port_name, "protocol": "TCP", "port": TARGET_PORT}],
        })
    }

    pub fn slice_name(&self) -> String {
        format!("{}-1", self.name)
    }

    /// Service and EndpointSlice as a person would write them into one file.
    pub fn yaml(&self) -> String {
        let (namespace, name, slice) = (self.namespace, &self.name, self.slice_name());
        let (ip, port, port_name) = (self.frontend.ip(), self.frontend.port(), self.port_name);
        let mut text = format!(
            "apiVersion: v1\nkind: Service\nmetadata:\n  namespace: {namespace}\n  name: {name}\nspec:\n  \
             type: ClusterIP\n  clusterIP: {ip}\n  ports:\n  - name: {port_name}\n    protocol: TCP\n    port: {port}\n    \
             targetPort: {TARGET_PORT}\n---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n\
             metadata:\n  namespace: {namespace}\n  name: {slice}\n  labels:\n    kubernetes.io/service-name: {name}\n\
             ports:\n- name: {port_name}\n  protocol: TCP\n  port: {TARGET_PORT}\n"
        );
        text.push_str(if self.endpoints.is_empty() { "endpoints: []\n" } else { "endpoints:\n" });
        for address in &self.endpoints {
            let node = node_of(*address);
            text.push_str(&format!(
                "- addresses: [{address}]\n  nodeName: {node}\n  conditions: {{ready: true}}\n"
            ));
        }
        text
    }
}

/// All services of one size, and what their endpoints are now.
#[derive(Clone, Debug)]
pub struct Objects {
    pub size: Size,
    /// What a cluster cannot do without; a subject is to serve it first.
    pub kubernetes: Entry,
    /// The service whose changes are timed.
    pub probe: Entry,
    pub services: Vec<Entry>,
}

/// Which of so many services the change with this number concerns: a prime stride spreads them over all.
pub fn concerned(turn: usize, services: usize) -> usize {
    (turn * 7_919) % services
}

impl Objects {
    pub fn new(size: Size) -> Objects {
        // The numbers beyond the services' own: their endpoints are nobody else's.
        let kubernetes = entry(MAX_SERVICES, ("default", "kubernetes"), (1, 443));
        let probe = entry(MAX_SERVICES + 1, (NAMESPACE, "probe"), (200, 80));
        let services = (0..size.services).map(|number| numbered(number, size.endpoints)).collect();
        Objects { size, kubernetes, probe, services }
    }

    /// Every entry, the well-known ones first.
    pub fn all(&self) -> impl Iterator<Item = &Entry> {
        [&self.kubernetes, &self.probe].into_iter().chain(&self.services)
    }

    /// About `count` services spread over all of them, first and last among them.
    pub fn sample(&self, count: usize) -> Vec<&Entry> {
        let last = self.services.len() - 1;
        let count = count.clamp(1, self.services.len());
        (0..count).map(|step| &self.services[step * last / (count - 1).max(1)]).collect()
    }
}

/// The Node object the subject asks for at its start.
pub fn node(address: Ipv4Addr) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE, "topology.kubernetes.io/zone": "zone-a"}},
        "status": {"addresses": [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": NODE}]},
    })
}

fn numbered(number: u32, endpoints: u32) -> Entry {
    let ip = Ipv4Addr::from_bits(Ipv4Addr::new(10, 96, 1, 0).to_bits() + number);
    Entry {
        namespace: NAMESPACE,
        name: format!("s{number:05}"),
        frontend: SocketAddrV4::new(ip, 80),
        endpoints: (0..endpoints).map(|slot| endpoint(number, slot)).collect(),
        number,
        port_name: "http",
    }
}

fn entry(number: u32, (namespace, name): (&'static str, &str), (last_octet, port): (u8, u16)) -> Entry {
    let [first, second, ..] = SERVICES.0.octets();
    let ip = Ipv4Addr::new(first, second, 0, last_octet);
    Entry {
        namespace,
        name: name.to_owned(),
        frontend: SocketAddrV4::new(ip, port),
        endpoints: vec![endpoint(number, 0)],
        number,
        // What the API server calls the port of default/kubernetes.
        port_name: if port == 443 { "https" } else { "http" },
    }
}

fn endpoint(service: u32, slot: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(ENDPOINTS.0.to_bits() + 64 * service + 2 * slot)
}

fn node_of(address: Ipv4Addr) -> String {
    format!("node-{:03}", (address.to_bits() >> 1).wrapping_mul(2_654_435_761) % NODES)
}

fn pod_of(address: Ipv4Addr) -> String {
    format!("pod-{:08x}", address.to_bits())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn addresses_are_nobody_elses() {
        let objects = Objects::new(Size { services: 2_000, endpoints: 10 });
        let mut seen = HashSet::new();
        for entry in objects.all() {
            assert!(seen.insert(*entry.frontend.ip()), "{} is taken twice", entry.frontend);
            for address in &entry.endpoints {
                assert!(seen.insert(*address), "{address} is taken twice");
                assert!(seen.insert(Ipv4Addr::from_bits(address.to_bits() ^ 1)));
            }
        }
    }

    #[test]
    fn the_largest_size_stays_inside_its_networks() {
        let last = numbered(MAX_SERVICES - 1, MAX_ENDPOINTS);
        assert_eq!(*last.frontend.ip(), Ipv4Addr::new(10, 96, 255, 254));
        let highest = endpoint(MAX_SERVICES + 1, MAX_ENDPOINTS).to_bits();
        assert!(highest < Ipv4Addr::new(10, 192, 0, 0).to_bits());
    }

    #[test]
    fn swapping_twice_is_nothing() {
        let mut entry = numbered(7, 3);
        let before = entry.clone();
        assert_ne!(entry.swap(1), before.endpoints[1]);
        entry.swap(1);
        assert_eq!(entry, before);
        let added = entry.grow();
        assert_eq!(entry.shrink(), Some(added));
        assert_eq!(entry, before);
    }

    #[test]
    fn a_sample_has_both_ends() {
        let objects = Objects::new(Size { services: 10_000, endpoints: 1 });
        let sample = objects.sample(256);
        assert_eq!(sample.len(), 256);
        assert_eq!((sample[0].name.as_str(), sample[255].name.as_str()), ("s00000", "s09999"));
        assert_eq!(Objects::new(Size { services: 1, endpoints: 1 }).sample(256).len(), 1);
    }

    #[test]
    fn sizes_are_read_and_refused() {
        assert_eq!("10000x10".parse(), Ok(Size { services: 10_000, endpoints: 10 }));
        for wrong in ["", "10", "0x1", "10x0", "10x32", "70000x1", "tenxten"] {
            assert!(wrong.parse::<Size>().is_err(), "{wrong}");
        }
    }
}
