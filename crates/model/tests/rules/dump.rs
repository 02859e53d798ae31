// SPDX-License-Identifier: Apache-2.0

//! The plan as text.

use model::{
    Family, NodePortAddress, PerFamily, Plan, PlanBuilder, Service, Settings, SourceRanges, TrafficPolicy,
    Update,
};

use crate::{
    build::{balanced, net, ready, service, settings, slice},
    stage::Stage,
};

const EXPECTED: &str = "\
node
  pod traffic    IPv4 from 10.1.0.0/24
  pod traffic    IPv6 from fd00:a:1::/64
  node ports     IPv4 on 192.0.2.5
  node ports     IPv6 on fd00:c0:0:2::5
  service cidrs  IPv4 10.96.0.0/16
  service cidrs  IPv6 unknown
frontends
  10.96.0.10:80/tcp        cluster-ip     shop/web:http  affinity 60s
    any      forward  masquerade off-pods  10.1.0.1:8080* 10.1.1.2:8080
  10.96.0.11:80/tcp        cluster-ip     shop/other:http
    any      reject
  203.0.113.1:80/tcp       load-balancer  shop/web:http  affinity 60s  for 198.51.100.0/24
    inside   forward  masquerade off-pods  10.1.0.1:8080* 10.1.1.2:8080
    outside  forward  masquerade never     10.1.0.1:8080*
  203.0.113.2:80/tcp       external-ip    shop/web:http  affinity 60s
    inside   forward  masquerade off-pods  10.1.0.1:8080* 10.1.1.2:8080
    outside  forward  masquerade never     10.1.0.1:8080*
  nodeport:30080/tcp IPv4  node-port      shop/web:http  affinity 60s
    inside   forward  masquerade off-pods  10.1.0.1:8080* 10.1.1.2:8080
    outside  forward  masquerade never     10.1.0.1:8080*
cluster ips
  10.96.0.10
  10.96.0.11
local backends
  10.1.0.1
health checks
  shop/web  port 32000  IPv4 1
conflicts
  203.0.113.2:80/tcp  shop/web:http, not shop/other:http
";

fn only_v4(service: Service) -> Service {
    Service { cluster_ips: PerFamily { v6: None, ..service.cluster_ips }, ..service }
}

fn stage() -> Stage {
    let settings = Settings { node_port_addresses: [NodePortAddress::Primary].into(), ..settings() };
    let web = only_v4(Service {
        affinity_secs: Some(60),
        health_check_node_port: Some(32000),
        source_ranges: SourceRanges::only([net("198.51.100.0/24")]),
        ..balanced(TrafficPolicy::Local)
    });
    let endpoints = [ready(Family::V4, 0, 1), ready(Family::V4, 1, 2)];
    let mut stage = Stage::with(settings, web.clone(), [slice("a", Family::V4, &endpoints)]);
    let rival =
        Service { external_ips: web.external_ips, created_secs: 2, ..only_v4(service("shop/other", 11)) };
    let cidrs = [net("10.96.0.0/16")].into();
    stage.apply([Update::Service(rival), Update::ServiceCidr { name: "kubernetes".into(), cidrs }]);
    stage
}

#[test]
fn a_plan_prints_all_it_decided() {
    assert_eq!(stage().plan.to_string(), EXPECTED);
}

#[test]
fn what_is_served_first_says_so() {
    let stage = Stage::with(settings(), service("kube-system/kube-dns", 10), []);
    let text = stage.plan.to_string();
    assert!(text.contains("  cluster-ip     kube-system/kube-dns:http  rank 1\n"), "{text}");
}

#[test]
fn a_plan_without_services_prints_the_node() {
    let text = Plan::new().to_string();
    assert!(text.starts_with("node\n  pod traffic    IPv4 cannot be told\n"), "{text}");
    assert!(!text.contains("frontends"), "{text}");
}

#[test]
fn a_plan_built_by_hand_prints_as_the_same_plan() {
    let plan = stage().plan;
    let mut builder = PlanBuilder::new();
    for (frontend, decision) in plan.frontends() {
        builder = builder.frontend(*frontend, decision.clone());
    }
    for family in Family::BOTH {
        builder = builder.node_ports(family, plan.node_ports(family).clone());
        let traffic = plan.pod_traffic(family).expect("told").clone();
        builder = builder.pod_traffic(family, traffic);
    }
    for (service, health) in plan.health() {
        builder = builder.health(service.clone(), health.clone());
    }
    let built = builder.service_cidr(net("10.96.0.0/16")).build().to_string();
    assert_eq!(built, EXPECTED.split("conflicts").next().expect("a part"));
}
