// SPDX-License-Identifier: Apache-2.0

//! Walks a packet through a [`Program`], as the kernel would, and tells every way it can end and how likely.
//!
//! It knows the hooks, iptables and how IPVS chooses, and nothing else: what comes out is what program and kernel make
//! of a packet.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use model::{Family, Origin, Packet, Scheduler};
use netlink::{
    ipset::Element,
    ipvs::{DestKey, ServiceKey, flags},
};

use super::{program::Program, render::Server, sets::Set};
use crate::{
    iptables::{
        rule::Sides,
        sim::{Ending, Traveller, Walk},
    },
    nftables::sim::{Choice, Fate},
    xtables::Table,
};

/// Which real server each virtual server has for the client.
pub type Memory = BTreeMap<ServiceKey, DestKey>;

/// One way the first packet of a connection can end, and who remembers the client from then on.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulated {
    pub ending: Ending,
    pub choice: Choice,
    pub remembered: Option<(ServiceKey, DestKey)>,
}

/// Every way the packet can end. `is_local` tells which addresses are the node's without ours.
pub fn simulate(
    program: &Program,
    packet: &Packet,
    is_local: &dyn Fn(IpAddr) -> bool,
    memory: &Memory,
) -> Vec<Simulated> {
    let is_local = |ip| is_local(ip) || program.addresses.contains(&ip);
    let sets = |name: &str, sides: Sides, at: &Traveller| find(program, name, sides, at);
    let nobody = BTreeSet::new();
    let mut walk = Walk {
        program: &program.tables,
        is_local: &is_local,
        memory: &nobody,
        sets: &sets,
        endings: Vec::new(),
    };
    let mut ipvs = Desk { program, memory, refused: Vec::new() };
    let begin = match &packet.origin {
        Origin::Node => None,
        Origin::Interface(name) => Some(name.clone()),
    };
    let start = Traveller::new(packet, begin.clone());
    // From this node, IPVS is met before the filter; what it takes goes through the filter as its own.
    let hook = if begin.is_none() { "OUTPUT" } else { "PREROUTING" };
    let mut travellers = walk.base(Table::Mangle, hook, vec![start]);
    travellers = walk.base(Table::Nat, hook, travellers);
    let mut taken = Vec::new();
    if begin.is_none() {
        travellers = travellers.into_iter().filter_map(|it| ipvs.offer(it, &mut taken)).collect();
        travellers = walk.base(Table::Filter, "OUTPUT", travellers);
        travellers = walk.base(Table::Nat, "POSTROUTING", travellers);
    }
    let (mut local, mut remote): (Vec<_>, Vec<_>) =
        travellers.into_iter().partition(|traveller| is_local(traveller.destination));
    if begin.is_none() {
        local.iter_mut().for_each(|traveller| traveller.arrives = Some("lo".into()));
    } else {
        remote = walk.base(Table::Filter, "FORWARD", remote);
        remote = walk.base(Table::Nat, "POSTROUTING", remote);
    }
    local = walk.base(Table::Filter, "INPUT", local);
    local = local.into_iter().filter_map(|it| ipvs.offer(it, &mut taken)).collect();
    // Those that IPVS took leave by the hooks of what this node sends itself. Their mangle and nat are over. What came
    // from elsewhere and goes to this node itself is there already.
    let mut ended: Vec<Simulated> = Vec::new();
    for Taken { traveller, choice, remembered } in taken {
        if begin.is_some() && is_local(traveller.destination) {
            ended.push(Simulated { ending: traveller.delivered(), choice, remembered });
            continue;
        }
        let before = walk.endings.len();
        let through = walk.base(Table::Filter, "OUTPUT", vec![traveller]);
        let through = walk.base(Table::Nat, "POSTROUTING", through);
        let stopped = walk.endings.split_off(before);
        let endings = stopped.into_iter().chain(through.into_iter().map(Traveller::delivered));
        ended.extend(endings.map(|ending| Simulated { ending, choice, remembered }));
    }
    let plain = walk.endings.into_iter().chain(local.into_iter().chain(remote).map(Traveller::delivered));
    let refused = ipvs.refused.into_iter().map(|traveller| traveller.ended(Fate::Rejected));
    let untaken = |ending| Simulated { ending, choice: Choice::None, remembered: None };
    ended.extend(plain.chain(refused).map(untaken));
    ended
}

