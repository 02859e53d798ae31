// SPDX-License-Identifier: Apache-2.0

//! How much each endpoint of a service gets, by who it is and where it runs.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;

/// What an endpoint has that nobody gave a weight.
pub const DEFAULT_WEIGHT: u16 = 1;

/// The weights that a Service gives; the first rule that fits an endpoint counts. Where none does, the weight of
/// its EndpointSlice holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Weights(pub Box<[WeightRule]>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightRule {
    pub whose: Whose,
    /// 0: no new connections.
    pub weight: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whose {
    Everyone,
    /// Endpoints with an address in it.
    Net(IpNet),
    /// Endpoints on the node of that name.
    Node(Arc<str>),
    /// Endpoints in that zone, as their EndpointSlice states it.
    Zone(Arc<str>),
}

impl Weights {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The weight of an endpoint with this address, on this node and in this zone.
    pub(crate) fn of(&self, address: IpAddr, node: Option<&str>, zone: Option<&str>) -> Option<u16> {
        let fits = |rule: &&WeightRule| match &rule.whose {
            Whose::Everyone => true,
            Whose::Net(net) => net.contains(&address),
            Whose::Node(name) => node == Some(name),
            Whose::Zone(name) => zone == Some(name),
        };
        self.0.iter().find(fits).map(|rule| rule.weight)
    }
}
