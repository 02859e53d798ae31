// SPDX-License-Identifier: Apache-2.0

//! All that can be said of a configuration file: everything wrong, not the first thing only, what nobody reads,
//! and what will go away.

use std::fmt;

use serde::Serialize;

use super::{
    API_VERSION, Config, KIND,
    check::check,
    decode::{finish, typed},
    fields::{Effect, effect},
    gates,
    own::{self, Own},
    tree::Document,
};

/// One remark.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Remark {
    /// 0 if it is about something that is not there.
    pub line: u64,
    pub field: String,
    pub severity: Severity,
    pub says: String,
}

/// How much a [`Remark`] matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The program refuses to start with it.
    Error,
    /// It is ignored, and may not be meant so.
    Warning,
    /// It works, but not for ever.
    Deprecated,
    /// It is accepted so that kube-proxy's files can be used, and changes nothing here.
    Unused,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Deprecated => "deprecated",
            Severity::Unused => "unused",
        })
    }
}

/// What there is to say of a file, and the configuration as far as it can be understood.
#[derive(Debug)]
pub struct Review<T> {
    pub remarks: Vec<Remark>,
    pub read: Option<T>,
}

impl<T> Review<T> {
    fn unreadable(says: String) -> Review<T> {
        // The text of a syntax error has its place in it.
        Review { remarks: vec![remark(0, "", Severity::Error, says)], read: None }
    }
}

/// Reviews kube-proxy's configuration; `mode` is what our own settings put in the place of its mode.
pub fn config(text: &str, mode: Option<&str>) -> Review<Config> {
    let document = match Document::parse(text, KIND) {
        Ok(document) => document,
        Err(says) => return Review::unreadable(says),
    };
    let (config, misfits) = document.fit_most::<Config>();
    let understood = misfits.is_empty();
    let fits = |field: &str| !misfits.iter().any(|misfit| misfit.field == field);
    let heads = [("kind", &config.kind, KIND), ("apiVersion", &config.api_version, API_VERSION)];
    let mut remarks: Vec<Remark> =
        misfits.iter().map(|m| remark(m.line, &m.field, Severity::Error, m.says.clone())).collect();
    for (field, is, must) in heads.into_iter().filter(|(field, ..)| fits(field)) {
        if let Err(says) = typed((field, is, must)) {
            remarks.push(remark(document.line(field).unwrap_or(0), field, Severity::Error, says));
        }
    }
    let decoded = finish(config, &document);
    remarks.extend(
        decoded
            .notices
            .into_iter()
            .map(|notice| remark(notice.line, &notice.field, Severity::Warning, notice.reason.to_string())),
    );
    let mut config = decoded.config;
    if let Some(mode) = mode {
        mode.clone_into(&mut config.mode);
    }
    config.settle();
    remarks.extend(invalid(&config, &document));
    remarks.extend(outdated(&config, &document));
    // Without a field that does not fit, what the others are good for is not certain: the mode may be among them.
    if understood {
        remarks.extend(unused(&config, &document));
    }
    remarks.sort_by_key(|remark| (remark.line, remark.severity));
    Review { remarks, read: understood.then_some(config) }
}

/// What a file says it is.
pub fn kind_of(text: &str) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Head {
        kind: Option<String>,
    }
    Document::parse(text, KIND).ok()?.fit::<Head>().ok()?.kind
}

/// Reviews our own settings.
pub fn own(text: &str) -> Review<Own> {
    let document = match Document::parse(text, own::KIND) {
        Ok(document) => document,
        Err(says) => return Review::unreadable(says),
    };
    let (mut remarks, read) = match Own::fit(&document) {
        Ok(own) => (Vec::new(), Some(own)),
        Err(wrong) => {
            let wrong = wrong.into_iter().map(|m| remark(m.line, &m.field, Severity::Error, m.says));
            (wrong.collect(), None)
        }
    };
    if let Some(own) = &read {
        let heads = [("kind", &own.kind, own::KIND), ("apiVersion", &own.api_version, own::API_VERSION)];
        for (field, is, must) in heads {
            if let Err(says) = typed((field, is, must)) {
                remarks.push(remark(document.line(field).unwrap_or(0), field, Severity::Error, says));
            }
        }
    }
    Review { remarks, read }
}

