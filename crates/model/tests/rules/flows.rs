// SPDX-License-Identifier: Apache-2.0

//! Which tracked flows a change makes stale.

use std::net::IpAddr;

use model::{
    Backend, Changes, Endpoint, EndpointSlice, Family, FlowRule, Frontend, Protocol, Service, ServicePort,
    TrafficPolicy, Update,
};

use crate::{
    build::{
        at, cluster_ip, draining, node_port, pod, port, ready, settings, slice, slice_port, unready, vip, web,
    },
    stage::{Stage, pod_name},
};

const V4: Family = Family::V4;

fn dns(protocol: Protocol) -> Service {
    Service { ports: [port("dns", protocol, 53)].into(), ..web() }
}

fn endpoints(protocol: Protocol, endpoints: &[Endpoint]) -> Update {
    let ports = [slice_port("dns", protocol, 53)].into();
    Update::Slice(EndpointSlice { ports, ..slice("a", V4, endpoints) })
}

/// A stage that has begun with nothing, so that nothing is at first sight.
fn begun(service: Service) -> Stage {
    let mut stage = Stage::new(settings());
    stage.apply([Update::Service(service)]);
    stage
}

fn names(backends: &[Backend]) -> String {
    backends.iter().map(|backend| pod_name(backend.address)).collect::<Vec<_>>().join(" ")
}

/// `serving / gone / untranslated` of the rule for a frontend.
fn told(changes: &Changes, frontend: Frontend) -> Option<String> {
    let tell = |rule: &FlowRule| {
        let gone = rule.gone.as_ref().map_or("unknown".to_owned(), |gone| names(gone));
        let untranslated = if rule.untranslated { " / untranslated" } else { "" };
        format!("{} / {gone}{untranslated}", names(&rule.serving))
    };
    let mut rules = changes.flows.iter().filter(|rule| rule.frontend == frontend);
    let rule = rules.next().map(tell);
    assert!(rules.next().is_none(), "one rule for each frontend");
    rule
}

fn frontend(protocol: Protocol) -> Frontend {
    at(cluster_ip(V4, 10), 53, protocol)
}

#[test]
fn flows_follow_their_endpoint_until_it_stops_serving() {
    for protocol in [Protocol::Udp, Protocol::Sctp] {
        let mut stage = begun(dns(protocol));
        let mut step =
            |list: &[Endpoint]| told(&stage.apply([endpoints(protocol, list)]), frontend(protocol));
        let tell = |text: &str| Some(text.to_owned());

        assert_eq!(step(&[unready(V4, 1, 1)]), None, "still nothing usable");
        assert_eq!(step(&[ready(V4, 1, 1), ready(V4, 1, 2)]), tell("1.1 1.2 /  / untranslated"), "the first");
        assert_eq!(step(&[ready(V4, 1, 1), ready(V4, 1, 2), ready(V4, 1, 3)]), None, "one more");
        assert_eq!(
            step(&[ready(V4, 1, 1), draining(V4, 1, 2), ready(V4, 1, 3)]),
            None,
            "draining still serves"
        );
        assert_eq!(step(&[ready(V4, 1, 1), ready(V4, 1, 3)]), tell("1.1 1.3 / 1.2"), "gone");
        assert_eq!(step(&[ready(V4, 1, 1), unready(V4, 1, 3)]), tell("1.1 / 1.3"), "no longer serving");
        assert_eq!(step(&[]), tell(" / 1.1"), "the last");
        assert_eq!(step(&[ready(V4, 1, 4)]), tell("1.4 /  / untranslated"), "first again");
        assert_eq!(step(&[draining(V4, 1, 4)]), None, "the last resort serves");
    }
}

#[test]
fn tcp_needs_no_rule() {
    let mut stage = begun(dns(Protocol::Tcp));
    assert_eq!(stage.apply([endpoints(Protocol::Tcp, &[ready(V4, 1, 1)])]).flows, []);
    assert_eq!(stage.apply([endpoints(Protocol::Tcp, &[])]).flows, []);
}

#[test]
fn at_first_sight_all_that_does_not_serve_is_stale() {
    let first = |list: &[Endpoint]| {
        let mut world = model::World::new(settings());
        world.apply(endpoints(Protocol::Udp, list));
        world.apply(Update::Service(dns(Protocol::Udp)));
        let changes = model::Plan::new().update(&world, world.everything());
        told(&changes, frontend(Protocol::Udp)).expect("a rule")
    };
    assert_eq!(first(&[ready(V4, 1, 1)]), "1.1 / unknown / untranslated");
    assert_eq!(first(&[]), " / unknown");
}

#[test]
fn a_service_that_goes_takes_its_flows_along() {
    let mut stage = begun(dns(Protocol::Udp));
    stage.apply([endpoints(Protocol::Udp, &[ready(V4, 1, 1), draining(V4, 1, 2)])]);
    let changes = stage.apply([Update::ServiceGone(web().key)]);
    assert_eq!(told(&changes, frontend(Protocol::Udp)).as_deref(), Some(" / 1.1 1.2"));
    assert_eq!(changes.flows.len(), 1, "IPv6 had no endpoint");
}

