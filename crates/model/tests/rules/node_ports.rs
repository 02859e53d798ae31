// SPDX-License-Identifier: Apache-2.0

//! On which addresses of the node its node ports are served.

use std::collections::BTreeSet;

use NodePortAddress::{All, Cidr, Localhost, Nothing, Primary};
use model::{Family, Node, NodePortAddress, NodePortScope, PerFamily, Settings, TrafficPolicy, Update};

use crate::{
    build::{balanced, ip, loopback, net, node, node_ip, ready, settings, slice},
    stage::{Source, Stage, Told, masked},
};

const V4: Family = Family::V4;
const V6: Family = Family::V6;

const HOST: [&str; 7] =
    ["10.7.0.1", "127.0.0.1", "127.0.0.53", "192.0.2.5", "192.0.2.6", "::1", "fd00:c0:0:2::5"];

fn stage(entries: &[NodePortAddress]) -> Stage {
    let settings = Settings { node_port_addresses: entries.into(), ..settings() };
    let slices = Family::BOTH.map(|family| slice(&format!("a{family}"), family, &[ready(family, 1, 1)]));
    let mut stage = Stage::with(settings, balanced(TrafficPolicy::Cluster), slices);
    stage.apply([Update::HostAddresses(HOST.map(ip).into())]);
    stage
}

fn only(addresses: &[&str]) -> NodePortScope {
    NodePortScope::Only(addresses.iter().map(|address| ip(address)).collect())
}

/// Entries; scope and loopback for IPv4, for IPv6.
type Case<'a> = (&'a [NodePortAddress], (NodePortScope, bool), (NodePortScope, bool));

#[test]
fn entries_choose_the_addresses() {
    let all = || NodePortScope::All;
    let cidr = |text| Cidr(net(text));
    let cases: [Case; 15] = [
        (&[], (all(), false), (all(), false)),
        (&[All], (all(), false), (all(), false)),
        (&[All, Localhost], (all(), true), (all(), true)),
        (&[Primary], (only(&["192.0.2.5"]), false), (only(&["fd00:c0:0:2::5"]), false)),
        (&[Localhost], (only(&["127.0.0.1", "127.0.0.53"]), true), (only(&["::1"]), true)),
        (
            &[Primary, cidr("10.0.0.0/8")],
            (only(&["10.7.0.1", "192.0.2.5"]), false),
            (only(&["fd00:c0:0:2::5"]), false),
        ),
        (&[cidr("192.0.2.0/24")], (only(&["192.0.2.5", "192.0.2.6"]), false), (all(), false)),
        (&[cidr("0.0.0.0/0")], (all(), false), (all(), false)),
        (&[cidr("0.0.0.0/0"), cidr("127.0.0.0/8")], (all(), true), (all(), false)),
        (&[cidr("126.0.0.0/7")], (only(&[]), false), (all(), false)),
        (&[cidr("127.0.0.53/32")], (only(&["127.0.0.53"]), true), (all(), false)),
        (&[cidr("172.16.0.0/12"), cidr("::1/128")], (only(&[]), false), (only(&["::1"]), true)),
        (&[Nothing(V4)], (only(&[]), false), (all(), false)),
        (&[Nothing(V4), Primary], (only(&["192.0.2.5"]), false), (only(&["fd00:c0:0:2::5"]), false)),
        (&[Nothing(V6), cidr("127.0.0.0/8")], (only(&["127.0.0.1", "127.0.0.53"]), true), (only(&[]), false)),
    ];
    for (entries, v4, v6) in cases {
        let plan = stage(entries).plan;
        for (family, expected) in [(V4, v4), (V6, v6)] {
            let found = (plan.node_ports(family).clone(), plan.loopback_node_ports(family));
            assert_eq!(found, expected, "{entries:?} {family}");
        }
    }
}

#[test]
fn primary_without_an_address_of_the_family_is_no_address() {
    let mut stage = stage(&[Primary]);
    let v4_only = PerFamily { v4: Some(node_ip(V4)), v6: None };
    let changes = stage.apply([Update::Node(Node { addresses: v4_only, ..node() })]);
    assert_eq!(*stage.plan.node_ports(V6), NodePortScope::Only(BTreeSet::new()));
    assert_eq!(stage.decide(Source::Client, node_ip(V6), 30080), Told::Pass);
    assert!(changes.node_wide);
    assert_eq!(changes.frontends, []);
}

#[test]
fn a_bind_address_is_the_primary_one() {
    let override_v4 = PerFamily { v4: Some(ip("10.7.0.1")), v6: None };
    let settings =
        Settings { node_port_addresses: [Primary].into(), node_ip_override: override_v4, ..settings() };
    assert_eq!(*Stage::new(settings).plan.node_ports(V4), only(&["10.7.0.1"]));
}

#[test]
fn a_loopback_bind_address_is_no_primary_one() {
    let override_v4 = PerFamily { v4: Some(loopback(V4)), v6: None };
    let settings =
        Settings { node_port_addresses: [Primary].into(), node_ip_override: override_v4, ..settings() };
    assert_eq!(*Stage::new(settings).plan.node_ports(V4), only(&[]));
}

#[test]
fn other_addresses_of_the_node_are_left_alone() {
    let stage = stage(&[Cidr(net("192.0.2.5/32"))]);
    assert_eq!(stage.decide(Source::Client, ip("192.0.2.5"), 30080), masked("1.1"));
    assert_eq!(stage.decide(Source::Client, ip("192.0.2.6"), 30080), Told::Pass);
    assert_eq!(stage.decide(Source::Node, loopback(V4), 30080), Told::Pass);
}

#[test]
fn loopback_serves_where_it_was_named() {
    for entries in [&[Localhost][..], &[All, Localhost]] {
        let stage = stage(entries);
        assert_eq!(stage.decide(Source::Node, ip("127.0.0.1"), 30080), masked("1.1"), "{entries:?}");
    }
    assert_eq!(stage(&[All]).decide(Source::Node, ip("127.0.0.1"), 30080), Told::Pass);
}

#[test]
fn the_scope_follows_the_addresses_of_the_host() {
    let mut stage = stage(&[Cidr(net("192.0.2.0/24"))]);
    let changes = stage.apply([Update::HostAddresses([ip("192.0.2.9")].into())]);
    assert!(changes.node_wide);
    assert_eq!(*stage.plan.node_ports(V4), only(&["192.0.2.9"]));
    let changes = stage.apply([Update::HostAddresses([ip("10.0.0.1"), ip("192.0.2.9")].into())]);
    assert!(changes.is_empty(), "an address outside of the ranges changes nothing");
}
