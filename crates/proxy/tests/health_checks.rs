// SPDX-License-Identifier: Apache-2.0

//! Health-check node ports, asked over HTTP as a load balancer asks them, in a namespace of their own.

mod daemon;

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    time::{Duration, SystemTime},
};

use daemon::{in_process, privileged, until};
use netlink::Netns;
use proxy::app::Proxy;

/// With a second address, and one of the other family.
fn node() -> Option<Netns> {
    let netns = privileged(daemon::node())?;
    let addressed = netns.run(|| {
        let mut route = netlink::route::Route::open()?;
        let lo = route.link_index("lo")?;
        route.add_address(lo, [198, 51, 100, 5].into(), 32)?;
        route.add_address(lo, "2001:db8::5".parse().expect("valid"), 128)
    });
    addressed.expect("entered").expect("addresses to serve on");
    Some(netns)
}

fn start(folder: &Path, netns: &Netns, node_ports: &str) -> Proxy {
    let args = [
        format!("--source=file:{}", folder.display()),
        format!("--nodeport-addresses={node_ports}"),
        "--hostname-override=node-a".to_owned(),
        "--cluster-cidr=10.244.0.0/16".to_owned(),
        "--healthz-port=0".to_owned(),
        "--metrics-port=0".to_owned(),
    ];
    in_process(netns, &args)
}

/// A service with this health-check node port, and its endpoints: address, node, ready.
fn write(folder: &Path, name: &str, port: u16, endpoints: &[(&str, &str, bool)]) {
    let last = name.len();
    let mut text = format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\nspec:\n  type: LoadBalancer\n  \
         externalTrafficPolicy: Local\n  healthCheckNodePort: {port}\n  clusterIPs: [10.96.0.{last}, \"fd00:10:96::{last}\"]\n  \
         clusterIP: 10.96.0.{last}\n  ipFamilies: [IPv4, IPv6]\n  ports:\n  - {{name: a, port: 80, targetPort: 8080, nodePort: {}}}\n  \
         - {{name: b, port: 81, targetPort: 8081, nodePort: {}}}\n---\n\
         apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: {name}-1\n  namespace: shop\n  labels: {{kubernetes.io/service-name: {name}}}\n\
         addressType: IPv4\nports: [{{name: a, port: 8080}}, {{name: b, port: 8081}}]\nendpoints:\n",
        30000 + last,
        31000 + last,
    );
    for (address, node, ready) in endpoints {
        text.push_str(&format!(
            "- {{addresses: [{address}], nodeName: {node}, conditions: {{ready: {ready}}}}}\n"
        ));
    }
    if endpoints.is_empty() {
        text = text.replace("endpoints:\n", "endpoints: []\n");
    }
    let beside = folder.join("saving");
    fs::write(&beside, text).expect("written");
    fs::rename(&beside, folder.join(format!("{name}.yaml"))).expect("renamed");
}

fn ask(netns: &Netns, to: &str) -> Option<String> {
    let address: SocketAddr = to.parse().expect("an address");
    let fetch = || {
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(2)).ok()?;
        write!(stream, "GET /any/path HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        Some(text)
    };
    netns.run(fetch).expect("entered")
}

fn has(answer: Option<String>, code: &str, weight: u32) -> bool {
    answer.is_some_and(|text| {
        let weight = format!("x-load-balancing-endpoint-weight: {weight}\r\n");
        text.starts_with(&format!("HTTP/1.1 {code}")) && text.to_lowercase().contains(&weight)
    })
}

