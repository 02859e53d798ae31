// SPDX-License-Identifier: Apache-2.0

//! loadBalancerSourceRanges: who may come in at a load balancer's address.

use ipnet::IpNet;
use model::{
    Family, Node, PerFamily, Protocol, Service, Settings, SourceRanges, TrafficPolicy, Update, WrittenRanges,
};

use crate::{
    build::{at, balanced, client, cluster_ip, ip, net, node, node_ip, ready, settings, slice, vip},
    stage::{Source, Stage, Told, masked},
};

const V4: Family = Family::V4;

fn ranged(ranges: &[&str]) -> Service {
    let ranges = SourceRanges::only(ranges.iter().map(|range| net(range)).collect::<Vec<_>>());
    Service { source_ranges: ranges, ..balanced(TrafficPolicy::Cluster) }
}

fn stage(service: Service) -> Stage {
    let slices = Family::BOTH.map(|family| slice(&format!("a{family}"), family, &[ready(family, 1, 1)]));
    Stage::with(settings(), service, slices)
}

fn ranges(stage: &Stage, family: Family) -> Option<Vec<IpNet>> {
    let decision = stage.plan.decision(&at(vip(family, 1), 80, Protocol::Tcp)).expect("a load balancer's");
    decision.source_ranges.as_ref().map(|nets| nets.to_vec())
}

#[test]
fn only_sources_in_a_range_come_in_whoever_they_are() {
    let stage = stage(ranged(&["198.51.100.0/24", "10.9.0.0/16"]));
    let to_vip = |source| stage.decide(source, vip(V4, 1), 80);
    assert_eq!(to_vip(Source::Client), masked("1.1"));
    assert_eq!(to_vip(Source::At(ip("10.9.1.1"))), masked("1.1"));
    assert_eq!(to_vip(Source::At(ip("10.10.1.1"))), Told::Drop);
    assert_eq!(to_vip(Source::Pod), Told::Drop);
    assert_eq!(to_vip(Source::Node), Told::Drop);
}

#[test]
fn ranges_do_not_concern_other_frontends() {
    let stage = stage(ranged(&["10.9.0.0/16"]));
    for (address, port) in [(cluster_ip(V4, 10), 80), (vip(V4, 2), 80), (node_ip(V4), 30080)] {
        assert_eq!(stage.decide(Source::Client, address, port), masked("1.1"));
    }
}

#[test]
fn without_endpoints_strangers_are_still_dropped() {
    let stage = Stage::with(settings(), ranged(&["10.9.0.0/16"]), []);
    assert_eq!(stage.decide(Source::Client, vip(V4, 1), 80), Told::Drop);
    assert_eq!(stage.decide(Source::At(ip("10.9.0.1")), vip(V4, 1), 80), Told::Reject);
}

#[test]
fn ranges_are_per_family_disjoint_and_sorted() {
    let stage = stage(ranged(&["10.9.1.0/24", "10.2.0.0/17", "10.9.0.0/16", "fd00:1::/32", "10.2.128.9/17"]));
    assert_eq!(ranges(&stage, V4), Some(vec![net("10.2.0.0/16"), net("10.9.0.0/16")]));
    assert_eq!(ranges(&stage, Family::V6), Some(vec![net("fd00:1::/32")]));
}

#[test]
fn a_range_of_everything_is_no_restriction() {
    assert_eq!(ranges(&stage(ranged(&["10.0.0.0/8", "0.0.0.0/0"])), V4), None);
    assert_eq!(ranges(&stage(ranged(&["0.0.0.0/1", "128.0.0.0/1"])), V4), None);
    let only_v6_is_open = stage(ranged(&["10.0.0.0/8", "::/0"]));
    assert_eq!(ranges(&only_v6_is_open, V4), Some(vec![net("10.0.0.0/8")]));
    assert_eq!(ranges(&only_v6_is_open, Family::V6), None);
}

#[test]
fn ranges_of_the_other_family_do_not_restrict_this_one() {
    assert_eq!(ranges(&stage(ranged(&["10.0.0.0/8"])), Family::V6), None);
}

#[test]
fn ranges_of_which_none_could_be_read_let_nobody_in() {
    let stage = stage(ranged(&[]));
    for family in Family::BOTH {
        assert_eq!(ranges(&stage, family), Some(vec![]));
        assert_eq!(stage.decide(Source::Client, vip(family, 1), 80), Told::Drop);
    }
}

#[test]
fn what_could_not_be_read_closes_a_family_that_has_nothing_else() {
    let unread = |family, ranges: &[&str]| {
        let nets = ranges.iter().map(|range| net(range)).collect();
        let mut unread = PerFamily::default();
        unread[family] = true;
        stage(Service {
            source_ranges: SourceRanges::Only(Box::new(WrittenRanges { nets, unread })),
            ..ranged(&[])
        })
    };
    let closed = unread(Family::V6, &["10.0.0.0/8"]);
    assert_eq!(ranges(&closed, V4), Some(vec![net("10.0.0.0/8")]));
    assert_eq!(ranges(&closed, Family::V6), Some(vec![]));
    let has_another = unread(V4, &["10.0.0.0/8"]);
    assert_eq!(ranges(&has_another, V4), Some(vec![net("10.0.0.0/8")]));
    assert_eq!(ranges(&has_another, Family::V6), None, "nobody has said anything of it");
}

#[test]
fn a_node_in_the_ranges_may_connect_from_the_address_itself() {
    let mut stage = stage(ranged(&["192.0.2.0/24", "198.51.100.0/24"]));
    let own = net("203.0.113.1/32");
    let written = || vec![net("192.0.2.0/24"), net("198.51.100.0/24")];
    assert_eq!(ranges(&stage, V4), Some([written(), vec![own]].concat()));
    assert_eq!(stage.decide(Source::At(vip(V4, 1)), vip(V4, 1), 80), masked("1.1"));

    let elsewhere = PerFamily { v4: Some(ip("192.0.3.1")), v6: None };
    let changes = stage.apply([Update::Node(Node { addresses: elsewhere, ..node() })]);
    assert_eq!(ranges(&stage, V4), Some(written()));
    assert_eq!(changes.frontends, [at(vip(V4, 1), 80, Protocol::Tcp)]);
}

#[test]
fn a_bind_address_stands_for_the_address_of_the_node() {
    let settings = Settings { node_ip_override: PerFamily { v4: Some(client(V4)), v6: None }, ..settings() };
    let stage = Stage::with(settings, ranged(&["198.51.100.0/24"]), []);
    assert_eq!(ranges(&stage, V4), Some(vec![net("198.51.100.0/24"), net("203.0.113.1/32")]));
}
