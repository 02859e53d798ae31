// SPDX-License-Identifier: Apache-2.0

//! Who answers, and whom it sees.

use dataplane::Scope;
use lab::{Answer, Transport};
use model::{Decision, Family, Masquerade, NodePortScope, Protocol, Role, Verdict};
use netlink::nft::{Batch, Create, Nft, Set, TableRef, Type};

use crate::stage::{Stage, decision, is_node_a, on_stage, same};

const VIP: &str = "10.96.0.10";
const LB: &str = "198.51.100.10";

#[test]
fn connections_are_balanced() {
    on_stage("connections_are_balanced", |stage| {
        let frontend = stage.at(VIP, Protocol::Tcp, 80);
        stage.set(frontend, same(stage.forward(&["a1", "b1", "b2"], Masquerade::OffPods)));
        let tally = stage.tally("client", VIP, 80, 240);
        // 80 each, give or take 7; a wrong layout would be off by a half.
        assert!(tally.len() == 3 && tally.values().all(|count| (45..120).contains(count)), "{tally:?}");
        for from in ["node-a", "a2"] {
            assert_eq!(stage.tally(from, VIP, 80, 30).len(), 3, "{from}");
        }
        let shrunk = stage.set(frontend, same(stage.forward(&["b1", "b2"], Masquerade::OffPods)));
        // The last endpoint moves into the slot of the first, and the first is no hairpin any more.
        assert_eq!((shrunk.batches, shrunk.added, shrunk.removed), (1, 1, 3), "{shrunk:?}");
        let tally = stage.tally("client", VIP, 80, 100);
        assert!(tally.len() == 2 && tally.values().all(|count| *count > 25), "{tally:?}");
    });
}

#[test]
fn every_protocol_and_who_is_masqueraded() {
    on_stage("every_protocol_and_who_is_masqueraded", |stage| {
        for (protocol, transport) in [
            (Protocol::Tcp, Transport::Tcp),
            (Protocol::Udp, Transport::Udp),
            (Protocol::Sctp, Transport::Sctp),
        ] {
            let frontend = stage.at(VIP, protocol, 80);
            stage.set(frontend, same(stage.forward(&["b1"], Masquerade::OffPods)));
            let seen = |from| stage.reply(from, VIP, 80, transport).source_seen.ip();
            assert!(is_node_a(stage, seen("client")), "{transport:?}");
            assert!(is_node_a(stage, seen("node-a")), "{transport:?}");
            assert_eq!(seen("a2"), stage.address("a2"), "{transport:?}");
        }
        let frontend = stage.at(VIP, Protocol::Tcp, 80);
        stage.set(frontend, same(stage.forward(&["b1"], Masquerade::Always)));
        assert!(is_node_a(stage, stage.reply("a2", VIP, 80, Transport::Tcp).source_seen.ip()));
        stage.set(frontend, same(stage.forward(&["b1"], Masquerade::Never)));
        let seen = stage.reply("client", VIP, 80, Transport::Tcp).source_seen.ip();
        assert_eq!(seen, stage.address("client"));
    });
}

#[test]
fn a_pod_reaches_itself() {
    on_stage("a_pod_reaches_itself", |stage| {
        stage.set(stage.at(VIP, Protocol::Tcp, 80), same(stage.forward(&["a1"], Masquerade::OffPods)));
        let reply = stage.reply("a1", VIP, 80, Transport::Tcp);
        assert!(reply.by == "a1" && is_node_a(stage, reply.source_seen.ip()), "{reply:?}");
    });
}

