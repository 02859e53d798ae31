// SPDX-License-Identifier: Apache-2.0

//! A slow look at our chains, some at a time, for what no notification told.
//!
//! How the tool writes a rule into nf_tables is the tool's own business, and changes with its version. So a chain is not
//! compared with what it ought to be, but with what it was when it was first looked at after we had written it. The
//! legacy variant needs none of this: there the watch looks at all rules.

use std::collections::VecDeque;

use hashbrown::HashMap;
use model::{Family, PerFamily};

use super::{frame::Top, holdings::Holdings, name::Name};
use crate::{
    Audited, Error,
    names::xt,
    xtables::{Table, Tables},
};

/// Chains in one step. To ask for one takes some 30 us, so that a step a second takes a thousandth of a core. A round
/// takes six minutes with 1,000 services of 10 endpoints; it is for what the kernel did not tell, which it does.
const STEP: usize = 32;

/// Where the look has got to.
#[derive(Debug, Default)]
pub(super) struct Audit {
    ahead: VecDeque<(Family, Table, Name)>,
    seen: PerFamily<HashMap<(Table, Name), u64>>,
}

impl Audit {
    /// These chains are about to change.
    pub(super) fn forget(&mut self, family: Family, chains: impl Iterator<Item = (Table, Name)>) {
        for chain in chains {
            self.seen[family].remove(&chain);
        }
    }

    /// One step.
    pub(super) fn step(
        &mut self,
        tables: &mut dyn Tables,
        known: &PerFamily<Holdings>,
        families: PerFamily<bool>,
    ) -> Result<Audited, Error> {
        if self.ahead.is_empty() {
            self.begin(known, families);
        }
        let Some((family, ..)) = self.ahead.front().copied() else { return Ok(Audited::default()) };
        let count = self.ahead.iter().take(STEP).take_while(|(of, ..)| *of == family).count();
        let chains: Vec<(Table, Name)> =
            self.ahead.drain(..count).map(|(_, table, chain)| (table, chain)).collect();
        let asked: Vec<(Table, &str)> =
            chains.iter().map(|(table, chain)| (*table, chain.as_str())).collect();
        let found = tables.digests(family, &asked);
        let Some(found) = found.map_err(|error| Error::kernel("look at", "chains of iptables", error))?
        else {
            self.ahead.clear();
            return Ok(Audited::default());
        };
        let mut drift = None;
        for ((table, chain), digest) in chains.into_iter().zip(found) {
            // A chain that is another now is looked at anew once it has been compared.
            if self.seen[family].insert((table, chain), digest).is_some_and(|seen| seen != digest) {
                drift.get_or_insert_with(|| format!("rules of chain {chain} of table {table} ({family})"));
            }
        }
        Ok(Audited { drift, more: !self.ahead.is_empty(), ..Audited::default() })
    }

    /// Begins a round, and forgets chains that are ours no more.
    fn begin(&mut self, known: &PerFamily<Holdings>, families: PerFamily<bool>) {
        for family in Family::BOTH.into_iter().filter(|family| families[*family]) {
            let fixed =
                [(Table::Filter, xt::FORWARD), (Table::Nat, xt::MARK_MASQ), (Table::Nat, xt::POSTROUTING)];
            let fixed = fixed.map(|(table, chain)| (table, Name::known(chain)));
            let tops = Top::ALL.map(|top| (top.table(), top.chain()));
            let of_services = known[family].services.values().flat_map(|held| held.chains());
            let all = fixed.into_iter().chain(tops).chain(of_services.map(|(chain, _)| (Table::Nat, chain)));
            let mut seen = std::mem::take(&mut self.seen[family]);
            for chain in all {
                self.seen[family].extend(seen.remove(&chain).map(|digest| (chain, digest)));
                self.ahead.push_back((family, chain.0, chain.1));
            }
        }
    }
}
