// SPDX-License-Identifier: Apache-2.0

//! From the real kube-proxy in ipvs mode to Portolan and back, under load. `tests/vm/run` takes kube-proxy along where it
//! has been built, and runs these; elsewhere they count as ignored.

use std::{env, path::PathBuf};

use lab::{Transport, address::Version};
use stage::{
    Target, eventually,
    load::Line,
    manifest,
    rival::{Rival, Way},
};

use crate::bed::{Bed, NODE_PORT, Traffic, everywhere, program};

const IPVS: &str = "--proxy-mode=ipvs";
/// The host part of a service that is deleted while nobody looks.
const GONE: u16 = 99;
/// What is somebody else's: how it is made, and how it is seen.
const FOREIGN: [(&str, &str, &str); 6] = [
    ("ipvsadm -A -t 203.0.113.77:80 -s wlc", "ipvsadm -Sn", "203.0.113.77:80"),
    ("ipvsadm -a -t 203.0.113.77:80 -r 203.0.113.78:80 -m", "ipvsadm -Sn", "203.0.113.78:80"),
    ("ipset create foreign hash:ip", "ipset list -n", "foreign"),
    ("iptables-nft -A FORWARD -s 192.0.2.77 -j DROP", "iptables-nft-save", "192.0.2.77"),
    ("ip6tables-nft -A FORWARD -s 2001:db8::7 -j DROP", "ip6tables-nft-save", "2001:db8::7"),
    ("nft add table ip foreign", "nft list tables", "table ip foreign"),
];

fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

/// A node with a second service and somebody else's things on it.
fn build() -> Bed {
    let bed = Bed::build().expect("root");
    bed.put([manifest::service("gone", GONE)]);
    bed.put(manifest::slices("gone", &["b2"]));
    for (make, ..) in FOREIGN {
        bed.command(&words(make));
    }
    bed
}

/// kube-proxy, when it serves.
fn kube_proxy(bed: &Bed) -> Rival {
    let tools = env::var_os("PORTOLAN_CLUSTER_TOOLS_DIR").map(PathBuf::from);
    let tools =
        tools.expect("tests/vm/run says where kube-proxy is; tools/cluster/build kube-proxy builds it");
    let mut rival = Rival::start(&tools, bed.node(), Way::Ipvs, bed.kubeconfig(), bed.folder());
    // It is healthy before it has written its last: the rules of a family, in its own words.
    rival.until("kube-proxy writes its rules", || {
        for (tool, mark) in
            [("iptables-nft-save", "KUBE-NODE-PORT-TCP"), ("ip6tables-nft-save", "KUBE-6-NODE-PORT-TCP")]
        {
            let rules = bed.command(&[tool]);
            let is_its_own =
                |line: &str| line.contains(mark) && line.contains("Kubernetes nodeport TCP port");
            if !rules.lines().any(is_its_own) {
                return Err(rules);
            }
        }
        Ok(())
    });
    rival
}

/// Every way in leads to these pods.
fn expect(bed: &Bed, pods: &[&str]) {
    for Line { from, to } in everywhere() {
        Target { from, to, transport: Transport::Tcp }.expect(&bed.lab, pods);
    }
}

#[track_caller]
fn foreign_things_are_there(bed: &Bed) {
    for (_, list, trace) in FOREIGN {
        let text = bed.command(&words(list));
        assert!(text.contains(trace), "{trace} is gone from {list}:\n{text}");
    }
}

/// Of the service that was deleted meanwhile nothing is left.
fn stale_things_are_gone(bed: &Bed) {
    eventually("what is stale is gone", || {
        let held = ["ipvsadm -Sn", "ipset save", "ip -o address show dev kube-ipvs0"];
        let held: String = held.iter().map(|line| bed.command(&words(line))).collect();
        let stale = Version::BOTH.map(|version| manifest::cluster_ip(version, GONE).to_string());
        if stale.iter().any(|address| held.contains(address)) { Err(held) } else { Ok(()) }
    });
}

fn delete_service(bed: &Bed) {
    bed.server.delete(model::Kind::Service, "default", "gone");
    for suffix in ["v4", "v6"] {
        bed.server.delete(model::Kind::EndpointSlice, "default", &format!("gone-{suffix}"));
    }
}

#[test]
#[ignore = "needs kube-proxy and IPVS: `tests/vm/run -- lifecycle` has both"]
fn its_mode_is_taken_over_in_place() {
    let mut bed = build();
    let rival = kube_proxy(&bed);
    expect(&bed, &["a1", "a2", "b1"]);
    bed.under_load(Traffic::All, "kube-proxy in ipvs mode to ipvs mode", |bed, go_on| {
        rival.kill();
        delete_service(bed);
        go_on();
        bed.start_with(&[IPVS]);
        go_on();
        stale_things_are_gone(bed);
        bed.put(manifest::slices("web", &["a1", "a2", "b1", "b2"]));
        expect(bed, &["a1", "a2", "b1", "b2"]);
    });
    foreign_things_are_there(&bed);
}

#[test]
#[ignore = "needs kube-proxy and IPVS: `tests/vm/run -- lifecycle` has both"]
fn nftables_mode_takes_over_from_its_mode() {
    let mut bed = build();
    let rival = kube_proxy(&bed);
    expect(&bed, &["a1", "a2", "b1"]);
    bed.under_load(Traffic::All, "kube-proxy in ipvs mode to nftables mode", |bed, go_on| {
        rival.kill();
        go_on();
        bed.start();
        go_on();
        eventually("its rules are gone", || {
            let rules = bed.command(&["iptables-nft-save"]) + &bed.command(&["ip6tables-nft-save"]);
            if rules.contains("KUBE-SERVICES") { Err(rules) } else { Ok(()) }
        });
        bed.put(manifest::slices("web", &["a1", "a2", "b1", "b2"]));
        expect(bed, &["a1", "a2", "b1", "b2"]);
    });
    foreign_things_are_there(&bed);
}

/// And taken over again, so that it is the circle of an operator who tries.
#[test]
#[ignore = "needs kube-proxy and IPVS: `tests/vm/run -- lifecycle` has both"]
fn it_is_handed_back_in_place() {
    let mut bed = build();
    bed.start_with(&[IPVS]);
    expect(&bed, &["a1", "a2", "b1"]);
    bed.under_load(Traffic::All, "ipvs mode to kube-proxy's, and back", |bed, go_on| {
        bed.daemon.stop();
        delete_service(bed);
        go_on();
        let rival = kube_proxy(bed);
        go_on();
        stale_things_are_gone(bed);
        bed.command(&[&program().to_string_lossy(), "withdraw"]);
        go_on();
        // kube-proxy alone decides now.
        bed.put(manifest::slices("web", &["a1", "a2", "b1", "b2"]));
        expect(bed, &["a1", "a2", "b1", "b2"]);
        let left = bed.command(&["ipset", "list", "-n"]) + &bed.command(&["iptables-nft-save"]);
        assert!(!left.contains("KUBE-INSIDE"), "what only Portolan has is withdrawn: {left}");
        rival.kill();
        go_on();
        bed.start_with(&[IPVS]);
    });
    foreign_things_are_there(&bed);
    assert!(bed.command(&["ipvsadm", "-Sn"]).contains(&NODE_PORT.to_string()));
}
