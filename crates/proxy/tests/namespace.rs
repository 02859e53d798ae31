// SPDX-License-Identifier: Apache-2.0

//! The whole program against a kernel: the binary in a namespace, and the library in a lab with real packets.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant, SystemTime},
};

use dataplane::xtables::{self, Tables as _, Variant};
use lab::{Answer, Lab, Layout, Route, Transport, address};
use netlink::Netns;
use proxy::{
    app::{Proxy, Setup},
    config::check,
    flags::Options,
};

const PATIENCE: Duration = Duration::from_secs(10);

/// `None`, with a word about it, where there are no privileges; but CI must have them.
fn privileged<T>(made: Result<T, impl std::fmt::Display>) -> Option<T> {
    match made {
        Ok(made) => Some(made),
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "this test must have privileges in CI: {error}");
            println!("skipped: {error}");
            None
        }
    }
}

fn until(what: &str, mut check: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !check() {
        assert!(Instant::now() < end, "not in time: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn services(folder: &Path, endpoints: &str) {
    let text = format!(
        "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\n  annotations:\n    \
         portolan.dev/endpoints: \"{endpoints}\"\nspec:\n  type: NodePort\n  clusterIP: 10.96.0.10\n  ports:\n  \
         - {{port: 80, targetPort: 8080, nodePort: 30080}}\n"
    );
    let beside = folder.join("web.saving");
    fs::write(&beside, text).expect("written");
    fs::rename(&beside, folder.join("web.yaml")).expect("renamed");
}

fn start(folder: &Path, netns: &Netns, mode: &str) -> Proxy {
    let source = format!("--source=file:{}", folder.display());
    let mode = format!("--proxy-mode={mode}");
    let args = [
        &source,
        &mode,
        "--hostname-override=node-a",
        "--cluster-cidr=10.244.0.0/16",
        "--healthz-port=0",
        "--metrics-port=0",
    ];
    let (mut options, _) = Options::parse(&args.map(str::to_owned)).expect("valid flags");
    options.complete().expect("no file to fail");
    let checked = check::check(&options.config).expect("valid");
    let flags = options.listing();
    let Options { config, source, master, .. } = options;
    let netns = Some(netns.try_clone().expect("a second handle"));
    Proxy::start(Setup { config, checked, source, master, flags, netns }).expect("it starts")
}

fn pod(name: &str, port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(address::address_of(name).expect("a pod of the lab")), port)
}

/// Who answers on these, asked often enough to meet all of three.
fn answers(lab: &Lab, from: &str, to: (Ipv4Addr, u16)) -> Vec<String> {
    let source = IpAddr::V4(address::address_of(from).expect("a name of the lab"));
    let route = Route { source, destination: to.into(), transport: Transport::Tcp };
    let mut names: Vec<String> = (0..40)
        .map(|_| match lab.ask(from, route, Duration::from_secs(2)).expect("the lab works") {
            Answer::Answered(reply) => reply.by,
            other => format!("{other:?}"),
        })
        .collect();
    names.sort();
    names.dedup();
    names
}

/// The connections of the only service, once the last reading is old enough to be renewed.
fn counted(proxy: &Proxy) -> u64 {
    thread::sleep(Duration::from_millis(1100));
    let mut text = String::new();
    proxy.connections.render(&mut text);
    let line = text.lines().find(|line| line.starts_with("portolan_service_connections_total{"));
    line.and_then(|line| line.rsplit_once(' ')?.1.parse().ok())
        .unwrap_or_else(|| panic!("no count in {text}"))
}

#[test]
fn files_are_served_followed_and_left_in_force() {
    // Somebody else removes it all.
    follow_files("nftables", &|_| {}, &|node| {
        let mut batch = netlink::nft::Batch::new();
        let table = netlink::nft::TableRef { family: netlink::Family::V4, name: "portolan" };
        batch.delete_table(0, table, netlink::nft::Delete::Existing);
        netlink::nft::Nft::open_in(node).expect("open").commit(&batch).expect("the table is there");
    });
}

#[test]
fn iptables_serves_in_both_variants() {
    for variant in Variant::BOTH {
        let restore = |node: &Netns, input: &str| {
            let restored = node.run(|| {
                let mut tools = xtables::find_variant(&xtables::SEARCH, variant).expect("installed");
                tools.restore(model::Family::V4, input)
            });
            restored.expect("a namespace").expect("no failure");
        };
        // The kubelet's hint decides which variant is used, and only that one's tables are harmed.
        let hint = |node: &Netns| restore(node, "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n");
        let harm = |node: &Netns| {
            restore(node, "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-NODEPORTS - [0:0]\nCOMMIT\n");
        };
        follow_files("iptables", &hint, &harm);
    }
}

fn follow_files(mode: &str, prepare: &dyn Fn(&Netns), harm: &dyn Fn(&Netns)) {
    let Some(mut lab) = privileged(Lab::build(Layout::default())) else { return };
    for name in ["a1", "b1", "b2"] {
        lab.respond(name, Transport::Tcp, pod(name, 8080)).expect("it answers");
    }
    let folder = tempfile::tempdir().expect("a folder");
    services(folder.path(), "10.244.1.1:8080, 10.244.2.1:8080, 10.244.2.2:8080");
    let node = lab.netns("node-a").expect("there").try_clone().expect("a second handle");
    prepare(&node);
    let proxy = start(folder.path(), &node, mode);
    proxy.status.commit_after(0, PATIENCE).expect("a first commit");
    assert!(proxy.status.report(SystemTime::now()).healthy);
    let (cluster, port) = ((Ipv4Addr::new(10, 96, 0, 10), 80), (address::NODE_A, 30080));
    assert_eq!(answers(&lab, "a2", cluster), ["a1", "b1", "b2"], "a pod to the cluster IP");
    assert_eq!(answers(&lab, "node-a", cluster), ["a1", "b1", "b2"], "the node to the cluster IP");
    assert_eq!(answers(&lab, "client", port), ["a1", "b1", "b2"], "the outside to the node port");

    // Each connection was counted, three times forty of them; iptables does not count.
    let counts = mode == "nftables";
    assert!(!counts || counted(&proxy) == 120);

    let seen = proxy.status.commits();
    services(folder.path(), "10.244.1.1:8080, 10.244.2.2:8080");
    proxy.status.commit_after(seen, PATIENCE).expect("the change was seen");
    assert_eq!(answers(&lab, "client", port), ["a1", "b2"]);
    assert!(!counts || counted(&proxy) == 160, "also those of the endpoint that is gone");

    // It is noticed and mended.
    harm(&node);
    until("all is back", || answers(&lab, "client", port) == ["a1", "b2"]);
    assert!(proxy.metrics.drift.with(&[]).value() > 0);

    // Stopped: everything stays in force.
    drop(proxy);
    assert_eq!(answers(&lab, "client", port), ["a1", "b2"]);
    services(folder.path(), "10.244.2.1:8080");
    let proxy = start(folder.path(), &node, mode);
    proxy.status.commit_after(0, PATIENCE).expect("a first commit");
    assert_eq!(answers(&lab, "client", port), ["b1"], "what changed meanwhile is followed");
    let text = proxy.metrics.render();
    assert!(
        text.contains("kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"} 1"),
        "{text}"
    );
}

/// Ends the child, however the test ends.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Daemon {
    fn spawn(netns: &Netns, args: &[&str]) -> Daemon {
        // A child starts in the namespace of the thread that made it.
        let spawn = || Command::new(env!("CARGO_BIN_EXE_portolan")).args(args).stderr(Stdio::piped()).spawn();
        Daemon(netns.run(spawn).expect("entered").expect("spawned"))
    }

    /// Its exit code and what it wrote.
    fn stop(mut self, signal: rustix::process::Signal) -> (Option<i32>, String) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, signal).expect("it lives");
        let began = Instant::now();
        let status = self.0.wait().expect("it ends");
        assert!(began.elapsed() < Duration::from_secs(5), "a stop is prompt");
        let mut text = String::new();
        self.0.stderr.take().expect("piped").read_to_string(&mut text).expect("UTF-8");
        (status.code(), text)
    }
}

