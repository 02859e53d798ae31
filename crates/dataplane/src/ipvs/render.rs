// SPDX-License-Identifier: Apache-2.0

//! From the decision for one frontend to virtual servers, addresses and members of sets. Pure.
//!
//! IPVS has one virtual server for each address and port, and so one pool. Where traffic from inside goes to another
//! pool than traffic from outside, what comes from inside gets a mark, and a second virtual server goes by the mark.

use std::{collections::BTreeSet, net::IpAddr};

use model::{
    Address, Backend, Decision, Family, Forward, Frontend, HealthCheck, Masquerade, NodePortScope, Plan,
    Protocol, Role, Scheduler, SchedulerFlags, Verdict,
};
use netlink::{
    ipset::Element,
    ipvs::{DestKey, Service, ServiceKey, flags},
};

use super::{Settings, marks, sets::Set};
use crate::Loopback;

/// What servers and members depend on beyond one decision.
#[derive(Clone, Copy, Debug)]
pub struct Scene<'a> {
    pub plan: &'a Plan,
    pub family: Family,
    pub settings: &'a Settings,
    /// The node's own addresses: all but those of our link.
    pub own: &'a BTreeSet<IpAddr>,
    /// The bit of the mark that means "masquerade".
    pub mark: u32,
    /// What becomes of loopback addresses; node ports are not served on them.
    pub loopback: Loopback,
}

impl Scene<'_> {
    /// The addresses that serve node ports. The kernel does not let IPVS send what comes from a loopback address to
    /// another machine, so these never do.
    pub fn node_port_addresses(&self) -> Vec<IpAddr> {
        let is_fit = |ip: &IpAddr| Family::of(*ip) == self.family && !ip.is_loopback() && !is_link_local(*ip);
        match self.plan.node_ports(self.family) {
            NodePortScope::All => self.own.iter().copied().filter(is_fit).collect(),
            NodePortScope::Only(addresses) => addresses.iter().copied().filter(is_fit).collect(),
        }
    }

    /// Where the frontend's packets go to. What a node port shares with another service's address is that one's.
    fn places(&self, frontend: &Frontend) -> Vec<IpAddr> {
        match frontend.address {
            Address::Ip(ip) => vec![ip],
            Address::NodePort(_) => {
                let is_free = |ip: &IpAddr| {
                    let place = Frontend { address: Address::Ip(*ip), ..*frontend };
                    self.plan.decision(&place).is_none()
                };
                self.node_port_addresses().into_iter().filter(is_free).collect()
            }
        }
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// What one frontend needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Block {
    pub servers: Vec<Server>,
    /// Several frontends may need the same.
    pub items: Vec<Item>,
}

/// A virtual server with its real servers, sorted by their place, each with its weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    pub service: Service,
    pub dests: Vec<(DestKey, u32)>,
}

/// Something that is there or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Item {
    Member(Set, Element),
    /// An address of our link.
    Address(IpAddr),
}

/// Whether traffic from inside needs a virtual server of its own.
pub fn is_split(decision: &Decision) -> bool {
    matches!(
        (&decision.inside, &decision.outside),
        (Verdict::Forward(inside), Verdict::Forward(outside)) if inside.pool != outside.pool
    )
}

/// See [`Block`]. `number` tells the frontend's mark from others, if it [`is_split`] and one was left for it.
pub fn block(scene: &Scene<'_>, frontend: &Frontend, decision: &Decision, number: Option<u16>) -> Block {
    let mut block = Block::default();
    let places = scene.places(frontend);
    if places.is_empty() {
        return block;
    }
    let writer = Writer { scene, frontend, decision };
    for ip in &places {
        writer.place(*ip, &mut block);
    }
    if let (Some(number), Verdict::Forward(inside)) =
        (number.filter(|_| is_split(decision)), &decision.inside)
    {
        let mark = marks::of(number, inside.masquerade, scene.mark);
        let key = ServiceKey::Mark { family: crate::nftables::wire(scene.family), mark };
        block.servers.push(writer.server(key, Some(inside)));
        let member = |ip: &IpAddr| Element::Marked {
            address: *ip,
            protocol: frontend.protocol.number(),
            port: frontend.port,
            mark,
        };
        block.items.extend(places.iter().map(|ip| Item::Member(Set::Inside, member(ip))));
    }
    writer.ports(&mut block);
    writer.hairpins(&mut block);
    block.items.sort_unstable();
    block.items.dedup();
    block
}

