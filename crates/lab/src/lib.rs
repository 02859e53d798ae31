// SPDX-License-Identifier: Apache-2.0

//! A small cluster of network namespaces, for the demo and for tests: nodes, pods, clients, real packets.
//!
//! # Layout
//!
//! - [`address`]: who has which address, in both families
//! - `cluster`: [`Lab`], the namespaces and the cables between them
//! - `respond`: servers in pods that say who they are and whom they saw
//! - `flow`: [`Flow`], a client; asks once, or again and again on the same connection
//! - `reply`, `raw`, `sctp`: what the two exchange

#![forbid(unsafe_code)]

pub mod address;
mod cluster;
mod error;
mod flow;
mod raw;
mod reply;
mod respond;
mod sctp;
#[cfg(test)]
mod tests;

pub use cluster::{Lab, Layout};
pub use error::Error;
pub use flow::{Answer, Flow, Route};
pub use reply::Reply;
pub use respond::Transport;
