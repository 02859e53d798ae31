// SPDX-License-Identifier: Apache-2.0

//! What kube-proxy's ipvs mode leaves beside its chains: virtual servers, the addresses they need, and sets.
//!
//! A connection that goes by a virtual server ends with it, other than one that a rule translated. So a server stays
//! until its connections have ended. New ones do not reach it any more: ours are translated before.

use std::{collections::HashSet, fs, net::IpAddr, thread, time::Duration};

use netlink::{
    ipset::{Element, Ipset},
    ipvs::{Change, Ipvs, ServiceKey},
    route::Route,
};

use model::{Family, Protocol};

use super::Report;
use crate::ipvs::{room::SPARE, sets::Set};

const DEVICE: &str = crate::names::IPVS_LINK;
/// There as long as the kernel has IPVS loaded. To ask for IPVS itself could load it.
const LOADED: &str = "/proc/thread-self/net/ip_vs";
/// The same for sets.
const SETS_LOADED: &str = "/sys/module/ip_set";

/// How often, and how long each time, sets that are still in use are waited for; all of them together.
const PATIENCE: u32 = 60;
const PAUSE: Duration = Duration::from_millis(50);

/// What to do with a server that has connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Busy {
    /// It stays until they have ended.
    Stays,
    Goes,
}

/// Whether the kernel has IPVS, in this network namespace.
pub(crate) fn is_loaded() -> bool {
    fs::exists(LOADED).unwrap_or(false)
}

/// Removes all of it. Chains that use the sets must have gone before.
pub(super) fn remove(busy: Busy, report: &mut Report) {
    let mut sets = fs::exists(SETS_LOADED).unwrap_or(false).then(Ipset::open).and_then(Result::ok);
    match remove_servers(busy, sets.as_mut(), report) {
        Ok(0) => {}
        Ok(count) => {
            report.waits = true;
            report.kept.push(format!(
                "{count} virtual servers of IPVS, with {DEVICE}, stay until their connections have ended"
            ));
            return;
        }
        Err(error) => {
            report.failed.push(format!("virtual servers of IPVS: {error}"));
            return;
        }
    }
    if let Some(sets) = &mut sets {
        remove_sets(sets, report);
    }
}

/// Removes what kube-proxy's ipvs mode does not have, and so would neither use nor remove: virtual servers that go by a mark,
/// and sets. Chains that use the sets must have gone before; a set that a rule still uses stays.
pub(super) fn withdraw(report: &mut Report) {
    if !fs::exists(SETS_LOADED).unwrap_or(false) {
        return;
    }
    let Ok(mut sets) = Ipset::open() else { return };
    let marks: HashSet<u32> = held(&mut sets)
        .into_iter()
        .filter_map(|(_, element)| if let Element::Marked { mark, .. } = element { Some(mark) } else { None })
        .collect();
    if !marks.is_empty() {
        let is_ours = |key: &ServiceKey| matches!(key, ServiceKey::Mark { mark, .. } if marks.contains(mark));
        let removed = Ipvs::open().and_then(|mut ipvs| {
            let keys = ipvs.services()?.into_iter().map(|held| held.service.key).filter(is_ours);
            let changes: Vec<Change> = keys.map(Change::RemoveService).collect();
            ipvs.apply(&changes).map(|_| changes.len())
        });
        match removed {
            Ok(0) => {}
            Ok(count) => report.removed.push(format!("{count} virtual servers of IPVS")),
            Err(error) => report.failed.push(format!("virtual servers of IPVS: {error}")),
        }
    }
    let names = Set::OWN.into_iter().flat_map(|set| Family::BOTH.map(|family| set.name(family)));
    let mut patience = PATIENCE;
    let removed = names.filter(|name| matches!(destroy(&mut sets, name, &mut patience), Ok(true))).count();
    if removed > 0 {
        report.removed.push(format!("{removed} sets"));
    }
}

/// Removes the servers and, if none has to stay, the link; how many have to.
fn remove_servers(
    busy: Busy,
    sets: Option<&mut Ipset>,
    report: &mut Report,
) -> Result<usize, netlink::Error> {
    let mut route = Route::open()?;
    let Some(device) = route.links()?.into_iter().find(|link| link.name == DEVICE) else { return Ok(0) };
    let (theirs, own): (Vec<_>, Vec<_>) =
        route.addresses()?.into_iter().partition(|address| address.link == device.index);
    let scope = Ownership {
        service_ips: theirs.iter().map(|address| address.address).collect(),
        node_ips: own.iter().map(|address| address.address).collect(),
        sets: sets.map(held).unwrap_or_default(),
    };
    let mut staying = 0;
    if is_loaded() {
        let mut ipvs = Ipvs::open()?;
        let mut idle = Vec::new();
        for key in
            ipvs.services()?.into_iter().map(|held| held.service.key).filter(|key| scope.is_theirs(key))
        {
            match busy {
                Busy::Stays if is_busy(&mut ipvs, key)? => staying += 1,
                _ => idle.push(Change::RemoveService(key)),
            }
        }
        let refusals = ipvs.apply(&idle)?;
        let refused = refusals.iter().filter(|refusal| !refusal.is_harmless(&idle[refusal.index]));
        staying += refused.count();
        if !idle.is_empty() {
            report.removed.push(format!("{} virtual servers of IPVS", idle.len()));
        }
    }
    if staying == 0 {
        route.delete_link(device.index)?;
        report.removed.push(format!("link {DEVICE}"));
    }
    Ok(staying)
}

