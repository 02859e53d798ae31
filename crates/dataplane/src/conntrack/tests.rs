// SPDX-License-Identifier: Apache-2.0

use std::net::{IpAddr, Ipv4Addr};

use model::{Address, Backend, Family, FlowRule, Frontend, Protocol};
use netlink::{
    conntrack::{Flow, Tuple, Zone},
    nft::expr::ct_status,
};

use super::Stale;

fn ip(last: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, last).into()
}

fn backend(last: u8) -> Backend {
    Backend { address: ip(last), port: 8080, local: false, weight: 1 }
}

fn frontend(last: u8) -> Frontend {
    Frontend { address: Address::Ip(ip(last)), protocol: Protocol::Udp, port: 53 }
}

fn node_port() -> Frontend {
    Frontend { address: Address::NodePort(Family::V4), protocol: Protocol::Udp, port: 53 }
}

fn rule(frontend: Frontend, serving: &[u8], gone: Option<&[u8]>, untranslated: bool) -> FlowRule {
    let backends = |hosts: &[u8]| hosts.iter().map(|host| backend(*host)).collect::<Vec<_>>();
    let gone = gone.map(|gone| backends(gone).into());
    FlowRule { frontend, serving: backends(serving).into(), gone, untranslated }
}

/// From a client to the frontend at `to`, sent on to the backend `by`; untranslated if there is none.
fn flow(to: u8, by: Option<u8>) -> Flow {
    let client: IpAddr = Ipv4Addr::new(192, 0, 2, 1).into();
    let (src, sport) = by.map_or((ip(to), 53), |by| (ip(by), 8080));
    Flow {
        family: netlink::Family::V4,
        protocol: 17,
        original: Tuple { src: client, dst: ip(to), sport: 4000, dport: 53 },
        reply: Tuple { src, dst: client, sport, dport: 4000 },
        id: 1,
        status: if by.is_some() { ct_status::DST_NAT } else { 0 },
        zone: Zone::Default,
    }
}

fn covers(rules: impl IntoIterator<Item = FlowRule>, flow: &Flow) -> bool {
    let mut stale = Stale::default();
    rules.into_iter().for_each(|rule| stale.add(rule));
    stale.covers(Family::V4, Protocol::Udp, flow, &|address| address == ip(99))
}

#[test]
fn only_flows_to_what_is_gone_are_stale() {
    let change = rule(frontend(1), &[11, 12], Some(&[13]), false);
    for (flow, is_stale) in [
        (flow(1, Some(13)), true),
        (flow(1, Some(11)), false),
        // Somebody else's translation.
        (flow(1, Some(77)), false),
        (flow(1, None), false),
        (flow(2, Some(13)), false),
    ] {
        assert_eq!(covers([change.clone()], &flow), is_stale, "{flow:?}");
    }
}

#[test]
fn at_first_sight_all_that_does_not_serve_is_stale() {
    let change = rule(frontend(1), &[11], None, true);
    for (flow, is_stale) in
        [(flow(1, Some(11)), false), (flow(1, Some(77)), true), (flow(1, None), true), (flow(2, None), false)]
    {
        assert_eq!(covers([change.clone()], &flow), is_stale, "{flow:?}");
    }
}

#[test]
fn node_ports_are_on_the_nodes_addresses_only() {
    let change = rule(node_port(), &[11], Some(&[13]), true);
    for (flow, is_stale) in [
        (flow(99, Some(13)), true),
        (flow(99, None), true),
        (flow(99, Some(11)), false),
        (flow(98, Some(13)), false),
        (flow(98, None), false),
    ] {
        assert_eq!(covers([change.clone()], &flow), is_stale, "{flow:?}");
    }
    // A frontend with that very address knows better.
    let own = rule(frontend(99), &[13], Some(&[]), false);
    assert!(!covers([change, own], &flow(99, Some(13))));
}

