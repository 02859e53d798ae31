// SPDX-License-Identifier: Apache-2.0

//! Everything of one family, from scratch. Prints as `ipvsadm -ln`, `ipset list` and `iptables-save` do.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use model::Family;
use netlink::{ipset::Element, ipvs::ServiceKey};

use super::{
    frame,
    marks::Marks,
    render::{self, Item, Scene, Server},
    sets::Set,
};
use crate::iptables;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    pub servers: BTreeMap<ServiceKey, Server>,
    pub sets: BTreeMap<Set, BTreeSet<Element>>,
    pub addresses: BTreeSet<IpAddr>,
    pub tables: iptables::program::Program,
}

impl Program {
    /// Nothing yet.
    pub(super) fn empty(family: Family) -> Program {
        Program {
            servers: BTreeMap::new(),
            sets: Set::ALL.map(|set| (set, BTreeSet::new())).into(),
            addresses: BTreeSet::new(),
            tables: iptables::program::Program::new(family),
        }
    }

    pub fn render(scene: &Scene<'_>) -> Program {
        let mut program = Program::empty(scene.family);
        let mut marks = Marks::default();
        for (frontend, decision) in scene.plan.frontends().filter(|(f, _)| f.family() == scene.family) {
            let number = render::is_split(decision).then(|| marks.number(frontend)).flatten();
            let block = render::block(scene, frontend, decision, number);
            program.servers.extend(block.servers.into_iter().map(|server| (server.service.key, server)));
            block.items.into_iter().for_each(|item| program.add(item));
        }
        render::common(scene).into_iter().for_each(|item| program.add(item));
        let checks = scene.plan.health().values();
        checks.filter_map(|check| render::health(check, scene.family)).for_each(|item| program.add(item));
        for (table, chain, rules) in frame::chains(scene) {
            program.tables.chain(table, chain).extend(rules);
        }
        for foothold in frame::footholds(scene) {
            let chain = iptables::name::Name::known(foothold.chain);
            program.tables.chain(foothold.table, chain).push(foothold.rule);
        }
        program
    }

    pub(super) fn add(&mut self, item: Item) {
        match item {
            Item::Member(set, element) => {
                self.sets.entry(set).or_default().insert(element);
            }
            Item::Address(ip) => {
                self.addresses.insert(ip);
            }
        }
    }
}
