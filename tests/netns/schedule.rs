// SPDX-License-Identifier: Apache-2.0

//! The schedulers of the kernel's IPVS by real connections: each serves, turns are exact, weights are kept, the least busy
//! gets the next connection, a client's hash sticks, and packets go one by one where that is asked for.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{SocketAddr, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use dataplane::{Dataplane, Mode, Scope};
use lab::{Answer, Flow, Lab, Layout, Transport, address::address_of};
use model::Scheduler;
use netlink::ipvs::{HeldDest, Ipvs, ServiceKey};
use testkit::{objects::Objects, pace::slowness, world::Cluster};

use crate::{
    can_build_a_lab,
    change::{route, settings},
    modes,
};

const PATIENCE: Duration = Duration::from_secs(5);
/// The endpoints of every service.
const PODS: [&str; 3] = ["a1", "a2", "b1"];

/// A node in ipvs mode with one service, of TCP and UDP, for each of the annotations, at 10.96.0.1 and on.
struct Ground {
    lab: Lab,
    warnings: Vec<String>,
    _dataplane: Box<dyn Dataplane>,
}

impl Ground {
    /// `None` where this kernel has no IPVS, or the mode was not asked for.
    fn build(annotations: &[String]) -> Option<Ground> {
        let wanted = modes().into_iter().find(|(mode, _)| *mode == Mode::Ipvs);
        let (mode, flavour) = wanted.filter(|_| can_build_a_lab())?;
        let objects: Vec<String> = (1..).zip(annotations).map(|(host, it)| service(host, it)).collect();
        let config = settings();
        let (mut cluster, _) = Cluster::new(&config);
        let updates =
            Objects::new(&config.settings.node_name).apply(&objects.join("---")).expect("well formed");
        cluster.apply(updates);
        let mut lab = Lab::build(Layout::default()).expect("a lab");
        for name in PODS {
            let at = SocketAddr::new(address_of(name).expect("a pod").into(), 8080);
            lab.respond(name, Transport::Tcp, at).expect("it answers");
        }
        let serve = || {
            let mut dataplane = dataplane::open(mode, &flavour.config()).expect("this kernel can do it");
            let applied = dataplane.apply(cluster.plan(), Scope::All).expect("it is written");
            (dataplane, applied.warnings)
        };
        let (_dataplane, warnings) = lab.netns("node-a").expect("node-a").run(serve).expect("entered");
        Some(Ground { lab, warnings, _dataplane })
    }

    fn ipvs(&self) -> Ipvs {
        Ipvs::open_in(self.lab.netns("node-a").expect("node-a")).expect("a connection")
    }

    /// A new connection to a service, and who answers.
    #[track_caller]
    fn connect(&self, from: &str, host: u8) -> (Flow, String) {
        let patience = PATIENCE * slowness();
        let route = route(from, &format!("10.96.0.{host}:80"));
        let mut flow = self.lab.open(from, route, patience).expect("a machine").expect("a connection");
        match flow.ask(patience) {
            Answer::Answered(reply) => (flow, reply.by),
            other => panic!("10.96.0.{host}: {other:?}"),
        }
    }

    /// So many connections one after the other, by who answered.
    #[track_caller]
    fn spread(&self, from: &str, host: u8, count: usize) -> BTreeMap<String, usize> {
        let mut spread = BTreeMap::new();
        for _ in 0..count {
            *spread.entry(self.connect(from, host).1).or_default() += 1;
        }
        spread
    }
}

fn service(host: u8, annotations: &str) -> String {
    let endpoint = |pod: &&str| {
        let (ip, node) = (address_of(pod).expect("a pod"), &pod[..1]);
        format!("- {{addresses: [{ip}], nodeName: node-{node}}}\n")
    };
    let endpoints: String = PODS.iter().map(endpoint).collect();
    format!(
        r#"
apiVersion: v1
kind: Service
metadata: {{name: s{host}, namespace: default, annotations: {{{annotations}}}}}
spec:
  clusterIP: 10.96.0.{host}
  ports: [{{name: tcp, port: 80}}, {{name: udp, port: 80, protocol: UDP}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: s{host}-1, namespace: default, labels: {{kubernetes.io/service-name: s{host}}}}}
addressType: IPv4
ports: [{{name: tcp, port: 8080}}, {{name: udp, port: 8080, protocol: UDP}}]
endpoints:
{endpoints}"#
    )
}

/// The annotations of a service that asks for this scheduler.
fn scheduler(name: &str) -> String {
    format!("portolan.dev/scheduler: {name}")
}

fn shares<const N: usize>(shares: [(&str, usize); N]) -> BTreeMap<String, usize> {
    shares.map(|(name, count)| (name.to_owned(), count)).into()
}

#[test]
fn every_scheduler_of_the_kernel_serves() {
    let names: Vec<&str> = Scheduler::ALL.iter().filter_map(|scheduler| scheduler.kernel_name()).collect();
    let annotations: Vec<String> = names.iter().map(|name| scheduler(name)).collect();
    let Some(ground) = Ground::build(&annotations) else { return };
    let held: BTreeSet<String> =
        ground.ipvs().services().expect("listed").into_iter().map(|held| held.service.scheduler).collect();
    // Debian's kernel for clouds may lack some; which, is told.
    let is_absent =
        |name: &str| ground.warnings.iter().any(|it| it.contains(&format!("has not ip_vs_{name};")));
    let wanted: BTreeSet<String> =
        names.iter().filter(|name| !is_absent(name)).map(|name| (*name).to_owned()).collect();
    assert_eq!(held, wanted, "{:?}", ground.warnings);
    assert!(wanted.len() > 10, "{:?}", ground.warnings);
    for (host, name) in (1..).zip(&names) {
        let (_, by) = ground.connect("a3", host);
        println!("{name}: {by} answers");
    }
}

