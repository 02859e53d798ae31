// SPDX-License-Identifier: Apache-2.0

//! Tables without a kernel. They do what `iptables-restore --noflush` does, are as strict as it is, and fail on
//! schedule.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use model::{Family, PerFamily};

use crate::{
    iptables::{parse, program::is_built_in},
    xtables::{
        Failure, Table, Tables,
        testing::{Mood, Moody},
        words::{chain, rule, target},
    },
};

type Chains = BTreeMap<String, Vec<String>>;

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    pub(crate) tables: PerFamily<BTreeMap<Table, Chains>>,
    /// What becomes of the next restores; well, when empty.
    pub(crate) schedule: VecDeque<Mishap>,
    /// The last input, and how many there were.
    pub(crate) last: String,
    pub(crate) restores: usize,
    /// There are counters, and a trial of rules that count with them ends so; `None` where there are none.
    pub(crate) accounts: Option<Vec<Mood>>,
}

/// What goes wrong with a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mishap {
    None,
    /// Nothing is changed.
    Refused,
    /// Nothing is changed, as somebody else has the lock.
    Locked,
    /// The first table is changed.
    Halfway,
    /// All is changed, and nobody says so.
    Silent,
}

impl Default for Memory {
    fn default() -> Memory {
        let chains = |table| {
            let names = match table {
                Table::Filter => &["INPUT", "FORWARD", "OUTPUT"][..],
                Table::Nat => &["PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"],
                Table::Mangle => &["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"],
            };
            names.iter().map(|name| ((*name).to_owned(), Vec::new())).collect()
        };
        let tables = |_| Table::ALL.into_iter().map(|table| (table, chains(table))).collect();
        let tables = PerFamily::from_fn(tables);
        Memory { tables, schedule: VecDeque::new(), last: String::new(), restores: 0, accounts: None }
    }
}

impl Memory {
    /// The rules of a chain that is there.
    pub(crate) fn rules(&self, family: Family, table: Table, chain: &str) -> Option<&Vec<String>> {
        self.tables[family][&table].get(chain)
    }

    /// All chains of a table that are not the kernel's.
    pub(crate) fn chains(&self, family: Family, table: Table) -> BTreeSet<String> {
        self.tables[family][&table].keys().filter(|name| !is_built_in(name)).cloned().collect()
    }

    /// Somebody else empties a chain, or removes a rule of it.
    pub(crate) fn vandalise(&mut self, family: Family, table: Table, choice: usize) {
        let chains = self.tables[family].get_mut(&table).unwrap();
        let index = choice % chains.len();
        let rules = chains.values_mut().nth(index).unwrap();
        match rules.is_empty() || choice.is_multiple_of(3) {
            true => rules.clear(),
            false => drop(rules.remove(choice % rules.len())),
        }
    }

    fn commit(&mut self, family: Family, table: Table, lines: &[&str]) -> Result<(), String> {
        let mut chains = self.tables[family][&table].clone();
        for line in lines {
            apply(&mut chains, line, family).map_err(|reason| format!("{reason}: {line}"))?;
        }
        for target in chains.values().flatten().filter_map(|rule| target(rule)) {
            if target.starts_with("KUBE-") && !chains.contains_key(&*target) {
                return Err(format!("nothing is called {target}"));
            }
        }
        self.tables[family].insert(table, chains);
        Ok(())
    }
}

fn apply(chains: &mut Chains, line: &str, family: Family) -> Result<(), &'static str> {
    if let Some(name) = chain(line) {
        chains.entry(name.to_owned()).or_default().clear();
        return Ok(());
    }
    let (verb, rest) = line.split_once(' ').ok_or("no command")?;
    let (name, text) = rest.split_once(' ').unwrap_or((rest, ""));
    if verb == "-X" {
        let is_used = chains.values().flatten().any(|rule| target(rule).as_deref() == Some(name));
        let gone = chains.remove(name).ok_or("no such chain")?;
        return if is_used || !gone.is_empty() { Err("in use") } else { Ok(()) };
    }
    let canonical = parse::rule(text, family).ok_or("not understood")?.to_string();
    let rules = chains.get_mut(name).ok_or("no such chain")?;
    match verb {
        "-A" => rules.push(canonical),
        "-I" => rules.insert(0, canonical),
        "-D" => {
            let place = rules.iter().position(|rule| *rule == canonical).ok_or("no such rule")?;
            rules.remove(place);
        }
        _ => return Err("no such command"),
    }
    Ok(())
}

