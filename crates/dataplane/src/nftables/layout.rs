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
    slots::{Class, Draw},
    text::keyword,
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
    /// The same for frontends whose endpoints are chosen by a hash. Exists on demand: the first rule that uses a map
    /// makes the kernel walk it, so it is not the large one.
    Hashed(Space, Side),
    /// The same for one frontend, whose endpoints take turns. Exists on demand: turns are counted by rule, so each
    /// such frontend has a rule of its own, and a map that costs nothing to walk.
    Turns(Frontend, Side),
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
            Container::Hashed(Service, Everyone) => set::HASH_ENDPOINTS,
            Container::Hashed(Service, Inside) => set::INSIDE_HASH_ENDPOINTS,
            Container::Hashed(NodePort, Everyone) => set::NODE_PORT_HASH_ENDPOINTS,
            Container::Hashed(NodePort, Inside) => set::INSIDE_NODE_PORT_HASH_ENDPOINTS,
            Container::Turns(frontend, side) => return turns_name(&frontend, side).into(),
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
        let hashed =
            Space::BOTH.into_iter().flat_map(|space| Side::BOTH.map(|side| Container::Hashed(space, side)));
        if let Some(hashed) = hashed.into_iter().find(|container| container.name() == name) {
            return Some(hashed);
        }
        if let Some((frontend, side)) = parse_turns(name) {
            return Some(Container::Turns(frontend, side));
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
            | Container::Hashed(space, _)
            | Container::Reject(space)
            | Container::Drop(space)
            | Container::Sticky(space, _) => Some(space),
            Container::Turns(frontend, _) => Some(Space::of(&frontend)),
            Container::Firewalled | Container::SourceRanges => Some(Space::Service),
            Container::ClusterIps
            | Container::Hairpin
            | Container::NodePortAddresses
            | Container::Affinity => None,
        }
    }

    /// As the kernel is asked for it. `counted`: the endpoints count the connections they are drawn for.
    pub(super) fn definition(self, family: Family, counted: bool) -> Set {
        let counter = counted && self.endpoints_side().is_some();
        Set { counter, ..self.uncounted(family) }
    }

    /// For a map of endpoints: for whom.
    pub(super) fn endpoints_side(self) -> Option<Side> {
        match self {
            Container::Endpoints(_, side) | Container::Hashed(_, side) | Container::Turns(_, side) => {
                Some(side)
            }
            _ => None,
        }
    }

    fn uncounted(self, family: Family) -> Set {
        let name = self.name();
        let address: nft::Field = Type::address(wire(family)).into();
        let endpoint = || vec![Typeof::Daddr(wire(family)).into(), Typeof::Dport.into()];
        match self {
            Container::Verdicts(space, _) => Set::map(name, space.types(family), nft::Value::Verdict),
            Container::Endpoints(space, _) | Container::Hashed(space, _) => {
                let mut key = space.typeofs(family);
                // Only for people: `nft` needs an expression to tell how to print a slot.
                key.push(Typeof::NumgenRandom(1 << 16).into());
                Set::map(name, key, nft::Value::Fields(endpoint()))
            }
            Container::Turns(frontend, _) => {
                let mut key = Space::of(&frontend).typeofs(family);
                key.push(Typeof::NumgenInc(1 << 16).into());
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
    pub(super) way: Way,
}

/// How a balancing chain chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Way {
    Random(Class),
    Hash {
        class: Class,
        port: bool,
    },
    /// For this frontend only, of which so many slots are filled.
    Turns {
        frontend: Frontend,
        slots: u32,
    },
}

impl Way {
    /// The way in which one frontend draws among so many slots.
    pub(super) fn of(draw: Draw, frontend: &Frontend, slots: usize) -> Way {
        match draw {
            Draw::Random(class) => Way::Random(class),
            Draw::Hash { class, port } => Way::Hash { class, port },
            Draw::Turns => Way::Turns { frontend: *frontend, slots: slots as u32 },
        }
    }

    pub(super) fn draw(self) -> Draw {
        match self {
            Way::Random(class) => Draw::Random(class),
            Way::Hash { class, port } => Draw::Hash { class, port },
            Way::Turns { .. } => Draw::Turns,
        }
    }
}

/// Which map holds the endpoints of a frontend that draws in this way.
pub(super) fn endpoints(draw: Draw, frontend: &Frontend, side: Side) -> Container {
    let space = Space::of(frontend);
    match draw {
        Draw::Random(_) => Container::Endpoints(space, side),
        Draw::Hash { .. } => Container::Hashed(space, side),
        Draw::Turns => Container::Turns(*frontend, side),
    }
}

impl Kind {
    /// The chain that draws, and does nothing before.
    pub(super) fn drawing(space: Space, side: Side, way: Way) -> Kind {
        Kind { space, side, mark: Mark::Never, sticky: false, way }
    }

    /// The map it draws from.
    pub(super) fn container(&self) -> Container {
        match self.way {
            Way::Random(_) => Container::Endpoints(self.space, self.side),
            Way::Hash { .. } => Container::Hashed(self.space, self.side),
            Way::Turns { frontend, .. } => Container::Turns(frontend, self.side),
        }
    }

    /// `endpoints-4`, `inside-endpoints-16-masq-off-pods-sticky`, `hash-endpoints-port-4`,
    /// `turns-10.96.0.10-tcp-80-3`.
    pub(super) fn name(&self) -> String {
        let map = self.container().name();
        let (infix, size) = match self.way {
            Way::Random(class) => ("", class.size()),
            Way::Hash { class, port } => (if port { chain::HASH_PORT } else { "" }, class.size()),
            Way::Turns { slots, .. } => ("", slots),
        };
        let mark = match self.mark {
            Mark::Never => "",
            Mark::OffPods => chain::MASQUERADE_OFF_PODS,
            Mark::Always => chain::MASQUERADE,
        };
        let sticky = if self.sticky { chain::STICKY } else { "" };
        format!("{map}{infix}-{size}{mark}{sticky}")
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
        let size: u32 = size.parse().ok()?;
        let (map, port) = match map.strip_suffix(chain::HASH_PORT) {
            Some(hashed) if Container::parse(map).is_none() => (hashed, true),
            _ => (map, false),
        };
        let (space, side, way) = match Container::parse(map)? {
            Container::Endpoints(space, side) => (space, side, Way::Random(Class::of_size(size)?)),
            Container::Hashed(space, side) => (space, side, Way::Hash { class: Class::of_size(size)?, port }),
            Container::Turns(frontend, side) if size > 0 => {
                (Space::of(&frontend), side, Way::Turns { frontend, slots: size })
            }
            _ => return None,
        };
        Some(Kind { space, side, mark, sticky, way }).filter(|kind| kind.name() == name)
    }
}

/// `turns-10.96.0.10-tcp-80`, `turns-fd00__a-tcp-80`, `inside-turns-ip6-node-port-udp-30053`: what `nft` takes for a name.
fn turns_name(frontend: &Frontend, side: Side) -> String {
    let prefix = match side {
        Side::Everyone => set::TURNS,
        Side::Inside => set::INSIDE_TURNS,
    };
    let address = match frontend.address {
        Address::Ip(ip) => ip.to_string().replace(':', "_"),
        Address::NodePort(family) => format!("{}{NODE_PORT}", keyword(family)),
    };
    format!("{prefix}{address}-{}-{}", frontend.protocol, frontend.port)
}

/// The reverse.
fn parse_turns(name: &str) -> Option<(Frontend, Side)> {
    let (rest, side) = match name.strip_prefix(set::INSIDE_TURNS) {
        Some(rest) => (rest, Side::Inside),
        None => (name.strip_prefix(set::TURNS)?, Side::Everyone),
    };
    let (rest, port) = rest.rsplit_once('-')?;
    let (address, protocol) = rest.rsplit_once('-')?;
    let protocol = Protocol::ALL.into_iter().find(|known| known.to_string() == protocol)?;
    let address = match address.strip_suffix(NODE_PORT) {
        Some(family) => Address::NodePort(Family::BOTH.into_iter().find(|known| keyword(*known) == family)?),
        None => Address::Ip(address.replace('_', ":").parse().ok()?),
    };
    let frontend = Frontend { address, protocol, port: port.parse().ok()? };
    (turns_name(&frontend, side) == name).then_some((frontend, side))
}

const NODE_PORT: &str = "-node-port";

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
/// being remembered. At 96 bytes each in the kernel's slabs for IPv4 and 128 for IPv6, and 8 to 16 for their place in the
/// table (Linux 6.18), this is 30 to 38 MB at most. Memory would allow more, but forgetting would not: see
/// [`super::forgetter`].
pub(super) const AFFINITY_SIZE: u32 = 1 << 18;