#[test]
fn inside_and_outside_differ() {
    on_stage("inside_and_outside_differ", |stage| {
        let split = |stage: &Stage| {
            let inside = stage.forward(&["a1", "b1"], Masquerade::OffPods);
            let outside = stage.forward(&["a1"], Masquerade::Never);
            Decision { role: Role::LoadBalancer, ..decision(inside, outside) }
        };
        stage.set(stage.at(LB, Protocol::Tcp, 80), split(stage));
        stage.set(stage.node_port(Protocol::Tcp, 30_080), split(stage));
        for (to, port) in [(LB, 80), ("192.168.0.1", 30_080)] {
            assert_eq!(stage.tally("client", to, port, 12).into_keys().collect::<Vec<_>>(), ["a1"], "{to}");
            let seen = stage.reply("client", to, port, Transport::Tcp).source_seen.ip();
            assert_eq!(seen, stage.address("client"), "{to}");
            for from in ["node-a", "a2"] {
                assert_eq!(stage.tally(from, to, port, 24).len(), 2, "{from} to {to}");
            }
            assert_eq!(stage.reply("a2", to, port, Transport::Tcp).source_seen.ip(), stage.address("a2"));
        }
        let outside_drops = Decision { outside: Verdict::Drop, ..split(stage) };
        stage.set(stage.at(LB, Protocol::Tcp, 80), outside_drops.clone());
        stage.set(stage.node_port(Protocol::Tcp, 30_080), outside_drops);
        for (to, port) in [(LB, 80), ("192.168.0.1", 30_080)] {
            stage.assert_silence("client", to, port, Transport::Tcp);
            assert_eq!(stage.tally("a2", to, port, 24).len(), 2);
        }
    });
}

#[test]
fn refused_dropped_and_unknown() {
    on_stage("refused_dropped_and_unknown", |stage| {
        stage.set(stage.at(VIP, Protocol::Tcp, 80), same(Verdict::Reject));
        stage.set(stage.at(VIP, Protocol::Udp, 80), same(Verdict::Reject));
        stage.set(stage.at(VIP, Protocol::Tcp, 81), same(Verdict::Drop));
        stage.set(stage.node_port(Protocol::Tcp, 30_080), same(Verdict::Reject));
        stage.set(stage.node_port(Protocol::Tcp, 30_081), same(Verdict::Drop));
        for from in ["client", "node-a", "a2"] {
            assert_eq!(stage.ask(from, VIP, 80, Transport::Tcp), Answer::Refused, "{from}");
            assert_eq!(stage.ask(from, VIP, 80, Transport::Udp), Answer::Refused, "{from}");
            stage.assert_silence(from, VIP, 81, Transport::Tcp);
            assert_eq!(stage.ask(from, "192.168.0.1", 30_080, Transport::Tcp), Answer::Refused, "{from}");
            stage.assert_silence(from, "192.168.0.1", 30_081, Transport::Tcp);
            // A port that no service has, and an address that none has.
            assert_eq!(stage.ask(from, VIP, 99, Transport::Tcp), Answer::Refused, "{from}");
            stage.assert_silence(from, "10.96.0.99", 80, Transport::Tcp);
        }
    });
}

#[test]
fn source_ranges() {
    on_stage("source_ranges", |stage| {
        let net = |name| ipnet::IpNet::from(stage.address(name));
        let mut nets = vec![net("client"), net("a2")];
        nets.sort();
        let open = same(stage.forward(&["b1"], Masquerade::Always));
        let open = Decision { role: Role::LoadBalancer, ..open };
        let ranged = Decision { source_ranges: Some(nets.into()), ..open.clone() };
        let frontend = stage.at(LB, Protocol::Tcp, 80);
        stage.set(frontend, ranged);
        assert_eq!(stage.reply("client", LB, 80, Transport::Tcp).by, "b1");
        assert_eq!(stage.reply("a2", LB, 80, Transport::Tcp).by, "b1");
        for from in ["client2", "a3", "node-a"] {
            stage.assert_silence(from, LB, 80, Transport::Tcp);
        }
        let nobody = Decision { source_ranges: Some([].into()), ..open.clone() };
        stage.set(frontend, nobody);
        stage.assert_silence("client", LB, 80, Transport::Tcp);
        stage.set(frontend, open);
        assert_eq!(stage.reply("client2", LB, 80, Transport::Tcp).by, "b1");
    });
}

