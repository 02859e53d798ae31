// SPDX-License-Identifier: Apache-2.0

//! Which endpoints count: conditions, duplicates, hints.

use std::net::IpAddr;

use model::{
    Conditions, Endpoint, EndpointSlice, Family, Protocol, Service, ServicePort, TrafficPolicy, Update,
};

use crate::{
    build::{
        at, balanced, cluster_ip, draining, hinted, node, node_port, pod, port, ready, settings, slice,
        slice_port, unready, web,
    },
    stage::Stage,
};

const V4: Family = Family::V4;
const NONE: [IpAddr; 0] = [];

/// What traffic inside the cluster reaches.
fn cluster_pool(endpoints: &[Endpoint]) -> String {
    pool_of(web(), [slice("a", V4, endpoints)])
}

fn pool_of(service: Service, slices: impl IntoIterator<Item = EndpointSlice>) -> String {
    let stage = Stage::with(settings(), service, slices);
    let [inside, _] = stage.pools(&at(cluster_ip(V4, 10), 80, Protocol::Tcp));
    inside.map_or("nothing".to_owned(), |names| names.join(" "))
}

/// What clients outside reach under external policy Local.
fn local_pool(endpoints: &[Endpoint]) -> String {
    let slices = [slice("a", V4, endpoints)];
    let stage = Stage::with(settings(), balanced(TrafficPolicy::Local), slices);
    let [_, outside] = stage.pools(&node_port(V4, 30080, Protocol::Tcp));
    outside.map_or("nothing".to_owned(), |names| names.join(" "))
}

#[test]
fn conditions_are_taken_literally() {
    let with = |ready_, serving, terminating, number| Endpoint {
        conditions: Conditions { ready: ready_, serving, terminating },
        ..ready(V4, 1, number)
    };
    assert_eq!(cluster_pool(&[with(true, false, false, 1), with(false, true, false, 2)]), "1.1");
    assert_eq!(cluster_pool(&[with(true, true, true, 1), with(false, true, true, 2)]), "1.1");
    assert_eq!(cluster_pool(&[with(false, true, false, 1)]), "nothing");
    assert_eq!(cluster_pool(&[with(false, false, true, 1)]), "nothing");
}

#[test]
fn draining_endpoints_serve_only_when_none_is_ready() {
    assert_eq!(cluster_pool(&[ready(V4, 1, 1), draining(V4, 1, 2)]), "1.1");
    assert_eq!(cluster_pool(&[unready(V4, 1, 1), draining(V4, 1, 2)]), "1.2");
}

#[test]
fn the_local_fallback_ignores_ready_endpoints_elsewhere() {
    assert_eq!(local_pool(&[draining(V4, 0, 1), ready(V4, 1, 2)]), "0.1");
    assert_eq!(local_pool(&[ready(V4, 0, 3), draining(V4, 0, 1), ready(V4, 1, 2)]), "0.3");
}

#[test]
fn an_endpoint_without_a_node_is_not_local() {
    let nowhere = Endpoint { node: None, ..ready(V4, 0, 1) };
    assert_eq!(local_pool(&[nowhere, ready(V4, 0, 2)]), "0.2");
}

#[test]
fn zone_hints_keep_traffic_in_the_zone() {
    let a = || hinted(&["a"], &[], ready(V4, 1, 1));
    let b = || hinted(&["b"], &[], ready(V4, 1, 2));
    assert_eq!(cluster_pool(&[a(), b()]), "1.1");
    assert_eq!(cluster_pool(&[b()]), "1.2", "no endpoint is for our zone");
    assert_eq!(cluster_pool(&[a(), ready(V4, 1, 3)]), "1.1 1.3", "one has no hint");
    assert_eq!(cluster_pool(&[a(), b(), unready(V4, 1, 3)]), "1.1", "only ready ones need hints");
    assert_eq!(cluster_pool(&[hinted(&["a", "b"], &[], ready(V4, 1, 3)), b()]), "1.3");
    assert_eq!(cluster_pool(&[hinted(&[], &[], ready(V4, 1, 3)), a()]), "1.1 1.3", "an empty hint is none");
}

