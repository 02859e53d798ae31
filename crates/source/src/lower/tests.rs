// SPDX-License-Identifier: Apache-2.0

use std::net::IpAddr;

use model::{
    Conditions, EndpointSlice, Family, Node, PerFamily, Protocol, Service, ServiceKind, SourceRanges,
    TrafficPolicy, WrittenRanges,
};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::object;

/// Lowers an object given as JSON; what came out, and `field: reason` of each problem.
fn lower<R: Resource>(value: Value) -> (Lowered, Vec<(String, Reason)>) {
    let decoded: R = serde_json::from_value(value).unwrap();
    let from_json = lower_decoded(&decoded);
    // The same object by way of protobuf must come out the same.
    let over_the_wire = R::decode(decoded.encode_to_vec().as_slice()).unwrap();
    assert_eq!(from_json, lower_decoded(&over_the_wire));
    from_json
}

fn lower_decoded<R: Resource>(object: &R) -> (Lowered, Vec<(String, Reason)>) {
    let mut problems = Vec::new();
    let mut report = |problem: Problem| problems.push((problem.field.into_owned(), problem.reason));
    let mut scope = Scope { interner: &mut Interner::default(), node_name: "worker-1", report: &mut report };
    let lowered = object.lower(&mut scope);
    (lowered, problems)
}

fn service_object(spec: Value) -> Value {
    json!({
        "metadata": {"name": "cart", "namespace": "shop", "creationTimestamp": "2024-02-29T12:30:00Z"},
        "spec": spec,
    })
}

fn service(spec: Value) -> (Service, Vec<(String, Reason)>) {
    match lower::<object::Service>(service_object(spec)) {
        (Lowered::Object(Update::Service(service)), problems) => (service, problems),
        other => panic!("{other:?}"),
    }
}

