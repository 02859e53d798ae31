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
//! - [`tuning`], [`weights`]: what a service asks of balancing beyond its spec
//! - `slice`, `shelf`: an EndpointSlice as the world keeps it, and where it keeps it
//! - `places`: the nodes and zones that endpoints run in
//! - [`world`]: all of it, merged and indexed; remembers what became dirty
//! - `vantage`: what of this node decisions depend on, and what holds for all services
//! - `select`: which endpoints a service port may use
//! - `expand`: a service's frontends and the verdict of each
//! - [`decision`]: the plan's nouns
//! - `claims`: who owns a frontend that several claim
//! - `counted`: a set with several owners for each member
//! - [`plan`]: what this node ought to do, kept incrementally
//! - `flows`: which tracked flows a change makes stale
//! - [`oracle`]: what must happen to a given packet
//! - `dump`: the plan as text
//! - `builder`: a plan made by hand

#![forbid(unsafe_code)]

mod builder;
mod claims;
mod counted;
pub mod decision;
mod dump;
pub mod endpoint;
mod expand;
pub mod family;
mod flows;
pub mod node;
pub mod oracle;
mod places;
pub mod plan;
mod select;
pub mod service;
mod shelf;
mod slice;
pub mod tuning;
mod vantage;
pub mod weights;
pub mod world;

pub use builder::PlanBuilder;
pub use decision::{
    Address, Affinity, Backend, Decision, FlowRule, Forward, Frontend, HealthCheck, Masquerade,
    NodePortScope, PodTraffic, Pool, Reach, Role, Verdict,
};
pub use endpoint::{Conditions, Endpoint, EndpointSlice, Hints, SliceKey, SlicePort};
pub use family::{Family, PerFamily, Protocol};
pub use node::{DetectLocal, Node, NodePortAddress, Settings};
pub use oracle::{Origin, Outcome, Packet};
pub use plan::{Changes, Conflict, Plan};
pub use service::{
    Service, ServiceKey, ServiceKind, ServicePort, ServicePortName, SourceRanges, TrafficPolicy,
    WrittenRanges,
};
pub use tuning::{Algorithm, Check, RelayWishes, Scheduler, SchedulerFlags, Tuning};
pub use weights::{DEFAULT_WEIGHT, WeightRule, Weights, Whose};
pub use world::{Dirty, Kind, Update, World};
