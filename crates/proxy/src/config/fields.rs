// SPDX-License-Identifier: Apache-2.0

//! What differs between two configurations, field by field, and what that means for a proxy that runs.

use std::fmt;

use serde::Serialize;
use serde_json::Value;

use super::Config;

/// One field that differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// As written in a file: `nftables.syncPeriod`.
    pub field: String,
    pub was: Value,
    pub is: Value,
    pub effect: Effect,
}

/// What a changed field means for a proxy that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Effect {
    /// It is applied at once.
    Live,
    /// It takes a new process.
    Restart,
    /// Nothing here depends on it, or nothing in the mode in use.
    Nothing,
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Effect::Live => "applied at once",
            Effect::Restart => "needs a restart",
            Effect::Nothing => "has no effect here",
        })
    }
}

/// Every field that differs, by name. Both have been filled and settled.
pub fn differences(was: &Config, is: &Config) -> Vec<Difference> {
    let json = |config| serde_json::to_value(config).expect("plain fields and string keys have a JSON form");
    let mut found = Vec::new();
    compare("", &json(was), &json(is), &mut found);
    let (was_mode, is_mode) = (was.mode.as_str(), is.mode.as_str());
    found
        .into_iter()
        .map(|(field, was, is)| {
            // The stronger of what it means in either mode.
            let (one, other) = (effect(&field, was_mode), effect(&field, is_mode));
            let effect = if one == Effect::Nothing { other } else { one };
            Difference { field, was, is, effect }
        })
        .collect()
}

fn compare(path: &str, was: &Value, is: &Value, found: &mut Vec<(String, Value, Value)>) {
    let empty = serde_json::Map::new();
    let (one, other) = match (was, is) {
        _ if was == is => return,
        (Value::Object(one), Value::Object(other)) => (one, other),
        // A map that one of them leaves out: its entries are told one by one all the same.
        (Value::Object(one), Value::Null) if !path.is_empty() => (one, &empty),
        (Value::Null, Value::Object(other)) if !path.is_empty() => (&empty, other),
        _ => return found.push((path.to_owned(), was.clone(), is.clone())),
    };
    let mut names: Vec<&String> = one.keys().chain(other.keys()).collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let value = |map: &serde_json::Map<String, Value>| map.get(name).cloned().unwrap_or(Value::Null);
        compare(&path, &value(one), &value(other), found);
    }
}

/// What a field means for a proxy that runs in this mode.
pub fn effect(field: &str, mode: &str) -> Effect {
    let (section, name) = field.split_once('.').unwrap_or((field, ""));
    match section {
        "mode" | "healthzBindAddress" | "metricsBindAddress" | "hostnameOverride" => Effect::Restart,
        "bindAddress" | "clusterCIDR" | "conntrack" | "detectLocal" | "detectLocalMode"
        | "enableProfiling" | "featureGates" | "nodePortAddresses" | "oomScoreAdj" => Effect::Live,
        "clientConnection" if matches!(name, "burst" | "qps" | "acceptContentTypes") => Effect::Nothing,
        "clientConnection" => Effect::Restart,
        "logging" if matches!(name, "format" | "verbosity" | "vmodule") => Effect::Live,
        "portRange" | "udpIdleTimeout" if mode == "userspace" => Effect::Restart,
        "nftables" | "iptables" | "ipvs" => in_mode(section, name, mode),
        // Accepted, checked and given back: apiVersion, bindAddressHardFail (asked only when binding),
        // configSyncPeriod, kind, other fields of logging, portRange and udpIdleTimeout in other modes,
        // showHiddenMetricsForVersion, windowsRunAsService, winkernel.
        _ => Effect::Nothing,
    }
}

