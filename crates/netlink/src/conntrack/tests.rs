// SPDX-License-Identifier: Apache-2.0

//! With real flows, in a network namespace of the test's own.

use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};

use super::*;
use crate::{
    nft::{self, Batch, Chain, ChainKind, Create, CtKey, Expr, Hook, Nft, Reg, Rule, Table, TableRef},
    route::{Route, RouteSpec},
    testing::scratch_netns,
};

const UDP: u8 = 17;
/// Nobody is there, but it is routed.
const VIRTUAL: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);

/// A namespace in which flows are tracked, and port 53 of [`VIRTUAL`] is port 5353 of the loopback address.
fn tracked_netns(test: &str) -> Option<Netns> {
    let netns = scratch_netns(test)?;
    let mut route = Route::open_in(&netns).expect("a socket");
    let lo = route.link_index("lo").expect("lo");
    route.set_up(lo, true).expect("lo up");
    route.add_route(&RouteSpec::to(VIRTUAL.into(), 32).dev(lo)).expect("a route");
    let mut nft = Nft::open_in(&netns).expect("a socket");
    for family in [Family::V4, Family::V6] {
        let table = TableRef { family, name: "tracked" };
        let mut batch = Batch::new();
        batch.add_table(1, &Table::new(family, table.name), Create::Exclusive);
        let chain = Chain::base("output", ChainKind::Filter, Hook::Output, 0);
        batch.add_chain(2, table, &chain, Create::Exclusive);
        let exprs = vec![Expr::Ct { key: CtKey::State, direction: None, dst: Reg::word(0) }];
        batch.add_rule(3, table, &Rule { chain: "output".into(), exprs, comment: None });
        nft.commit(&batch).expect("tracking");
    }
    nft.commit(&redirection()).expect("redirection");
    Some(netns)
}

fn redirection() -> Batch {
    let table = TableRef { family: Family::V4, name: "tracked" };
    let mut batch = Batch::new();
    let chain = Chain::base("nat", ChainKind::Nat, Hook::Output, -100);
    batch.add_chain(1, table, &chain, Create::Exclusive);
    let (address, port) = (Reg::word(0), Reg::word(4));
    let daddr = Expr::Payload { base: nft::Header::Network, offset: 16, len: 4, dst: address };
    let exprs = vec![
        daddr,
        Expr::Cmp { src: address, op: nft::CmpOp::Eq, value: VIRTUAL.octets().to_vec() },
        Expr::Immediate { dst: address, value: vec![127, 0, 0, 1] },
        Expr::Immediate { dst: port, value: 5353u16.to_be_bytes().to_vec() },
        Expr::Nat {
            kind: nft::NatKind::Dnat,
            family: Family::V4,
            address: Some(address),
            port: Some(port),
            flags: nft::NatFlags::NONE,
        },
    ];
    batch.add_rule(2, table, &Rule { chain: "nat".into(), exprs, comment: None });
    batch
}

/// Sends a datagram from one port of the loopback address to another address.
fn send(netns: &Netns, from: &str, to: &str) {
    netns
        .run(|| UdpSocket::bind(from).and_then(|socket| socket.send_to(b"x", to)))
        .expect("a namespace")
        .expect("sent");
}

fn list(conntrack: &mut Conntrack, filter: &Filter) -> (Vec<Flow>, usize) {
    let mut flows = Vec::new();
    let seen = conntrack.flows(filter, |flow| flows.push(*flow)).expect("flows");
    flows.sort_by_key(|flow| flow.original.sport);
    (flows, seen)
}

fn ends(address: &str) -> (IpAddr, u16) {
    let address: SocketAddr = address.parse().expect("an address");
    (address.ip(), address.port())
}