fn slice_object(body: Value) -> Value {
    let mut slice = json!({
        "metadata": {
            "name": "cart-x1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "cart"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        "endpoints": [{"addresses": ["10.1.0.1"]}],
    });
    for (key, value) in body.as_object().unwrap() {
        slice[key] = value.clone();
    }
    slice
}

fn slice(body: Value) -> (EndpointSlice, Vec<(String, Reason)>) {
    match lower::<object::EndpointSlice>(slice_object(body)) {
        (Lowered::Object(Update::Slice(slice)), problems) => (slice, problems),
        other => panic!("{other:?}"),
    }
}

fn node(body: Value) -> (Node, Vec<(String, Reason)>) {
    match lower::<object::Node>(body) {
        (Lowered::Object(Update::Node(node)), problems) => (node, problems),
        other => panic!("{other:?}"),
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn problem(field: &str, reason: Reason) -> (String, Reason) {
    (field.to_owned(), reason)
}

#[test]
fn a_service_with_everything() {
    let (service, problems) = lower::<object::Service>(json!({
        "metadata": {
            "name": "cart", "namespace": "shop", "resourceVersion": "17",
            "creationTimestamp": "2024-02-29T12:30:00Z", "managedFields": [{"manager": "x"}],
            "annotations": {"a": "b"},
        },
        "spec": {
            "type": "LoadBalancer",
            "clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10", "fd00::10"], "ipFamilies": ["IPv4", "IPv6"],
            "ports": [
                {"name": "http", "port": 80, "targetPort": "web", "nodePort": 30080},
                {"name": "dns", "port": 53, "protocol": "UDP"},
            ],
            "externalIPs": ["192.0.2.1", "", "192.0.2.1", "2001:db8::1"],
            "loadBalancerSourceRanges": [" 10.0.0.0/8 ", "2001:db8::/32"],
            "sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}},
            "internalTrafficPolicy": "Local", "externalTrafficPolicy": "Local", "healthCheckNodePort": 31000,
        },
        "status": {"loadBalancer": {"ingress": [
            {"ip": "198.51.100.1"}, {"ip": "198.51.100.2", "ipMode": "VIP"},
            {"ip": "198.51.100.3", "ipMode": "Proxy"}, {"hostname": "lb.example.com"},
        ]}},
    }));
    assert_eq!(problems, []);
    let Lowered::Object(Update::Service(service)) = service else { panic!("{service:?}") };
    assert_eq!(service.key.to_string(), "shop/cart");
    assert_eq!(service.created_secs, 1_709_209_800);
    assert_eq!(service.kind, ServiceKind::LoadBalancer);
    assert_eq!(service.cluster_ips.v4, Some(ip("10.96.0.10")));
    assert_eq!(service.cluster_ips.v6, Some(ip("fd00::10")));
    let ports: Vec<_> =
        service.ports.iter().map(|port| (&*port.name, port.protocol, port.port, port.node_port)).collect();
    assert_eq!(ports, [("http", Protocol::Tcp, 80, Some(30080)), ("dns", Protocol::Udp, 53, None)]);
    assert_eq!(*service.external_ips, [ip("192.0.2.1"), ip("2001:db8::1")]);
    assert_eq!(*service.load_balancer_ips, [ip("198.51.100.1"), ip("198.51.100.2")]);
    let ranges = ["10.0.0.0/8".parse().unwrap(), "2001:db8::/32".parse().unwrap()];
    assert_eq!(service.source_ranges, SourceRanges::only(ranges));
    assert_eq!(service.internal_policy, TrafficPolicy::Local);
    assert_eq!(service.external_policy, TrafficPolicy::Local);
    assert_eq!(service.affinity_secs, Some(60));
    assert_eq!(service.health_check_node_port, Some(31000));
}

#[test]
fn services_that_are_not_ours() {
    for (what, object) in [
        ("headless", service_object(json!({"clusterIP": "None", "clusterIPs": ["None"]}))),
        ("no cluster IP yet", service_object(json!({"ports": [{"port": 80}]}))),
        ("external name", service_object(json!({"type": "ExternalName", "clusterIP": "10.96.0.1"}))),
        (
            "another proxy's",
            json!({
                "metadata": {"name": "a", "namespace": "b",
                    "labels": {"service.kubernetes.io/service-proxy-name": ""}},
                "spec": {"clusterIP": "10.96.0.1"},
            }),
        ),
    ] {
        assert_eq!(lower::<object::Service>(object), (Lowered::Ignored, vec![]), "{what}");
    }
}

#[test]
fn services_that_make_no_sense() {
    for (object, problems) in [
        (json!({}), vec![problem("", Reason::NoName)]),
        (json!({"metadata": {"name": "a"}}), vec![problem("", Reason::NoNamespace)]),
        (json!({"metadata": {"name": "a", "namespace": "b"}}), vec![problem("spec", Reason::NoClusterIp)]),
        (
            service_object(json!({"clusterIP": "10.96.0"})),
            vec![problem("spec.clusterIP", Reason::NoClusterIp)],
        ),
        (
            service_object(json!({"clusterIP": "127.0.0.1"})),
            vec![problem("spec.clusterIP", Reason::BadClusterIp)],
        ),
        (
            service_object(json!({"clusterIPs": ["10.96.0.1", "fe80::1"], "clusterIP": "10.96.0.1"})),
            vec![problem("spec.clusterIP", Reason::BadClusterIp)],
        ),
        (
            service_object(json!({"clusterIP": "x", "clusterIPs": ["x"], "ipFamilies": ["IPv4"]})),
            vec![
                problem("spec.clusterIPs[0]", Reason::BadAddress),
                problem("spec.clusterIP", Reason::NoClusterIp),
            ],
        ),
    ] {
        assert_eq!(lower::<object::Service>(object.clone()), (Lowered::Refused, problems), "{object}");
    }
}

#[test]
fn a_load_balancer_cannot_have_an_address_of_the_node_itself() {
    let mut object = service_object(json!({"clusterIP": "10.96.0.1"}));
    object["status"] = json!({"loadBalancer": {"ingress": [{"ip": "127.0.0.1"}, {"ip": "192.0.2.1"}]}});
    let (Lowered::Object(Update::Service(service)), problems) = lower::<object::Service>(object) else {
        panic!()
    };
    assert_eq!(*service.load_balancer_ips, [ip("192.0.2.1")]);
    assert_eq!(problems, [problem("status.loadBalancer.ingress[0].ip", Reason::BadVip)]);
}

#[test]
fn cluster_ips_by_family() {
    let both = json!(["10.96.0.1", "fd00::1"]);
    for (spec, v4, v6, problems) in [
        // Without families only the first counts.
        (json!({"clusterIP": "fd00::1", "clusterIPs": both}), None, Some("fd00::1"), vec![]),
        (json!({"clusterIP": "::ffff:10.96.0.1"}), Some("10.96.0.1"), None, vec![]),
        (
            json!({"clusterIP": "10.96.0.1", "clusterIPs": both, "ipFamilies": ["IPv4"]}),
            Some("10.96.0.1"),
            None,
            vec![],
        ),
        (
            json!({"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"], "ipFamilies": ["IPv4", "IPv6"]}),
            Some("10.96.0.1"),
            None,
            vec![],
        ),
        (
            json!({"clusterIP": "10.96.0.1", "clusterIPs": both, "ipFamilies": ["IPv4", "IPv7"]}),
            Some("10.96.0.1"),
            None,
            vec![problem("spec.ipFamilies[1]", Reason::BadFamily)],
        ),
        (
            json!({"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1", "10.96.0.2"],
                "ipFamilies": ["IPv4", "IPv6"]}),
            Some("10.96.0.1"),
            None,
            vec![problem("spec.clusterIPs[1]", Reason::WrongFamily)],
        ),
    ] {
        let (lowered, found) = service(spec.clone());
        assert_eq!((lowered.cluster_ips.v4, lowered.cluster_ips.v6), (v4.map(ip), v6.map(ip)), "{spec}");
        assert_eq!(found, problems, "{spec}");
    }
}