/// What belongs to one mode matters only there; but the mark and masqueradeAll of iptables are also ipvs's.
fn in_mode(section: &str, name: &str, mode: &str) -> Effect {
    let shared = section == "iptables" && mode == "ipvs";
    match name {
        _ if section != mode && !shared => Effect::Nothing,
        "masqueradeAll" => Effect::Live,
        "masqueradeBit" => Effect::Restart,
        _ if shared => Effect::Nothing,
        "syncPeriod" | "minSyncPeriod" => Effect::Live,
        _ => Effect::Restart,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(change: impl FnOnce(&mut Config)) -> Config {
        let mut config = Config::with_defaults();
        change(&mut config);
        config.settle();
        config
    }

    fn told(was: &Config, is: &Config) -> Vec<(String, Effect)> {
        differences(was, is).into_iter().map(|found| (found.field, found.effect)).collect()
    }

    #[test]
    fn equal_configurations_have_no_differences() {
        assert_eq!(differences(&config(|_| {}), &config(|_| {})), []);
    }

    #[test]
    fn each_difference_is_named_with_both_values() {
        let other = config(|config| {
            config.logging.verbosity = 4;
            config.cluster_cidr = "10.0.0.0/8".into();
            config.feature_gates = Some([("AllAlpha".to_owned(), true)].into());
            config.nftables.masquerade_bit = Some(15);
            config.ipvs.scheduler = "rr".into();
        });
        let found = differences(&config(|_| {}), &other);
        let lines: Vec<_> =
            found.iter().map(|d| format!("{} {} {} {:?}", d.field, d.was, d.is, d.effect)).collect();
        assert_eq!(
            lines,
            [
                "clusterCIDR \"\" \"10.0.0.0/8\" Live",
                "featureGates.AllAlpha null true Live",
                "ipvs.scheduler \"\" \"rr\" Nothing",
                "logging.verbosity 0 4 Live",
                "nftables.masqueradeBit 14 15 Restart",
            ]
        );
    }

    /// Every field has an effect that somebody has thought of: one that is new shows up here.
    #[test]
    fn the_effect_of_every_field_in_nftables_mode() {
        let nothing = serde_json::json!({});
        let all = serde_json::to_value(config(|_| {})).expect("plain");
        let mut found = Vec::new();
        compare("", &nothing, &all, &mut found);
        let with = |wanted: Effect| {
            let fields = found.iter().map(|(field, _, _)| field.as_str());
            fields.filter(|field| effect(field, "nftables") == wanted).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            with(Effect::Live),
            "bindAddress clusterCIDR conntrack.maxPerCore conntrack.min conntrack.tcpBeLiberal \
             conntrack.tcpCloseWaitTimeout conntrack.tcpEstablishedTimeout conntrack.udpStreamTimeout \
             conntrack.udpTimeout detectLocal.bridgeInterface detectLocal.interfaceNamePrefix detectLocalMode \
             enableProfiling logging.format logging.verbosity nftables.masqueradeAll nftables.minSyncPeriod nftables.syncPeriod \
             nodePortAddresses oomScoreAdj"
        );
        assert_eq!(
            with(Effect::Restart),
            "clientConnection.contentType clientConnection.kubeconfig healthzBindAddress hostnameOverride \
             metricsBindAddress mode nftables.masqueradeBit"
        );
        assert_eq!(
            with(Effect::Nothing),
            "apiVersion bindAddressHardFail clientConnection.acceptContentTypes clientConnection.burst \
             clientConnection.qps configSyncPeriod iptables.localhostNodePorts \
             iptables.masqueradeAll iptables.masqueradeBit iptables.minSyncPeriod iptables.syncPeriod \
             ipvs.minSyncPeriod ipvs.scheduler ipvs.strictARP ipvs.syncPeriod ipvs.tcpFinTimeout ipvs.tcpTimeout \
             ipvs.udpTimeout kind logging.flushFrequency logging.options.json.infoBufferSize \
             logging.options.text.infoBufferSize portRange showHiddenMetricsForVersion winkernel.enableDSR \
             winkernel.forwardHealthCheckVip winkernel.networkName winkernel.rootHnsEndpointName \
             winkernel.sourceVip"
        );
    }

    #[test]
    fn a_section_matters_in_its_mode() {
        let with = |mode: &str, bit: i32| {
            config(|config| {
                config.mode = mode.into();
                config.iptables.masquerade_bit = Some(bit);
            })
        };
        let field = || "iptables.masqueradeBit".to_owned();
        assert_eq!(told(&with("nftables", 14), &with("nftables", 3)), [(field(), Effect::Nothing)]);
        assert_eq!(told(&with("iptables", 14), &with("iptables", 3)), [(field(), Effect::Restart)]);
        assert_eq!(told(&with("ipvs", 14), &with("ipvs", 3)), [(field(), Effect::Restart)]);
        let ports = |mode: &str, range: &str| {
            config(|config| {
                config.mode = mode.into();
                config.port_range = range.into();
            })
        };
        let field = || "portRange".to_owned();
        assert_eq!(told(&ports("nftables", ""), &ports("nftables", "1-9")), [(field(), Effect::Nothing)]);
        assert_eq!(told(&ports("userspace", ""), &ports("userspace", "1-9")), [(field(), Effect::Restart)]);
        let switched = told(&with("nftables", 14), &with("iptables", 14));
        assert!(switched.contains(&("mode".to_owned(), Effect::Restart)), "{switched:?}");
    }
}
