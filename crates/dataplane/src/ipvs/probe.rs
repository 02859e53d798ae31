// SPDX-License-Identifier: Apache-2.0

//! Whether this kernel has what the mode needs. What it lacks is named by its module.

use model::{Family, PerFamily};
use netlink::{
    Error, Netns,
    ipset::{Ipset, SetKind},
    ipvs::{Change, Ipvs, Service, ServiceKey},
    route::{LinkKind, Route},
};

use super::{
    Settings,
    chains::{Script, Standing},
    render::Scene,
    sets::Set,
};
use crate::{
    Loopback, Unsupported,
    xtables::{Failure, Table, Tables, Xtables},
};

/// Tries everything in a network namespace of its own, so that nothing is changed here. Without the privilege to make
/// one, only what can be asked without changing anything is.
pub(super) fn probe(
    settings: &Settings,
    families: PerFamily<bool>,
    tools: &Xtables,
) -> Result<(), Unsupported> {
    let outside = || Ipvs::open().err().map(|error| named("ip_vs", &error)).into_iter().collect();
    let missing: Vec<String> = match Netns::new() {
        Ok(netns) => {
            let inside = || look(settings, families, &tools.elsewhere());
            netns.run(inside).unwrap_or_else(|_| outside())
        }
        Err(_) => outside(),
    };
    match missing.is_empty() {
        true => Ok(()),
        false => Err(Unsupported(format!(
            "ipvs mode cannot work here: the kernel has not {}; load these modules, or choose another mode",
            missing.join(", ")
        ))),
    }
}

/// Names of modules that are missing, each with the reason where it is another than that.
fn look(settings: &Settings, families: PerFamily<bool>, tools: &Xtables) -> Vec<String> {
    let mut missing = Vec::new();
    missing.extend(dummy().err());
    match Ipvs::open() {
        Ok(mut ipvs) => missing.extend(scheduler(&mut ipvs, &settings.scheduler).err()),
        Err(error) => missing.push(named("ip_vs", &error)),
    }
    for family in Family::BOTH.into_iter().filter(|family| families[*family]) {
        let absent = sets(family);
        if absent.is_empty() {
            missing.extend(rules(&mut tools.clone(), family));
        }
        missing.extend(absent);
    }
    missing.sort();
    missing.dedup();
    missing
}

fn named(module: &str, error: &Error) -> String {
    match error.is_not_found() || error.is_unsupported() {
        true => module.to_owned(),
        false => format!("{module} ({error})"),
    }
}

fn dummy() -> Result<(), String> {
    let add = || Route::open()?.add_link("probe", LinkKind::Dummy);
    add().map_err(|error| named("dummy", &error))
}

/// The kernel loads a scheduler with the first server that names it. Another that the mode uses, too.
fn scheduler(ipvs: &mut Ipvs, name: &str) -> Result<(), String> {
    for scheduler in [name, "mh"] {
        // An address for documentation; it is not reached from here.
        let key = ServiceKey::At { protocol: 6, address: [198, 51, 100, 0].into(), port: 20_000 };
        let service = Service { key, scheduler: scheduler.to_owned(), flags: 0, timeout: 0 };
        let changes = [Change::AddService(service), Change::RemoveService(key)];
        let refusals = ipvs.apply(&changes).map_err(|error| named("ip_vs", &error))?;
        if let Some(refusal) = refusals.first() {
            return Err(named(&format!("ip_vs_{scheduler}"), &refusal.error));
        }
    }
    Ok(())
}

fn sets(family: Family) -> Vec<String> {
    let mut missing = Vec::new();
    let mut ipset = match Ipset::open() {
        Ok(ipset) => ipset,
        Err(error) => return vec![named("ip_set", &error)],
    };
    for set in Set::ALL {
        if let Err(error) = ipset.create(&set.spec(family)) {
            missing.push(named(module(set.kind()), &error));
        }
    }
    missing
}

fn module(kind: SetKind) -> &'static str {
    match kind {
        SetKind::HashIp => "ip_set_hash_ip",
        SetKind::HashIpPort | SetKind::HashIpPortMark => "ip_set_hash_ipport",
        SetKind::HashIpPortIp => "ip_set_hash_ipportip",
        SetKind::HashIpPortNet => "ip_set_hash_ipportnet",
        SetKind::BitmapPort => "ip_set_bitmap_port",
    }
}

/// What rules need: how it is written, and its module. `@` is a set of addresses, `%` the one with marks.
const NEEDS: [(Table, &str, &str); 9] = [
    (Table::Nat, "-m comment --comment probe", "xt_comment"),
    (Table::Nat, "-m set --match-set @ src -j RETURN", "xt_set"),
    (Table::Mangle, "-j SET --map-set % dst,dst --map-mark", "xt_set"),
    (Table::Nat, "-m addrtype --src-type LOCAL -j RETURN", "xt_addrtype"),
    (Table::Nat, "-m mark ! --mark 0x4000/0x4000 -j RETURN", "xt_mark"),
    (Table::Nat, "-j MARK --set-xmark 0x4000/0x4000", "xt_mark"),
    (Table::Nat, "-j MASQUERADE --random-fully", "xt_MASQUERADE"),
    (Table::Filter, "-m conntrack --ctstate NEW -j RETURN", "xt_conntrack"),
    (Table::Filter, "-j REJECT", "ipt_REJECT or ip6t_REJECT"),
];

/// The rules of the mode, as they are; and if they are refused, what they need, one by one. The sets are there.
fn rules(tools: &mut dyn Tables, family: Family) -> Vec<String> {
    let plan = model::Plan::new();
    let (settings, own) = (Settings::default(), std::collections::BTreeSet::new());
    let scene = Scene {
        plan: &plan,
        family,
        settings: &settings,
        own: &own,
        mark: 1 << 14,
        loopback: Loopback::Guarded,
    };
    let script = Script::to(&Standing::default(), &scene);
    let failure = match tools.restore(family, &script.input()) {
        Err(failure @ (Failure::Refused { .. } | Failure::Missing { .. })) => failure,
        // Somebody holds the lock, or the machine is slow: that passes.
        Ok(()) | Err(_) => return Vec::new(),
    };
    let mut missing = Vec::new();
    for (table, rule, module) in NEEDS {
        let rule = rule.replace('@', &Set::IpvsIps.name(family)).replace('%', &Set::Inside.name(family));
        let input = format!("*{table}\n:PORTOLAN-PROBE - [0:0]\n-A PORTOLAN-PROBE {rule}\nCOMMIT\n");
        if tools.restore(family, &input).is_err() {
            missing.push(module.to_owned());
        }
    }
    if missing.is_empty() {
        missing.push(format!("what the rules of iptables need for {family} ({failure})"));
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xtables::testing::Without;

    #[test]
    fn what_rules_lack_is_named() {
        for (word, module) in
            [("--match-set", "xt_set"), ("--map-mark", "xt_set"), ("addrtype", "xt_addrtype")]
        {
            assert_eq!(rules(&mut Without(word), Family::V4), [module]);
        }
        assert_eq!(rules(&mut Without("-A"), Family::V4).len(), NEEDS.len(), "each is named");
        assert_eq!(rules(&mut Without("nothing of this"), Family::V6), [""; 0]);
    }
}
