// SPDX-License-Identifier: Apache-2.0

//! The traffic matrix: who reaches whom, masqueraded or not, from where, under which policy, as
//! docs/semantics.md tells it.

use TrafficPolicy::{Cluster, Local};
use model::{DetectLocal, Endpoint, Family, PerFamily, Protocol, Service, Settings, TrafficPolicy, Update};

use crate::{
    build::{
        balanced, client, cluster_ip, draining, loopback, net, node_ip, pod, ready, settings, slice, unready,
        vip,
    },
    stage::{Source, Stage, Told, masked, to},
};

const SOURCES: [Source; 3] = [Source::Pod, Source::Node, Source::Client];

fn stage(settings: Settings, service: Service, endpoints: &[(char, u8, u8)]) -> Stage {
    let endpoint = |family: Family, &(state, node, number): &(char, u8, u8)| -> Endpoint {
        match state {
            'r' => ready(family, node, number),
            't' => draining(family, node, number),
            _ => unready(family, node, number),
        }
    };
    let slices = Family::BOTH.map(|family| {
        let endpoints: Vec<Endpoint> = endpoints.iter().map(|e| endpoint(family, e)).collect();
        slice(&format!("web-{family}"), family, &endpoints)
    });
    Stage::with(settings, service, slices)
}

/// Every destination of a service that comes from outside.
fn external(family: Family) -> [(std::net::IpAddr, u16); 3] {
    [(vip(family, 1), 80), (vip(family, 2), 80), (node_ip(family), 30080)]
}

/// Checks what pods, processes and clients get at a destination.
fn check(stage: &Stage, (to, port): (std::net::IpAddr, u16), expected: [Told; 3], what: &str) {
    for (source, expected) in SOURCES.into_iter().zip(expected) {
        assert_eq!(stage.decide(source, to, port), expected, "{what}: {source:?} to {to} port {port}");
    }
}

const HERE_AND_THERE: &[(char, u8, u8)] = &[('r', 0, 1), ('r', 1, 2)];

#[test]
fn each_source_reaches_what_the_policies_say() {
    for family in Family::BOTH {
        let cluster = (cluster_ip(family, 10), 80);
        let mut service = balanced(Cluster);
        let open = stage(settings(), service.clone(), HERE_AND_THERE);
        check(&open, cluster, [to("0.1 1.2"), masked("0.1 1.2"), masked("0.1 1.2")], "iTP Cluster");
        for destination in external(family) {
            check(&open, destination, [(); 3].map(|()| masked("0.1 1.2")), "eTP Cluster");
        }

        service.internal_policy = Local;
        service.external_policy = Local;
        let local = stage(settings(), service, HERE_AND_THERE);
        check(&local, cluster, [to("0.1"), masked("0.1"), masked("0.1")], "iTP Local");
        for destination in external(family) {
            check(&local, destination, [to("0.1 1.2"), masked("0.1 1.2"), to("0.1")], "eTP Local");
        }
    }
}

#[test]
fn one_policy_does_not_touch_the_traffic_of_the_other() {
    for family in Family::BOTH {
        let inside =
            stage(settings(), Service { internal_policy: Local, ..balanced(Cluster) }, HERE_AND_THERE);
        let outside = stage(settings(), balanced(Local), HERE_AND_THERE);
        check(
            &outside,
            (cluster_ip(family, 10), 80),
            [to("0.1 1.2"), masked("0.1 1.2"), masked("0.1 1.2")],
            "eTP Local",
        );
        for destination in external(family) {
            check(&inside, destination, [(); 3].map(|()| masked("0.1 1.2")), "iTP Local");
        }
    }
}