fn remark(line: u64, field: &str, severity: Severity, says: String) -> Remark {
    Remark { line, field: field.to_owned(), severity, says }
}

fn invalid(config: &Config, document: &Document) -> Vec<Remark> {
    let wrong = check(config).err().unwrap_or_default();
    let told = wrong.into_iter().map(|wrong| {
        // A gate is named by its value.
        let field = match wrong.field {
            "featureGates" => format!("featureGates.{}", wrong.value),
            field => field.to_owned(),
        };
        let says = match wrong.field {
            "featureGates" => wrong.reason,
            _ => format!("{:?} {}", wrong.value, wrong.reason),
        };
        let line = document.line(&field).or_else(|| document.line(wrong.field)).unwrap_or(0);
        remark(line, &field, Severity::Error, says)
    });
    told.collect()
}

fn outdated(config: &Config, document: &Document) -> Vec<Remark> {
    let mut remarks = Vec::new();
    for gate in config.feature_gates.iter().flat_map(gates::outdated) {
        let field = format!("featureGates.{}", gate.name);
        let says = format!("this feature gate ({}) will go away", gate.stage);
        remarks.push(remark(document.line(&field).unwrap_or(0), &field, Severity::Deprecated, says));
    }
    if config.mode == "ipvs" {
        let says = "kube-proxy is giving up its ipvs mode".to_owned();
        remarks.push(remark(document.line("mode").unwrap_or(0), "mode", Severity::Deprecated, says));
    }
    remarks
}

