// SPDX-License-Identifier: Apache-2.0

//! Loopback addresses: node ports on them, where the operator asks for them, and who may reach them.
//!
//! A connection to a node port on 127.0.0.1 leaves the node with a loopback source, which the kernel allows only when told
//! so, and for IPv4 only: nothing makes it route ::1. Told so, it also lets neighbours in the network reach what listens on
//! 127.0.0.1 alone (CVE-2020-8558). So as long as it is told, by whomever, what comes from elsewhere for 127.0.0.0/8 is
//! dropped; and we tell it only once the rule that does so is in force.

use std::{fs, io, path::PathBuf};

use model::{Family, PerFamily, Plan};

use crate::{Error, names};

/// What the rules do about the loopback addresses of a family: a fact of the host, looked at when everything is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Loopback {
    /// Nothing: the kernel lets nobody from elsewhere reach them.
    #[default]
    Closed,
    /// It would, so what comes from elsewhere for them is dropped.
    Guarded,
    /// The same, and node ports are served on them.
    Served,
}

impl Loopback {
    pub(crate) fn is_guarded(self) -> bool {
        self != Loopback::Closed
    }

    pub(crate) fn is_served(self) -> bool {
        self == Loopback::Served
    }
}

/// The kernel's setting.
#[derive(Debug, Default)]
pub(crate) struct Localnet {
    /// `None` without a kernel, in tests: then it is not set.
    path: Option<PathBuf>,
    /// Why it could not be set when it came to it.
    refused: Option<String>,
}

impl Localnet {
    /// Of the network namespace of this thread.
    pub(crate) fn of_kernel() -> Localnet {
        Localnet::at(names::ROUTE_LOCALNET)
    }

    fn at(path: impl Into<PathBuf>) -> Localnet {
        Localnet { path: Some(path.into()), refused: None }
    }

    /// To the kernel everything but 0 is yes.
    pub(crate) fn is_set(&self) -> bool {
        let text = self.path.as_ref().and_then(|path| fs::read_to_string(path).ok());
        text.and_then(|text| text.trim().parse::<i64>().ok()).is_some_and(|value| value != 0)
    }

    /// For a mode by which the kernel does not serve node ports on loopback addresses.
    pub(crate) fn guard(&self, family: Family) -> Loopback {
        match family == Family::V4 && self.is_set() {
            true => Loopback::Guarded,
            false => Loopback::Closed,
        }
    }

    /// For a mode by which it does, where it can; what it cannot is told in `warnings`. Changes nothing.
    pub(crate) fn look(
        &self,
        plan: &Plan,
        families: PerFamily<bool>,
        warnings: &mut Vec<String>,
    ) -> PerFamily<Loopback> {
        let asked = |family| families[family] && plan.loopback_node_ports(family);
        let mut found = PerFamily::from_fn(|family| self.guard(family));
        if asked(Family::V4) {
            match self.can_be_set() {
                Ok(()) => found.v4 = Loopback::Served,
                Err(reason) => warnings.push(format!(
                    "the kernel does not serve node ports on 127.0.0.1: {} cannot be set to 1: {reason}; set it on the \
                     host, or run portolan --init-only once with full privileges",
                    names::ROUTE_LOCALNET
                )),
            }
        }
        if asked(Family::V6) {
            warnings.push("node ports are not served on ::1: the kernel cannot translate it".into());
        }
        found
    }

    /// Read first: in a container the file is often read-only, and the setting right.
    fn can_be_set(&self) -> Result<(), String> {
        if self.is_set() {
            return Ok(());
        }
        let open = |path: &PathBuf| fs::File::options().write(true).open(path).map(drop);
        match (&self.refused, &self.path) {
            (Some(reason), _) => Err(reason.clone()),
            (None, Some(path)) => open(path).map_err(|error| error.to_string()),
            (None, None) => Err("there is no kernel".to_owned()),
        }
    }

    /// Sets it for what was written; to be called once that is in force, the guard with it. If it fails after all, the next
    /// attempt goes without.
    pub(crate) fn serve(&mut self, written: PerFamily<Loopback>) -> Result<(), Error> {
        if !written.v4.is_served() || self.is_set() {
            return Ok(());
        }
        let outcome: io::Result<()> = self.path.as_ref().map_or(Ok(()), |path| fs::write(path, "1"));
        outcome.map_err(|error| {
            self.refused = Some(error.to_string());
            Error::Setting(format!("{} cannot be set to 1: {error}", names::ROUTE_LOCALNET))
        })
    }
}

/// What to say when rules go that guarded loopback addresses.
pub(crate) fn unguarded() -> Option<String> {
    Localnet::of_kernel().is_set().then(|| {
        "net.ipv4.conf.all.route_localnet is set, and our rule that kept neighbours in the network from what listens on \
         127.0.0.1 is gone: run sysctl -w net.ipv4.conf.all.route_localnet=0, unless something else on this node needs it"
            .to_owned()
    })
}

/// A new namespace begins with what the host has, which tests are not to depend on.
#[cfg(test)]
pub(crate) fn close() {
    fs::write(names::ROUTE_LOCALNET, "0").expect("who may make a namespace may set what is in it");
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: PerFamily<bool> = PerFamily { v4: true, v6: true };

    fn asked() -> Plan {
        model::PlanBuilder::new().loopback_node_ports(Family::V4).build()
    }

    /// Nobody may write this one.
    fn stubborn() -> Localnet {
        Localnet::at("/proc/sys/kernel/osrelease")
    }

    #[test]
    fn what_cannot_be_set_is_not_served_and_told_once() {
        let (mut warnings, localnet) = (Vec::new(), stubborn());
        assert_eq!(localnet.look(&asked(), BOTH, &mut warnings).v4, Loopback::Closed);
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].contains("--init-only"), "{warnings:?}");
    }

    /// It looked as if it could be set: the next attempt knows better.
    #[test]
    fn a_refusal_is_remembered() {
        let written = PerFamily { v4: Loopback::Served, v6: Loopback::Closed };
        let mut localnet = stubborn();
        assert!(localnet.serve(written).is_err());
        localnet.path = Some("/proc/self/comm".into());
        assert_eq!(localnet.look(&asked(), BOTH, &mut Vec::new()).v4, Loopback::Closed);
        assert!(localnet.serve(PerFamily::default()).is_ok(), "nothing is served, nothing is needed");
    }
}
