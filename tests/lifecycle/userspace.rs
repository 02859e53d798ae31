// SPDX-License-Identifier: Apache-2.0

//! The userspace mode, where a process carries the connections: it ends, it begins, another mode takes over.

use std::{
    net::{SocketAddr, TcpListener},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use lab::{
    Answer, Flow, Lab, Route, Transport,
    address::{Version, address_of},
};
use stage::{Daemon, eventually, load::Load};

use crate::bed::{Bed, Traffic, cluster_ip, everywhere, program, round};

const USERSPACE: [&str; 2] = ["--proxy-mode=userspace", "--userspace-drain=2s"];
/// While no process is there, the kernel serves; nobody is refused.
#[test]
fn a_restart_refuses_nobody() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start_with(&USERSPACE);
    restart(&mut bed, "restart in userspace mode");
}

fn restart(bed: &mut Bed, what: &str) {
    bed.under_load(Traffic::New, what, |bed, go_on| {
        for _ in 0..3 {
            bed.daemon.stop();
            go_on();
            bed.start_with(&USERSPACE);
            go_on();
        }
    });
}

/// As after ipvs mode, whose link has the addresses of services until the last of its connections has ended.
#[test]
fn a_restart_refuses_nobody_where_the_node_has_the_address() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start_with(&USERSPACE);
    bed.command(&["ip", "address", "add", &format!("{}/32", cluster_ip(10)), "dev", "lo"]);
    restart(&mut bed, "restart in userspace mode, with a local address");
}

#[test]
fn the_mode_can_be_changed_and_changed_back() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start_with(&USERSPACE);
    bed.under_load(Traffic::New, "to nftables mode and back", |bed, go_on| {
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
    let lab = Arc::clone(&bed.lab);
    let mut flow = open_connection(&lab);
    thread::scope(|scope| {
        let asking = scope.spawn(|| ask_to_the_end(&mut flow));
        bed.daemon.stop();
        asking.join().expect("it goes on for a while");
    });
}

/// It is answered for a while that is worth its name, and then no more.
fn ask_to_the_end(flow: &mut Flow) {
    let (begun, mut answers) = (Instant::now(), 0);
    while matches!(flow.ask(Duration::from_secs(5)), Answer::Answered(_)) {
        answers += 1;
        thread::sleep(Duration::from_millis(20));
    }
    let lasted = begun.elapsed();
    assert!(answers > 20 && lasted > Duration::from_millis(1500), "{answers} answers in {lasted:?}");
}

/// A crash takes the open connections with it, but who comes while nobody listens is not refused: his packet is sent again
/// a second later, and meets the next process.
#[test]
fn after_a_crash_new_clients_wait_for_the_next_process() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start_with(&USERSPACE);
    let lab = Arc::clone(&bed.lab);
    for _ in 0..2 {
        bed.daemon.kill();
        thread::scope(|scope| {
            let clients: Vec<_> = everywhere()
                .into_iter()
                .map(|line| {
                    let lab = &lab;
                    scope.spawn(move || (line, ask_once(lab, &line)))
                })
                .collect();
            thread::sleep(Duration::from_millis(300));
            bed.start_with(&USERSPACE);
            for client in clients {
                let (line, answer) = client.join().expect("it does not panic");
                assert!(matches!(answer, Answer::Answered(_)), "{line:?}: {answer:?}");
            }
        });
    }
}

fn ask_once(lab: &Lab, line: &stage::load::Line) -> Answer {
    let version = if line.to.is_ipv4() { Version::V4 } else { Version::V6 };
    let source = version.address(address_of(line.from).expect("it is in the lab"));
    let route = Route { source, destination: line.to, transport: Transport::Tcp };
    let patience = Duration::from_secs(20);
    match lab.open(line.from, route, patience).expect("in the lab") {
        Ok(mut flow) => flow.ask(patience),
        Err(answer) => answer,
    }
}

const BIND: [&str; 3] = ["--proxy-mode=userspace", "--userspace-bind", "--userspace-drain=5s"];

