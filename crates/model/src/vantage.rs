// SPDX-License-Identifier: Apache-2.0

//! The point this node looks from: what of it a decision depends on, and what holds for all services at once.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use ipnet::IpNet;

use crate::{
    decision::{NodePortScope, PodTraffic},
    family::{Family, PerFamily},
    node::{DetectLocal, NodePortAddress},
    world::World,
};

/// What of the node the decisions of a service depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Vantage {
    pub(crate) zone: Option<Arc<str>>,
    /// A specific bind address, else the Node's.
    pub(crate) node_ips: PerFamily<Option<IpAddr>>,
    pub(crate) pod_traffic: PerFamily<Option<PodTraffic>>,
}

impl Vantage {
    pub(crate) fn of(world: &World) -> Vantage {
        let node = world.node();
        let node_ip = |family| {
            let replaced = world.settings().node_ip_override[family];
            replaced.or(node.and_then(|node| node.addresses[family]))
        };
        Vantage {
            zone: node.and_then(|node| node.zone.clone()),
            node_ips: PerFamily::from_fn(node_ip),
            pod_traffic: PerFamily::from_fn(|family| pod_traffic(world, family)),
        }
    }

    /// In which families pods can be told from others.
    pub(crate) fn tells_pods(&self) -> PerFamily<bool> {
        PerFamily::from_fn(|family| self.pod_traffic[family].is_some())
    }
}

/// How pods are told from others, if they can be.
fn pod_traffic(world: &World, family: Family) -> Option<PodTraffic> {
    let source = |net: Option<IpNet>| net.map(|net| PodTraffic::Source(net.trunc()));
    match &world.settings().detect_local {
        DetectLocal::ClusterCidr(cidrs) => source(cidrs[family]),
        DetectLocal::NodeCidr => source(world.node().and_then(|node| node.pod_cidrs[family])),
        DetectLocal::Bridge(name) => Some(PodTraffic::Interface(name.clone())),
        DetectLocal::InterfacePrefix(prefix) => Some(PodTraffic::InterfacePrefix(prefix.clone())),
    }
}

/// Which addresses serve node ports in this family, and whether loopback does.
///
/// Differs from kube-proxy in one thing: a keyword speaks of both families, so `primary` on a node without an
/// IPv6 address serves no IPv6 address, where kube-proxy would serve all of them.
pub(crate) fn node_ports(world: &World, node_ip: Option<IpAddr>, family: Family) -> (NodePortScope, bool) {
    let entries: Vec<NodePortAddress> = world
        .settings()
        .node_port_addresses
        .iter()
        .copied()
        .filter(|entry| entry.speaks_of(family))
        .collect();
    let names_loopback = entries.iter().any(|entry| entry.names_loopback(family));
    let names_all = entries.iter().any(|entry| match entry {
        NodePortAddress::All => true,
        NodePortAddress::Cidr(net) => net.prefix_len() == 0,
        NodePortAddress::Primary | NodePortAddress::Localhost | NodePortAddress::Nothing(_) => false,
    });
    if entries.is_empty() || names_all {
        return (NodePortScope::All, names_loopback);
    }

    let mut chosen: BTreeSet<IpAddr> = world
        .host_addresses()
        .iter()
        .copied()
        .filter(|address| Family::of(*address) == family)
        .filter(|address| entries.iter().any(|entry| selects(entry, *address)))
        .collect();
    if entries.contains(&NodePortAddress::Primary) {
        chosen.extend(node_ip.filter(|ip| !ip.is_loopback()));
    }
    (NodePortScope::Only(chosen), names_loopback)
}

fn selects(entry: &NodePortAddress, address: IpAddr) -> bool {
    match entry {
        NodePortAddress::Localhost => address.is_loopback(),
        NodePortAddress::Cidr(net) => {
            net.contains(&address) && address.is_loopback() == entry.names_loopback(Family::of(address))
        }
        NodePortAddress::Primary | NodePortAddress::All | NodePortAddress::Nothing(_) => false,
    }
}

/// All service CIDRs of a family, disjoint and sorted. One that spans the whole family is not believed, since
/// everything in a service CIDR that is no service is dropped.
pub(crate) fn service_cidrs(world: &World, family: Family) -> Vec<IpNet> {
    let is_ours = |net: &IpNet| Family::of(net.addr()) == family && net.prefix_len() > 0;
    let of_family = world.service_cidrs().filter(is_ours).collect();
    disjoint(&of_family)
}

/// The same addresses as disjoint networks, sorted, as few as possible.
pub(crate) fn disjoint(nets: &Vec<IpNet>) -> Vec<IpNet> {
    let mut merged = IpNet::aggregate(nets);
    merged.sort();
    merged
}
