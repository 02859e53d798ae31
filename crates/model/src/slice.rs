// SPDX-License-Identifier: Apache-2.0

//! A slice as [`crate::World`] keeps it: what selection on *this* node reads, and nothing else.
//!
//! At 100,000 endpoints the form decides the size of the process, so node and zone shrink to a number, and to "is
//! it ours" (our name never changes), and zone hints, which most clusters do not use, cost nothing where there are none.

use std::{net::IpAddr, sync::Arc};

use crate::{
    endpoint::{Endpoint, EndpointSlice, Hints, SlicePort},
    family::Family,
    places::Places,
    weights::Weights,
};

#[derive(Debug)]
pub(crate) struct Slice {
    pub(crate) name: Arc<str>,
    /// The list in which it was last seen.
    pub(crate) seen: u32,
    pub(crate) family: Family,
    /// Of its endpoints, unless their service gives them another.
    weight: u16,
    pub(crate) ports: Box<[SlicePort]>,
    records: Box<[Record]>,
    /// Zone hints, one for each record; empty if no record has any.
    zones: Box<[Option<Arc<Hints>>]>,
}

impl Slice {
    /// Addresses of another family than the slice's are left out: the API server never lets them pass, and a
    /// frontend could not forward to them.
    pub(crate) fn compact(slice: EndpointSlice, node_name: &str, places: &mut Places, seen: u32) -> Slice {
        let endpoints = || slice.endpoints.iter().filter(|e| Family::of(e.address) == slice.family);
        // A filter does not say how many it lets pass: usually all.
        let mut records = Vec::with_capacity(slice.endpoints.len());
        records.extend(endpoints().map(|endpoint| Record::of(endpoint, node_name, places)));
        let has_zones = |hints: &Arc<Hints>| !hints.zones.is_empty();
        let zones = match endpoints().any(|endpoint| endpoint.hints.as_ref().is_some_and(has_zones)) {
            true => endpoints().map(|endpoint| endpoint.hints.clone().filter(has_zones)).collect(),
            false => Box::default(),
        };
        Slice {
            name: slice.key.name,
            seen,
            family: slice.family,
            weight: slice.weight,
            ports: slice.ports,
            records: records.into(),
            zones,
        }
    }

    /// Says the same as the other, to this node.
    pub(crate) fn same_as(&self, other: &Slice) -> bool {
        self.family == other.family
            && self.weight == other.weight
            && self.ports == other.ports
            && self.records == other.records
            && (0..self.records.len()).all(|at| self.zone_hints(at) == other.zone_hints(at))
    }

    pub(crate) fn has_zone_hints(&self) -> bool {
        !self.zones.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.records.len()
    }

    /// Every record, with whether its zone hints, if it has any, name `zone`.
    pub(crate) fn records<'a>(
        &'a self,
        zone: Option<&'a str>,
    ) -> impl Iterator<Item = (Record, Option<bool>)> + 'a {
        self.records.iter().enumerate().map(move |(at, record)| {
            let hint = self.zone_hints(at).map(|zones| zones.iter().any(|name| Some(&**name) == zone));
            (*record, hint)
        })
    }

    /// The numbers of the places where its endpoints run.
    pub(crate) fn places(&self) -> impl Iterator<Item = u16> + '_ {
        self.records.iter().map(|record| record.place)
    }

    /// What share of new connections an endpoint of this slice gets.
    pub(crate) fn weight(&self, record: Record, weights: &Weights, places: &Places) -> u16 {
        if weights.is_empty() {
            return self.weight;
        }
        let place = places.at(record.place);
        let node = place.and_then(|place| place.node.as_deref());
        let zone = place.and_then(|place| place.zone.as_deref());
        weights.of(record.address, node, zone).unwrap_or(self.weight)
    }

    fn zone_hints(&self, at: usize) -> Option<&[Arc<str>]> {
        Some(&self.zones.get(at)?.as_ref()?.zones)
    }
}

/// One endpoint: 20 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) address: IpAddr,
    flags: u8,
    /// Where it runs, by number.
    place: u16,
}

impl Record {
    fn of(endpoint: &Endpoint, node_name: &str, places: &mut Places) -> Record {
        let hinted = endpoint.hints.as_ref().map_or(&[][..], |hints| &hints.nodes);
        let is_ours = |name: &Arc<str>| **name == *node_name;
        let bits = [
            (READY, endpoint.conditions.ready),
            (SERVING, endpoint.conditions.serving),
            (TERMINATING, endpoint.conditions.terminating),
            (LOCAL, endpoint.node.as_ref().is_some_and(is_ours)),
            (HINTS_NODES, !hinted.is_empty()),
            (HINTS_US, hinted.iter().any(is_ours)),
        ];
        let flags = bits.iter().filter(|(_, set)| *set).fold(0, |flags, (bit, _)| flags | bit);
        Record { address: endpoint.address, flags, place: places.number(endpoint) }
    }

    pub(crate) fn is_ready(self) -> bool {
        self.flags & READY != 0
    }

    pub(crate) fn is_serving(self) -> bool {
        self.flags & SERVING != 0
    }

    pub(crate) fn is_terminating(self) -> bool {
        self.flags & TERMINATING != 0
    }

    pub(crate) fn is_local(self) -> bool {
        self.flags & LOCAL != 0
    }

    /// Whether its node hints, if it has any, name this node.
    pub(crate) fn node_hint(self) -> Option<bool> {
        (self.flags & HINTS_NODES != 0).then_some(self.flags & HINTS_US != 0)
    }
}

const READY: u8 = 1 << 0;
const SERVING: u8 = 1 << 1;
const TERMINATING: u8 = 1 << 2;
const LOCAL: u8 = 1 << 3;
const HINTS_NODES: u8 = 1 << 4;
const HINTS_US: u8 = 1 << 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_takes_20_bytes() {
        assert_eq!(size_of::<Record>(), 20);
    }
}
