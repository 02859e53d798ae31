// SPDX-License-Identifier: Apache-2.0

//! An API server's answer, JSON or protobuf, list or watch.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| source::fuzzing::fuzz_wire(bytes));
