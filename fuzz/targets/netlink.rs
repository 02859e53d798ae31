// SPDX-License-Identifier: Apache-2.0

//! Bytes from the kernel: no decoder may panic or read past the end.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| netlink::fuzzing::fuzz_decode(bytes));
