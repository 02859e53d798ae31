// SPDX-License-Identifier: Apache-2.0

//! Carries connections from virtual addresses to endpoints, in a process.
//!
//! It knows sockets, endpoints and choices, but no Service of Kubernetes, no packet filter and no netlink: whoever
//! uses it brings the traffic to its listeners, and answers in a [`Directory`] which [`Service`] an arrival is for.
//!
//! # Layout
//!
//! - [`relay`]: the handle: starts workers, adds listeners, drains
//! - `worker`: one thread, one epoll, its own listeners
//! - `tcp`, `dial`, `stream`, `pipe`: a connection, how it finds an endpoint, one direction of it, what bytes pass through
//! - `udp`: client flows
//! - [`service`], [`endpoint`], `balance`, `lru`: the choice of an endpoint, affinity, who is set aside
//! - [`check`]: active checks of endpoints
//! - `proxy_protocol`: who the client is, told to the endpoint
//! - [`settings`], [`counters`], `socket`, `clock`
//!
//! The bytes of a TCP connection do not enter this process: they go from socket to pipe to socket by `splice`. Only where a
//! few come at a time (up to 8 KiB) they are read and sent, which costs less than two splices. A pipe is borrowed only while
//! bytes are on their way, so that an idle connection costs two descriptors and some 200 bytes.

#![forbid(unsafe_code)]

mod balance;
pub mod check;
mod clock;
pub mod counters;
mod dial;
pub mod endpoint;
mod lru;
mod pipe;
mod proxy_protocol;
pub mod relay;
pub mod service;
pub mod settings;
mod socket;
mod stream;
mod tcp;
#[cfg(test)]
mod tests;
mod udp;
mod worker;

pub use counters::{Counters, Refusal};
pub use endpoint::Endpoint;
pub use relay::{Arrival, Bound, Directory, Listen, Relay, Transport};
pub use service::{Member, Service};
pub use settings::{Algorithm, Check, CheckKind, ServiceSettings, Settings};
