// SPDX-License-Identifier: Apache-2.0

//! Rules there and back, the whole text, and the simulator against the oracle.

use std::{collections::BTreeSet, fs, path::Path};

use model::{Family, Outcome, Plan};
use proptest::prelude::*;

use super::make::{Cluster, detectors, events, sampler};
use crate::{
    Loopback,
    iptables::{
        Scene, parse,
        program::Program,
        render,
        rule::{Match, Rule, Target},
        sim,
    },
    nftables::{
        sim::{Ending, disagreement},
        tests::{judges::packets, make::is_local},
    },
};

pub(super) fn scene(plan: &Plan, family: Family) -> Scene<'_> {
    Scene {
        plan,
        family,
        mark: 0x4000,
        loopback: Loopback::Closed,
        liberal: false,
        accounts: false,
        comments: true,
    }
}

fn rules(program: &Program) -> impl Iterator<Item = &Rule> {
    program.tables.values().flat_map(|chains| chains.values()).flatten()
}

/// Read by operators and by us: this is all there is to see on a node.
#[test]
fn the_whole_text_is_as_it_was() {
    let cluster = sampler();
    for (family, name) in [(Family::V4, "sampler.ip.save"), (Family::V6, "sampler.ip6.save")] {
        let text = render::program(&scene(&cluster.plan, family)).to_string();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/iptables/tests").join(name);
        if std::env::var_os("UPDATE").is_some() {
            fs::write(&path, &text).unwrap();
        }
        let golden = fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(text, golden, "{name} differs; UPDATE=1 writes it");
    }
}

#[test]
fn what_the_tool_prints_otherwise_is_the_same_rule() {
    for (one, other) in [
        (
            "-m statistic --mode random --probability 0.3333333333 -j KUBE-X",
            "-m statistic --mode random --probability 0.33333333349 -j KUBE-X",
        ),
        (
            "-d 10.96.0.10 -p tcp -m tcp --dport 80 -j REJECT",
            "-d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable",
        ),
        (
            "-m recent --rcheck --seconds 60 --reap --name L --rsource -j KUBE-X",
            "-m recent --rcheck --seconds 60 --reap --name L --mask 255.255.255.255 --rsource -j KUBE-X",
        ),
    ] {
        let [one, other] = [one, other].map(|text| parse::rule(text, Family::V4));
        assert!(one.is_some());
        assert_eq!(one, other);
    }
    for foreign in [
        "-m recent --rcheck --seconds 60 --name L --rsource -j KUBE-X",
        "-p tcp -m udp --dport 80 -j KUBE-X",
        "-m tcp --dport 80 -j KUBE-X",
        "-m mark --mark 0x1/0x3 -j RETURN",
        "-j MASQUERADE",
        "-j SNAT --to-source 10.0.0.1",
        "-m conntrack --ctstate ESTABLISHED -j ACCEPT",
        "-s",
    ] {
        assert_eq!(parse::rule(foreign, Family::V4), None, "{foreign}");
    }
}

#[test]
fn counters_of_their_own_change_no_verdict() {
    let cluster = sampler();
    for family in Family::BOTH {
        let plain = render::program(&Scene { loopback: Loopback::Served, ..scene(&cluster.plan, family) });
        let counted = render::program(&Scene {
            loopback: Loopback::Served,
            accounts: true,
            ..scene(&cluster.plan, family)
        });
        let names =
            |program: &Program| rules(program).filter(|rule| rule.to_string().contains("nfacct")).count();
        assert_eq!(names(&plain), 0);
        let node_ports =
            if family == Family::V4 { counted.to_string().matches("localhost_nps").count() } else { 0 };
        assert_eq!(names(&counted), 1 + node_ports, "{counted}");
        assert!(family == Family::V6 || node_ports > 0);
        for rule in rules(&counted) {
            assert_eq!(parse::rule(&rule.to_string(), family).as_ref(), Some(rule));
        }
        for packet in packets(&cluster.plan, family) {
            let fates =
                |program| format!("{:?}", sim::simulate(program, &packet, &is_local, &BTreeSet::new()));
            assert_eq!(fates(&counted), fates(&plain), "{packet:?}");
        }
    }
}

#[test]
fn names_from_outside_cannot_leave_their_comment() {
    let rule = Rule::to(Target::Return).with([Match::comment("a\" -j ACCEPT\n-F\\")]);
    assert_eq!(rule.to_string(), "-m comment --comment \"a? -j ACCEPT?-F?\" -j RETURN");
    let long = Rule::default().with([Match::comment("é".repeat(300))]).to_string();
    assert!(long.len() < 300, "{}", long.len());
}

#[test]
fn chances_are_as_the_tool_rounds_them() {
    let text = |count| Rule::default().with([Match::one_of(count)]).to_string();
    assert_eq!(text(2), "-m statistic --mode random --probability 0.50000000000");
    assert_eq!(text(3), "-m statistic --mode random --probability 0.33333333349");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_rule_reads_as_it_prints(detector in detectors(), events in prop::collection::vec(events(), 1..12)) {
        let mut cluster = Cluster::new(detector);
        cluster.update(events.iter().flat_map(super::make::Event::updates));
        for family in Family::BOTH {
            let program = render::program(&scene(&cluster.plan, family));
            for rule in rules(&program) {
                let read = parse::rule(&rule.to_string(), family);
                prop_assert_eq!(read.as_ref(), Some(rule));
            }
        }
    }

    #[test]
    fn rules_do_what_the_plan_says(detector in detectors(), events in prop::collection::vec(events(), 1..12)) {
        let mut cluster = Cluster::new(detector);
        cluster.update(events.iter().flat_map(super::make::Event::updates));
        for family in Family::BOTH {
            assert_agreement(&cluster.plan, &render::program(&scene(&cluster.plan, family)));
        }
    }
}

/// Panics with everything one needs to know if the program does not do what the plan says.
fn assert_agreement(plan: &Plan, program: &Program) {
    for packet in packets(plan, program.family) {
        let unknown = plan.decide_unknown(packet.destination);
        let expected = match plan.decide(&packet) {
            // Left alone in this mode.
            outcome if outcome == unknown && !serves(plan, &packet) => Outcome::Pass,
            outcome => outcome,
        };
        if reaches_itself_from_elsewhere(&expected, &packet) {
            continue;
        }
        let endings: Vec<Ending> = sim::simulate(program, &packet, &is_local, &BTreeSet::new())
            .into_iter()
            .map(|ending| Ending {
                probability: ending.probability,
                fate: ending.fate,
                choice: crate::nftables::sim::Choice::Random,
                learned: Vec::new(),
            })
            .collect();
        let total: f64 = endings.iter().map(|ending| ending.probability).sum();
        assert!((total - 1.0).abs() < 1e-9, "all ways together are {total}");
        if let Some(difference) = disagreement(&expected, &packet, &endings, 1e-6) {
            panic!("{packet:?}\nmust be {expected:?}\nbut {difference}\n{program}");
        }
    }
}

/// An endpoint of another node comes through this one to itself. It is masqueraded here, as by kube-proxy; the plan
/// leaves it open.
fn reaches_itself_from_elsewhere(expected: &Outcome, packet: &model::Packet) -> bool {
    let Outcome::Forward { backends, .. } = expected else { return false };
    backends.iter().any(|backend| backend.address == packet.source && !backend.local)
}

fn serves(plan: &Plan, packet: &model::Packet) -> bool {
    let address = model::Address::Ip(packet.destination);
    plan.decision(&model::Frontend { address, protocol: packet.protocol, port: packet.port }).is_some()
}
