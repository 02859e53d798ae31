// SPDX-License-Identifier: Apache-2.0

//! What holds for all services at once, and what a change of the node makes the plan look at again.

use model::{
    DetectLocal, Family, Node, NodePortAddress, PerFamily, PodTraffic, Protocol, Service, Settings,
    TrafficPolicy, Update,
};

use crate::{
    build::{at, balanced, cluster_ip, hinted, net, node, ready, service, settings, slice, web},
    stage::{Source, Stage, Told},
};

const V4: Family = Family::V4;

fn cidr(name: &str, cidrs: &[&str]) -> Update {
    Update::ServiceCidr { name: name.into(), cidrs: cidrs.iter().map(|text| net(text)).collect() }
}

#[test]
fn service_cidrs_are_merged_over_all_objects() {
    let mut stage = Stage::new(settings());
    stage.apply([
        cidr("a", &["10.96.0.0/16", "fd00:96::/64"]),
        cidr("b", &["10.96.1.0/24", "10.90.0.0/16"]),
        cidr("c", &["10.96.0.0/16"]),
    ]);
    assert_eq!(stage.plan.service_cidrs(V4), [net("10.90.0.0/16"), net("10.96.0.0/16")]);
    assert_eq!(stage.plan.service_cidrs(Family::V6), [net("fd00:96::/64")]);

    let changes = stage.apply([Update::ServiceCidrGone("c".into())]);
    assert!(changes.is_empty(), "another object still states it");
    let changes = stage.apply([Update::ServiceCidrGone("a".into())]);
    assert!(changes.node_wide);
    assert_eq!(stage.plan.service_cidrs(V4), [net("10.90.0.0/16"), net("10.96.1.0/24")]);
    assert_eq!(stage.plan.service_cidrs(Family::V6), []);
}

#[test]
fn a_service_cidr_of_everything_is_not_believed() {
    let mut stage = Stage::new(settings());
    stage.apply([cidr("a", &["0.0.0.0/0", "10.96.0.0/16"])]);
    assert_eq!(stage.plan.service_cidrs(V4), [net("10.96.0.0/16")]);
}

#[test]
fn pods_are_told_as_the_operator_chose() {
    let told =
        |detect_local| Stage::new(Settings { detect_local, ..settings() }).plan.pod_traffic(V4).cloned();
    assert_eq!(told(DetectLocal::NodeCidr), Some(PodTraffic::Source(net("10.1.0.0/24"))));
    let cidrs = PerFamily { v4: Some(net("10.0.0.1/8")), v6: None };
    assert_eq!(told(DetectLocal::ClusterCidr(cidrs)), Some(PodTraffic::Source(net("10.0.0.0/8"))));
    assert_eq!(told(DetectLocal::ClusterCidr(PerFamily::default())), None);
    assert_eq!(told(DetectLocal::Bridge("cni0".into())), Some(PodTraffic::Interface("cni0".into())));
    assert_eq!(
        told(DetectLocal::InterfacePrefix("veth".into())),
        Some(PodTraffic::InterfacePrefix("veth".into()))
    );
}

#[test]
fn another_pod_range_changes_no_frontend() {
    let slices = [slice("a", V4, &[ready(V4, 1, 1)])];
    let mut stage = Stage::with(settings(), web(), slices);
    let moved = PerFamily { v4: Some(net("10.2.0.0/24")), ..node().pod_cidrs };
    let changes = stage.apply([Update::Node(Node { pod_cidrs: moved, ..node() })]);
    assert!(changes.node_wide);
    assert_eq!(changes.frontends, []);
    assert_eq!(stage.plan.pod_traffic(V4), Some(&PodTraffic::Source(net("10.2.0.0/24"))));
}

