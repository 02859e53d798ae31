// SPDX-License-Identifier: Apache-2.0

//! Objects for tests. Addresses are the same in both families, but for their looks.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use ipnet::IpNet;
use model::{
    Address, Conditions, DetectLocal, Endpoint, EndpointSlice, Family, Frontend, Hints, Node, PerFamily,
    Protocol, Service, ServiceKey, ServiceKind, ServicePort, Settings, SliceKey, SlicePort, SourceRanges,
    TrafficPolicy, Weights,
};

/// A pod, by the number of its node (0 is here) and its own.
pub(crate) fn pod(family: Family, node: u8, number: u8) -> IpAddr {
    host(family, [10, 1], node, number)
}

pub(crate) fn cluster_ip(family: Family, number: u8) -> IpAddr {
    host(family, [10, 96], 0, number)
}

/// An address a load balancer or an operator gave.
pub(crate) fn vip(family: Family, number: u8) -> IpAddr {
    host(family, [203, 0], 113, number)
}

pub(crate) fn client(family: Family) -> IpAddr {
    host(family, [198, 51], 100, 7)
}

pub(crate) fn node_ip(family: Family) -> IpAddr {
    host(family, [192, 0], 2, 5)
}

pub(crate) fn loopback(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::LOCALHOST.into(),
        Family::V6 => Ipv6Addr::LOCALHOST.into(),
    }
}

fn host(family: Family, [a, b]: [u8; 2], c: u8, d: u8) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(a, b, c, d).into(),
        Family::V6 => Ipv6Addr::new(0xfd00, a.into(), b.into(), c.into(), 0, 0, 0, d.into()).into(),
    }
}

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

pub(crate) fn net(text: &str) -> IpNet {
    text.parse().expect("a network")
}

pub(crate) fn key(text: &str) -> ServiceKey {
    let (namespace, name) = text.split_once('/').expect("namespace/name");
    ServiceKey { namespace: namespace.into(), name: name.into() }
}

pub(crate) fn slice_key(text: &str) -> SliceKey {
    let ServiceKey { namespace, name } = key(text);
    SliceKey { namespace, name }
}

/// Both families, pods told by the range of the node, node ports everywhere.
pub(crate) fn settings() -> Settings {
    Settings {
        node_name: "here".into(),
        families: PerFamily { v4: true, v6: true },
        node_ip_override: PerFamily::default(),
        detect_local: DetectLocal::NodeCidr,
        node_port_addresses: Box::default(),
        masquerade_all: false,
        external_ips: true,
    }
}

/// This node, in zone `a`.
pub(crate) fn node() -> Node {
    Node {
        name: "here".into(),
        addresses: PerFamily::from_fn(|family| Some(node_ip(family))),
        pod_cidrs: PerFamily { v4: Some(net("10.1.0.0/24")), v6: Some(net("fd00:a:1::/64")) },
        zone: Some("a".into()),
        eligible: true,
    }
}

/// `shop/web`, cluster IPs number 10, port 80 named http.
pub(crate) fn web() -> Service {
    service("shop/web", 10)
}

pub(crate) fn service(name: &str, cluster_ip_number: u8) -> Service {
    Service {
        key: key(name),
        created_secs: 1,
        kind: ServiceKind::ClusterIp,
        cluster_ips: PerFamily::from_fn(|family| Some(cluster_ip(family, cluster_ip_number))),
        ports: [port("http", Protocol::Tcp, 80)].into(),
        external_ips: Box::default(),
        load_balancer_ips: Box::default(),
        source_ranges: SourceRanges::Any,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        affinity_secs: None,
        health_check_node_port: None,
        tuning: None,
        weights: Weights::default(),
    }
}

/// `shop/web` behind a load balancer, vip 1 of each family, external IP vip 2, node port 30080.
pub(crate) fn balanced(external_policy: TrafficPolicy) -> Service {
    Service {
        kind: ServiceKind::LoadBalancer,
        ports: [ServicePort { node_port: Some(30080), ..port("http", Protocol::Tcp, 80) }].into(),
        load_balancer_ips: Family::BOTH.map(|family| vip(family, 1)).into(),
        external_ips: Family::BOTH.map(|family| vip(family, 2)).into(),
        external_policy,
        ..web()
    }
}

pub(crate) fn port(name: &str, protocol: Protocol, port: u16) -> ServicePort {
    ServicePort { name: name.into(), protocol, port, node_port: None }
}

/// A slice of `shop/web` for port http at 8080.
pub(crate) fn slice(name: &str, family: Family, endpoints: &[Endpoint]) -> EndpointSlice {
    EndpointSlice {
        key: slice_key(&format!("shop/{name}")),
        service: key("shop/web"),
        family,
        ports: [slice_port("http", Protocol::Tcp, 8080)].into(),
        endpoints: endpoints.into(),
        weight: 1,
        trigger_time_nanos: None,
    }
}

pub(crate) fn slice_port(name: &str, protocol: Protocol, port: u16) -> SlicePort {
    SlicePort { name: name.into(), protocol, port }
}

/// A ready endpoint: on this node if its node number is 0.
pub(crate) fn ready(family: Family, node: u8, number: u8) -> Endpoint {
    Endpoint {
        address: pod(family, node, number),
        conditions: Conditions::default(),
        node: Some(if node == 0 { "here".into() } else { "there".into() }),
        zone: Some(if node == 0 { "a".into() } else { "b".into() }),
        hints: None,
    }
}

/// Going away, but still serving.
pub(crate) fn draining(family: Family, node: u8, number: u8) -> Endpoint {
    let conditions = Conditions { ready: false, serving: true, terminating: true };
    Endpoint { conditions, ..ready(family, node, number) }
}

pub(crate) fn unready(family: Family, node: u8, number: u8) -> Endpoint {
    let conditions = Conditions { ready: false, serving: false, terminating: false };
    Endpoint { conditions, ..ready(family, node, number) }
}

pub(crate) fn hinted(zones: &[&str], nodes: &[&str], endpoint: Endpoint) -> Endpoint {
    let shared = |names: &[&str]| names.iter().map(|name| Arc::from(*name)).collect();
    Endpoint { hints: Some(Arc::new(Hints { zones: shared(zones), nodes: shared(nodes) })), ..endpoint }
}

pub(crate) fn at(address: IpAddr, port: u16, protocol: Protocol) -> Frontend {
    Frontend { address: Address::Ip(address), protocol, port }
}

pub(crate) fn node_port(family: Family, port: u16, protocol: Protocol) -> Frontend {
    Frontend { address: Address::NodePort(family), protocol, port }
}
