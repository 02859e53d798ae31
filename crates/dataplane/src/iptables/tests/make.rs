// SPDX-License-Identifier: Apache-2.0

//! Clusters by hand and at random. Plans come from the model, since the chains of a service port stand for what the
//! model makes of one service, and not for any decisions.

use std::sync::Arc;

use model::{
    Changes, Conditions, DetectLocal, Endpoint, EndpointSlice, Family, Node, PerFamily, Plan, Protocol,
    Service, ServiceKey, ServiceKind, ServicePort, Settings, SliceKey, SlicePort, SourceRanges,
    TrafficPolicy, Update, World,
};
use proptest::{prelude::*, sample::select};

use crate::nftables::tests::make::{ip, net, node_ip};

/// A world, and the plan that follows it.
pub(crate) struct Cluster {
    world: World,
    pub(crate) plan: Plan,
}

impl Cluster {
    pub(crate) fn new(detect_local: DetectLocal) -> Cluster {
        let mut world = World::new(Settings {
            node_name: "here".into(),
            families: PerFamily { v4: true, v6: true },
            node_ip_override: PerFamily::default(),
            detect_local,
            node_port_addresses: Box::default(),
            masquerade_all: false,
            external_ips: true,
        });
        world.apply(Update::Node(Node {
            name: "here".into(),
            addresses: PerFamily::from_fn(|family| Some(node_ip(family))),
            pod_cidrs: PerFamily::from_fn(|family| Some(net(family, "10.244.0.0/24"))),
            zone: None,
            eligible: true,
        }));
        let mut cluster = Cluster { world, plan: Plan::new() };
        cluster.update([]);
        cluster
    }

    pub(crate) fn update(&mut self, updates: impl IntoIterator<Item = Update>) -> Changes {
        updates.into_iter().for_each(|update| self.world.apply(update));
        let dirty = self.world.take_dirty();
        self.plan.update(&self.world, dirty)
    }
}

/// One service, in few words.
#[derive(Clone, Debug)]
pub(crate) struct Sketch {
    pub(crate) number: u8,
    pub(crate) protocol: Protocol,
    pub(crate) node_port: bool,
    pub(crate) load_balancer: bool,
    pub(crate) external_ip: bool,
    pub(crate) ranges: bool,
    pub(crate) internal: TrafficPolicy,
    pub(crate) external: TrafficPolicy,
    pub(crate) affinity_secs: Option<u32>,
    pub(crate) unnamed: bool,
}

/// A plain one.
pub(crate) fn sketch(number: u8) -> Sketch {
    Sketch {
        number,
        protocol: Protocol::Tcp,
        node_port: false,
        load_balancer: false,
        external_ip: false,
        ranges: false,
        internal: TrafficPolicy::Cluster,
        external: TrafficPolicy::Cluster,
        affinity_secs: None,
        unnamed: false,
    }
}

fn key(number: u8) -> ServiceKey {
    ServiceKey { namespace: "default".into(), name: format!("web-{number}").into() }
}

impl Sketch {
    fn port_name(&self) -> Arc<str> {
        if self.unnamed { "".into() } else { "http".into() }
    }

    pub(crate) fn service(&self) -> Update {
        let of_both = |text: String| Family::BOTH.map(|family| ip(family, &text));
        let address = |asked: bool, prefix: &str| -> Box<[_]> {
            if asked { of_both(format!("{prefix}.{}", self.number)).into() } else { Box::default() }
        };
        let load_balancer_ips = address(self.load_balancer, "203.0.113");
        let ranges =
            Family::BOTH.iter().flat_map(|f| [net(*f, "198.51.100.0/24"), net(*f, "192.168.7.0/24")]);
        Update::Service(Service {
            key: key(self.number),
            created_secs: 0,
            kind: if self.load_balancer { ServiceKind::LoadBalancer } else { ServiceKind::NodePort },
            cluster_ips: PerFamily::from_fn(|family| Some(ip(family, &format!("10.96.0.{}", self.number)))),
            ports: [ServicePort {
                name: self.port_name(),
                protocol: self.protocol,
                port: 80,
                node_port: self.node_port.then_some(30_000 + u16::from(self.number)),
            }]
            .into(),
            external_ips: address(self.external_ip, "192.0.2"),
            load_balancer_ips,
            source_ranges: match self.ranges {
                true => SourceRanges::only(ranges.collect::<Vec<_>>()),
                false => SourceRanges::Any,
            },
            internal_policy: self.internal,
            external_policy: self.external,
            affinity_secs: self.affinity_secs,
            tuning: None,
            weights: model::Weights::default(),
            health_check_node_port: Some(31_000 + u16::from(self.number)),
        })
    }

