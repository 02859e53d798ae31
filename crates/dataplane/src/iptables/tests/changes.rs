// SPDX-License-Identifier: Apache-2.0

//! Step by step, with failures and with vandals, comes to the same as at once; and a step costs what it changes.

use std::collections::BTreeSet;

use model::{DetectLocal, Family, Plan};
use proptest::{prelude::*, sample::select};

use super::{
    make::{Cluster, Event, detectors, events, ready, sampler, sketch},
    memory::{Memory, Mishap},
    pure::scene,
};
use crate::{
    Config, Dataplane as _, Scope, TableRules,
    iptables::{Iptables, frame::Top, render},
    xtables::{
        Table,
        testing::{Mood, namespace},
    },
};

fn iptables(memory: Memory) -> Iptables<Memory> {
    Iptables::over(memory, &Config::default())
}

/// Panics unless the tables hold the plan, all of it and nothing else.
fn assert_holds(memory: &Memory, plan: &Plan) {
    for family in Family::BOTH {
        let program = render::program(&scene(plan, family));
        for (table, chains) in &program.tables {
            let names = chains.keys().map(ToString::to_string).filter(|name| name.starts_with("KUBE-"));
            assert_eq!(memory.chains(family, *table), names.collect::<BTreeSet<_>>());
            for (name, rules) in chains {
                let mut found = memory.rules(family, *table, name.as_str()).cloned().unwrap_or_default();
                let mut wanted: Vec<String> = rules.iter().map(ToString::to_string).collect();
                if Top::find(*table, name.as_str()).is_some() {
                    assert_eq!(
                        found.last().filter(|_| *table == Table::Nat && name.as_str() == "KUBE-SERVICES"),
                        wanted.last().filter(|_| *table == Table::Nat && name.as_str() == "KUBE-SERVICES")
                    );
                    found.sort();
                    wanted.sort();
                }
                assert_eq!(found, wanted, "{family} {table} {name}");
            }
        }
    }
}

