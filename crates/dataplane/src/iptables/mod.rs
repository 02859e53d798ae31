// SPDX-License-Identifier: Apache-2.0

#![doc = include_str!("README.md")]
//!
//! # Layout of the code
//!
//! Pure: [`rule`] and `parse` (one rule), [`program`] (all of them) with [`sim`]; `name` (the hashes); `frame` (what is
//! always there) and [`render`] (from the Plan to rules); `script` (the input of a restore) and `turn` (what goes into
//! it). Effects: `probe` asks what tools and kernel can do, `readback` reads, this module writes, `audit` sees what
//! others do and nobody tells. The tools are in [`crate::xtables`].

mod audit;
pub(crate) mod frame;
mod holdings;
pub mod name;
pub(crate) mod parse;
mod probe;
pub mod program;
mod readback;
pub mod render;
pub mod rule;
mod script;
pub mod sim;
#[cfg(test)]
pub(crate) mod tests;
mod turn;

use std::{fs, time::Duration};

use model::{Family, PerFamily, Plan};

pub use self::frame::Scene;
use self::{holdings::Holdings, readback::Readback, script::Script};
use crate::{
    Applied, Audited, Config, Dataplane, Error, Loopback, Scope, TableRules, Unsupported, leftovers,
    loopback::Localnet,
    names::xt,
    xtables::{
        self, Failure, Table, Tables, Variant, Xtables,
        leftovers::{is_current, is_old},
    },
};

/// Keeps our chains.
#[derive(Debug)]
pub struct Iptables<T = Xtables> {
    tables: T,
    config: Config,
    /// What the tables hold; `None` when that is not known, at the start and after an error.
    known: Option<PerFamily<Holdings>>,
    audit: audit::Audit,
    localnet: Localnet,
    /// What the rules do about loopback addresses.
    loopback: PerFamily<Loopback>,
    /// The kernel takes packets out of a TCP window for valid.
    liberal: bool,
    /// The tools know rules that count with counters of their own; `None` as long as that could not be found out.
    counts: Option<bool>,
    /// And those counters are there.
    accounts: bool,
    /// What is not as it should be on this host; told once.
    doubts: Vec<String>,
}

/// Not 0: the kernel takes packets out of a TCP window for valid.
const BE_LIBERAL: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal";

impl Iptables<Xtables> {
    /// Finds the tools, and which variant of them the host uses, in the network namespace of this thread.
    pub fn open(config: &Config) -> Result<Iptables<Xtables>, Unsupported> {
        let xtables::Found { xtables: tools, warnings: doubts } = xtables::open(config.xtables)?;
        probe::probe(&tools, config.families)?;
        let mut iptables = Iptables::over(tools, config);
        iptables.counts = probe::counts(&iptables.tables, config.families);
        (iptables.doubts, iptables.localnet) = (doubts, Localnet::of_kernel());
        iptables.liberal = fs::read_to_string(BE_LIBERAL).is_ok_and(|value| value.trim() != "0");
        Ok(iptables)
    }
}

impl<T: Tables> Iptables<T> {
    /// Works on any tables, and takes for granted that they can hold what we need.
    pub fn over(tables: T, config: &Config) -> Iptables<T> {
        Iptables {
            tables,
            config: config.clone(),
            known: None,
            audit: audit::Audit::default(),
            localnet: Localnet::default(),
            loopback: PerFamily::default(),
            liberal: false,
            counts: None,
            accounts: false,
            doubts: Vec::new(),
        }
    }

    fn scene<'a>(&self, plan: &'a Plan, family: Family, comments: bool) -> Scene<'a> {
        Scene {
            plan,
            family,
            mark: 1 << (self.config.masquerade_bit % 32),
            loopback: self.loopback[family],
            liberal: self.liberal,
            accounts: self.accounts,
            comments,
        }
    }

    /// Whether rules are to count with counters of their own; as before, where that cannot be found out just now.
    fn can_count(&mut self) -> bool {
        self.counts = self.counts.or_else(|| probe::counts(&self.tables, self.config.families));
        match self.counts {
            Some(true) => self.tables.keep_accounts(&xt::ACCOUNTS).unwrap_or(self.accounts),
            _ => false,
        }
    }

    fn families(&self) -> impl Iterator<Item = Family> + use<T> {
        let served = self.config.families;
        Family::BOTH.into_iter().filter(move |family| served[*family])
    }

    /// Reads a family's tables, and writes what is missing.
    fn everything(&mut self, plan: &Plan, family: Family, applied: &mut Applied) -> Result<Holdings, Error> {
        let scene = self.scene(plan, family, turn::affords_comments(plan));
        self.tables.look(family);
        let found =
            Readback::read(&mut self.tables, family).map_err(|failure| Error::tool("read", failure))?;
        let has_old = found.has_old;
        let (holdings, mut script) = turn::everything(found, &scene, self.tables.chains_at_once());
        self.commit(family, &mut script, applied).map_err(unchanged)?;
        if has_old {
            // Ours serve already, so that nothing is missed.
            self.remove(family, &is_old).map_err(|failure| Error::tool("remove old chains from", failure))?;
        }
        Ok(holdings)
    }

    /// Removes chains, but none that a foreign rule leads to. Goes on after an error and returns the first.
    fn remove(&mut self, family: Family, is_doomed: &dyn Fn(&str) -> bool) -> Result<(), Failure> {
        let mut outcome = Ok(());
        for table in [Table::Filter, Table::Nat, Table::Mangle] {
            let mut report = leftovers::Report::default();
            let removed = leftovers::remove_from(&mut self.tables, family, table, is_doomed, &mut report);
            outcome = outcome.and(removed);
        }
        outcome
    }

    fn commit(&mut self, family: Family, script: &mut Script, applied: &mut Applied) -> Result<(), Failure> {
        if script.is_empty() {
            return Ok(());
        }
        self.audit.forget(family, script.changed());
        self.tables.restore(family, &script.input())?;
        applied.batches += 1;
        applied.added += script.added;
        applied.removed += script.removed;
        applied.chains += script.chains;
        Ok(())
    }
}