#[test]
fn rules_for_one_frontend_become_one() {
    let first = rule(frontend(1), &[11], Some(&[13]), true);
    let second = rule(frontend(1), &[13], Some(&[11]), false);
    let both = [first.clone(), second.clone()];
    assert!(!covers(both.clone(), &flow(1, Some(13))), "it is back");
    assert!(covers(both.clone(), &flow(1, Some(11))));
    assert!(covers(both, &flow(1, None)), "once untranslated flows were stale, they are");
    let unknown = rule(frontend(1), &[11], None, false);
    assert!(covers([unknown.clone(), second.clone()], &flow(1, Some(77))), "unknown stays unknown");

    let mut newer = Stale::default();
    newer.add(second);
    let mut older = Stale::default();
    older.add(unknown);
    older.add(rule(frontend(2), &[], Some(&[11]), false));
    newer.add_older(older);
    let serves = |_: IpAddr| false;
    assert!(newer.covers(Family::V4, Protocol::Udp, &flow(1, Some(11)), &serves));
    assert!(!newer.covers(Family::V4, Protocol::Udp, &flow(1, Some(13)), &serves), "the newer one counts");
    assert!(newer.covers(Family::V4, Protocol::Udp, &flow(2, Some(11)), &serves));
}

#[test]
fn one_rule_is_asked_for_narrowly() {
    let mut stale = Stale::default();
    stale.add(rule(frontend(1), &[], Some(&[11]), false));
    let [(Family::V4, Protocol::Udp, filter)] = stale.filters()[..] else { panic!("{:?}", stale.filters()) };
    assert_eq!((filter.original.dst, filter.original.dport), (Some(ip(1)), Some(53)));
    stale.add(rule(frontend(2), &[], Some(&[11]), false));
    let [(_, _, filter)] = stale.filters()[..] else { panic!("{:?}", stale.filters()) };
    assert_eq!((filter.protocol, filter.original.dport), (Some(17), None));
}

#[test]
fn what_began_untranslated_while_rules_were_missing_goes() {
    let mut stale = Stale::default();
    stale.add_missed([frontend(1), node_port(), Frontend { protocol: Protocol::Tcp, ..frontend(1) }]);
    let covers =
        |protocol, flow: &Flow| stale.covers(Family::V4, protocol, flow, &|address| address == ip(99));
    let answered = |flow: Flow| Flow { status: flow.status | ct_status::SEEN_REPLY, ..flow };
    assert!(covers(Protocol::Udp, &flow(1, None)));
    assert!(covers(Protocol::Udp, &answered(flow(1, None))), "by whoever has that address elsewhere");
    assert!(covers(Protocol::Udp, &flow(99, None)), "a node port");
    assert!(covers(Protocol::Tcp, &flow(1, None)), "a SYN that is sent again and again");
    assert!(!covers(Protocol::Tcp, &answered(flow(1, None))), "a connection that somebody has taken");
    assert!(!covers(Protocol::Udp, &flow(1, Some(11))), "it is translated");
    assert!(!covers(Protocol::Udp, &flow(2, None)), "nobody asked for that one");
    let ipvs = Flow { status: 0, ..flow(1, Some(11)) };
    assert!(
        !covers(Protocol::Udp, &ipvs) && !covers(Protocol::Tcp, &ipvs),
        "IPVS does not say that it translates"
    );
}

#[test]
fn the_kernel_is_asked_for_lost_flows_alone_where_nothing_else_is_wanted() {
    let mut stale = Stale::default();
    let tcp = Frontend { protocol: Protocol::Tcp, ..frontend(1) };
    stale.add_missed([frontend(1), frontend(2), tcp]);
    let lacks = |stale: &Stale| {
        stale.filters().iter().map(|(_, protocol, filter)| (*protocol, filter.lacks)).collect::<Vec<_>>()
    };
    let lost_tcp = (Protocol::Tcp, ct_status::DST_NAT | ct_status::SEEN_REPLY);
    assert_eq!(lacks(&stale), [lost_tcp, (Protocol::Udp, ct_status::DST_NAT)]);
    stale.add(rule(frontend(1), &[], Some(&[11]), false));
    assert_eq!(lacks(&stale), [lost_tcp, (Protocol::Udp, 0)], "translated ones are wanted too");
    let mut newer = Stale::default();
    newer.add_older(stale);
    assert_eq!(lacks(&newer).len(), 2, "what failed is tried again");
}
