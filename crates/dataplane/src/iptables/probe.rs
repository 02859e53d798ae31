// SPDX-License-Identifier: Apache-2.0

//! Asks once whether tools and kernel can do all that is needed: in a network namespace made for it, so that nothing
//! of the node is touched.

use std::time::{Duration, Instant};

use model::{Family, PerFamily};
use netlink::Netns;

use super::rule::unreachable;
use crate::{
    Unsupported,
    xtables::{Failure, Table, Tables, Xtables},
};

/// Something a rule needs: its table, how it is written, and the kernel's module.
type Need = (Table, &'static str, &'static str);

const NEEDS: [Need; 11] = [
    (Table::Nat, "-m comment --comment probe", "xt_comment"),
    (Table::Nat, "-p tcp -m tcp --dport 80 -j RETURN", "xt_tcpudp"),
    (Table::Nat, "-m addrtype --dst-type LOCAL -j RETURN", "xt_addrtype"),
    (Table::Nat, "-m statistic --mode random --probability 0.5 -j RETURN", "xt_statistic"),
    (Table::Nat, "-m recent --name PORTOLAN-PROBE --rcheck --seconds 60 --reap -j RETURN", "xt_recent"),
    (Table::Nat, "-m mark ! --mark 0x4000/0x4000 -j RETURN", "xt_mark"),
    (Table::Nat, "-j MARK --set-xmark 0x4000/0x4000", "xt_mark"),
    (Table::Nat, "-p tcp -m tcp -j DNAT --to-destination :80", "xt_nat"),
    (Table::Nat, "-j MASQUERADE --random-fully", "xt_MASQUERADE"),
    (Table::Filter, "-m conntrack --ctstate NEW -j RETURN", "xt_conntrack"),
    (Table::Filter, "-j REJECT --reject-with", "ipt_REJECT or ip6t_REJECT"),
];

/// Fails with what is missing. Without the privilege to make a namespace nothing is asked; then the first write tells.
pub(super) fn probe(tools: &Xtables, families: PerFamily<bool>) -> Result<(), Unsupported> {
    let Ok(netns) = Netns::new() else { return Ok(()) };
    for family in Family::BOTH.into_iter().filter(|family| families[*family]) {
        let mut tools = tools.elsewhere();
        let asked = netns.run(move || ask(&mut tools, family));
        // A namespace that cannot be entered is no reason not to start.
        asked.unwrap_or(Ok(()))?;
    }
    Ok(())
}

pub(super) fn ask(tools: &mut dyn Tables, family: Family) -> Result<(), Unsupported> {
    let all = match tools.restore(family, &input(&NEEDS, family)) {
        Err(failure @ (Failure::Refused { .. } | Failure::Missing { .. })) => failure,
        // Somebody holds the lock, or the machine is slow: that passes.
        Ok(()) | Err(_) => return Ok(()),
    };
    // One by one: the legacy variant does not say which rule the kernel refused.
    for need in &NEEDS {
        if let Err(failure) = tools.restore(family, &input(&[*need], family)) {
            return Err(missing(family, &failure, Some(need)));
        }
    }
    Err(missing(family, &all, None))
}

/// Whether rules can count with counters of their own; `None` if that could not be found out. Nothing depends on it but
/// metrics, but whoever decides otherwise than the process before writes other rules.
pub(super) fn counts(tools: &dyn Tables, families: PerFamily<bool>) -> Option<bool> {
    let Some(mut tools) = tools.elsewhere() else { return Some(false) };
    let netns = match Netns::new() {
        Ok(netns) => netns,
        Err(error) => return error.is_permission().then_some(false),
    };
    for family in Family::BOTH.into_iter().filter(|family| families[*family]) {
        match netns.run(|| counts_here(&mut *tools, family)) {
            Ok(Some(true)) => {}
            Ok(answer) => return answer,
            Err(_) => return None,
        }
    }
    Some(true)
}

