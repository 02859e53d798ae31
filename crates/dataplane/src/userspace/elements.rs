// SPDX-License-Identifier: Apache-2.0

//! What the sets of the table hold. Pure.

use std::{collections::BTreeSet, net::IpAddr};

use model::{Address, Decision, Family, Frontend, NodePortScope, Plan, Protocol, Verdict};
use netlink::nft::{Field as WireField, Set, Type};

use super::book::forwards;
use crate::{
    names::set,
    nftables::{
        program::{Bytes, Field, address_len, read_address},
        wire,
    },
};

/// A set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Place {
    Services,
    InsideServices,
    NodePorts,
    InsideNodePorts,
    RejectServices,
    DropServices,
    RejectNodePorts,
    DropNodePorts,
    Firewalled,
    SourceRanges,
    ClusterIps,
    NodePortAddresses,
}

/// An element: where, its key, and the last key if it is an interval.
pub(super) type Placed = (Place, Bytes, Option<Bytes>);

impl Place {
    pub(super) const ALL: [Place; 12] = [
        Place::Services,
        Place::InsideServices,
        Place::NodePorts,
        Place::InsideNodePorts,
        Place::RejectServices,
        Place::DropServices,
        Place::RejectNodePorts,
        Place::DropNodePorts,
        Place::Firewalled,
        Place::SourceRanges,
        Place::ClusterIps,
        Place::NodePortAddresses,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Place::Services => set::SERVICES,
            Place::InsideServices => set::INSIDE_SERVICES,
            Place::NodePorts => set::NODE_PORTS,
            Place::InsideNodePorts => set::INSIDE_NODE_PORTS,
            Place::RejectServices => set::REJECT_SERVICES,
            Place::DropServices => set::DROP_SERVICES,
            Place::RejectNodePorts => set::REJECT_NODE_PORTS,
            Place::DropNodePorts => set::DROP_NODE_PORTS,
            Place::Firewalled => set::FIREWALLED,
            Place::SourceRanges => set::SOURCE_RANGES,
            Place::ClusterIps => set::CLUSTER_IPS,
            Place::NodePortAddresses => set::NODE_PORT_ADDRESSES,
        }
    }

    pub(super) fn parse(name: &str) -> Option<Place> {
        Place::ALL.into_iter().find(|place| place.name() == name)
    }

    /// What of a packet is looked up.
    pub(super) fn key(self) -> Vec<Field> {
        match self {
            Place::NodePorts | Place::InsideNodePorts | Place::RejectNodePorts | Place::DropNodePorts => {
                vec![Field::Protocol, Field::Port]
            }
            Place::ClusterIps | Place::NodePortAddresses => vec![Field::Destination],
            Place::SourceRanges => vec![Field::Destination, Field::Protocol, Field::Port, Field::Source],
            _ => vec![Field::Destination, Field::Protocol, Field::Port],
        }
    }

    pub(super) fn definition(self, family: Family) -> Set {
        let kind = |field: &Field| match field {
            Field::Protocol => WireField::from(Type::INET_PROTO),
            Field::Port => Type::INET_SERVICE.into(),
            _ => Type::address(wire(family)).into(),
        };
        let fields: Vec<WireField> = self.key().iter().map(kind).collect();
        Set { interval: self == Place::SourceRanges, ..Set::new(self.name(), fields) }
    }
}

