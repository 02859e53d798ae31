// SPDX-License-Identifier: Apache-2.0

//! Both variants of the tools, in namespaces of their own. Needs root.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use model::{Family, Plan};

use super::{
    make::{ready, sampler, sketch},
    pure::scene,
};
use crate::{
    Config, Dataplane as _, Scope, Watch,
    iptables::{Iptables, Scene, parse, program::is_built_in, render},
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

fn rendered(plan: &Plan, family: Family, table: Table, accounts: bool) -> Chains {
    let program = render::program(&Scene { accounts, ..scene(plan, family) });
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
            let wanted = rendered(&cluster.plan, family, table, iptables.accounts);
            found.retain(|name, rules| !is_built_in(name) || !rules.is_empty());
            assert_eq!(found, wanted, "{variant} {family} {table}");
        }
        let again = open(variant).apply(&cluster.plan, Scope::All).unwrap();
        assert!(again.changed_nothing(), "{again:?}");
    });
}

/// Where the kernel has such counters; elsewhere nobody counts, and nothing is to repair.
#[test]
fn one_that_counts_and_one_that_does_not_repair_each_others_rules() {
    with_each(|variant| {
        let cluster = sampler();
        let can = open(variant).counts;
        assert!(can.is_some(), "{variant}: it could not be found out");
        for counts in [can, Some(false), can] {
            let apply = || {
                let mut iptables = open(variant);
                iptables.counts = counts;
                iptables.apply(&cluster.plan, Scope::All).unwrap()
            };
            apply();
            for family in Family::BOTH {
                let found = saved(variant, family, Table::Filter);
                let wanted = rendered(&cluster.plan, family, Table::Filter, counts == Some(true));
                assert_eq!(found["KUBE-FORWARD"], wanted["KUBE-FORWARD"], "{variant} {family}");
            }
            let again = apply();
            assert!(again.changed_nothing(), "{variant}: {again:?}");
        }
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
        let ours: BTreeSet<String> =
            rendered(&cluster.plan, Family::V4, Table::Nat, false).into_keys().collect();
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

/// How much slower than usual this machine is, by `PORTOLAN_SLOW`; an emulated one, say.
fn slowness() -> u32 {
    std::env::var("PORTOLAN_SLOW").ok().and_then(|text| text.parse().ok()).unwrap_or(1).max(1)
}

/// The next drift, if there is one soon. A busy machine is no reason to fail, nor is a slow one.
fn drift(watch: &mut dyn Watch, patience: Duration) -> Option<crate::Drift> {
    let is_expected = patience > Duration::from_secs(5);
    let patience = if is_expected { patience * slowness() } else { patience };
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

/// A lock of the test's own, which no other test rings.
fn lock(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("portolan-{name}-{}.lock", std::process::id()))
}

/// Runs one command of the tool itself in the namespace of this thread.
fn tool(variant: Variant, arguments: &str) -> String {
    tool_with(variant, arguments, Path::new("/run/xtables.lock"))
}

fn tool_with(variant: Variant, arguments: &str, lock: &Path) -> String {
    let mut command = std::process::Command::new(format!("iptables-{variant}"));
    let output = command.env("XTABLES_LOCKFILE", lock).args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Sends what goes to the first endpoint there is to another: not a byte more, not a rule less.
fn divert(variant: Variant) {
    tool(variant, &diversion(variant));
}

fn diversion(variant: Variant) -> String {
    let nat = saved(variant, Family::V4, Table::Nat);
    let dnat =
        |rules: &Vec<String>| rules.iter().position(|rule| rule.contains("-j DNAT --to-destination 10."));
    let (chain, at) = nat.iter().find_map(|(chain, rules)| Some((chain, dnat(rules)?))).unwrap();
    let rule = &nat[chain][at];
    let (before, to) = rule.split_once("--to-destination ").unwrap();
    let protocol = before.split(' ').skip_while(|word| *word != "-p").nth(1).unwrap();
    let (_, port) = to.rsplit_once(':').unwrap();
    let at = at + 1;
    let recent =
        if rule.contains("-m recent") { format!("-m recent --set --name {chain} ") } else { String::new() };
    format!(
        "-t nat -R {chain} {at} -p {protocol} {recent}-m {protocol} -j DNAT --to-destination 10.9.9.9:{port}"
    )
}

fn is_diverted(variant: Variant) -> bool {
    tool(variant, "-t nat -S").contains("10.9.9.9")
}

/// Without comments, so that the tool can leave a rule as long as it was.
fn large() -> super::make::Cluster {
    larger(7)
}

fn larger(services: u8) -> super::make::Cluster {
    let mut cluster = sampler();
    let hosts: Vec<u8> = (1..=200).collect();
    for number in 20..20 + services {
        cluster.update([sketch(number).service()]);
        cluster.update(sketch(number).slices(&ready(&hosts)));
    }
    cluster
}

#[test]
fn an_edit_that_leaves_the_size_is_noticed_and_mended() {
    with_each(|variant| {
        let cluster = large();
        let mut iptables = open(variant);
        let mut watch = iptables.watch().unwrap().unwrap();
        iptables.apply(&cluster.plan, Scope::All).unwrap();
        assert_eq!(drift(&mut *watch, Duration::from_millis(700)), None, "{variant}");
        let shape = || netlink::legacy::Tables::open(netlink::Family::V4).unwrap().shape("nat").unwrap();
        let before = (variant == Variant::Legacy).then(shape);
        divert(variant);
        assert!(is_diverted(variant));
        assert_eq!((variant == Variant::Legacy).then(shape), before, "the test must leave the size");
        assert!(drift(&mut *watch, Duration::from_secs(20)).is_some(), "{variant}");
        let mended = iptables.apply(&cluster.plan, Scope::All).unwrap();
        assert!(!mended.changed_nothing() && !is_diverted(variant), "{variant}: {mended:?}");
        assert_eq!(mended.mended, variant == Variant::Legacy, "only there nobody had told for certain");
    });
}

/// Where to read the rules takes so long that it is seldom done without a reason.
#[test]
fn an_edit_of_a_large_table_is_noticed_when_the_tool_has_run() {
    with_each(|variant| {
        if variant == Variant::Nft {
            // The kernel tells.
            return;
        }
        let lock = lock("edit");
        let tools = xtables::find_variant(&xtables::SEARCH, variant).unwrap().behind(lock.clone());
        let mut cluster = larger(60);
        let mut iptables = Iptables::over(tools, &Config::default());
        let mut watch = iptables.watch().unwrap().unwrap();
        iptables.apply(&cluster.plan, Scope::All).unwrap();
        for host in 1..=4 {
            let changes = cluster.update(sketch(1).slices(&ready(&[host])));
            iptables.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
        }
        // Rules are read for the first time.
        assert_eq!(drift(&mut *watch, Duration::from_millis(1500)), None, "we are no news");
        let tables = netlink::legacy::Tables::open(netlink::Family::V4).unwrap();
        let begun = Instant::now();
        let shape = tables.read("nat").unwrap().shape();
        // Longer than the patience below, and twenty times as long as it takes to notice.
        let without_reason = begun.elapsed() * 200;
        tool_with(variant, "-t nat -S KUBE-SERVICES", &lock);
        assert_eq!(drift(&mut *watch, Duration::from_millis(1500)), None, "to look is no harm");

        let diversion = diversion(variant);
        let begun = Instant::now();
        tool_with(variant, &diversion, &lock);
        assert_eq!(tables.shape("nat").unwrap(), shape, "the test must leave the size");
        assert!(drift(&mut *watch, without_reason / 2).is_some(), "within {without_reason:?}");
        eprintln!(
            "noticed {:?} after the tool was started; without a reason: {without_reason:?}",
            begun.elapsed()
        );
        let mended = iptables.apply(&cluster.plan, Scope::All).unwrap();
        assert!(mended.mended && !is_diverted(variant), "{mended:?}");
        std::fs::remove_file(&lock).unwrap();
    });
}

/// What others did just before we wrote is not taken for our own doing.
#[test]
fn an_edit_before_our_own_write_is_noticed() {
    with_each(|variant| {
        let mut cluster = large();
        let mut iptables = open(variant);
        let mut watch = iptables.watch().unwrap().unwrap();
        iptables.apply(&cluster.plan, Scope::All).unwrap();
        assert_eq!(drift(&mut *watch, Duration::from_millis(700)), None, "{variant}");
        divert(variant);
        let changes = cluster.update(sketch(1).slices(&ready(&[1])));
        iptables.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
        if is_diverted(variant) {
            assert!(drift(&mut *watch, Duration::from_secs(20)).is_some(), "{variant}");
            iptables.apply(&cluster.plan, Scope::All).unwrap();
        }
        assert!(!is_diverted(variant));
    });
}

#[test]
fn an_edit_that_nobody_told_is_found_by_the_audit() {
    with_each(|variant| {
        if variant == Variant::Legacy {
            // There the watch looks at all rules.
            return;
        }
        let mut cluster = large();
        let mut iptables = open(variant);
        iptables.apply(&cluster.plan, Scope::All).unwrap();
        let round = |iptables: &mut Iptables| {
            let mut found = None;
            loop {
                let audited = iptables.audit().unwrap();
                found = found.or(audited.drift);
                if !audited.more {
                    return found;
                }
            }
        };
        assert_eq!(round(&mut iptables), None, "the first round learns");
        assert_eq!(round(&mut iptables), None);
        let changes = cluster.update(sketch(1).slices(&ready(&[1])));
        iptables.apply(&cluster.plan, Scope::Only(&changes)).unwrap();
        assert_eq!(round(&mut iptables), None, "what we change is no drift");
        divert(variant);
        let found = round(&mut iptables).expect("it is another rule");
        assert!(found.contains("KUBE-SEP-"), "{found}");
        assert!(!iptables.apply(&cluster.plan, Scope::All).unwrap().changed_nothing());
        assert!(!is_diverted(variant));
        assert_eq!(round(&mut iptables), None);
    });
}
