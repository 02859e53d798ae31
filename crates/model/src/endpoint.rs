// SPDX-License-Identifier: Apache-2.0

//! An EndpointSlice, cut down to what selection reads. A large cluster has 100,000 endpoints, so
//! [`Endpoint`] is kept small: the address in binary, three bits, and shared strings.

use std::{fmt, net::IpAddr, sync::Arc};

use crate::{
    family::{Family, Protocol},
    service::ServiceKey,
};

/// Namespace and name of a slice.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SliceKey {
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

impl fmt::Display for SliceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    pub key: SliceKey,
    /// The service it belongs to, from the label `kubernetes.io/service-name`, in the slice's namespace.
    pub service: ServiceKey,
    pub family: Family,
    pub ports: Box<[SlicePort]>,
    pub endpoints: Box<[Endpoint]>,
    /// Of each endpoint that its service gives no other; see [`crate::Weights`].
    pub weight: u16,
    /// When the change that led to this version happened (annotation
    /// `endpoints.kubernetes.io/last-change-trigger-time`), nanoseconds since 1970. Not part of any decision.
    pub trigger_time_nanos: Option<i64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlicePort {
    pub name: Arc<str>,
    pub protocol: Protocol,
    pub port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub address: IpAddr,
    pub conditions: Conditions,
    /// The node it runs on.
    pub node: Option<Arc<str>>,
    /// The zone it runs in.
    pub zone: Option<Arc<str>>,
    pub hints: Option<Arc<Hints>>,
}

/// Conditions with the API's defaults filled in: ready and serving unless said otherwise, not terminating.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conditions {
    pub ready: bool,
    pub serving: bool,
    pub terminating: bool,
}

impl Default for Conditions {
    fn default() -> Conditions {
        Conditions { ready: true, serving: true, terminating: false }
    }
}

/// Topology hints. Sorted and without duplicates, so that equal hints compare equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Hints {
    pub zones: Box<[Arc<str>]>,
    pub nodes: Box<[Arc<str>]>,
}