fn unchanged(failure: Failure) -> Error {
    Error::tool("change", failure)
}

impl<T: Tables> Dataplane for Iptables<T> {
    fn apply(&mut self, plan: &Plan, scope: Scope<'_>) -> Result<Applied, Error> {
        // Whoever leaves by `?` leaves nothing known behind.
        let known = self.known.take();
        let mut applied = Applied { warnings: std::mem::take(&mut self.doubts), ..Applied::default() };
        let changes = match scope {
            Scope::Only(changes) if known.is_some() && !changes.node_wide => Some(changes),
            _ => None,
        };
        let counted = self.accounts;
        if changes.is_none() {
            self.loopback = self.localnet.look(plan, self.config.families, &mut applied.warnings);
            self.accounts = self.can_count();
        }
        let was_known = known.is_some();
        let mut next = PerFamily::default();
        let mut known = known.unwrap_or_default();
        for family in self.families() {
            let mut holdings = std::mem::take(&mut known[family]);
            next[family] = match changes {
                None => self.everything(plan, family, &mut applied)?,
                Some(changes) => {
                    let scene = self.scene(plan, family, holdings.comments);
                    let mut script = turn::change(&mut holdings, &scene, changes);
                    match self.commit(family, &mut script, &mut applied) {
                        Ok(()) => holdings,
                        // The whole would wait for the lock as well: better to say now who holds it.
                        Err(failure @ Failure::Locked { .. }) => return Err(unchanged(failure)),
                        // Somebody may have changed what we thought to know.
                        Err(failure) => {
                            applied.fallbacks.push(family);
                            let error = unchanged(failure);
                            applied.warnings.push(format!("{error}; the whole table is compared instead"));
                            self.everything(plan, family, &mut applied)?
                        }
                    }
                }
            };
        }
        if changes.is_none() {
            self.localnet.serve(self.loopback)?;
        }
        for family in self.families() {
            let Holdings { rules, written, .. } = &next[family];
            let of = |table, total, written| TableRules { family, table, total, written };
            applied.tables.push(of(Table::Nat, rules.nat, written.nat));
            applied.tables.push(of(Table::Filter, rules.filter, written.filter));
        }
        self.known = Some(next);
        let is_asked = matches!(scope, Scope::All) && was_known && self.accounts == counted;
        applied.mended = is_asked && !applied.changed_nothing() && !self.tables.is_sure();
        Ok(applied)
    }

    fn cleanup(&mut self) -> Result<(), Error> {
        self.known = None;
        let mut errors = Vec::new();
        for family in Family::BOTH {
            if let Err(failure) = self.remove(family, &|name: &str| is_current(name) || is_old(name)) {
                errors.push(Error::tool("remove our chains from", failure));
            }
        }
        Error::collect(errors)
    }

    fn dump(&mut self) -> Result<String, Error> {
        let mut text = String::new();
        for family in Family::BOTH {
            for table in Table::ALL {
                let (mut lines, mut has_ours) = (String::new(), false);
                let mut each_line = |line: &str| {
                    let is_ours = line.contains("KUBE-");
                    has_ours |= is_ours;
                    if is_ours || line.starts_with('*') || line == "COMMIT" {
                        lines.extend([line, "\n"]);
                    }
                };
                let saved = self.tables.save(family, table, &mut each_line);
                saved.map_err(|failure| Error::tool("read", failure))?;
                if has_ours {
                    text.push_str(&lines);
                }
            }
        }
        Ok(text)
    }

    fn serves_loopback(&self, family: Family) -> bool {
        self.loopback[family].is_served()
    }

    fn take_lock_wait(&mut self) -> Duration {
        self.tables.take_waited()
    }

    fn variant(&self) -> Option<Variant> {
        self.tables.variant()
    }

    fn audit(&mut self) -> Result<Audited, Error> {
        match &self.known {
            Some(known) => self.audit.step(&mut self.tables, known, self.config.families),
            None => Ok(Audited::default()),
        }
    }

    fn watch(&self) -> Result<Option<Box<dyn crate::Watch>>, Error> {
        self.tables.watch()
    }
}
