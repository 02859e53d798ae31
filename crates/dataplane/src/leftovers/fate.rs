// SPDX-License-Identifier: Apache-2.0

//! Which chains go, and which must stay because somebody else uses them. Pure.
//!
//! kube-proxy's chains are entered by jumps from built-in chains. But others may use one as a service: the CNI plugin
//! `portmap` can be told to mark what it wants masqueraded by `KUBE-MARK-MASQ`. A chain that a foreign rule leads to
//! stays, with all that it needs itself; whoever removed it would break the other, or be refused by the kernel.

use std::collections::{BTreeMap, BTreeSet};

use crate::names::xt;

/// A rule outside of the doomed chains that leads into one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Jump<R> {
    pub(super) from: String,
    pub(super) from_built_in: bool,
    pub(super) to: String,
    /// How to remove it.
    pub(super) rule: R,
}

/// What is to become of the chains of one table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fate<R> {
    /// Rules to remove.
    pub(super) jumps: Vec<Jump<R>>,
    /// Chains to remove, none of which a rule that stays leads to.
    pub(super) chains: Vec<String>,
    /// Chains that stay, and who needs them.
    pub(super) kept: BTreeMap<String, String>,
}

/// Decides for one table. `leads_to` tells where the rules of a doomed chain lead; it is asked only for those that stay.
pub(super) fn decide<R, E>(
    doomed: BTreeSet<String>,
    jumps: Vec<Jump<R>>,
    mut leads_to: impl FnMut(&str) -> Result<Vec<String>, E>,
) -> Result<Fate<R>, E> {
    let mut kept: BTreeMap<String, String> = BTreeMap::new();
    let mut open: Vec<(String, String)> = jumps
        .iter()
        .filter(|jump| !is_entrance(jump))
        .map(|jump| (jump.to.clone(), jump.from.clone()))
        .collect();
    while let Some((chain, user)) = open.pop() {
        if !doomed.contains(&chain) || kept.contains_key(&chain) {
            continue;
        }
        for next in leads_to(&chain)? {
            open.push((next, chain.clone()));
        }
        // The mark alone does nothing.
        if chain == xt::MARK_MASQ {
            open.push((xt::POSTROUTING.to_owned(), chain.clone()));
        }
        kept.insert(chain, user);
    }
    Ok(Fate {
        jumps: jumps.into_iter().filter(|jump| is_entrance(jump) && !kept.contains_key(&jump.to)).collect(),
        chains: doomed.into_iter().filter(|chain| !kept.contains_key(chain)).collect(),
        kept,
    })
}

/// Whether kube-proxy itself made this rule: from a built-in chain, to one of those that are entered from there.
fn is_entrance<R>(jump: &Jump<R>) -> bool {
    let target = jump.to.as_str();
    let is_part = target == xt::MARK_MASQ
        || target == xt::OLD[0]
        || crate::xtables::leftovers::is_per_service(target)
        || target.starts_with(xt::XLB);
    jump.from_built_in && !is_part
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jump(from: &str, to: &str) -> Jump<()> {
        let from_built_in = ["PREROUTING", "POSTROUTING", "OUTPUT"].contains(&from);
        Jump { from: from.into(), from_built_in, to: to.into(), rule: () }
    }

    fn fate(jumps: &[(&str, &str)]) -> Fate<()> {
        let doomed = ["KUBE-SERVICES", "KUBE-POSTROUTING", "KUBE-MARK-MASQ", "KUBE-SVC-A", "KUBE-SEP-A"];
        let jumps = jumps.iter().map(|(from, to)| jump(from, to)).collect();
        let leads_to = |chain: &str| {
            Ok::<_, ()>(match chain {
                "KUBE-SVC-A" => vec!["KUBE-MARK-MASQ".to_owned(), "KUBE-SEP-A".to_owned()],
                _ => Vec::new(),
            })
        };
        decide(doomed.map(str::to_owned).into(), jumps, leads_to).expect("it cannot fail")
    }

    #[test]
    fn all_goes_where_nobody_else_uses_it() {
        let fate = fate(&[
            ("PREROUTING", "KUBE-SERVICES"),
            ("OUTPUT", "KUBE-SERVICES"),
            ("POSTROUTING", "KUBE-POSTROUTING"),
        ]);
        assert_eq!((fate.jumps.len(), fate.chains.len()), (3, 5));
        assert!(fate.kept.is_empty());
    }

    #[test]
    fn what_others_use_stays_with_what_it_needs() {
        let fate = fate(&[
            ("PREROUTING", "KUBE-SERVICES"),
            ("POSTROUTING", "KUBE-POSTROUTING"),
            ("CNI-HOSTPORT-SETMARK", "KUBE-MARK-MASQ"),
        ]);
        assert_eq!(fate.kept["KUBE-MARK-MASQ"], "CNI-HOSTPORT-SETMARK");
        assert_eq!(fate.kept["KUBE-POSTROUTING"], "KUBE-MARK-MASQ");
        assert_eq!(fate.chains, ["KUBE-SEP-A", "KUBE-SERVICES", "KUBE-SVC-A"]);
        assert_eq!(fate.jumps, [jump("PREROUTING", "KUBE-SERVICES")]);
    }

    #[test]
    fn an_operator_s_rule_in_a_built_in_chain_is_his() {
        let fate = fate(&[("PREROUTING", "KUBE-SERVICES"), ("PREROUTING", "KUBE-SVC-A")]);
        assert_eq!(fate.chains, ["KUBE-SERVICES"]);
        assert_eq!(fate.jumps, [jump("PREROUTING", "KUBE-SERVICES")]);
    }
}
