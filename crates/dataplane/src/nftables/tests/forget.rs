// SPDX-License-Identifier: Apache-2.0

//! Clients whose endpoint went are forgotten, and no others.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::{Duration, Instant},
};

use model::{Family, Protocol};
use netlink::{
    Errno, Socket,
    fake::{Fault, Faulty},
    nft::{self, Nft},
};

use super::{
    kernel::{in_namespace, load, open},
    make::{Draft, at, decision, forward, ip, pool, same, sampler, sticky},
};
use crate::{
    Affinity, Config, Dataplane, Scope,
    nftables::{
        Nftables,
        affinity::{Departed, Remembered},
        holdings::{Held, Holdings},
        layout::AFFINITY_SIZE,
        program::{Bytes, address_len},
        render,
        script::table,
    },
};

#[test]
fn clients_of_endpoints_that_went_are_forgotten() {
    for family in Family::BOTH {
        in_namespace("clients_of_endpoints_that_went_are_forgotten", || {
            let before = sampler();
            let mut nftables = open();
            load(&mut nftables, &before.plan());
            let service = ip(family, "10.96.0.20");
            let vip = ip(family, "203.0.113.7");
            let node = super::make::node_ip(family);
            let (one, two) = (ip(family, "10.244.1.101"), ip(family, "10.244.1.102"));
            remember(family, [(1, service, 80, one), (2, service, 80, two), (3, vip, 80, one)]);
            remember(family, [(4, node, 30_080, one), (5, node, 30_080, two)]);

            // .101 leaves the cluster IP's pool; the node port's inside keeps it.
            let mut after = before.clone();
            let frontend = at(service, Protocol::Tcp, 80);
            let two_left = forward(pool(family, [1, 102]), model::Masquerade::OffPods);
            after.frontends.insert(frontend, sticky(10_800, same(two_left)));
            let changes = after.changes_since(&before);
            let applied = nftables.apply(&after.plan(), Scope::Only(&changes)).unwrap();
            // The LB address is not sticky, so nobody would have put client 3 there.
            assert!(applied.forgotten <= 2);
            await_remembered(family, &[2, 4, 5]);

            // The node port is no longer sticky.
            let before = after.clone();
            let node_port = super::make::node_port(family, Protocol::Tcp, 30_080);
            after.frontends.get_mut(&node_port).unwrap().affinity = None;
            let changes = after.changes_since(&before);
            nftables.apply(&after.plan(), Scope::Only(&changes)).unwrap();
            await_remembered(family, &[2]);

            // A full turn finds what a lost one has left.
            remember(family, [(6, service, 80, one), (7, service, 80, two)]);
            let mut nftables = open();
            load(&mut nftables, &after.plan());
            await_remembered(family, &[2, 7]);

            // A change of the others leaves it alone.
            let before = after.clone();
            after.frontends.insert(at(ip(family, "10.96.0.30"), Protocol::Tcp, 80), decision_of(family));
            nftables.apply(&after.plan(), Scope::Only(&after.changes_since(&before))).unwrap();
            assert_eq!(remembered(family), [2, 7]);
        });
    }
}

/// The kernel takes a second and more to list so many clients.
#[test]
fn a_change_does_not_wait_until_all_clients_are_forgotten() {
    in_namespace("a_change_does_not_wait_until_all_clients_are_forgotten", || {
        let (mut nftables, before, after) = with_crowd(130_000);
        nftables.apply(&after.plan(), Scope::Only(&after.changes_since(&before))).unwrap();
        assert!(clients().is_none_or(|clients| clients > 65_000), "it has waited");
        await_crowd(65_000);
    });
}

#[test]
fn clients_are_forgotten_while_others_commit() {
    in_namespace("clients_are_forgotten_while_others_commit", || {
        let (mut nftables, before, after) = with_crowd(20_000);
        let mut other = Nft::open().unwrap();
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    let mut batch = nft::Batch::new();
                    let theirs = nft::Table::new(netlink::Family::V4, "theirs");
                    batch.add_table(0, &theirs, nft::Create::IfMissing);
                    batch.delete_table(
                        0,
                        nft::TableRef { family: theirs.family, name: "theirs" },
                        nft::Delete::Existing,
                    );
                    other.commit(&batch).unwrap();
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let applied = nftables.apply(&after.plan(), Scope::Only(&after.changes_since(&before)));
            let failed = applied.is_err();
            let seen = (!failed).then(|| await_crowd(10_000));
            over.store(true, std::sync::atomic::Ordering::Relaxed);
            applied.unwrap();
            seen.unwrap();
        });
    });
}

