// SPDX-License-Identifier: Apache-2.0

//! The input of one `iptables-restore --noflush`: only what changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    hash::Hasher as _,
};

use super::{frame::Top, holdings::Count, name::Name, rule::Rule};
use crate::xtables::Table;

/// What is to be done in the tables of one family.
#[derive(Debug, Default)]
pub(super) struct Script {
    parts: BTreeMap<Table, Part>,
    /// Commits that come before all that is in `parts`, and their chains.
    early: String,
    cut: Vec<(Table, Name)>,
    /// Rules written, a replaced one included.
    pub(super) added: u64,
    /// Rules removed one by one.
    pub(super) removed: u64,
    /// Chains written anew or removed.
    pub(super) chains: u64,
    /// Rules written, by table.
    pub(super) written: Count,
    /// Chains of which some rules change.
    shared: BTreeSet<(Table, Name)>,
}

/// What is to be done in one table, in the order in which it must be done.
#[derive(Debug, Default)]
struct Part {
    /// Chains to be made, or emptied if they are there.
    declared: Vec<Name>,
    deleted: String,
    bodies: String,
    inserted: String,
    removed: String,
}

impl Script {
    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.early.is_empty()
    }

    /// All chains that change.
    pub(super) fn changed(&self) -> impl Iterator<Item = (Table, Name)> + '_ {
        let declared =
            self.parts.iter().flat_map(|(table, part)| part.declared.iter().map(|name| (*table, *name)));
        declared.chain(self.cut.iter().copied()).chain(self.shared.iter().copied())
    }

    /// Lets what has been written to a table be a commit of its own, if it is `chains` or more. Nothing that was
    /// written may need what is written later, and what leads to it must not have been written yet.
    pub(super) fn cut(&mut self, table: Table, chains: usize) {
        let Some(part) = self.parts.get_mut(&table).filter(|part| part.declared.len() >= chains) else {
            return;
        };
        self.cut.extend(part.declared.iter().map(|name| (table, *name)));
        print(&mut self.early, table, &mut part.declared, &part.bodies);
        self.early.push_str("COMMIT\n");
        part.bodies.clear();
        if part.is_empty() {
            self.parts.remove(&table);
        }
    }

    /// Writes a chain anew.
    pub(super) fn write<'a>(&mut self, table: Table, chain: Name, rules: impl IntoIterator<Item = &'a Rule>) {
        self.declare(table, chain);
        let part = self.parts.entry(table).or_default();
        for rule in rules {
            let _ = writeln!(part.bodies, "-A {chain} {rule}");
            self.added += 1;
            self.written.add(table, 1);
        }
    }

    /// Makes a chain, or empties it.
    pub(super) fn declare(&mut self, table: Table, chain: Name) {
        self.parts.entry(table).or_default().declared.push(chain);
        self.chains += 1;
    }

    /// Removes a chain to which nothing leads any more.
    pub(super) fn remove(&mut self, table: Table, chain: Name) {
        let part = self.parts.entry(table).or_default();
        part.declared.push(chain);
        let _ = writeln!(part.removed, "-X {chain}");
        self.chains += 1;
        self.removed += 1;
    }

    /// Adds to the end of a chain that was declared here.
    pub(super) fn append(&mut self, top: Top, line: &str) {
        let _ = writeln!(self.parts.entry(top.table()).or_default().bodies, "-A {} {line}", top.chain());
        self.added += 1;
        self.written.add(top.table(), 1);
    }

    /// Puts a rule at the beginning of a chain.
    pub(super) fn insert(&mut self, table: Table, chain: &str, line: &str) {
        let _ = writeln!(self.parts.entry(table).or_default().inserted, "-I {chain} {line}");
        self.written.add(table, 1);
        self.shared.extend(Name::new(chain).map(|chain| (table, chain)));
        self.added += 1;
    }

    /// Removes the first rule that is this one. It must be there.
    pub(super) fn delete(&mut self, table: Table, chain: &str, line: &str) {
        let _ = writeln!(self.parts.entry(table).or_default().deleted, "-D {chain} {line}");
        self.shared.extend(Name::new(chain).map(|chain| (table, chain)));
        self.removed += 1;
    }

    /// The input. Tables change one after the other: where refusals only go, what is refused no longer is translated
    /// first; where some come, they come before the translation goes.
    pub(super) fn input(&mut self) -> String {
        let refusals_go = self.parts.get(&Table::Filter).is_some_and(|part| {
            part.inserted.is_empty() && part.declared.is_empty() && !part.deleted.is_empty()
        });
        let order = match refusals_go {
            true => [Table::Mangle, Table::Nat, Table::Filter],
            false => [Table::Mangle, Table::Filter, Table::Nat],
        };
        let mut input = std::mem::take(&mut self.early);
        for table in order {
            if let Some(Part { declared, deleted, bodies, inserted, removed }) = self.parts.get_mut(&table) {
                print(&mut input, table, declared, deleted);
                input.extend([&**bodies, inserted, removed, "COMMIT\n"]);
            }
        }
        input
    }
}

impl Part {
    fn is_empty(&self) -> bool {
        let Part { declared, deleted, bodies, inserted, removed } = self;
        declared.is_empty() && [deleted, bodies, inserted, removed].iter().all(|text| text.is_empty())
    }
}

/// Begins a table with its chains, which are used up.
fn print(input: &mut String, table: Table, declared: &mut Vec<Name>, rest: &str) {
    let _ = writeln!(input, "*{table}");
    // The nft variant (1.8.9) keeps the names of a commit's chains in a sorted list, and looks for each that is named,
    // and for where a new one belongs, from its beginning. From last to first, a new one's place is found at once.
    declared.sort_unstable_by(|one, other| other.cmp(one));
    for chain in declared.drain(..) {
        let _ = writeln!(input, ":{chain} - [0:0]");
    }
    input.push_str(rest);
}

/// Tells one list of rules from another without keeping it.
#[derive(Clone, Debug, Default)]
pub(super) struct Fingerprint(std::hash::DefaultHasher);

impl Fingerprint {
    pub(super) fn of<'a>(rules: impl IntoIterator<Item = &'a Rule>) -> u64 {
        let mut fingerprint = Fingerprint::default();
        let mut line = String::new();
        for rule in rules {
            line.clear();
            let _ = write!(line, "{rule}");
            fingerprint.add(&line);
        }
        fingerprint.end()
    }

    pub(super) fn add(&mut self, line: &str) {
        self.0.write(line.as_bytes());
        self.0.write_u8(b'\n');
    }

    pub(super) fn end(&self) -> u64 {
        self.0.finish()
    }
}
