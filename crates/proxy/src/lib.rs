// SPDX-License-Identifier: Apache-2.0

#![forbid(unsafe_code)]

pub mod clock;
pub mod config;
pub mod flags;
pub mod health;
pub mod http;
pub mod log;
pub mod metrics;
pub mod pace;
pub mod status;
pub mod syntax;
