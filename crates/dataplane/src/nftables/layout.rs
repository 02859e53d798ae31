// SPDX-License-Identifier: Apache-2.0

//! Which sets and maps the table has, what their keys are, and how balancing chains are named.
//!
//! See README.md for the picture. Nothing here looks at a Plan: it is the vocabulary that [`super::render`]
//! writes and [`super::readback`] reads.

use std::{borrow::Cow, time::Duration};

use model::{Address, Family, Frontend, Protocol};
use netlink::nft::{self, Set, Type, Typeof};

use super::{
    program::{Bytes, Field, address_len, read_address},
    slots::Class,
};
use crate::names::{chain, set};

/// Frontends with an address and node ports have keys of different form, and so maps of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Space {
    Service,
    NodePort,
}

impl Space {
    pub(super) const BOTH: [Space; 2] = [Space::Service, Space::NodePort];

    pub(super) fn of(frontend: &Frontend) -> Space {
        match frontend.address {
            Address::Ip(_) => Space::Service,
            Address::NodePort(_) => Space::NodePort,
        }
    }

    /// What a packet's key is made of.
    pub(super) fn key(self) -> Vec<Field> {
        match self {
            Space::Service => vec![Field::Destination, Field::Protocol, Field::Port],
            Space::NodePort => vec![Field::Protocol, Field::Port],
        }
    }

    /// The same after translation, as the flow remembers it.
    pub(super) fn original_key(self) -> Vec<Field> {
        match self {
            Space::Service => vec![Field::OriginalDestination, Field::Protocol, Field::OriginalPort],
            Space::NodePort => vec![Field::Protocol, Field::OriginalPort],
        }
    }

    fn types(self, family: Family) -> Vec<nft::Field> {
        let of_both = [Type::INET_PROTO.into(), Type::INET_SERVICE.into()];
        match self {
            Space::Service => [Type::address(wire(family)).into()].into_iter().chain(of_both).collect(),
            Space::NodePort => of_both.into(),
        }
    }

    fn typeofs(self, family: Family) -> Vec<nft::Field> {
        let of_both = [Typeof::L4Proto.into(), Typeof::Dport.into()];
        match self {
            Space::Service => [Typeof::Daddr(wire(family)).into()].into_iter().chain(of_both).collect(),
            Space::NodePort => of_both.into(),
        }
    }
}

/// For whom: frontends that treat traffic from inside otherwise have a second entry for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Side {
    /// Everyone, or where inside differs, everyone else.
    Everyone,
    Inside,
}

impl Side {
    pub(super) const BOTH: [Side; 2] = [Side::Everyone, Side::Inside];
}

/// A set or map of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Container {
    /// Frontend to balancing chain.
    Verdicts(Space, Side),
    /// Frontend and slot to endpoint.
    Endpoints(Space, Side),
    Reject(Space),
    Drop(Space),
    Firewalled,
    SourceRanges,
    ClusterIps,
    Hairpin,
    NodePortAddresses,
    Affinity,
    /// Frontend and endpoint pairs with an affinity of so many seconds. Exists on demand.
    Sticky(Space, u32),
}

impl Container {
    /// All that always exist.
    pub(super) const FIXED: [Container; 18] = {
        use Container::*;
        use Side::*;
        use Space::*;
        [
            Verdicts(Service, Everyone),
            Verdicts(Service, Inside),
            Verdicts(NodePort, Everyone),
            Verdicts(NodePort, Inside),
            Endpoints(Service, Everyone),
            Endpoints(Service, Inside),
            Endpoints(NodePort, Everyone),
            Endpoints(NodePort, Inside),
            Reject(Service),
            Reject(NodePort),
            Drop(Service),
            Drop(NodePort),
            Firewalled,
            SourceRanges,
            ClusterIps,
            Hairpin,
            NodePortAddresses,
            Affinity,
        ]
    };