/// Whether it has connections.
fn is_busy(ipvs: &mut Ipvs, key: ServiceKey) -> Result<bool, netlink::Error> {
    let dests = ipvs.dests(key)?;
    Ok(dests.iter().any(|dest| dest.active > 0 || dest.inactive > 0))
}

/// The sets that tell servers on the node's own addresses, and those that go by a mark, from others.
fn held(sets: &mut Ipset) -> HashSet<(Set, Element)> {
    let telling = [Set::ExternalIp, Set::ExternalIpLocal, Set::LoadBalancer, Set::Inside]
        .into_iter()
        .chain(Protocol::ALL.map(Set::NodePort));
    let mut held = HashSet::new();
    for (family, set) in telling.flat_map(|set| Family::BOTH.map(|family| (family, set))) {
        let elements = sets.read(&set.name(family)).ok().flatten().map(|held| held.elements);
        held.extend(elements.into_iter().flatten().map(|element| (set, element)));
    }
    held
}

fn remove_sets(sets: &mut Ipset, report: &mut Report) {
    let held = match sets.heads() {
        Ok(held) => held,
        Err(error) => return report.failed.push(format!("sets: {error}")),
    };
    let (mut removed, mut patience) = (0, PATIENCE);
    for name in held.iter().map(|held| &held.name).filter(|name| is_set(name)) {
        match destroy(sets, name, &mut patience) {
            Ok(_) => removed += 1,
            Err(error) => report.failed.push(format!("set {name}: {error}; is it in use by a rule?")),
        }
    }
    if removed > 0 {
        report.removed.push(format!("{removed} sets"));
    }
}

/// Removes a set. The kernel lets go of rules that were removed a moment ago when it has time for it, and of the sets they
/// used with them.
fn destroy(sets: &mut Ipset, name: &str, patience: &mut u32) -> Result<bool, netlink::Error> {
    loop {
        match sets.destroy(name) {
            Err(_) if *patience > 0 => {
                *patience -= 1;
                thread::sleep(PAUSE);
            }
            outcome => return outcome,
        }
    }
}

fn is_set(name: &str) -> bool {
    name == SPARE || Family::BOTH.into_iter().any(|family| Set::find(name, family).is_some())
}

/// Whose a virtual server is. Others use IPVS too, keepalived for one.
struct Ownership {
    service_ips: HashSet<IpAddr>,
    node_ips: HashSet<IpAddr>,
    sets: HashSet<(Set, Element)>,
}

impl Ownership {
    fn is_theirs(&self, key: &ServiceKey) -> bool {
        let (protocol, address, port) = match *key {
            ServiceKey::At { protocol, address, port } => (protocol, address, port),
            ServiceKey::Mark { mark, .. } => {
                let has =
                    |element: &Element| matches!(element, Element::Marked { mark: m, .. } if *m == mark);
                return self.sets.iter().any(|(_, element)| has(element));
            }
        };
        if self.service_ips.contains(&address) {
            return true;
        }
        let place = Element::Address { address, protocol, port };
        let Some(named) = Protocol::from_number(protocol).filter(|_| self.node_ips.contains(&address)) else {
            return false;
        };
        let node_port = if named == Protocol::Sctp { place } else { Element::Port(port) };
        let on_node = [Set::ExternalIp, Set::ExternalIpLocal, Set::LoadBalancer].map(|set| (set, place));
        on_node.iter().chain([&(Set::NodePort(named), node_port)]).any(|member| self.sets.contains(member))
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    #[test]
    fn names_of_both_families_are_known() {
        for name in [
            "KUBE-CLUSTER-IP",
            "KUBE-6-CLUSTER-IP",
            "KUBE-6-LOAD-BALANCER-SOURCE-CID",
            "KUBE-6-NODE-PORT-LOCAL-SCTP-HAS",
            "KUBE-INSIDE",
        ] {
            assert!(is_set(name), "{name}");
        }
        for name in ["KUBE-", "KUBE-MINE", "cali40all", "KUBE-6-LOAD-BALANCER-SOURCE-CIDR"] {
            assert!(!is_set(name), "{name}");
        }
    }

    #[test]
    fn servers_of_others_are_not_theirs() {
        let ips = |text: &str| text.split(' ').map(|ip| ip.parse().expect("an address")).collect();
        let scope = Ownership {
            service_ips: ips("10.96.0.1 fd00::1"),
            node_ips: ips("192.0.2.1"),
            sets: HashSet::from([(Set::NodePort(Protocol::Tcp), Element::Port(30_080))]),
        };
        let is_theirs = |at: &str| {
            let at: SocketAddr = at.parse().expect("an address and a port");
            scope.is_theirs(&ServiceKey::At { protocol: 6, address: at.ip(), port: at.port() })
        };
        assert!(is_theirs("10.96.0.1:443") && is_theirs("[fd00::1]:53") && is_theirs("192.0.2.1:30080"));
        assert!(!is_theirs("192.0.2.1:80") && !is_theirs("198.51.100.1:30080"));
    }
}