#[test]
fn a_load_balancer_finds_the_nodes_with_endpoints() {
    let Some(netns) = node() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    write(
        folder.path(),
        "web",
        32001,
        &[
            ("10.244.1.1", "node-a", true),
            ("10.244.1.2", "node-a", true),
            ("10.244.1.3", "node-a", false),
            ("10.244.2.1", "node-b", true),
        ],
    );
    let proxy = start(folder.path(), &netns, "0.0.0.0/0,::/0");
    let (v4, v6) = ("192.0.2.5:32001", "[2001:db8::5]:32001");
    until("it counts local ready endpoints once each", || has(ask(&netns, v4), "200", 2));
    let answer = ask(&netns, "127.0.0.1:32001").expect("a wildcard serves loopback too");
    assert!(answer.contains("content-type: application/json\r\n"), "{answer}");
    assert!(answer.contains("x-content-type-options: nosniff\r\n"), "{answer}");
    assert!(
        answer.ends_with(
            "\r\n\r\n{\n\t\"service\": {\n\t\t\"namespace\": \"shop\",\n\t\t\"name\": \"web\"\n\t},\n\t\
             \"localEndpoints\": 2,\n\t\"serviceProxyHealthy\": true\n}"
        ),
        "{answer}"
    );
    // The other family has no endpoints of its own.
    assert!(has(ask(&netns, v6), "503", 0), "{:?}", ask(&netns, v6));

    // While programming fails no traffic is asked for, endpoints or not.
    proxy.status.failed(SystemTime::now(), "a test".to_owned());
    let answer = ask(&netns, v4).expect("it answers");
    assert!(
        answer.starts_with("HTTP/1.1 503") && answer.contains("\"serviceProxyHealthy\": false"),
        "{answer}"
    );
    proxy.status.programmed(SystemTime::now());

    // A count changes: the same listener, so a connection that is open stays so.
    let kept = netns.run(|| TcpStream::connect("192.0.2.5:32001")).expect("entered").expect("open");
    write(folder.path(), "web", 32001, &[("10.244.2.1", "node-b", true)]);
    until("no local endpoint is left", || has(ask(&netns, v4), "503", 0));
    assert!(is_open(&kept));

    // Another port: the old one is closed, with all its connections.
    write(folder.path(), "web", 32002, &[("10.244.1.1", "node-a", true)]);
    until("the new port is open", || has(ask(&netns, "192.0.2.5:32002"), "200", 1));
    assert_eq!(ask(&netns, v4), None);
    until("its connections are closed", || !is_open(&kept));

    // Gone with its service.
    fs::remove_file(folder.path().join("web.yaml")).expect("it is there");
    until("the port is closed", || ask(&netns, "192.0.2.5:32002").is_none());
    // Counted a moment after it is closed.
    until("no listener is counted", || proxy.metrics.check_listeners.with(&["IPv4"]).value() == 0.0);
    drop(proxy);
}

fn is_open(mut stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("a socket");
    let mut byte = [0];
    matches!(stream.read(&mut byte), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
}

#[test]
fn only_node_port_addresses_listen_and_a_taken_port_is_taken_later() {
    let Some(netns) = node() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let squatter = netns.run(|| TcpListener::bind("192.0.2.5:32001")).expect("entered").expect("free");
    write(folder.path(), "web", 32001, &[("10.244.1.1", "node-a", true)]);
    // Another service, in the same file source, is not hurt.
    write(folder.path(), "other", 32003, &[("10.244.1.1", "node-a", true)]);
    let proxy = start(folder.path(), &netns, "192.0.2.0/24");
    until("the other service is served", || has(ask(&netns, "192.0.2.5:32003"), "200", 1));
    assert_eq!(ask(&netns, "198.51.100.5:32003"), None, "an address that serves no node ports");
    assert_eq!(ask(&netns, "127.0.0.1:32003"), None);
    until("the failure is counted", || proxy.metrics.check_failures.with(&["IPv4"]).value() == 1);
    assert!(proxy.status.report(SystemTime::now()).healthy, "programming is not hurt");
    drop(squatter);
    until("the port is open at last", || has(ask(&netns, "192.0.2.5:32001"), "200", 1));
    assert_eq!(proxy.metrics.check_failures.with(&["IPv4"]).value(), 1, "told once, not at each attempt");

    // Stopped: the ports are free again.
    drop(proxy);
    until("nobody listens", || netns.run(|| TcpListener::bind("192.0.2.5:32001").is_ok()).expect("entered"));
}