/// What one frontend puts into the sets. Nothing if it cannot be served.
pub(super) fn of_frontend(frontend: &Frontend, decision: &Decision) -> Vec<Placed> {
    if frontend.protocol == Protocol::Sctp {
        return Vec::new();
    }
    let key = key(frontend);
    let is_node_port = matches!(frontend.address, Address::NodePort(_));
    let place = |service, node_port| if is_node_port { node_port } else { service };
    let mut elements = Vec::new();
    let [everyone, inside] = forwards(decision);
    if everyone.is_some() {
        elements.push((place(Place::Services, Place::NodePorts), key, None));
    }
    if inside.is_some() {
        elements.push((place(Place::InsideServices, Place::InsideNodePorts), key, None));
    }
    match decision.outside {
        Verdict::Forward(_) => (),
        Verdict::Reject => elements.push((place(Place::RejectServices, Place::RejectNodePorts), key, None)),
        Verdict::Drop => elements.push((place(Place::DropServices, Place::DropNodePorts), key, None)),
    }
    if let Some(ranges) = decision.source_ranges.as_ref().filter(|_| !is_node_port) {
        elements.push((Place::Firewalled, key, None));
        for net in ranges.iter() {
            let last = key.address(net.broadcast());
            elements.push((Place::SourceRanges, key.address(net.network()), Some(last)));
        }
    }
    elements
}

/// What holds for all services.
pub(super) fn of_node(plan: &Plan, family: Family) -> Vec<Placed> {
    let plain = |place| move |address: IpAddr| (place, Bytes::EMPTY.address(address), None);
    let of_family = |address: &IpAddr| Family::of(*address) == family;
    let mut elements: Vec<Placed> =
        plan.cluster_ips().filter(of_family).map(plain(Place::ClusterIps)).collect();
    if let NodePortScope::Only(addresses) = plan.node_ports(family) {
        elements.extend(addresses.iter().copied().map(plain(Place::NodePortAddresses)));
    }
    elements
}

/// It is one of those of [`of_node`].
pub(super) fn is_of_node(placed: &Placed) -> bool {
    matches!(placed.0, Place::ClusterIps | Place::NodePortAddresses)
}

/// An element for people.
pub(super) fn describe(family: Family, placed: &Placed) -> String {
    let mut rest: &[u8] = &placed.1;
    let mut words = Vec::new();
    for field in placed.0.key() {
        let (word, len) = match field {
            Field::Protocol => (rest.first().map(|number| number.to_string()), 4),
            Field::Port => (rest.first_chunk().map(|port| u16::from_be_bytes(*port).to_string()), 4),
            _ => (read_address(family, rest).map(|address| address.to_string()), address_len(family)),
        };
        words.extend(word);
        rest = rest.get(len..).unwrap_or_default();
    }
    words.join(" . ")
}

/// All that a family's sets should hold.
pub(super) fn all(plan: &Plan, family: Family) -> BTreeSet<Placed> {
    let frontends = plan.frontends().filter(|(frontend, _)| frontend.family() == family);
    let of_frontends = frontends.flat_map(|(frontend, decision)| of_frontend(frontend, decision));
    of_frontends.chain(of_node(plan, family)).collect()
}

/// What the sets hold for one frontend.
pub(super) fn held(elements: &BTreeSet<Placed>, frontend: &Frontend) -> Vec<Placed> {
    let key = key(frontend);
    let is_node_port = matches!(frontend.address, Address::NodePort(_));
    let places = if is_node_port {
        &[Place::NodePorts, Place::InsideNodePorts, Place::RejectNodePorts, Place::DropNodePorts][..]
    } else {
        &[
            Place::Services,
            Place::InsideServices,
            Place::RejectServices,
            Place::DropServices,
            Place::Firewalled,
        ]
    };
    let mut held: Vec<Placed> =
        places.iter().map(|place| (*place, key, None)).filter(|placed| elements.contains(placed)).collect();
    if !is_node_port {
        let begin = (Place::SourceRanges, key, None);
        let ranges = elements
            .range(begin..)
            .take_while(|(place, at, _)| *place == Place::SourceRanges && at.starts_with(&key));
        held.extend(ranges.copied());
    }
    held
}

fn key(frontend: &Frontend) -> Bytes {
    let start = match frontend.address {
        Address::Ip(ip) => Bytes::EMPTY.address(ip),
        Address::NodePort(_) => Bytes::EMPTY,
    };
    start.protocol(frontend.protocol.number()).port(frontend.port)
}
