// SPDX-License-Identifier: Apache-2.0

//! The tables of one family, in the nouns of iptables. Prints as `iptables-save` does.

use std::{collections::BTreeMap, fmt};

use model::Family;

use super::{name::Name, rule::Rule};
use crate::xtables::Table;
pub(crate) use crate::xtables::words::is_built_in;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    pub family: Family,
    pub tables: BTreeMap<Table, BTreeMap<Name, Vec<Rule>>>,
}

impl Program {
    pub(crate) fn new(family: Family) -> Program {
        Program { family, tables: BTreeMap::new() }
    }

    /// The rules of a chain, which is made if need be.
    pub(crate) fn chain(&mut self, table: Table, name: Name) -> &mut Vec<Rule> {
        self.tables.entry(table).or_default().entry(name).or_default()
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (table, chains) in &self.tables {
            writeln!(f, "*{table}")?;
            let (built_in, ours): (Vec<_>, Vec<_>) =
                chains.iter().partition(|(name, _)| is_built_in(name.as_str()));
            for (name, _) in &built_in {
                writeln!(f, ":{name} ACCEPT [0:0]")?;
            }
            for (name, _) in &ours {
                writeln!(f, ":{name} - [0:0]")?;
            }
            for (name, rules) in built_in.into_iter().chain(ours) {
                for rule in rules {
                    writeln!(f, "-A {name} {rule}")?;
                }
            }
            writeln!(f, "COMMIT")?;
        }
        Ok(())
    }
}
