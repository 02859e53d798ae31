// SPDX-License-Identifier: Apache-2.0

//! Makes the constant rules stand, and writes only those that do not.

use std::{collections::BTreeMap, fmt::Write as _};

use hashbrown::{HashMap, HashSet};
use model::Family;

use super::{
    frame::{EMPTIED, chains, footholds},
    render::Scene,
};
use crate::{
    iptables::{name::Name, parse, rule::Rule},
    names::xt,
    xtables::{
        Failure, Table, Tables,
        leftovers::is_per_service,
        words::{self, is_built_in},
    },
};

/// What the tables of one family hold of ours.
#[derive(Debug, Default)]
pub(super) struct Standing {
    /// Rules of chains of any Kubernetes proxy, in our own words.
    chains: HashMap<(Table, Name), Vec<String>>,
    /// Rules of built-in chains.
    built_in: HashSet<(Table, String, String)>,
    /// The iptables mode serves, so its rules must not go before ours can.
    pub(super) serves_otherwise: bool,
}

impl Standing {
    pub(super) fn read(tables: &mut dyn Tables, family: Family) -> Result<Standing, Failure> {
        let mut standing = Standing::default();
        tables.look(family);
        for table in Table::ALL {
            tables.save(family, table, &mut |line| standing.take(table, line, family))?;
        }
        Ok(standing)
    }

    fn take(&mut self, table: Table, line: &str, family: Family) {
        if let Some(name) = words::chain(line) {
            self.serves_otherwise |= is_per_service(name);
            if let Some(name) = Name::new(name).filter(|name| name.as_str().starts_with("KUBE-")) {
                self.chains.entry((table, name)).or_default();
            }
        } else if let Some((chain, text)) = words::rule(line) {
            let is_shared = is_built_in(chain);
            let held = Name::new(chain).and_then(|name| self.chains.get_mut(&(table, name)));
            if !is_shared && held.is_none() {
                return;
            }
            // What is no rule of ours keeps its own words, and is like none.
            let rule = parse::rule(text, family).map_or_else(|| text.to_owned(), |rule| rule.to_string());
            match held {
                Some(rules) => rules.push(rule),
                None => drop(self.built_in.insert((table, chain.to_owned(), rule))),
            }
        }
    }

    /// Whether a chain that is not ours alone has a rule.
    fn has(&self, table: Table, chain: &str, rule: &str) -> bool {
        let shared = Name::new(chain).and_then(|name| self.chains.get(&(table, name)));
        shared.is_some_and(|rules| rules.iter().any(|held| held == rule))
            || self.built_in.contains(&(table, chain.to_owned(), rule.to_owned()))
    }
}

/// The input of a restore.
#[derive(Debug, Default)]
pub(super) struct Script {
    parts: BTreeMap<Table, (String, String)>,
    pub(super) rules: u64,
    pub(super) chains: u64,
}

impl Script {
    /// What is missing, or is not as it should be.
    pub(super) fn to(standing: &Standing, scene: &Scene<'_>) -> Script {
        let mut script = Script::default();
        for (table, chain, rules) in chains(scene) {
            let found = standing.chains.get(&(table, chain));
            let wanted: Vec<String> = rules.iter().map(Rule::to_string).collect();
            if found != Some(&wanted) {
                script.write(table, chain, &wanted);
            }
        }
        for (table, chain) in EMPTIED {
            let chain = Name::known(chain);
            if standing.chains.get(&(table, chain)).is_some_and(|rules| !rules.is_empty()) {
                script.write(table, chain, &[]);
            }
        }
        script.stand(standing, scene);
        script
    }

    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    fn write(&mut self, table: Table, chain: Name, rules: &[String]) {
        let (declared, body) = self.parts.entry(table).or_default();
        let _ = writeln!(declared, ":{chain} - [0:0]");
        for rule in rules {
            let _ = writeln!(body, "-A {chain} {rule}");
            self.rules += 1;
        }
        self.chains += 1;
    }

    /// If a way into our chains is missing, those beside it are put up again too, so that all stand in their order.
    fn stand(&mut self, standing: &Standing, scene: &Scene<'_>) {
        let footholds = footholds(scene);
        let has = |table: Table, chain: &str, rule: &str| standing.has(table, chain, rule);
        let broken: HashSet<(Table, &str)> = footholds
            .iter()
            .filter(|f| !has(f.table, f.chain, &f.rule.to_string()))
            .map(|f| (f.table, f.chain))
            .collect();
        // It is the kubelet's too: to declare it again would empty it.
        let shared = (Table::Filter, Name::known(xt::FIREWALL));
        if broken.contains(&(Table::Filter, xt::FIREWALL)) && !standing.chains.contains_key(&shared) {
            self.write(Table::Filter, shared.1, &[]);
        }
        for foothold in footholds.iter().rev().filter(|f| broken.contains(&(f.table, f.chain))) {
            let (chain, rule) = (foothold.chain, foothold.rule.to_string());
            let (_, body) = self.parts.entry(foothold.table).or_default();
            if has(foothold.table, chain, &rule) {
                let _ = writeln!(body, "-D {chain} {rule}");
            }
            let _ = writeln!(body, "-I {chain} {rule}");
            self.rules += 1;
        }
    }

    /// What decides who may comes before what lets them.
    pub(super) fn input(&self) -> String {
        let mut input = String::new();
        for table in [Table::Filter, Table::Mangle, Table::Nat] {
            if let Some((declared, body)) = self.parts.get(&table) {
                let _ = write!(input, "*{table}\n{declared}{body}COMMIT\n");
            }
        }
        input
    }
}
