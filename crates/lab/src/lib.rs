// SPDX-License-Identifier: Apache-2.0

//! A small cluster of network namespaces, for the demo and for tests.

#![forbid(unsafe_code)]

pub mod address;
mod sctp;