#[test]
fn the_audit_tells_how_many_clients_are_remembered() {
    in_namespace("the_audit_tells_how_many_clients_are_remembered", || {
        let (mut nftables, _, _) = with_crowd(300);
        let told = nftables.audit().unwrap().affinity;
        let of = |family, clients| Affinity { family, clients, limit: AFFINITY_SIZE };
        match clients() {
            Some(clients) => assert_eq!(told, [of(Family::V4, clients), of(Family::V6, 0)]),
            None => assert_eq!(told, []),
        }
    });
}

#[test]
fn a_table_that_is_made_anew_remembers_the_clients() {
    for family in Family::BOTH {
        in_namespace("a_table_that_is_made_anew_remembers_the_clients", || {
            let plan = sampler().plan();
            let open = |counted_endpoints| {
                Nftables::open(&Config { counted_endpoints, ..Config::default() }).unwrap()
            };
            load(&mut open(1_000), &plan);
            let service = ip(family, "10.96.0.20");
            let (one, two) = (ip(family, "10.244.1.101"), ip(family, "10.244.1.102"));
            let elsewhere = ip(family, "10.244.1.199");
            remember(family, [(1, service, 80, one), (2, service, 80, two), (3, service, 80, elsewhere)]);
            std::thread::sleep(Duration::from_millis(20));

            let mut nftables = open(0);
            let applied = nftables.apply(&plan, Scope::All).unwrap();
            assert!(applied.batches > 0 && applied.warnings.is_empty(), "{applied:?}");
            assert!(Nft::open().unwrap().sets(table(family)).unwrap().iter().all(|set| !set.object.counter));
            // What is not in force is forgotten as ever.
            await_remembered(family, &[1, 2]);
            let whole = |element: &nft::Element<'_>| {
                assert_eq!(element.timeout, Some(Duration::from_secs(600)));
                assert!(
                    element.expires_in.is_some_and(|left| left < Duration::from_secs(600)),
                    "{element:?}"
                );
            };
            assert!(Nft::open().unwrap().glance(table(family), "affinity", whole).unwrap());
        });
    }
}

#[test]
fn a_table_is_made_anew_with_no_more_clients_than_fit() {
    in_namespace("a_table_is_made_anew_with_no_more_clients_than_fit", || {
        with_crowd(100_500);
        let mut nftables = Nftables::open(&Config { counted_endpoints: 1_000, ..Config::default() }).unwrap();
        let applied = nftables.apply(&sampler().plan(), Scope::All).unwrap();
        assert!(applied.warnings[0].starts_with("500 clients that session affinity"), "{applied:?}");
        assert!(clients().is_none_or(|clients| clients == 100_000), "{:?}", clients());
    });
}

#[test]
fn a_table_is_made_anew_without_clients_if_the_kernel_does_not_take_them() {
    in_namespace("a_table_is_made_anew_without_clients_if_the_kernel_does_not_take_them", || {
        with_crowd(4_000);
        let socket = Socket::open(netlink::Protocol::Netfilter).unwrap();
        // The first that is sent is the whole table, and the largest by far.
        let mut refused = false;
        let faulty = Faulty::new(socket, move |request| {
            let refuse = request.is_batch && request.len > 100_000 && !refused;
            refused |= refuse;
            refuse.then_some(Fault::Refused(Errno::NOMEM))
        });
        let config = Config { counted_endpoints: 1_000, ..Config::default() };
        let mut nftables = Nftables::over(Nft::over(faulty), &config);
        let applied = nftables.apply(&sampler().plan(), Scope::All).unwrap();
        assert!(applied.warnings[0].starts_with("the clients that session affinity"), "{applied:?}");
        assert!(clients().is_none_or(|clients| clients == 0), "{:?}", clients());
        let again = Nftables::open(&config).unwrap().apply(&sampler().plan(), Scope::All).unwrap();
        assert!(again.changed_nothing(), "{again:?}");
    });
}

