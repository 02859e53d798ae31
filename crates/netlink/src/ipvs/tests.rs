// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::{fake::Recorder, route::Route, testing::scratch_netns};

const TCP: u8 = 6;
const UDP: u8 = 17;

fn key(address: &str, protocol: u8, port: u16) -> ServiceKey {
    ServiceKey::At { protocol, address: address.parse().expect("an address"), port }
}

fn dest(address: &str, port: u16, weight: u32) -> Dest {
    let address = address.parse().expect("an address");
    Dest { key: DestKey { address, port }, weight, forward: Forward::Nat }
}

/// An answer of the control protocol that gives IPVS the number 30, and its acknowledgement.
fn introduction() -> [Result<Vec<u8>, Error>; 1] {
    let mut writer = Writer::new();
    let start = writer.begin_message(wire::GENL_ID_CTRL, 0, 1);
    wire::header(&mut writer, 1);
    writer.attr(1, &30u16.to_ne_bytes());
    writer.end_message(start);
    let start = writer.begin_message(2, 0, 1);
    writer.raw(&[0; 20]);
    writer.end_message(start);
    [Ok(writer.bytes().to_vec())]
}

#[test]
fn the_number_is_asked_for() {
    let mut recorder = Recorder::new();
    recorder.answer_next(introduction());
    let ipvs = Ipvs::over(recorder).expect("it is told");
    assert_eq!(ipvs.family, 30);
}

/// As seen from `ipvsadm -A -t 10.96.0.1:80 -s rr` and `-a -r 10.0.0.1:8080 -m`, attribute for attribute.
#[test]
fn requests_are_what_the_kernel_expects() {
    let bytes = |change: &Change| {
        let mut writer = Writer::new();
        wire::write_change(&mut writer, change);
        writer.bytes().to_vec()
    };
    let web = key("10.96.0.1", TCP, 80);
    let address = |last: u8| [&[20, 0, 3, 0, 10, 96, 0, last][..], &[0; 12]].concat();
    let named =
        [&[6, 0, 1, 0, 2, 0, 0, 0, 6, 0, 2, 0, 6, 0, 0, 0][..], &address(1), &[6, 0, 4, 0, 0, 80, 0, 0]]
            .concat();
    let expected = [
        &[1, 1, 0, 0, 84, 0, 1, 0x80][..],
        &named,
        &[7, 0, 6, 0, b'r', b'r', 0, 0],
        &[12, 0, 7, 0, 1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff],
        &[8, 0, 8, 0, 0x10, 0x0e, 0, 0],
        &[8, 0, 9, 0, 0xff, 0xff, 0xff, 0xff],
    ]
    .concat();
    let service = Service { key: web, scheduler: "rr".to_owned(), flags: flags::PERSISTENT, timeout: 3600 };
    assert_eq!(bytes(&Change::AddService(service)), expected);

    let expected =
        [&[7, 1, 0, 0, 48, 0, 1, 0x80][..], &named, &[40, 0, 2, 0x80, 20, 0, 1, 0, 10, 0, 0, 1], &[0; 12]]
            .concat();
    let expected = [&expected[..], &[6, 0, 2, 0, 0x1f, 0x90, 0, 0, 6, 0, 11, 0, 2, 0, 0, 0]].concat();
    assert_eq!(bytes(&Change::RemoveDest(web, dest("10.0.0.1", 8080, 1).key)), expected);
}

#[test]
fn a_kernel_that_answers_too_little_is_noticed() {
    let mut recorder = Recorder::new();
    recorder.answer_next(introduction());
    let mut ipvs = Ipvs::over(recorder).expect("it is told");
    let removal = Change::RemoveService(key("10.96.0.1", TCP, 80));
    assert_eq!(ipvs.apply(std::slice::from_ref(&removal)), Ok(vec![]));
    ipvs.channel.transport_mut().answer_next([Ok(vec![])]);
    assert!(ipvs.apply(&[removal]).is_err());
}

