// SPDX-License-Identifier: Apache-2.0

//! Random objects from a universe so small that everything collides: names, addresses, ports.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;
use model::{
    Algorithm, Conditions, DetectLocal, Endpoint, EndpointSlice, Family, Hints, Kind, Node, NodePortAddress,
    PerFamily, Protocol, Scheduler, SchedulerFlags, Service, ServiceKey, ServiceKind, ServicePort, Settings,
    SliceKey, SlicePort, SourceRanges, TrafficPolicy, Tuning, Update, WeightRule, Weights, Whose,
    WrittenRanges,
};
use proptest::{collection::vec, option, prelude::*, sample::select};

use crate::build::{cluster_ip, key, loopback, net, node_ip, pod, slice_key, vip};

/// Something a source might do.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Tell(Update),
    /// Lists what is known of a kind again, but for what the mask leaves out; may be cut short.
    Relist {
        kind: Kind,
        kept: u8,
        is_finished: bool,
    },
}

pub(crate) fn steps() -> impl Strategy<Value = Vec<Vec<Step>>> {
    vec(vec(step(), 0..6), 1..8)
}

fn step() -> impl Strategy<Value = Step> {
    let kind = || select(&Kind::ALL);
    let relist = (kind(), any::<u8>(), any::<bool>()).prop_map(|(kind, kept, is_finished)| Step::Relist {
        kind,
        kept,
        is_finished,
    });
    let tell = prop_oneof![
        8 => service().prop_map(Update::Service),
        2 => service_key().prop_map(Update::ServiceGone),
        10 => slice().prop_map(Update::Slice),
        2 => a_slice_key().prop_map(Update::SliceGone),
        2 => node().prop_map(Update::Node),
        1 => Just(Update::NodeGone),
        1 => (cidr_name(), some_of(nets())).prop_map(|(name, cidrs)| Update::ServiceCidr { name, cidrs }),
        1 => cidr_name().prop_map(Update::ServiceCidrGone),
        1 => host_addresses().prop_map(Update::HostAddresses),
        1 => kind().prop_map(Update::Begin),
        1 => kind().prop_map(Update::End),
    ];
    prop_oneof![6 => tell.prop_map(Step::Tell), 1 => relist]
}

pub(crate) fn settings() -> impl Strategy<Value = Settings> {
    let cidr = |text: &'static str| option::of(Just(net(text)));
    let cluster_cidr = (cidr("10.1.0.0/16"), cidr("fd00:a:1::/48"))
        .prop_map(|(v4, v6)| DetectLocal::ClusterCidr(PerFamily { v4, v6 }));
    let detect_local = prop_oneof![
        Just(DetectLocal::NodeCidr),
        cluster_cidr,
        Just(DetectLocal::Bridge("veth0".into())),
        Just(DetectLocal::InterfacePrefix("veth".into())),
    ];
    let entry = prop_oneof![
        Just(NodePortAddress::Primary),
        Just(NodePortAddress::Localhost),
        Just(NodePortAddress::All),
        select(nets()).prop_map(NodePortAddress::Cidr),
        select(Family::BOTH.to_vec()).prop_map(NodePortAddress::Nothing),
    ];
    let families = select(vec![(true, true), (true, false), (false, true)]);
    (families, option::of(Just(vip(Family::V4, 1))), detect_local, vec(entry, 0..3), any::<[bool; 2]>())
        .prop_map(|((v4, v6), bind_address, detect_local, entries, [masquerade_all, external_ips])| {
            Settings {
                families: PerFamily { v4, v6 },
                node_ip_override: PerFamily { v4: bind_address, v6: None },
                detect_local,
                node_port_addresses: entries.into(),
                masquerade_all,
                external_ips,
                ..crate::build::settings()
            }
        })
}