    pub(super) fn name(self) -> Cow<'static, str> {
        use Side::{Everyone, Inside};
        use Space::{NodePort, Service};
        Cow::Borrowed(match self {
            Container::Verdicts(Service, Everyone) => set::SERVICES,
            Container::Verdicts(Service, Inside) => set::INSIDE_SERVICES,
            Container::Verdicts(NodePort, Everyone) => set::NODE_PORTS,
            Container::Verdicts(NodePort, Inside) => set::INSIDE_NODE_PORTS,
            Container::Endpoints(Service, Everyone) => set::ENDPOINTS,
            Container::Endpoints(Service, Inside) => set::INSIDE_ENDPOINTS,
            Container::Endpoints(NodePort, Everyone) => set::NODE_PORT_ENDPOINTS,
            Container::Endpoints(NodePort, Inside) => set::INSIDE_NODE_PORT_ENDPOINTS,
            Container::Reject(Service) => set::REJECT_SERVICES,
            Container::Reject(NodePort) => set::REJECT_NODE_PORTS,
            Container::Drop(Service) => set::DROP_SERVICES,
            Container::Drop(NodePort) => set::DROP_NODE_PORTS,
            Container::Firewalled => set::FIREWALLED,
            Container::SourceRanges => set::SOURCE_RANGES,
            Container::ClusterIps => set::CLUSTER_IPS,
            Container::Hairpin => set::HAIRPIN,
            Container::NodePortAddresses => set::NODE_PORT_ADDRESSES,
            Container::Affinity => set::AFFINITY,
            Container::Sticky(Service, secs) => return format!("{}{secs}", set::STICKY_SERVICES).into(),
            Container::Sticky(NodePort, secs) => return format!("{}{secs}", set::STICKY_NODE_PORTS).into(),
        })
    }

    /// The container with this name, if it is one of ours.
    pub(super) fn parse(name: &str) -> Option<Container> {
        if let Some(fixed) = Container::FIXED.into_iter().find(|container| container.name() == name) {
            return Some(fixed);
        }
        let sticky = |space, prefix| {
            let secs = name.strip_prefix(prefix)?.parse().ok().filter(|secs| *secs > 0)?;
            Some(Container::Sticky(space, secs)).filter(|container| container.name() == name)
        };
        sticky(Space::Service, set::STICKY_SERVICES)
            .or_else(|| sticky(Space::NodePort, set::STICKY_NODE_PORTS))
    }

    /// Which frontends its keys begin with; `None` if they do not.
    pub(super) fn space(self) -> Option<Space> {
        match self {
            Container::Verdicts(space, _)
            | Container::Endpoints(space, _)
            | Container::Reject(space)
            | Container::Drop(space)
            | Container::Sticky(space, _) => Some(space),
            Container::Firewalled | Container::SourceRanges => Some(Space::Service),
            Container::ClusterIps
            | Container::Hairpin
            | Container::NodePortAddresses
            | Container::Affinity => None,
        }
    }

    /// As the kernel is asked for it. `counted`: the endpoints count the connections they are drawn for.
    pub(super) fn definition(self, family: Family, counted: bool) -> Set {
        let counter = counted && matches!(self, Container::Endpoints(..));
        Set { counter, ..self.uncounted(family) }
    }

    fn uncounted(self, family: Family) -> Set {
        let name = self.name();
        let address: nft::Field = Type::address(wire(family)).into();
        let endpoint = || vec![Typeof::Daddr(wire(family)).into(), Typeof::Dport.into()];
        match self {
            Container::Verdicts(space, _) => Set::map(name, space.types(family), nft::Value::Verdict),
            Container::Endpoints(space, _) => {
                let mut key = space.typeofs(family);
                // Only for people: `nft` needs an expression to tell how to print a slot.
                key.push(Typeof::NumgenRandom(1 << 16).into());
                Set::map(name, key, nft::Value::Fields(endpoint()))
            }
            Container::Reject(space) | Container::Drop(space) => Set::new(name, space.types(family)),
            Container::Firewalled => Set::new(name, Space::Service.types(family)),
            Container::SourceRanges => {
                let mut key = Space::Service.types(family);
                key.push(address);
                Set { interval: true, ..Set::new(name, key) }
            }
            Container::ClusterIps | Container::NodePortAddresses => Set::new(name, [address]),
            Container::Hairpin => Set::new(name, [address, address]),
            Container::Affinity => {
                let mut key = vec![Typeof::Saddr(wire(family)).into()];
                key.extend(Space::Service.typeofs(family));
                Set {
                    dynamic: true,
                    lifetime: nft::Lifetime::PerElement,
                    size: Some(AFFINITY_SIZE),
                    ..Set::map(name, key, nft::Value::Fields(endpoint()))
                }
            }
            Container::Sticky(space, _) => {
                let mut key = space.types(family);
                key.extend([address, Type::INET_SERVICE.into()]);
                Set::new(name, key)
            }
        }
    }
}

