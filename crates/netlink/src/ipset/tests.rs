// SPDX-License-Identifier: Apache-2.0

//! With the kernel's own sets, in a network namespace of the test's own.

use super::*;
use crate::testing::scratch_netns;

const TCP: u8 = 6;
const SCTP: u8 = 132;

fn address(host: &str, protocol: u8, port: u16) -> Element {
    Element::Address { address: host.parse().expect("an address"), protocol, port }
}

fn pair(host: &str, other: &str, prefix: u8) -> Element {
    let parse = |text: &str| text.parse().expect("an address");
    Element::Pair { address: parse(host), protocol: TCP, port: 80, other: parse(other), prefix }
}

fn spec(name: &str, kind: SetKind, family: Family) -> Spec {
    Spec { name: name.to_owned(), kind, family, max_elements: 100_000 }
}

/// Of each kind and family: a set and what it holds.
fn samples() -> Vec<(Spec, Vec<Element>)> {
    vec![
        (
            spec("A4", SetKind::HashIpPort, Family::V4),
            vec![address("10.96.0.1", TCP, 80), address("10.96.0.1", SCTP, 80)],
        ),
        (spec("A6", SetKind::HashIpPort, Family::V6), vec![address("fd00::1", TCP, 443)]),
        (spec("P4", SetKind::HashIpPortIp, Family::V4), vec![pair("10.0.0.1", "10.0.0.1", 32)]),
        (spec("P6", SetKind::HashIpPortIp, Family::V6), vec![pair("fd00::1", "fd00::1", 128)]),
        (
            spec("N4", SetKind::HashIpPortNet, Family::V4),
            vec![pair("10.96.0.1", "192.0.2.0", 24), pair("10.96.0.1", "198.51.100.7", 32)],
        ),
        (spec("N6", SetKind::HashIpPortNet, Family::V6), vec![pair("fd00::1", "2001:db8::", 32)]),
        (
            spec("I4", SetKind::HashIp, Family::V4),
            vec![Element::Ip("10.96.0.1".parse().expect("an address"))],
        ),
        (spec("I6", SetKind::HashIp, Family::V6), vec![Element::Ip("fd00::1".parse().expect("an address"))]),
        (
            spec("M4", SetKind::HashIpPortMark, Family::V4),
            vec![Element::Marked {
                address: "10.96.0.1".parse().expect("an address"),
                protocol: TCP,
                port: 80,
                mark: 0x1234_5678,
            }],
        ),
        (
            spec("B", SetKind::BitmapPort, Family::V4),
            vec![Element::Port(1), Element::Port(30_080), Element::Port(u16::MAX)],
        ),
    ]
}

#[test]
fn what_is_written_is_read_back() {
    let Some(netns) = scratch_netns("what_is_written_is_read_back") else { return };
    let mut ipset = Ipset::open_in(&netns).expect("a socket");
    for (spec, mut elements) in samples() {
        ipset.create(&spec).unwrap_or_else(|error| panic!("{}: {error}", spec.name));
        assert!(ipset.create(&spec).expect_err("it is there").already_exists());
        ipset.add(&spec.name, spec.family, &elements).expect("they are added");
        ipset.add(&spec.name, spec.family, &elements).expect("again is no error");
        let mut held = ipset.read(&spec.name).expect("an answer").expect("it is there");
        held.elements.sort_unstable();
        elements.sort_unstable();
        assert_eq!((held.kind, &held.elements), (Some(spec.kind), &elements), "{}", spec.name);
        if spec.kind != SetKind::BitmapPort {
            assert_eq!((held.family, held.max_elements), (Some(spec.family), spec.max_elements));
        }
        ipset.remove(&spec.name, spec.family, &elements[..1]).expect("it is removed");
        ipset.remove(&spec.name, spec.family, &elements[..1]).expect("again is no error");
        assert_eq!(
            ipset.read(&spec.name).expect("an answer").expect("there").elements.len(),
            elements.len() - 1
        );
    }
    let mut names: Vec<String> = ipset.heads().expect("a list").into_iter().map(|held| held.name).collect();
    names.sort();
    assert_eq!(names, ["A4", "A6", "B", "I4", "I6", "M4", "N4", "N6", "P4", "P6"]);
    assert!(ipset.heads().expect("a list").iter().all(|held| held.elements.is_empty()));
    for name in names {
        assert_eq!(ipset.destroy(&name), Ok(true));
        assert_eq!(ipset.destroy(&name), Ok(false));
    }
    assert_eq!(ipset.list(), Ok(vec![]));
    assert_eq!(ipset.read("A4"), Ok(None));
}

#[test]
fn sets_can_be_exchanged() {
    let Some(netns) = scratch_netns("sets_can_be_exchanged") else { return };
    let mut ipset = Ipset::open_in(&netns).expect("a socket");
    let small = Spec { max_elements: 2, ..spec("SMALL", SetKind::HashIpPort, Family::V4) };
    let large = Spec { name: "LARGE".to_owned(), max_elements: 4, ..small.clone() };
    for spec in [&small, &large] {
        ipset.create(spec).expect("it is made");
    }
    let elements = [80, 81, 82].map(|port| address("10.96.0.1", TCP, port));
    ipset.add("SMALL", Family::V4, &elements).expect_err("it has no room");
    ipset.add("LARGE", Family::V4, &elements).expect("it has");
    ipset.swap("SMALL", "LARGE").expect("they are of one kind");
    let held = ipset.read("SMALL").expect("an answer").expect("it is there");
    assert_eq!((held.max_elements, held.elements.len()), (4, 3));
    ipset.swap("SMALL", "NONE").expect_err("there is none");
}

#[test]
fn a_large_set_comes_in_many_parts() {
    let Some(netns) = scratch_netns("a_large_set_comes_in_many_parts") else { return };
    let mut ipset = Ipset::open_in(&netns).expect("a socket");
    let elements: Vec<Element> = (1..=20_000).map(|port| address("10.96.0.1", TCP, port)).collect();
    let spec = spec("LARGE", SetKind::HashIpPort, Family::V4);
    ipset.create(&spec).expect("it is made");
    ipset.add(&spec.name, spec.family, &elements).expect("they are added");
    let mut sets = ipset.list().expect("a list");
    sets[0].elements.sort_unstable();
    assert_eq!((sets.len(), &sets[0].elements), (1, &elements));
    ipset.remove(&spec.name, spec.family, &elements).expect("they are removed");
    assert_eq!(ipset.read("LARGE").expect("an answer").expect("it is there").elements, []);
}
