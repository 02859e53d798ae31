// SPDX-License-Identifier: Apache-2.0

//! Which frontends a service has, and which it has not.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use model::{Family, PerFamily, Protocol, Role, Service, ServiceKind, ServicePort, Settings, TrafficPolicy};

use crate::{
    build::{balanced, cluster_ip, node_port, port, ready, service, settings, slice, vip, web},
    stage::{Source, Stage, Told, to},
};

fn frontends(settings: Settings, service: Service) -> Vec<String> {
    let stage = Stage::with(settings, service, []);
    stage.plan.frontends().map(|(frontend, decision)| format!("{frontend} {}", decision.role)).collect()
}

fn only_v4() -> Settings {
    Settings { families: PerFamily { v4: true, v6: false }, ..settings() }
}

#[test]
fn every_address_is_a_frontend_of_its_own() {
    assert_eq!(
        frontends(settings(), balanced(TrafficPolicy::Cluster)),
        [
            "10.96.0.10:80/tcp cluster-ip",
            "203.0.113.1:80/tcp load-balancer",
            "203.0.113.2:80/tcp external-ip",
            "[fd00:a:60::a]:80/tcp cluster-ip",
            "[fd00:cb:0:71::1]:80/tcp load-balancer",
            "[fd00:cb:0:71::2]:80/tcp external-ip",
            "nodeport:30080/tcp IPv4 node-port",
            "nodeport:30080/tcp IPv6 node-port",
        ]
    );
}

#[test]
fn a_family_needs_a_cluster_ip_of_it() {
    let single = Service {
        cluster_ips: PerFamily { v4: Some(cluster_ip(Family::V4, 10)), v6: None },
        ..balanced(TrafficPolicy::Cluster)
    };
    let expected = [
        "10.96.0.10:80/tcp cluster-ip",
        "203.0.113.1:80/tcp load-balancer",
        "203.0.113.2:80/tcp external-ip",
        "nodeport:30080/tcp IPv4 node-port",
    ];
    assert_eq!(frontends(settings(), single), expected);
    assert_eq!(frontends(only_v4(), balanced(TrafficPolicy::Cluster)), expected);
}

#[test]
fn headless_and_external_name_services_are_not_proxied() {
    let headless = Service { cluster_ips: PerFamily::default(), ..balanced(TrafficPolicy::Cluster) };
    assert_eq!(frontends(settings(), headless), [""; 0]);
    let named = Service { kind: ServiceKind::ExternalName, ..balanced(TrafficPolicy::Cluster) };
    let stage = Stage::with(settings(), named, []);
    assert_eq!(stage.plan.frontends().count(), 0);
    assert_eq!(stage.plan.cluster_ips().count(), 0);
}

#[test]
fn the_type_is_not_asked_for_ports_and_addresses() {
    let plain = Service { kind: ServiceKind::ClusterIp, ..balanced(TrafficPolicy::Cluster) };
    assert_eq!(frontends(only_v4(), plain).len(), 4);
}

#[test]
fn external_ips_can_be_switched_off() {
    let service = || balanced(TrafficPolicy::Cluster);
    let off = frontends(Settings { external_ips: false, ..only_v4() }, service());
    assert_eq!(off.len(), 3);
    assert!(!off.iter().any(|frontend| frontend.ends_with("external-ip")));
}

#[test]
fn of_two_ports_of_one_name_and_protocol_the_last_counts() {
    let ports = [
        port("http", Protocol::Tcp, 80),
        port("http", Protocol::Udp, 80),
        port("http", Protocol::Tcp, 8080),
        port("", Protocol::Tcp, 81),
    ];
    assert_eq!(
        frontends(only_v4(), Service { ports: ports.into(), ..web() }),
        ["10.96.0.10:81/tcp cluster-ip", "10.96.0.10:8080/tcp cluster-ip", "10.96.0.10:80/udp cluster-ip",]
    );
}

#[test]
fn one_address_in_two_fields_has_the_role_that_restricts_more() {
    let shared = vip(Family::V4, 1);
    let service = Service {
        external_ips: [shared, shared, cluster_ip(Family::V4, 10)].into(),
        load_balancer_ips: [shared, cluster_ip(Family::V4, 10)].into(),
        ..web()
    };
    let stage = Stage::with(only_v4(), service.clone(), []);
    assert_eq!(stage.plan.conflicts().count(), 0);
    assert_eq!(
        frontends(only_v4(), service),
        ["10.96.0.10:80/tcp cluster-ip", "203.0.113.1:80/tcp load-balancer"]
    );
}

