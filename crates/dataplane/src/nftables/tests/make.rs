// SPDX-License-Identifier: Apache-2.0

//! Plans by hand and at random.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    num::NonZeroU32,
    sync::Arc,
};

use ipnet::IpNet;
use model::{
    Address, Affinity, Algorithm, Backend, Changes, Decision, Family, Forward, Frontend, Masquerade,
    NodePortScope, PerFamily, Plan, PlanBuilder, PodTraffic, Pool, Protocol, Reach, Role, Scheduler,
    SchedulerFlags, ServiceKey, ServicePortName, Tuning, Verdict,
};
use proptest::{prelude::*, sample::select, strategy::ValueTree, test_runner::TestRunner};

/// A plan that can be changed.
#[derive(Clone, Debug)]
pub(super) struct Draft {
    pub(super) frontends: BTreeMap<Frontend, Decision>,
    pub(super) node_wide: PerFamily<NodeWide>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct NodeWide {
    pub(super) pods: Option<PodTraffic>,
    pub(super) scope: NodePortScope,
    pub(super) cidrs: Vec<IpNet>,
}

impl Draft {
    pub(super) fn plan(&self) -> Plan {
        let mut builder = PlanBuilder::new();
        for family in Family::BOTH {
            let NodeWide { pods, scope, cidrs } = self.node_wide[family].clone();
            builder = builder.node_ports(family, scope);
            builder = cidrs.into_iter().fold(builder, PlanBuilder::service_cidr);
            builder = pods.into_iter().fold(builder, |builder, pods| builder.pod_traffic(family, pods));
        }
        let frontends = self.frontends.clone().into_iter();
        frontends.fold(builder, |builder, (frontend, decision)| builder.frontend(frontend, decision)).build()
    }

    /// What changed since `before`, as a plan's update would tell.
    pub(super) fn changes_since(&self, before: &Draft) -> Changes {
        let all: BTreeSet<Frontend> = self.frontends.keys().chain(before.frontends.keys()).copied().collect();
        let differs = |frontend: &Frontend| self.frontends.get(frontend) != before.frontends.get(frontend);
        let (is, was) = (self.plan(), before.plan());
        let cluster_ips = |plan: &Plan| plan.cluster_ips().collect::<BTreeSet<IpAddr>>();
        let locals = |plan: &Plan| plan.local_backends().collect::<BTreeSet<IpAddr>>();
        Changes {
            frontends: all.into_iter().filter(differs).collect(),
            cluster_ips: (&cluster_ips(&is) ^ &cluster_ips(&was)).into_iter().collect(),
            local_backends: (&locals(&is) ^ &locals(&was)).into_iter().collect(),
            node_wide: self.node_wide != before.node_wide,
            ..Changes::default()
        }
    }
}

/// The node's own address, the pods' range and so on, in one family.
pub(crate) fn ip(family: Family, text: &str) -> IpAddr {
    match family {
        Family::V4 => text.parse::<Ipv4Addr>().unwrap().into(),
        // 10.96.0.1 becomes fd00::a60:1.
        Family::V6 => {
            let [a, b, c, d] = text.parse::<Ipv4Addr>().unwrap().octets().map(u16::from);
            Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, a << 8 | b, c << 8 | d).into()
        }
    }
}

pub(crate) fn net(family: Family, text: &str) -> IpNet {
    let (address, len) = text.split_once('/').unwrap();
    let len: u8 = len.parse().unwrap();
    let len = if family == Family::V4 { len } else { len + 96 };
    IpNet::new(ip(family, address), len).unwrap().trunc()
}

/// Addresses of the node, without loopback.
pub(crate) fn node_ip(family: Family) -> IpAddr {
    ip(family, "192.168.7.2")
}

pub(crate) fn other_node_ip(family: Family) -> IpAddr {
    ip(family, "192.168.8.2")
}

pub(super) fn loopback_ip(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::LOCALHOST.into(),
        Family::V6 => Ipv6Addr::LOCALHOST.into(),
    }
}

pub(crate) fn is_local(address: IpAddr) -> bool {
    let family = Family::of(address);
    address == node_ip(family) || address == other_node_ip(family) || address.is_loopback()
}

pub(super) fn at(address: IpAddr, protocol: Protocol, port: u16) -> Frontend {
    Frontend { address: Address::Ip(address), protocol, port }
}

