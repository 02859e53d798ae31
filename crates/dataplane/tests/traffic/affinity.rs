// SPDX-License-Identifier: Apache-2.0

//! Clients that come back.

use lab::Transport;
use model::{Masquerade, Protocol};

use crate::stage::{on_stage, same, sticky};

const VIP: &str = "10.96.0.10";

#[test]
fn a_client_comes_back_to_its_endpoint() {
    on_stage("a_client_comes_back_to_its_endpoint", |stage| {
        let all = ["a1", "a2", "b1", "b2"];
        let service = stage.at(VIP, Protocol::Tcp, 80);
        let node_port = stage.node_port(Protocol::Tcp, 30_080);
        stage.set(service, sticky(60, same(stage.forward(&all, Masquerade::OffPods))));
        stage.set(node_port, sticky(10_800, same(stage.forward(&all, Masquerade::Always))));
        for (to, port, frontend, masquerade) in
            [(VIP, 80, service, Masquerade::OffPods), ("192.168.0.1", 30_080, node_port, Masquerade::Always)]
        {
            for from in ["client", "client2", "a3", "node-a"] {
                let tally = stage.tally(from, to, port, 12);
                assert_eq!(tally.len(), 1, "{from} to {to}: {tally:?}");
            }
            // Many clients meet all endpoints.
            let first = stage.reply("client", to, port, Transport::Tcp).by;
            let left: Vec<&str> = all.iter().copied().filter(|name| *name != first).collect();
            let applied = stage.set(frontend, sticky(60, same(stage.forward(&left, masquerade))));
            assert!(applied.forgotten > 0);
            let next = stage.tally("client", to, port, 12);
            assert!(next.len() == 1 && !next.contains_key(&first), "{first} is gone: {next:?}");
            // When it comes back, its clients do not.
            stage.set(frontend, sticky(60, same(stage.forward(&all, masquerade))));
            assert_eq!(stage.tally("client", to, port, 12).into_keys().next(), next.into_keys().next());
        }
    });
}

#[test]
fn an_endpoint_in_the_nodes_own_network_is_remembered() {
    on_stage("an_endpoint_in_the_nodes_own_network_is_remembered", |stage| {
        // With one endpoint on the node and one elsewhere, twelve answers alike are no chance.
        let service = stage.at(VIP, Protocol::Tcp, 80);
        stage.set(service, sticky(60, same(stage.forward(&["node-a", "b1"], Masquerade::Never))));
        for from in ["client", "client2", "a3", "a1", "a2"] {
            let tally = stage.tally(from, VIP, 80, 12);
            assert_eq!(tally.len(), 1, "{from}: {tally:?}");
        }
    });
}

#[test]
fn a_client_is_forgotten_in_time() {
    on_stage("a_client_is_forgotten_in_time", |stage| {
        let service = stage.at(VIP, Protocol::Tcp, 80);
        let all = ["a1", "a2", "a3", "b1", "b2"];
        stage.set(service, sticky(1, same(stage.forward(&all, Masquerade::OffPods))));
        let met: std::collections::BTreeSet<String> = (0..12)
            .map(|_| {
                std::thread::sleep(std::time::Duration::from_millis(1_100));
                stage.reply("client", VIP, 80, Transport::Tcp).by
            })
            .collect();
        assert!(met.len() > 1, "after its time a client is balanced anew: {met:?}");
    });
}