#[test]
fn node_hints_go_before_zone_hints() {
    let here = || hinted(&["b"], &["here"], ready(V4, 1, 1));
    let there = || hinted(&["a"], &["there"], ready(V4, 1, 2));
    assert_eq!(cluster_pool(&[here(), there()]), "1.1");
    assert_eq!(cluster_pool(&[there(), hinted(&["b"], &["there"], ready(V4, 1, 3))]), "1.2", "then the zone");
    assert_eq!(cluster_pool(&[here(), hinted(&["a"], &[], ready(V4, 1, 3))]), "1.3", "one has no node hint");
}

#[test]
fn hints_count_neither_for_draining_nor_for_local_traffic() {
    let far = |endpoint| hinted(&["b"], &["there"], endpoint);
    let near = |endpoint| hinted(&["a"], &["here"], endpoint);
    assert_eq!(cluster_pool(&[near(draining(V4, 1, 1)), far(draining(V4, 1, 2))]), "1.1 1.2");
    assert_eq!(local_pool(&[far(ready(V4, 0, 1)), near(ready(V4, 1, 2))]), "0.1");
}

#[test]
fn zone_hints_follow_the_zone_of_the_node() {
    let endpoints = [hinted(&["a"], &[], ready(V4, 1, 1)), hinted(&["b"], &[], ready(V4, 1, 2))];
    let mut stage = Stage::with(settings(), web(), [slice("a", V4, &endpoints)]);
    let frontend = at(cluster_ip(V4, 10), 80, Protocol::Tcp);
    let mut pool_in = |zone: Option<&str>| {
        stage.apply([Update::Node(model::Node { zone: zone.map(Into::into), ..node() })]);
        stage.pools(&frontend)[0].clone().expect("forwards").join(" ")
    };
    assert_eq!(pool_in(Some("b")), "1.2");
    assert_eq!(pool_in(None), "1.1 1.2");
    assert_eq!(pool_in(Some("a")), "1.1");
}

#[test]
fn endpoints_of_several_slices_are_one_list() {
    let slices = [
        slice("b", V4, &[ready(V4, 1, 2), ready(V4, 1, 1)]),
        slice("a", V4, &[ready(V4, 1, 3), ready(V4, 1, 1)]),
        slice("c", Family::V6, &[ready(Family::V6, 1, 9)]),
    ];
    assert_eq!(pool_of(web(), slices), "1.1 1.2 1.3");
}

#[test]
fn of_duplicates_the_one_that_is_not_terminating_counts() {
    let terminating = draining(V4, 1, 1);
    for names in [["a", "b"], ["b", "a"]] {
        let slices = |second: Endpoint| {
            [slice(names[0], V4, std::slice::from_ref(&terminating)), slice(names[1], V4, &[second])]
        };
        assert_eq!(pool_of(web(), slices(ready(V4, 1, 1))), "1.1");
        assert_eq!(pool_of(web(), slices(unready(V4, 1, 1))), "nothing");
    }
}

#[test]
fn of_living_duplicates_a_ready_one_counts() {
    for names in [["a", "b"], ["b", "a"]] {
        let slices = [
            slice(names[0], V4, &[unready(V4, 1, 1)]),
            slice(names[1], V4, &[ready(V4, 1, 1), unready(V4, 1, 1)]),
        ];
        assert_eq!(pool_of(web(), slices), "1.1");
    }
}

