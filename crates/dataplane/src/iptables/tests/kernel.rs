// SPDX-License-Identifier: Apache-2.0

//! Both variants of the tools, in namespaces of their own. Needs root.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use model::{Family, Plan};

use super::{
    make::{ready, sampler, sketch},
    pure::scene,
};
use crate::{
    Config, Dataplane as _, Scope, Watch,
    iptables::{Iptables, parse, program::is_built_in, render},
    xtables::{self, Table, Tables as _, Variant, testing::with_each, words},
};

fn open(variant: Variant) -> Iptables {
    Iptables::open(&Config { xtables: Some(variant), ..Config::default() }).unwrap()
}

type Chains = BTreeMap<String, Vec<String>>;

/// What the tool says, in our words; as it stands where it is not understood.
fn saved(variant: Variant, family: Family, table: Table) -> Chains {
    let mut tools = xtables::find_variant(&xtables::SEARCH, variant).unwrap();
    let mut chains = Chains::new();
    tools
        .save(family, table, &mut |line| {
            if let Some(name) = words::chain(line) {
                chains.entry(name.to_owned()).or_default();
            }
            if let Some((name, text)) = words::rule(line) {
                let rule = parse::rule(text, family).map_or_else(|| text.to_owned(), |rule| rule.to_string());
                chains.get_mut(name).unwrap().push(rule);
            }
        })
        .unwrap();
    chains
}

fn rendered(plan: &Plan, family: Family, table: Table) -> Chains {
    let program = render::program(&scene(plan, family));
    let chains = program.tables.get(&table).into_iter().flatten();
    let text = |rules: &Vec<crate::iptables::rule::Rule>| rules.iter().map(ToString::to_string).collect();
    chains.map(|(name, rules)| (name.to_string(), text(rules))).collect()
}

#[test]
fn the_tools_say_what_we_wrote() {
    with_each(|variant| {
        let cluster = sampler();
        let mut iptables = open(variant);
        let applied = iptables.apply(&cluster.plan, Scope::All).unwrap();
        assert_eq!(applied.batches, 2, "{applied:?}");
        for (family, table) in Family::BOTH.into_iter().flat_map(|f| Table::ALL.map(|table| (f, table))) {
            let mut found = saved(variant, family, table);
            let wanted = rendered(&cluster.plan, family, table);
            found.retain(|name, rules| !is_built_in(name) || !rules.is_empty());
            assert_eq!(found, wanted, "{variant} {family} {table}");
        }
        let again = open(variant).apply(&cluster.plan, Scope::All).unwrap();
        assert!(again.changed_nothing(), "{again:?}");
    });
}

#[test]
fn steps_come_to_the_same_as_a_leap() {
    with_each(|variant| {
        let mut cluster = sampler();
        let mut iptables = open(variant);
        iptables.apply(&cluster.plan, Scope::All).unwrap();
        for hosts in [&[1, 2, 3, 101][..], &[], &[102], &[1, 101]] {
            for number in [1, 3, 5] {
                let changes = cluster.update(sketch(number).slices(&ready(hosts)));
                let applied = iptables.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
                assert!(applied.fallbacks.is_empty(), "{applied:?}");
            }
        }
        let again = open(variant).apply(&cluster.plan, Scope::All).unwrap();
        assert!(again.changed_nothing(), "{again:?}");
    });
}

/// What kube-proxy 1.15 would leave, some of it in the userspace mode, with a neighbour's chains beside it.
const OLD: &str = r#"*nat
:KUBE-SERVICES - [0:0]
:KUBE-SVC-4N57TFCL4MD7ZTDA - [0:0]
:KUBE-SEP-6QCC2MHJZP35QQAR - [0:0]
:KUBE-XLB-4N57TFCL4MD7ZTDA - [0:0]
:KUBE-MARK-DROP - [0:0]
:KUBE-PORTALS-HOST - [0:0]
:CNI-HOSTPORT - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -j CNI-HOSTPORT
-A OUTPUT -m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules" -j KUBE-PORTALS-HOST
-A KUBE-SERVICES -m comment --comment "default/nginx: cluster IP" -j KUBE-SVC-4N57TFCL4MD7ZTDA
-A KUBE-SVC-4N57TFCL4MD7ZTDA -j KUBE-SEP-6QCC2MHJZP35QQAR
-A KUBE-XLB-4N57TFCL4MD7ZTDA -j KUBE-MARK-DROP
-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
-A INPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP
COMMIT
"#;

