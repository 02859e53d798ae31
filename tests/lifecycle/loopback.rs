// SPDX-License-Identifier: Apache-2.0

//! Node ports on the node's own loopback addresses, of both families and protocols.

use std::{net::SocketAddr, time::Duration};

use lab::{Answer, Flow, Route, Transport};
use stage::eventually;

use crate::bed::{Bed, NODE_PORT};

#[test]
fn node_ports_are_served_on_loopback() {
    for mode in ["nftables", "userspace"] {
        let Some(mut bed) = Bed::build() else { return };
        bed.start_with(&["--nodeport-addresses=primary,localhost", &format!("--proxy-mode={mode}")]);
        for address in ["127.0.0.1", "::1"] {
            for transport in [Transport::Tcp, Transport::Udp] {
                let source = address.parse().expect("an address");
                let destination = SocketAddr::new(source, NODE_PORT);
                eventually("it answers", || {
                    let patience = Duration::from_secs(2);
                    let answer = bed.node().run(|| {
                        let flow = Flow::open(Route { source, destination, transport }, patience);
                        flow.map_or_else(|answer| answer, |mut flow| flow.ask(patience))
                    });
                    match answer.expect("node-a can be entered") {
                        Answer::Answered(_) => Ok(()),
                        other => Err(format!("{mode}, {destination}, {transport:?}: {other:?}")),
                    }
                });
            }
        }
    }
}
