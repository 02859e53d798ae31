// SPDX-License-Identifier: Apache-2.0

//! - `memory`: a kernel in memory, which counts what it is asked
//! - `changes`: step by step, with failures, comes to the same as at once; and a step costs what it changes
//! - `listing`: what operators see

mod changes;
mod listing;
mod memory;
