// SPDX-License-Identifier: Apache-2.0

//! What the kernel holds now that is ours. Others use IPVS too, keepalived for one: theirs is not looked at.

use std::{collections::BTreeSet, fmt::Write as _, net::IpAddr};

use hashbrown::{HashMap, HashSet};
use model::{Address, Family, Frontend, Protocol};
use netlink::{
    Error,
    ipset::Element,
    ipvs::{Forward, HeldDest, HeldService, ServiceKey},
};

use super::{
    holdings::{Held, asked},
    kernel::Machine,
    marks::{self, Marks},
    program::Program,
    render::{Item, Server},
    sets::Set,
    text,
};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Readback {
    pub(super) servers: HashMap<ServiceKey, Held>,
    pub(super) items: HashSet<Item>,
    /// How many elements each set that is there can hold; 0 where there is no bound.
    pub(super) room: HashMap<Set, u32>,
}

/// The addresses of this node, by whether they are on our link.
#[derive(Clone, Debug, Default)]
pub(super) struct Addresses {
    pub(super) own: BTreeSet<IpAddr>,
    pub(super) bound: BTreeSet<IpAddr>,
}

impl Addresses {
    pub(super) fn read(machine: &mut dyn Machine, link: u32) -> Result<Addresses, Error> {
        let mut addresses = Addresses::default();
        for address in machine.addresses()? {
            let known = if address.link == link { &mut addresses.bound } else { &mut addresses.own };
            known.insert(address.address);
        }
        Ok(addresses)
    }
}

/// Reads the sets and addresses of one family.
pub(super) fn items(
    machine: &mut dyn Machine,
    addresses: &Addresses,
    family: Family,
) -> Result<Readback, Error> {
    let mut readback = Readback::default();
    let is_ours = |ip: &&IpAddr| Family::of(**ip) == family;
    // The kernel gives a link that is up an address of its own.
    let is_given = |ip: &&IpAddr| !matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let bound = addresses.bound.iter().filter(is_ours).filter(is_given);
    readback.items.extend(bound.map(|ip| Item::Address(*ip)));
    for set in Set::ALL {
        if let Some(held) = machine.set(&set.name(family))? {
            readback.room.insert(set, held.max_elements);
            readback.items.extend(held.elements.into_iter().map(|it| Item::Member(set, it)));
        }
    }
    Ok(readback)
}

/// Reads those virtual servers that are ours, or that `wanted` says will be.
pub(super) fn servers(
    machine: &mut dyn Machine,
    readback: &mut Readback,
    addresses: &Addresses,
    (all, family): (&[HeldService], Family),
    wanted: &HashSet<ServiceKey>,
) -> Result<(), Error> {
    let ownership = Ownership { items: &readback.items, addresses };
    let is_family = |key: &ServiceKey| key.family() == crate::nftables::wire(family);
    let ours: Vec<&HeldService> = all
        .iter()
        .filter(|held| is_family(&held.service.key))
        .filter(|held| wanted.contains(&held.service.key) || ownership.is_ours(&held.service.key))
        .collect();
    let mut servers = HashMap::with_capacity(ours.len());
    for held in ours {
        let key = held.service.key;
        let dests = machine.dests(key)?.iter().map(|held| (held.dest.key, weight(held))).collect();
        servers.insert(key, Held { service: asked(&held.service), dests });
    }
    readback.servers = servers;
    Ok(())
}

/// Of a real server as ours are. Any other has one that none of ours can have, so that it is put right.
pub(super) fn weight(held: &HeldDest) -> u32 {
    if held.dest.forward == Forward::Nat { held.dest.weight } else { u32::MAX }
}

struct Ownership<'a> {
    items: &'a HashSet<Item>,
    addresses: &'a Addresses,
}

impl Ownership<'_> {
    fn is_ours(&self, key: &ServiceKey) -> bool {
        let ServiceKey::At { protocol, address, port } = *key else { return self.is_marked(key) };
        if self.addresses.bound.contains(&address) {
            return true;
        }
        let has = |set, element| self.items.contains(&Item::Member(set, element));
        let place = Element::Address { address, protocol, port };
        let by_place = [Set::ExternalIp, Set::ExternalIpLocal, Set::LoadBalancer, Set::ClusterIp];
        let Some(number) = Protocol::from_number(protocol) else { return false };
        let by_port = if number == Protocol::Sctp { place } else { Element::Port(port) };
        by_place.into_iter().any(|set| has(set, place))
            || (self.addresses.own.contains(&address) && has(Set::NodePort(number), by_port))
    }

    fn is_marked(&self, key: &ServiceKey) -> bool {
        let ServiceKey::Mark { mark, .. } = key else { return false };
        let has_mark =
            |item: &Item| matches!(item, Item::Member(_, Element::Marked { mark: m, .. }) if m == mark);
        self.items.iter().any(has_mark)
    }
}

/// What a virtual server that was found needs to be reached.
pub(super) fn needs(key: ServiceKey, found: &HashSet<Item>) -> Vec<Item> {
    let ServiceKey::At { address, .. } = key else { return Vec::new() };
    let items = [Item::Address(address), Item::Member(Set::IpvsIps, Element::Ip(address))];
    items.into_iter().filter(|item| found.contains(item)).collect()
}

/// All that is ours, as `ipvsadm -ln` and `ipset list` show it, and the addresses of our link.
pub(super) fn text(machine: &mut dyn Machine) -> Result<String, Error> {
    let link = machine.find_link()?;
    let addresses = Addresses::read(machine, link.unwrap_or(0))?;
    let all = machine.servers()?;
    let mut text = String::new();
    for family in Family::BOTH {
        let mut found = items(machine, &addresses, family)?;
        servers(machine, &mut found, &addresses, (&*all, family), &HashSet::new())?;
        let mut program = Program::empty(family);
        for (key, Held { service, dests }) in found.servers {
            let mut dests: Vec<_> = dests.into_iter().collect();
            dests.sort_unstable();
            program.servers.insert(key, Server { service, dests });
        }
        found.items.into_iter().for_each(|item| program.add(item));
        text += &text::ipvsadm(&program);
        text += &text::ipset(&program);
        for ip in &program.addresses {
            let _ = writeln!(text, "{} {ip}", crate::names::IPVS_LINK);
        }
    }
    Ok(text)
}

/// The numbers that frontends already have.
pub(super) fn marks(items: &HashSet<Item>, masquerade: u32, frontends: impl Fn(&Frontend) -> bool) -> Marks {
    let mut found = Marks::default();
    let mut elements: Vec<&Item> = items.iter().collect();
    elements.sort_unstable();
    for item in elements {
        let Item::Member(Set::Inside, Element::Marked { address, protocol, port, mark }) = item else {
            continue;
        };
        let (Some(protocol), Some(number)) =
            (Protocol::from_number(*protocol), marks::number(*mark, masquerade))
        else {
            continue;
        };
        let place = Frontend { address: Address::Ip(*address), protocol, port: *port };
        let node_port = Frontend { address: Address::NodePort(Family::of(*address)), ..place };
        if let Some(frontend) = [place, node_port].into_iter().find(&frontends) {
            found.adopt(frontend, number);
        }
    }
    found
}
