// SPDX-License-Identifier: Apache-2.0

//! `--cleanup`: removes what any mode of Portolan or kube-proxy left, and nothing else.

use dataplane::leftovers;

use crate::{claim::Claim, host};

/// Both families and all modes, whatever is configured: what an earlier run left is to go too.
pub fn run() -> Result<(), String> {
    host::privileged()?;
    let _claim = Claim::stake().map_err(|holder| {
        format!("portolan runs on this node ({holder}) and would put everything back; stop it first")
    })?;
    let report = leftovers::remove(None, None);
    for thing in &report.removed {
        tracing::info!("removed {thing}");
    }
    for reason in &report.kept {
        tracing::warn!("{reason}");
    }
    match report.failed.as_slice() {
        [] if report.removed.is_empty() => tracing::info!("there was nothing to remove"),
        [] => {}
        failed => return Err(format!("not everything could be removed: {}", failed.join("; "))),
    }
    Ok(())
}