fn run_in(netns: &Netns, args: &[&str]) -> (Option<i32>, String) {
    let run = || Command::new(env!("CARGO_BIN_EXE_portolan")).args(args).output();
    let output = netns.run(run).expect("entered").expect("it runs");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

fn fetch(netns: &Netns, port: u16, path: &str) -> Option<String> {
    exchange(netns, port, &format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
}

fn exchange(netns: &Netns, port: u16, request: &str) -> Option<String> {
    netns
        .run(|| {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
            stream.write_all(request.as_bytes()).ok()?;
            let mut text = String::new();
            stream.read_to_string(&mut text).ok()?;
            Some(text)
        })
        .expect("entered")
}

#[test]
fn the_daemon_lives_and_dies_well() {
    let Some(netns) = privileged(Netns::new()) else { return };
    netns
        .run(|| {
            let mut route = netlink::route::Route::open()?;
            let lo = route.link_index("lo")?;
            route.add_address(lo, [192, 0, 2, 5].into(), 32)?;
            route.set_up(lo, true)
        })
        .expect("entered")
        .expect("an address to serve on");
    let folder = tempfile::tempdir().expect("a folder");
    services(folder.path(), "10.244.1.1:8080");
    let source = format!("--source=file:{}", folder.path().display());
    let daemon = Daemon::spawn(&netns, &[&source, "--profiling"]);
    until("/healthz is 200", || {
        fetch(&netns, 10256, "/healthz").is_some_and(|text| text.starts_with("HTTP/1.1 200"))
    });
    let health = fetch(&netns, 10256, "/healthz").expect("it answers");
    assert!(health.contains("\"nodeEligible\":true,\"healthy\":true"), "{health}");
    assert!(fetch(&netns, 10256, "/livez").expect("it answers").starts_with("HTTP/1.1 200"));
    assert!(fetch(&netns, 10249, "/proxyMode").expect("it answers").ends_with("nftables"));
    let metrics = fetch(&netns, 10249, "/metrics").expect("it answers");
    assert!(metrics.contains("\nportolan_frontends 2\n"), "{metrics}");
    let (code, dump) = run_in(&netns, &["dump"]);
    assert!(code == Some(0) && dump.contains("10.96.0.10") && dump.contains("10.244.1.1"), "{dump}");

    // The log becomes more verbose while it runs.
    let put = "PUT /debug/flags/v HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1\r\n\r\n4";
    let answer = exchange(&netns, 10249, put).expect("it answers");
    assert!(answer.ends_with("verbosity to 4\n"), "{answer}");
    services(folder.path(), "10.244.1.1:8080, 10.244.1.2:8080");
    until("the change is in force", || run_in(&netns, &["dump"]).1.contains("10.244.1.2"));
    for path in ["/readyz", "/healthz"] {
        assert!(fetch(&netns, 10256, path).expect("it answers").starts_with("HTTP/1.1 200"), "{path}");
    }

    // A bad document is named, and hurts nobody else.
    fs::write(folder.path().join("bad.yaml"), "kind: Service\napiVersion: v1\nmetadata: {name: x}\nspec: {clusterIP: nonsense, ports: [{port: 1}]}\n")
        .expect("written");
    until("the problem is counted", || {
        fetch(&netns, 10249, "/metrics").is_some_and(|text| text.contains("portolan_bad_objects_total{"))
    });
    assert!(fetch(&netns, 10256, "/healthz").expect("it answers").starts_with("HTTP/1.1 200"));

    let (code, log) = daemon.stop(rustix::process::Signal::TERM);
    assert_eq!(code, Some(0), "{log}");
    assert!(
        log.contains("all services are in force")
            && log.contains("\"programmed\"")
            && log.contains("SIGTERM")
            && log.contains("nonsense"),
        "{log}"
    );
    assert!(run_in(&netns, &["dump"]).1.contains("10.244.1.1"), "stopping removes nothing");
    let (code, text) = run_in(&netns, &["--cleanup"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(!run_in(&netns, &["dump"]).1.contains("10.244.1.1"), "cleanup does");
    let interrupted = Daemon::spawn(&netns, &[&source]);
    until("it is there", || fetch(&netns, 10256, "/livez").is_some());
    assert_eq!(interrupted.stop(rustix::process::Signal::INT).0, Some(0));
}

#[test]
fn the_demo_succeeds_and_leaves_a_transcript() {
    let Some(_) = privileged(Netns::new()) else { return };
    let output = Command::new(env!("CARGO_BIN_EXE_portolan"))
        .args(["demo", "--seconds", "3"])
        .output()
        .expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(!text.contains('\x1b'), "no terminal, no colours");
    for words in
        ["b1 is taken out", "without b1", "b1 is put back", ": 0 failed, 0 went to b1 after it had gone"]
    {
        assert!(text.contains(words), "{words:?} is missing in\n{text}");
    }
}