#[test]
fn a_lost_pod_range_changes_who_is_masqueraded() {
    let slices = [slice("a", V4, &[ready(V4, 1, 1)])];
    let mut stage = Stage::with(settings(), web(), slices);
    let lost = PerFamily { v4: None, ..node().pod_cidrs };
    let changes = stage.apply([Update::Node(Node { pod_cidrs: lost, ..node() })]);
    assert_eq!(changes.frontends, [at(cluster_ip(V4, 10), 80, Protocol::Tcp)]);
    assert_eq!(stage.decide(Source::Client, cluster_ip(V4, 10), 80), crate::stage::to("1.1"));
}

#[test]
fn a_change_of_the_node_dirties_what_depends_on_it() {
    let hints = [hinted(&["a"], &[], ready(V4, 1, 1))];
    let mut stage = Stage::with(settings(), web(), [slice("a", V4, &hints)]);
    stage.apply([Update::Service(service("shop/other", 11))]);

    stage.world.apply(Update::Node(Node { zone: Some("b".into()), ..node() }));
    let dirty = stage.world.take_dirty();
    assert_eq!(dirty.services.into_iter().collect::<Vec<_>>(), [web().key]);
    assert!(!dirty.node_wide);

    stage.world.apply(Update::Node(Node { eligible: false, zone: Some("b".into()), ..node() }));
    assert!(stage.world.take_dirty().is_empty(), "eligibility is for health checks of the proxy alone");
}

#[test]
fn a_deleted_node_keeps_its_ranges_and_loses_its_eligibility() {
    let slices = [slice("a", V4, &[ready(V4, 0, 1)])];
    let mut stage = Stage::with(settings(), balanced(TrafficPolicy::Local), slices);
    assert!(stage.apply([Update::NodeGone]).is_empty());
    assert_eq!(
        stage.world.node().map(|node| (node.eligible, node.pod_cidrs)),
        Some((false, node().pod_cidrs))
    );
    let same = stage.apply([Update::Node(node())]);
    assert!(same.is_empty());
    assert_eq!(stage.world.node().map(|node| node.eligible), Some(true));
}

#[test]
fn a_node_that_comes_back_bare_is_what_it_was() {
    let primary = Box::new([NodePortAddress::Primary]);
    let slices = [slice("a", V4, &[ready(V4, 0, 1)])];
    let settings = Settings { node_port_addresses: primary, ..settings() };
    let mut stage = Stage::with(settings, balanced(TrafficPolicy::Local), slices);
    let bare = || Node { addresses: PerFamily::default(), pod_cidrs: PerFamily::default(), ..node() };
    assert!(stage.apply([Update::Node(bare())]).is_empty());
    assert!(stage.apply([Update::NodeGone, Update::Node(bare())]).is_empty());
    assert_eq!(stage.world.node(), Some(&node()));

    // Of a field that says something, all is believed.
    let v6_only = PerFamily { v4: None, ..node().addresses };
    assert!(stage.apply([Update::Node(Node { addresses: v6_only, ..bare() })]).node_wide);
    let known = stage.world.node().expect("it was told");
    assert_eq!((known.addresses, known.pod_cidrs), (v6_only, node().pod_cidrs));
}

#[test]
fn nothing_is_served_before_anything_is_known() {
    let plan = model::Plan::new();
    assert_eq!(plan.frontends().count(), 0);
    assert_eq!(*plan.node_ports(V4), model::NodePortScope::Only(Default::default()));
}

#[test]
fn an_echo_request_meets_the_same_rules() {
    let mut stage = Stage::with(settings(), Service { ports: Box::default(), ..web() }, []);
    stage.apply([cidr("a", &["10.96.0.0/16"])]);
    assert_eq!(stage.plan.decide_unknown(cluster_ip(V4, 10)), model::Outcome::Reject);
    assert_eq!(stage.plan.decide_unknown(cluster_ip(V4, 11)), model::Outcome::Drop);
    assert_eq!(stage.decide(Source::Pod, cluster_ip(V4, 11), 80), Told::Drop);
}
