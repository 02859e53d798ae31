// SPDX-License-Identifier: Apache-2.0

//! Doors for the fuzzers: arbitrary bytes through everything that reads what others wrote. None may panic.

use std::path::Path;

use crate::{file, kube};

/// A manifest file, once as YAML and once as JSON.
pub fn fuzz_manifest(bytes: &[u8]) {
    for name in ["fuzz.yaml", "fuzz.json"] {
        file::read_bytes(Path::new(name), bytes);
    }
}

/// What an API server sends.
pub fn fuzz_wire(bytes: &[u8]) {
    kube::fuzz_wire(bytes);
}