fn service() -> impl Strategy<Value = Service> {
    let kind = select(vec![
        ServiceKind::ClusterIp,
        ServiceKind::NodePort,
        ServiceKind::LoadBalancer,
        ServiceKind::LoadBalancer,
        ServiceKind::ExternalName,
    ]);
    let a_cluster_ip = |family| option::weighted(0.8, (1..4_u8).prop_map(move |n| cluster_ip(family, n)));
    let cluster_ips =
        (a_cluster_ip(Family::V4), a_cluster_ip(Family::V6)).prop_map(|(v4, v6)| PerFamily { v4, v6 });
    let unread = any::<[bool; 2]>().prop_map(|[v4, v6]| PerFamily { v4, v6 });
    let ranges = (some_of(nets()), unread)
        .prop_map(|(nets, unread)| SourceRanges::Only(Box::new(WrittenRanges { nets, unread })));
    let source_ranges = prop_oneof![Just(SourceRanges::Any), ranges];
    let identity = (service_key(), 0..4_i64, kind, cluster_ips);
    let addresses = (vec(service_port(), 0..4), some_of(vips()), some_of(vips()), source_ranges);
    let affinity = option::of(select(vec![0, 5_u32]));
    let health_port = option::of(select(vec![0, 32000_u16]));
    let behaviour = (policy(), policy(), affinity, health_port);
    let wishes = (option::weighted(0.3, tuning()), weights());
    (identity, addresses, behaviour, wishes).prop_map(
        |(
            (key, created_secs, kind, cluster_ips),
            (ports, external_ips, load_balancer_ips, source_ranges),
            (internal_policy, external_policy, affinity_secs, health_check_node_port),
            (tuning, weights),
        )| Service {
            key,
            created_secs,
            kind,
            cluster_ips,
            ports: ports.into(),
            external_ips,
            load_balancer_ips,
            source_ranges,
            internal_policy,
            external_policy,
            affinity_secs,
            health_check_node_port,
            tuning: tuning.map(Arc::new),
            weights,
        },
    )
}

fn tuning() -> impl Strategy<Value = Tuning> {
    let flags = select(vec![SchedulerFlags::NONE, SchedulerFlags::PORT]);
    (option::of(select(Scheduler::ALL)), flags).prop_map(|(scheduler, flags)| Tuning {
        algorithm: Algorithm { scheduler, flags },
        ..Tuning::default()
    })
}

fn weights() -> impl Strategy<Value = Weights> {
    let whose = prop_oneof![
        Just(Whose::Everyone),
        select(vec![net("10.1.0.0/24"), net("fd00:a:1::/64"), net("10.1.1.2/32")]).prop_map(Whose::Net),
        select(vec!["here", "there"]).prop_map(|name| Whose::Node(name.into())),
        select(vec!["a", "b"]).prop_map(|name| Whose::Zone(name.into())),
    ];
    let rule = (whose, 0..4_u16).prop_map(|(whose, weight)| WeightRule { whose, weight });
    prop_oneof![2 => Just(Weights::default()), 1 => vec(rule, 0..3).prop_map(|rules| Weights(rules.into()))]
}

fn policy() -> impl Strategy<Value = TrafficPolicy> {
    select(vec![TrafficPolicy::Cluster, TrafficPolicy::Local])
}

fn service_port() -> impl Strategy<Value = ServicePort> {
    let node_port = option::of(select(vec![0, 30001, 30002_u16]));
    (name(), select(&Protocol::ALL), select(vec![0, 53, 80_u16]), node_port)
        .prop_map(|(name, protocol, port, node_port)| ServicePort { name, protocol, port, node_port })
}

