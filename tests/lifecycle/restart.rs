// SPDX-License-Identifier: Apache-2.0

//! The daemon ends and begins again.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use lab::{
    Answer, Flow, Route, Transport,
    address::{Version, address_of},
};
use stage::{eventually, manifest};

use crate::bed::{Bed, Traffic, program};

#[test]
fn a_restart_goes_unnoticed() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start();
    bed.under_load(Traffic::All, "restart by SIGTERM", |bed, go_on| {
        let rules = bed.daemon.rules();
        for _ in 0..3 {
            let begun = Instant::now();
            bed.daemon.stop();
            let took = begun.elapsed();
            assert!(took < Duration::from_secs(5), "SIGTERM took {took:?}");
            bed.daemon.must_have_rules(&rules);
            go_on();
            bed.start();
            bed.daemon.must_have_rules(&rules);
            go_on();
        }
    });
}

#[test]
fn a_crash_goes_unnoticed() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start();
    bed.under_load(Traffic::All, "SIGKILL and start", |bed, go_on| {
        let rules = bed.daemon.rules();
        for _ in 0..3 {
            bed.daemon.kill();
            bed.daemon.must_have_rules(&rules);
            go_on();
            bed.start();
            bed.daemon.must_have_rules(&rules);
            go_on();
        }
        // Killed while it starts, wherever it may be by then.
        for wait_ms in [1, 5, 20, 40] {
            bed.daemon.kill();
            let flags = bed.flags();
            bed.daemon.start(&flags);
            thread::sleep(Duration::from_millis(wait_ms));
        }
        bed.daemon.kill();
        bed.daemon.must_have_rules(&rules);
        bed.start();
    });
}

#[test]
fn an_upgrade_goes_unnoticed() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start();
    bed.under_load(Traffic::All, "upgrade to a new binary", |bed, go_on| {
        let rules = bed.daemon.rules();
        let newer = bed.folder().join("portolan-new");
        fs::copy(program(), &newer).expect("the program can be copied");
        bed.daemon.upgrade(newer);
        bed.daemon.stop();
        bed.start();
        bed.daemon.must_have_rules(&rules);
        go_on();
    });
}

/// What an older version may have left: a set that is declared otherwise, a chain and a set that are not known any
/// more. All of it is put right in one commit.
#[test]
fn an_older_layout_is_converted_in_place() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start();
    bed.under_load(Traffic::All, "conversion of an older layout", |bed, go_on| {
        let rules = bed.daemon.rules();
        bed.daemon.stop();
        let text = bed.command(&["nft", "list", "table", "ip", "portolan"]);
        let older = text.replace("set cluster-ips {", "set cluster-ips {\n\t\tsize 4242").replacen(
            "table ip portolan {",
            "table ip portolan {\n\tchain gone { }\n\tset gone { type mark; }",
            1,
        );
        assert_ne!(older, text);
        let file = bed.folder().join("older.nft");
        fs::write(&file, format!("delete table ip portolan\n{older}")).expect("a file can be written");
        bed.command(&["nft", "-f", &file.to_string_lossy()]);
        assert_ne!(bed.daemon.rules(), rules, "the layout is no other");
        go_on();
        bed.start();
        bed.daemon.must_have_rules(&rules);
        go_on();
    });
}

#[test]
fn a_restart_without_its_source_changes_nothing() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start();
    bed.under_load(Traffic::All, "restart while the API server is away", |bed, go_on| {
        let rules = bed.daemon.rules();
        bed.server.go_down();
        go_on();
        bed.daemon.stop();
        let flags = bed.flags();
        bed.daemon.start(&flags);
        eventually("the daemon answers, and is not ready", || match bed.daemon.get(10_256, "/healthz")? {
            (503, _) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        go_on();
        go_on();
        bed.daemon.must_run();
        bed.daemon.must_have_rules(&rules);
        bed.node().run(|| bed.server.come_up()).expect("node-a can be entered");
        bed.daemon.must_serve();
        bed.daemon.must_have_rules(&rules);
    });
}

/// What is configured decides on new connections; those that are open keep what they have.
#[test]
fn another_configuration_takes_effect_without_a_gap() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start();
    bed.under_load(Traffic::All, "restart with another configuration", |bed, go_on| {
        let rules = bed.daemon.rules();
        for flags in [
            ["--masquerade-all", "--nodeport-addresses=192.168.0.0/16,fd00::c0a8:0/112"],
            ["--v=2", "--iptables-masquerade-bit=9"],
        ] {
            bed.daemon.stop();
            bed.start_with(&flags);
            go_on();
        }
        bed.daemon.stop();
        bed.start();
        bed.daemon.must_have_rules(&rules);
    });
}

