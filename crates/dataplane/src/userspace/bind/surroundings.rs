// SPDX-License-Identifier: Apache-2.0

//! What is asked about a client when nothing but its address is known.

use std::{
    net::IpAddr,
    sync::{Mutex, PoisonError},
};

use hashbrown::HashSet;
use model::{Family, PerFamily, Plan, PodTraffic};
use netlink::route::{Route, Way};

/// What holds on this node, as far as arrivals are concerned.
#[derive(Debug, Default)]
pub(crate) struct Surroundings {
    pods: PerFamily<Option<PodTraffic>>,
    loopback: PerFamily<bool>,
    /// Service addresses, which are no addresses of node ports.
    pub(super) services: HashSet<IpAddr>,
    /// Tells by which link a client is reached. In the dataplane's network namespace.
    routes: Mutex<Option<Route>>,
}

impl Surroundings {
    /// What holds for the whole node is as in this plan from now on.
    pub(super) fn settle(&mut self, plan: &Plan, routes: Option<Route>) {
        self.pods = PerFamily::from_fn(|family| plan.pod_traffic(family).cloned());
        self.loopback = PerFamily::from_fn(|family| plan.loopback_node_ports(family));
        self.routes = Mutex::new(routes);
    }

    /// Whether an address of this node may serve node ports. Where only some are chosen there are no other listeners.
    pub(crate) fn serves_node_ports(&self, address: IpAddr) -> bool {
        !self.services.contains(&address) && (!address.is_loopback() || self.loopback[Family::of(address)])
    }

    /// Whether a client is one of this node's pods or processes. Pods that are told by their link are asked for by the
    /// way back to them, which is the same link.
    pub(crate) fn is_inside(&self, client: IpAddr, destination: IpAddr) -> bool {
        let pods = &self.pods[Family::of(client)];
        if matches!(pods, Some(PodTraffic::Source(net)) if net.contains(&client)) {
            return true;
        }
        if client == destination || client.is_loopback() {
            return true;
        }
        let mut routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(routes) = routes.as_mut() else { return false };
        match (routes.way_to(client), pods) {
            (Ok(Way::Here), _) => true,
            (Ok(Way::Link(index)), Some(PodTraffic::Interface(name))) => {
                routes.link_index(name).is_ok_and(|found| found == index)
            }
            (Ok(Way::Link(index)), Some(PodTraffic::InterfacePrefix(prefix))) => {
                let links = routes.links().unwrap_or_default();
                links.iter().any(|link| link.index == index && link.name.starts_with(&**prefix))
            }
            _ => false,
        }
    }
}
