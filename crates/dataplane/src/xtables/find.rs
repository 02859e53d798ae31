// SPDX-License-Identifier: Apache-2.0

//! Which tools there are, and which variant the host uses.
//!
//! The kubelet makes the chain KUBE-IPTABLES-HINT with the host's own tool. Where there is none, canary chains tell,
//! then where rules are, then what the plain name `iptables` stands for.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use model::{Family, PerFamily};
use netlink::legacy;

use super::{Limits, Pair, Table, Tables as _, Variant, Xtables, run::Job};
use crate::{Unsupported, names::xt};

/// Where tools are looked for.
pub const SEARCH: [&str; 6] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/local/bin"];

/// What a search came to.
#[derive(Clone, Debug)]
pub struct Found {
    pub xtables: Xtables,
    /// What is not as it should be on this host; one sentence each.
    pub warnings: Vec<String>,
}

/// The tools to work with, in the network namespace of this thread: of the variant that is asked for, else of the one that
/// the host uses. Fails without the privilege that they need.
pub fn open(variant: Option<Variant>) -> Result<Found, Unsupported> {
    let found = match variant {
        Some(variant) => Found { xtables: find_variant(&SEARCH, variant)?, warnings: Vec::new() },
        None => find(&SEARCH)?,
    };
    match found.xtables.variant {
        Variant::Legacy if is_barred() => Err(Unsupported(
            "the legacy variant of iptables needs CAP_NET_RAW beside CAP_NET_ADMIN, and this process lacks it"
                .to_owned(),
        )),
        _ => Ok(found),
    }
}

/// Legacy tables are read and written by a raw socket, which this process may not have.
fn is_barred() -> bool {
    legacy::Tables::open(netlink::Family::V4).is_err_and(|error| error.is_permission())
}

/// The tools of the variant that the host uses, in the network namespace of this thread.
pub fn find(search: &[&str]) -> Result<Found, Unsupported> {
    let inventory = Inventory::take(search);
    let mut evidence = Vec::new();
    for variant in Variant::BOTH {
        if let Some(tools) = inventory.tools(variant) {
            let limits = Limits { run: Duration::from_secs(20), ..Limits::default() };
            let mut xtables = Xtables::new(variant, tools.clone()).within(limits);
            evidence.push((variant, Evidence::gather(&mut xtables)));
        }
    }
    if evidence.iter().any(|(variant, _)| *variant == Variant::Legacy) && is_barred() {
        must_not_be_legacy(&evidence)?;
    }
    let Some(variant) = choose(&evidence, inventory.plain) else { return Err(missing(search)) };
    let tools = inventory.tools(variant).cloned().ok_or_else(|| missing(search))?;
    let warnings = doubts(variant, &evidence);
    Ok(Found { xtables: Xtables::new(variant, tools), warnings })
}

/// The tools of one variant, whatever the host uses.
pub fn find_variant(search: &[&str], variant: Variant) -> Result<Xtables, Unsupported> {
    let tools = Inventory::take(search).tools(variant).cloned();
    let tools = tools.ok_or_else(|| {
        Unsupported(format!(
            "there is no iptables-{variant}-restore, or one of its companions (save, and both for ip6tables), in \
             {}: install the package iptables, version 1.8 or newer",
            search.join(", ")
        ))
    })?;
    Ok(Xtables::new(variant, tools))
}

fn missing(search: &[&str]) -> Unsupported {
    Unsupported(format!(
        "there is no iptables-restore, or one of its companions (save, and both for ip6tables), in {}: install the \
         package iptables, version 1.8 or newer, or use the mode nftables, which needs none",
        search.join(", ")
    ))
}

/// The tools of a host.
struct Inventory {
    nft: Option<PerFamily<Pair>>,
    legacy: Option<PerFamily<Pair>>,
    /// What the plain name stands for.
    plain: Option<Variant>,
}

impl Inventory {
    fn take(search: &[&str]) -> Inventory {
        let plain = program(search, "iptables").and_then(|tool| variant_of(&tool));
        let tools = |variant| {
            let named = pairs(search, &format!("-{variant}"));
            named.or_else(|| if plain == Some(variant) { pairs(search, "") } else { None })
        };
        Inventory { nft: tools(Variant::Nft), legacy: tools(Variant::Legacy), plain }
    }

    fn tools(&self, variant: Variant) -> Option<&PerFamily<Pair>> {
        match variant {
            Variant::Nft => self.nft.as_ref(),
            Variant::Legacy => self.legacy.as_ref(),
        }
    }
}

fn pairs(search: &[&str], infix: &str) -> Option<PerFamily<Pair>> {
    let pair = |prefix: &str| {
        let tool = |suffix: &str| program(search, &format!("{prefix}tables{infix}-{suffix}"));
        Some(Pair { save: tool("save")?, restore: tool("restore")? })
    };
    Some(PerFamily { v4: pair("ip")?, v6: pair("ip6")? })
}

fn program(search: &[&str], name: &str) -> Option<PathBuf> {
    search.iter().map(|folder| Path::new(folder).join(name)).find(|path| path.is_file())
}

