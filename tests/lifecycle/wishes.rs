// SPDX-License-Identifier: Apache-2.0

//! What a Service may ask of the userspace mode by annotation, and what that mode does for everyone: from the manifest to
//! the packet, and to the metric.

use std::{collections::BTreeSet, net::SocketAddr, process::Command};

use lab::address::{NODE_A, Version};
use stage::{eventually, manifest};

use crate::{
    bed::{Bed, cluster_ip},
    pods::{Client, PodServer, service},
};

const WAYS: [&[&str]; 2] = [&["--proxy-mode=userspace"], &["--proxy-mode=userspace", "--userspace-bind"]];

fn at(host: u16) -> SocketAddr {
    SocketAddr::new(cluster_ip(host), 80)
}

/// Who answers so many new connections of a client, one after the other. None may fail.
fn answers(bed: &Bed, to: SocketAddr, count: usize) -> BTreeSet<String> {
    let ask = |_| {
        let answer = Client::connect(bed, "client", to).and_then(|mut client| client.ask());
        answer.unwrap_or_else(|error| panic!("{to}: {error}"))
    };
    (0..count).map(ask).collect()
}

/// By address and by node port, of both families, whoever asks.
#[test]
fn endpoints_are_told_who_the_client_is() {
    const NODE_PORT: u16 = 30_081;
    for way in WAYS {
        let Some(mut bed) = Bed::build() else { return };
        let server = PodServer::start(&bed, "a1", 9_000, true);
        let told = manifest::exposed("told", 20, NODE_PORT);
        service(&bed, told, &[("proxy-protocol", "v2"), ("check", "http:/healthz")], (&["a1"], 9_000));
        bed.start_with(way);
        for version in Version::BOTH {
            let by_address = SocketAddr::new(manifest::cluster_ip(version, 20), 80);
            let by_port = SocketAddr::new(version.address(NODE_A), NODE_PORT);
            for (from, to) in
                [("client", by_address), ("a3", by_address), ("node-a", by_address), ("client", by_port)]
            {
                eventually("the endpoint is told", || {
                    let mut client = Client::connect(&bed, from, to).map_err(|error| error.to_string())?;
                    let said = client.ask().map_err(|error| format!("{from} to {to}: {error}"))?;
                    // More on the same connection is told nothing more.
                    assert_eq!(client.ask().expect("it goes on"), said);
                    let wanted = format!("a1 {} {to}", client.address);
                    if said == wanted { Ok(()) } else { Err(format!("{said}, not {wanted}")) }
                });
            }
        }
        // A check goes to the same port, where nothing is understood without a header.
        eventually("it is asked for its health", || match server.checked() {
            0 | 1 => Err("not yet twice".to_owned()),
            _ => Ok(()),
        });
        let sick =
            bed.daemon.metric(r#"portolan_relay_unusable_endpoints{service="default/told:tcp",why="check"}"#);
        assert!(sick.is_err(), "the check is answered, and yet: {sick:?}");
    }
}

/// An endpoint that fails its check gets no connections, and comes back.
#[test]
fn who_fails_its_check_gets_no_connections() {
    let Some(mut bed) = Bed::build() else { return };
    let servers = |port| ["a1", "a2"].map(|pod| PodServer::start(&bed, pod, port, false));
    let (http, mut tcp) = (servers(9_001), servers(9_002).map(Some));
    service(&bed, manifest::service("http", 21), &[("check", "http:/healthz")], (&["a1", "a2"], 9_001));
    service(&bed, manifest::service("tcp", 22), &[("check", "tcp")], (&["a1", "a2"], 9_002));
    bed.start_with(&["--proxy-mode=userspace"]);
    let both = BTreeSet::from(["a1".to_owned(), "a2".to_owned()]);
    let one = BTreeSet::from(["a2".to_owned()]);
    assert_eq!((answers(&bed, at(21), 8), answers(&bed, at(22), 8)), (both.clone(), both.clone()));

    http[0].be_sick(true);
    tcp[0] = None;
    let unusable = |service: &str| {
        format!(r#"portolan_relay_unusable_endpoints{{service="default/{service}:tcp",why="check"}}"#)
    };
    for service in ["http", "tcp"] {
        // One pod, two addresses.
        eventually("the check notices", || match bed.daemon.metric(&unusable(service))? {
            2.0 => Ok(()),
            other => Err(format!("{other} endpoints of {service}")),
        });
    }
    let failed = || bed.daemon.metric("portolan_relay_failed_attempts_total").expect("it is counted");
    let (met, failed_before) = (http[0].met(), failed());
    assert_eq!((answers(&bed, at(21), 30), answers(&bed, at(22), 30)), (one.clone(), one));
    assert_eq!(http[0].met(), met, "it gets none");
    assert_eq!(failed(), failed_before, "and where nobody listens nothing is tried");

    http[0].be_sick(false);
    tcp[0] = Some(PodServer::start(&bed, "a1", 9_002, false));
    for (service, host) in [("http", 21), ("tcp", 22)] {
        eventually("it is back", || match bed.daemon.metric(&unusable(service)) {
            Ok(count) => Err(format!("{count} endpoints of {service}")),
            Err(_) => Ok(()),
        });
        assert_eq!(answers(&bed, at(host), 8), both, "{service}");
    }
}

/// What is beyond a Service's limit is refused and counted; others notice nothing.
#[test]
fn a_service_has_as_many_connections_as_it_asks_for() {
    let Some(mut bed) = Bed::build() else { return };
    let _servers = ["a1", "a2"].map(|pod| PodServer::start(&bed, pod, 9_003, false));
    service(&bed, manifest::service("few", 23), &[("max-connections", "2")], (&["a1", "a2"], 9_003));
    service(&bed, manifest::service("many", 24), &[], (&["a1", "a2"], 9_003));
    bed.start_with(&["--proxy-mode=userspace"]);
    let connect = |host| {
        let mut client = Client::connect(&bed, "client", at(host))?;
        client.ask().map(|_| client)
    };
    let mut kept = [(); 2].map(|()| connect(23).expect("there is room"));
    for _ in 0..5 {
        assert!(connect(23).is_err(), "a third is one too many");
        connect(24).expect("another service has room");
    }
    for name in [
        r#"portolan_relay_refused_total{reason="service_limit"}"#,
        r#"portolan_relay_service_refused_total{service="default/few:tcp"}"#,
    ] {
        assert_eq!(bed.daemon.metric(name), Ok(5.0), "{name}");
    }
    assert!(
        bed.daemon.metric(r#"portolan_relay_service_refused_total{service="default/many:tcp"}"#).is_err()
    );
    kept.iter_mut().for_each(|client| drop(client.ask().expect("those that are open go on")));
    drop(kept);
    eventually("there is room again", || connect(23).map(drop).map_err(|error| error.to_string()));
}

/// No client notices an endpoint that refuses, or one that says nothing at all: the next one is tried, and who failed is
/// set aside.
#[test]
fn clients_do_not_notice_endpoints_that_fail() {
    let Some(mut bed) = Bed::build() else { return };
    let _servers = ["a1", "a2", "a3", "b1"].map(|pod| PodServer::start(&bed, pod, 9_004, false));
    // Nobody listens in b2, and to b1 nothing comes through.
    let rule = "add table ip t; add chain ip t c { type filter hook input priority 0; }; add rule ip t c tcp dport 9004 drop";
    let drop_all = || Command::new("nft").arg(rule).status();
    let status = bed.lab.netns("b1").expect("a pod").run(drop_all).expect("it can be entered").expect("nft");
    assert!(status.success());
    let all = ["a1", "a2", "a3", "b1", "b2"];
    service(&bed, manifest::service("frail", 25), &[], (&all, 9_004));
    bed.start_with(&["--proxy-mode=userspace"]);
    let well = ["a1", "a2", "a3"].map(str::to_owned);
    assert_eq!(answers(&bed, at(25), 40), BTreeSet::from(well));
    let count = |name: &str| bed.daemon.metric(name);
    let unusable = r#"portolan_relay_unusable_endpoints{service="default/frail:tcp",why="failed"}"#;
    for name in [
        "portolan_relay_retries_total",
        "portolan_relay_failed_attempts_total",
        "portolan_relay_ejections_total",
        r#"portolan_relay_service_retries_total{service="default/frail:tcp"}"#,
    ] {
        let value = count(name).expect("it is there");
        assert!((2.0..40.0).contains(&value), "{name}: {value}");
    }
    // Both come back for a try now and then; while they are aside it shows.
    eventually("it shows", || {
        answers(&bed, at(25), 5);
        match count(unusable)? {
            2.0 => Ok(()),
            other => Err(format!("{other}")),
        }
    });
    assert_eq!(count(r#"portolan_relay_refused_total{reason="unreachable"}"#), Ok(0.0));
}