/// A packet on its way to a real server.
struct Taken {
    traveller: Traveller,
    choice: Choice,
    remembered: Option<(ServiceKey, DestKey)>,
}

fn choice(scheduler: &str) -> Choice {
    match scheduler {
        "rr" | "wrr" => Choice::Turn,
        "sh" | "dh" | "mh" => Choice::Hash,
        _ => Choice::Random,
    }
}

struct Desk<'a> {
    program: &'a Program,
    memory: &'a Memory,
    refused: Vec<Traveller>,
}

impl Desk<'_> {
    fn server(&self, traveller: &Traveller) -> Option<&Server> {
        let family = crate::nftables::wire(Family::of(traveller.destination));
        let mark = ServiceKey::Mark { family, mark: traveller.mark };
        let place = ServiceKey::At {
            protocol: traveller.protocol.number(),
            address: traveller.destination,
            port: traveller.port,
        };
        self.program.servers.get(&mark).or_else(|| self.program.servers.get(&place))
    }

    /// Takes the packet if it is for a virtual server; otherwise it goes on.
    fn offer(&mut self, traveller: Traveller, taken: &mut Vec<Taken>) -> Option<Traveller> {
        let Some(server) = self.server(&traveller) else { return Some(traveller) };
        let key = server.service.key;
        let weighs = Scheduler::parse(&server.service.scheduler).is_none_or(Scheduler::weighs);
        let share = |weight: u32| if weighs { weight } else { weight.min(1) };
        let total: u32 = server.dests.iter().map(|(_, weight)| share(*weight)).sum();
        if total == 0 {
            self.refused.push(traveller);
            return None;
        }
        // What stands for a memory where the kernel cannot have one.
        let hashes = matches!(key, ServiceKey::Mark { .. }) && server.service.scheduler == "mh";
        let is_sticky = server.service.flags & flags::PERSISTENT != 0 || hashes;
        let known = self.memory.get(&key).filter(|dest| server.dests.iter().any(|(has, _)| has == *dest));
        for (dest, weight) in server.dests.iter().filter(|(dest, _)| known.is_none_or(|known| known == dest))
        {
            let mut to = traveller.clone();
            if known.is_none() {
                to.probability *= f64::from(share(*weight)) / f64::from(total);
            }
            (to.destination, to.port, to.translated) = (dest.address, dest.port, true);
            // The rules after IPVS see a packet that this node sends.
            to.arrives = None;
            let (choice, remembered) = (choice(&server.service.scheduler), is_sticky.then_some((key, *dest)));
            taken.push(Taken { traveller: to, choice, remembered });
        }
        None
    }
}

/// Whether the set has these parts of the packet; with the mark it has for them, or 0.
fn find(program: &Program, name: &str, sides: Sides, at: &Traveller) -> Option<u32> {
    let set = Set::find(name, program.tables.family)?;
    let elements = program.sets.get(&set)?;
    let (ip, protocol, port) = (at.destination, at.protocol.number(), at.port);
    let is_place = |a: &IpAddr, p: &u8, n: &u16| (*a, *p, *n) == (ip, protocol, port);
    elements.iter().find_map(|element| match (element, sides) {
        (Element::Ip(address), Sides::Source) => (*address == at.source).then_some(0),
        (Element::Ip(address), Sides::Destination) => (*address == ip).then_some(0),
        (Element::Port(number), Sides::Destination) => (*number == port).then_some(0),
        (Element::Address { address, protocol, port }, Sides::Place) => {
            is_place(address, protocol, port).then_some(0)
        }
        (Element::Marked { address, protocol, port, mark }, Sides::Place) => {
            is_place(address, protocol, port).then_some(*mark)
        }
        (Element::Pair { address, protocol, port, other, prefix }, Sides::PlaceAndSource) => {
            let net = ipnet::IpNet::new(*other, *prefix).ok()?;
            (is_place(address, protocol, port) && net.contains(&at.source)).then_some(0)
        }
        _ => None,
    })
}