#[test]
fn external_policy_local_needs_a_type_or_an_external_ip() {
    let base =
        || Service { load_balancer_ips: [vip(Family::V4, 1)].into(), ..balanced(TrafficPolicy::Local) };
    let none = || Service { external_ips: Box::default(), ..base() };
    let cases = [
        (Service { kind: ServiceKind::LoadBalancer, ..none() }, true),
        (Service { kind: ServiceKind::NodePort, ..none() }, true),
        (Service { kind: ServiceKind::ClusterIp, ..none() }, false),
        (Service { kind: ServiceKind::ClusterIp, ..base() }, true),
    ];
    for (service, is_local) in cases {
        let kind = service.kind;
        let slices = [slice("a", Family::V4, &[ready(Family::V4, 1, 1)])];
        let stage = Stage::with(settings(), service, slices);
        let told = stage.decide(Source::Client, vip(Family::V4, 1), 80);
        assert_eq!(told == Told::Drop, is_local, "{kind:?}: {told:?}");
    }
}

#[test]
fn affinity_is_the_same_for_all_frontends_and_has_a_default() {
    for (written, expected) in [(None, None), (Some(30), Some(30)), (Some(0), Some(10_800))] {
        let service = Service { affinity_secs: written, ..balanced(TrafficPolicy::Cluster) };
        let stage = Stage::with(settings(), service, []);
        assert_eq!(stage.plan.frontends().count(), 8);
        for (frontend, decision) in stage.plan.frontends() {
            assert_eq!(decision.affinity.map(|affinity| affinity.timeout_secs.get()), expected, "{frontend}");
        }
    }
}

#[test]
fn what_the_cluster_needs_to_start_is_ranked_first() {
    let dns = || [port("dns", Protocol::Udp, 53)].into();
    let cases = [
        (service("default/kubernetes", 1), 0),
        (service("kube-system/kube-dns", 1), 1),
        (service("kube-system/coredns", 1), 1),
        (Service { ports: dns(), ..service("kube-system/rke2-coredns", 1) }, 1),
        (Service { ports: dns(), ..service("shop/dns", 1) }, 2),
        (service("kube-system/metrics", 1), 2),
        (service("shop/kubernetes", 1), 2),
    ];
    for (service, rank) in cases {
        let key = service.key.clone();
        let stage = Stage::with(settings(), service, []);
        assert!(stage.plan.frontends().all(|(_, decision)| decision.rank == rank), "{key}");
    }
}

#[test]
fn a_service_without_ports_keeps_its_cluster_ip() {
    let stage = Stage::with(settings(), Service { ports: Box::default(), ..web() }, []);
    assert_eq!(stage.decide(Source::Client, cluster_ip(Family::V4, 10), 80), Told::Reject);
}

#[test]
fn a_frontend_by_address_wins_over_a_node_port() {
    let node_port_80 = ServicePort { node_port: Some(80), ..port("http", Protocol::Tcp, 8000) };
    let mut stage = Stage::with(settings(), Service { ports: [node_port_80].into(), ..web() }, []);
    let at_the_node =
        Service { external_ips: [crate::build::node_ip(Family::V4)].into(), ..service("shop/other", 11) };
    let slice = model::EndpointSlice {
        service: at_the_node.key.clone(),
        ..slice("other", Family::V4, &[ready(Family::V4, 1, 1)])
    };
    let to_the_node = |stage: &Stage| stage.decide(Source::Pod, crate::build::node_ip(Family::V4), 80);
    assert_eq!(to_the_node(&stage), Told::Reject, "the node port");
    stage.apply([model::Update::Service(at_the_node), model::Update::Slice(slice)]);
    assert_eq!(to_the_node(&stage), crate::stage::masked("1.1"), "the external IP");
    assert_eq!(
        stage.plan.decision(&node_port(Family::V4, 80, Protocol::Tcp)).map(|d| d.role),
        Some(Role::NodePort)
    );
    assert_ne!(to_the_node(&stage), to("1.1"));
}

#[test]
fn a_thousand_ports_are_all_served() {
    let ports: Box<[_]> = (0..1000).map(|n| port(&format!("p{n}"), Protocol::Tcp, 1 + n)).collect();
    assert_eq!(frontends(only_v4(), Service { ports, ..web() }).len(), 1000);
}

/// Each address looked for among all before it took 40 s and more here; with a set it takes less than one.
#[test]
fn sixty_thousand_addresses_are_served_in_no_time() {
    let external_ips: Box<[_]> =
        (0..60_000_u32).map(|n| IpAddr::from((n | 0xcb00_0000).to_be_bytes())).collect();
    let begun = Instant::now();
    assert_eq!(frontends(only_v4(), Service { external_ips, ..web() }).len(), 60_001);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}