#[test]
fn a_bad_part_hurts_only_itself() {
    let (service, problems) = service(json!({
        "type": "Magic", "clusterIP": "10.96.0.1",
        "ports": [
            {"name": "zero", "port": 0}, {"name": "large", "port": 65536}, {"name": "huge", "port": 99999999999i64},
            {"name": "negative", "port": -80}, {"name": "none"}, {"name": "icmp", "port": 1, "protocol": "ICMP"},
            {"name": "good", "port": 65535, "nodePort": 70000},
            {"name": "twice", "port": 1}, {"name": "twice", "port": 2}, {"name": "twice", "port": 3, "protocol": "UDP"},
        ],
        "externalIPs": ["example.com", "192.0.2.1", "127.0.0.1"],
        "loadBalancerSourceRanges": ["10.0.0.0", "10.0.0.0/8"],
        "sessionAffinity": "Cookie", "internalTrafficPolicy": "Nearby", "healthCheckNodePort": -1,
    }));
    let ports: Vec<_> = service.ports.iter().map(|port| (&*port.name, port.port, port.node_port)).collect();
    assert_eq!(ports, [("good", 65535, None), ("twice", 2, None), ("twice", 3, None)]);
    assert_eq!(service.kind, ServiceKind::ClusterIp);
    assert_eq!(*service.external_ips, [ip("192.0.2.1")]);
    let nets = ["10.0.0.0/8".parse().unwrap()].into();
    let unread = PerFamily { v4: true, v6: false };
    assert_eq!(service.source_ranges, SourceRanges::Only(Box::new(WrittenRanges { nets, unread })));
    assert_eq!(service.affinity_secs, None);
    assert_eq!(
        problems,
        [
            problem("spec.type", Reason::BadServiceType),
            problem("spec.ports[0].port", Reason::BadPort),
            problem("spec.ports[1].port", Reason::BadPort),
            problem("spec.ports[2].port", Reason::BadPort),
            problem("spec.ports[3].port", Reason::BadPort),
            problem("spec.ports[4].port", Reason::BadPort),
            problem("spec.ports[5].protocol", Reason::BadProtocol),
            problem("spec.ports[6].nodePort", Reason::BadNodePort),
            problem("spec.ports[8]", Reason::DuplicatePort),
            problem("spec.externalIPs[0]", Reason::BadAddress),
            problem("spec.externalIPs[2]", Reason::BadVip),
            problem("spec.loadBalancerSourceRanges[0]", Reason::BadCidr),
            problem("spec.internalTrafficPolicy", Reason::BadPolicy),
            problem("spec.sessionAffinity", Reason::BadAffinity),
            problem("spec.healthCheckNodePort", Reason::BadNodePort),
        ]
    );
}