#[test]
fn an_old_footprint_goes_and_neighbours_stay() {
    with_each(|variant| {
        let mut tools = xtables::find_variant(&xtables::SEARCH, variant).unwrap();
        tools.restore(Family::V4, OLD).unwrap();
        let cluster = sampler();
        let mut iptables = open(variant);
        iptables.apply(&cluster.plan, Scope::All).unwrap();
        let nat = saved(variant, Family::V4, Table::Nat);
        let ours: BTreeSet<String> = rendered(&cluster.plan, Family::V4, Table::Nat).into_keys().collect();
        let left: Vec<_> = nat.keys().filter(|name| !is_built_in(name) && !ours.contains(*name)).collect();
        assert_eq!(left, ["CNI-HOSTPORT"]);
        assert!(nat["PREROUTING"].contains(&"-j CNI-HOSTPORT".to_owned()));
        iptables.cleanup().unwrap();
        let nat = saved(variant, Family::V4, Table::Nat);
        assert!(nat.keys().all(|name| is_built_in(name) || name == "CNI-HOSTPORT"), "{nat:?}");
        assert!(nat["OUTPUT"].is_empty(), "{nat:?}");
        let filter = saved(variant, Family::V4, Table::Filter);
        let left: Vec<_> = filter.keys().filter(|name| !is_built_in(name)).collect();
        assert_eq!(left, ["KUBE-FIREWALL"], "it is the kubelet's");
    });
}

/// The next drift, if there is one soon. A busy machine is no reason to fail.
fn drift(watch: &mut dyn Watch, patience: Duration) -> Option<crate::Drift> {
    let begun = Instant::now();
    loop {
        if let Some(drift) = watch.next(Duration::from_millis(300)).unwrap() {
            return Some(drift);
        }
        if begun.elapsed() > patience {
            return None;
        }
    }
}

#[test]
fn what_others_do_is_noticed_and_what_we_do_is_not() {
    with_each(|variant| {
        let mut cluster = sampler();
        let mut iptables = open(variant);
        let mut watch = iptables.watch().unwrap().unwrap();
        iptables.apply(&cluster.plan, Scope::All).unwrap();
        let changes = cluster.update(sketch(1).slices(&ready(&[1])));
        iptables.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
        let own = drift(&mut *watch, Duration::from_millis(700));
        assert_eq!(own, None, "{variant}");

        let mut vandal = xtables::find_variant(&xtables::SEARCH, variant).unwrap();
        for (family, harm) in [
            (Family::V4, "*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n"),
            (Family::V6, "*filter\n-A KUBE-FORWARD -j ACCEPT\nCOMMIT\n"),
            (
                Family::V4,
                "*nat\n-D PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\nCOMMIT\n",
            ),
        ] {
            vandal.restore(family, harm).unwrap();
            let drift = drift(&mut *watch, Duration::from_secs(10));
            assert!(drift.is_some(), "{variant}: {harm}");
            let mended = iptables.apply(&cluster.plan, Scope::All).unwrap();
            assert!(!mended.changed_nothing(), "{variant}: {harm}");
            assert!(open(variant).apply(&cluster.plan, Scope::All).unwrap().changed_nothing());
        }
        while drift(&mut *watch, Duration::from_millis(700)).is_some() {}
        let changes = cluster.update(sketch(1).slices(&ready(&[101])));
        iptables.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
        assert_eq!(drift(&mut *watch, Duration::from_millis(700)), None, "{variant}");
    });
}
