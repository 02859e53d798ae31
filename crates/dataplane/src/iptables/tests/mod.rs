// SPDX-License-Identifier: Apache-2.0

//! - `make`: clusters by hand and at random
//! - `memory`: tables without a kernel, which fail on schedule
//! - `pure`: rules there and back, the whole text, the simulator against the oracle
//! - `changes`: step by step, with failures, comes to the same as at once
//! - `kernel`: both variants of the tools, in namespaces of their own

mod changes;
mod kernel;
pub(crate) mod make;
pub(crate) mod memory;
mod pure;
