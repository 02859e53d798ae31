// SPDX-License-Identifier: Apache-2.0

//! What tests of the tools and of the mode share.

use std::env;

use model::Family;
use netlink::Netns;

use super::{Failure, Table, Tables, Variant};

/// Runs `work` in a namespace of its own for each variant; or not at all, without the privileges for one.
pub(crate) fn with_each(work: impl Fn(Variant) + Sync) {
    for variant in Variant::BOTH {
        match Netns::new() {
            Ok(netns) => netns.run(|| work(variant)).unwrap(),
            Err(error) => {
                assert!(env::var_os("CI").is_none(), "no namespace: {error}");
                eprintln!("skipped: no namespace: {error}");
            }
        }
    }
}

/// Tables of a kernel that refuses every rule with this in it.
pub(crate) struct Without(pub(crate) &'static str);

impl Tables for Without {
    fn save(&mut self, _: Family, _: Table, _: &mut dyn FnMut(&str)) -> Result<(), Failure> {
        Ok(())
    }

    fn restore(&mut self, _: Family, input: &str) -> Result<(), Failure> {
        let refused = || Failure::Refused {
            tool: "iptables-restore".to_owned(),
            reason: "line 9 failed".to_owned(),
            line: Some("COMMIT".to_owned()),
            advice: None,
        };
        if input.contains(self.0) { Err(refused()) } else { Ok(()) }
    }
}
