// SPDX-License-Identifier: Apache-2.0

//! What the cluster says, and what this node ought to do about it.
//!
//! This crate is pure: no IO, no clock, no log, no Kubernetes type. It cannot fail, because lowering has
//! already parsed everything. All policy lives here and nowhere else.
//!
//! # Layout
//!
//! - [`family`]: address families and protocols
//! - [`service`], [`endpoint`], [`node`]: what is so, one object at a time
//! - [`world`]: all of it, merged and indexed; remembers what became dirty
//! - `select`: which endpoints a service port may use
//! - `expand`: a service's frontends and the verdict of each
//! - [`plan`]: what this node ought to do, kept incrementally
//! - `flows`: which tracked flows a change makes stale
//! - [`oracle`]: what must happen to a given packet
//! - `dump`: the plan as text

#![forbid(unsafe_code)]

pub mod endpoint;
pub mod family;
pub mod node;
pub mod oracle;
pub mod plan;
pub mod service;
pub mod world;

pub use endpoint::{Conditions, Endpoint, EndpointSlice, Hints, SliceKey, SlicePort};
pub use family::{Family, PerFamily, Protocol};
pub use node::{DetectLocal, Node, NodePortAddress, Settings};
pub use oracle::{Origin, Outcome, Packet};
pub use plan::{
    Address, Affinity, Backend, Changes, Decision, FlowRule, Forward, Frontend, HealthCheck, Masquerade,
    NodePortScope, Plan, PodTraffic, Pool, Role, Verdict,
};
pub use service::{
    Service, ServiceKey, ServiceKind, ServicePort, ServicePortName, SourceRanges, TrafficPolicy,
};
pub use world::{Dirty, Kind, Update, World};
