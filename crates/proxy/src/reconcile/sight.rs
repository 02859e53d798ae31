// SPDX-License-Identifier: Apache-2.0

//! What is known of the node we run on: from its Node object, or where there may be none, from the host itself.

use std::time::{Duration, Instant};

use model::{DetectLocal, Kind, Node, Update, World};

use crate::host;

/// How long the first programming waits for a Node object with an address, and for its pod CIDRs if they are
/// needed; then it goes on without. Counts from the first list of Nodes: while the API server is away, none can come.
pub(super) const NODE_PATIENCE: Duration = Duration::from_secs(30);
const POD_CIDR_PATIENCE: Duration = Duration::from_secs(330);

/// A wait that is shorter is not worth a word. The host's own addresses come within milliseconds.
const WORTH_TELLING: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug)]
pub(super) struct Sight {
    /// There need not be a Node object.
    from_files: bool,
    heard: Heard,
    /// The host has told its addresses, be it that it has none.
    host_known: bool,
    /// The host may have to stand in anew.
    stale: bool,
    /// When Nodes had been listed for the first time.
    listed: Option<Instant>,
    /// What was waited for has not come: what there is has to do.
    resigned: bool,
    /// What the first programming waits for has been told.
    told_wait: bool,
    /// That the host has no address to serve node ports on has been told.
    told_alone: bool,
    /// What the Node object does not say any more, as told.
    kept: Option<&'static str>,
}

/// What Node objects have said so far. Nothing of it is unsaid when the object goes, or a list of Nodes begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heard {
    Nothing,
    NoAddress,
    Address,
}

impl Sight {
    pub(super) fn new(from_files: bool) -> Sight {
        Sight {
            from_files,
            heard: Heard::Nothing,
            host_known: false,
            stale: false,
            listed: None,
            resigned: false,
            told_wait: false,
            told_alone: false,
            kept: None,
        }
    }

    /// To be called for each update before the world takes it.
    pub(super) fn note(&mut self, update: &Update, world: &World, now: Instant) {
        match update {
            Update::Node(node) => {
                self.heard = match self.heard {
                    Heard::Address => Heard::Address,
                    _ if node.has_address() => Heard::Address,
                    _ => Heard::NoAddress,
                };
                if let Some(what) = self.keep(node, world.node()) {
                    tracing::warn!(node = %node.name, "the Node object has no {what}; those last known stay in force");
                }
            }
            Update::HostAddresses(_) => self.host_known = true,
            Update::End(Kind::Node) => {
                self.listed.get_or_insert(now);
            }
            Update::NodeGone => {}
            _ => return,
        }
        self.stale = true;
    }

    /// What the host says in place of a Node object that never had an address, if it has to and something has changed.
    pub(super) fn stand_in(&mut self, world: &World) -> Option<Update> {
        let stale = std::mem::take(&mut self.stale);
        let is_wanted = (self.from_files || self.resigned) && self.heard != Heard::Address;
        let is_ready = world.is_listed(Kind::Node) && !world.host_addresses().is_empty();
        if !stale || !is_wanted || !is_ready {
            return None;
        }
        let host = host::stand_in(&world.settings().node_name, world.host_addresses());
        Some(Update::Node(match world.node().filter(|_| self.heard == Heard::NoAddress) {
            Some(node) => Node { addresses: host.addresses, ..node.clone() },
            // Who is to have a Node object and has none is not eligible.
            None => Node { eligible: self.from_files, ..host },
        }))
    }

    /// Before the first programming: until when to wait for the node, if it is to be waited for.
    pub(super) fn wait(&mut self, world: &World, now: Instant) -> Option<Instant> {
        if self.resigned {
            return None;
        }
        let addressed = world.node().is_some_and(Node::has_address);
        let ranged = world.node().is_some_and(Node::has_pod_cidr);
        let (patience, missing) = match world.settings().detect_local {
            DetectLocal::NodeCidr if !ranged && !self.from_files => (POD_CIDR_PATIENCE, "pod CIDRs"),
            _ if addressed => return None,
            // No Node object will come that knows more than the host does.
            _ if self.from_files && self.host_known => {
                if !std::mem::replace(&mut self.told_alone, true) {
                    tracing::warn!(
                        "this host has no address but loopback: no node port is served until it has one"
                    );
                }
                return None;
            }
            _ => (NODE_PATIENCE, "an address"),
        };
        let since = self.listed.unwrap_or(now);
        let (until, worth_telling) = (since + patience, since + WORTH_TELLING);
        if now < until {
            if now < worth_telling {
                return Some(worth_telling);
            }
            if !std::mem::replace(&mut self.told_wait, true) {
                let name = &world.settings().node_name;
                tracing::warn!(
                    "waiting up to {patience:?} for Node {name} to have {missing}; nothing is programmed before"
                );
            }
            return Some(until);
        }
        (self.resigned, self.stale) = (true, true);
        let instead = if addressed { "without" } else { "with the host's own addresses" };
        tracing::error!(waited = ?patience, missing, "the Node object has not all that is needed; going on {instead}");
        None
    }

    /// What the world goes on believing though this Node does not say it (see [`Node::remembering`]), if that has not
    /// been told yet.
    fn keep(&mut self, node: &Node, last: Option<&Node>) -> Option<&'static str> {
        let addresses = !node.has_address() && last.is_some_and(Node::has_address);
        let pod_cidrs = !node.has_pod_cidr() && last.is_some_and(Node::has_pod_cidr);
        let kept = match (addresses, pod_cidrs) {
            (true, true) => Some("addresses and pod CIDRs"),
            (true, false) => Some("addresses"),
            (false, true) => Some("pod CIDRs"),
            (false, false) => None,
        };
        let told = std::mem::replace(&mut self.kept, kept);
        kept.filter(|_| kept != told)
    }
}

#[cfg(test)]
mod tests {
    use model::PerFamily;

    use super::*;

    #[test]
    fn what_a_bare_node_keeps_is_told_once_each_time_it_comes_so() {
        let bare = Node {
            name: "here".into(),
            addresses: PerFamily::default(),
            pod_cidrs: PerFamily::default(),
            zone: None,
            eligible: true,
        };
        let ranged =
            Node { pod_cidrs: PerFamily { v4: "10.1.0.0/24".parse().ok(), v6: None }, ..bare.clone() };
        let whole =
            Node { addresses: PerFamily { v4: Some([192, 0, 2, 5].into()), v6: None }, ..ranged.clone() };
        let mut sight = Sight::new(false);
        assert_eq!(sight.keep(&bare, None), None, "nothing was known");
        assert_eq!(sight.keep(&whole, None), None);
        for _ in 0..2 {
            assert_eq!(sight.keep(&bare, Some(&whole)), Some("addresses and pod CIDRs"));
            assert_eq!(
                sight.keep(&bare, Some(&whole)),
                None,
                "a Node is told anew with each of its heartbeats"
            );
            assert_eq!(sight.keep(&ranged, Some(&whole)), Some("addresses"));
            assert_eq!(sight.keep(&whole, Some(&whole)), None);
        }
    }
}
