// SPDX-License-Identifier: Apache-2.0

//! Weights and other wishes of a service, from its annotations into the plan.

use std::sync::Arc;

use model::{
    Algorithm, EndpointSlice, Outcome, Protocol, Scheduler, SchedulerFlags, Service, TrafficPolicy, Tuning,
    Update, WeightRule, Weights, Whose,
};

use crate::{
    build::{at, balanced, cluster_ip, draining, key, net, ready, settings, slice, web},
    stage::{Stage, pod_name},
};
use model::Family::V4;

fn weights<const N: usize>(rules: [(Whose, u16); N]) -> Weights {
    Weights(rules.map(|(whose, weight)| WeightRule { whose, weight }).into())
}

/// The pool of the cluster IP, `node.number=weight`.
fn pool(stage: &Stage) -> Vec<String> {
    let decision = stage.plan.decision(&at(cluster_ip(V4, 10), 80, Protocol::Tcp)).expect("served");
    match &decision.inside {
        model::Verdict::Forward(forward) => {
            let name = |backend: &model::Backend| format!("{}={}", pod_name(backend.address), backend.weight);
            forward.pool.backends.iter().map(name).collect()
        }
        other => vec![other.to_string()],
    }
}

fn with(weights: Weights, slices: impl IntoIterator<Item = EndpointSlice>) -> Stage {
    Stage::with(settings(), Service { weights, ..web() }, slices)
}

fn three() -> EndpointSlice {
    slice("a", V4, &[ready(V4, 0, 1), ready(V4, 1, 2), ready(V4, 1, 3)])
}

#[test]
fn the_first_rule_that_fits_counts() {
    let named = [
        (Whose::Net(net("10.1.1.3/32")), 7),
        (Whose::Node("there".into()), 3),
        (Whose::Net(net("10.1.1.2/32")), 9),
        (Whose::Everyone, 2),
    ];
    assert_eq!(pool(&with(weights(named), [three()])), ["0.1=2", "1.2=3", "1.3=7"]);
    let zoned = [(Whose::Zone("b".into()), 4)];
    assert_eq!(pool(&with(weights(zoned), [three()])), ["0.1=1", "1.2=4", "1.3=4"]);
}

#[test]
fn a_slice_gives_what_the_service_does_not() {
    let heavy = EndpointSlice { weight: 5, ..slice("a", V4, &[ready(V4, 0, 1), ready(V4, 1, 2)]) };
    let light = slice("b", V4, &[ready(V4, 1, 3)]);
    let both = [heavy, light];
    assert_eq!(pool(&with(Weights::default(), both.clone())), ["0.1=5", "1.2=5", "1.3=1"]);
    let here = weights([(Whose::Node("here".into()), 2)]);
    assert_eq!(pool(&with(here, both)), ["0.1=2", "1.2=5", "1.3=1"]);
}

#[test]
fn weight_0_gets_nothing_new() {
    let none_there = || weights([(Whose::Node("there".into()), 0)]);
    assert_eq!(pool(&with(none_there(), [three()])), ["0.1=1"]);
    assert_eq!(pool(&with(weights([(Whose::Everyone, 0)]), [three()])), ["reject"]);
    let last_resort = slice("a", V4, &[draining(V4, 0, 1), ready(V4, 1, 2)]);
    assert_eq!(pool(&with(none_there(), [last_resort])), ["0.1=1"], "as if it were not ready");
}

#[test]
fn a_load_balancer_does_not_look_here_for_an_endpoint_of_weight_0() {
    let local = Service { health_check_node_port: Some(32000), ..balanced(TrafficPolicy::Local) };
    let mut stage = Stage::with(settings(), local.clone(), [three()]);
    assert_eq!(stage.plan.health()[&key("shop/web")].local_endpoints.v4, 1);
    let weights = weights([(Whose::Node("here".into()), 0)]);
    stage.apply([Update::Service(Service { weights, ..local })]);
    assert_eq!(stage.plan.health()[&key("shop/web")].local_endpoints.v4, 0);
}

#[test]
fn flows_to_an_endpoint_of_weight_0_go_on() {
    let udp = |service: Service| Service {
        ports: [crate::build::port("http", Protocol::Udp, 80)].into(),
        ..service
    };
    let ports = [crate::build::slice_port("http", Protocol::Udp, 8080)];
    let mut stage = Stage::with(settings(), udp(web()), [EndpointSlice { ports: ports.into(), ..three() }]);
    let weights = weights([(Whose::Node("there".into()), 0)]);
    let changes = stage.apply([Update::Service(Service { weights, ..udp(web()) })]);
    assert!(!changes.frontends.is_empty() && changes.flows.is_empty(), "{changes:?}");
}

#[test]
fn wishes_reach_the_decision_and_are_a_change() {
    let mut stage = Stage::with(settings(), web(), [three()]);
    let algorithm = Algorithm { scheduler: Some(Scheduler::SourceHash), flags: SchedulerFlags::PORT };
    let tuned = Service { tuning: Some(Arc::new(Tuning { algorithm, ..Tuning::default() })), ..web() };
    let changes = stage.apply([Update::Service(tuned.clone())]);
    assert_eq!(changes.frontends.len(), 2, "one of each family");
    let text = stage.plan.to_string();
    assert!(text.contains("shop/web:http  algorithm sh sh-port\n"), "{text}");
    assert!(stage.apply([Update::Service(tuned)]).is_empty(), "the same again is none");
    let packet = model::Packet {
        origin: model::Origin::Node,
        source: crate::build::node_ip(V4),
        destination: cluster_ip(V4, 10),
        destination_is_local: false,
        protocol: Protocol::Tcp,
        port: 80,
    };
    match stage.plan.decide(&packet) {
        Outcome::Forward { algorithm: told, .. } => assert_eq!(told, algorithm),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_plan_prints_weights_that_are_not_1() {
    let text = with(weights([(Whose::Node("there".into()), 3)]), [three()]).plan.to_string();
    assert!(text.contains(" 10.1.0.1:8080* 10.1.1.2:8080=3 10.1.1.3:8080=3\n"), "{text}");
}