/// From nftables to iptables and back: each leaves its rules, and the next removes them once its own serve.
#[test]
fn another_mode_takes_over_without_a_gap() {
    let Some(mut bed) = Bed::build() else { return };
    if bed.try_command(&["iptables", "--version"]).is_none() {
        println!("skipped: there is no iptables here");
        return;
    }
    bed.start();
    bed.under_load(Traffic::All, "restart in another mode and back", |bed, go_on| {
        let rules = bed.daemon.rules();
        bed.daemon.stop();
        bed.start_with(&["--proxy-mode=iptables"]);
        eventually("the tables of nftables mode are gone", || {
            match bed.command(&["nft", "list", "tables"]) {
                tables if tables.contains("portolan") => Err(tables),
                _ => Ok(()),
            }
        });
        go_on();
        bed.daemon.stop();
        bed.start();
        eventually("the chains of iptables mode are gone", || {
            match bed.command(&["nft", "list", "ruleset"]) {
                rules if rules.contains("KUBE-S") => Err(rules),
                _ => Ok(()),
            }
        });
        go_on();
        let left = bed.daemon.rules();
        let missing: Vec<&String> = rules.iter().filter(|rule| !left.contains(rule)).collect();
        assert!(missing.is_empty(), "{missing:?}");
    });
}

/// From a pod to the service of [`Bed::build`].
fn udp_from_a3() -> Route {
    let source = Version::V4.address(address_of("a3").expect("a pod"));
    let destination = (manifest::cluster_ip(Version::V4, 10), 80).into();
    Route { source, destination, transport: Transport::Udp }
}

/// Endpoints that went while nobody looked: UDP flows to them move, all others stay with theirs.
#[test]
fn only_stale_flows_are_cut_after_a_restart() {
    const COUNT: usize = 24;
    let Some(mut bed) = Bed::build() else { return };
    bed.start();
    let route = udp_from_a3();
    let patience = Duration::from_secs(5);
    let ask = |flow: &mut Flow| match flow.ask(patience) {
        Answer::Answered(reply) => (reply.by, reply.source_seen),
        other => panic!("{other:?}"),
    };
    let mut flows: Vec<Flow> = (0..COUNT)
        .map(|_| bed.lab.open("a3", route, patience).expect("the lab works").expect("UDP opens"))
        .collect();
    let before: Vec<_> = flows.iter_mut().map(ask).collect();
    assert!(before.iter().any(|(by, _)| by == "b1"), "chance met none of {COUNT} with b1: {before:?}");

    bed.daemon.stop();
    bed.put(manifest::slices("web", &["a1", "a2"]));
    bed.start();
    let mut moved = 0;
    for (flow, (by, source_seen)) in flows.iter_mut().zip(&before) {
        if by == "b1" {
            eventually("a stale flow moves", || match ask(flow) {
                (now, _) if now == "b1" => Err("b1 still answers".to_owned()),
                _ => Ok(()),
            });
            moved += 1;
        } else {
            assert_eq!(&ask(flow), &(by.clone(), *source_seen), "a flow that was not stale moved");
        }
    }
    println!("restart after an endpoint went: {moved} stale UDP flows moved, {} kept", COUNT - moved);
}

/// A port that went while nobody looked: nothing told where it had led, and still nobody reaches its endpoints.
#[test]
fn flows_to_a_port_that_went_are_cut_after_a_restart() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start();
    let route = udp_from_a3();
    let patience = Duration::from_secs(5);
    let mut flow = bed.lab.open("a3", route, patience).expect("the lab works").expect("UDP opens");
    assert!(matches!(flow.ask(patience), Answer::Answered(_)));

    bed.daemon.stop();
    let mut service = manifest::service("web", 10);
    service["spec"]["ports"].as_array_mut().expect("a list").retain(|port| port["name"] != "udp");
    bed.put([service]);
    bed.start();
    eventually("the flow ends", || match flow.ask(Duration::from_millis(200)) {
        Answer::Answered(reply) => Err(format!("{} still answers", reply.by)),
        _ => Ok(()),
    });
}