pub(super) fn node_port(family: Family, protocol: Protocol, port: u16) -> Frontend {
    Frontend { address: Address::NodePort(family), protocol, port }
}

/// Backends with these last bytes; those below 100 run on this node.
pub(super) fn pool(family: Family, hosts: impl IntoIterator<Item = u8>) -> Arc<Pool> {
    let backend = |host: u8| {
        let local = host < 100;
        Backend {
            address: ip(family, &format!("10.244.{}.{host}", u8::from(!local))),
            port: 8080,
            local,
            weight: 1,
        }
    };
    let mut backends: Vec<Backend> = hosts.into_iter().map(backend).collect();
    backends.sort();
    backends.dedup();
    Arc::new(Pool { backends: backends.into() })
}

pub(super) fn forward(pool: Arc<Pool>, masquerade: Masquerade) -> Verdict {
    Verdict::Forward(Forward { pool, masquerade })
}

pub(super) fn decision(inside: Verdict, outside: Verdict) -> Decision {
    let service = ServiceKey { namespace: "default".into(), name: "web".into() };
    let service = ServicePortName { service, port: "http".into(), protocol: Protocol::Tcp };
    Decision {
        service: Arc::new(service),
        role: Role::ClusterIp,
        inside,
        outside,
        affinity: None,
        tuning: None,
        source_ranges: None,
        reach: Reach::Cluster,
        rank: 2,
    }
}

pub(super) fn same(verdict: Verdict) -> Decision {
    decision(verdict.clone(), verdict)
}

pub(super) fn sticky(secs: u32, decision: Decision) -> Decision {
    Decision { affinity: NonZeroU32::new(secs).map(|timeout_secs| Affinity { timeout_secs }), ..decision }
}

/// A small plan with one of everything, in both families.
pub(super) fn sampler() -> Draft {
    let mut frontends = BTreeMap::new();
    for family in Family::BOTH {
        let cluster_ip = |last: u8| ip(family, &format!("10.96.0.{last}"));
        let vip = ip(family, "203.0.113.7");
        let three = || forward(pool(family, [1, 101, 102]), Masquerade::OffPods);
        let local = || forward(pool(family, [1]), Masquerade::Never);
        let external = Decision { role: Role::LoadBalancer, ..decision(three(), local()) };
        let ranges: Arc<[IpNet]> = [net(family, "198.51.100.0/24")].into();
        frontends.extend([
            (at(cluster_ip(1), Protocol::Tcp, 443), same(forward(pool(family, [101]), Masquerade::OffPods))),
            (at(cluster_ip(10), Protocol::Udp, 53), same(three())),
            (at(cluster_ip(20), Protocol::Tcp, 80), sticky(10_800, same(three()))),
            (at(cluster_ip(30), Protocol::Tcp, 80), same(Verdict::Reject)),
            (at(cluster_ip(40), Protocol::Sctp, 80), same(Verdict::Drop)),
            (at(vip, Protocol::Tcp, 80), Decision { source_ranges: Some(ranges), ..external.clone() }),
            (node_port(family, Protocol::Tcp, 30_080), sticky(60, external)),
            (node_port(family, Protocol::Udp, 30_053), decision(three(), Verdict::Drop)),
        ]);
    }
    let node_wide = |family| NodeWide {
        pods: Some(PodTraffic::Source(net(family, "10.244.0.0/24"))),
        scope: NodePortScope::Only([node_ip(family)].into()),
        cidrs: vec![net(family, "10.96.0.0/16")],
    };
    Draft { frontends, node_wide: PerFamily::from_fn(node_wide) }
}

