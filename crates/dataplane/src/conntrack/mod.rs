// SPDX-License-Identifier: Apache-2.0

//! Flows that became stale.
//!
//! The kernel sends an established flow where it first went, for as long as packets come. A client of a protocol
//! without connections may so send into the void for ever, when the endpoint is gone or when there was none yet.
//! [`model::FlowRule`]s tell which flows that concerns; here they are found and deleted, and nothing else is.
//!
//! It happens off the programming path: [`Sweeper`] is a thread with a queue of what is to be looked at.

mod sweeper;
#[cfg(test)]
mod tests;

use std::net::IpAddr;

use hashbrown::{HashMap, HashSet};
use model::{Address, Backend, Family, FlowRule, Frontend, PerFamily, Protocol};
use netlink::{
    Transport,
    conntrack::{Conntrack, Ends, Filter, Flow},
    nft::expr::ct_status,
};

pub use sweeper::Sweeper;

/// Flows to look at, by frontend. Rules for one frontend become one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stale {
    rules: HashMap<Frontend, FlowRule>,
    /// Frontends that were not in force for a while, of every protocol. What began in that time was not translated and
    /// never will be: the kernel decides that with the first packet of a flow, and a SYN that is sent again is not one.
    missed: HashSet<Frontend>,
}

impl Stale {
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty() && self.missed.is_empty()
    }

    /// Adds a rule that is newer than those before.
    pub fn add(&mut self, rule: FlowRule) {
        let Some(old) = self.rules.remove(&rule.frontend) else {
            self.rules.insert(rule.frontend, rule);
            return;
        };
        let gone = old.gone.zip(rule.gone).map(|(before, now)| {
            let mut gone = [before, now].concat();
            gone.sort_unstable();
            gone.dedup();
            gone.into_boxed_slice()
        });
        let untranslated = old.untranslated || rule.untranslated;
        self.rules.insert(rule.frontend, FlowRule { gone, untranslated, ..rule });
    }

    /// Adds frontends that were not in force until now.
    pub fn add_missed(&mut self, frontends: impl IntoIterator<Item = Frontend>) {
        self.missed.extend(frontends);
    }

    /// Adds rules that are older than those here.
    pub fn add_older(&mut self, older: Stale) {
        let newer = std::mem::replace(self, older);
        newer.rules.into_values().for_each(|rule| self.add(rule));
        self.add_missed(newer.missed);
    }

    fn frontends(&self) -> impl Iterator<Item = &Frontend> {
        self.rules.keys().chain(&self.missed)
    }

    /// A node port is among them.
    fn has_node_ports(&self) -> bool {
        self.frontends().any(|frontend| matches!(frontend.address, Address::NodePort(_)))
    }

    /// Whether a rule says that the flow must go. `serves` tells on which addresses node ports are served.
    fn covers(
        &self,
        family: Family,
        protocol: Protocol,
        flow: &Flow,
        serves: &dyn Fn(IpAddr) -> bool,
    ) -> bool {
        let service =
            Frontend { address: Address::Ip(flow.original.dst), protocol, port: flow.original.dport };
        let node_port = Frontend { address: Address::NodePort(family), ..service };
        let of_node_port = || self.rules.get(&node_port).filter(|_| serves(flow.original.dst));
        let is_missed = || {
            is_lost(flow, protocol)
                && (self.missed.contains(&service)
                    || self.missed.contains(&node_port) && serves(flow.original.dst))
        };
        self.rules.get(&service).or_else(of_node_port).is_some_and(|rule| is_stale(rule, flow)) || is_missed()
    }

    /// What to ask the kernel for: all flows of a family and protocol, or if there is one rule, its flows.
    fn filters(&self) -> Vec<(Family, Protocol, Filter)> {
        let mut filters = Vec::new();
        for (family, protocol) in
            Family::BOTH.into_iter().flat_map(|family| Protocol::ALL.map(|it| (family, it)))
        {
            let is_meant = |at: &&Frontend| at.family() == family && at.protocol == protocol;
            let mut frontends = self.frontends().filter(is_meant);
            let Some(first) = frontends.next() else { continue };
            let mut filter = Filter::protocol(crate::nftables::wire(family), protocol.number());
            if !self.rules.keys().any(|at| is_meant(&at)) {
                // Of the connections of a node hardly any, where the kernel looks at it.
                filter.lacks = lost_lack(protocol);
            }
            if frontends.all(|at| at == first) {
                let dst = match first.address {
                    Address::Ip(ip) => Some(ip),
                    Address::NodePort(_) => None,
                };
                filter.original = Ends { dst, dport: Some(first.port), ..Ends::default() };
            }
            filters.push((family, protocol, filter));
        }
        filters
    }
}

/// What a flow that nobody has translated does not have. With an answer, a connection is somebody's.
fn lost_lack(protocol: Protocol) -> u32 {
    match protocol {
        Protocol::Tcp => ct_status::DST_NAT | ct_status::SEEN_REPLY,
        Protocol::Udp | Protocol::Sctp => ct_status::DST_NAT,
    }
}

/// Whether a flow goes where its sender addressed it, and nobody is there.
fn is_lost(flow: &Flow, protocol: Protocol) -> bool {
    flow.status & lost_lack(protocol) == 0 && !is_served(flow)
}

/// IPVS changes only where answers come from, and does not say that it translates.
fn is_served(flow: &Flow) -> bool {
    flow.reply.src != flow.original.dst
}

/// Whether a flow to the rule's frontend must go.
fn is_stale(rule: &FlowRule, flow: &Flow) -> bool {
    let goes_to = |backend: &Backend| (backend.address, backend.port) == (flow.reply.src, flow.reply.sport);
    if rule.serving.iter().any(goes_to) {
        return false;
    }
    if flow.status & ct_status::DST_NAT == 0 && !is_served(flow) {
        return rule.untranslated;
    }
    rule.gone.as_ref().is_none_or(|gone| gone.iter().any(goes_to))
}

/// What a sweep found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Flows the kernel told of.
    pub seen: usize,
    /// Flows that were stale and are gone now.
    pub deleted: usize,
    /// The same, by family.
    pub by_family: PerFamily<usize>,
}

/// Deletes exactly the stale flows. `serves` tells on which addresses node ports are served.
///
/// An error leaves the rest undone; doing it again is always right.
pub fn sweep<T: Transport>(
    conntrack: &mut Conntrack<T>,
    stale: &Stale,
    serves: &dyn Fn(IpAddr) -> bool,
) -> Result<Swept, netlink::Error> {
    let mut swept = Swept::default();
    for (family, protocol, filter) in stale.filters() {
        loop {
            let mut found = Vec::new();
            swept.seen += conntrack.flows(&filter, |flow| {
                if found.len() < AT_ONCE && stale.covers(family, protocol, flow, serves) {
                    found.push(*flow);
                }
            })?;
            let mut deleted = 0;
            for flow in &found {
                deleted += usize::from(conntrack.delete(flow)?);
            }
            swept.deleted += deleted;
            swept.by_family[family] += deleted;
            // What cannot be deleted would be found for ever.
            if found.len() < AT_ONCE || deleted == 0 {
                break;
            }
        }
    }
    Ok(swept)
}

/// How many stale flows are remembered before they are deleted: 5 MB of them. More take another look at the table.
const AT_ONCE: usize = 50_000;
