// SPDX-License-Identifier: Apache-2.0

//! The simulator against the oracle: what the rules do must be what the Plan says.

use std::net::IpAddr;

use model::{Address, Family, Masquerade, Origin, Outcome, Packet, Plan, Protocol};
use proptest::prelude::*;

use super::make::{
    at, drafts, forward, ip, is_local, loopback_ip, node_ip, other_node_ip, pool, same, sampler, sticky,
};
use crate::{
    Loopback,
    nftables::{
        entry::Entry,
        render,
        sim::{self, Fate},
        slots::Class,
    },
};

/// Packets that have something to do with a plan, and some that have not.
pub(crate) fn packets(plan: &Plan, family: Family) -> Vec<Packet> {
    let mut places: Vec<(IpAddr, Protocol, u16)> = Vec::new();
    for (frontend, _) in plan.frontends().filter(|(frontend, _)| frontend.family() == family) {
        match frontend.address {
            Address::Ip(ip) => places.push((ip, frontend.protocol, frontend.port)),
            Address::NodePort(_) => {
                for address in [node_ip(family), other_node_ip(family), loopback_ip(family)] {
                    places.push((address, frontend.protocol, frontend.port));
                }
                // Somebody else's node.
                places.push((ip(family, "192.168.7.99"), frontend.protocol, frontend.port));
            }
        }
    }
    places.extend(plan.cluster_ips().filter(|ip| Family::of(*ip) == family).map(|ip| (ip, Protocol::Tcp, 9)));
    places.push((ip(family, "10.96.0.200"), Protocol::Tcp, 80));
    places.push((ip(family, "10.244.0.3"), Protocol::Udp, 8080));
    places.push((node_ip(family), Protocol::Tcp, 22));
    let interface = |name: &str| Origin::Interface(name.into());
    let sources = [
        (Origin::Node, node_ip(family)),
        (interface("cni0"), ip(family, "10.244.0.3")),
        (interface("veth12"), ip(family, "10.244.1.101")),
        (interface("eth0"), ip(family, "198.51.100.9")),
        (interface("eth0"), ip(family, "198.51.101.7")),
    ];
    let packet = |(origin, source): &(Origin, IpAddr), (destination, protocol, port)| Packet {
        origin: origin.clone(),
        source: *source,
        destination,
        destination_is_local: is_local(destination),
        protocol,
        port,
    };
    sources.iter().flat_map(|source| places.iter().map(move |place| packet(source, *place))).collect()
}

