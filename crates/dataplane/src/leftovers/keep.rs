// SPDX-License-Identifier: Apache-2.0

//! Keeps open connections translated, for a mode that asks no packet filter for anything.
//!
//! With the last chain of type nat of a family the kernel stops translating, and with the last rule that needs to know of
//! flows it stops following them; connections that are open break either way. (The tables of legacy iptables go on to
//! translate without rules, but their last rule too ends the following.) So before anything goes, a table of ours comes that
//! has one such chain with one such rule, and it stays as long as what was translated before is open.

use std::collections::HashSet;

use model::{Family, PerFamily};
use netlink::{
    Transport,
    conntrack::{Conntrack, Filter},
    nft::{self, Batch, Chain, ChainKind, Create, Expr, Hook, Nft, Rule, TableRef, Verdict},
};

use super::{Report, legacy, nft as tables};
use crate::{
    names::{self, hook::NAT_PREROUTING, userspace::KEEP},
    nftables::{
        lower,
        program::{self, Statement},
        wire,
    },
    userspace::Carrier,
};

/// `dstnat`. Anywhere would do: the kernel shows a chain of this type only the first packet of a connection, and the rule
/// decides nothing.
const PRIORITY: i32 = -100;

/// Knows which flows are to go on.
#[derive(Debug)]
pub struct Keep {
    carrier: Carrier,
    /// Those that were there at the last look, by the kernel's numbers: one whose service is gone meanwhile still counts.
    flows: PerFamily<HashSet<u32>>,
}

impl Keep {
    /// For whoever has a listener wherever the mode before translated from.
    pub(crate) fn new(carrier: Carrier) -> Keep {
        Keep { carrier, flows: PerFamily::default() }
    }

    /// After the rest went: a table goes when nothing is translated that it is there for. `written` are those of this look.
    pub(super) fn settle<T: Transport>(
        &mut self,
        nft: &mut Nft<T>,
        written: PerFamily<bool>,
        report: &mut Report,
    ) {
        let is_quiet = report.removed.is_empty();
        for family in Family::BOTH {
            if !is_there(nft, family) {
                continue;
            }
            let table = format!("table {} {KEEP}", wire(family));
            match self.look(family) {
                // What was not of use to anybody is not told either.
                Ok(0) if is_quiet && written[family] => {
                    tables::remove_table(nft, family, KEEP, &mut Report::default())
                }
                Ok(0) if is_quiet => tables::remove_table(nft, family, KEEP, report),
                // A packet that met a rule just before it went may begin a flow that nobody can see yet.
                Ok(_) => {
                    report.waits = true;
                    report.kept.push(format!(
                        "{table} stays until the open connections that were translated before have ended"
                    ));
                }
                Err(error) => {
                    report.waits = true;
                    report
                        .kept
                        .push(format!("{table} stays, as the kernel does not tell its flows: {error}"));
                }
            }
        }
    }

    /// Counts the flows of services that go elsewhere than to the listeners. What others translate is not among them: they
    /// have chains of their own for it.
    fn look(&mut self, family: Family) -> Result<usize, netlink::Error> {
        let served = self.carrier.served();
        let known = &self.flows[family];
        let mut found = HashSet::new();
        Conntrack::open()?.flows(&Filter::all(wire(family)), |flow| {
            let (original, reply) = (flow.original, flow.reply);
            let goes_elsewhere = (original.dst, original.dport) != (reply.src, reply.sport);
            let is_meant = || {
                known.contains(&flow.id)
                    || served.contains(flow.protocol, (original.dst, original.dport).into())
            };
            if goes_elsewhere && is_meant() {
                found.insert(flow.id);
            }
        })?;
        self.flows[family] = found;
        Ok(self.flows[family].len())
    }
}

/// Writes the tables of the families in which there is something that translates and is about to go; which ones. What cannot
/// be kept goes all the same: rules that nobody follows up would send new connections to endpoints that are gone.
pub(super) fn write<T: Transport>(
    mut nft: Result<&mut Nft<T>, &mut netlink::Error>,
    is_doomed: &dyn Fn(&str) -> bool,
    report: &mut Report,
) -> PerFamily<bool> {
    PerFamily::from_fn(|family| {
        let has_tables = nft.as_mut().is_ok_and(|nft| tables::is_there(nft, family, is_doomed));
        let is_needed = has_tables || legacy::is_there(family, is_doomed);
        if !is_needed || nft.as_mut().is_ok_and(|nft| is_there(nft, family)) {
            return false;
        }
        let written = match &mut nft {
            Ok(nft) => nft.commit(&table(family)).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = &written {
            report.harmed.push(format!(
                "connections over {family} that another mode or proxy had translated may end with its rules, as table {} \
                 {KEEP} cannot be written: {error}",
                wire(family)
            ));
        }
        written.is_ok()
    })
}

/// Removes them: whoever serves now has chains of his own.
pub(super) fn remove<T: Transport>(nft: &mut Nft<T>, report: &mut Report) {
    for family in Family::BOTH {
        if is_there(nft, family) {
            tables::remove_table(nft, family, KEEP, report);
        }
    }
}

pub(super) fn is_there<T: Transport>(nft: &mut Nft<T>, family: Family) -> bool {
    let tables = nft.tables(wire(family)).unwrap_or_default();
    tables.iter().any(|listed| listed.object.name == KEEP)
}

/// `type nat hook prerouting; ct status dnat accept`
fn table(family: Family) -> Batch {
    let at = TableRef { family: wire(family), name: KEEP };
    let comment = Some(names::TABLE_COMMENT.to_owned());
    let mut exprs = lower(family, &program::Rule(vec![Statement::IsTranslated]));
    exprs.push(Expr::Verdict(Verdict::Accept));
    let mut batch = Batch::new();
    batch.add_table(0, &nft::Table { comment, ..nft::Table::new(wire(family), KEEP) }, Create::IfMissing);
    let chain = Chain::base(NAT_PREROUTING, ChainKind::Nat, Hook::Prerouting, PRIORITY);
    batch.add_chain(0, at, &chain, Create::IfMissing);
    batch.add_rule(0, at, &Rule { chain: NAT_PREROUTING.to_owned(), exprs, comment: None });
    batch
}
