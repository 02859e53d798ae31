// SPDX-License-Identifier: Apache-2.0

//! A world and the plan that follows it.

use std::net::IpAddr;

use model::{
    Changes, EndpointSlice, Family, Frontend, Origin, Outcome, Packet, Plan, Protocol, Service, Settings,
    Update, Verdict, World,
};

use crate::build;

pub(crate) struct Stage {
    pub(crate) world: World,
    pub(crate) plan: Plan,
}

impl Stage {
    /// Knows the node and nothing else.
    pub(crate) fn new(settings: Settings) -> Stage {
        let mut stage = Stage { world: World::new(settings), plan: Plan::new() };
        let addresses = Family::BOTH.map(|family| [build::node_ip(family), build::loopback(family)]);
        let mut addresses = addresses.concat();
        addresses.sort();
        stage.apply([Update::Node(build::node()), Update::HostAddresses(addresses.into())]);
        stage
    }

    /// With a service and its slices.
    pub(crate) fn with(
        settings: Settings,
        service: Service,
        slices: impl IntoIterator<Item = EndpointSlice>,
    ) -> Stage {
        let mut stage = Stage::new(settings);
        stage.apply(slices.into_iter().map(Update::Slice).chain([Update::Service(service)]));
        stage
    }

    pub(crate) fn apply(&mut self, updates: impl IntoIterator<Item = Update>) -> Changes {
        updates.into_iter().for_each(|update| self.world.apply(update));
        let dirty = self.world.take_dirty();
        self.plan.update(&self.world, dirty)
    }

    pub(crate) fn decide(&self, from: Source, to: IpAddr, port: u16) -> Told {
        self.decide_with(Protocol::Tcp, from, to, port)
    }

    pub(crate) fn decide_with(&self, protocol: Protocol, from: Source, to: IpAddr, port: u16) -> Told {
        let family = Family::of(to);
        let (origin, source) = match from {
            Source::Pod => (Origin::Interface("veth0".into()), build::pod(family, 0, 200)),
            Source::Node => (Origin::Node, build::node_ip(family)),
            Source::Client => (Origin::Interface("eth0".into()), build::client(family)),
            Source::At(address) => (Origin::Interface("eth0".into()), address),
        };
        let destination_is_local = self.world.host_addresses().contains(&to);
        let packet = Packet { origin, source, destination: to, destination_is_local, protocol, port };
        Told::of(self.plan.decide(&packet))
    }

    /// The backends of a frontend for both sides, as `node.number` of the pods.
    pub(crate) fn pools(&self, frontend: &Frontend) -> [Option<Vec<String>>; 2] {
        let decision = self.plan.decision(frontend).expect("the frontend exists");
        [&decision.inside, &decision.outside].map(|verdict| match verdict {
            Verdict::Forward(forward) => {
                Some(forward.pool.backends.iter().map(|backend| pod_name(backend.address)).collect())
            }
            Verdict::Reject | Verdict::Drop => None,
        })
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    /// A pod of this node.
    Pod,
    /// A process of this node.
    Node,
    /// Somebody outside of the cluster.
    Client,
    /// Somebody outside, with this address.
    At(IpAddr),
}

/// An [`Outcome`], short enough for a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    To(Vec<String>),
    Masked(Vec<String>),
    Reject,
    Drop,
    Pass,
}

impl Told {
    fn of(outcome: Outcome) -> Told {
        match outcome {
            Outcome::Forward { backends, masquerade, .. } => {
                let names = backends.iter().map(|backend| pod_name(backend.address)).collect();
                if masquerade { Told::Masked(names) } else { Told::To(names) }
            }
            Outcome::Reject => Told::Reject,
            Outcome::Drop => Told::Drop,
            Outcome::Pass => Told::Pass,
        }
    }
}

/// `node.number` of a pod.
pub(crate) fn pod_name(address: IpAddr) -> String {
    match address {
        IpAddr::V4(v4) => format!("{}.{}", v4.octets()[2], v4.octets()[3]),
        IpAddr::V6(v6) => format!("{}.{}", v6.segments()[3], v6.segments()[7]),
    }
}

pub(crate) fn to(names: &str) -> Told {
    Told::To(names.split_whitespace().map(str::to_owned).collect())
}

pub(crate) fn masked(names: &str) -> Told {
    Told::Masked(names.split_whitespace().map(str::to_owned).collect())
}