#[test]
fn a_range_that_cannot_be_read_is_of_the_family_it_looks_like() {
    for (text, v4, v6) in [
        ("10.0.0.0/40", true, false),
        ("10.0.0.300/8", true, false),
        ("fd00::/129", false, true),
        ("fd00::10.0.0.300/64", false, true),
        ("::ffff:10.0.0.0/64", true, false),
        ("everyone", true, true),
        ("", true, true),
    ] {
        let (service, problems) =
            service(json!({"clusterIP": "10.96.0.1", "loadBalancerSourceRanges": [text]}));
        let expected = WrittenRanges { nets: Box::default(), unread: PerFamily { v4, v6 } };
        assert_eq!(service.source_ranges, SourceRanges::Only(Box::new(expected)), "{text}");
        assert_eq!(problems, [problem("spec.loadBalancerSourceRanges[0]", Reason::BadCidr)]);
    }
}

#[test]
fn affinity_timeouts() {
    let config = |config: Value| {
        let spec =
            json!({"clusterIP": "10.96.0.1", "sessionAffinity": "ClientIP", "sessionAffinityConfig": config});
        let (service, problems) = service(spec);
        (service.affinity_secs, problems.len())
    };
    assert_eq!(config(json!(null)), (Some(10_800), 0));
    assert_eq!(config(json!({})), (Some(10_800), 0));
    assert_eq!(config(json!({"clientIP": {}})), (Some(10_800), 0));
    assert_eq!(config(json!({"clientIP": {"timeoutSeconds": 86_400}})), (Some(86_400), 0));
    assert_eq!(config(json!({"clientIP": {"timeoutSeconds": 86_401}})), (Some(10_800), 1));
    assert_eq!(config(json!({"clientIP": {"timeoutSeconds": 0}})), (Some(10_800), 1));
}

#[test]
fn a_thousand_ports() {
    let ports: Vec<_> = (1..=1000).map(|n| json!({"name": format!("p{n}"), "port": n})).collect();
    let (service, problems) = service(json!({"clusterIP": "10.96.0.1", "ports": ports}));
    assert_eq!((service.ports.len(), problems.len()), (1000, 0));
}

