// SPDX-License-Identifier: Apache-2.0

//! Clients whose endpoint went are forgotten, and no others.

use model::{Family, Protocol};
use netlink::nft::{self, Nft};

use super::{
    kernel::{in_namespace, load, open},
    make::{at, decision, forward, ip, pool, same, sampler, sticky},
};
use crate::{Dataplane, Scope, names::TABLE, nftables::layout::wire};

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
            assert_eq!(applied.forgotten, 2);
            assert_eq!(remembered(family), [2, 4, 5]);

            // The node port is no longer sticky.
            let before = after.clone();
            let node_port = super::make::node_port(family, Protocol::Tcp, 30_080);
            after.frontends.get_mut(&node_port).unwrap().affinity = None;
            let changes = after.changes_since(&before);
            nftables.apply(&after.plan(), Scope::Only(&changes)).unwrap();
            assert_eq!(remembered(family), [2]);

            // A full turn finds what a lost one has left.
            remember(family, [(6, service, 80, one), (7, service, 80, two)]);
            let applied = open().apply(&after.plan(), Scope::All).unwrap();
            assert_eq!(applied.forgotten, 1);
            assert_eq!(remembered(family), [2, 7]);

            // A change of the others leaves it alone.
            let before = after.clone();
            after.frontends.insert(at(ip(family, "10.96.0.30"), Protocol::Tcp, 80), decision_of(family));
            nftables.apply(&after.plan(), Scope::Only(&after.changes_since(&before))).unwrap();
            assert_eq!(remembered(family), [2, 7]);
        });
    }
}

fn decision_of(family: Family) -> model::Decision {
    let inside = forward(pool(family, [1, 2]), model::Masquerade::OffPods);
    let outside = forward(pool(family, [1]), model::Masquerade::Never);
    decision(inside, outside)
}

/// Puts clients into the affinity map, as packets would.
pub(super) fn remember<const N: usize>(
    family: Family,
    clients: [(u8, std::net::IpAddr, u16, std::net::IpAddr); N],
) {
    use crate::nftables::program::Bytes;
    let table = nft::TableRef { family: wire(family), name: TABLE };
    let mut batch = nft::Batch::new();
    let mut writer = batch.add_elements(0, table, "affinity", nft::Create::Exclusive);
    for (client, destination, port, endpoint) in clients {
        let client = ip(family, &format!("198.51.100.{client}"));
        let key = Bytes::EMPTY.address(client).address(destination).protocol(6).port(port);
        let value = Bytes::EMPTY.address(endpoint).port(8080);
        let timeout = Some(std::time::Duration::from_secs(600));
        writer.push(&nft::Element { timeout, ..nft::Element::value(&key, &value) });
    }
    drop(writer);
    Nft::open().unwrap().commit(&batch).unwrap();
}

/// The last bytes of the clients in the affinity map.
fn remembered(family: Family) -> Vec<u8> {
    let table = nft::TableRef { family: wire(family), name: TABLE };
    let mut clients = Vec::new();
    let len = crate::nftables::program::address_len(family);
    Nft::open()
        .unwrap()
        .elements(table, "affinity", |visit| match visit {
            nft::Visit::Start => clients.clear(),
            nft::Visit::Element(element) => clients.push(element.key[len - 1]),
        })
        .unwrap();
    clients.sort_unstable();
    clients
}
