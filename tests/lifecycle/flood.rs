// SPDX-License-Identifier: Apache-2.0

//! Connections that somebody begins and never completes, by the ten thousand.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};

use lab::address::Version;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, sendto, socket_with};
use stage::manifest;

use crate::{
    bed::Bed,
    pods::{Client, PodServer, service},
};

/// More than any queue of half-open connections holds.
const HALF_OPEN: u32 = 20_000;
/// Nobody in the lab is there, and so nobody answers what is sent back.
const NOBODY: [u8; 3] = [203, 0, 113];

/// The proxy is told of a connection when it is complete: one that never will be costs it nothing, and others nothing
/// that they would notice.
#[test]
fn half_open_connections_hold_up_nobody() {
    let Some(mut bed) = Bed::build() else { return };
    let _server = PodServer::start(&bed, "a1", 9_006, false);
    service(&bed, manifest::service("flooded", 27), &[], (&["a1"], 9_006));
    service(&bed, manifest::service("beside", 28), &[], (&["a1"], 9_006));
    bed.start_with(&["--proxy-mode=userspace"]);
    let at = |host| match manifest::cluster_ip(Version::V4, host) {
        IpAddr::V4(address) => SocketAddrV4::new(address, 80),
        IpAddr::V6(_) => unreachable!("asked for IPv4"),
    };
    let ask = |host| {
        let mut client = Client::connect(&bed, "client", SocketAddr::V4(at(host)))?;
        client.ask()
    };
    assert_eq!((ask(27).ok().as_deref(), ask(28).ok().as_deref()), (Some("a1"), Some("a1")));
    let accepted = || bed.daemon.metric("portolan_relay_accepted_total").expect("it is counted");
    let before = accepted();

    let client = bed.lab.netns("client").expect("it is in the lab");
    let mut asked = 0;
    for wave in 0..10 {
        let numbers = wave * HALF_OPEN / 10..(wave + 1) * HALF_OPEN / 10;
        client.run(|| begin(at(27), numbers)).expect("it can be entered");
        for host in [27, 28] {
            assert_eq!(ask(host).expect("it is served"), "a1", "after {wave} waves");
            asked += 1;
        }
    }
    let waiting = bed.node().run(half_open).expect("it can be entered");
    assert!(waiting > 100, "only {waiting} half-open connections: they do not arrive");
    println!("{HALF_OPEN} connections begun and not completed, {asked} others: 0 failures");
    assert_eq!(accepted() - before, f64::from(asked), "what is not complete is not accepted");
}

/// Connections of this namespace that wait for their client.
fn half_open() -> usize {
    const SYN_RECV: &str = "03";
    let table = std::fs::read_to_string("/proc/thread-self/net/tcp").expect("a table of connections");
    table.lines().filter(|line| line.split_whitespace().nth(3) == Some(SYN_RECV)).count()
}

/// Sends the first packet of connections with these numbers: each from another port or address.
fn begin(to: SocketAddrV4, numbers: std::ops::Range<u32>) {
    let socket = socket_with(AddressFamily::INET, SocketType::RAW, SocketFlags::CLOEXEC, Some(ipproto::RAW))
        .expect("a raw socket");
    for number in numbers {
        let [a, b, c] = NOBODY;
        let from =
            SocketAddrV4::new(Ipv4Addr::new(a, b, c, 130 + (number % 50) as u8), 1024 + (number / 50) as u16);
        let packet = first_packet(from, to, number);
        sendto(&socket, &packet, SendFlags::empty(), &SocketAddr::V4(to)).expect("it is sent");
    }
}

/// An IPv4 header, to which the kernel adds length and checksum, and a TCP header with SYN set.
fn first_packet(from: SocketAddrV4, to: SocketAddrV4, sequence: u32) -> Vec<u8> {
    let mut tcp = Vec::new();
    tcp.extend(from.port().to_be_bytes());
    tcp.extend(to.port().to_be_bytes());
    tcp.extend(sequence.to_be_bytes());
    tcp.extend([0; 4]);
    tcp.extend([5 << 4, 0x02, 0xff, 0xff, 0, 0, 0, 0]);
    let mut sealed: Vec<u8> = [from.ip().octets(), to.ip().octets()].concat();
    sealed.extend([0, 6, 0, tcp.len() as u8]);
    sealed.extend(&tcp);
    let checksum = checksum(&sealed).to_be_bytes();
    tcp[16..18].copy_from_slice(&checksum);
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 6, 0, 0];
    packet.extend(from.ip().octets());
    packet.extend(to.ip().octets());
    packet.extend(tcp);
    packet
}

/// RFC 1071, over an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}
