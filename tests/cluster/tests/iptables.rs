// SPDX-License-Identifier: Apache-2.0

//! iptables mode beside the real kube-proxy: each takes over the other's chains in place, and they are the same chains.

use std::{collections::BTreeSet, process::Command};

use lab::address::Version;
use stage::{
    Stage, Target, eventually, manifest,
    rival::{Rival, Way},
};

fn on_node(stage: &Stage, words: &[&str]) -> String {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    let netns = stage.lab.netns("node-a").expect("it is in the lab");
    let output = netns.run(|| command.output()).expect("node-a").expect("it can be run");
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The rules in both families, but those in which we knowingly differ: kube-proxy counts some packets by `nfacct`, and
/// we refuse a process of the node that connects to an external address without endpoints.
fn rules(stage: &Stage, variant: &str) -> BTreeSet<String> {
    let is_own_way = |line: &&str| {
        line.contains("nfacct")
            || *line == "-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP"
            || line.starts_with("-A KUBE-SERVICES -m comment --comment \"kubernetes externally-visible")
    };
    let mut rules = BTreeSet::new();
    for family in ["iptables", "ip6tables"] {
        let text = on_node(stage, &[&format!("{family}-{variant}-save")]);
        let lines = text.lines().filter(|line| line.contains("KUBE-") && !is_own_way(line));
        rules.extend(lines.map(|line| format!("{family}: {line}")));
    }
    rules
}

#[track_caller]
fn must_equal(found: &BTreeSet<String>, wanted: &BTreeSet<String>) {
    let gone: Vec<_> = wanted.difference(found).collect();
    let new: Vec<_> = found.difference(wanted).collect();
    assert!(gone.is_empty() && new.is_empty(), "gone: {gone:#?}\nnew: {new:#?}");
}

#[test]
fn kube_proxy_and_portolan_replace_each_other_in_place() {
    for (way, variant) in [(Way::IptablesNft, "nft"), (Way::IptablesLegacy, "legacy")] {
        let Some(mut stage) = Stage::build() else { return };
        on_node(&stage, &[&format!("iptables-{variant}"), "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"]);
        stage.apply(&[manifest::exposed("web", 10, 30_080), manifest::service("empty", 11)]);
        stage.apply(&manifest::slices("web", &["a1", "a2", "b1"]));
        let web: Vec<Target> = Version::BOTH
            .iter()
            .flat_map(|version| Target::both("a3", manifest::cluster_ip(*version, 10), 80))
            .collect();
        let kubeconfig = stage.control.by_token();
        let begin = |stage: &Stage| {
            let netns = stage.lab.netns("node-a").expect("it is in the lab");
            Rival::start(&stage.tools, netns, way, &kubeconfig, stage.state())
        };

        let rival = begin(&stage);
        web.iter().for_each(|target| target.expect(&stage.lab, &["a1", "a2", "b1"]));
        eventually("kube-proxy refuses what has no endpoints", || {
            let rules = rules(&stage, variant);
            match rules.iter().filter(|rule| rule.contains("has no endpoints")).count() {
                0 => Err(format!("{rules:#?}")),
                _ => Ok(()),
            }
        });
        let theirs = rules(&stage, variant);
        rival.kill();

        stage
            .daemon
            .start(&[format!("--kubeconfig={}", kubeconfig.display()), "--proxy-mode=iptables".into()]);
        stage.daemon.must_serve();
        web.iter().for_each(|target| target.expect(&stage.lab, &["a1", "a2", "b1"]));
        must_equal(&rules(&stage, variant), &theirs);
        stage.daemon.stop();

        let back = begin(&stage);
        eventually("kube-proxy has written its own again", || {
            let text = on_node(&stage, &[&format!("iptables-{variant}-save")]);
            if text.contains("nfacct") { Ok(()) } else { Err(text) }
        });
        must_equal(&rules(&stage, variant), &theirs);
        back.kill();
    }
}