/// An endpoint that is in force on one side is recorded all the time, and still there is an end to the search.
#[test]
fn the_search_ends_while_clients_come() {
    let family = Family::V4;
    let frontend = at(ip(family, "10.96.0.20"), Protocol::Tcp, 80);
    let verdict = |hosts: [u8; 2]| forward(pool(family, hosts), model::Masquerade::Never);
    let entry = |outside| {
        let decision = sticky(60, decision(verdict([101, 102]), verdict(outside)));
        render::entry(&frontend, &decision, None)
    };
    let (old, new) = (entry([101, 102]), entry([102, 103]));
    let mut holdings = Holdings::default();
    let mut departed = Departed::default();
    departed.note(&frontend, Some(&Held::Entry(old)), Some(&new));
    holdings.set(frontend, Some(new));
    let key = Bytes::EMPTY.address(ip(family, "198.51.100.1")).address(ip(family, "10.96.0.20"));
    let key = key.protocol(6).port(80);
    let value = |host: &str| Bytes::EMPTY.address(ip(family, host)).port(8080);

    let mut remembered = Remembered::default();
    remembered.follow(family, &holdings, &departed, false);
    let is_stale =
        |remembered: &Remembered, host| remembered.is_stale(family, &nft::Element::value(&key, &value(host)));
    assert!(remembered.has_work() && is_stale(&remembered, "10.244.1.101"), "it left one side");
    assert!(!is_stale(&remembered, "10.244.1.103") && is_stale(&remembered, "10.244.1.104"));
    remembered.looked(remembered.asked(), false, false);
    assert!(!is_stale(&remembered, "10.244.1.101"), "who is recorded from now on comes from inside");
    remembered.looked(remembered.asked(), true, false);
    assert!(remembered.has_work(), "some may have been passed over");
    remembered.looked(remembered.asked(), true, false);
    assert!(!remembered.has_work());

    // What is asked for during a look takes another one.
    let asked = remembered.asked();
    remembered.follow(family, &holdings, &departed, false);
    remembered.looked(asked, true, true);
    assert!(remembered.has_work() && is_stale(&remembered, "10.244.1.101"));
    remembered.follow(family, &holdings, &departed, false);
    remembered.looked(remembered.asked(), true, false);
    assert!(remembered.has_work(), "what was clear before does not count");
}

/// So many clients, half of them with an endpoint that leaves with the change.
fn with_crowd(clients: u32) -> (Nftables, Draft, Draft) {
    let before = sampler();
    let mut nftables = open();
    load(&mut nftables, &before.plan());
    let service = ip(Family::V4, "10.96.0.20");
    let endpoints = [ip(Family::V4, "10.244.1.101"), ip(Family::V4, "10.244.1.102")];
    let all: Vec<u32> = (0..clients).collect();
    for some in all.chunks(4_000) {
        let of =
            |at: &u32| (Ipv4Addr::from(0xac10_0000 + at).into(), service, 80, endpoints[*at as usize % 2]);
        put(Family::V4, some.iter().map(of));
    }
    let mut after = before.clone();
    let left = forward(pool(Family::V4, [1, 102]), model::Masquerade::OffPods);
    after.frontends.insert(at(service, Protocol::Tcp, 80), sticky(10_800, same(left)));
    (nftables, before, after)
}

/// Returns when so many clients are left.
fn await_crowd(clients: u32) {
    let began = Instant::now();
    loop {
        match self::clients() {
            Some(left) if left != clients => {
                assert!(began.elapsed() < Duration::from_secs(60), "{left} instead of {clients}");
            }
            _ => return,
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// How many are remembered. Older kernels do not tell.
fn clients() -> Option<u32> {
    let sizes = Nft::open().unwrap().set_sizes(table(Family::V4)).unwrap();
    sizes.iter().find(|(name, _)| name == "affinity").and_then(|(_, size)| *size)
}

fn decision_of(family: Family) -> model::Decision {
    let inside = forward(pool(family, [1, 2]), model::Masquerade::OffPods);
    let outside = forward(pool(family, [1]), model::Masquerade::Never);
    decision(inside, outside)
}

/// Puts clients into the affinity map, as packets would.
pub(super) fn remember<const N: usize>(family: Family, clients: [(u8, IpAddr, u16, IpAddr); N]) {
    let full = |(client, destination, port, endpoint)| {
        (ip(family, &format!("198.51.100.{client}")), destination, port, endpoint)
    };
    put(family, clients.into_iter().map(full));
}

/// Client, destination, port, endpoint.
fn put(family: Family, clients: impl Iterator<Item = (IpAddr, IpAddr, u16, IpAddr)>) {
    let mut batch = nft::Batch::new();
    let mut writer = batch.add_elements(0, table(family), "affinity", nft::Create::Exclusive);
    for (client, destination, port, endpoint) in clients {
        let key = Bytes::EMPTY.address(client).address(destination).protocol(6).port(port);
        let value = Bytes::EMPTY.address(endpoint).port(8080);
        let timeout = Some(Duration::from_secs(600));
        writer.push(&nft::Element { timeout, ..nft::Element::value(&key, &value) });
    }
    drop(writer);
    Nft::open().unwrap().commit(&batch).unwrap();
}

/// Small as it is, it is hardly ever waited for.
fn await_remembered(family: Family, clients: &[u8]) {
    let began = Instant::now();
    while remembered(family) != clients {
        assert!(began.elapsed() < Duration::from_secs(10), "{:?} instead of {clients:?}", remembered(family));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The last bytes of the clients in the affinity map.
fn remembered(family: Family) -> Vec<u8> {
    let mut clients = Vec::new();
    let len = address_len(family);
    Nft::open()
        .unwrap()
        .elements(table(family), "affinity", |visit| match visit {
            nft::Visit::Start => clients.clear(),
            nft::Visit::Element(element) => clients.push(element.key[len - 1]),
        })
        .unwrap();
    clients.sort_unstable();
    clients
}
