// SPDX-License-Identifier: Apache-2.0

//! What is so: all objects a source has told of, merged and indexed by service.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;

use crate::{
    endpoint::{EndpointSlice, SliceKey},
    node::Node,
    service::{Service, ServiceKey},
};

/// The kinds of object a source lists and watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    Service,
    EndpointSlice,
    Node,
    ServiceCidr,
}

impl Kind {
    pub const ALL: [Kind; 4] = [Kind::Service, Kind::EndpointSlice, Kind::Node, Kind::ServiceCidr];
}

/// One message from a source.
///
/// A list arrives as `Begin(kind)`, one update for each object, `End(kind)`: what was known before and did not
/// occur in between is gone at the `End`. A list that is cut short is followed by another `Begin`, and nothing
/// is removed for the first. Outside of a list, updates come from a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Update {
    Begin(Kind),
    End(Kind),
    Service(Service),
    ServiceGone(ServiceKey),
    Slice(EndpointSlice),
    SliceGone(SliceKey),
    /// Only ever the node we run on.
    Node(Node),
    NodeGone,
    ServiceCidr {
        name: Arc<str>,
        cidrs: Box<[IpNet]>,
    },
    ServiceCidrGone(Arc<str>),
    /// All addresses on this host's interfaces, loopback included; sorted, without duplicates.
    HostAddresses(Box<[IpAddr]>),
}

/// What changed in a [`World`] since the last [`crate::Plan::update`].
#[derive(Clone, Debug, Default)]
pub struct Dirty {}

/// See the module.
#[derive(Debug)]
pub struct World {}
