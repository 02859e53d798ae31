// SPDX-License-Identifier: Apache-2.0

//! What the tables of one family hold now. Of most chains only a hash is kept.

use std::collections::HashSet;

use hashbrown::HashMap;
use model::Family;

use super::{
    frame::{Foothold, Top},
    name::Name,
    parse,
    program::is_built_in,
    script::Fingerprint,
};
use crate::{
    names::xt,
    xtables::{
        Failure, Table, Tables,
        leftovers::{is_current, is_old, is_per_service},
        words,
    },
};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Readback {
    chains: HashMap<(Table, Name), Fingerprint>,
    tops: HashMap<Top, Vec<Box<str>>>,
    /// Rules in chains that are not ours alone.
    rules: HashSet<(Table, Box<str>, Box<str>)>,
    /// Chains of proxies of the past.
    pub(super) has_old: bool,
}

impl Readback {
    pub(super) fn read(tables: &mut dyn Tables, family: Family) -> Result<Readback, Failure> {
        let mut readback = Readback::default();
        for table in Table::ALL {
            tables.save(family, table, &mut |line| readback.take(table, line, family))?;
        }
        Ok(readback)
    }

    fn take(&mut self, table: Table, line: &str, family: Family) {
        if let Some(name) = words::chain(line) {
            self.has_old |= is_old(name);
            let is_ours = is_current(name) || name == xt::FIREWALL;
            if let Some(name) = Name::new(name).filter(|_| is_ours) {
                self.chains.insert((table, name), Fingerprint::default());
                self.tops.extend(Top::find(table, name.as_str()).map(|top| (top, Vec::new())));
            }
        } else if let Some((chain, text)) = words::rule(line) {
            let is_shared = is_built_in(chain) || chain == xt::FIREWALL;
            if !is_shared && !is_current(chain) {
                return;
            }
            let parsed = parse::rule(text, family);
            if is_shared {
                let rule = parsed.map(|rule| rule.to_string().into());
                self.rules.extend(rule.map(|rule| (table, chain.into(), rule)));
                return;
            }
            // What is no rule of ours keeps its own words, and is like none.
            let text = parsed.map_or_else(|| text.to_owned(), |rule| rule.to_string());
            if let Some(top) = Top::find(table, chain) {
                self.tops.entry(top).or_default().push(text.into());
            } else if let Some(print) = Name::new(chain).and_then(|name| self.chains.get_mut(&(table, name)))
            {
                print.add(&text);
            }
        }
    }

    /// Is the chain there, with these rules? Asked once for each that should be.
    pub(super) fn claim(&mut self, table: Table, chain: Name, print: u64) -> bool {
        self.chains.remove(&(table, chain)).is_some_and(|found| found.end() == print)
    }

    /// The lines of a chain, if it is there.
    pub(super) fn claim_top(&mut self, top: Top) -> Option<Vec<Box<str>>> {
        self.chains.remove(&(top.table(), top.chain()));
        self.tops.remove(&top)
    }

    pub(super) fn has_chain(&self, table: Table, chain: &str) -> bool {
        Name::new(chain).is_some_and(|name| self.chains.contains_key(&(table, name)))
    }

    pub(super) fn has(&self, foothold: &Foothold) -> bool {
        let rule = foothold.rule.to_string().into();
        self.rules.contains(&(foothold.table, foothold.chain.into(), rule))
    }

    /// Chains of services that nobody has asked for, sorted.
    pub(super) fn stale(&self) -> Vec<(Table, Name)> {
        let mut stale: Vec<_> =
            self.chains.keys().copied().filter(|(_, name)| is_per_service(name.as_str())).collect();
        stale.sort_unstable();
        stale
    }
}
