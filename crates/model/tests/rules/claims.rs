// SPDX-License-Identifier: Apache-2.0

//! Several services want one frontend.

use model::{
    Conflict, EndpointSlice, Family, Frontend, Protocol, Role, Service, ServiceKind, ServicePort, Update,
};

use crate::{
    build::{at, cluster_ip, node_port, port, ready, service, settings, slice, vip},
    stage::Stage,
};

const V4: Family = Family::V4;

/// A service with an external IP, vip 1.
fn external(name: &str, number: u8, created_secs: i64) -> Service {
    Service { external_ips: [vip(V4, 1)].into(), created_secs, ..service(name, number) }
}

fn load_balancer(name: &str, number: u8, created_secs: i64) -> Service {
    Service {
        kind: ServiceKind::LoadBalancer,
        load_balancer_ips: [vip(V4, 1)].into(),
        created_secs,
        ..service(name, number)
    }
}

fn contested() -> Frontend {
    at(vip(V4, 1), 80, Protocol::Tcp)
}

fn owner(stage: &Stage, frontend: &Frontend) -> String {
    stage.plan.decision(frontend).map_or(String::new(), |decision| decision.service.to_string())
}

fn told(conflict: &Conflict) -> String {
    format!("{} over {}", conflict.owner, conflict.loser)
}

#[test]
fn the_better_claim_wins_in_any_order() {
    let cases = [
        (external("shop/a", 1, 20), external("shop/b", 2, 10), "shop/b:http", "the older one"),
        (external("shop/a", 1, 0), external("shop/b", 2, 10), "shop/b:http", "a known age before an unknown"),
        (external("shop/b", 1, 10), external("shop/a", 2, 10), "shop/a:http", "then the name"),
        (external("shop/a", 1, 10), load_balancer("shop/b", 2, 20), "shop/b:http", "a load balancer's IP"),
        (load_balancer("shop/a", 1, 10), external("shop/b", 2, 5), "shop/a:http", "a load balancer's IP"),
    ];
    for (first, second, expected, why) in cases {
        for order in [[&first, &second], [&second, &first]] {
            let mut stage = Stage::new(settings());
            stage.apply(order.map(|service| Update::Service(service.clone())));
            assert_eq!(owner(&stage, &contested()), expected, "{why}, at once");
            let mut stage = Stage::new(settings());
            for service in order {
                stage.apply([Update::Service(service.clone())]);
            }
            assert_eq!(owner(&stage, &contested()), expected, "{why}, one by one");
        }
    }
}

#[test]
fn no_external_ip_takes_a_cluster_ip_away() {
    let victim = Service { created_secs: 100, ..service("shop/victim", 1) };
    let thief = Service { external_ips: [cluster_ip(V4, 1)].into(), ..service("evil/thief", 2) };
    let thief = Service { load_balancer_ips: [cluster_ip(V4, 1)].into(), created_secs: 1, ..thief };
    let mut stage = Stage::new(settings());
    stage.apply([Update::Service(thief), Update::Service(victim)]);
    let frontend = at(cluster_ip(V4, 1), 80, Protocol::Tcp);
    assert_eq!(owner(&stage, &frontend), "shop/victim:http");
    assert_eq!(stage.plan.decision(&frontend).map(|decision| decision.role), Some(Role::ClusterIp));
}

#[test]
fn the_loser_is_told_once_and_keeps_the_rest() {
    let mut stage = Stage::new(settings());
    assert_eq!(stage.apply([Update::Service(external("shop/a", 1, 1))]).conflicts, []);
    let changes = stage.apply([Update::Service(external("shop/b", 2, 2))]);
    assert_eq!(changes.conflicts.iter().map(told).collect::<Vec<_>>(), ["shop/a:http over shop/b:http"]);
    assert!(!changes.frontends.contains(&contested()), "nothing changed for packets");
    assert_eq!(owner(&stage, &at(cluster_ip(V4, 2), 80, Protocol::Tcp)), "shop/b:http");

    let slice = EndpointSlice { service: external("shop/b", 2, 2).key, ..slice("b", V4, &[ready(V4, 1, 1)]) };
    let changes = stage.apply([Update::Slice(slice)]);
    assert_eq!(changes.conflicts, [], "not told again");
    assert_eq!(changes.frontends, [at(cluster_ip(V4, 2), 80, Protocol::Tcp)]);
    assert_eq!(
        stage.plan.conflicts().map(|c| told(&c)).collect::<Vec<_>>(),
        ["shop/a:http over shop/b:http"]
    );
}

