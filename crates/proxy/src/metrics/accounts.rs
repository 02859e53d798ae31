// SPDX-License-Identifier: Apache-2.0

//! What rules of the iptables mode have counted, read from the kernel when it is asked for.

use std::sync::{Mutex, PoisonError};

use dataplane::{Mode, names::xt};
use netlink::{Netns, accounts::Accounts};

use super::registry::About;

const SERIES: [(&str, About); 2] = [
    (
        xt::INVALID_DROPPED,
        counter(
            "kubeproxy_iptables_ct_state_invalid_dropped_packets_total",
            "[ALPHA] Packets dropped by the iptables mode because they belong to no connection.",
        ),
    ),
    (
        xt::LOOPBACK_ACCEPTED,
        counter(
            "kubeproxy_iptables_localhost_nodeports_accepted_packets_total",
            "[ALPHA] New connections to node ports on loopback addresses, in the iptables mode.",
        ),
    ),
];

const fn counter(name: &'static str, help: &'static str) -> About {
    About { name, kind: "counter", labels: &[], help }
}

/// The counters of one network namespace.
pub struct Accounted(Mutex<Accounts>);

impl Accounted {
    /// Those of a network namespace, or of this thread's; `None` in other modes, and where the kernel cannot be asked.
    pub fn find(mode: Mode, netns: Option<&Netns>) -> Option<Accounted> {
        let opened = match netns {
            _ if mode != Mode::Iptables => return None,
            Some(netns) => netns.run(Accounts::open).ok()?,
            None => Accounts::open(),
        };
        opened.ok().map(|accounts| Accounted(Mutex::new(accounts)))
    }

    /// Those that are there.
    pub(super) fn render(&self, out: &mut String) {
        let mut accounts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, about) in &SERIES {
            let packets = accounts.packets(name).ok().flatten();
            about.write(out, packets.into_iter().map(|packets| (Vec::new(), packets as f64)));
        }
    }
}

pub(super) fn names() -> impl Iterator<Item = About> {
    SERIES.into_iter().map(|(_, about)| about)
}
