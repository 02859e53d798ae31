// SPDX-License-Identifier: Apache-2.0

//! Feature gates: the names kube-proxy of Kubernetes 1.36 and 1.37 accepts, so that a configuration that started
//! it starts us. Few of them mean anything here.

use std::collections::BTreeMap;

/// One line for each gate: name, stage, default (`on`, `off`, or `locked` for on and not to be changed).
const TABLE: &str = include_str!("gates.txt");

/// One known feature gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gate {
    pub name: &'static str,
    /// `ga`, `beta`, `alpha` or `deprecated`.
    pub stage: &'static str,
    pub enabled: bool,
    pub locked: bool,
}

/// All known gates, by name.
pub fn known() -> impl Iterator<Item = Gate> {
    TABLE.lines().filter_map(|line| {
        let mut words = line.split(' ');
        let (name, stage, default) = (words.next()?, words.next()?, words.next()?);
        Some(Gate { name, stage, enabled: default != "off", locked: default == "locked" })
    })
}

/// Whether a gate is on, with what the configuration says about it. Unknown names are off.
pub fn enabled(set: &BTreeMap<String, bool>, name: &str) -> bool {
    if let Some(value) = set.get(name) {
        return *value;
    }
    let Some(gate) = known().find(|gate| gate.name == name) else { return false };
    let all = match gate.stage {
        "alpha" => set.get("AllAlpha"),
        "beta" => set.get("AllBeta"),
        _ => None,
    };
    all.copied().unwrap_or(gate.enabled)
}

/// What is wrong with a set of gates: a name, and a sentence about it.
pub fn check(set: &BTreeMap<String, bool>) -> Vec<(&str, String)> {
    let mut wrong = Vec::new();
    for (name, value) in set {
        match known().find(|gate| gate.name == name) {
            None => wrong.push((name.as_str(), format!("unrecognized feature gate: {name}"))),
            Some(gate) if gate.locked && gate.enabled != *value => {
                let locked = !value;
                let says =
                    format!("cannot set feature gate {name} to {value}, feature is locked to {locked}");
                wrong.push((name.as_str(), says));
            }
            Some(_) => {}
        }
    }
    wrong
}

/// Gates that will go away: worth a warning when they are set.
pub fn outdated(set: &BTreeMap<String, bool>) -> impl Iterator<Item = Gate> {
    known().filter(|gate| matches!(gate.stage, "ga" | "deprecated") && set.contains_key(gate.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(gates: &[(&str, bool)]) -> BTreeMap<String, bool> {
        gates.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn the_table_is_whole() {
        assert_eq!(known().count(), TABLE.lines().count());
        assert_eq!(known().count(), 257, "254 of 1.37, and 3 that only 1.36 has");
        assert!(known().all(|gate| matches!(gate.stage, "ga" | "beta" | "alpha" | "deprecated")));
    }

    #[test]
    fn unknown_and_locked_gates_are_refused() {
        assert!(check(&set(&[("KubeProxyIPVS", false), ("AllAlpha", true)])).is_empty());
        assert!(check(&set(&[("NFTablesProxyMode", true)])).is_empty());
        assert_eq!(check(&set(&[("NFTablesProxyMode", false)])).len(), 1);
        let unknown = "unrecognized feature gate: Nonsense".to_owned();
        assert_eq!(check(&set(&[("Nonsense", true)])), [("Nonsense", unknown)]);
    }

    #[test]
    fn defaults_hold_until_set() {
        assert!(enabled(&set(&[]), "KubeProxyIPVS"));
        assert!(!enabled(&set(&[("KubeProxyIPVS", false)]), "KubeProxyIPVS"));
        assert!(!enabled(&set(&[]), "LoggingAlphaOptions"));
        assert!(enabled(&set(&[("AllAlpha", true)]), "LoggingAlphaOptions"));
        assert_eq!(outdated(&set(&[("KubeProxyIPVS", true)])).count(), 1);
    }
}
