// SPDX-License-Identifier: Apache-2.0

use std::{net::SocketAddr, time::Duration};

use crate::{
    Answer, Lab, Layout, Route, Transport,
    address::{self, Version, address_of},
};

const PATIENCE: Duration = Duration::from_secs(10);
const TRANSPORTS: [Transport; 3] = [Transport::Tcp, Transport::Udp, Transport::Sctp];

/// `None`, with a line, without the privileges; a failure where a CI promises them.
fn lab() -> Option<Lab> {
    match Lab::build(Layout::default()) {
        Ok(lab) => Some(lab),
        Err(error) if std::env::var_os("CI").is_none() && !rustix::process::geteuid().is_root() => {
            eprintln!("skipped: no privileges to build a lab: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn at(version: Version, name: &str, port: u16) -> SocketAddr {
    SocketAddr::new(version.address(address_of(name).unwrap()), port)
}

#[test]
fn everybody_reaches_everybody_directly() {
    let Some(mut lab) = lab() else { return };
    let targets = ["a1", "b1", "c1", "c1023", "node-a", "node-b", "client", "outside"];
    for (version, transport) in Version::BOTH.iter().flat_map(|version| TRANSPORTS.map(|t| (*version, t))) {
        for target in targets {
            lab.respond(target, transport, at(version, target, 8080)).unwrap();
        }
        for from in ["a1", "a2", "b1", "c7", "node-a", "node-b", "client", "client2"] {
            for target in targets.into_iter().filter(|target| *target != from) {
                let source = version.address(address_of(from).unwrap());
                let route = Route { source, destination: at(version, target, 8080), transport };
                let answer = lab.ask(from, route, PATIENCE).unwrap();
                let Answer::Answered(reply) = answer else { panic!("{from} {route:?}: {answer:?}") };
                assert_eq!(reply.by, target);
                assert_eq!(reply.at, at(version, target, 8080));
                assert_eq!(reply.source_seen.ip(), source);
            }
        }
    }
}

#[test]
fn the_outside_answers_for_what_nobody_owns() {
    let Some(mut lab) = lab() else { return };
    for (version, transport) in Version::BOTH.iter().flat_map(|version| TRANSPORTS.map(|t| (*version, t))) {
        let destination = SocketAddr::new(version.address(address::SERVICE_CIDR.nth(10)), 80);
        assert_eq!(lab.owner(destination.ip()), "outside");
        lab.respond("outside", transport, destination).unwrap();
        let source = version.address(address::CLIENTS.nth(5));
        let answer = lab.ask("clients", Route { source, destination, transport }, PATIENCE).unwrap();
        let Answer::Answered(reply) = answer else { panic!("{transport:?} {answer:?}") };
        assert_eq!((reply.by.as_str(), reply.source_seen.ip()), ("outside", source));
    }
}

#[test]
fn a_flow_goes_on_and_a_closed_port_refuses() {
    let Some(mut lab) = lab() else { return };
    for version in Version::BOTH {
        for transport in TRANSPORTS {
            lab.respond("b1", transport, at(version, "b1", 8080)).unwrap();
            let source = version.address(address_of("a1").unwrap());
            let route = Route { source, destination: at(version, "b1", 8080), transport };
            let mut flow = lab.open("a1", route, PATIENCE).unwrap().unwrap();
            let first = flow.ask(PATIENCE);
            let Answer::Answered(reply) = &first else { panic!("{route:?}: {first:?}") };
            for _ in 0..3 {
                let next = flow.ask(PATIENCE);
                let Answer::Answered(again) = &next else { panic!("{route:?}: {next:?}") };
                assert_eq!(again.source_seen, reply.source_seen);
            }
        }
        for transport in [Transport::Tcp, Transport::Udp] {
            let source = version.address(address_of("a1").unwrap());
            let route = Route { source, destination: at(version, "b1", 9), transport };
            assert_eq!(lab.ask("a1", route, PATIENCE).unwrap(), Answer::Refused);
        }
    }
}

#[test]
fn node_a_gets_and_loses_addresses() {
    let Some(mut lab) = lab() else { return };
    for version in Version::BOTH {
        let extra = version.address(address::EXTERNAL.nth(7));
        let route = Route {
            source: version.address(address::CLIENT),
            destination: SocketAddr::new(extra, 80),
            transport: Transport::Tcp,
        };
        lab.respond("outside", Transport::Tcp, route.destination).unwrap();
        lab.readdress(&[extra]).unwrap();
        assert_eq!(lab.owner(extra), "node-a");
        assert_eq!(lab.ask("client", route, PATIENCE).unwrap(), Answer::Refused);
        lab.readdress(&[]).unwrap();
        assert!(
            matches!(lab.ask("client", route, PATIENCE).unwrap(), Answer::Answered(reply) if reply.by == "outside")
        );
    }
}