/// Where the kernel has no IPVS there is nothing to test; where a CI says it must be there, it must.
fn scratch_ipvs(test: &str) -> Option<Ipvs> {
    let netns = scratch_netns(test)?;
    // Without a device that is up there are no local addresses, and real servers are refused.
    let mut route = Route::open_in(&netns).expect("a socket");
    let lo = route.link_index("lo").expect("lo");
    route.set_up(lo, true).expect("lo up");
    match Ipvs::open_in(&netns) {
        Ok(ipvs) => Some(ipvs),
        Err(error) if error.is_not_found() && std::env::var_os("PORTOLAN_HAS_IPVS").is_none() => {
            println!("skipped {test}: this kernel has no IPVS; `make test-vm` runs it on one that does");
            None
        }
        Err(error) => panic!("{test}: {error}"),
    }
}

#[test]
fn what_is_written_is_read_back() {
    let Some(mut ipvs) = scratch_ipvs("what_is_written_is_read_back") else { return };
    for (vip, server) in [("10.96.0.1", "10.0.0.1"), ("fd00::96", "fd00::1")] {
        let (web, dns) = (key(vip, TCP, 80), key(vip, UDP, 53));
        let plain = Service { key: web, scheduler: "rr".to_owned(), flags: 0, timeout: 0 };
        let sticky = Service { key: dns, scheduler: "rr".to_owned(), flags: flags::PERSISTENT, timeout: 180 };
        let servers = [dest(server, 8080, 1), dest(server, 8081, 0)];
        let refused = ipvs.apply(&[
            Change::AddService(plain.clone()),
            Change::AddDest(web, servers[0]),
            Change::AddDest(web, servers[1]),
            Change::AddService(sticky.clone()),
        ]);
        assert_eq!(refused, Ok(vec![]), "{vip}");
        let held = |ipvs: &mut Ipvs, key| {
            let services = ipvs.services().expect("a list");
            services.into_iter().map(|held| held.service).find(|service| service.key == key)
        };
        let bare =
            |service: Option<Service>| service.map(|s| Service { flags: s.flags & !flags::HASHED, ..s });
        assert_eq!(bare(held(&mut ipvs, web)), Some(plain.clone()));
        assert_eq!(bare(held(&mut ipvs, dns)), Some(sticky));
        let mut read: Vec<Dest> = ipvs.dests(web).expect("a list").iter().map(|held| held.dest).collect();
        read.sort_by_key(|dest| dest.key);
        assert_eq!(read, servers);

        let changes = [
            Change::AddService(plain),
            Change::SetDest(web, dest(server, 8081, 7)),
            Change::RemoveDest(web, servers[0].key),
            Change::RemoveDest(web, servers[0].key),
            Change::RemoveService(dns),
            Change::RemoveService(dns),
        ];
        let refused = ipvs.apply(&changes).expect("answers");
        assert_eq!(refused.iter().map(|refusal| refusal.index).collect::<Vec<_>>(), [0, 3, 5], "{refused:?}");
        assert!(refused.iter().all(|refusal| refusal.is_harmless(&changes[refusal.index])), "{refused:?}");
        let read: Vec<Dest> = ipvs.dests(web).expect("a list").iter().map(|held| held.dest).collect();
        assert_eq!(read, [dest(server, 8081, 7)]);
        assert_eq!(held(&mut ipvs, dns), None);
    }
}

#[test]
fn many_changes_go_in_few_datagrams() {
    let Some(mut ipvs) = scratch_ipvs("many_changes_go_in_few_datagrams") else { return };
    let services: Vec<Change> = (0..1000)
        .map(|port| Service {
            key: key("10.96.0.1", TCP, 1 + port),
            scheduler: "rr".to_owned(),
            flags: 0,
            timeout: 0,
        })
        .map(Change::AddService)
        .collect();
    assert_eq!(ipvs.apply(&services), Ok(vec![]));
    assert_eq!(ipvs.services().expect("a list").len(), 1000);
}

#[test]
fn timeouts_are_set_and_told() {
    let Some(mut ipvs) = scratch_ipvs("timeouts_are_set_and_told") else { return };
    let before = ipvs.timeouts().expect("an answer");
    ipvs.set_timeouts(Timeouts { tcp: 1234, ..Timeouts::default() }).expect("it is set");
    assert_eq!(ipvs.timeouts(), Ok(Timeouts { tcp: 1234, ..before }), "0 leaves what is");
}