#[test]
fn ports_match_by_name_and_protocol_whatever_their_number() {
    let stage = Stage::with(
        settings(),
        Service {
            ports: [
                port("http", Protocol::Tcp, 80),
                port("", Protocol::Udp, 80),
                port("x", Protocol::Sctp, 80),
            ]
            .into(),
            ..web()
        },
        [
            EndpointSlice {
                ports: [slice_port("http", Protocol::Tcp, 1), slice_port("", Protocol::Udp, 2)].into(),
                ..slice("a", V4, &[ready(V4, 1, 1)])
            },
            EndpointSlice {
                ports: [slice_port("http", Protocol::Tcp, 3), slice_port("x", Protocol::Tcp, 4)].into(),
                ..slice("b", V4, &[ready(V4, 1, 1)])
            },
        ],
    );
    let dump = stage.plan.to_string();
    assert!(dump.contains(" 10.1.1.1:1 10.1.1.1:3\n"), "{dump}");
    assert!(dump.contains(" 10.1.1.1:2\n"), "{dump}");
    assert_eq!(stage.pools(&at(cluster_ip(V4, 10), 80, Protocol::Sctp)), [None, None]);
}

#[test]
fn an_address_of_another_family_than_its_slice_is_left_out() {
    assert_eq!(cluster_pool(&[ready(Family::V6, 1, 1), ready(V4, 1, 2)]), "1.2");
}

#[test]
fn hairpin_needs_the_reachable_endpoints_of_this_node() {
    let local_backends = |service: Service, endpoints: &[Endpoint]| -> Vec<IpAddr> {
        let stage = Stage::with(settings(), service, [slice("a", V4, endpoints)]);
        stage.plan.local_backends().collect()
    };
    let here = || [ready(V4, 0, 1), unready(V4, 0, 2), ready(V4, 1, 3), draining(V4, 0, 4)];
    assert_eq!(local_backends(web(), &here()), [pod(V4, 0, 1)]);

    let far_by_hint = || [hinted(&["b"], &[], ready(V4, 0, 1)), hinted(&["a"], &[], ready(V4, 1, 2))];
    assert_eq!(local_backends(web(), &far_by_hint()), NONE);
    assert_eq!(local_backends(balanced(TrafficPolicy::Local), &far_by_hint()), [pod(V4, 0, 1)]);

    let fallback = || [draining(V4, 0, 1), ready(V4, 1, 2)];
    assert_eq!(local_backends(web(), &fallback()), NONE);
    assert_eq!(local_backends(balanced(TrafficPolicy::Local), &fallback()), [pod(V4, 0, 1)]);

    let keeps_inside = Service { internal_policy: TrafficPolicy::Local, ..web() };
    assert_eq!(local_backends(keeps_inside, &here()), [pod(V4, 0, 1)]);
}

#[test]
fn a_pool_is_shared_by_all_frontends_of_a_port() {
    let slices = [slice("a", V4, &[ready(V4, 0, 1)])];
    let stage = Stage::with(settings(), balanced(TrafficPolicy::Local), slices);
    let pools: Vec<_> = stage
        .plan
        .frontends()
        .flat_map(|(_, decision)| [&decision.inside, &decision.outside])
        .filter_map(|verdict| match verdict {
            model::Verdict::Forward(forward) => Some(&forward.pool),
            _ => None,
        })
        .collect();
    assert_eq!(pools.len(), 8);
    assert!(pools.iter().all(|pool| std::sync::Arc::ptr_eq(pool, pools[0])));
}

#[test]
fn a_port_without_a_node_port_is_served_beside_one_that_has_it() {
    let ports = [
        ServicePort { node_port: Some(30080), ..port("http", Protocol::Tcp, 80) },
        ServicePort { node_port: Some(0), ..port("admin", Protocol::Tcp, 81) },
    ];
    let service = Service { ports: ports.into(), internal_policy: TrafficPolicy::Local, ..web() };
    let stage = Stage::with(settings(), service, [slice("a", V4, &[ready(V4, 1, 1)])]);
    assert_eq!(stage.plan.frontends().filter(|(f, _)| f.family() == V4).count(), 3);
    assert_eq!(stage.pools(&node_port(V4, 30080, Protocol::Tcp))[1], Some(vec!["1.1".to_owned()]));
}
