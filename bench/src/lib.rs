// SPDX-License-Identifier: Apache-2.0

//! Measures Portolan, and kube-proxy beside it, in network namespaces of their own.
//!
//! # Layout
//!
//! - [`run`]: all subjects at all sizes
//! - [`objects`]: the cluster that is measured, made from numbers
//! - [`store`]: where it is written: the API server, or a folder
//! - [`ground`], [`control`]: the network, and the real API server in it
//! - [`subject`]: the programs, started and stopped
//! - [`phases`], [`probe`], [`datapath`], [`responder`]: what is done to each, and how it is seen from outside
//! - [`meter`], [`scrape`], [`machine`]: what it costs
//! - [`floor`]: what the tool of the iptables mode costs by itself
//! - [`figures`], [`report`], [`budget`]: what is kept, shown and judged
//! - [`duel`]: builds of Portolan side by side
//! - [`relay`]: the relay of the userspace mode beside other proxies
//! - [`undo`]: what an interrupt must not leave behind

#![forbid(unsafe_code)]

pub mod budget;
pub mod control;
pub mod datapath;
pub mod duel;
pub mod figures;
pub mod floor;
pub mod ground;
pub mod machine;
pub mod meter;
pub mod objects;
pub mod phases;
pub mod probe;
pub mod relay;
pub mod report;
pub mod responder;
pub mod run;
pub mod scrape;
pub mod seed;
pub mod store;
pub mod subject;
pub mod undo;