/// Round robin gives each endpoint the same, and weighted round robin what its weight says: exactly.
#[test]
fn turns_and_weights_are_exact() {
    let weighted = scheduler("wrr") + ", portolan.dev/weights: \"10.244.1.1=3, 10.244.1.2=2, *=1\"";
    let Some(ground) = Ground::build(&[scheduler("rr"), weighted]) else { return };
    for from in ["a3", "client"] {
        assert_eq!(ground.spread(from, 1, 12), shares([("a1", 4), ("a2", 4), ("b1", 4)]), "rr from {from}");
        assert_eq!(ground.spread(from, 2, 12), shares([("a1", 6), ("a2", 4), ("b1", 2)]), "wrr from {from}");
    }
}

/// Who has connections open gets no other before all have as many.
#[test]
fn the_least_busy_gets_the_next_connection() {
    let names = ["lc", "wlc", "sed", "nq"];
    let Some(ground) = Ground::build(&names.map(scheduler)) else { return };
    for (host, name) in (1..).zip(names) {
        let mut kept: Vec<(Flow, String)> = Vec::new();
        for round in 1..=2 {
            for _ in PODS {
                kept.push(ground.connect("a3", host));
            }
            let busy = PODS.map(|pod| kept.iter().filter(|(_, by)| by == pod).count());
            assert_eq!(busy, [round; 3], "{name}: open connections of {PODS:?}");
        }
        // Two of one endpoint end: the next two are its own.
        kept.retain(|(_, by)| by != "a2");
        ground.wait_until_idle(host, "a2");
        for _ in 0..2 {
            kept.push(ground.connect("a3", host));
        }
        let busy = PODS.map(|pod| kept.iter().filter(|(_, by)| by == pod).count());
        assert_eq!(busy, [2; 3], "{name}: open connections of {PODS:?} after two had ended");
    }
}

impl Ground {
    fn key(host: u8, transport: Transport) -> ServiceKey {
        let protocol = if transport == Transport::Udp { 17 } else { 6 };
        ServiceKey::At { protocol, address: [10, 96, 0, host].into(), port: 80 }
    }

    /// The kernel has seen the end of all connections of this pod. Those that are over still count a little.
    fn wait_until_idle(&self, host: u8, pod: &str) {
        let address = std::net::IpAddr::from(address_of(pod).expect("a pod"));
        let end = Instant::now() + PATIENCE * slowness();
        loop {
            let dests = self.ipvs().dests(Ground::key(host, Transport::Tcp)).expect("listed");
            let of_pod = dests.iter().find(|held| held.dest.key.address == address).expect("it is there");
            if of_pod.active == 0 {
                return;
            }
            assert!(Instant::now() < end, "{pod} still has connections: {of_pod:?}");
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// A client stays with its endpoint, whatever port it comes from; other clients may have others.
#[test]
fn a_hash_of_the_client_sticks() {
    let Some(ground) = Ground::build(&["sh", "mh"].map(scheduler)) else { return };
    for (host, name) in [(1, "sh"), (2, "mh")] {
        let mut met = BTreeSet::new();
        for from in ["a3", "b2", "c1", "client", "client2", "node-b"] {
            let spread = ground.spread(from, host, 6);
            assert_eq!(spread.len(), 1, "{name}: {from} met {spread:?}");
            met.extend(spread.into_keys());
        }
        println!("{name}: six clients met {met:?}");
        assert!(met.len() > 1, "{name}: all clients met {met:?}");
    }
}

/// A flow stays together; with `ops` each of its packets has its turn.
#[test]
fn packets_of_one_sender_are_spread_one_by_one() {
    const PACKETS: u64 = 12;
    let one_packet = scheduler("rr") + ", portolan.dev/scheduler-flags: ops";
    let Some(ground) = Ground::build(&[scheduler("rr"), one_packet]) else { return };
    let counts = [1, 2].map(|host| {
        let send = || {
            let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
            for _ in 0..PACKETS {
                // Nobody answers, and a refusal of the packet before is not this one's.
                let _ = socket.send_to(b"one", (format!("10.96.0.{host}"), 80));
            }
        };
        ground.lab.netns("a3").expect("a pod").run(send).expect("entered");
        let count = |held: &HeldDest| held.counters.packets_in;
        let end = Instant::now() + PATIENCE * slowness();
        // The kernel adds up every two seconds.
        loop {
            let dests = ground.ipvs().dests(Ground::key(host, Transport::Udp)).expect("listed");
            let mut counts: Vec<u64> = dests.iter().map(count).collect();
            if counts.iter().sum::<u64>() == PACKETS || Instant::now() > end {
                counts.sort_unstable();
                return counts;
            }
            thread::sleep(Duration::from_millis(100));
        }
    });
    assert_eq!(counts, [vec![0, 0, PACKETS], vec![PACKETS / 3; 3]]);
}
