// SPDX-License-Identifier: Apache-2.0

//! - `make`: plans by hand and at random
//! - `pure`: slots, names, rules there and back, differences
//! - `judges`: the simulator against the oracle
//! - `kernel`: a real kernel, in namespaces of their own
//! - `neighbours`: what others do to their own tables
//! - `refusal`: what the kernel does not take
//! - `repair`: what others do to our tables
//! - `forget`: clients whose endpoint went
//! - `listing`: what `nft list` says about our tables

mod forget;
pub(crate) mod judges;
mod kernel;
mod listing;
pub(crate) mod make;
mod neighbours;
mod pure;
mod refusal;
mod repair;
mod wishes;
