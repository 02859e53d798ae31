// SPDX-License-Identifier: Apache-2.0

//! From the real kube-proxy to Portolan and back, in each of its modes, under load: nothing may fail, what the other
//! left goes, and what is foreign stays.

use std::{process::Command, thread, time::Duration};

use lab::Transport;
use stage::{
    Daemon, Stage, Target, eventually,
    load::{Line, Load, everywhere},
    manifest,
    rival::{Rival, Way},
};

const NODE_PORT: u16 = 30_080;
/// Connections between two events.
const ROUND: u64 = 150;
/// Rules of somebody else, in every place where one of the two works.
const FOREIGN: [&[&str]; 5] = [
    &["nft", "add table ip foreign; add chain ip foreign c; add rule ip foreign c ip saddr 192.0.2.7 drop"],
    &["iptables-nft", "-A", "FORWARD", "-s", "192.0.2.77", "-j", "DROP"],
    &["iptables-nft", "-t", "nat", "-A", "POSTROUTING", "-s", "192.0.2.78", "-j", "MASQUERADE"],
    &["iptables-legacy", "-A", "FORWARD", "-s", "192.0.2.79", "-j", "DROP"],
    &["ip6tables-nft", "-A", "FORWARD", "-s", "2001:db8::7", "-j", "DROP"],
];
const FOREIGN_WORDS: [(&[&str], &str); 5] = [
    (&["nft", "list", "table", "ip", "foreign"], "192.0.2.7"),
    (&["iptables-nft-save"], "192.0.2.77"),
    (&["iptables-nft-save"], "192.0.2.78"),
    (&["iptables-legacy-save"], "192.0.2.79"),
    (&["ip6tables-nft-save"], "2001:db8::7"),
];

/// By cluster IP and by node port, in both families.
fn targets() -> Vec<Target> {
    everywhere(NODE_PORT)
        .into_iter()
        .map(|Line { from, to }| Target { from, to, transport: Transport::Tcp })
        .collect()
}

fn on_node(stage: &Stage, words: &[&str]) -> String {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    let netns = stage.lab.netns("node-a").expect("it is in the lab");
    let output = netns.run(|| command.output()).expect("node-a").expect("it can be run");
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A cluster with one service and somebody else's rules on the node.
fn stage() -> Option<Stage> {
    let stage = Stage::build()?;
    stage.apply(&[manifest::exposed("web", 10, NODE_PORT)]);
    stage.apply(&manifest::slices("web", &["a1", "a2", "b1"]));
    for words in FOREIGN {
        on_node(&stage, words);
    }
    Some(stage)
}

fn rival(stage: &Stage, way: Way) -> Rival {
    let netns = stage.lab.netns("node-a").expect("it is in the lab");
    Rival::start(&stage.tools, netns, way, &stage.control.by_token(), stage.state())
}

#[track_caller]
fn foreign_rules_are_there(stage: &Stage) {
    for (words, trace) in FOREIGN_WORDS {
        let text = on_node(stage, words);
        assert!(text.contains(trace), "{trace} is gone from {words:?}:\n{text}");
    }
}

fn rival_is_gone(stage: &Stage, way: Way) {
    eventually("what kube-proxy left is gone", || {
        let text = on_node(stage, way.listing());
        if text.contains(way.trace()) { Err(text) } else { Ok(()) }
    });
}

/// Refused in a family for which kube-proxy has not written anything yet.
fn withdraw(stage: &Stage, daemon: &Daemon) -> Result<(), String> {
    let mut command = Command::new(daemon.program());
    command.arg("withdraw");
    let netns = stage.lab.netns("node-a").expect("it is in the lab");
    let output = netns.run(|| command.output()).expect("node-a").expect("it can be run");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(said) }
}

#[derive(Clone, Copy, PartialEq)]
enum Overlap {
    /// kube-proxy has ended before Portolan starts.
    None,
    /// It ends after.
    Some,
}