/// Panics with everything one needs to know if the program does not do what the plan says.
pub(super) fn assert_agreement(plan: &Plan, program: &crate::nftables::program::Program) {
    for packet in packets(plan, program.family) {
        let expected = plan.decide(&packet);
        let endings = sim::simulate(program, &packet, &is_local);
        let total: f64 = endings.iter().map(|ending| ending.probability).sum();
        assert!((total - 1.0).abs() < 1e-9, "all ways together are {total}");
        if let Some(difference) = sim::disagreement(&expected, &packet, &endings, 0.005) {
            panic!("{packet:?}\nmust be {expected:?}\nbut {difference}\n{program}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn rules_do_what_the_plan_says(draft in drafts()) {
        let plan = draft.plan();
        for family in Family::BOTH {
            assert_agreement(&plan, &render::program(&plan, family, 0x4000, Loopback::Closed));
        }
    }
}

#[test]
fn every_count_is_balanced_within_half_a_percent() {
    let family = Family::V4;
    for count in (1..=40).chain([63, 64, 65, 100, 127, 128, 129, 200]) {
        let hosts = (0..count as u8).map(|host| host + 50);
        let frontend = at(ip(family, "10.96.0.1"), Protocol::Tcp, 80);
        let decision = same(forward(pool(family, hosts), Masquerade::Never));
        let plan = model::PlanBuilder::new().frontend(frontend, decision).build();
        assert_agreement(&plan, &render::program(&plan, family, 0x4000, Loopback::Closed));
    }
}

#[test]
fn a_class_that_is_kept_balances_as_well() {
    let family = Family::V4;
    let frontend = at(ip(family, "10.96.0.1"), Protocol::Tcp, 80);
    let plan = |count: u8| {
        let decision = same(forward(pool(family, (0..count).map(|host| host + 50)), Masquerade::Never));
        model::PlanBuilder::new().frontend(frontend, decision).build()
    };
    for full in [2, 3, 5, 9, 17, 33] {
        let half = Class::of(usize::from(full), None).last_draw() as u8;
        let (was, is) = (plan(full), plan(half));
        let entry = |plan: &Plan, previous: Option<&Entry>| {
            render::entry(&frontend, plan.decision(&frontend).unwrap(), previous)
        };
        let large = entry(&was, None);
        let kept = entry(&is, Some(&large));
        assert_eq!(kept.everyone.as_ref().unwrap().draw, large.everyone.as_ref().unwrap().draw);
        let mut program = render::program(&was, family, 0x4000, Loopback::Closed);
        program.elements.clear();
        for placed in kept.elements(&frontend) {
            let set = program.elements.entry(placed.container.name().into_owned()).or_default();
            set.insert(placed.key, placed.element());
        }
        let packet = packets(&is, family).remove(0);
        let endings = sim::simulate(&program, &packet, &is_local);
        let expected = is.decide(&packet);
        assert_eq!(sim::disagreement(&expected, &packet, &endings, 1e-9), None, "exactly uniform");
    }
}

#[test]
fn few_draws_are_enough() {
    let tries: Vec<u32> = (0..=14).map(|exponent| Class::of_size(1 << exponent).unwrap().tries()).collect();
    assert_eq!(tries, [1, 1, 4, 6, 7, 7, 8, 8, 8, 8, 8, 8, 8, 8, 8]);
}

#[test]
fn node_ports_on_loopback_addresses() {
    let mut draft = sampler();
    draft.node_wide.v4.scope =
        model::NodePortScope::Only([node_ip(Family::V4), loopback_ip(Family::V4)].into());
    let plan = draft.plan();
    let program = render::program(&plan, Family::V4, 0x4000, Loopback::Served);
    let mut packet = Packet {
        origin: Origin::Node,
        source: loopback_ip(Family::V4),
        destination: loopback_ip(Family::V4),
        destination_is_local: true,
        protocol: Protocol::Tcp,
        port: 30_080,
    };
    let expected = plan.decide(&packet);
    assert!(matches!(expected, Outcome::Forward { .. }));
    let endings = sim::simulate(&program, &packet, &is_local);
    assert_eq!(sim::disagreement(&expected, &packet, &endings, 0.005), None);

    packet.origin = Origin::Interface("eth0".into());
    packet.source = ip(Family::V4, "198.51.100.9");
    let endings = sim::simulate(&program, &packet, &is_local);
    assert!(endings.iter().all(|ending| ending.fate == Fate::Dropped), "loopback is not for the network");
}

#[test]
fn a_client_is_remembered_and_forgotten() {
    let family = Family::V6;
    let frontend = at(ip(family, "10.96.0.1"), Protocol::Tcp, 80);
    let decision = sticky(60, same(forward(pool(family, [1, 101, 102]), Masquerade::Always)));
    let plan = model::PlanBuilder::new().frontend(frontend, decision).build();
    let mut program = render::program(&plan, family, 0x4000, Loopback::Closed);
    let packet = |source| Packet {
        origin: Origin::Interface("eth0".into()),
        source: ip(family, source),
        destination: ip(family, "10.96.0.1"),
        destination_is_local: false,
        protocol: Protocol::Tcp,
        port: 80,
    };
    let fresh = sim::simulate(&program, &packet("198.51.100.9"), &is_local);
    assert!(fresh.len() >= 3);
    let chosen = &fresh[0];
    assert_eq!(chosen.learned.len(), 1);
    assert_eq!(chosen.learned[0].timeout_secs, 60);
    program.learn(&chosen.learned[0]);
    let again = sim::simulate(&program, &packet("198.51.100.9"), &is_local);
    assert_eq!(again.len(), 1, "{again:?}");
    assert_eq!(again[0].fate, chosen.fate);
    assert_eq!(again[0].learned, chosen.learned, "a hit renews");
    let other = sim::simulate(&program, &packet("198.51.100.10"), &is_local);
    assert!(other.len() >= 3, "others are balanced");
}
