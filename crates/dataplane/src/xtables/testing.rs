// SPDX-License-Identifier: Apache-2.0

//! What tests of the tools and of the mode share.

use std::env;

use netlink::Netns;

use super::Variant;

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