fn mishaps() -> impl Strategy<Value = Vec<Mishap>> {
    let mishap = select(vec![
        Mishap::None,
        Mishap::None,
        Mishap::Refused,
        Mishap::Locked,
        Mishap::Halfway,
        Mishap::Silent,
    ]);
    prop::collection::vec(mishap, 0..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_way_with_failures_ends_with_the_plan(
        detector in detectors(),
        events in prop::collection::vec(events(), 1..16),
        schedule in mishaps(),
    ) {
        let mut cluster = Cluster::new(detector);
        let mut iptables = iptables(Memory { schedule: schedule.into(), ..Memory::default() });
        let mut is_well = iptables.apply(&cluster.plan, Scope::All).is_ok();
        for event in events {
            let changes = cluster.update(event.updates());
            let scope = if is_well { Scope::Only(&changes) } else { Scope::All };
            is_well = iptables.apply(&cluster.plan, scope).is_ok();
        }
        iptables.tables.schedule.clear();
        if !is_well {
            iptables.apply(&cluster.plan, Scope::All).unwrap();
        }
        assert_holds(&iptables.tables, &cluster.plan);
        let changes = cluster.update([]);
        let stepwise = iptables.apply(&cluster.plan, Scope::Only(&changes)).unwrap().tables;
        let again = iptables.apply(&cluster.plan, Scope::All).unwrap();
        prop_assert!(again.changed_nothing(), "{again:?}");
        prop_assert_eq!(stepwise, again.tables, "rules are counted alike");
    }

    #[test]
    fn what_others_break_is_mended(
        events in prop::collection::vec(events(), 1..8),
        harms in prop::collection::vec((any::<bool>(), any::<usize>()), 1..6),
    ) {
        let mut cluster = Cluster::new(DetectLocal::NodeCidr);
        cluster.update(events.iter().flat_map(Event::updates));
        let mut iptables = iptables(Memory::default());
        iptables.apply(&cluster.plan, Scope::All).unwrap();
        for (nat, choice) in harms {
            iptables.tables.vandalise(Family::V4, if nat { Table::Nat } else { Table::Filter }, choice);
        }
        iptables.apply(&cluster.plan, Scope::All).unwrap();
        assert_holds(&iptables.tables, &cluster.plan);
    }
}

#[test]
fn rules_are_counted() {
    let cluster = sampler();
    let mut iptables = iptables(Memory::default());
    let applied = iptables.apply(&cluster.plan, Scope::All).unwrap();
    for TableRules { family, table, total, written } in applied.tables {
        let ours = iptables.tables.chains(family, table);
        let held = ours.iter().filter_map(|chain| iptables.tables.rules(family, table, chain)).map(Vec::len);
        assert_eq!(total, held.sum::<usize>() as u64, "{family} {table}");
        assert!(written >= total, "{family} {table}: the ways into our chains come on top");
    }
}

#[test]
fn a_failed_change_is_followed_by_a_full_one_at_once() {
    let mut cluster = sampler();
    let mut iptables = iptables(Memory::default());
    iptables.apply(&cluster.plan, Scope::All).unwrap();
    let changes = cluster.update(sketch(1).slices(&ready(&[1, 103])));
    iptables.tables.schedule = [Mishap::Refused].into();
    let applied = iptables.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
    assert_eq!(applied.fallbacks, [Family::V4]);
    assert_eq!(applied.warnings.len(), 1);
    assert_holds(&iptables.tables, &cluster.plan);
}

#[test]
fn a_lock_is_not_waited_for_twice_in_one_turn() {
    let mut cluster = sampler();
    let mut iptables = iptables(Memory::default());
    iptables.apply(&cluster.plan, Scope::All).unwrap();
    let changes = cluster.update(sketch(1).slices(&ready(&[1, 103])));
    let before = iptables.tables.restores;
    iptables.tables.schedule = [Mishap::Locked].into();
    let error = iptables.apply(&cluster.plan, Scope::Only(&changes)).unwrap_err();
    assert!(error.to_string().contains("was not free for 5"), "{error}");
    assert_eq!(iptables.tables.restores, before + 1);
    iptables.apply(&cluster.plan, Scope::All).unwrap();
    assert_holds(&iptables.tables, &cluster.plan);
}

#[test]
fn after_an_error_the_next_change_is_complete() {
    let mut cluster = sampler();
    let mut iptables = iptables(Memory::default());
    iptables.apply(&cluster.plan, Scope::All).unwrap();
    let changes = cluster.update(sketch(1).slices(&ready(&[1, 103])));
    iptables.tables.schedule = [Mishap::Refused, Mishap::Refused].into();
    iptables.apply(&cluster.plan, Scope::Only(&changes)).unwrap_err();
    let changes = cluster.update(sketch(2).slices(&ready(&[104])));
    iptables.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
    assert_holds(&iptables.tables, &cluster.plan);
}

#[test]
fn a_change_costs_what_it_changes() {
    let cost = |services: u8| {
        let mut cluster = Cluster::new(DetectLocal::NodeCidr);
        for number in 1..=services {
            cluster.update([sketch(number).service()]);
            cluster.update(sketch(number).slices(&ready(&[1, 101])));
        }
        let mut iptables = iptables(Memory::default());
        iptables.apply(&cluster.plan, Scope::All).unwrap();
        let before = iptables.tables.restores;
        let mut lines = Vec::new();
        for hosts in [&[1, 102][..], &[], &[1]] {
            let changes = cluster.update(sketch(1).slices(&ready(hosts)));
            iptables.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
            lines.push(iptables.tables.last.lines().count());
        }
        assert_eq!(iptables.tables.restores - before, 6, "one for each change and family");
        lines
    };
    assert_eq!(cost(2), cost(200));
}

fn counting(iptables: &Iptables<Memory>) -> bool {
    let rules = |family| iptables.tables.rules(family, Table::Filter, "KUBE-FORWARD").unwrap();
    Family::BOTH.into_iter().all(|family| rules(family).iter().any(|rule| rule.contains("nfacct")))
}

/// Whether rules can count is found out in a namespace, which needs root.
#[test]
fn what_could_not_be_found_out_is_asked_again() {
    if namespace().is_none() {
        return;
    }
    let cluster = sampler();
    let mut iptables = iptables(Memory { accounts: Some(vec![Mood::Locked; 9]), ..Memory::default() });
    iptables.apply(&cluster.plan, Scope::All).unwrap();
    assert!(!counting(&iptables));
    iptables.tables.accounts = Some(Vec::new());
    let applied = iptables.apply(&cluster.plan, Scope::All).unwrap();
    assert!(counting(&iptables));
    assert!(!applied.mended, "nobody else has changed anything");
    // What is decided stays so.
    iptables.tables.accounts = Some(vec![Mood::Refused; 9]);
    assert!(iptables.apply(&cluster.plan, Scope::All).unwrap().changed_nothing());

    let mut iptables = self::iptables(Memory { accounts: Some(vec![Mood::Refused; 9]), ..Memory::default() });
    iptables.apply(&cluster.plan, Scope::All).unwrap();
    iptables.tables.accounts = Some(Vec::new());
    iptables.apply(&cluster.plan, Scope::All).unwrap();
    assert!(!counting(&iptables), "a refusal is an answer");
}

#[test]
fn processes_that_decide_otherwise_repair_each_others_rules() {
    let cluster = sampler();
    let mut tables = Memory { accounts: Some(Vec::new()), ..Memory::default() };
    for counts in [true, false, true] {
        let mut first = iptables(tables);
        first.counts = Some(counts);
        first.apply(&cluster.plan, Scope::All).unwrap();
        assert_eq!(counting(&first), counts);
        let mut second = iptables(first.tables);
        second.counts = Some(counts);
        let applied = second.apply(&cluster.plan, Scope::All).unwrap();
        assert!(applied.changed_nothing(), "{applied:?}");
        tables = second.tables;
    }
}

#[test]
fn cleaning_up_leaves_nothing() {
    let cluster = sampler();
    let mut iptables = iptables(Memory::default());
    iptables.apply(&cluster.plan, Scope::All).unwrap();
    iptables.cleanup().unwrap();
    for family in Family::BOTH {
        for table in Table::ALL {
            assert_eq!(iptables.tables.chains(family, table), BTreeSet::new());
            for base in ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"] {
                let rules = iptables.tables.rules(family, table, base);
                assert!(rules.is_none_or(Vec::is_empty), "{table} {base}: {rules:?}");
            }
        }
    }
    iptables.apply(&cluster.plan, Scope::All).unwrap();
    assert_holds(&iptables.tables, &cluster.plan);
}
