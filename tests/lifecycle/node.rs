// SPDX-License-Identifier: Apache-2.0

//! The Node object and the machine change under the running daemon: it follows, and does not end over it.

use std::{net::SocketAddr, sync::Arc, thread};

use lab::{
    Transport,
    address::{NODE_A, NODE_A_SECOND, Version},
};
use serde_json::{Value, json};
use stage::{Target, load::Load, manifest};

use crate::bed::{Bed, NODE_PORT, cluster_ip, everywhere};

/// The Node with other addresses, pod ranges and zone.
fn node(addresses: &[&str], pod_ranges: &[&str], zone: &str) -> Value {
    let mut node = manifest::node();
    let addresses: Vec<Value> =
        addresses.iter().map(|address| json!({"type": "InternalIP", "address": address})).collect();
    node["status"]["addresses"] = json!(addresses);
    node["spec"] = json!({"podCIDR": pod_ranges[0], "podCIDRs": pod_ranges});
    node["metadata"]["labels"] = json!({"topology.kubernetes.io/zone": zone});
    node
}

const V6: &str = "fd00::c0a8:1";
const PODS: [&str; 2] = ["10.244.1.0/24", "fd00::af4:100/120"];

#[test]
fn the_node_s_own_addresses_are_followed() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start();
    let at = |address| Target {
        from: "client",
        to: SocketAddr::new(Version::V4.address(address), NODE_PORT),
        transport: Transport::Tcp,
    };
    at(NODE_A).expect(&bed.lab, &["a1", "a2", "b1"]);
    at(NODE_A_SECOND).expect_gone(&bed.lab);

    // Node ports are served on the primary address, which becomes another.
    bed.put([node(&["192.168.1.1", V6], &PODS, "here")]);
    at(NODE_A_SECOND).expect(&bed.lab, &["a1", "a2", "b1"]);
    at(NODE_A).expect_gone(&bed.lab);
    bed.put([node(&["192.168.0.1", V6], &PODS, "here")]);
    at(NODE_A).expect(&bed.lab, &["a1", "a2", "b1"]);

    // An address comes to the machine that is to serve node ports, and goes.
    bed.daemon.stop();
    bed.start_with(&["--nodeport-addresses=203.0.113.128/25"]);
    let extra = Target {
        from: "client",
        to: SocketAddr::new([203, 0, 113, 200].into(), NODE_PORT),
        transport: Transport::Tcp,
    };
    extra.expect_gone(&bed.lab);
    bed.command(&["ip", "address", "add", "203.0.113.200/32", "dev", "lo"]);
    extra.expect(&bed.lab, &["a1", "a2", "b1"]);
    bed.command(&["ip", "address", "del", "203.0.113.200/32", "dev", "lo"]);
    extra.expect_gone(&bed.lab);
    bed.daemon.must_run();
}

#[test]
fn pod_ranges_and_zone_are_followed_under_load() {
    let Some(mut bed) = Bed::build() else { return };
    let addresses = ["192.168.0.1", V6];
    bed.put([node(&addresses, &PODS, "here"), manifest::service("zoned", 20)]);
    let mut slices = manifest::slices("zoned", &["a1", "b1"]);
    for slice in &mut slices {
        for (endpoint, zone) in
            slice["endpoints"].as_array_mut().expect("a list").iter_mut().zip(["here", "there"])
        {
            endpoint["hints"] = json!({"forZones": [{"name": zone}]});
            endpoint["zone"] = json!(zone);
        }
    }
    bed.put(slices);
    bed.start_with(&["--detect-local-mode=NodeCIDR"]);
    let zoned = Target::both("a3", cluster_ip(20), 80);
    let lab = Arc::clone(&bed.lab);
    thread::scope(|scope| {
        let load = Load::begin(scope, &lab, &everywhere());
        zoned.iter().for_each(|target| target.expect(&lab, &["a1"]));
        bed.put([node(&addresses, &PODS, "there")]);
        zoned.iter().for_each(|target| target.expect(&lab, &["b1"]));
        bed.put([node(&addresses, &PODS, "elsewhere")]);
        zoned.iter().for_each(|target| target.expect(&lab, &["a1", "b1"]));

        let masquerades = |bed: &Bed, range: &str| bed.daemon.rules().iter().any(|rule| rule.contains(range));
        assert!(masquerades(&bed, "10.244.1.0/24"));
        bed.put([node(&addresses, &["10.244.0.0/20", "fd00::af4:0/116"], "elsewhere")]);
        stage::eventually("the new pod range is in force", || {
            let rules = bed.daemon.rules();
            let is_new = rules.iter().any(|rule| rule.contains("10.244.0.0/20"));
            if is_new { Ok(()) } else { Err(rules.join("\n")) }
        });
        assert!(!masquerades(&bed, "10.244.1.0/24"));
        load.go_on(100);
        load.end("changes of the Node's ranges and zone");
    });
    bed.daemon.must_run();
}