impl Tables for Memory {
    fn save(&mut self, family: Family, table: Table, each_line: &mut dyn FnMut(&str)) -> Result<(), Failure> {
        let chains = &self.tables[family][&table];
        each_line(&format!("*{table}"));
        for name in chains.keys() {
            each_line(&format!(":{name} {} [0:0]", if is_built_in(name) { "ACCEPT" } else { "-" }));
        }
        for (name, rules) in chains {
            rules.iter().for_each(|text| each_line(&format!("-A {name} {text}")));
        }
        each_line("COMMIT");
        Ok(())
    }

    fn keep_accounts(&mut self, _: &[&str]) -> Option<bool> {
        Some(self.accounts.is_some())
    }

    fn elsewhere(&self) -> Option<Box<dyn Tables>> {
        let moods = self.accounts.clone()?;
        Some(Box::new(Moody(moods.into())))
    }

    /// Those of the legacy variant.
    fn is_sure(&self) -> bool {
        false
    }

    /// So few that every test has several commits.
    fn chains_at_once(&self) -> usize {
        4
    }

    fn restore(&mut self, family: Family, input: &str) -> Result<(), Failure> {
        self.restores += 1;
        self.last = input.to_owned();
        let mishap = self.schedule.pop_front().unwrap_or(Mishap::None);
        let refused =
            |reason: String| Failure::Refused { tool: "memory".to_owned(), reason, line: None, advice: None };
        if mishap == Mishap::Locked {
            return Err(Failure::Locked { waited: Duration::from_secs(5), holder: None });
        }
        if mishap == Mishap::Refused {
            return Err(refused("as asked".to_owned()));
        }
        let (mut table, mut lines) = (None, Vec::new());
        for line in input.lines() {
            match (line.strip_prefix('*'), table) {
                (Some(name), None) => table = Table::ALL.into_iter().find(|table| table.to_string() == name),
                (None, Some(open)) if line == "COMMIT" => {
                    self.commit(family, open, &lines).map_err(refused)?;
                    (table, lines) = (None, Vec::new());
                    if mishap == Mishap::Halfway {
                        return Err(refused("halfway, as asked".to_owned()));
                    }
                }
                (None, Some(_)) => lines.push(line),
                _ => return Err(refused(format!("out of place: {line}"))),
            }
        }
        match mishap {
            Mishap::Silent => Err(refused("silent, as asked".to_owned())),
            _ => Ok(()),
        }
    }
}

#[test]
fn a_table_is_as_strict_as_the_tool() {
    let mut memory = Memory::default();
    let mut is_fine = |body: &str| memory.restore(Family::V4, &format!("*nat\n{body}COMMIT\n")).is_ok();
    assert!(is_fine(":KUBE-X - [0:0]\n-A KUBE-X -j RETURN\n-A OUTPUT -j KUBE-X\n"));
    assert!(!is_fine("-X KUBE-X\n"), "it is in use");
    assert!(!is_fine("-A KUBE-Y -j RETURN\n"), "it is not there");
    assert!(!is_fine("-D KUBE-X -j ACCEPT\n"), "it is not there");
    assert!(!is_fine("-A KUBE-X -j KUBE-Y\n"), "it leads nowhere");
    assert!(is_fine(":KUBE-X - [0:0]\n-D OUTPUT -j KUBE-X\n-X KUBE-X\n"));
    assert_eq!(rule("-A X y"), Some(("X", "y")));
}
