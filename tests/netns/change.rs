// SPDX-License-Identifier: Apache-2.0

//! One mode takes over from another under load: what is new serves, then what is old goes. No connection may fail, no
//! stream may break. Every pair of modes that this kernel has.

use std::{
    net::SocketAddr,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use dataplane::{Dataplane, Mode, Scope, leftovers};
use lab::{Answer, Flow, Lab, Layout, Route, Transport, address::address_of};
use testkit::{
    judge::Flavour,
    objects::Objects,
    scenario::{Config as Settings, Scenario, Variant},
    world::Cluster,
};

use crate::{can_build_a_lab, modes};

const PATIENCE: Duration = Duration::from_secs(20);
/// New connections of each client between two events.
const ROUND: usize = 12;

const WEB: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  clusterIP: 10.96.0.10
  ports:
  - {name: http, port: 80, nodePort: 30080}
status: {loadBalancer: {ingress: [{ip: 198.51.100.1}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints:
- {addresses: [10.244.1.1], nodeName: node-a}
- {addresses: [10.244.2.1], nodeName: node-b}
"#;

/// Who connects where: from outside, from a pod and from the node, to each kind of address.
const LINES: [(&str, &str); 5] = [
    ("client", "10.96.0.10:80"),
    ("client", "192.168.0.1:30080"),
    ("client", "198.51.100.1:80"),
    ("a3", "10.96.0.10:80"),
    ("node-a", "198.51.100.1:80"),
];

pub(crate) fn route(from: &str, to: &str) -> Route {
    let source = address_of(from).expect("it lives in the lab").into();
    Route { source, destination: to.parse().expect("an address"), transport: Transport::Tcp }
}

pub(crate) fn settings() -> Settings {
    let text = "Nothing but its settings.\n-- packets --\n";
    let scenario = Scenario::parse(std::path::Path::new("change.txtar"), text).expect("well formed");
    scenario.script(Variant::Written).expect("well formed").config
}

#[test]
fn modes_take_over_under_load() {
    if !can_build_a_lab() {
        return;
    }
    let modes = modes();
    for (old, new) in modes.iter().flat_map(|old| modes.iter().map(move |new| (*old, *new))) {
        // The variants of one mode are not to be changed between: the kernel obeys both. What a process carries ends with
        // it, so that from the userspace mode one gets away by its end (tests/lifecycle).
        if old.0 != new.0 && old.0 != Mode::Userspace {
            change(old, new);
        }
    }
}

fn change(old: crate::Dataplane, new: crate::Dataplane) {
    let config = settings();
    let (mut cluster, _) = Cluster::new(&config);
    let updates = Objects::new(&config.settings.node_name).apply(WEB).expect("well formed");
    cluster.apply(updates);
    let mut lab = Lab::build(Layout::default()).expect("a lab");
    for name in ["a1", "b1"] {
        let at = SocketAddr::new(address_of(name).expect("a pod").into(), 8080);
        lab.respond(name, Transport::Tcp, at).expect("it answers");
    }
    let serve = |(mode, flavour): crate::Dataplane| -> Box<dyn Dataplane> {
        let config = flavour.config();
        let node = lab.netns("node-a").expect("node-a");
        node.run(|| {
            let mut dataplane = dataplane::open(mode, &config).expect("this kernel can do it");
            dataplane.apply(cluster.plan(), Scope::All).expect("it is written");
            dataplane
        })
        .expect("entered")
    };
    let remove = |keep: &mut Option<leftovers::Keep>| {
        let node = lab.netns("node-a").expect("node-a");
        let mut reports = Vec::new();
        if let Flavour::Tools(variant) = new.1 {
            reports.push(node.run(|| leftovers::unite(variant)).expect("entered"));
        }
        reports.push(node.run(|| leftovers::remove(Some(new.0), keep.as_mut())).expect("entered"));
        let is_well = |it: &leftovers::Report| it.failed.is_empty() && it.harmed.is_empty();
        assert!(reports.iter().all(is_well), "{old:?} to {new:?}: {reports:?}");
    };
    let _first = serve(old);
    let open = |(from, to): &(&str, &str)| lab.open(from, route(from, to), PATIENCE).expect("a machine");
    let mut streams: Vec<Flow> = LINES.iter().map(|line| open(line).expect("a connection")).collect();
    let load = Load::default();
    // Returned, and so kept until the last connection is over: what carries connections ends with it.
    let _second = thread::scope(|scope| {
        let _end = EndOf(&load);
        LINES.iter().for_each(|line| drop(scope.spawn(|| load.run(&lab, line))));
        load.go_on();
        let second = serve(new);
        let mut keep = second.keep();
        load.go_on();
        remove(&mut keep);
        load.go_on();
        // What was open stays open, also when it is looked at again.
        for (stream, line) in streams.iter_mut().zip(LINES) {
            let answer = stream.ask(PATIENCE);
            assert!(matches!(answer, Answer::Answered(_)), "{old:?} to {new:?}, {line:?}: {answer:?}");
        }
        remove(&mut keep);
        load.go_on();
        second
    });
    let failures = load.failures.into_inner().expect("nobody panics while he adds one");
    let count = load.done.iter().map(|done| done.load(Ordering::Relaxed)).sum::<usize>();
    assert!(failures.is_empty(), "{old:?} to {new:?}: {} of {count} failed: {failures:?}", failures.len());
    println!("{old:?} to {new:?}: {count} connections, none failed; {} streams, none broken", streams.len());
}

/// Connections one after the other, until it ends.
#[derive(Default)]
struct Load {
    ended: AtomicBool,
    done: [AtomicUsize; LINES.len()],
    failures: Mutex<Vec<String>>,
}

/// Ends the load when it goes, also after a failed assertion: the scope would wait for the clients for ever.
struct EndOf<'a>(&'a Load);

impl Drop for EndOf<'_> {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Relaxed);
    }
}

impl Load {
    fn run(&self, lab: &Lab, line: &(&str, &str)) {
        let index = LINES.iter().position(|it| it == line).unwrap_or_default();
        let connect = || {
            while !self.ended.load(Ordering::Relaxed) {
                let answer = match Flow::open(route(line.0, line.1), PATIENCE) {
                    Ok(mut flow) => flow.ask(PATIENCE),
                    Err(answer) => answer,
                };
                if !matches!(answer, Answer::Answered(_)) {
                    let mut failures = self.failures.lock().expect("nobody panics while he adds one");
                    failures.push(format!("{line:?}: {answer:?}"));
                }
                self.done[index].fetch_add(1, Ordering::Relaxed);
            }
        };
        lab.netns(line.0).expect("it lives in the lab").run(connect).expect("entered");
    }

    /// Waits until every client has made some more connections.
    fn go_on(&self) {
        let before = self.done.each_ref().map(|done| done.load(Ordering::Relaxed));
        let end = Instant::now() + PATIENCE * 6;
        while self.done.iter().zip(before).any(|(done, before)| done.load(Ordering::Relaxed) < before + ROUND)
        {
            assert!(Instant::now() < end, "the load does not go on: {:?}", self.failures);
            thread::sleep(Duration::from_millis(10));
        }
    }
}
