// SPDX-License-Identifier: Apache-2.0

//! The program: what kube-proxy's command line makes of [`source`], [`model`] and [`dataplane`].
//!
//! # Layout
//!
//! - [`cmd`]: the commands, from the command line to an exit code
//! - [`flags`], [`config`], [`syntax`]: what the operator said
//! - [`app`]: all wiring; [`feed`] is the source in it
//! - [`claim`]: the right to write, one for each network namespace
//! - [`reconcile`]: the loop; [`pace`] says when it writes, [`tally`] counts what it wrote, [`wishes`] tells what it
//!   could not
//! - [`flows`], [`drift`], [`takeover`]: what works beside it: stale flows, what others change, what others left
//! - [`live`]: what of the configuration is in force; [`reload`] follows its files
//! - [`host`]: this machine's name, families and addresses
//! - [`node`]: its kernel settings, and what on it gets in the way
//! - [`status`], [`metrics`]: what the loop tells; [`health`], [`checks`], [`endpoints`], [`http`]: who asks
//! - [`connections`]: what the kernel counted; [`events`]: what the cluster is told
//! - [`systemd`]: what the service manager is told
//! - [`log`], [`clock`], [`table`]: lines, times, columns

#![forbid(unsafe_code)]

pub mod app;
pub mod checks;
pub mod claim;
pub mod clock;
pub mod cmd;
pub mod config;
pub mod connections;
pub mod drift;
pub mod endpoints;
pub mod events;
pub mod fallback;
pub mod farewell;
pub mod feed;
pub mod flags;
pub mod flows;
pub mod health;
pub mod host;
pub mod http;
pub mod live;
pub mod log;
pub mod metrics;
pub mod node;
pub mod pace;
pub mod reconcile;
pub mod reload;
pub mod status;
pub mod syntax;
pub mod systemd;
pub mod table;
pub mod takeover;
pub mod tally;
pub mod wishes;
