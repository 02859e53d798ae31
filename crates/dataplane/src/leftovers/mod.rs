// SPDX-License-Identifier: Apache-2.0

//! What other modes and other programs of our trade left on this node, and how it goes.
//!
//! kube-proxy stops without removing anything, as we do, so that traffic goes on. Whoever takes over removes what it
//! left once his own rules serve: stale rules would go on translating to endpoints that are gone.
//!
//! Ours and kube-proxy's, of every mode, and nothing else. What is the kubelet's stays (its hint, its canaries, and
//! `KUBE-FIREWALL`, which it shares with kube-proxy), and so does a chain that somebody else's rules use.
//!
//! # Layout
//!
//! - `nft`: tables of nftables modes, and chains that the nft variant of iptables wrote; by netlink
//! - `legacy`: chains in tables of the legacy variant; by its tools
//! - `ipvs`: virtual servers, their link and their sets; by netlink
//! - `keep`: what goes on to be translated, where nobody takes the place of what goes
//! - `fate`: which chains go and which stay; pure
//! - `present`: whether there is anything at all, by mode

mod fate;
mod ipvs;
mod keep;
mod legacy;
mod nft;
mod present;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use model::{Family, PerFamily};
use netlink::{
    Transport,
    nft::{Nft, TableRef},
};

use self::ipvs::Busy;
pub(crate) use self::{ipvs::is_loaded as has_ipvs, legacy::remove_from};
pub use self::{keep::Keep, present::present};
use crate::{
    Mode, loopback,
    names::{
        self,
        userspace::{KEEP, TABLE as USERSPACE},
    },
    nftables::wire,
    xtables::{Variant, leftovers as chains},
};

/// What became of it. Each part is sentences, or names of things, for the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// What was there and is gone.
    pub removed: Vec<String>,
    /// What may or must stay, and why.
    pub kept: Vec<String>,
    /// Some of it goes later, by itself.
    pub waits: bool,
    /// What should have gone and could not.
    pub failed: Vec<String>,
    /// What could not be spared, and why.
    pub harmed: Vec<String>,
}

impl Report {
    fn chains(&mut self, place: &str, count: usize) {
        if count > 0 {
            self.removed.push(format!("{count} chains of {place}"));
        }
    }

    /// Tells it if rules are gone that kept strangers from loopback addresses, and they are open now.
    fn tell_unguarded(&mut self) {
        let ours = [names::TABLE, USERSPACE].map(|name| format!("table {} {name}", wire(Family::V4)));
        if ours.iter().any(|table| self.removed.contains(table)) {
            self.kept.extend(loopback::unguarded());
        }
    }

    fn keep(&mut self, place: &str, kept: &BTreeMap<String, String>) {
        for (chain, user) in kept {
            self.kept.push(format!("chain {chain} of {place} stays, as {user} uses it"));
        }
    }
}

/// When to [`withdraw`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Family by family, where kube-proxy serves.
    Relieved,
    /// Whoever serves.
    Now,
}

/// Removes our own tables and nothing else: the last step when another proxy has taken over. (In iptables and ipvs mode
/// what we have is kube-proxy's, which takes it over where it is; only what ipvs mode has beyond that is removed.)
///
/// The kernel translates packets, those of open connections too, only as long as a family has any chain for it. So our
/// table stays until kube-proxy has written its own.
pub fn withdraw(when: When) -> Report {
    let mut report = Report::default();
    let mut nft = match Nft::open() {
        Ok(nft) => nft,
        Err(error) => {
            report.failed.push(format!("tables of nftables: {error}"));
            return report;
        }
    };
    let is_doomed = |name: &str| names::xt::IPVS_OWN.contains(&name);
    nft::remove_chains(&mut nft, &is_doomed, &mut report);
    legacy::remove_chains(&is_doomed, &mut report);
    ipvs::withdraw(&mut report);
    let mut is_relieved = true;
    let own = [names::TABLE, USERSPACE, KEEP];
    for (family, name) in Family::BOTH.into_iter().flat_map(|family| own.map(|name| (family, name))) {
        let ours = TableRef { family: wire(family), name };
        match nft.chains(ours) {
            Ok(chains) if chains.is_empty() => {}
            Ok(_) if when == When::Now || nft::serves(&mut nft, family) || legacy::serves(family) => {
                if name != USERSPACE {
                    nft::remove_table(&mut nft, family, name, &mut report);
                }
            }
            Ok(_) => {
                is_relieved = false;
                report.failed.push(format!(
                    "table {} {name} stays, as kube-proxy has not written its rules for this family: wait until it has",
                    ours.family
                ));
            }
            Err(error) => report.failed.push(format!("table {} {name}: {error}", ours.family)),
        }
    }
    if is_relieved {
        crate::userspace::leave(&mut nft, &mut report);
    }
    report.tell_unguarded();
    report
}