/// Endpoints; a client's fate at the cluster IP under iTP Cluster and Local, at the outside under eTP Cluster, at
/// the outside under eTP Local; a pod's fate there.
type State = (&'static str, &'static [(char, u8, u8)], [Option<&'static str>; 5]);

/// `Some("")` is drop, `None` reject.
const STATES: [State; 8] = [
    (
        "ready, some here",
        HERE_AND_THERE,
        [Some("0.1 1.2"), Some("0.1"), Some("0.1 1.2"), Some("0.1"), Some("0.1 1.2")],
    ),
    ("ready, none here", &[('r', 1, 2)], [Some("1.2"), Some(""), Some("1.2"), Some(""), Some("1.2")]),
    (
        "draining, some here",
        &[('t', 0, 1), ('t', 1, 2)],
        [Some("0.1 1.2"), Some("0.1"), Some("0.1 1.2"), Some("0.1"), Some("0.1 1.2")],
    ),
    ("draining, none here", &[('t', 1, 2)], [Some("1.2"), Some(""), Some("1.2"), Some(""), Some("1.2")]),
    (
        "draining here, ready there",
        &[('t', 0, 1), ('r', 1, 2)],
        [Some("1.2"), Some("0.1"), Some("1.2"), Some("0.1"), Some("1.2")],
    ),
    (
        "ready here, draining there",
        &[('r', 0, 1), ('t', 1, 2)],
        [Some("0.1"), Some("0.1"), Some("0.1"), Some("0.1"), Some("0.1")],
    ),
    ("nothing ready", &[('u', 0, 1), ('u', 1, 2)], [None, None, None, None, None]),
    ("no endpoints", &[], [None, None, None, None, None]),
];

fn verdict(expected: Option<&str>, is_masked: bool) -> Told {
    match expected {
        None => Told::Reject,
        Some("") => Told::Drop,
        Some(names) if is_masked => masked(names),
        Some(names) => to(names),
    }
}

#[test]
fn the_state_of_the_endpoints_decides_between_forward_drop_and_reject() {
    for (what, endpoints, [cluster, cluster_local, outside, outside_local, short_circuit]) in STATES {
        for family in Family::BOTH {
            let address = cluster_ip(family, 10);
            let open = stage(settings(), balanced(Cluster), endpoints);
            let local = Service { internal_policy: Local, ..balanced(Local) };
            let local = stage(settings(), local, endpoints);
            let internal_only = Service { internal_policy: Local, ..crate::build::web() };
            let internal_only = stage(settings(), internal_only, endpoints);

            assert_eq!(open.decide(Source::Client, address, 80), verdict(cluster, true), "{what}");
            assert_eq!(local.decide(Source::Client, address, 80), verdict(cluster_local, true), "{what}");
            assert_eq!(
                internal_only.decide(Source::Client, address, 80),
                verdict(cluster_local, true),
                "{what}"
            );
            for (address, port) in external(family) {
                assert_eq!(open.decide(Source::Client, address, port), verdict(outside, true), "{what}");
                assert_eq!(
                    local.decide(Source::Client, address, port),
                    verdict(outside_local, false),
                    "{what}"
                );
                assert_eq!(local.decide(Source::Pod, address, port), verdict(short_circuit, false), "{what}");
                assert_eq!(local.decide(Source::Node, address, port), verdict(short_circuit, true), "{what}");
            }
        }
    }
}

#[test]
fn without_pod_detection_pods_are_like_strangers() {
    let blind = || Settings { detect_local: DetectLocal::ClusterCidr(PerFamily::default()), ..settings() };
    for family in Family::BOTH {
        let open = stage(blind(), balanced(Cluster), HERE_AND_THERE);
        check(&open, (cluster_ip(family, 10), 80), [(); 3].map(|()| to("0.1 1.2")), "iTP Cluster");
        let local = stage(blind(), balanced(Local), HERE_AND_THERE);
        for destination in external(family) {
            check(&local, destination, [to("0.1"), masked("0.1 1.2"), to("0.1")], "eTP Local");
        }
    }
}

#[test]
fn masquerade_all_concerns_cluster_ips_only() {
    let all = || Settings { masquerade_all: true, ..settings() };
    for family in Family::BOTH {
        let open = stage(all(), balanced(Local), HERE_AND_THERE);
        check(&open, (cluster_ip(family, 10), 80), [(); 3].map(|()| masked("0.1 1.2")), "cluster IP");
        for destination in external(family) {
            check(&open, destination, [to("0.1 1.2"), masked("0.1 1.2"), to("0.1")], "eTP Local");
        }
        let blind = Settings { detect_local: DetectLocal::ClusterCidr(PerFamily::default()), ..all() };
        let blind = stage(blind, balanced(Local), HERE_AND_THERE);
        check(&blind, (cluster_ip(family, 10), 80), [(); 3].map(|()| masked("0.1 1.2")), "cluster IP, blind");
    }
}

#[test]
fn every_way_to_detect_pods_tells_them() {
    let cidrs = PerFamily { v4: Some(net("10.1.0.0/16")), v6: Some(net("fd00:a:1::/48")) };
    let modes = [
        DetectLocal::NodeCidr,
        DetectLocal::ClusterCidr(cidrs),
        DetectLocal::Bridge("veth0".into()),
        DetectLocal::InterfacePrefix("veth".into()),
    ];
    for detect_local in modes {
        for family in Family::BOTH {
            let stage = stage(
                Settings { detect_local: detect_local.clone(), ..settings() },
                balanced(Local),
                HERE_AND_THERE,
            );
            let expected = [to("0.1 1.2"), masked("0.1 1.2"), masked("0.1 1.2")];
            check(&stage, (cluster_ip(family, 10), 80), expected, &format!("{detect_local:?}"));

            // Only a range of the whole cluster takes another node's pod for one of ours.
            let pod_of_another_node = stage.decide(Source::At(pod(family, 1, 9)), vip(family, 1), 80);
            let is_inside = matches!(detect_local, DetectLocal::ClusterCidr(_));
            let expected = if is_inside { to("0.1 1.2") } else { to("0.1") };
            assert_eq!(pod_of_another_node, expected, "{detect_local:?}");
        }
    }
}

#[test]
fn addresses_and_ports_of_no_service() {
    for family in Family::BOTH {
        let mut stage = stage(settings(), balanced(Cluster), HERE_AND_THERE);
        let cidrs = [net("10.96.0.0/16"), net("fd00:a:60::/48")].into();
        stage.apply([Update::ServiceCidr { name: "kubernetes".into(), cidrs }]);
        for source in SOURCES {
            let decide = |address, port| stage.decide(source, address, port);
            assert_eq!(decide(cluster_ip(family, 10), 81), Told::Reject, "unknown port");
            assert_eq!(
                stage.decide_with(Protocol::Udp, source, cluster_ip(family, 10), 80),
                Told::Reject,
                "unknown protocol"
            );
            assert_eq!(decide(cluster_ip(family, 99), 80), Told::Drop, "free address");
            assert_eq!(decide(vip(family, 1), 81), Told::Pass, "other port of a load balancer");
            assert_eq!(decide(vip(family, 2), 81), Told::Pass, "other port of an external IP");
            assert_eq!(decide(node_ip(family), 30081), Told::Pass, "other port of the node");
            assert_eq!(decide(loopback(family), 30080), Told::Pass, "node port on loopback");
            assert_eq!(decide(client(family), 80), Told::Pass, "somewhere else");
            assert_eq!(decide(client(family), 30080), Told::Pass, "the node port of somebody else");
        }
    }
}
