// SPDX-License-Identifier: Apache-2.0

//! The userspace mode, where a process carries the connections: it ends, it begins, another mode takes over.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use lab::{
    Answer, Flow, Route, Transport,
    address::{Version, address_of},
};
use stage::{eventually, load::Load};

use crate::bed::{Bed, cluster_ip, everywhere};

const USERSPACE: [&str; 2] = ["--proxy-mode=userspace", "--userspace-drain=2s"];
/// Connections between two events: so many that each line has some.
const ROUND: u64 = 100;

/// Runs `event` under load, with the daemon serving in userspace mode before.
fn under_load(bed: &mut Bed, what: &str, event: impl FnOnce(&mut Bed, &dyn Fn())) {
    bed.start_with(&USERSPACE);
    let lab = Arc::clone(&bed.lab);
    thread::scope(|scope| {
        let load = Load::begin_new(scope, &lab, &everywhere());
        let go_on = || load.go_on(ROUND);
        go_on();
        event(bed, &go_on);
        bed.daemon.must_serve();
        go_on();
        load.end(what);
    });
}

/// While no process is there, the kernel serves; nobody is refused.
#[test]
fn a_restart_refuses_nobody() {
    let Some(mut bed) = Bed::build() else { return };
    under_load(&mut bed, "restart in userspace mode", |bed, go_on| {
        for _ in 0..3 {
            bed.daemon.stop();
            go_on();
            bed.start_with(&USERSPACE);
            go_on();
        }
    });
}

#[test]
fn the_mode_can_be_changed_and_changed_back() {
    let Some(mut bed) = Bed::build() else { return };
    under_load(&mut bed, "to nftables mode and back", |bed, go_on| {
        bed.daemon.stop();
        bed.start();
        go_on();
        eventually("what the userspace mode left is gone", || {
            let left = bed.command(&["nft", "list", "tables"]) + &bed.command(&["ip", "rule"]);
            if left.contains("portolan-userspace") || left.contains("20043") { Err(left) } else { Ok(()) }
        });
        bed.daemon.stop();
        bed.start_with(&USERSPACE);
        go_on();
        eventually("what the nftables mode left is gone", || match bed.command(&["nft", "list", "tables"]) {
            tables if tables.lines().any(|line| line == "table ip portolan") => Err(tables),
            _ => Ok(()),
        });
        go_on();
    });
}

/// A connection that is open when the process is told to end goes on until the bound, and then ends in good order.
#[test]
fn open_connections_are_drained() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start_with(&USERSPACE);
    let source = Version::V4.address(address_of("client").expect("it is in the lab"));
    let destination = std::net::SocketAddr::new(cluster_ip(10), 80);
    let route = Route { source, destination, transport: Transport::Tcp };
    let lab = Arc::clone(&bed.lab);
    let mut flow: Flow =
        lab.open("client", route, Duration::from_secs(5)).expect("in the lab").expect("open");
    assert!(matches!(flow.ask(Duration::from_secs(5)), Answer::Answered(_)));
    let begun = Instant::now();
    thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut answers = 0;
            while matches!(flow.ask(Duration::from_secs(5)), Answer::Answered(_)) {
                answers += 1;
                thread::sleep(Duration::from_millis(20));
            }
            (answers, begun.elapsed())
        });
        bed.daemon.stop();
        let (answers, lasted) = asking.join().expect("it does not panic");
        assert!(answers > 20 && lasted > Duration::from_millis(1500), "{answers} answers in {lasted:?}");
    });
}
