// SPDX-License-Identifier: Apache-2.0

//! What is in nf_tables: kube-proxy's own tables, and the chains of its iptables modes that the nft variant of
//! iptables wrote. All by netlink: an image without `iptables` and `nft` can remove them.

use std::collections::BTreeSet;

use model::Family;
use netlink::{
    Transport,
    nft::{Batch, Delete, Expr, ListedRule, Nft, TableRef, Verdict},
};

use super::{
    Report,
    fate::{self, Jump},
};
use crate::{
    names::{self, userspace::TABLE as USERSPACE, xt},
    nftables::wire,
    xtables::Table,
};

/// The table of kube-proxy's nftables mode.
const KUBE_PROXY: &str = "kube-proxy";
/// Chains in one batch. Other programs' commits wait for it.
const BATCH_CHAINS: usize = 1_000;

/// Removes a table with all that is in it; whether it was there.
pub(super) fn remove_table<T: Transport>(nft: &mut Nft<T>, family: Family, name: &str, report: &mut Report) {
    let mut batch = Batch::new();
    batch.delete_table(0, TableRef { family: wire(family), name }, Delete::Existing);
    match nft.commit(&batch) {
        Ok(()) => report.removed.push(format!("table {} {name}", wire(family))),
        Err(error) if error.is_not_found() => {}
        Err(error) => report.failed.push(format!("table {} {name}: {error}", wire(family))),
    }
}

/// Removes the tables of kube-proxy's nftables mode.
pub(super) fn remove_kube_proxy<T: Transport>(nft: &mut Nft<T>, report: &mut Report) {
    for family in Family::BOTH {
        remove_table(nft, family, KUBE_PROXY, report);
    }
}

/// Whether a proxy has anything here that would be removed.
pub(super) fn is_there<T: Transport>(
    nft: &mut Nft<T>,
    family: Family,
    is_doomed: &dyn Fn(&str) -> bool,
) -> bool {
    let tables = nft.tables(wire(family)).unwrap_or_default();
    tables.iter().any(|listed| [names::TABLE, USERSPACE, KUBE_PROXY].contains(&listed.object.name.as_str()))
        || nft.tables_with_chain(wire(family), is_doomed).is_ok_and(|concerned| !concerned.is_empty())
}

/// Whether kube-proxy's rules are here, in its own table or by the nft variant of iptables.
pub(super) fn serves<T: Transport>(nft: &mut Nft<T>, family: Family) -> bool {
    let family = wire(family);
    let own = nft.chains(TableRef { family, name: KUBE_PROXY }).is_ok_and(|chains| !chains.is_empty());
    let by_iptables = nft.rules_of(TableRef { family, name: "nat" }, xt::SERVICES);
    // The chain alone comes before what is in it.
    own || by_iptables.is_ok_and(|rules| !rules.is_empty())
}

/// Removes the doomed chains of the tables that iptables keeps here.
pub(super) fn remove_chains<T: Transport>(
    nft: &mut Nft<T>,
    is_doomed: &dyn Fn(&str) -> bool,
    report: &mut Report,
) {
    for family in Family::BOTH {
        // Mostly none, and a listing goes through the chains of all tables: it is made once.
        let concerned = match nft.tables_with_chain(wire(family), is_doomed) {
            Ok(concerned) => concerned,
            Err(error) => {
                report.failed.push(format!("chains of {}: {error}", wire(family)));
                continue;
            }
        };
        // Filter first: what it refuses is still translated in nat.
        let names = [Table::Filter, Table::Nat, Table::Mangle].map(|table| table.to_string());
        for name in names.into_iter().filter(|name| concerned.contains(name)) {
            let table = TableRef { family: wire(family), name: &name };
            if let Err(error) = remove_from(nft, table, is_doomed, report) {
                report.failed.push(format!("chains of table {} {name}: {error}", table.family));
            }
        }
    }
}

fn remove_from<T: Transport>(
    nft: &mut Nft<T>,
    table: TableRef<'_>,
    is_doomed: &dyn Fn(&str) -> bool,
    report: &mut Report,
) -> Result<(), netlink::Error> {
    let chains = nft.chains(table)?;
    let (doomed, others): (Vec<_>, Vec<_>) =
        chains.into_iter().map(|listed| listed.object).partition(|chain| is_doomed(&chain.name));
    if doomed.is_empty() {
        return Ok(());
    }
    let doomed: BTreeSet<String> = doomed.into_iter().map(|chain| chain.name).collect();
    // Only the rules of other chains are looked at: kube-proxy's own may be hundreds of thousands.
    let mut jumps = Vec::new();
    for chain in others {
        for rule in nft.rules_of(table, &chain.name)? {
            if let Some(to) = target(&rule).filter(|to| doomed.contains(*to)) {
                jumps.push(Jump {
                    from: chain.name.clone(),
                    from_built_in: chain.base.is_some(),
                    to: to.to_owned(),
                    rule: rule.handle,
                });
            }
        }
    }
    let fate = fate::decide(doomed, jumps, |chain| {
        let rules = nft.rules_of(table, chain)?;
        Ok::<_, netlink::Error>(rules.iter().filter_map(target).map(str::to_owned).collect())
    })?;
    report.keep(&format!("{} {}", table.family, table.name), &fate.kept);

    // Cut off at once, then taken away in pieces.
    let mut batch = Batch::new();
    for jump in &fate.jumps {
        batch.delete_rule(0, table, &jump.from, jump.rule);
    }
    nft.commit(&batch)?;
    for some in fate.chains.chunks(BATCH_CHAINS) {
        let mut batch = Batch::new();
        some.iter().for_each(|chain| batch.flush_chain(0, table, chain));
        nft.commit(&batch)?;
    }
    for some in fate.chains.chunks(BATCH_CHAINS) {
        let mut batch = Batch::new();
        some.iter().for_each(|chain| batch.delete_chain(0, table, chain, Delete::Existing));
        nft.commit(&batch)?;
    }
    report.chains(&format!("table {} {}", table.family, table.name), fate.chains.len());
    Ok(())
}

/// The chain a rule leads to.
fn target(rule: &ListedRule) -> Option<&str> {
    rule.rule.exprs.iter().find_map(|expr| match expr {
        Expr::Verdict(Verdict::Jump(chain) | Verdict::Goto(chain)) => Some(chain.as_str()),
        _ => None,
    })
}
