// SPDX-License-Identifier: Apache-2.0

//! A manifest as the file source reads it.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| source::fuzzing::fuzz_manifest(bytes));