    /// A slice of each family with these hosts; those below 100 run here.
    pub(crate) fn slices(&self, hosts: &[(u8, Conditions)]) -> Vec<Update> {
        let of_family = |family: Family| {
            let name = format!("web-{}-{family}", self.number);
            let endpoint = |(host, conditions): &(u8, Conditions)| {
                let here = *host < 100;
                Endpoint {
                    address: ip(family, &format!("10.244.{}.{host}", u8::from(!here))),
                    conditions: *conditions,
                    node: Some(if here { "here" } else { "there" }.into()),
                    zone: None,
                    hints: None,
                }
            };
            Update::Slice(EndpointSlice {
                key: SliceKey { namespace: "default".into(), name: name.into() },
                service: key(self.number),
                family,
                ports: [SlicePort { name: self.port_name(), protocol: self.protocol, port: 8080 }].into(),
                endpoints: hosts.iter().map(endpoint).collect(),
                weight: 1,
                trigger_time_nanos: None,
            })
        };
        Family::BOTH.map(of_family).into()
    }
}

/// Endpoints that are ready.
pub(crate) fn ready(hosts: &[u8]) -> Vec<(u8, Conditions)> {
    hosts.iter().map(|host| (*host, Conditions::default())).collect()
}

/// A cluster with one of everything.
pub(crate) fn sampler() -> Cluster {
    let mut cluster = Cluster::new(DetectLocal::NodeCidr);
    let plain = sketch(1);
    let sticky = Sketch { affinity_secs: Some(10_800), protocol: Protocol::Udp, unnamed: true, ..sketch(2) };
    let everywhere = Sketch {
        node_port: true,
        load_balancer: true,
        external_ip: true,
        ranges: true,
        external: TrafficPolicy::Local,
        ..sketch(3)
    };
    let none_here =
        Sketch { node_port: true, external_ip: true, external: TrafficPolicy::Local, ..sketch(4) };
    let empty = Sketch { node_port: true, load_balancer: true, ranges: true, ..sketch(5) };
    let inward = Sketch { internal: TrafficPolicy::Local, protocol: Protocol::Sctp, ..sketch(6) };
    let mut updates = Vec::new();
    for (sketch, hosts) in [
        (plain, &[1, 101, 102][..]),
        (sticky, &[1, 101]),
        (everywhere, &[1, 2, 101]),
        (none_here, &[101]),
        (empty, &[]),
        (inward, &[101]),
    ] {
        updates.push(sketch.service());
        updates.extend(sketch.slices(&ready(hosts)));
    }
    cluster.update(updates);
    cluster
}

/// Something that happens to one of a few services.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Service(Sketch),
    Slices(Sketch, Vec<(u8, Conditions)>),
    Gone(u8),
}

impl Event {
    pub(crate) fn updates(&self) -> Vec<Update> {
        match self {
            Event::Service(sketch) => vec![sketch.service()],
            Event::Slices(sketch, hosts) => sketch.slices(hosts),
            Event::Gone(number) => vec![Update::ServiceGone(key(*number))],
        }
    }
}

pub(crate) fn detectors() -> impl Strategy<Value = DetectLocal> {
    select(vec![
        DetectLocal::NodeCidr,
        DetectLocal::ClusterCidr(PerFamily::default()),
        DetectLocal::Bridge("cni0".into()),
        DetectLocal::InterfacePrefix("veth".into()),
    ])
}

fn sketches() -> impl Strategy<Value = Sketch> {
    let policy = || select(vec![TrafficPolicy::Cluster, TrafficPolicy::Local]);
    let shape = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let rest =
        (policy(), policy(), select(vec![None, None, Some(60), Some(10_800)]), select(&Protocol::ALL[..]));
    (1u8..6, shape, rest).prop_map(
        |(number, (node_port, load_balancer, external_ip, ranges, unnamed), rest)| {
            let (internal, external, affinity_secs, protocol) = rest;
            Sketch {
                number,
                protocol,
                node_port,
                load_balancer,
                external_ip,
                ranges,
                internal,
                external,
                affinity_secs,
                unnamed,
            }
        },
    )
}

pub(crate) fn events() -> impl Strategy<Value = Event> {
    let conditions = select(vec![
        Conditions::default(),
        Conditions::default(),
        Conditions { ready: false, serving: true, terminating: true },
        Conditions { ready: false, serving: false, terminating: false },
    ]);
    let hosts = prop::collection::btree_map(select(vec![1u8, 2, 3, 101, 102, 103, 104]), conditions, 0..6);
    prop_oneof![
        3 => sketches().prop_map(Event::Service),
        4 => (sketches(), hosts).prop_map(|(sketch, hosts)| Event::Slices(sketch, hosts.into_iter().collect())),
        1 => (1u8..6).prop_map(Event::Gone),
    ]
}
