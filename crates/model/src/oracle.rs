// SPDX-License-Identifier: Apache-2.0

//! The specification, executable: what must happen to a given new connection.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;

use crate::{
    decision::{Address, Backend, Decision, Frontend, Masquerade, NodePortScope, PodTraffic, Verdict},
    family::{Family, Protocol},
    plan::Plan,
    tuning::Algorithm,
};

/// The first packet of a connection, as it meets this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    pub origin: Origin,
    pub source: IpAddr,
    pub destination: IpAddr,
    /// The destination is an address of this node.
    pub destination_is_local: bool,
    pub protocol: Protocol,
    pub port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A process on this node (the source is one of its addresses).
    Node,
    /// Received on this interface.
    Interface(Arc<str>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// To one of these, in proportion to their weights or as `algorithm` says; with the node's address as source if `masquerade`, and
    /// also if the chosen one is the source itself.
    Forward {
        backends: Box<[Backend]>,
        masquerade: bool,
        algorithm: Algorithm,
    },
    Reject,
    Drop,
    /// Not ours: the node treats it as if there were no proxy.
    Pass,
}

impl Plan {
    /// What must happen to a new connection that begins with this packet.
    pub fn decide(&self, packet: &Packet) -> Outcome {
        let ip = Frontend {
            address: Address::Ip(packet.destination),
            protocol: packet.protocol,
            port: packet.port,
        };
        let family = Family::of(packet.destination);
        let node_port = Frontend { address: Address::NodePort(family), ..ip };
        let decision = self.decision(&ip).or_else(|| {
            let is_admitted = self.serves_node_ports(packet.destination, packet.destination_is_local);
            self.decision(&node_port).filter(|_| is_admitted)
        });
        match decision {
            Some(decision) => self.follow(decision, packet),
            None => self.decide_unknown(packet.destination),
        }
    }

    /// What must happen to a packet that is for no frontend, whatever its protocol; an echo request, say.
    pub fn decide_unknown(&self, destination: IpAddr) -> Outcome {
        if self.has_cluster_ip(&destination) {
            return Outcome::Reject;
        }
        let cidrs = self.service_cidrs(Family::of(destination));
        if cidrs.iter().any(|net| net.contains(&destination)) { Outcome::Drop } else { Outcome::Pass }
    }

    fn follow(&self, decision: &Decision, packet: &Packet) -> Outcome {
        let is_let_in = |nets: &Arc<[IpNet]>| nets.iter().any(|net| net.contains(&packet.source));
        if !decision.source_ranges.as_ref().is_none_or(is_let_in) {
            return Outcome::Drop;
        }
        let is_pod = self.is_pod(packet);
        let is_inside = is_pod || packet.origin == Origin::Node;
        match if is_inside { &decision.inside } else { &decision.outside } {
            Verdict::Reject => Outcome::Reject,
            Verdict::Drop => Outcome::Drop,
            Verdict::Forward(forward) => Outcome::Forward {
                backends: forward.pool.backends.clone(),
                masquerade: match forward.masquerade {
                    Masquerade::Never => false,
                    Masquerade::OffPods => !is_pod,
                    Masquerade::Always => true,
                },
                algorithm: decision.algorithm(),
            },
        }
    }

    fn is_pod(&self, packet: &Packet) -> bool {
        let arrives_on = |test: &dyn Fn(&str) -> bool| match &packet.origin {
            Origin::Node => false,
            Origin::Interface(name) => test(name),
        };
        match self.pod_traffic(Family::of(packet.source)) {
            None => false,
            Some(PodTraffic::Source(net)) => net.contains(&packet.source),
            Some(PodTraffic::Interface(name)) => arrives_on(&|interface| *interface == **name),
            Some(PodTraffic::InterfacePrefix(prefix)) => arrives_on(&|i| i.starts_with(&**prefix)),
        }
    }

    fn serves_node_ports(&self, address: IpAddr, is_local: bool) -> bool {
        let family = Family::of(address);
        match self.node_ports(family) {
            NodePortScope::All => is_local && (!address.is_loopback() || self.loopback_node_ports(family)),
            NodePortScope::Only(addresses) => addresses.contains(&address),
        }
    }
}