/// Of each way to choose an endpoint one, in both families.
pub(super) fn wishes() -> Draft {
    let mut frontends = BTreeMap::new();
    for family in Family::BOTH {
        let plain = forward(pool(family, [1, 101, 102]), Masquerade::OffPods);
        let mut weighted = pool(family, [1, 101]).backends.clone();
        weighted[0].weight = 3;
        let weighted = forward(Arc::new(Pool { backends: weighted }), Masquerade::OffPods);
        let local = forward(pool(family, [1]), Masquerade::Never);
        let with = |scheduler, flags, decision| {
            let tuning =
                Tuning { algorithm: Algorithm { scheduler: Some(scheduler), flags }, ..Tuning::default() };
            Decision { tuning: Some(Arc::new(tuning)), ..decision }
        };
        let none = SchedulerFlags::NONE;
        let cluster_ip = |last: u8| at(ip(family, &format!("10.96.0.{last}")), Protocol::Tcp, 80);
        let split = Decision { role: Role::NodePort, ..decision(weighted.clone(), local) };
        frontends.extend([
            (cluster_ip(1), same(weighted.clone())),
            (cluster_ip(2), with(Scheduler::RoundRobin, none, same(weighted.clone()))),
            (cluster_ip(3), with(Scheduler::SourceHash, none, same(plain.clone()))),
            (cluster_ip(4), with(Scheduler::Maglev, SchedulerFlags::PORT, same(plain))),
            (
                node_port(family, Protocol::Tcp, 30_080),
                sticky(60, with(Scheduler::WeightedRoundRobin, none, split)),
            ),
        ]);
    }
    Draft { frontends, ..sampler() }
}

/// Any plan, of many small collisions.
pub(super) fn drafts() -> impl Strategy<Value = Draft> {
    let per_family = |family| {
        node_wides(family).prop_flat_map(move |node_wide| {
            let has_pods = node_wide.pods.is_some();
            let frontends =
                prop::collection::btree_map(frontends(family), decisions(family, has_pods), 0..14);
            (Just(node_wide), frontends.prop_map(|all| all.into_iter().map(fit).collect::<BTreeMap<_, _>>()))
        })
    };
    (per_family(Family::V4), per_family(Family::V6)).prop_map(|((v4, mut frontends), (v6, others))| {
        frontends.extend(others);
        Draft { frontends, node_wide: PerFamily { v4, v6 } }
    })
}

/// A draft and others that differ from it a little, one from the next.
pub(super) fn histories(len: usize) -> impl Strategy<Value = Vec<Draft>> {
    let steps = prop::collection::vec((drafts(), any::<u64>()), len);
    (drafts(), steps).prop_map(|(first, steps)| {
        let mut history = vec![first];
        for (other, choice) in steps {
            let mut next = history.last().cloned().unwrap();
            // Some of the frontends become what they are in the other draft; the node rarely does.
            let takes = |index: usize| choice >> (index % 60) & 3 == 0;
            let all: BTreeSet<Frontend> =
                next.frontends.keys().chain(other.frontends.keys()).copied().collect();
            for (_, frontend) in all.iter().enumerate().filter(|(index, _)| takes(*index)) {
                match other.frontends.get(frontend) {
                    Some(decision) => drop(next.frontends.insert(*frontend, decision.clone())),
                    None => drop(next.frontends.remove(frontend)),
                }
            }
            if choice & 7 == 7 {
                next.node_wide = other.node_wide;
            }
            history.push(next);
        }
        history
    })
}

/// One value of a strategy, the same in every run.
pub(super) fn sample<T>(strategy: &impl Strategy<Value = T>, runner: &mut TestRunner) -> T {
    strategy.new_tree(runner).unwrap().current()
}

fn node_wides(family: Family) -> impl Strategy<Value = NodeWide> {
    let pods = prop_oneof![
        Just(None),
        Just(Some(PodTraffic::Source(net(family, "10.244.0.0/24")))),
        Just(Some(PodTraffic::Source(net(family, "10.244.0.0/15")))),
        Just(Some(PodTraffic::Interface("cni0".into()))),
        Just(Some(PodTraffic::InterfacePrefix("veth".into()))),
    ];
    let scope = prop_oneof![
        Just(NodePortScope::All),
        Just(NodePortScope::Only(BTreeSet::new())),
        Just(NodePortScope::Only([node_ip(family)].into())),
        Just(NodePortScope::Only([node_ip(family), other_node_ip(family)].into())),
    ];
    let cidrs = prop_oneof![
        Just(vec![]),
        Just(vec![net(family, "10.96.0.0/16")]),
        Just(vec![net(family, "10.96.0.0/17"), net(family, "10.112.0.0/20")]),
    ];
    (pods, scope, cidrs).prop_map(|(pods, scope, cidrs)| NodeWide { pods, scope, cidrs })
}

