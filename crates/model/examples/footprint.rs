// SPDX-License-Identifier: Apache-2.0

//! Prints what a world and its plan take: resident memory and CPU-bound time at `SERVICES x ENDPOINTS`.
//!
//! `cargo run --release -p portolan-model --example footprint -- 10000 10`

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::Instant,
};

use model::{
    Conditions, DetectLocal, Endpoint, EndpointSlice, Family, Kind, PerFamily, Plan, Protocol, Service,
    ServiceKey, ServiceKind, ServicePort, Settings, SliceKey, SlicePort, SourceRanges, TrafficPolicy, Update,
    World,
};

fn main() {
    let mut sizes = std::env::args().skip(1).filter_map(|argument| argument.parse::<u32>().ok());
    let services = sizes.next().unwrap_or(10_000);
    let endpoints = sizes.next().unwrap_or(10);
    let names = Names { namespace: "default".into(), port: "http".into(), nodes: Names::nodes() };

    let mut world = World::new(settings());
    let start = Instant::now();
    let before = resident_kib();
    tell_all(&mut world, &names, services, endpoints);
    report("world", start, before);

    let start = Instant::now();
    let mut plan = Plan::new();
    let dirty = world.take_dirty();
    drop(plan.update(&world, dirty));
    report("world and plan", start, before);

    let start = Instant::now();
    tell_all(&mut world, &names, services, endpoints);
    let dirty = world.take_dirty();
    assert!(dirty.is_empty(), "a relist of the same is no change");
    report("relist of the same", start, before);

    let rounds = 1000;
    let start = Instant::now();
    for round in 0..rounds {
        let count = endpoints + 1 + round % 2;
        world.apply(Update::Slice(names.slice(round % services, count)));
        let dirty = world.take_dirty();
        assert_eq!(plan.update(&world, dirty).frontends.len(), 1);
    }
    println!("one change: {:?}", start.elapsed() / rounds);
}

fn report(what: &str, start: Instant, before: u64) {
    let elapsed = start.elapsed();
    println!("{what}: {elapsed:?}, {} KiB more resident than at the start", resident_kib() - before);
}

fn tell_all(world: &mut World, names: &Names, services: u32, endpoints: u32) {
    for kind in Kind::ALL {
        world.apply(Update::Begin(kind));
        match kind {
            Kind::Service => (0..services).for_each(|n| world.apply(Update::Service(names.service(n)))),
            Kind::EndpointSlice => {
                (0..services).for_each(|n| world.apply(Update::Slice(names.slice(n, endpoints))));
            }
            Kind::Node | Kind::ServiceCidr => {}
        }
        world.apply(Update::End(kind));
    }
}

/// Strings that a source shares between objects.
struct Names {
    namespace: Arc<str>,
    port: Arc<str>,
    nodes: Vec<Arc<str>>,
}

impl Names {
    fn nodes() -> Vec<Arc<str>> {
        (0..100).map(|n| format!("node-{n}").into()).collect()
    }

    fn key(&self, number: u32) -> ServiceKey {
        ServiceKey { namespace: self.namespace.clone(), name: format!("service-{number}").into() }
    }

    fn service(&self, number: u32) -> Service {
        let address = IpAddr::from(Ipv4Addr::from_bits(0x0a60_0000 + number + 1));
        Service {
            key: self.key(number),
            created_secs: 1,
            kind: ServiceKind::ClusterIp,
            cluster_ips: PerFamily { v4: Some(address), v6: None },
            ports: [ServicePort {
                name: self.port.clone(),
                protocol: Protocol::Tcp,
                port: 80,
                node_port: None,
            }]
            .into(),
            external_ips: Box::default(),
            load_balancer_ips: Box::default(),
            source_ranges: SourceRanges::Any,
            internal_policy: TrafficPolicy::Cluster,
            external_policy: TrafficPolicy::Cluster,
            affinity_secs: None,
            health_check_node_port: None,
            tuning: None,
            weights: model::Weights::default(),
        }
    }

    fn slice(&self, number: u32, endpoints: u32) -> EndpointSlice {
        let name = format!("service-{number}-abcde").into();
        let endpoint = |n: u32| Endpoint {
            address: Ipv4Addr::from_bits(0x0a80_0000 + number * 12 + n).into(),
            conditions: Conditions::default(),
            node: Some(self.nodes[(number + n) as usize % self.nodes.len()].clone()),
            zone: None,
            hints: None,
        };
        EndpointSlice {
            key: SliceKey { namespace: self.namespace.clone(), name },
            service: self.key(number),
            family: Family::V4,
            ports: [SlicePort { name: self.port.clone(), protocol: Protocol::Tcp, port: 8080 }].into(),
            endpoints: (0..endpoints).map(endpoint).collect(),
            weight: 1,
            trigger_time_nanos: Some(1),
        }
    }
}

fn settings() -> Settings {
    Settings {
        node_name: "node-0".into(),
        families: PerFamily { v4: true, v6: true },
        node_ip_override: PerFamily::default(),
        detect_local: DetectLocal::Bridge("cni0".into()),
        node_port_addresses: Box::default(),
        masquerade_all: false,
        external_ips: true,
    }
}

fn resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}