/// `iptables v1.8.9 (nf_tables)`; before 1.8 there was only one variant, and nothing in parentheses.
fn variant_of(tool: &Path) -> Option<Variant> {
    let job = Job { tool, args: &["--version"], input: None, lock: None, limit: Duration::from_secs(5) };
    let mut version = String::new();
    let ended = job.run(&mut |line| version.push_str(line), |_| {}).ok()?;
    ended.status.success().then(|| match version.contains("nf_tables") {
        true => Variant::Nft,
        false => Variant::Legacy,
    })
}

/// Tables that cannot be read count as empty, and then the host would be taken for one of the other variant: rules would go
/// where none of its components looks.
fn must_not_be_legacy(evidence: &[(Variant, Evidence)]) -> Result<(), Unsupported> {
    let is_known = evidence.iter().any(|(_, found)| found.hint || found.kubelet || found.proxy);
    let names = |family| present_tables(Variant::Legacy, family).unwrap_or_default();
    if is_known || Family::BOTH.into_iter().all(|family| names(family).is_empty()) {
        return Ok(());
    }
    Err(Unsupported(
        "there are tables of the legacy variant of iptables on this host, and without CAP_NET_RAW it cannot be told \
         whether it is the one in use: add that capability"
            .to_owned(),
    ))
}

/// What the tables of one variant hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Evidence {
    /// The kubelet's chain that is there for this purpose.
    pub(super) hint: bool,
    /// A canary of the kubelet.
    pub(super) kubelet: bool,
    /// A canary of a Kubernetes proxy.
    pub(super) proxy: bool,
    /// Rules of anybody, nat aside.
    pub(super) rules: u32,
}

impl Evidence {
    /// Reads the small tables only. What cannot be read counts as empty.
    fn gather(xtables: &mut Xtables) -> Evidence {
        let mut evidence = Evidence::default();
        for family in Family::BOTH {
            for table in [Table::Mangle, Table::Filter] {
                let _ = xtables.save(family, table, &mut |line| evidence.take(line));
            }
        }
        evidence
    }

    pub(super) fn take(&mut self, line: &str) {
        if line.starts_with("-A") {
            self.rules += 1;
        }
        let chain = line.strip_prefix(':').and_then(|rest| rest.split(' ').next());
        match chain {
            Some(xt::IPTABLES_HINT) => self.hint = true,
            Some(xt::KUBELET_CANARY) => self.kubelet = true,
            Some(xt::PROXY_CANARY) => self.proxy = true,
            _ => {}
        }
    }
}

/// The tables that exist; `None` if that cannot be told.
pub(super) fn present_tables(variant: Variant, family: Family) -> Option<String> {
    let file = match (variant, family) {
        (Variant::Nft, _) => return None,
        (Variant::Legacy, Family::V4) => "ip_tables_names",
        (Variant::Legacy, Family::V6) => "ip6_tables_names",
    };
    // A kernel without the legacy variant has no such file.
    Some(fs::read_to_string(Path::new("/proc/thread-self/net").join(file)).unwrap_or_default())
}

/// Which variant the evidence speaks for; with none, the one that the plain name stands for, then nft.
pub(super) fn choose(evidence: &[(Variant, Evidence)], plain: Option<Variant>) -> Option<Variant> {
    let with = |test: fn(&Evidence) -> bool| {
        let mut matching = evidence.iter().filter(|(_, evidence)| test(evidence));
        matching.next().map(|(variant, _)| *variant).filter(|_| matching.next().is_none())
    };
    let fullest = || {
        let fullest = evidence.iter().max_by_key(|(_, evidence)| evidence.rules)?;
        let is_alone = evidence.iter().all(|other| other.0 == fullest.0 || other.1.rules < fullest.1.rules);
        is_alone.then_some(fullest.0)
    };
    let is_there = |variant: &Variant| evidence.iter().any(|(there, _)| there == variant);
    with(|evidence| evidence.hint)
        .or_else(|| with(|evidence| evidence.kubelet))
        .or_else(|| with(|evidence| evidence.proxy))
        .or_else(fullest)
        .or_else(|| plain.filter(is_there))
        .or_else(|| evidence.first().map(|(variant, _)| *variant))
}

/// Rules in the tables of both variants: the kernel obeys both, and nobody sees the whole.
pub(super) fn doubts(chosen: Variant, evidence: &[(Variant, Evidence)]) -> Vec<String> {
    let other = chosen.other();
    let Some((_, found)) = evidence.iter().find(|(variant, _)| *variant == other) else { return Vec::new() };
    let mut warnings = Vec::new();
    if found.hint || found.kubelet {
        warnings.push(format!(
            "the kubelet has chains in the {other} tables of iptables too, and the {chosen} tables are used: make \
             all components use the same iptables"
        ));
    }
    if found.proxy {
        warnings.push(format!(
            "a Kubernetes proxy has left rules in the {other} tables of iptables, and the kernel obeys them beside \
             the {chosen} tables, which are used now: remove them"
        ));
    }
    warnings
}