fn take_over(way: Way, overlap: Overlap, flags: &[&str]) {
    let Some(mut stage) = stage() else { return };
    let mut peer = rival(&stage, way);
    peer.until("kube-proxy writes", || {
        let text = on_node(&stage, way.listing());
        if text.contains(way.trace()) { Ok(()) } else { Err(text) }
    });
    targets().iter().for_each(|target| target.expect(&stage.lab, &["a1", "a2", "b1"]));
    let what = format!("take-over from {way:?} {}", flags.join(" "));
    let mut flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
    flags.push(format!("--kubeconfig={}", stage.control.by_token().display()));

    // The load borrows the lab, and the steps all the rest but the daemon.
    let idle = stage.idle_daemon();
    let mut daemon = std::mem::replace(&mut stage.daemon, idle);
    let stage = &stage;
    thread::scope(|scope| {
        let load = Load::begin(scope, &stage.lab, &everywhere(NODE_PORT));
        load.go_on(ROUND);
        let mut peer = Some(peer);
        if overlap == Overlap::None {
            peer.take().expect("it runs").kill();
            load.go_on(ROUND);
        }
        daemon.start(&flags);
        daemon.must_serve();
        load.go_on(ROUND);
        if let Some(peer) = peer {
            thread::sleep(Duration::from_secs(2));
            peer.kill();
        }
        rival_is_gone(stage, way);
        load.go_on(ROUND);
        // Portolan alone decides now.
        stage.apply(&manifest::slices("web", &["a1", "a2", "b1", "b2"]));
        targets().iter().for_each(|target| target.expect(&stage.lab, &["a1", "a2", "b1", "b2"]));
        load.end(what.trim());
    });
    foreign_rules_are_there(stage);
}

/// Nobody translates any more but for what is open, and that a table of ours keeps.
fn take_over_by_listeners(way: Way, overlap: Overlap) {
    take_over(way, overlap, &["--proxy-mode=userspace", "--userspace-bind"]);
}

fn hand_back(way: Way) {
    let Some(mut stage) = stage() else { return };
    let kubeconfig = format!("--kubeconfig={}", stage.control.by_token().display());
    let idle = stage.idle_daemon();
    let mut daemon = std::mem::replace(&mut stage.daemon, idle);
    let stage = &stage;
    daemon.start(&[kubeconfig]);
    daemon.must_serve();
    thread::scope(|scope| {
        let load = Load::begin(scope, &stage.lab, &everywhere(NODE_PORT));
        load.go_on(ROUND);
        daemon.stop();
        load.go_on(ROUND);
        // With nobody to relieve it, it does not go.
        assert!(withdraw(stage, &daemon).is_err());
        let mut peer = rival(stage, way);
        peer.until("kube-proxy writes", || {
            let text = on_node(stage, way.listing());
            if text.contains(way.trace()) { Ok(()) } else { Err(text) }
        });
        load.go_on(ROUND);
        // Both are there. Ours is of the past now, and goes.
        peer.until("portolan withdraws", || withdraw(stage, &daemon));
        load.go_on(ROUND);
        stage.apply(&manifest::slices("web", &["a1", "a2", "b1", "b2"]));
        targets().iter().for_each(|target| target.expect(&stage.lab, &["a1", "a2", "b1", "b2"]));
        load.end(&format!("hand-back to {way:?}"));
        peer.kill();
    });
    assert!(!on_node(stage, &["nft", "list", "tables"]).contains("portolan"));
    foreign_rules_are_there(stage);

    // And at last, with nobody running, everything goes.
    let ending = daemon.run_to_end(&["--cleanup".to_owned()]).expect("it ends");
    assert!(ending.status.success(), "{}", ending.stderr);
    rival_is_gone(stage, way);
    foreign_rules_are_there(stage);
}

#[test]
fn from_nftables() {
    take_over(Way::Nftables, Overlap::None, &[]);
}

#[test]
fn from_nftables_while_it_still_runs() {
    take_over(Way::Nftables, Overlap::Some, &[]);
}

#[test]
fn from_iptables_nft() {
    take_over(Way::IptablesNft, Overlap::None, &[]);
}

#[test]
fn from_iptables_nft_while_it_still_runs() {
    take_over(Way::IptablesNft, Overlap::Some, &[]);
}

#[test]
fn from_iptables_legacy() {
    take_over(Way::IptablesLegacy, Overlap::None, &[]);
}

#[test]
fn from_nftables_to_listeners() {
    take_over_by_listeners(Way::Nftables, Overlap::None);
}

#[test]
fn from_nftables_to_listeners_while_it_still_runs() {
    take_over_by_listeners(Way::Nftables, Overlap::Some);
}

#[test]
fn from_iptables_nft_to_listeners() {
    take_over_by_listeners(Way::IptablesNft, Overlap::None);
}

#[test]
fn from_iptables_legacy_to_listeners() {
    take_over_by_listeners(Way::IptablesLegacy, Overlap::None);
}

#[test]
fn back_to_nftables() {
    hand_back(Way::Nftables);
}

#[test]
fn back_to_iptables_nft() {
    hand_back(Way::IptablesNft);
}

#[test]
fn back_to_iptables_legacy() {
    hand_back(Way::IptablesLegacy);
}
