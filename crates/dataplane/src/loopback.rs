// SPDX-License-Identifier: Apache-2.0

//! Node ports on loopback addresses, where the operator asks for them.
//!
//! A connection to 127.0.0.1 leaves the node with a loopback source, which the kernel allows only when told so,
//! and for IPv4 only: nothing makes it route ::1.

use std::{fs, io};

use model::{Family, PerFamily, Plan};

use crate::names;

/// In which families node ports can be served on loopback addresses. Changes the kernel's setting where needed;
/// what cannot be done is told in `warnings`.
pub(crate) fn prepare(plan: &Plan, families: PerFamily<bool>, warnings: &mut Vec<String>) -> PerFamily<bool> {
    let asked = |family| families[family] && plan.loopback_node_ports(family);
    let mut served = PerFamily { v4: false, v6: false };
    if asked(Family::V4) {
        match route_localnet() {
            Ok(()) => served.v4 = true,
            Err(error) => warnings.push(format!(
                "node ports are not served on IPv4 loopback addresses: writing {} failed: {error}",
                names::ROUTE_LOCALNET
            )),
        }
    }
    if asked(Family::V6) {
        warnings.push("node ports are not served on ::1: the kernel cannot translate it".into());
    }
    served
}

/// Makes sure that the kernel routes loopback addresses. Read first: in a container the file is often read-only,
/// and the setting right.
fn route_localnet() -> io::Result<()> {
    if fs::read_to_string(names::ROUTE_LOCALNET)?.trim() == "1" {
        return Ok(());
    }
    fs::write(names::ROUTE_LOCALNET, "1")
}
