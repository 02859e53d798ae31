// SPDX-License-Identifier: Apache-2.0

//! A World and a Plan that follow the steps of a script, the way the product drives them.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use lab::address::{self, Version};
use model::{Changes, Kind, Plan, Update, World};

use crate::scenario::Config;

/// What node-a knows, and what it ought to do about it.
#[derive(Debug)]
pub struct Cluster {
    world: World,
    plan: Plan,
}

impl Cluster {
    /// A cluster in which everything has been listed once: the Node, the service CIDRs, and no service.
    pub fn new(config: &Config) -> (Cluster, Changes) {
        let mut world = World::new(config.settings.clone());
        for kind in Kind::ALL {
            world.apply(Update::Begin(kind));
            match kind {
                Kind::Node => world.apply(Update::Node(config.node.clone())),
                Kind::ServiceCidr if !config.service_cidrs.is_empty() => world.apply(Update::ServiceCidr {
                    name: "config".into(),
                    cidrs: config.service_cidrs.clone().into_boxed_slice(),
                }),
                _ => {}
            }
            world.apply(Update::End(kind));
        }
        world.apply(Update::HostAddresses(host_addresses(&[])));
        let mut cluster = Cluster { world, plan: Plan::new() };
        let changes = cluster.settle();
        (cluster, changes)
    }

    /// Takes all of these in, and plans once.
    pub fn apply(&mut self, updates: impl IntoIterator<Item = Update>) -> Changes {
        updates.into_iter().for_each(|update| self.world.apply(update));
        self.settle()
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The plan of the same world, made at once.
    pub fn plan_from_scratch(&self) -> Plan {
        Plan::from_world(&self.world)
    }

    fn settle(&mut self) -> Changes {
        let dirty = self.world.take_dirty();
        self.plan.update(&self.world, dirty)
    }
}

/// All addresses of node-a, with these extra ones.
pub fn host_addresses(extra: &[IpAddr]) -> Box<[IpAddr]> {
    let own = [address::NODE_A, address::NODE_A_SECOND];
    let fixed = Version::BOTH.iter().flat_map(|version| own.map(|v4| version.address(v4)));
    let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    let all: BTreeSet<IpAddr> = fixed.chain(loopback).chain(extra.iter().copied()).collect();
    all.into_iter().collect()
}
