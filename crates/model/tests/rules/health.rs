// SPDX-License-Identifier: Apache-2.0

//! The health-check node port.

use model::{
    Conditions, Endpoint, EndpointSlice, Family, HealthCheck, PerFamily, Protocol, Service, ServiceKind,
    TrafficPolicy, Update,
};

use crate::{
    build::{balanced, draining, ready, settings, slice, slice_port, unready, web},
    stage::Stage,
};

const V4: Family = Family::V4;

fn checked() -> Service {
    Service { health_check_node_port: Some(32000), ..balanced(TrafficPolicy::Local) }
}

fn health(service: Service, slices: &[EndpointSlice]) -> Option<HealthCheck> {
    let stage = Stage::with(settings(), service, slices.iter().cloned());
    stage.plan.health().get(&web().key).cloned()
}

#[test]
fn only_a_load_balancer_with_policy_local_has_one() {
    assert_eq!(health(checked(), &[]).map(|health| health.port), Some(32000));
    for service in [
        Service { external_policy: TrafficPolicy::Cluster, ..checked() },
        Service { kind: ServiceKind::NodePort, ..checked() },
        Service { health_check_node_port: Some(0), ..checked() },
        Service { health_check_node_port: None, ..checked() },
        Service { cluster_ips: PerFamily::default(), ..checked() },
    ] {
        assert_eq!(health(service.clone(), &[]), None, "{service:?}");
    }
}

#[test]
fn it_counts_distinct_local_ready_addresses_of_each_family() {
    let list: &[Endpoint] =
        &[ready(V4, 0, 1), ready(V4, 0, 2), ready(V4, 1, 3), unready(V4, 0, 4), draining(V4, 0, 5)];
    let slices = [
        slice("a", V4, list),
        slice("b", V4, &list[..2]),
        slice("c", Family::V6, &[ready(Family::V6, 0, 1)]),
    ];
    let both = health(checked(), &slices).expect("a health check");
    assert_eq!(both.local_endpoints, PerFamily { v4: 2, v6: 1 });
    assert_eq!(both.families, PerFamily { v4: true, v6: true });

    let single = Service { cluster_ips: PerFamily { v6: None, ..checked().cluster_ips }, ..checked() };
    let single = health(single, &slices).expect("a health check");
    assert_eq!(single.local_endpoints, PerFamily { v4: 2, v6: 0 });
    assert_eq!(single.families, PerFamily { v4: true, v6: false });
}

#[test]
fn a_slice_without_ports_has_no_endpoints() {
    let slice = EndpointSlice { ports: Box::default(), ..slice("a", V4, &[ready(V4, 0, 1)]) };
    assert_eq!(health(checked(), &[slice]).map(|health| health.local_endpoints.v4), Some(0));
}

/// A load balancer that is told of an endpoint which selection refuses sends clients to a node that drops them.
#[test]
fn it_counts_what_selection_would_choose() {
    let leaving = Conditions { ready: true, serving: true, terminating: true };
    let leaving = Endpoint { conditions: leaving, ..ready(V4, 0, 1) };
    let slices = [slice("a", V4, &[leaving]), slice("b", V4, &[unready(V4, 0, 1)])];
    assert_eq!(health(checked(), &slices).map(|health| health.local_endpoints.v4), Some(0));
    let ours_no_more = Endpoint { node: Some("there".into()), ..ready(V4, 0, 1) };
    let slices = [slice("a", V4, &[slices[0].endpoints[0].clone()]), slice("b", V4, &[ours_no_more])];
    assert_eq!(health(checked(), &slices).map(|health| health.local_endpoints.v4), Some(0));

    // An address counts once, whichever port it is ready on.
    let other = [slice_port("other", Protocol::Tcp, 9090)].into();
    let slices = [
        slice("a", V4, &[unready(V4, 0, 1)]),
        EndpointSlice { ports: other, ..slice("b", V4, &[ready(V4, 0, 1), ready(V4, 0, 2)]) },
        slice("c", V4, &[ready(V4, 0, 2)]),
    ];
    assert_eq!(health(checked(), &slices).map(|health| health.local_endpoints.v4), Some(2));
}

#[test]
fn changes_name_the_services_whose_check_differs() {
    let mut stage = Stage::new(settings());
    let key = web().key;
    assert_eq!(stage.apply([Update::Service(checked())]).health, std::slice::from_ref(&key));
    let one = slice("a", V4, &[ready(V4, 0, 1)]);
    assert_eq!(stage.apply([Update::Slice(one)]).health, std::slice::from_ref(&key));
    let another = slice("a", V4, &[ready(V4, 0, 2)]);
    assert_eq!(stage.apply([Update::Slice(another)]).health, [], "as many as before");
    assert_eq!(stage.apply([Update::ServiceGone(key.clone())]).health, [key]);
    assert!(stage.plan.health().is_empty());
}
