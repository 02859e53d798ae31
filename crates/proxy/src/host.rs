// SPDX-License-Identifier: Apache-2.0

//! What this machine is: its name, the families it speaks, its addresses, now and as they change.
//!
//! Everything here speaks of the network namespace of the calling thread.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::Arc,
    time::Duration,
};

use model::{Family, Node, PerFamily, Update};
use netlink::{
    Error,
    route::{AddressMonitor, Route},
};
use tokio::sync::mpsc::WeakSender;

/// How soon the monitor notices that nobody listens any more.
const TICK: Duration = Duration::from_secs(5);
/// The wait before addresses are watched anew after an error.
const AGAIN: Duration = Duration::from_secs(1);

/// The name of the Node object we are: what was configured, else the host's name; trimmed, in lower case.
pub fn node_name(hostname_override: &str) -> Result<Arc<str>, &'static str> {
    let name = match hostname_override {
        "" => rustix::system::uname().nodename().to_string_lossy().into_owned(),
        name => name.to_owned(),
    };
    match name.trim().to_lowercase() {
        name if name.is_empty() => Err("the node's name is empty; set --hostname-override"),
        name => Ok(name.into()),
    }
}

/// Asked before work of many steps, of which without it each would fail with a sentence of its own. In the network
/// namespace of this thread.
pub fn privileged() -> Result<(), &'static str> {
    use rustix::thread::{CapabilitySet, capabilities};
    match capabilities(None) {
        Ok(sets) if !sets.effective.contains(CapabilitySet::NET_ADMIN) => {
            return Err("this needs CAP_NET_ADMIN, which this process lacks; run it as root");
        }
        // Who cannot be asked is not suspected: the steps will tell.
        _ => {}
    }
    // Root of a user namespace has it, but not here unless the network namespace is of the same.
    match netlink::nft::Nft::open().and_then(|mut nft| nft.generation()) {
        Err(error) if error.is_permission() => Err(
            "this needs CAP_NET_ADMIN in the user namespace that owns this network namespace; run it as root of the host, or in a network namespace of its own",
        ),
        _ => Ok(()),
    }
}

/// Sets this process's oom_score_adj. Failing to is no reason not to serve.
pub fn adjust_oom_score(score: i32) {
    let path = "/proc/self/oom_score_adj";
    let is_so = fs::read_to_string(path).is_ok_and(|text| text.trim() == score.to_string());
    if is_so {
        return;
    }
    if let Err(error) = fs::write(path, score.to_string()) {
        tracing::warn!(score, %error, "cannot set oom_score_adj");
    }
}

/// IPv4 always; IPv6 if the kernel has it and it is not switched off.
pub fn families() -> PerFamily<bool> {
    let present = fs::exists("/proc/thread-self/net/if_inet6").unwrap_or(false);
    let disabled = fs::read_to_string("/proc/sys/net/ipv6/conf/all/disable_ipv6");
    PerFamily { v4: true, v6: present && disabled.is_ok_and(|value| value.trim() != "1") }
}

/// All usable addresses, sorted; without those that a mode of ours has put on a link for services.
pub fn addresses() -> Result<Box<[IpAddr]>, Error> {
    let mut route = Route::open()?;
    let of_services = dataplane::names::SERVICE_LINKS.map(|name| route.link_index(name).ok());
    let mut addresses: Vec<IpAddr> = route
        .addresses()?
        .iter()
        .filter(|entry| entry.is_usable() && !of_services.contains(&Some(entry.link)))
        .map(|entry| entry.address)
        .collect();
    addresses.sort_unstable();
    addresses.dedup();
    Ok(addresses.into())
}

/// Sends the addresses now and whenever they change, until nobody listens. Blocks: give it a thread.
pub fn watch(updates: &WeakSender<Update>) {
    while updates.upgrade().is_some() {
        if let Err(error) = follow(updates) {
            tracing::warn!(%error, "cannot follow the host's addresses, trying again");
            std::thread::sleep(AGAIN);
        }
    }
}

fn follow(updates: &WeakSender<Update>) -> Result<(), Error> {
    // Subscribe first, then list: no change falls between.
    let mut monitor = AddressMonitor::open()?;
    let mut known = None;
    loop {
        let now = addresses()?;
        if known.as_ref() != Some(&now) {
            known = Some(now.clone());
            let Some(updates) = updates.upgrade() else { return Ok(()) };
            if updates.blocking_send(Update::HostAddresses(now)).is_err() {
                return Ok(());
            }
        }
        // Any change means to list again: they come in bursts, and a list is one question.
        while monitor.next(TICK)?.is_none() {
            if updates.upgrade().is_none() {
                return Ok(());
            }
        }
        while monitor.next(Duration::ZERO)?.is_some() {}
    }
}

/// The node as far as the machine itself can tell, where no Node object says an address: in each family the one
/// that traffic by the default route starts from, else the first that is valid everywhere.
pub fn stand_in(name: &Arc<str>, addresses: &[IpAddr]) -> Node {
    let address = |family: Family| {
        let global = |ip: &&IpAddr| Family::of(**ip) == family && is_global(**ip);
        let first = || addresses.iter().find(global).copied();
        default_source(family).filter(|ip| addresses.contains(ip)).or_else(first)
    };
    Node {
        name: Arc::clone(name),
        addresses: PerFamily::from_fn(address),
        pod_cidrs: PerFamily::default(),
        zone: None,
        eligible: true,
    }
}

/// The source address of the default route. Connecting a UDP socket asks the routing table and sends nothing.
fn default_source(family: Family) -> Option<IpAddr> {
    // Addresses for documentation: no more specific route will have them.
    let (any, far) = match family {
        Family::V4 => (IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1))),
        Family::V6 => {
            let far = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
            (IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V6(far))
        }
    };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
    socket.connect(SocketAddr::new(far, 9)).ok()?;
    let source = socket.local_addr().ok()?.ip();
    is_global(source).then_some(source)
}

/// Valid beyond its link, and not only here.
pub fn is_global(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local() && !ip.is_unspecified(),
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local() && !ip.is_unspecified(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_trimmed_and_lowered() {
        assert_eq!(node_name(" Node-A ").as_deref(), Ok("node-a"));
        assert!(node_name("   ").is_err());
        assert!(!node_name("").expect("every host has a name").is_empty());
    }

    #[test]
    fn a_stand_in_has_no_loopback_and_no_link_local_address() {
        let addresses: Vec<IpAddr> =
            ["127.0.0.1", "169.254.1.1", "203.0.113.7", "203.0.113.9", "::1", "fe80::1"]
                .map(|ip| ip.parse().expect("valid"))
                .into();
        let node = stand_in(&"n".into(), &addresses);
        // The default route of this machine leads from an address that is not in the list.
        assert_eq!(node.addresses[Family::V4].expect("there is one").to_string(), "203.0.113.7");
        assert_eq!(node.addresses[Family::V6], None);
        assert!(node.eligible);
    }
}
