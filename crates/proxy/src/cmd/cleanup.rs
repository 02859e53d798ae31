// SPDX-License-Identifier: Apache-2.0

//! `--cleanup`: removes exactly what is ours.

use model::PerFamily;

use crate::{app, claim::Claim, config::check::Checked};

/// Both families, whatever this host serves now: what an earlier run left is ours too.
pub fn run(checked: &Checked) -> Result<(), String> {
    let _claim = Claim::stake().map_err(|holder| {
        format!("portolan runs on this node ({holder}) and would put everything back; stop it first")
    })?;
    let families = PerFamily { v4: true, v6: true };
    let mut dataplane = app::open(checked, families)?;
    dataplane.cleanup().map_err(|error| format!("not everything could be removed: {error}"))?;
    tracing::info!("removed everything that is ours");
    Ok(())
}