/// With listeners on the service addresses themselves there is no packet filter, and a link of ours has the addresses.
/// Somebody who takes one away is noticed, stopping removes nothing, `--cleanup` does.
#[test]
fn no_packet_filter_is_needed() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start_with(&BIND);
    for line in everywhere() {
        let answer = ask_once(&bed.lab, &line);
        assert!(matches!(answer, Answer::Answered(_)), "{line:?}: {answer:?}");
    }
    assert_eq!(bed.command(&["nft", "list", "ruleset"]), "");
    let address = cluster_ip(10).to_string();
    let has_it = |bed: &Bed| bed.command(&["ip", "address", "show", "dev", "portolan0"]).contains(&address);
    assert!(has_it(&bed));
    bed.command(&["ip", "address", "del", &format!("{address}/32"), "dev", "portolan0"]);
    eventually("the address is back", || if has_it(&bed) { Ok(()) } else { Err("it is not".to_owned()) });
    bed.daemon.stop();
    assert!(has_it(&bed), "stopping removes nothing");
    let ending = bed.daemon.run_to_end(&["--cleanup".to_owned()]).expect("it ends");
    assert!(ending.status.success(), "{}", ending.stderr);
    let left = bed.try_command(&["ip", "link", "show", "dev", "portolan0"]).expect("it can be run");
    assert!(!left.status.success(), "the link is still there");
}

/// The kernel goes on to translate what is open as long as a family has any chain of type nat and something that asks for
/// the state of flows. `--userspace-bind` has neither, and so brings them for as long as there is something to translate.
#[test]
fn what_is_translated_goes_on_until_it_ends() {
    let Some(mut bed) = Bed::build() else { return };
    // The kernel remembers a flow for minutes after its end, and the tables stay as long.
    for name in ["tcp_timeout_time_wait", "tcp_timeout_close", "tcp_timeout_last_ack", "udp_timeout_stream"] {
        let setting = format!("/proc/sys/net/netfilter/nf_conntrack_{name}");
        let written = bed.node().run(|| std::fs::write(setting, "5"));
        written.expect("node-a can be entered").expect("the kernel follows flows");
    }
    bed.start();
    let lab = Arc::clone(&bed.lab);
    let mut open = open_connection(&lab);
    let keeps = |bed: &Bed| bed.command(&["nft", "list", "tables"]).contains("portolan-keep");
    bed.under_load(Traffic::All, "from nftables mode to listeners on service addresses", |bed, go_on| {
        bed.daemon.stop();
        bed.start_with(&BIND);
        go_on();
        eventually("what the nftables mode left is gone", || match bed.command(&["nft", "list", "tables"]) {
            tables if tables.lines().any(|line| line == "table ip portolan") => Err(tables),
            _ => Ok(()),
        });
        go_on();
        assert!(keeps(bed), "streams are open");
    });
    bed.daemon.stop();
    bed.start_with(&BIND);
    eventually("it is found again, with the stream", || match bed.daemon.said() {
        said if said.contains("portolan-keep stays") => Ok(()),
        said => Err(said),
    });
    assert!(keeps(&bed) && matches!(open.ask(Duration::from_secs(5)), Answer::Answered(_)));
    drop(open);
    eventually("nothing of a packet filter is left", || match bed.command(&["nft", "list", "ruleset"]) {
        rules if rules.is_empty() => Ok(()),
        rules => Err(rules),
    });
    assert!(bed.daemon.said().contains("nobody needs any more"), "{}", bed.daemon.said());
}

