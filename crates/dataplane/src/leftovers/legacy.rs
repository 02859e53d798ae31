// SPDX-License-Identifier: Apache-2.0

//! What is in the tables of the legacy variant of iptables, which only its own tools can reach.

use std::{borrow::Cow, collections::BTreeSet, convert::Infallible, fmt::Write as _, fs};

use model::Family;

use super::{
    Report,
    fate::{self, Fate, Jump},
};
use crate::xtables::{
    self, Failure, Table, Tables, Variant,
    words::{chain, rule, target},
};

/// Removes the doomed chains.
pub(super) fn remove_chains(is_doomed: &dyn Fn(&str) -> bool, report: &mut Report) {
    for family in Family::BOTH {
        let mut tables = present(family);
        // The kernel tells the names for a tenth of what the tool takes to print all rules, and with nothing to remove
        // nobody needs the tools.
        let names = netlink::legacy::Tables::open(crate::nftables::wire(family));
        let mut unseen = false;
        tables.retain(|table| match names.as_ref().map(|names| names.read(table.name())) {
            Ok(Ok(entries)) => entries.chains().any(is_doomed),
            _ => {
                unseen = true;
                true
            }
        });
        if tables.is_empty() {
            continue;
        }
        let mut tools = match xtables::find_variant(&xtables::SEARCH, Variant::Legacy) {
            Ok(tools) => tools,
            Err(_) => {
                report.kept.push(without_tools(family, unseen));
                continue;
            }
        };
        for table in tables {
            if let Err(failure) = remove_from(&mut tools, family, table, is_doomed, report) {
                report.failed.push(format!("chains of legacy table {table} ({}): {failure}", tool(family)));
            }
        }
    }
}

fn without_tools(family: Family, unseen: bool) -> String {
    let tool = tool(family);
    match unseen {
        true => format!(
            "the legacy tables of iptables are in use here, and without its tools nobody can tell what is in them: look \
             for KUBE- chains with `{tool}-legacy-save` on the host"
        ),
        false => format!(
            "chains of a Kubernetes proxy are in the legacy tables of {tool}, and cannot be removed without its tools: \
             run `portolan --cleanup` or `kube-proxy --cleanup` where there is `{tool}-legacy-restore`"
        ),
    }
}

fn tool(family: Family) -> &'static str {
    match family {
        Family::V4 => "iptables",
        Family::V6 => "ip6tables",
    }
}

/// The tables that exist, filter first: what it refuses is still translated in nat.
fn present(family: Family) -> Vec<Table> {
    let file = match family {
        Family::V4 => "/proc/thread-self/net/ip_tables_names",
        Family::V6 => "/proc/thread-self/net/ip6_tables_names",
    };
    let names = fs::read_to_string(file).unwrap_or_default();
    let is_there = |table: &Table| names.lines().any(|name| name == table.to_string());
    [Table::Filter, Table::Nat, Table::Mangle].into_iter().filter(is_there).collect()
}

/// Whether there are doomed chains, as far as the kernel tells without the tools.
pub(super) fn is_there(family: Family, is_doomed: &dyn Fn(&str) -> bool) -> bool {
    let Ok(names) = netlink::legacy::Tables::open(crate::nftables::wire(family)) else { return false };
    let has_some = |table: &Table| names.read(table.name()).is_ok_and(|held| held.chains().any(is_doomed));
    present(family).iter().any(has_some)
}

/// Whether kube-proxy's rules are here.
pub(super) fn serves(family: Family) -> bool {
    let Ok(mut tools) = xtables::find_variant(&xtables::SEARCH, Variant::Legacy) else { return false };
    let mut found = false;
    let outcome = tools.save(family, Table::Nat, &mut |line| {
        found |= rule(line).is_some_and(|(from, _)| from == crate::names::xt::SERVICES);
    });
    found && outcome.is_ok()
}

