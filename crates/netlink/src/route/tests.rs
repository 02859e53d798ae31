// SPDX-License-Identifier: Apache-2.0

//! Two namespaces and a cable between them.

use std::{
    net::{Ipv4Addr, Ipv6Addr, UdpSocket},
    time::{Duration, Instant},
};

use super::*;
use crate::testing::scratch_netns;

const WAIT: Duration = Duration::from_secs(10);

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// Whether datagrams from one namespace get to an address in another. Sent more than once: the kernel sets up a new
/// IPv6 address in the background, and what comes before it is done is dropped.
fn reaches(from: &Netns, to: &Netns, address: IpAddr) -> bool {
    let receiver = to.run(|| UdpSocket::bind((address, 0))).expect("entered").expect("bound");
    receiver.set_read_timeout(Some(Duration::from_millis(50))).expect("timeout");
    let port = receiver.local_addr().expect("local address").port();
    let any: IpAddr =
        if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let sender = from.run(|| UdpSocket::bind((any, 0))).expect("entered").expect("bound");
    let mut buffer = [0; 16];
    let deadline = Instant::now() + WAIT;
    while Instant::now() < deadline {
        sender.send_to(b"hello", (address, port)).ok();
        if receiver.recv(&mut buffer).is_ok_and(|len| &buffer[..len] == b"hello") {
            return true;
        }
    }
    false
}

#[test]
fn a_cable_carries_packets() {
    let test = "a_cable_carries_packets";
    let (Some(left), Some(right)) = (scratch_netns(test), scratch_netns(test)) else { return };
    let mut here = Route::open_in(&left).expect("a socket");
    let mut there = Route::open_in(&right).expect("a socket");
    here.add_link("left0", LinkKind::Veth { peer: "right0", netns: Some(&right) }).expect("a cable");
    let (near, far) = (here.link_index("left0").expect("near"), there.link_index("right0").expect("far"));
    assert!(here.link("right0").expect_err("it is elsewhere").is_not_found());
    for (route, index, four, six) in
        [(&mut here, near, "192.0.2.1", "2001:db8::1"), (&mut there, far, "192.0.2.2", "2001:db8::2")]
    {
        route.add_address(index, ip(four), 24).expect("IPv4");
        route.add_address(index, ip(six), 64).expect("IPv6");
        route.set_mtu(index, 1400).expect("MTU");
        route.set_up(index, true).expect("up");
        let lo = route.link_index("lo").expect("lo");
        route.set_up(lo, true).expect("lo up");
    }
    let link = here.link("left0").expect("the link");
    assert_eq!((link.index, link.up, link.master, link.mtu), (near, true, None, 1400));
    assert!(reaches(&left, &right, ip("192.0.2.2")));
    assert!(reaches(&left, &right, ip("2001:db8::2")));

    for address in ["192.0.2.2", "2001:db8::2"] {
        assert_eq!(here.way_to(ip(address)), Ok(Way::Link(near)));
        assert_eq!(there.way_to(ip(address)), Ok(Way::Here));
    }
    assert!(here.way_to(ip("203.0.113.9")).is_err(), "there is no way yet");

    // Addresses behind the other end, by gateway and by the link alone.
    let lo = there.link_index("lo").expect("lo");
    for (address, len, gateway) in [("198.51.100.7", 32, "192.0.2.2"), ("2001:db8:1::7", 128, "2001:db8::2")]
    {
        there.add_address(lo, ip(address), len).expect("an address");
        let spec = RouteSpec::to(ip(address), len).via(ip(gateway));
        here.add_route(&spec).expect("a route");
        assert!(reaches(&left, &right, ip(address)), "{address}");
        assert!(here.add_route(&spec).expect_err("twice").already_exists());
        here.delete_route(&spec).expect("delete");
    }
    here.add_route(&RouteSpec::to(ip("198.51.100.0"), 24).dev(near)).expect("by link");
    assert!(reaches(&left, &right, ip("198.51.100.7")));
    let onlink =
        RouteSpec { onlink: true, ..RouteSpec::to(ip("0.0.0.0"), 0).via(ip("203.0.113.1")).dev(near) };
    here.add_route(&onlink).expect("a default route");
    let local = RouteSpec { kind: RouteKind::Local, ..RouteSpec::to(ip("203.0.113.0"), 24) };
    there.add_route(&local.dev(lo)).expect("a local route");
    assert!(reaches(&left, &right, ip("203.0.113.9")), "by the default route");
    let blackhole = RouteSpec { kind: RouteKind::Blackhole, ..RouteSpec::to(ip("203.0.113.0"), 24) };
    here.add_route(&blackhole).expect("a black hole");

    here.delete_link(near).expect("delete");
    assert!(there.link("right0").expect_err("both ends").is_not_found());
}

#[test]
fn a_bridge_joins_cables() {
    let test = "a_bridge_joins_cables";
    let (Some(switch), Some(one), Some(two)) =
        (scratch_netns(test), scratch_netns(test), scratch_netns(test))
    else {
        return;
    };
    let mut route = Route::open_in(&switch).expect("a socket");
    route.add_link("br0", LinkKind::Bridge).expect("a bridge");
    let bridge = route.link_index("br0").expect("br0");
    route.set_up(bridge, true).expect("up");
    for (index, (netns, name)) in [(&one, "port1"), (&two, "port2")].into_iter().enumerate() {
        route.add_link(name, LinkKind::Veth { peer: "tmp0", netns: None }).expect("a cable");
        let (port, peer) = (route.link_index(name).expect("port"), route.link_index("tmp0").expect("peer"));
        route.set_master(port, Some(bridge)).expect("plugged");
        route.set_up(port, true).expect("up");
        route.set_name(peer, "eth0").expect("renamed");
        route.set_netns(peer, netns).expect("moved");
        let mut inside = Route::open_in(netns).expect("a socket");
        let peer = inside.link_index("eth0").expect("eth0");
        inside.add_address(peer, ip(&format!("192.0.2.{}", index + 1)), 24).expect("an address");
        inside.set_up(peer, true).expect("up");
    }
    let masters: Vec<_> = route.links().expect("links").into_iter().filter_map(|link| link.master).collect();
    assert_eq!(masters, [bridge, bridge]);
    assert!(reaches(&one, &two, ip("192.0.2.2")));
    let port = route.link_index("port2").expect("port2");
    route.set_master(port, None).expect("unplugged");
    assert_eq!(route.link("port2").expect("port2").master, None);
}

#[test]
fn address_changes_are_told() {
    let Some(netns) = scratch_netns("address_changes_are_told") else { return };
    let mut monitor = AddressMonitor::open_in(&netns).expect("a monitor");
    let mut route = Route::open_in(&netns).expect("a socket");
    assert_eq!(route.addresses(), Ok(vec![]));
    let lo = route.link_index("lo").expect("lo");
    for (address, len) in [("192.0.2.7", 32), ("2001:db8::7", 128)] {
        let address = ip(address);
        route.add_address(lo, address, len).expect("add");
        let Some(AddressChange::Set(set)) = monitor.next(WAIT).expect("a change") else {
            panic!("no change")
        };
        assert_eq!((set.link, set.address, set.prefix_len), (lo, address, len));
        assert!(set.is_usable());
        assert!(route.addresses().expect("addresses").contains(&set));
        route.delete_address(lo, address, len).expect("delete");
        let Some(AddressChange::Gone(gone)) = monitor.next(WAIT).expect("a change") else {
            panic!("no change")
        };
        assert_eq!(gone.address, address);
    }
    assert_eq!(route.addresses(), Ok(vec![]));
    assert_eq!(monitor.next(Duration::ZERO), Ok(None));
}