#[test]
fn node_ports_on_chosen_addresses() {
    on_stage("node_ports_on_chosen_addresses", |stage| {
        stage.scope = NodePortScope::Only([stage.address("192.168.1.1")].into());
        let decision = same(stage.forward(&["b1"], Masquerade::Always));
        let frontend = stage.node_port(Protocol::Tcp, 30_080);
        stage.frontends.insert(frontend, decision);
        let plan = stage.plan();
        stage.apply(&plan, Scope::All);
        for from in ["client", "node-a", "a2"] {
            assert_eq!(stage.reply(from, "192.168.1.1", 30_080, Transport::Tcp).by, "b1", "{from}");
            assert_eq!(stage.ask(from, "192.168.0.1", 30_080, Transport::Tcp), Answer::Refused, "{from}");
        }
    });
}

#[test]
fn node_ports_on_loopback_addresses() {
    on_stage("node_ports_on_loopback_addresses", |stage| {
        if stage.family() == Family::V6 {
            return;
        }
        stage.loopback = true;
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            let decision = same(stage.forward(&["a1", "b1"], Masquerade::Always));
            stage.frontends.insert(stage.node_port(protocol, 30_080), decision);
        }
        let plan = stage.plan();
        let applied = stage.apply(&plan, Scope::All);
        assert_eq!(applied.warnings, Vec::<String>::new());
        let route = |transport| lab::Route {
            source: "127.0.0.1".parse().unwrap(),
            destination: "127.0.0.1:30080".parse().unwrap(),
            transport,
        };
        for transport in [Transport::Tcp, Transport::Udp] {
            for _ in 0..8 {
                let answer = stage.lab.ask("node-a", route(transport), crate::stage::PATIENCE).unwrap();
                assert!(matches!(answer, Answer::Answered(_)), "{transport:?} {answer:?}");
            }
        }
        assert_eq!(stage.tally("client", "192.168.0.1", 30_080, 16).len(), 2);
    });
}

#[test]
fn connections_outlive_every_change_of_the_table() {
    on_stage("connections_outlive_every_change_of_the_table", |stage| {
        let frontend = stage.at(VIP, Protocol::Tcp, 80);
        stage.set(frontend, same(stage.forward(&["b1"], Masquerade::OffPods)));
        let route = stage.route("client", VIP, 80, Transport::Tcp);
        let node = stage.lab.netns("client").unwrap();
        let mut flow = node.run(|| lab::Flow::open(route, crate::stage::PATIENCE).unwrap()).unwrap();
        let mut assert_lives = |when: &str| {
            let answer = flow.ask(crate::stage::PATIENCE);
            assert!(matches!(&answer, Answer::Answered(reply) if reply.by == "b1"), "{when}: {answer:?}");
        };
        assert_lives("at first");
        stage.set(frontend, same(stage.forward(&["a1"], Masquerade::Never)));
        assert_lives("after another endpoint");
        stage.set(frontend, same(Verdict::Reject));
        assert_lives("after the last endpoint");
        stage.frontends.clear();
        let plan = stage.plan();
        stage.apply(&plan, Scope::All);
        assert_lives("after the service");
        let node = stage.lab.netns("node-a").unwrap();
        node.run(|| spoil(stage.family())).unwrap();
        let applied = stage.apply(&plan, Scope::All);
        assert!(applied.chains > 5, "made anew: {applied:?}");
        assert_lives("after the table was made anew");
    });
}

/// Somebody puts a set of ours into the table, but of another type. It can only be made anew.
fn spoil(family: Family) {
    let family = if family == Family::V4 { netlink::Family::V4 } else { netlink::Family::V6 };
    let table = TableRef { family, name: dataplane::names::TABLE };
    let mut batch = Batch::new();
    let other = Set::new("sticky-services-7", [Type::MARK.into()]);
    batch.add_set(0, table, &other, Create::Exclusive);
    Nft::open().unwrap().commit(&batch).unwrap();
}