/// Removes what the ipvs mode has, and what only it has of chains.
pub(crate) fn remove_ipvs(tables: &mut dyn crate::xtables::Tables) -> Report {
    let mut report = Report::default();
    for (family, table) in Family::BOTH.into_iter().flat_map(|f| crate::xtables::Table::ALL.map(|t| (f, t))) {
        let is_doomed = |name: &str| crate::ipvs::frame::is_own(name);
        if let Err(failure) = remove_from(tables, family, table, &is_doomed, &mut report) {
            report.failed.push(format!("chains in {table} of {family}: {failure}"));
        }
    }
    ipvs::remove(Busy::Goes, &mut report);
    report
}

/// What [`Keep`] wrote, as text.
pub(crate) fn kept() -> String {
    let Ok(mut nft) = Nft::open() else { return String::new() };
    let families = Family::BOTH.into_iter().filter(|family| keep::is_there(&mut nft, *family));
    families.map(|family| format!("table {} {KEEP}\n", wire(family))).collect()
}

/// Removes what [`Keep`] wrote, whatever is open.
pub(crate) fn remove_kept() -> Report {
    let mut report = Report::default();
    if let Ok(mut nft) = Nft::open() {
        keep::remove(&mut nft, &mut report);
    }
    report
}

fn remove_own<T: Transport>(nft: &mut Nft<T>, report: &mut Report) {
    for family in Family::BOTH {
        nft::remove_table(nft, family, names::TABLE, report);
    }
}

/// Removes all that is not part of the mode `own`; with `None` all of every mode. `keep` is what the mode's
/// [`Dataplane::keep`](crate::Dataplane::keep) gave. In the network namespace of this thread. Goes on after errors.
pub fn remove(own: Option<Mode>, keep: Option<&mut Keep>) -> Report {
    remove_over(Nft::open(), own, keep)
}

fn remove_over<T: Transport>(
    mut nft: Result<Nft<T>, netlink::Error>,
    own: Option<Mode>,
    keep: Option<&mut Keep>,
) -> Report {
    let mut report = Report::default();
    // Without a dataplane nothing takes the place of what would go.
    if own == Some(Mode::None) {
        return report;
    }
    let is_doomed = |name: &str| match own {
        // Those of the mode are its own, whoever wrote them: it takes them over in place.
        Some(Mode::Iptables) => chains::is_old(name) || chains::is_ipvs(name),
        Some(Mode::Ipvs) => {
            chains::is_old(name) || (chains::is_current(name) && !crate::ipvs::frame::is_own(name))
        }
        Some(Mode::Nftables | Mode::Userspace | Mode::None) | None => {
            chains::is_current(name) || chains::is_old(name) || chains::is_ipvs(name)
        }
    };
    // A mode that listens there itself writes no rules.
    let has_successor = own.is_some() && keep.is_none();
    let written = match keep {
        Some(_) => keep::write(nft.as_mut(), &is_doomed, &mut report),
        None => PerFamily::default(),
    };
    match &mut nft {
        Ok(nft) => {
            nft::remove_chains(nft, &is_doomed, &mut report);
            nft::remove_kube_proxy(nft, &mut report);
            if own != Some(Mode::Nftables) {
                remove_own(nft, &mut report);
            }
            match keep {
                Some(_) => crate::userspace::leave_steering(nft, &mut report),
                None => keep::remove(nft, &mut report),
            }
            if own != Some(Mode::Userspace) {
                crate::userspace::leave(nft, &mut report);
            }
        }
        Err(error) => report.failed.push(format!("tables of nftables: {error}")),
    }
    legacy::remove_chains(&is_doomed, &mut report);
    if own == Some(Mode::Userspace) && report.failed.is_empty() {
        let widened = Family::BOTH.map(crate::userspace::widen);
        report.failed.extend(widened.into_iter().filter_map(|it| it.err().map(|error| error.to_string())));
    }
    if own != Some(Mode::Ipvs) {
        ipvs::remove(if own.is_some() { Busy::Stays } else { Busy::Goes }, &mut report);
    }
    if let (Some(keep), Ok(nft)) = (keep, &mut nft) {
        keep.settle(nft, written, &mut report);
    }
    if !has_successor {
        report.tell_unguarded();
    }
    report
}

/// Removes the chains of the iptables mode that are in the tables of the other variant: the kernel obeys both, and what
/// is there follows no change any more. To be done once those of the variant `own` serve.
pub fn unite(own: Variant) -> Report {
    let mut report = Report::default();
    match own.other() {
        Variant::Legacy => legacy::remove_chains(&chains::is_current, &mut report),
        Variant::Nft => match Nft::open() {
            Ok(mut nft) => nft::remove_chains(&mut nft, &chains::is_current, &mut report),
            Err(error) => report.failed.push(format!("tables of nftables: {error}")),
        },
    }
    report
}
