// SPDX-License-Identifier: Apache-2.0

//! What tests share: the scenario format, its judges, and a fake API server.

#![forbid(unsafe_code)]

pub mod apiserver;
pub mod image;
pub mod scenario;
pub mod txtar;
