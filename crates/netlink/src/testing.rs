// SPDX-License-Identifier: Apache-2.0

//! What the tests of this crate share.

use crate::netns::Netns;

/// A namespace for one test; `None`, with a printed line, where that is not allowed. Under `CI` it must be allowed.
pub(crate) fn scratch_netns(test: &str) -> Option<Netns> {
    match Netns::new() {
        Ok(netns) => Some(netns),
        Err(error) if error.is_permission() && std::env::var_os("CI").is_none() => {
            println!("skipped {test}: a network namespace needs privileges ({error})");
            None
        }
        Err(error) => panic!("{test}: no network namespace: {error}"),
    }
}