/// How the source address of what passes a balancing chain is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Mark {
    Never,
    OffPods,
    Always,
}

/// A balancing chain: everything that tells it from others. The name says it all, so that it can be read back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Kind {
    pub(super) space: Space,
    pub(super) side: Side,
    pub(super) mark: Mark,
    pub(super) sticky: bool,
    pub(super) class: Class,
}

impl Kind {
    /// The chain that draws, and does nothing before.
    pub(super) fn drawing(space: Space, side: Side, class: Class) -> Kind {
        Kind { space, side, mark: Mark::Never, sticky: false, class }
    }

    /// `endpoints-4`, `inside-endpoints-16-masq-off-pods-sticky`.
    pub(super) fn name(&self) -> String {
        let map = Container::Endpoints(self.space, self.side).name();
        let mark = match self.mark {
            Mark::Never => "",
            Mark::OffPods => chain::MASQUERADE_OFF_PODS,
            Mark::Always => chain::MASQUERADE,
        };
        let sticky = if self.sticky { chain::STICKY } else { "" };
        format!("{map}-{}{mark}{sticky}", self.class.size())
    }

    /// The chain with this name, if it is a balancing chain.
    pub(super) fn parse(name: &str) -> Option<Kind> {
        let (rest, sticky) = match name.strip_suffix(chain::STICKY) {
            Some(rest) => (rest, true),
            None => (name, false),
        };
        let (rest, mark) = if let Some(rest) = rest.strip_suffix(chain::MASQUERADE_OFF_PODS) {
            (rest, Mark::OffPods)
        } else if let Some(rest) = rest.strip_suffix(chain::MASQUERADE) {
            (rest, Mark::Always)
        } else {
            (rest, Mark::Never)
        };
        let (map, size) = rest.rsplit_once('-')?;
        let class = Class::of_size(size.parse().ok()?)?;
        let Some(Container::Endpoints(space, side)) = Container::parse(map) else { return None };
        Some(Kind { space, side, mark, sticky, class }).filter(|kind| kind.name() == name)
    }
}

/// The key of a frontend, as all maps of its space begin.
pub(super) fn key(frontend: &Frontend) -> Bytes {
    let start = match frontend.address {
        Address::Ip(ip) => Bytes::EMPTY.address(ip),
        Address::NodePort(_) => Bytes::EMPTY,
    };
    start.protocol(frontend.protocol.number()).port(frontend.port)
}

/// The reverse of [`key`]: the frontend a key begins with, and the rest of the key. `None` if it is no frontend
/// that a Plan could have.
pub(super) fn read_key(family: Family, space: Space, key: &[u8]) -> Option<(Frontend, &[u8])> {
    let (address, rest) = match space {
        Space::Service => (Address::Ip(read_address(family, key)?), key.get(address_len(family)..)?),
        Space::NodePort => (Address::NodePort(family), key),
    };
    let (protocol, rest) = rest.split_first_chunk::<4>()?;
    let (port, rest) = rest.split_first_chunk::<4>()?;
    let is_padded = protocol[1..] == [0; 3] && port[2..] == [0; 2];
    let protocol = Protocol::from_number(protocol[0]).filter(|_| is_padded)?;
    Some((Frontend { address, protocol, port: u16::from_be_bytes([port[0], port[1]]) }, rest))
}

/// The family as the netlink crate has it; it does not know the model.
pub(crate) fn wire(family: Family) -> netlink::Family {
    match family {
        Family::V4 => netlink::Family::V4,
        Family::V6 => netlink::Family::V6,
    }
}

/// How long an affinity lasts, as the kernel counts.
pub(super) fn affinity_timeout(secs: u32) -> Duration {
    Duration::from_secs(secs.into())
}

/// Clients and frontends remembered at once, in one family. When it is full, new clients are balanced without
/// being remembered. At about 150 bytes each in the kernel (IPv4) this is 40 MB at most.
pub(super) const AFFINITY_SIZE: u32 = 1 << 18;