/// As in an upgrade that starts the new program before it ends the old: new clients are refused by neither, and a
/// connection that is open goes on while the old one drains.
fn upgrade(bed: &mut Bed, way: &[&str]) {
    bed.start_with(way);
    let folder = bed.folder().join("second");
    std::fs::create_dir(&folder).expect("a folder");
    let next = folder.join("portolan");
    std::fs::copy(program(), &next).expect("a program can be copied");
    let mut second = Daemon::new(next, bed.node().try_clone().expect("a handle"), folder);
    let more = ["--healthz-bind-address=127.0.0.1:11256", "--metrics-bind-address=127.0.0.1:11249"];
    let flags = bed.flags().into_iter().chain(way.iter().chain(&more).map(|flag| (*flag).to_owned()));
    let flags: Vec<String> = flags.collect();
    let lab = Arc::clone(&bed.lab);
    let mut open = open_connection(&lab);
    thread::scope(|scope| {
        let load = Load::begin_new(scope, &lab, &everywhere());
        load.go_on(round());
        second.start(&flags);
        eventually("the second says that it waits", || match second.said() {
            said if said.contains("another portolan keeps this node") => Ok(()),
            said => Err(said),
        });
        load.go_on(round());
        let draining = scope.spawn(|| ask_to_the_end(&mut open));
        bed.daemon.stop();
        load.go_on(round());
        eventually("the second serves", || match second.get(11_256, "/healthz")? {
            (200, _) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        load.go_on(round());
        draining.join().expect("it goes on for a while");
        load.end(&format!("upgrade, {way:?}"));
    });
}

#[test]
fn an_upgrade_refuses_nobody() {
    let Some(mut bed) = Bed::build() else { return };
    upgrade(&mut bed, &USERSPACE);
}

#[test]
fn listeners_are_handed_over() {
    let Some(mut bed) = Bed::build() else { return };
    upgrade(&mut bed, &BIND);
    assert!(bed.daemon.said().contains("another process listens now"), "{}", bed.daemon.said());
}

/// From the client to a cluster IP; it has been answered once.
fn open_connection(lab: &Lab) -> Flow {
    let source = Version::V4.address(address_of("client").expect("it is in the lab"));
    let destination = SocketAddr::new(cluster_ip(10), 80);
    let route = Route { source, destination, transport: Transport::Tcp };
    let mut flow = lab.open("client", route, Duration::from_secs(5)).expect("in the lab").expect("open");
    assert!(matches!(flow.ask(Duration::from_secs(5)), Answer::Answered(_)));
    flow
}

/// Ports of the old flag, and what is said when there are too few.
#[test]
fn listeners_get_ports_of_the_range() {
    let Some(mut bed) = Bed::build() else { return };
    let listening = |bed: &Bed| -> Vec<u16> {
        let text = bed.command(&["ss", "-Hltnu"]);
        let ports =
            text.lines().filter_map(|line| line.split_whitespace().nth(4)?.rsplit_once(':')?.1.parse().ok());
        ports.collect()
    };
    let others = listening(&bed);
    bed.start_with(&["--proxy-mode=userspace", "--proxy-port-range=41000-41003"]);
    let ours: Vec<u16> = listening(&bed).into_iter().filter(|port| !others.contains(port)).collect();
    let of_range = ours.iter().filter(|port| (41_000..=41_003).contains(*port)).count();
    // Health and metrics are the other two; each worker has a socket of its own for each of the eight.
    assert!(of_range >= 8 && ours.len() == of_range + 2, "{ours:?}");
    for line in everywhere() {
        assert!(matches!(ask_once(&bed.lab, &line), Answer::Answered(_)), "{line:?}");
    }
    bed.daemon.stop();

    let too_small = ["--proxy-mode=userspace".to_owned(), "--proxy-port-range=41000".to_owned()];
    let ending = bed.daemon.run_to_end(&[&bed.flags()[..], &too_small].concat()).expect("it ends");
    assert!(!ending.status.success() && ending.stderr.contains("is too small"), "{}", ending.stderr);
    let _taken = bed.node().run(|| [41_010, 41_011].map(|port| TcpListener::bind(("127.0.0.1", port))));
    let flags = ["--proxy-mode=userspace".to_owned(), "--proxy-port-range=41010-41011".to_owned()];
    bed.daemon.start(&[&bed.flags()[..], &flags].concat());
    eventually("it says what is wrong", || match bed.daemon.said() {
        said if said.contains("no port from 41010 to 41011 is free") => Ok(()),
        said => Err(said),
    });
}

#[test]
fn an_idle_udp_flow_is_forgotten_after_its_time() {
    let Some(mut bed) = Bed::build() else { return };
    bed.start_with(&["--proxy-mode=userspace", "--udp-timeout=2s"]);
    let source = Version::V4.address(address_of("client").expect("it is in the lab"));
    let destination = SocketAddr::new(cluster_ip(10), 80);
    let route = Route { source, destination, transport: Transport::Udp };
    let flows = |bed: &Bed| bed.daemon.metric("portolan_relay_flows");
    let mut flow = bed.lab.open("client", route, Duration::from_secs(5)).expect("in the lab").expect("open");
    // As long as it is used it stays.
    for _ in 0..12 {
        assert!(matches!(flow.ask(Duration::from_secs(5)), Answer::Answered(_)));
        thread::sleep(Duration::from_millis(300));
    }
    assert_eq!((flows(&bed), bed.daemon.metric("portolan_relay_flows_total")), (Ok(1.0), Ok(1.0)));
    eventually("it is forgotten", || match flows(&bed)? {
        0.0 => Ok(()),
        other => Err(format!("{other} flows")),
    });
    assert!(matches!(flow.ask(Duration::from_secs(5)), Answer::Answered(_)), "and begins anew");
    assert_eq!(bed.daemon.metric("portolan_relay_flows_total"), Ok(2.0));
}
