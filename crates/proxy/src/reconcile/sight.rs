// SPDX-License-Identifier: Apache-2.0

//! What is known of the node we run on: from its Node object, or where there may be none, from the host itself.

use std::time::{Duration, Instant};

use model::{DetectLocal, Kind, Update, World};

use crate::host;

/// How long the first programming waits for a Node object with an address, and for its pod CIDRs if they are
/// needed; then it goes on without.
pub(super) const NODE_PATIENCE: Duration = Duration::from_secs(30);
const POD_CIDR_PATIENCE: Duration = Duration::from_secs(330);

/// See the module.
#[derive(Debug)]
pub(super) struct Sight {
    /// Where no Node objects are to be had, the host itself says what it is.
    stand_in: bool,
    has_node: bool,
    /// The host has told its addresses, be it that it has none.
    host_known: bool,
    /// The host may have to stand in anew.
    stale: bool,
    /// What the first programming waits for has been told.
    told: bool,
}

impl Sight {
    pub(super) fn new(stand_in: bool) -> Sight {
        Sight { stand_in, has_node: false, host_known: false, stale: false, told: false }
    }

    /// To be called for each update before the world takes it.
    pub(super) fn note(&mut self, update: &Update) {
        match update {
            Update::Node(_) => self.has_node = true,
            Update::NodeGone | Update::Begin(Kind::Node) => self.has_node = false,
            Update::HostAddresses(_) => self.host_known = true,
            Update::End(Kind::Node) => {}
            _ => return,
        }
        self.stale = true;
    }

    /// What the host says in place of a Node object, if it has to and something has changed.
    pub(super) fn stand_in(&mut self, world: &World) -> Option<Update> {
        let stale = std::mem::take(&mut self.stale);
        let needed = stale && self.stand_in && !self.has_node && !world.host_addresses().is_empty();
        needed.then(|| Update::Node(host::stand_in(&world.settings().node_name, world.host_addresses())))
    }

    /// Before the first programming: until when to wait for the node, if it is to be waited for.
    pub(super) fn wait(&mut self, world: &World, begun: Instant, now: Instant) -> Option<Instant> {
        let node = world.node();
        let addressed = node.is_some_and(|node| node.addresses.v4.is_some() || node.addresses.v6.is_some());
        let ranged = node.is_some_and(|node| node.pod_cidrs.v4.is_some() || node.pod_cidrs.v6.is_some());
        let (patience, missing) = match world.settings().detect_local {
            DetectLocal::NodeCidr if !ranged && !self.stand_in => (POD_CIDR_PATIENCE, "pod CIDRs"),
            _ if addressed => return None,
            // No Node object will come that knows more than the host does.
            _ if self.stand_in && self.host_known => {
                self.tell_once(
                    "this host has no address but loopback: no node port is served until it has one",
                );
                return None;
            }
            _ => (NODE_PATIENCE, "an address"),
        };
        let until = begun + patience;
        if now < until {
            let name = &world.settings().node_name;
            self.tell_once(&format!(
                "waiting up to {patience:?} for Node {name} to have {missing}; nothing is programmed before"
            ));
            return Some(until);
        }
        tracing::error!(waited = ?patience, missing, "the Node object has not all that is needed; going on without");
        None
    }

    fn tell_once(&mut self, why: &str) {
        if !std::mem::replace(&mut self.told, true) {
            tracing::warn!("{why}");
        }
    }
}