#[test]
fn a_slice_with_everything() {
    let (slice, problems) = slice(json!({
        "metadata": {
            "name": "cart-x1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "cart"},
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2024-02-29T12:30:00.5Z"},
        },
        "ports": [
            {"name": "http", "port": 8080}, {"port": 53, "protocol": "UDP"}, {"name": "", "port": 9, "protocol": ""},
        ],
        "endpoints": [
            {"addresses": ["10.1.0.1", "10.1.0.2"], "nodeName": "worker-1", "zone": "a",
                "conditions": {"ready": false, "serving": true, "terminating": true},
                "hints": {"forZones": [{"name": "b"}, {"name": "a"}, {"name": "a"}], "forNodes": [{"name": "n"}]}},
            {"addresses": ["10.1.0.3"], "conditions": {}, "nodeName": ""},
            {"addresses": ["10.1.0.4"], "conditions": {"ready": null}, "hints": {}},
        ],
    }));
    assert_eq!(problems, []);
    assert_eq!(
        (slice.key.to_string(), slice.service.to_string()),
        ("shop/cart-x1".into(), "shop/cart".into())
    );
    assert_eq!(slice.family, Family::V4);
    assert_eq!(slice.trigger_time_nanos, Some(1_709_209_800_500_000_000));
    let ports: Vec<_> = slice.ports.iter().map(|port| (&*port.name, port.protocol, port.port)).collect();
    assert_eq!(ports, [("http", Protocol::Tcp, 8080), ("", Protocol::Udp, 53), ("", Protocol::Tcp, 9)]);
    let addresses: Vec<_> = slice.endpoints.iter().map(|endpoint| endpoint.address.to_string()).collect();
    assert_eq!(addresses, ["10.1.0.1", "10.1.0.3", "10.1.0.4"]);
    let first = &slice.endpoints[0];
    assert_eq!(first.conditions, Conditions { ready: false, serving: true, terminating: true });
    assert_eq!(first.node.as_deref(), Some("worker-1"));
    let hints = first.hints.as_deref().unwrap();
    assert_eq!(hints.zones.iter().map(|zone| &**zone).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(hints.nodes.len(), 1);
    for endpoint in &slice.endpoints[1..] {
        assert_eq!(endpoint.conditions, Conditions::default());
        assert_eq!((&endpoint.node, &endpoint.hints), (&None, &None));
    }
}

#[test]
fn slices_left_out() {
    let nameless = json!({"metadata": {"name": "x", "namespace": "shop", "labels": {}}});
    let headless = json!({"metadata": {"name": "x", "namespace": "shop", "labels": {
        "kubernetes.io/service-name": "cart", "service.kubernetes.io/headless": ""}}});
    for (body, expected) in [
        (nameless, (Lowered::Refused, vec![problem("metadata.labels", Reason::NoServiceName)])),
        (headless, (Lowered::Ignored, vec![])),
        (
            json!({"addressType": "FQDN", "endpoints": [{"addresses": ["example.com"]}]}),
            (Lowered::Ignored, vec![problem("addressType", Reason::FqdnSlice)]),
        ),
        (
            json!({"addressType": "IPX"}),
            (Lowered::Refused, vec![problem("addressType", Reason::BadAddressType)]),
        ),
        (
            json!({"addressType": null}),
            (Lowered::Refused, vec![problem("addressType", Reason::BadAddressType)]),
        ),
        (json!({"metadata": null}), (Lowered::Refused, vec![problem("", Reason::NoName)])),
    ] {
        assert_eq!(lower::<object::EndpointSlice>(slice_object(body.clone())), expected, "{body}");
    }
}

#[test]
fn bad_parts_of_slices() {
    let (slice, problems) = slice(json!({
        "metadata": {
            "name": "cart-x1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "cart"},
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "now"},
        },
        "ports": [
            {"name": "all"}, {"name": "null", "port": null}, {"name": "zero", "port": 0},
            {"name": "large", "port": 100000}, {"name": "odd", "port": 1, "protocol": "QUIC"},
            {"name": "good", "port": 8080},
        ],
        "endpoints": [
            {}, {"addresses": []}, {"addresses": ["10.1.0"]}, {"addresses": ["fd00::1"]},
            {"addresses": ["::ffff:10.1.0.9"]},
        ],
    }));
    assert_eq!(slice.ports.len(), 1);
    assert_eq!(slice.endpoints.len(), 1);
    assert_eq!(slice.endpoints[0].address, ip("10.1.0.9"));
    assert_eq!(slice.trigger_time_nanos, None);
    assert_eq!(
        problems,
        [
            problem("ports[0].port", Reason::NoPortNumber),
            problem("ports[1].port", Reason::NoPortNumber),
            problem("ports[2].port", Reason::BadPort),
            problem("ports[3].port", Reason::BadPort),
            problem("ports[4].protocol", Reason::BadProtocol),
            problem("endpoints[0].addresses", Reason::NoAddress),
            problem("endpoints[1].addresses", Reason::NoAddress),
            problem("endpoints[2].addresses[0]", Reason::BadAddress),
            problem("endpoints[3].addresses[0]", Reason::WrongFamily),
            problem(
                "metadata.annotations[endpoints.kubernetes.io/last-change-trigger-time]",
                Reason::BadTime
            ),
        ]
    );
}