/// Removes them from one table, in one commit.
pub(crate) fn remove_from(
    tools: &mut dyn Tables,
    family: Family,
    table: Table,
    is_doomed: &dyn Fn(&str) -> bool,
    report: &mut Report,
) -> Result<(), Failure> {
    let (mut doomed, mut built_in) = (BTreeSet::new(), BTreeSet::new());
    let mut jumps: Vec<Jump<String>> = Vec::new();
    let mut inner: Vec<(String, String)> = Vec::new();
    tools.save(family, table, &mut |line| {
        if let Some(name) = chain(line) {
            if is_doomed(name) {
                doomed.insert(name.to_owned());
            } else if line.split(' ').nth(1).is_some_and(|policy| policy != "-") {
                built_in.insert(name.to_owned());
            }
        }
        let Some((from, rest)) = rule(line) else { return };
        let Some(to) = target(line).filter(|to| is_doomed(to)) else { return };
        if !is_doomed(from) {
            let from_built_in = built_in.contains(from);
            jumps.push(Jump {
                from: from.to_owned(),
                from_built_in,
                to: to.into_owned(),
                rule: rest.to_owned(),
            });
        } else if !to.starts_with(crate::names::xt::SEP) {
            inner.push((from.to_owned(), to.into_owned()));
        }
    })?;
    if doomed.is_empty() {
        return Ok(());
    }
    let leads_to = |chain: &str| {
        let from_there = inner.iter().filter(|(from, _)| from == chain);
        Ok::<_, Infallible>(from_there.map(|(_, to)| to.clone()).collect())
    };
    let Ok(mut fate) = fate::decide(doomed, jumps, leads_to);
    keep_endpoints(tools, (family, table), &mut fate)?;
    report.keep(&format!("{}-legacy {table}", tool(family)), &fate.kept);
    tools.restore(family, &removal(table, &fate))?;
    report.chains(&format!("table {table} of {}-legacy", tool(family)), fate.chains.len());
    Ok(())
}

/// Chains of endpoints are many, and so who uses them is asked only where somebody stays who may.
fn keep_endpoints(
    tools: &mut dyn Tables,
    (family, table): (Family, Table),
    fate: &mut Fate<String>,
) -> Result<(), Failure> {
    if fate.kept.is_empty() {
        return Ok(());
    }
    let mut used = BTreeSet::new();
    tools.save(family, table, &mut |line| {
        if rule(line).is_some_and(|(from, _)| fate.kept.contains_key(from)) {
            let to = target(line).filter(|to| to.starts_with(crate::names::xt::SEP));
            used.extend(to.map(Cow::into_owned));
        }
    })?;
    fate.chains.retain(|chain| !used.contains(chain));
    Ok(())
}

fn removal(table: Table, fate: &Fate<String>) -> String {
    let mut input = format!("*{table}\n");
    // Named, an existing chain is emptied.
    for chain in &fate.chains {
        let _ = writeln!(input, ":{chain} - [0:0]");
    }
    for jump in &fate.jumps {
        let _ = writeln!(input, "-D {} {}", jump.from, jump.rule);
    }
    for chain in &fate.chains {
        let _ = writeln!(input, "-X {chain}");
    }
    input.push_str("COMMIT\n");
    input
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tables that hold these lines, and remember what was restored.
    struct Fixed(&'static str, String);

    impl Tables for Fixed {
        fn save(&mut self, _: Family, _: Table, each_line: &mut dyn FnMut(&str)) -> Result<(), Failure> {
            self.0.lines().for_each(each_line);
            Ok(())
        }

        fn restore(&mut self, _: Family, input: &str) -> Result<(), Failure> {
            self.1.push_str(input);
            Ok(())
        }
    }

    /// The kernel refuses to remove a chain that a rule leads to, and all else of the commit with it.
    #[test]
    fn an_endpoint_stays_with_the_service_that_uses_it() {
        let held = ":PREROUTING ACCEPT [0:0]\n:THEIRS - [0:0]\n:KUBE-SVC-A - [0:0]\n:KUBE-SVC-B - [0:0]\n\
                    :KUBE-SEP-A - [0:0]\n:KUBE-SEP-B - [0:0]\n-A THEIRS -j KUBE-SVC-A\n\
                    -A KUBE-SVC-A -j KUBE-SEP-A\n-A KUBE-SVC-B -j KUBE-SEP-B";
        let mut tables = Fixed(held, String::new());
        let mut report = Report::default();
        let is_doomed = |name: &str| name.starts_with("KUBE-");
        remove_from(&mut tables, Family::V4, Table::Nat, &is_doomed, &mut report).expect("nobody refuses");
        let removed: Vec<&str> = tables.1.lines().filter_map(|line| line.strip_prefix("-X ")).collect();
        assert_eq!(removed, ["KUBE-SEP-B", "KUBE-SVC-B"]);
    }
}