pub(super) fn frontends(family: Family) -> impl Strategy<Value = Frontend> {
    let protocol = select(&Protocol::ALL[..]);
    let address = select(vec!["10.96.0.1", "10.96.0.2", "10.96.0.3", "203.0.113.1", "203.0.113.2"]);
    let service = (address, protocol.clone(), select(vec![53, 80]))
        .prop_map(move |(address, protocol, port)| at(ip(family, address), protocol, port));
    let port =
        (protocol, 30_000u16..30_003).prop_map(move |(protocol, port)| node_port(family, protocol, port));
    prop_oneof![3 => service, 1 => port]
}

pub(super) fn pools(family: Family) -> impl Strategy<Value = Arc<Pool>> {
    let hosts = select((1u8..6).chain(101..120).collect::<Vec<u8>>());
    let few = prop::collection::btree_set(hosts.clone(), 1..4);
    let many = prop::collection::btree_set(hosts, 1..20);
    let weights = prop_oneof![3 => Just(vec![1]), 1 => prop::collection::vec(1u16..5, 1..6)];
    (prop_oneof![few, many], weights).prop_map(move |(hosts, weights)| {
        let mut backends = pool(family, hosts).backends.clone();
        backends
            .iter_mut()
            .zip(weights.iter().cycle())
            .for_each(|(backend, weight)| backend.weight = *weight);
        Arc::new(Pool { backends })
    })
}

pub(super) fn decisions(family: Family, has_pods: bool) -> impl Strategy<Value = Decision> {
    let masquerades = match has_pods {
        true => vec![Masquerade::Never, Masquerade::OffPods, Masquerade::Always],
        false => vec![Masquerade::Never, Masquerade::Always],
    };
    let forwards = (pools(family), select(masquerades)).prop_map(|(pool, how)| forward(pool, how)).boxed();
    let refusals = select(vec![Verdict::Reject, Verdict::Drop]);
    let any_verdict = prop_oneof![3 => forwards.clone(), 1 => refusals].boxed();
    let verdicts = prop_oneof![
        2 => any_verdict.clone().prop_map(|verdict| (verdict.clone(), verdict)),
        1 => (forwards, any_verdict),
    ];
    let affinity = prop_oneof![
        3 => Just(None),
        1 => select(vec![60, 10_800]).prop_map(|secs| {
            NonZeroU32::new(secs).map(|timeout_secs| Affinity { timeout_secs })
        }),
    ];
    let all_ranges = vec!["10.244.0.0/16", "192.168.0.0/17", "198.51.100.0/24", "198.51.101.7/32"];
    let ranges = prop_oneof![
        2 => Just(None),
        1 => prop::sample::subsequence(all_ranges, 0..4).prop_map(move |texts| {
            let mut nets: Vec<IpNet> = texts.into_iter().map(|text| net(family, text)).collect();
            nets.sort();
            Some(Arc::from(nets))
        }),
    ];
    let flags = select(vec![SchedulerFlags::NONE, SchedulerFlags::PORT]);
    let tuning = prop_oneof![
        2 => Just(None),
        1 => (select(Scheduler::ALL), flags).prop_map(|(scheduler, flags)| {
            let algorithm = Algorithm { scheduler: Some(scheduler), flags };
            Some(Arc::new(Tuning { algorithm, ..Tuning::default() }))
        }),
    ];
    (verdicts, affinity, ranges, tuning, 0u8..3).prop_map(
        |((inside, outside), affinity, source_ranges, tuning, rank)| Decision {
            affinity,
            source_ranges,
            tuning,
            rank,
            ..decision(inside, outside)
        },
    )
}

/// Roles and source ranges as a model would give them.
fn fit((frontend, decision): (Frontend, Decision)) -> (Frontend, Decision) {
    let is_vip = matches!(frontend.address, Address::Ip(ip) if ip.to_string().starts_with("203.")
        || ip.to_string().contains("cb00:"));
    let role = match frontend.address {
        Address::NodePort(_) => Role::NodePort,
        Address::Ip(_) if is_vip => Role::LoadBalancer,
        Address::Ip(_) => Role::ClusterIp,
    };
    let source_ranges = decision.source_ranges.clone().filter(|_| is_vip);
    (frontend, Decision { role, source_ranges, ..decision })
}
