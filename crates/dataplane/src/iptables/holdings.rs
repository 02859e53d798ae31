// SPDX-License-Identifier: Apache-2.0

//! What the tables of one family hold for us, as far as it takes to change it: hashes of chains, and the lines that
//! have to be named to be removed.

use std::sync::Arc;

use hashbrown::HashMap;
use model::{Frontend, ServiceKey, ServicePortName};

use super::{
    frame::Top,
    name::Name,
    render::Block,
    script::{Fingerprint, Script},
};
use crate::xtables::Table;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Holdings {
    pub(super) services: HashMap<Arc<ServicePortName>, Held>,
    pub(super) owners: HashMap<Frontend, Arc<ServicePortName>>,
    pub(super) health: HashMap<ServiceKey, Box<str>>,
    /// Rules for endpoints bear comments.
    pub(super) comments: bool,
    /// How many rules they have, without those in built-in chains.
    pub(super) rules: Count,
    /// How many of them the last turn wrote.
    pub(super) written: Count,
}

/// Rules by table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    pub(super) nat: u64,
    pub(super) filter: u64,
}

impl Count {
    pub(super) fn add(&mut self, table: Table, rules: usize) {
        match table {
            Table::Nat => self.nat += rules as u64,
            Table::Filter => self.filter += rules as u64,
            Table::Mangle => {}
        }
    }

    /// Some go and some come.
    pub(super) fn replace(&mut self, old: Count, new: Count) {
        self.nat = (self.nat + new.nat).saturating_sub(old.nat);
        self.filter = (self.filter + new.filter).saturating_sub(old.filter);
    }
}

/// What one service port has in the tables.
#[derive(Debug, Default)]
pub(super) struct Held {
    pub(super) frontends: Vec<Frontend>,
    chains: Box<[(Name, u64)]>,
    lines: Box<[(Top, Box<str>)]>,
    pub(super) rules: Count,
}

impl Held {
    /// What a block comes to.
    pub(super) fn of(frontends: Vec<Frontend>, block: &Block) -> Held {
        let chains = block.chains.iter().map(|(chain, rules)| (*chain, Fingerprint::of(rules)));
        let lines = block.lines.iter().map(|(top, rule)| (*top, rule.to_string().into()));
        let mut rules = Count::default();
        rules.add(Table::Nat, block.chains.iter().map(|(_, rules)| rules.len()).sum());
        block.lines.iter().for_each(|(top, _)| rules.add(top.table(), 1));
        Held { frontends, chains: chains.collect(), lines: lines.collect(), rules }
    }

    pub(super) fn chains(&self) -> impl Iterator<Item = (Name, u64)> + '_ {
        self.chains.iter().copied()
    }

    /// Its lines in one chain.
    pub(super) fn lines(&self, top: Top) -> Vec<&str> {
        self.lines.iter().filter(|(of, _)| *of == top).map(|(_, line)| &**line).collect()
    }

    /// Makes the tables go from `self` to `next`, which was made of `block`.
    pub(super) fn replace(&self, next: &Held, block: &Block, script: &mut Script) {
        for ((chain, rules), (_, print)) in block.chains.iter().zip(&next.chains) {
            if !self.chains.contains(&(*chain, *print)) {
                script.write(Table::Nat, *chain, rules);
            }
        }
        for (chain, _) in &self.chains {
            if !next.chains.iter().any(|(kept, _)| kept == chain) {
                script.remove(Table::Nat, *chain);
            }
        }
        for top in Top::ALL {
            replace_lines(top, &self.lines(top), &next.lines(top), script);
        }
    }
}

/// Lines of one service in one chain: all go and all come, so that they keep their order among themselves.
pub(super) fn replace_lines(top: Top, old: &[&str], new: &[&str], script: &mut Script) {
    if old == new {
        return;
    }
    let chain = top.chain();
    old.iter().for_each(|line| script.delete(top.table(), chain.as_str(), line));
    new.iter().rev().for_each(|line| script.insert(top.table(), chain.as_str(), line));
}
