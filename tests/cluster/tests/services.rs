// SPDX-License-Identifier: Apache-2.0

//! Services and EndpointSlices come, change and go by kubectl; packets follow each step.

use std::{net::IpAddr, time::Duration};

use lab::{
    Answer, Route, Transport,
    address::{self, Version, address_of},
};
use serde_json::json;
use stage::{Stage, Target, eventually, manifest};

/// TCP and UDP, both families, from a pod on the node and from the node itself.
fn targets(host: u16) -> Vec<Target> {
    let addresses = Version::BOTH.map(|version| manifest::cluster_ip(version, host));
    addresses
        .iter()
        .flat_map(|ip| ["a1", "node-a"].map(|from| Target::both(from, *ip, 80)))
        .flatten()
        .collect()
}

fn expect(stage: &Stage, targets: &[Target], pods: &[&str]) {
    targets.iter().for_each(|target| target.expect(&stage.lab, pods));
}

#[test]
fn services_come_change_and_go() {
    let Some(mut stage) = Stage::build() else { return };
    let web = targets(10);

    // There before the daemon is.
    stage.apply(&[manifest::service("web", 10)]);
    stage.apply(&manifest::slices("web", &["a2", "b1"]));
    stage.start_daemon(&stage.control.by_certificate());
    expect(&stage, &web, &["a2", "b1"]);

    // One is replaced, one comes, two go.
    stage.apply(&manifest::slices("web", &["a2", "b2"]));
    expect(&stage, &web, &["a2", "b2"]);
    stage.apply(&manifest::slices("web", &["a2", "a3", "b2"]));
    expect(&stage, &web, &["a2", "a3", "b2"]);
    stage.apply(&manifest::slices("web", &["a3"]));
    expect(&stage, &web, &["a3"]);

    // Nobody is left: refused, not left waiting. Then somebody comes.
    stage.apply(&manifest::slices("web", &[]));
    web.iter().for_each(|target| target.expect_refused(&stage.lab));
    stage.apply(&manifest::slices("web", &["b1"]));
    expect(&stage, &web, &["b1"]);

    // Another service, and a port that changes while the first one goes on.
    stage.apply(&[manifest::service("api", 11)]);
    stage.apply(&manifest::slices("api", &["a2"]));
    expect(&stage, &targets(11), &["a2"]);
    let mut moved = manifest::service("api", 11);
    moved["spec"]["ports"][0]["port"] = json!(81);
    moved["spec"]["ports"][1]["port"] = json!(81);
    stage.apply(&[moved]);
    let at_81: Vec<Target> = targets(11)
        .into_iter()
        .map(|mut target| {
            target.to.set_port(81);
            target
        })
        .collect();
    expect(&stage, &at_81, &["a2"]);
    targets(11).iter().for_each(|target| target.expect_gone(&stage.lab));
    expect(&stage, &web, &["b1"]);

    // Gone, and gone for good.
    stage.delete("service", "api");
    at_81.iter().for_each(|target| target.expect_gone(&stage.lab));
    stage.delete("service", "web");
    web.iter().for_each(|target| target.expect_gone(&stage.lab));
    stage.daemon.must_run();
}

#[test]
fn every_frontend_of_a_service_is_served() {
    let Some(mut stage) = Stage::build() else { return };
    stage.start_daemon(&stage.control.by_certificate());

    let mut shop = manifest::service("shop", 20);
    let external = Version::BOTH.map(|version| version.address(address::EXTERNAL.nth(7)));
    shop["spec"]["type"] = json!("LoadBalancer");
    shop["spec"]["externalIPs"] = json!(external);
    shop["spec"]["ports"][0]["nodePort"] = json!(30080);
    shop["spec"]["ports"][1]["nodePort"] = json!(30080);
    stage.apply(&[shop]);
    stage.apply(&manifest::slices("shop", &["a1", "b1"]));
    let ingress = Version::BOTH.map(|version| version.address(address::LOAD_BALANCERS.nth(9)));
    let status = json!({"status": {"loadBalancer": {"ingress": ingress.map(|ip| json!({"ip": ip}))}}});
    stage.control.kubectl(
        &["patch", "service", "shop", "--subresource=status", "--type=merge", "-p", &status.to_string()],
        None,
    );

    let mut frontends: Vec<(IpAddr, u16)> = Vec::new();
    for (index, version) in Version::BOTH.into_iter().enumerate() {
        frontends.push((external[index], 80));
        frontends.push((ingress[index], 80));
        frontends.push((version.address(address::NODE_A), 30080));
    }
    for (ip, port) in &frontends {
        for target in Target::both("client", *ip, *port) {
            target.expect(&stage.lab, &["a1", "b1"]);
        }
    }

    // Only this node's pods for what comes from outside, and the client's own address is seen.
    let local = r#"{"spec":{"externalTrafficPolicy":"Local"}}"#;
    stage.control.kubectl(&["patch", "service", "shop", "-p", local], None);
    for (ip, port) in &frontends {
        for target in Target::both("client", *ip, *port) {
            target.expect(&stage.lab, &["a1"]);
        }
    }
    let version = Version::V4;
    let route = Route {
        source: version.address(address_of("client").unwrap()),
        destination: (frontends[0].0, 80).into(),
        transport: Transport::Tcp,
    };
    let answer = stage.lab.ask("client", route, Duration::from_secs(10)).unwrap();
    let Answer::Answered(reply) = answer else { panic!("{answer:?}") };
    assert_eq!(reply.source_seen.ip(), route.source);

    stage.delete("service", "shop");
    for (ip, port) in &frontends {
        for target in Target::both("client", *ip, *port) {
            target.expect_gone(&stage.lab);
        }
    }
}

#[test]
fn a_udp_flow_leaves_an_endpoint_that_goes() {
    let Some(mut stage) = Stage::build() else { return };
    stage.start_daemon(&stage.control.by_certificate());
    stage.apply(&[manifest::service("dns", 30)]);
    stage.apply(&manifest::slices("dns", &["a2"]));
    let [_, udp] = Target::both("a1", manifest::cluster_ip(Version::V4, 30), 80);
    udp.expect(&stage.lab, &["a2"]);

    let source = Version::V4.address(address_of("a1").unwrap());
    let route = Route { source, destination: udp.to, transport: Transport::Udp };
    let patience = Duration::from_secs(2);
    let mut flow = stage.lab.open("a1", route, patience).unwrap().unwrap();
    let by = |answer: Answer| match answer {
        Answer::Answered(reply) => Ok(reply.by),
        other => Err(format!("{other:?}")),
    };
    assert_eq!(by(flow.ask(patience)), Ok("a2".to_owned()));

    // The flow keeps its port, so only a removed tracking entry lets it move.
    stage.apply(&manifest::slices("dns", &["b1"]));
    eventually("the flow reaches the new endpoint", || match by(flow.ask(patience)) {
        Ok(pod) if pod == "b1" => Ok(()),
        other => Err(format!("{other:?}")),
    });
}