#[test]
fn the_next_in_line_takes_over_when_the_owner_goes() {
    let mut stage = Stage::new(settings());
    let services = [external("shop/a", 1, 1), external("shop/b", 2, 2), external("shop/c", 3, 3)];
    stage.apply(services.clone().map(Update::Service));
    assert_eq!(stage.plan.conflicts().count(), 2);

    let changes = stage.apply([Update::ServiceGone(services[0].key.clone())]);
    assert!(changes.frontends.contains(&contested()));
    assert_eq!(owner(&stage, &contested()), "shop/b:http");
    assert_eq!(changes.conflicts.iter().map(told).collect::<Vec<_>>(), ["shop/b:http over shop/c:http"]);

    stage.apply([Update::ServiceGone(services[2].key.clone())]);
    assert_eq!(stage.plan.conflicts().count(), 0);
    assert_eq!(owner(&stage, &contested()), "shop/b:http");
    let changes = stage.apply([Update::ServiceGone(services[1].key.clone())]);
    assert!(changes.frontends.contains(&contested()));
    assert_eq!(owner(&stage, &contested()), "");
}

#[test]
fn an_owner_that_moves_on_leaves_the_frontend_to_the_other() {
    let mut stage = Stage::new(settings());
    stage.apply([Update::Service(external("shop/a", 1, 1)), Update::Service(external("shop/b", 2, 2))]);
    stage.apply([Update::Service(Service { created_secs: 1, ..service("shop/a", 1) })]);
    assert_eq!(owner(&stage, &contested()), "shop/b:http");
    stage.apply([Update::Service(external("shop/a", 1, 1))]);
    assert_eq!(owner(&stage, &contested()), "shop/a:http");
}

#[test]
fn two_ports_of_one_service_with_one_node_port() {
    let twice = [("b", 81), ("a", 80)]
        .map(|(name, number)| ServicePort { node_port: Some(30080), ..port(name, Protocol::Tcp, number) });
    let mut stage = Stage::new(settings());
    let changes = stage.apply([Update::Service(Service { ports: twice.into(), ..service("shop/web", 1) })]);
    assert_eq!(owner(&stage, &node_port(V4, 30080, Protocol::Tcp)), "shop/web:a");
    assert_eq!(changes.conflicts.len(), 2, "one for each family");
    assert_eq!(told(&changes.conflicts[0]), "shop/web:a over shop/web:b");

    stage.apply([Update::ServiceGone(service("shop/web", 1).key)]);
    assert_eq!(stage.plan.frontends().count(), 0);
    assert_eq!(stage.plan.conflicts().count(), 0);
}

#[test]
fn a_shared_cluster_ip_stays_until_both_are_gone() {
    let mut stage = Stage::new(settings());
    stage.apply([Update::Service(service("shop/a", 1)), Update::Service(service("shop/b", 1))]);
    let changes = stage.apply([Update::ServiceGone(service("shop/a", 1).key)]);
    assert_eq!(changes.cluster_ips, [] as [std::net::IpAddr; 0]);
    assert!(stage.plan.has_cluster_ip(&cluster_ip(V4, 1)));
    let changes = stage.apply([Update::ServiceGone(service("shop/b", 1).key)]);
    assert_eq!(changes.cluster_ips, Family::BOTH.map(|family| cluster_ip(family, 1)));
}