#[test]
fn flows_are_listed_by_filter() {
    let Some(netns) = tracked_netns("flows_are_listed_by_filter") else { return };
    for port in 4001..4011 {
        send(&netns, &format!("127.0.0.1:{port}"), "127.0.0.1:9");
    }
    send(&netns, "127.0.0.1:4100", "10.96.0.10:53");
    send(&netns, "[::1]:4200", "[::1]:9");
    let connect = || {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let stream = TcpStream::connect(listener.local_addr()?)?;
        std::io::Result::Ok((listener, stream))
    };
    let _tcp = netns.run(connect).expect("a namespace").expect("a TCP flow");

    let mut conntrack = Conntrack::open_in(&netns).expect("a socket");
    let (udp, seen) = list(&mut conntrack, &Filter::protocol(Family::V4, UDP));
    assert_eq!(udp.len(), 11);
    assert_eq!(seen, 11, "the kernel sends no flows of other protocols and families");
    assert!(conntrack.kernel_filters);
    let (all, _) = list(&mut conntrack, &Filter::all(Family::V4));
    assert!(all.len() == 12 && all.iter().all(|flow| flow.family == Family::V4));
    let (six, _) = list(&mut conntrack, &Filter::protocol(Family::V6, UDP));
    assert_eq!(six.len(), 1);
    assert_eq!((six[0].original.src, six[0].original.sport), ends("[::1]:4200"));

    let redirected = udp.last().expect("the last one");
    assert_eq!((redirected.original.src, redirected.original.sport), ends("127.0.0.1:4100"));
    assert_eq!((redirected.original.dst, redirected.original.dport), ends("10.96.0.10:53"));
    assert_eq!((redirected.reply.src, redirected.reply.sport), ends("127.0.0.1:5353"));
    assert_ne!(redirected.status & nft::expr::ct_status::DST_NAT, 0);
    assert_eq!(redirected.zone, Zone::Default);

    let mut by_service = Filter::protocol(Family::V4, UDP);
    by_service.original = Ends { dst: Some(VIRTUAL.into()), dport: Some(53), ..Ends::default() };
    assert_eq!(list(&mut conntrack, &by_service), (vec![*redirected], 1));
    let mut by_endpoint = Filter::protocol(Family::V4, UDP);
    by_endpoint.reply = Ends { src: Some(Ipv4Addr::LOCALHOST.into()), sport: Some(5353), ..Ends::default() };
    assert_eq!(list(&mut conntrack, &by_endpoint), (vec![*redirected], 1));
    let untranslated = Filter { lacks: nft::expr::ct_status::DST_NAT, ..Filter::protocol(Family::V4, UDP) };
    let (flows, seen) = list(&mut conntrack, &untranslated);
    assert_eq!((flows.len(), seen), (10, 10), "it looks at bits too");
    // Ports without a protocol: the kernel cannot, so it is done here.
    let mut by_port = Filter::all(Family::V4);
    by_port.original.sport = Some(4100);
    assert_eq!(list(&mut conntrack, &by_port).0, [*redirected]);
    let (none, seen) = list(&mut conntrack, &Filter::protocol(Family::V4, 132));
    assert_eq!((none, seen), (vec![], 0));

    // A kernel without filters: the same flows, more to read.
    conntrack.kernel_filters = false;
    let (flows, seen) = list(&mut conntrack, &by_service);
    assert_eq!(flows, [*redirected]);
    assert!(seen > 11);
}

#[test]
fn exactly_one_flow_is_deleted() {
    let Some(netns) = tracked_netns("exactly_one_flow_is_deleted") else { return };
    for port in 4001..4004 {
        send(&netns, &format!("127.0.0.1:{port}"), "10.96.0.10:53");
    }
    send(&netns, "[::1]:4200", "[::1]:9");
    let mut conntrack = Conntrack::open_in(&netns).expect("a socket");
    let filter = Filter::protocol(Family::V4, UDP);
    let (flows, _) = list(&mut conntrack, &filter);
    assert_eq!(flows.len(), 3);

    assert_eq!(conntrack.delete(&flows[1]), Ok(true));
    assert_eq!(list(&mut conntrack, &filter).0, [flows[0], flows[2]]);
    assert_eq!(conntrack.delete(&flows[1]), Ok(false), "gone already");

    // The same two ends again make another flow, which the old one's number does not mean.
    send(&netns, "127.0.0.1:4002", "10.96.0.10:53");
    let (again, _) = list(&mut conntrack, &filter);
    assert_eq!(again.len(), 3);
    assert_eq!(again[1].original, flows[1].original);
    let stranger = Flow { id: again[1].id.wrapping_add(1), ..again[1] };
    assert_eq!(conntrack.delete(&stranger), Ok(false));
    assert_eq!(list(&mut conntrack, &filter).0.len(), 3);

    let (six, _) = list(&mut conntrack, &Filter::protocol(Family::V6, UDP));
    assert_eq!(conntrack.delete(&six[0]), Ok(true));
    assert_eq!(list(&mut conntrack, &Filter::protocol(Family::V6, UDP)).0, []);
}

#[test]
fn a_kernel_without_filters_is_asked_without() {
    use crate::fake::{Fault, Faulty, Recorder};
    let faulty = Faulty::scripted(Recorder::new(), [Some(Fault::Refused(Errno::INVAL))]);
    let mut conntrack = Conntrack::over(faulty);
    let filter = Filter::protocol(Family::V4, UDP);
    assert_eq!(conntrack.flows(&filter, |_| {}), Ok(0));
    assert!(!conntrack.kernel_filters);
    assert_eq!(conntrack.channel.transport().requests(), 2);
    assert_eq!(conntrack.flows(&filter, |_| {}), Ok(0));
    assert_eq!(conntrack.channel.transport().requests(), 3);
}
