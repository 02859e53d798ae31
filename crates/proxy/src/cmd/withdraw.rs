// SPDX-License-Identifier: Apache-2.0

//! `portolan withdraw`: the last step of a hand-back to kube-proxy.

use std::process::ExitCode;

use dataplane::leftovers::{self, When};

use super::{print, say, usage_error};
use crate::{claim::Claim, host};

/// Removes Portolan's own tables, and leaves alone what kube-proxy has written beside them. Without `--now` only where
/// kube-proxy has written something.
pub fn run(args: &[String]) -> ExitCode {
    let when = match args {
        [] => When::Relieved,
        [flag] if flag == "--now" => When::Now,
        _ => return usage_error(&format!("withdraw takes nothing but --now, got {args:?}")),
    };
    if let Err(reason) = host::privileged() {
        return say(reason);
    }
    let _claim = match Claim::stake() {
        Ok(claim) => claim,
        Err(holder) => {
            return say(&format!("portolan runs on this node ({holder}); stop it first"));
        }
    };
    let report = leftovers::withdraw(when);
    if report.removed.is_empty() && report.kept.is_empty() && report.failed.is_empty() {
        return print("there was nothing to remove\n");
    }
    let removed = report.removed.iter().map(|thing| format!("removed {thing}\n"));
    let kept = report.kept.iter().map(|reason| format!("{reason}\n"));
    let printed = print(&removed.chain(kept).collect::<String>());
    match report.failed.as_slice() {
        [] => printed,
        failed => say(&format!("not everything could be removed: {}", failed.join("; "))),
    }
}

/// What it does.
pub fn help() -> String {
    "Usage: portolan withdraw [--now]    (with CAP_NET_ADMIN)\n\n\
     The last step back to kube-proxy: removes our own tables, and nothing that kube-proxy has written beside them.\n\
     A family in which kube-proxy does not serve yet keeps its table, and it ends with 1; with --now it goes in any case.\n"
        .to_owned()
}