#[test]
fn a_removed_address_or_port_takes_its_flows_along_and_leaves_the_others() {
    let with_more = Service {
        external_ips: [vip(V4, 1)].into(),
        ports: [ServicePort { node_port: Some(30053), ..port("dns", Protocol::Udp, 53) }].into(),
        ..dns(Protocol::Udp)
    };
    let mut stage = begun(with_more);
    stage.apply([endpoints(Protocol::Udp, &[ready(V4, 1, 1)])]);
    let changes = stage.apply([Update::Service(dns(Protocol::Udp))]);
    assert_eq!(told(&changes, at(vip(V4, 1), 53, Protocol::Udp)).as_deref(), Some(" / 1.1"));
    assert_eq!(told(&changes, node_port(V4, 30053, Protocol::Udp)).as_deref(), Some(" / 1.1"));
    assert_eq!(told(&changes, frontend(Protocol::Udp)), None);
}

#[test]
fn a_new_address_of_a_service_ends_flows_that_went_there_untranslated() {
    let mut stage = begun(dns(Protocol::Udp));
    stage.apply([endpoints(Protocol::Udp, &[ready(V4, 1, 1)])]);
    let more = Service { external_ips: [vip(V4, 1)].into(), ..dns(Protocol::Udp) };
    let changes = stage.apply([Update::Service(more)]);
    assert_eq!(told(&changes, at(vip(V4, 1), 53, Protocol::Udp)).as_deref(), Some("1.1 /  / untranslated"));
    assert_eq!(changes.flows.len(), 1);
}

#[test]
fn a_policy_that_lets_traffic_in_again_ends_untranslated_flows() {
    let local = Service { internal_policy: TrafficPolicy::Local, ..dns(Protocol::Udp) };
    let mut stage = begun(local);
    let changes = stage.apply([endpoints(Protocol::Udp, &[ready(V4, 1, 1)])]);
    assert_eq!(told(&changes, frontend(Protocol::Udp)), None, "dropped: serving, but not for us");
    let changes = stage.apply([Update::Service(dns(Protocol::Udp))]);
    assert_eq!(told(&changes, frontend(Protocol::Udp)).as_deref(), Some("1.1 /  / untranslated"));
}

#[test]
fn a_frontend_that_changes_hands_loses_the_flows_of_the_former_owner() {
    let shared = |service: Service| Service { external_ips: [vip(V4, 1)].into(), ..service };
    let heir = Service { key: crate::build::key("shop/x"), created_secs: 9, ..dns(Protocol::Udp) };
    let cluster_ips = model::PerFamily { v4: Some(cluster_ip(V4, 11)), v6: None };
    let heir = shared(Service { cluster_ips, ..heir });
    let mut stage = begun(shared(dns(Protocol::Udp)));
    let of_heir = EndpointSlice {
        service: heir.key.clone(),
        ports: [slice_port("dns", Protocol::Udp, 53)].into(),
        ..slice("x", V4, &[ready(V4, 1, 2), ready(V4, 1, 3)])
    };
    let of_owner = endpoints(Protocol::Udp, &[ready(V4, 1, 1), ready(V4, 1, 2)]);
    stage.apply([of_owner, Update::Service(heir), Update::Slice(of_heir)]);
    let changes = stage.apply([Update::ServiceGone(web().key)]);
    assert_eq!(told(&changes, at(vip(V4, 1), 53, Protocol::Udp)).as_deref(), Some("1.2 1.3 / 1.1"));
}

#[test]
fn a_duplicate_that_still_serves_keeps_the_flows() {
    let mut stage = begun(dns(Protocol::Udp));
    let second = |list: &[Endpoint]| {
        let ports = [slice_port("dns", Protocol::Udp, 53)].into();
        Update::Slice(EndpointSlice { ports, ..slice("b", V4, list) })
    };
    stage.apply([endpoints(Protocol::Udp, &[ready(V4, 1, 1)])]);
    let changes =
        stage.apply([second(&[draining(V4, 1, 1)]), endpoints(Protocol::Udp, &[unready(V4, 1, 1)])]);
    assert_eq!(told(&changes, frontend(Protocol::Udp)), None);
    assert_eq!(stage.plan.local_backends().collect::<Vec<_>>(), [] as [IpAddr; 0]);
    let changes = stage.apply([second(&[])]);
    assert_eq!(told(&changes, frontend(Protocol::Udp)).as_deref(), Some(" / 1.1"));
}

#[test]
fn an_endpoint_that_only_moves_between_nodes_keeps_its_flows() {
    let mut stage = begun(dns(Protocol::Udp));
    let moved = Endpoint { address: pod(V4, 1, 1), ..ready(V4, 0, 1) };
    stage.apply([endpoints(Protocol::Udp, &[ready(V4, 1, 1)])]);
    let changes = stage.apply([endpoints(Protocol::Udp, &[moved])]);
    assert_eq!(changes.frontends, [frontend(Protocol::Udp)]);
    assert_eq!(changes.flows, []);
}