#[test]
fn a_slice_without_ports() {
    let (placeholder, problems) = slice(json!({"ports": null, "endpoints": null}));
    assert_eq!((placeholder.ports.len(), placeholder.endpoints.len(), problems), (0, 0, vec![]));
    let (portless, problems) = slice(json!({"ports": null}));
    assert_eq!((portless.ports.len(), portless.endpoints.len()), (0, 1));
    assert_eq!(problems, [problem("ports", Reason::NoPorts)]);
}

#[test]
fn ten_thousand_endpoints() {
    let endpoints: Vec<_> = (0..10_000)
        .map(|n| json!({"addresses": [format!("10.{}.{}.{}", n / 2500, n / 250 % 10, n % 250)]}))
        .collect();
    let (slice, problems) = slice(json!({"endpoints": endpoints}));
    assert_eq!((slice.endpoints.len(), problems.len()), (10_000, 0));
}

#[test]
fn this_node() {
    let (node, problems) = node(json!({
        "metadata": {"name": "worker-1", "labels": {"topology.kubernetes.io/zone": "a"}},
        "spec": {"podCIDR": "10.9.0.0/24", "podCIDRs": ["10.1.0.0/24", "10.2.0.0/24", "x", "fd00::/64"]},
        "status": {"addresses": [
            {"type": "Hostname", "address": "worker-1"}, {"type": "ExternalIP", "address": "192.0.2.9"},
            {"type": "ExternalIP", "address": "2001:db8::9"}, {"type": "InternalIP", "address": "?"},
            {"type": "InternalIP", "address": "172.16.0.1"}, {"type": "InternalIP", "address": "172.16.0.2"},
        ]},
    }));
    assert_eq!((node.addresses.v4, node.addresses.v6), (Some(ip("172.16.0.1")), Some(ip("2001:db8::9"))));
    assert_eq!(node.pod_cidrs.v4, Some("10.1.0.0/24".parse().unwrap()));
    assert_eq!(node.pod_cidrs.v6, Some("fd00::/64".parse().unwrap()));
    assert_eq!((node.zone.as_deref(), node.eligible), (Some("a"), true));
    assert_eq!(
        problems,
        [
            problem("status.addresses[3].address", Reason::BadAddress),
            problem("spec.podCIDRs[2]", Reason::BadCidr)
        ]
    );
}

#[test]
fn nodes_about_to_go_and_other_nodes() {
    let (bare, _) =
        node(json!({"metadata": {"name": "worker-1", "labels": {"topology.kubernetes.io/zone": ""}}}));
    assert_eq!((bare.zone, bare.eligible), (None, true));
    let (tainted, _) = node(json!({
        "metadata": {"name": "worker-1"},
        "spec": {"taints": [{"key": "x"}, {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]},
    }));
    assert!(!tainted.eligible);
    let (deleted, _) =
        node(json!({"metadata": {"name": "worker-1", "deletionTimestamp": "2024-02-29T12:30:00Z"}}));
    assert!(!deleted.eligible);
    assert_eq!(lower::<object::Node>(json!({"metadata": {"name": "worker-2"}})), (Lowered::Ignored, vec![]));
    assert_eq!(lower::<object::Node>(json!({})), (Lowered::Refused, vec![problem("", Reason::NoName)]));
}

#[test]
fn service_cidrs() {
    let (lowered, problems) = lower::<object::ServiceCidr>(
        json!({"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/12", "no", "fd00::/112"]}}),
    );
    let cidrs = ["10.96.0.0/12".parse().unwrap(), "fd00::/112".parse().unwrap()];
    let expected = Update::ServiceCidr { name: "kubernetes".into(), cidrs: Box::new(cidrs) };
    assert_eq!(lowered, Lowered::Object(expected));
    assert_eq!(problems, [problem("spec.cidrs[1]", Reason::BadCidr)]);
}

