// SPDX-License-Identifier: Apache-2.0

//! Kubernetes Events, as an API server receives them; and that nothing waits for them.

mod daemon;

use std::{net::TcpListener, time::SystemTime};

use daemon::{PATIENCE, in_process, privileged, until};
use netlink::Netns;
use proxy::app::Proxy;
use serde_json::{Value, json};
use testkit::apiserver::{ApiServer, Login};

fn node() -> Option<Netns> {
    privileged(daemon::node())
}

fn service(name: &str, address: &str, check_port: u16) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "shop", "name": name},
        "spec": {
            "type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": check_port,
            "clusterIP": address, "clusterIPs": [address], "ipFamilies": ["IPv4"],
            "ports": [{"protocol": "TCP", "port": 80, "nodePort": 30080, "targetPort": 8080}],
        },
    })
}

fn start(server: &ApiServer, folder: &std::path::Path, netns: &Netns) -> Proxy {
    start_with(server, folder, netns, &["--healthz-port=0", "--metrics-port=0"])
}

fn start_with(server: &ApiServer, folder: &std::path::Path, netns: &Netns, servers: &[&str]) -> Proxy {
    server.put(json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a"},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.5"}]},
    }));
    let kubeconfig = server.kubeconfig(folder, Login::Token);
    let mut args = vec![
        format!("--kubeconfig={}", kubeconfig.display()),
        "--hostname-override=node-a".to_owned(),
        "--cluster-cidr=10.244.0.0/16".to_owned(),
    ];
    args.extend(servers.iter().map(|flag| (*flag).to_owned()));
    in_process(netns, &args)
}

fn find(server: &ApiServer, reason: &str) -> Option<Value> {
    server.events().into_iter().find(|event| event["reason"] == reason)
}

#[test]
fn events_of_a_start_a_taken_port_a_conflict_and_drift() {
    let Some(netns) = node() else { return };
    let server = ApiServer::start();
    let folder = tempfile::tempdir().expect("a folder");
    let _squatter = netns.run(|| TcpListener::bind("192.0.2.5:32001")).expect("entered").expect("free");
    server.put(service("cart", "10.96.0.10", 32001));
    // It claims the node port of the other one.
    server.put(service("late", "10.96.0.11", 32002));
    let proxy = start(&server, folder.path(), &netns);

    until("the start is told", || find(&server, "Starting").is_some());
    let started = find(&server, "Starting").expect("just seen");
    assert_eq!(started["regarding"], json!({"kind": "Node", "apiVersion": "v1", "name": "node-a"}));
    assert_eq!(
        (&started["type"], &started["action"], &started["reportingInstance"]),
        (&json!("Normal"), &json!("StartKubeProxy"), &json!("kube-proxy-node-a"))
    );
    until("the port is told", || find(&server, "FailedToStartServiceHealthcheck").is_some());
    let failed = find(&server, "FailedToStartServiceHealthcheck").expect("just seen");
    assert_eq!(failed["regarding"]["name"], "cart");
    assert!(failed["note"].as_str().is_some_and(|note| note.contains("32001")), "{failed}");
    until("the conflict is told", || find(&server, "FrontendConflict").is_some());

    for family in [netlink::Family::V4, netlink::Family::V4] {
        let mut batch = netlink::nft::Batch::new();
        let table = netlink::nft::TableRef { family, name: "portolan" };
        batch.delete_table(0, table, netlink::nft::Delete::Existing);
        let seen = proxy.status.commits();
        netlink::nft::Nft::open_in(&netns).expect("open").commit(&batch).expect("the table is there");
        proxy.status.commit_after(seen, PATIENCE).expect("it is mended");
    }
    until("the drift is told", || find(&server, "RulesChanged").is_some());
    let told = server.events().iter().filter(|event| event["reason"] == "RulesChanged").count();
    assert_eq!(told, 1, "twice within a minute is once");
    assert_eq!(proxy.metrics.events.with(&["sent"]).value(), server.events().len() as u64);
}

#[test]
fn a_server_that_takes_none_hurts_nothing() {
    let Some(netns) = node() else { return };
    let server = ApiServer::start();
    server.refuse_events(Some(403));
    let folder = tempfile::tempdir().expect("a folder");
    server.put(service("cart", "10.96.0.10", 32001));
    let proxy = start(&server, folder.path(), &netns);
    until("the refusal is counted", || proxy.metrics.events.with(&["refused"]).value() == 1);
    assert!(proxy.status.report(SystemTime::now()).healthy);
    assert!(server.events().is_empty());
}

#[test]
fn a_server_that_cannot_listen_is_told_before_the_end() {
    // The servers are in the namespace of this process.
    let squatter = TcpListener::bind("127.0.0.1:0").expect("free");
    let taken = squatter.local_addr().expect("bound");
    for (name, other, reason) in [
        ("healthz", "metrics", "FailedToStartProxierHealthcheck"),
        ("metrics", "healthz", "FailedToStartMetricServer"),
    ] {
        let Some(netns) = node() else { return };
        let server = ApiServer::start();
        let folder = tempfile::tempdir().expect("a folder");
        let flags = [
            format!("--{name}-bind-address={taken}"),
            format!("--{other}-port=0"),
            "--bind-address-hard-fail".to_owned(),
        ];
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let proxy = start_with(&server, folder.path(), &netns, &flags);
        let ended = proxy.wait().expect_err("it cannot go on");
        assert!(ended.contains(name) && ended.contains(&taken.to_string()), "{ended}");
        until("it is told", || find(&server, reason).is_some());
        let event = find(&server, reason).expect("just seen");
        assert_eq!((&event["type"], &event["regarding"]["kind"]), (&json!("Warning"), &json!("Node")));
        assert_eq!(event["action"], "StartKubeProxy");
    }
}