fn slice() -> impl Strategy<Value = EndpointSlice> {
    let port = (name(), select(&Protocol::ALL), select(vec![53, 8080_u16]))
        .prop_map(|(name, protocol, port)| SlicePort { name, protocol, port });
    let weight = prop_oneof![3 => Just(1_u16), 1 => 0..3_u16];
    (a_slice_key(), service_key(), family(), vec(port, 0..4), option::of(1..100_i64), weight)
        .prop_flat_map(|(key, service, family, ports, trigger_time_nanos, weight)| {
            vec(endpoint(family), 0..5).prop_map(move |endpoints| EndpointSlice {
                key: key.clone(),
                service: ServiceKey { namespace: key.namespace.clone(), name: service.name.clone() },
                family,
                ports: ports.clone().into(),
                endpoints: endpoints.into(),
                weight,
                trigger_time_nanos,
            })
        })
        .boxed()
}

fn endpoint(family: Family) -> impl Strategy<Value = Endpoint> {
    let family = prop_oneof![9 => Just(family), 1 => self::family()];
    let address = (family, 0..2_u8, 1..4_u8).prop_map(|(family, node, number)| pod(family, node, number));
    let conditions = any::<[bool; 3]>().prop_map(|[ready, serving, terminating]| Conditions {
        ready,
        serving,
        terminating,
    });
    let node = option::of(select(vec!["here", "there"]).prop_map(Arc::from));
    let hints =
        (some_of(vec![Arc::from("a"), Arc::from("b")]), some_of(vec![Arc::from("here"), Arc::from("there")]))
            .prop_map(|(zones, nodes)| Arc::new(Hints { zones, nodes }));
    let zone = option::of(select(vec!["a", "b"]).prop_map(Arc::from));
    (address, conditions, node, zone, option::of(hints)).prop_map(
        |(address, conditions, node, zone, hints)| Endpoint { address, conditions, node, zone, hints },
    )
}

fn node() -> impl Strategy<Value = Node> {
    let address = |family| option::of(Just(node_ip(family)));
    let cidr = |text: &'static str| option::of(Just(net(text)));
    let zone = option::of(select(vec!["a", "b"]).prop_map(Arc::from));
    (address(Family::V4), address(Family::V6), cidr("10.1.0.0/24"), cidr("fd00:a:1::/64"), zone).prop_map(
        |(v4, v6, pods_v4, pods_v6, zone)| Node {
            addresses: PerFamily { v4, v6 },
            pod_cidrs: PerFamily { v4: pods_v4, v6: pods_v6 },
            zone,
            ..crate::build::node()
        },
    )
}

fn host_addresses() -> impl Strategy<Value = Box<[IpAddr]>> {
    let mut all = Family::BOTH.map(|family| [node_ip(family), loopback(family), vip(family, 1)]).concat();
    all.sort();
    some_of(all)
}

/// A subset, in order.
fn some_of<T: Clone + std::fmt::Debug + 'static>(items: Vec<T>) -> impl Strategy<Value = Box<[T]>> {
    proptest::sample::subsequence(items.clone(), 0..=items.len()).prop_map(Into::into)
}

fn service_key() -> impl Strategy<Value = ServiceKey> {
    select(vec![key("n/a"), key("n/b"), key("n/c"), key("default/kubernetes")])
}

fn a_slice_key() -> impl Strategy<Value = SliceKey> {
    select(vec![slice_key("n/s"), slice_key("n/t"), slice_key("n/u"), slice_key("default/s")])
}

fn cidr_name() -> impl Strategy<Value = Arc<str>> {
    select(vec!["k", "l"]).prop_map(Arc::from)
}

fn name() -> impl Strategy<Value = Arc<str>> {
    select(vec!["", "x"]).prop_map(Arc::from)
}

fn family() -> impl Strategy<Value = Family> {
    select(&Family::BOTH)
}

fn vips() -> Vec<IpAddr> {
    Family::BOTH.map(|family| [vip(family, 1), vip(family, 2), cluster_ip(family, 1)]).concat()
}

fn nets() -> Vec<IpNet> {
    [
        "10.96.0.0/16",
        "192.0.2.0/24",
        "203.0.113.0/25",
        "203.0.113.128/25",
        "127.0.0.0/8",
        "0.0.0.0/0",
        "fd00::/16",
    ]
    .map(net)
    .to_vec()
}