#[test]
fn gone_objects_are_named() {
    let metadata =
        Metadata { name: Some("cart".into()), namespace: Some("shop".into()), ..Metadata::default() };
    let mut report = |problem: Problem| panic!("{problem}");
    let mut scope = Scope { interner: &mut Interner::default(), node_name: "worker-1", report: &mut report };
    let gone = object::Service::gone(&metadata, &mut scope);
    assert!(matches!(gone, Some(Update::ServiceGone(key)) if key.to_string() == "shop/cart"));
    let gone = object::EndpointSlice::gone(&metadata, &mut scope);
    assert!(matches!(gone, Some(Update::SliceGone(key)) if key.to_string() == "shop/cart"));
    assert_eq!(object::Node::gone(&metadata, &mut scope), None);
    let node = Metadata { name: Some("worker-1".into()), ..Metadata::default() };
    assert_eq!(object::Node::gone(&node, &mut scope), Some(Update::NodeGone));
}

#[test]
fn an_annotation_that_is_not_text_spoils_nothing() {
    let mut object: object::Service =
        serde_json::from_value(service_object(json!({"clusterIP": "10.96.0.1"}))).unwrap();
    let pair = object::Pair { key: (&b"\xff"[..]).into(), value: (&b"\xfe"[..]).into() };
    object.metadata.get_or_insert_default().annotations.push(pair);
    let decoded = object::Service::decode(object.encode_to_vec().as_slice()).unwrap();
    assert!(matches!(lower_decoded(&decoded).0, Lowered::Object(_)));
    let numbers = json!({"metadata": {"name": "a", "namespace": "b", "creationTimestamp": 7,
        "labels": {"a": 1, "b": [2, {}], "c": null, "d": "e"}}, "spec": {"clusterIP": "10.96.0.1"}});
    assert!(matches!(lower::<object::Service>(numbers).0, Lowered::Object(_)));
}

/// JSON with the field names and kinds of value that matter, in any arrangement.
fn odd_json() -> impl Strategy<Value = Value> {
    let words = prop::sample::select(vec![
        "metadata",
        "name",
        "namespace",
        "labels",
        "annotations",
        "spec",
        "status",
        "ports",
        "port",
        "protocol",
        "clusterIP",
        "clusterIPs",
        "ipFamilies",
        "type",
        "endpoints",
        "addresses",
        "addressType",
        "conditions",
        "ready",
        "hints",
        "forZones",
        "loadBalancer",
        "ingress",
        "ip",
        "cidrs",
        "podCIDRs",
        "taints",
        "nodePort",
        "kubernetes.io/service-name",
        "sessionAffinity",
        "sessionAffinityConfig",
        "creationTimestamp",
    ]);
    let texts = prop::sample::select(vec![
        "",
        "a",
        "None",
        "IPv4",
        "IPv6",
        "TCP",
        "10.0.0.1",
        "fd00::1",
        "10.0.0.0/8",
        "ClientIP",
        "Local",
        "é\u{0}",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        texts.prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 64, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((words.clone(), inner), 0..6)
                .prop_map(|pairs| Value::Object(pairs.into_iter().map(|(k, v)| (k.to_owned(), v)).collect())),
        ]
    })
}

proptest! {
    #[test]
    fn no_json_panics(value in odd_json()) {
        fn attempt<R: Resource>(value: &Value) {
            if let Ok(object) = serde_json::from_value::<R>(value.clone()) {
                lower_decoded(&object);
            }
        }
        attempt::<object::Service>(&value);
        attempt::<object::EndpointSlice>(&value);
        attempt::<object::Node>(&value);
        attempt::<object::ServiceCidr>(&value);
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        fn attempt<R: Resource>(bytes: &[u8]) {
            if let Ok(object) = R::decode(bytes) {
                lower_decoded(&object);
            }
        }
        attempt::<object::Service>(&bytes);
        attempt::<object::EndpointSlice>(&bytes);
        attempt::<object::Node>(&bytes);
        attempt::<object::ServiceCidr>(&bytes);
    }
}