/// So often it is tried whether rules can count, and not again after so long: services wait meanwhile.
const TRIALS: (usize, Duration) = (3, Duration::from_secs(10));

/// A refusal counts when it comes twice: one who asks while others are loading the module may be refused, too.
fn counts_here(tools: &mut dyn Tables, family: Family) -> Option<bool> {
    let (most, patience) = TRIALS;
    let begun = Instant::now();
    let mut is_refused = false;
    for trial in 0..most {
        if trial > 0 && begun.elapsed() > patience {
            break;
        }
        match counts_once(tools, family) {
            Some(false) if !is_refused => is_refused = true,
            None => {}
            answer => return answer,
        }
    }
    None
}

fn counts_once(tools: &mut dyn Tables, family: Family) -> Option<bool> {
    let need = (Table::Nat, "-m nfacct --nfacct-name portolan_probe -j RETURN", "xt_nfacct");
    match tools.keep_accounts(&["portolan_probe"]) {
        Some(true) => {}
        answer => return answer,
    }
    match tools.restore(family, &input(&[need], family)) {
        Ok(()) => Some(true),
        Err(Failure::Refused { .. } | Failure::Missing { .. }) => Some(false),
        // As above: that passes.
        Err(Failure::Locked { .. } | Failure::Slow { .. } | Failure::Run { .. }) => None,
    }
}

fn missing(family: Family, failure: &Failure, need: Option<&Need>) -> Unsupported {
    let cause = match need {
        Some((_, rule, module)) if matches!(failure, Failure::Refused { advice: None, .. }) => {
            format!(" (the kernel has not {module}, or refuses `{rule}`: load the module)")
        }
        _ => String::new(),
    };
    Unsupported(format!("iptables mode cannot work here for {family}: {failure}{cause}"))
}

fn input(needs: &[Need], family: Family) -> String {
    let part = |table: Table| {
        let rules = needs.iter().filter(|(of, ..)| *of == table).map(|(_, rule, _)| {
            let tail = if rule.ends_with("--reject-with") { unreachable(family) } else { "" };
            format!("-A PORTOLAN-PROBE {rule} {tail}\n")
        });
        let rules: String = rules.collect();
        match rules.is_empty() {
            true => rules,
            false => format!("*{table}\n:PORTOLAN-PROBE - [0:0]\n{rules}COMMIT\n"),
        }
    };
    part(Table::Nat) + &part(Table::Filter)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xtables::{
        SEARCH, Variant, find_variant,
        testing::{Moody, Without},
    };

    #[test]
    fn what_the_kernel_lacks_is_named() {
        for (word, module) in
            [("-m recent", "xt_recent"), ("-j DNAT", "xt_nat"), ("conntrack", "xt_conntrack")]
        {
            let error = ask(&mut Without(word), Family::V4).unwrap_err().to_string();
            assert!(error.contains(module), "{error}");
        }
        assert!(ask(&mut Without("nothing of this"), Family::V6).is_ok());
    }

    #[test]
    fn only_a_clear_refusal_means_that_rules_cannot_count() {
        use crate::xtables::testing::Mood::{Done, Locked, NoAnswer, Refused, Slow};
        for (moods, answer) in [
            (&[Done][..], Some(true)),
            (&[Locked, Done], Some(true)),
            (&[NoAnswer, Slow, Done], Some(true)),
            (&[Refused, Done], Some(true)),
            (&[Refused, Refused, Done], Some(false)),
            (&[Refused, Locked, Refused], Some(false)),
            (&[Locked, Slow, NoAnswer, Done], None),
        ] {
            let mut tools = Moody(moods.iter().copied().collect());
            assert_eq!(counts_here(&mut tools, Family::V4), answer, "{moods:?}");
        }
    }

    #[test]
    fn this_kernel_can_do_it() {
        for variant in Variant::BOTH {
            let tools = find_variant(&SEARCH, variant).unwrap();
            probe(&tools, PerFamily { v4: true, v6: true }).unwrap();
        }
    }
}
