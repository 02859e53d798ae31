// SPDX-License-Identifier: Apache-2.0

//! What Kubernetes proxies leave in tables, and how it is removed.
//!
//! What is the kubelet's stays: its hint, its canaries, and `KUBE-FIREWALL`, which it shares with the proxies.

use std::{collections::BTreeSet, fmt::Write as _};

use model::Family;

use super::{
    Failure, Table, Tables,
    words::{chain, rule, target},
};
use crate::names::xt;

/// A chain of the iptables mode, kube-proxy's or ours, of this time.
pub fn is_current(name: &str) -> bool {
    const FIXED: [&str; 8] = [
        xt::SERVICES,
        xt::NODEPORTS,
        xt::EXTERNAL_SERVICES,
        xt::FORWARD,
        xt::PROXY_FIREWALL,
        xt::POSTROUTING,
        xt::MARK_MASQ,
        xt::PROXY_CANARY,
    ];
    FIXED.contains(&name) || is_per_service(name)
}

/// A chain of one service port, of this time.
pub fn is_per_service(name: &str) -> bool {
    [xt::SVC, xt::SVL, xt::EXT, xt::FW, xt::SEP].iter().any(|prefix| name.starts_with(prefix))
}

/// A chain of an iptables or userspace mode of the past, which has no duty any more.
pub fn is_old(name: &str) -> bool {
    xt::OLD.contains(&name) || name.starts_with(xt::XLB)
}

/// A chain that only kube-proxy's ipvs mode has.
pub fn is_ipvs(name: &str) -> bool {
    xt::IPVS.contains(&name)
}

/// Removes the chains that `is_doomed` tells, and whatever rule leads to them, from all tables of a family; returns how
/// many chains it found. Each table changes at once. Goes on after an error and returns the first.
pub fn remove(
    tables: &mut dyn Tables,
    family: Family,
    is_doomed: &dyn Fn(&str) -> bool,
) -> Result<usize, Failure> {
    let mut outcome = Ok(0);
    // Filter first: what it refuses is still translated in nat.
    for table in [Table::Filter, Table::Nat, Table::Mangle] {
        match (remove_from(tables, family, table, is_doomed), &mut outcome) {
            (Ok(found), Ok(total)) => *total += found,
            (Err(failure), Ok(_)) => outcome = Err(failure),
            (_, Err(_)) => {}
        }
    }
    outcome
}

fn remove_from(
    tables: &mut dyn Tables,
    family: Family,
    table: Table,
    is_doomed: &dyn Fn(&str) -> bool,
) -> Result<usize, Failure> {
    let mut doomed = BTreeSet::new();
    let mut jumps = Vec::new();
    tables.save(family, table, &mut |line| {
        if let Some(name) = chain(line).filter(|name| is_doomed(name)) {
            doomed.insert(name.to_owned());
        }
        let leads_in =
            |(from, _): &(&str, &str)| !is_doomed(from) && target(line).is_some_and(|name| is_doomed(&name));
        if let Some((from, rest)) = rule(line).filter(leads_in) {
            jumps.push(format!("-D {from} {rest}"));
        }
    })?;
    if doomed.is_empty() {
        return Ok(0);
    }
    tables.restore(family, &removal(table, &jumps, doomed.iter().map(String::as_str)))?;
    Ok(doomed.len())
}

fn removal<'a>(table: Table, jumps: &[String], doomed: impl Iterator<Item = &'a str> + Clone) -> String {
    let mut input = format!("*{table}\n");
    // Named, an existing chain is emptied.
    for chain in doomed.clone() {
        let _ = writeln!(input, ":{chain} - [0:0]");
    }
    for jump in jumps {
        let _ = writeln!(input, "{jump}");
    }
    for chain in doomed {
        let _ = writeln!(input, "-X {chain}");
    }
    input.push_str("COMMIT\n");
    input
}