/// What is set to something else than its default and changes nothing.
fn unused(config: &Config, document: &Document) -> Vec<Remark> {
    let mut defaults = Config::with_defaults();
    config.mode.clone_into(&mut defaults.mode);
    defaults.settle();
    let differ = super::fields::differences(&defaults, config).into_iter();
    let told = differ.filter_map(|found| {
        let line = document.line(&found.field)?;
        // The first is asked when binding; that the others differ has been told as an error.
        let is_other = ["bindAddressHardFail", "kind", "apiVersion"].contains(&found.field.as_str());
        if is_other || effect(&found.field, &config.mode) != Effect::Nothing {
            return None;
        }
        let section = found.field.split('.').next().unwrap_or_default();
        let says = match section {
            "winkernel" | "windowsRunAsService" => "is for Windows only".to_owned(),
            "portRange" | "udpIdleTimeout" => {
                "is for the userspace mode, which kube-proxy gave up long ago".to_owned()
            }
            "nftables" | "iptables" | "ipvs" => format!("is not used in mode {}", config.mode),
            _ => "is accepted, and has no effect here".to_owned(),
        };
        Some(remark(line, &found.field, Severity::Unused, says))
    });
    told.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

    fn told(body: &str) -> Vec<String> {
        let review = config(&format!("{HEAD}{body}"), None);
        let line = |r: &Remark| format!("{} {} {}: {}", r.line, r.severity, r.field, r.says);
        review.remarks.iter().map(line).collect()
    }

    #[test]
    fn a_plain_file_has_no_remarks() {
        assert_eq!(told("mode: \"\"\nclusterCIDR: 10.244.0.0/16\n"), [""; 0]);
    }

    #[test]
    fn everything_is_told_at_once_with_its_line() {
        let body = "mod: x\nmode: IPTables\noomScoreAdj: 2000\nconntrack:\n  min: -1\nnodePortAddresses:\n- all\n- all\n\
                    featureGates:\n  Nonsense: true\n  NFTablesProxyMode: true\nportRange: 1-2\n";
        assert_eq!(
            told(body),
            [
                "3 warning mod: unknown field",
                "4 error mode: \"IPTables\" must be nftables, iptables, ipvs or userspace, in lower case",
                "5 error oomScoreAdj: \"2000\" must be from -1000 to 1000",
                "7 error conntrack.min: \"-1\" must be from 0 to 2147483647",
                "8 error nodePortAddresses: \"all\" this keyword is given twice",
                "12 error featureGates.Nonsense: unrecognized feature gate: Nonsense",
                "13 deprecated featureGates.NFTablesProxyMode: this feature gate (ga) will go away",
                "14 unused portRange: is for the userspace mode, which kube-proxy gave up long ago",
            ]
        );
    }

    #[test]
    fn every_value_of_a_wrong_type_is_told() {
        let body = "oomScoreAdj: x\nnftables:\n  syncPeriod: 5\n  minSyncPeriod: 1y\nwhat: 1\n";
        let lines = told(body);
        assert_eq!(lines.len(), 4, "{lines:#?}");
        for (line, starts) in lines.iter().zip([
            "3 error oomScoreAdj: ",
            "5 error nftables.syncPeriod: ",
            "6 error nftables.minSyncPeriod: ",
            "7 warning what: ",
        ]) {
            assert!(line.starts_with(starts), "{line}");
        }
        assert_eq!(told("a: [\n").len(), 1);
        let alien = config("kind: Pod\napiVersion: v1\n", None);
        let told: Vec<_> = alien.remarks.iter().map(|r| (r.line, r.severity)).collect();
        assert_eq!(told, [(1, Severity::Error), (2, Severity::Error)], "and nothing else is said of them");
    }

    #[test]
    fn a_wrong_type_hides_nothing_else() {
        let body = "oomScoreAdj: high\nbindAddress: 1.2.3\nconntrack:\n  min: few\n  maxPerCore: -1\nnftables:\n  \
                    masqueradeBit: 99\nfeatureGates:\n  NFTablesProxyMode: true\n";
        let lines = told(body);
        assert_eq!(lines.len(), 6, "{lines:#?}");
        for (line, starts) in lines.iter().zip([
            "3 error oomScoreAdj: ",
            "4 error bindAddress: \"1.2.3\" must be an IP address",
            "6 error conntrack.min: ",
            "7 error conntrack.maxPerCore: \"-1\" must be from 0 to 2147483647",
            "9 error nftables.masqueradeBit: \"99\" must be from 0 to 31",
            "11 deprecated featureGates.NFTablesProxyMode: ",
        ]) {
            assert!(line.starts_with(starts), "{line}");
        }
        // What has the wrong type is not also called missing.
        let review = config("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: [1]\nmode: 5\n", None);
        let fields: Vec<_> = review.remarks.iter().map(|r| (r.line, r.field.as_str())).collect();
        assert_eq!(fields, [(2, "kind"), (3, "mode")]);
        assert!(review.read.is_none());
    }

    #[test]
    fn what_another_mode_would_use_is_told_for_the_mode_in_use() {
        let body = "mode: iptables\nnftables:\n  masqueradeBit: 3\n";
        assert_eq!(told(body), ["5 unused nftables.masqueradeBit: is not used in mode iptables"]);
        let review = config(&format!("{HEAD}{body}"), Some("nftables"));
        assert_eq!(review.remarks, []);
        assert_eq!(review.read.expect("understood").mode, "nftables");
        assert_eq!(told("mode: ipvs\n"), ["3 deprecated mode: kube-proxy is giving up its ipvs mode"]);
    }

    #[test]
    fn our_own_settings_are_reviewed_too() {
        let review = own("apiVersion: portolan.dev/v1\nkind: PortolanConfiguration\nx: 1\nsource: y\n");
        let lines: Vec<_> = review.remarks.iter().map(|r| (r.line, r.field.as_str())).collect();
        assert_eq!(lines, [(3, "x"), (4, "source")]);
        let review = own("apiVersion: portolan.dev/v1\nkind: PortolanConfiguration\n");
        assert_eq!(review.remarks[0].field, "apiVersion");
    }
}
