// SPDX-License-Identifier: Apache-2.0

//! What is so: all objects a source has told of, merged and indexed by service.
//!
//! [`World::apply`] takes one message, [`World::take_dirty`] hands out what has changed since it was last asked.
//! A message that says what is known already changes nothing, so metadata never reaches a dataplane.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use hashbrown::HashSet;
use ipnet::IpNet;

use crate::{
    endpoint::{EndpointSlice, SliceKey},
    node::{Node, Settings},
    places::Places,
    service::{Service, ServiceKey, SourceRanges},
    shelf::{Entry, Shelf},
    slice::Slice,
    vantage::Vantage,
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
pub struct Dirty {
    /// Services whose decisions may be others now. Some may not exist (any more).
    pub services: HashSet<ServiceKey>,
    /// The decisions of any service may be others now, whether it is in `services` or not. So it is at the
    /// beginning, where a set of all would only cost memory.
    pub all_services: bool,
    /// Pod traffic, node-port scope or service CIDRs may be others now.
    pub node_wide: bool,
    /// `trigger_time_nanos` of each slice that brought something new; for latency metrics.
    pub trigger_times_nanos: Vec<i64>,
}

impl Dirty {
    pub fn is_empty(&self) -> bool {
        self.services.is_empty() && !self.all_services && !self.node_wide
    }

    fn everything() -> Dirty {
        Dirty { all_services: true, node_wide: true, ..Dirty::default() }
    }

    fn mark(&mut self, service: &ServiceKey) {
        if !self.all_services {
            self.services.insert(service.clone());
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct World {
    settings: Settings,
    shelf: Shelf,
    places: Places,
    node: Option<Node>,
    cidrs: BTreeMap<Arc<str>, CidrObject>,
    host_addresses: Box<[IpAddr]>,
    lists: [List; Kind::ALL.len()],
    dirty: Dirty,
}

impl World {
    pub fn new(settings: Settings) -> World {
        World {
            settings,
            shelf: Shelf::default(),
            places: Places::default(),
            node: None,
            cidrs: BTreeMap::new(),
            host_addresses: Box::default(),
            lists: Default::default(),
            dirty: Dirty::everything(),
        }
    }

    /// Takes one message in. Never fails: a message about something unknown, or in an odd order, is ignored.
    pub fn apply(&mut self, update: Update) {
        match update {
            Update::Begin(kind) => self.lists[kind as usize].begin(),
            Update::End(kind) => self.end(kind),
            Update::Service(service) => self.put_service(service),
            Update::ServiceGone(key) => self.drop_service(&key),
            Update::Slice(slice) => self.put_slice(slice),
            Update::SliceGone(key) => self.drop_slice(&key),
            Update::Node(node) => self.put_node(node),
            Update::NodeGone => self.drop_node(),
            Update::ServiceCidr { name, cidrs } => self.put_cidrs(name, cidrs),
            Update::ServiceCidrGone(name) => self.dirty.node_wide |= self.cidrs.remove(&name).is_some(),
            Update::HostAddresses(addresses) => {
                self.dirty.node_wide |= self.host_addresses != addresses;
                self.host_addresses = addresses;
            }
        }
    }

    /// Other settings from now on; everything is looked at again. Node name and families stay what they were:
    /// what has been taken in was taken in by them.
    pub fn retune(&mut self, settings: Settings) {
        let node_name = Arc::clone(&self.settings.node_name);
        let settings = Settings { node_name, families: self.settings.families, ..settings };
        if settings != self.settings {
            self.settings = settings;
            self.dirty.all_services = true;
            self.dirty.node_wide = true;
        }
    }

    /// Hands out what became dirty and forgets it. Pass it to [`crate::Plan::update`], else it is lost.
    pub fn take_dirty(&mut self) -> Dirty {
        std::mem::take(&mut self.dirty)
    }

    /// What became dirty so far; at the beginning, everything.
    pub fn dirty(&self) -> &Dirty {
        &self.dirty
    }

    /// Every kind has been listed to its end at least once. Before that nothing may be programmed.
    pub fn is_complete(&self) -> bool {
        self.lists.iter().all(|list| list.done)
    }

    /// This kind has been listed to its end at least once.
    pub fn is_listed(&self, kind: Kind) -> bool {
        self.lists[kind as usize].done
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The node as last known. After its deletion it is no longer eligible, but keeps addresses, pod ranges and
    /// zone: deleting the object does not unplug the machine, and its traffic goes on as it was. When it comes back
    /// without addresses or pod ranges, those last known stay; see [`Node::remembering`].
    pub fn node(&self) -> Option<&Node> {
        self.node.as_ref()
    }

    pub fn host_addresses(&self) -> &[IpAddr] {
        &self.host_addresses
    }

    pub fn service(&self, key: &ServiceKey) -> Option<&Service> {
        self.shelf.entry(key)?.service.as_deref()
    }

    /// All services, proxied or not, in no order.
    pub fn services(&self) -> impl Iterator<Item = &Service> {
        self.shelf.entries().filter_map(|entry| entry.service.as_deref())
    }

    /// Endpoints in all slices, duplicates included.
    pub fn endpoint_count(&self) -> usize {
        self.shelf.entries().flat_map(Entry::slices).map(Slice::len).sum()
    }

    /// A [`Dirty`] that makes a [`crate::Plan`] look at everything.
    pub fn everything(&self) -> Dirty {
        Dirty::everything()
    }

    /// The slices of a service, by name.
    pub(crate) fn slices(&self, key: &ServiceKey) -> &[Slice] {
        self.shelf.entry(key).map_or(&[], Entry::slices)
    }

    /// Where endpoints run.
    pub(crate) fn places(&self) -> &Places {
        &self.places
    }

    /// What all ServiceCIDR objects state, unmerged.
    pub(crate) fn service_cidrs(&self) -> impl Iterator<Item = IpNet> {
        self.cidrs.values().flat_map(|object| object.cidrs.iter().copied())
    }

    fn put_service(&mut self, service: Service) {
        let epoch = self.lists[Kind::Service as usize].epoch;
        if let Some(key) = self.shelf.put_service(service, epoch) {
            self.dirty.mark(key);
        }
    }

    fn drop_service(&mut self, key: &ServiceKey) {
        if self.shelf.remove_service(key) {
            self.dirty.mark(key);
        }
    }

    fn put_slice(&mut self, slice: EndpointSlice) {
        let service = ServiceKey { namespace: slice.key.namespace.clone(), name: slice.service.name.clone() };
        let is_elsewhere = self.shelf.owner(&slice.key).is_some_and(|owner| *owner != service);
        let is_served = self.settings.families[slice.family];
        if is_elsewhere || !is_served {
            self.drop_slice(&slice.key);
        }
        if !is_served {
            return;
        }
        let trigger_time = slice.trigger_time_nanos;
        let epoch = self.lists[Kind::EndpointSlice as usize].epoch;
        if self.places.should_sweep() {
            self.places.sweep(self.shelf.entries().flat_map(Entry::slices).flat_map(Slice::places));
        }
        let slice = Slice::compact(slice, &self.settings.node_name, &mut self.places, epoch);
        if let Some(key) = self.shelf.put_slice(&service, slice) {
            self.dirty.mark(key);
            self.dirty.trigger_times_nanos.extend(trigger_time);
        }
    }

    fn drop_slice(&mut self, key: &SliceKey) {
        if let Some(service) = self.shelf.remove_slice(key) {
            self.dirty.mark(&service);
        }
    }

    fn put_cidrs(&mut self, name: Arc<str>, cidrs: Box<[IpNet]>) {
        let seen = self.lists[Kind::ServiceCidr as usize].epoch;
        let known = self.cidrs.get(&name).map(|object| &object.cidrs);
        self.dirty.node_wide |= known != Some(&cidrs);
        self.cidrs.insert(name, CidrObject { cidrs, seen });
    }

    fn put_node(&mut self, node: Node) {
        self.lists[Kind::Node as usize].found = true;
        let before = Vantage::of(self);
        self.node = Some(match &self.node {
            Some(last) => node.remembering(last),
            None => node,
        });
        let after = Vantage::of(self);

        self.dirty.node_wide |= before.pod_traffic != after.pod_traffic || before.node_ips != after.node_ips;
        if before.tells_pods() != after.tells_pods() {
            self.dirty.all_services = true;
        }
        if before.zone != after.zone {
            self.mark_where(|entry| entry.slices().iter().any(Slice::has_zone_hints));
        }
        if before.node_ips != after.node_ips {
            self.mark_where(has_source_ranges);
        }
    }

    fn drop_node(&mut self) {
        if let Some(node) = &mut self.node {
            node.eligible = false;
        }
    }

    fn mark_where(&mut self, depends: impl Fn(&Entry) -> bool) {
        let depending = self.shelf.entries().filter(|entry| depends(entry));
        depending.for_each(|entry| self.dirty.mark(&entry.key));
    }

    /// Removes what the list that ends here did not contain.
    fn end(&mut self, kind: Kind) {
        let list = &mut self.lists[kind as usize];
        if !std::mem::take(&mut list.open) {
            return;
        }
        list.done = true;
        let epoch = list.epoch;
        match kind {
            Kind::Service => self.shelf.sweep_services(epoch, |key| self.dirty.mark(key)),
            Kind::EndpointSlice => self.shelf.sweep_slices(epoch, |key| self.dirty.mark(key)),
            Kind::Node if !list.found => self.drop_node(),
            Kind::Node => {}
            Kind::ServiceCidr => {
                let before = self.cidrs.len();
                self.cidrs.retain(|_, object| object.seen == epoch);
                self.dirty.node_wide |= self.cidrs.len() != before;
            }
        }
    }
}

fn has_source_ranges(entry: &Entry) -> bool {
    entry.service.as_ref().is_some_and(|service| service.source_ranges != SourceRanges::Any)
}

#[derive(Debug)]
struct CidrObject {
    cidrs: Box<[IpNet]>,
    seen: u32,
}

/// How far the listing of one kind is. Objects carry the epoch they were last seen in; at the end of a list
/// those of an older epoch go. So a relist needs no second copy of anything.
#[derive(Clone, Copy, Debug, Default)]
struct List {
    epoch: u32,
    open: bool,
    done: bool,
    /// The object occurred; for the node, which carries no epoch.
    found: bool,
}

impl List {
    fn begin(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
        self.open = true;
        self.found = false;
    }
}
