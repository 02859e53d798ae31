// SPDX-License-Identifier: Apache-2.0

//! What the source has told so far, kept by the rules of [`Update`] and by nothing else.

use std::collections::{BTreeSet, HashMap};

use ipnet::IpNet;
use model::{DetectLocal, EndpointSlice, Kind, PerFamily, Service, Settings, Update, World};

use crate::objects::{NODE, View};

/// Beside it a real [`World`], which must not disagree.
pub(crate) struct Mirror {
    view: View,
    world: World,
    /// By kind, what a list under way has named so far.
    lists: HashMap<Kind, BTreeSet<String>>,
    /// By kind, lists that came to their end.
    pub(crate) ends: HashMap<Kind, usize>,
    /// What was removed, in order, by a watch or by the end of a list.
    pub(crate) removed: Vec<String>,
    /// Updates of objects, not counting Begin and End.
    pub(crate) told: usize,
    /// What the source must never do, and did.
    pub(crate) complaints: Vec<String>,
}

impl Mirror {
    pub(crate) fn new() -> Mirror {
        Mirror {
            view: View::new(),
            world: World::new(settings()),
            lists: HashMap::new(),
            ends: HashMap::new(),
            removed: Vec::new(),
            told: 0,
            complaints: Vec::new(),
        }
    }

    pub(crate) fn apply(&mut self, update: Update) {
        self.world.apply(update.clone());
        match update {
            Update::Begin(kind) => {
                self.lists.insert(kind, BTreeSet::new());
            }
            Update::End(kind) => self.end(kind),
            Update::Service(service) => {
                self.put(Kind::Service, format!("Service {}", service.key), read_service(&service));
            }
            Update::ServiceGone(key) => self.drop(Kind::Service, format!("Service {key}")),
            Update::Slice(slice) => {
                self.put(Kind::EndpointSlice, format!("EndpointSlice {}", slice.key), read_slice(&slice));
            }
            Update::SliceGone(key) => self.drop(Kind::EndpointSlice, format!("EndpointSlice {key}")),
            Update::Node(node) => {
                let zone = node.zone.as_deref().unwrap_or_default().to_owned();
                self.put(Kind::Node, format!("Node {}", node.name), zone);
            }
            Update::NodeGone => self.drop(Kind::Node, format!("Node {NODE}")),
            Update::ServiceCidr { name, cidrs } => {
                let cidrs: Vec<_> = cidrs.iter().map(IpNet::to_string).collect();
                self.put(Kind::ServiceCidr, format!("ServiceCIDR {name}"), cidrs.join(","));
            }
            Update::ServiceCidrGone(name) => self.drop(Kind::ServiceCidr, format!("ServiceCIDR {name}")),
            Update::HostAddresses(_) => self.complaints.push("the API has told of host addresses".into()),
        }
    }

    /// What is known now.
    pub(crate) fn view(&self) -> &View {
        &self.view
    }

    /// Every kind has been listed.
    pub(crate) fn is_complete(&self) -> bool {
        self.world.is_complete()
    }

    /// Whether anything changed for the world since it was last asked.
    pub(crate) fn take_is_dirty(&mut self) -> bool {
        !self.world.take_dirty().is_empty()
    }

    /// The world holds as much as the view says.
    pub(crate) fn check_world(&self) {
        let count = |kind: &str| self.view.keys().filter(|key| key.starts_with(kind)).count();
        assert_eq!(self.world.services().count(), count("Service "), "services of the world");
        let slices = self.view.iter().filter(|(key, _)| key.starts_with("EndpointSlice "));
        let endpoints: usize =
            slices.map(|(_, said)| said.split(',').filter(|part| !part.is_empty()).count()).sum();
        assert_eq!(self.world.endpoint_count(), endpoints, "endpoints of the world");
    }

    fn put(&mut self, kind: Kind, key: String, said: String) {
        self.told += 1;
        if !self.ends.contains_key(&kind) && !self.lists.contains_key(&kind) {
            self.complaints.push(format!("{key} was told of before any list began"));
        }
        if let Some(named) = self.lists.get_mut(&kind) {
            named.insert(key.clone());
        }
        self.view.insert(key, said);
    }

    fn drop(&mut self, kind: Kind, key: String) {
        self.told += 1;
        if let Some(named) = self.lists.get_mut(&kind) {
            named.remove(&key);
        }
        if self.view.remove(&key).is_some() {
            self.removed.push(key);
        }
    }

    fn end(&mut self, kind: Kind) {
        let Some(named) = self.lists.remove(&kind) else {
            self.complaints.push(format!("a list of {kind:?} ended that never began"));
            return;
        };
        *self.ends.entry(kind).or_default() += 1;
        let prefix = match kind {
            Kind::Service => "Service ",
            Kind::EndpointSlice => "EndpointSlice ",
            Kind::Node => "Node ",
            Kind::ServiceCidr => "ServiceCIDR ",
        };
        let gone: Vec<String> = self
            .view
            .keys()
            .filter(|key| key.starts_with(prefix) && !named.contains(*key))
            .cloned()
            .collect();
        for key in gone {
            self.view.remove(&key);
            self.removed.push(key);
        }
    }
}

fn read_service(service: &Service) -> String {
    let ip = service.cluster_ips.v4.map(|ip| ip.to_string()).unwrap_or_default();
    let ports: Vec<_> = service.ports.iter().map(|port| format!("{} {}", port.name, port.port)).collect();
    format!("{ip} {}", ports.join(","))
}

fn read_slice(slice: &EndpointSlice) -> String {
    let endpoint = |endpoint: &model::Endpoint| format!("{} {}", endpoint.address, endpoint.conditions.ready);
    slice.endpoints.iter().map(endpoint).collect::<Vec<_>>().join(",")
}

fn settings() -> Settings {
    Settings {
        node_name: NODE.into(),
        families: PerFamily { v4: true, v6: true },
        node_ip_override: PerFamily::default(),
        detect_local: DetectLocal::NodeCidr,
        node_port_addresses: Box::default(),
        masquerade_all: false,
        external_ips: true,
    }
}