/// What all frontends share.
pub fn common(scene: &Scene<'_>) -> Vec<Item> {
    let node_ports = scene.node_port_addresses().into_iter().map(Element::Ip);
    node_ports.map(|element| Item::Member(Set::NodePortIps, element)).collect()
}

/// What a health check needs.
pub fn health(check: &HealthCheck, family: Family) -> Option<Item> {
    check.families[family].then_some(Item::Member(Set::HealthCheckNodePort, Element::Port(check.port)))
}

struct Writer<'a> {
    scene: &'a Scene<'a>,
    frontend: &'a Frontend,
    decision: &'a Decision,
}

impl Writer<'_> {
    fn element(&self, address: IpAddr) -> Element {
        Element::Address { address, protocol: self.frontend.protocol.number(), port: self.frontend.port }
    }

    /// The server at one address, and the sets the address is in.
    fn place(&self, ip: IpAddr, block: &mut Block) {
        let key = ServiceKey::At {
            protocol: self.frontend.protocol.number(),
            address: ip,
            port: self.frontend.port,
        };
        let mut add = |set, element| block.items.push(Item::Member(set, element));
        match (&self.decision.inside, &self.decision.outside) {
            (_, Verdict::Forward(outside)) => block.servers.push(self.server(key, Some(outside))),
            // The kernel answers "port unreachable" for a server that has nobody.
            (_, Verdict::Reject) if self.is_uniform() => block.servers.push(self.server(key, None)),
            (Verdict::Forward(inside), _) => {
                add(Set::DropOutside, self.element(ip));
                block.servers.push(self.server(key, Some(inside)));
            }
            // Without a server the packet comes to the filter, which drops it.
            _ => add(Set::Drop, self.element(ip)),
        }
        if self.decision.role != Role::NodePort && !self.scene.own.contains(&ip) {
            add(Set::IpvsIps, Element::Ip(ip));
            block.items.push(Item::Address(ip));
        }
        self.memberships(ip, block);
    }

    fn is_uniform(&self) -> bool {
        self.decision.inside == self.decision.outside
    }

    /// By role, as operators know them; where inside and outside differ, `-LOCAL`.
    fn memberships(&self, ip: IpAddr, block: &mut Block) {
        let element = self.element(ip);
        let mut add = |set, element| block.items.push(Item::Member(set, element));
        match self.decision.role {
            Role::ClusterIp => {
                add(Set::ClusterIp, element);
                if forward(&self.decision.inside).is_some_and(|to| to.masquerade == Masquerade::Always) {
                    add(Set::Masquerade, element);
                }
            }
            Role::ExternalIp if self.is_uniform() => add(Set::ExternalIp, element),
            Role::ExternalIp => add(Set::ExternalIpLocal, element),
            Role::LoadBalancer => {
                add(Set::LoadBalancer, element);
                if !self.is_uniform() {
                    add(Set::LoadBalancerLocal, element);
                }
            }
            Role::NodePort => {}
        }
        for net in self.decision.source_ranges.iter().flat_map(|nets| nets.iter()) {
            let pair = Element::Pair {
                address: ip,
                protocol: self.frontend.protocol.number(),
                port: self.frontend.port,
                other: net.network(),
                prefix: net.prefix_len(),
            };
            add(Set::LoadBalancerSourceCidr, pair);
        }
        if self.decision.source_ranges.is_some() {
            add(Set::LoadBalancerFw, element);
        }
    }

    /// Sets of node ports: of ports alone, but for SCTP.
    fn ports(&self, block: &mut Block) {
        if self.decision.role != Role::NodePort {
            return;
        }
        let protocol = self.frontend.protocol;
        let elements: Vec<Element> = match protocol {
            Protocol::Sctp => {
                self.scene.places(self.frontend).into_iter().map(|ip| self.element(ip)).collect()
            }
            _ => vec![Element::Port(self.frontend.port)],
        };
        for element in elements {
            block.items.push(Item::Member(Set::NodePort(protocol), element));
            if !self.is_uniform() {
                block.items.push(Item::Member(Set::NodePortLocal(protocol), element));
            }
        }
    }

    /// Endpoints on this node may be their own clients.
    fn hairpins(&self, block: &mut Block) {
        let pools = [&self.decision.inside, &self.decision.outside].into_iter().filter_map(forward);
        for backend in pools.flat_map(|to| to.pool.backends.iter()).filter(|backend| backend.local) {
            let pair = Element::Pair {
                address: backend.address,
                protocol: self.frontend.protocol.number(),
                port: backend.port,
                other: backend.address,
                prefix: if backend.address.is_ipv4() { 32 } else { 128 },
            };
            block.items.push(Item::Member(Set::LoopBack, pair));
        }
    }

    fn server(&self, key: ServiceKey, to: Option<&Forward>) -> Server {
        let place = |backend: &Backend| DestKey { address: backend.address, port: backend.port };
        let dest = |backend: &Backend| (place(backend), u32::from(backend.weight));
        let dests = to.map(|to| to.pool.backends.iter().map(dest).collect()).unwrap_or_default();
        Server { service: self.service(key, to), dests }
    }

    fn service(&self, key: ServiceKey, to: Option<&Forward>) -> Service {
        let is_weighted = to.is_some_and(|to| to.pool.is_weighted());
        let (mut scheduler, mut flags) = self.algorithm(is_weighted);
        let mut timeout = 0;
        if let Some(affinity) = self.decision.affinity {
            match key {
                ServiceKey::At { .. } => {
                    flags |= flags::PERSISTENT;
                    timeout = affinity.timeout_secs.get();
                }
                // A server that goes by a mark remembers a client with the port it asked for, not the endpoint's.
                // So clients are told apart by a hash, which moves few of them when endpoints come and go.
                ServiceKey::Mark { .. } => (scheduler, flags) = ("mh", flags::SCHEDULER_1),
            }
        }
        Service { key, scheduler: scheduler.to_owned(), flags, timeout }
    }

    /// The scheduler that the service asks for, or else the node's: the one of its kind that knows weights, where there
    /// are any.
    fn algorithm(&self, is_weighted: bool) -> (&str, u32) {
        let asked = self.decision.algorithm();
        let mut flags = 0;
        for (wish, flag) in [
            (SchedulerFlags::FALLBACK, flags::SCHEDULER_1),
            (SchedulerFlags::PORT, flags::SCHEDULER_2),
            (SchedulerFlags::THIRD, flags::SCHEDULER_3),
        ] {
            flags |= if asked.flags.contains(wish) { flag } else { 0 };
        }
        if self.frontend.protocol == Protocol::Udp && asked.flags.contains(SchedulerFlags::ONE_PACKET) {
            flags |= flags::ONE_PACKET;
        }
        // A hash may lead to a real server that is going; without this flag the client would be refused.
        let hashed = |name: &str| if matches!(name, "sh" | "mh") { flags::SCHEDULER_1 } else { 0 };
        let is_there = |scheduler: &Scheduler| !self.scene.settings.absent.contains(scheduler);
        if let Some(name) = asked.scheduler.filter(is_there).and_then(Scheduler::kernel_name) {
            return (name, flags | hashed(name));
        }
        match (self.scene.settings.scheduler.as_str(), is_weighted) {
            ("rr", true) => ("wrr", flags),
            ("lc", true) => ("wlc", flags),
            // As kube-proxy has it: otherwise all connections of a client would go to one endpoint.
            ("mh", _) => ("mh", flags | flags::SCHEDULER_1 | flags::SCHEDULER_2),
            (name, _) => (name, flags | hashed(name)),
        }
    }
}

fn forward(verdict: &Verdict) -> Option<&Forward> {
    match verdict {
        Verdict::Forward(forward) => Some(forward),
        Verdict::Reject | Verdict::Drop => None,
    }
}
