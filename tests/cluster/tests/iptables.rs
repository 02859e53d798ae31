// SPDX-License-Identifier: Apache-2.0

//! iptables mode beside the real kube-proxy: each takes over the other's chains in place, and they are the same chains.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use lab::address::Version;
use serde_json::{Value, json};
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

/// Rules in which we differ on purpose: words that such a rule has, and why. Each must be met by a rule of either side.
const INTENDED: [(&[&str], &str); 4] = [
    (
        &["-A KUBE-NODEPORTS", "health check node port"],
        "one line lets a health-check node port in, not one for each port of its service",
    ),
    (
        &["-A KUBE-SERVICES", "externally-visible"],
        "a process of the node that connects to an external address without endpoints is refused, not left waiting",
    ),
    (
        &["-A KUBE-EXTERNAL-SERVICES", "--dst-type LOCAL"],
        "node ports without endpoints are refused where node ports are served, not on loopback too",
    ),
    (
        &["-A KUBE-EXTERNAL-SERVICES", "default/guarded-empty"],
        "source ranges hold without endpoints too: strangers are dropped, not told",
    ),
];

/// Chains of which the order of rules means something.
const ORDERED: [&str; 6] =
    ["KUBE-SVC-", "KUBE-SVL-", "KUBE-EXT-", "KUBE-SEP-", "KUBE-POSTROUTING", "KUBE-FORWARD"];

/// The rules and chains of both families; where the order means something, with their place.
fn all_rules(stage: &Stage, variant: &str) -> BTreeSet<String> {
    let mut rules = BTreeSet::new();
    for family in ["iptables", "ip6tables"] {
        let text = on_node(stage, &[&format!("{family}-{variant}-save")]);
        let mut places: BTreeMap<String, u32> = BTreeMap::new();
        for line in text.lines().filter(|line| line.contains("KUBE-")) {
            let mut words = line.split(' ');
            let line = match (words.next(), words.next()) {
                // What was counted is nobody's.
                (Some(chain), _) if chain.starts_with(':') => chain.to_owned(),
                (Some("-A"), Some(chain)) if ORDERED.iter().any(|prefix| chain.starts_with(prefix)) => {
                    let place = places.entry(chain.to_owned()).or_default();
                    *place += 1;
                    format!("{line} (rule {place})")
                }
                _ => line.to_owned(),
            };
            rules.insert(format!("{family}: {line}"));
        }
    }
    rules
}

fn intention(rule: &str) -> Option<usize> {
    INTENDED.iter().position(|(words, _)| words.iter().all(|word| rule.contains(word)))
}

/// The same, without those in which we differ on purpose.
fn rules(stage: &Stage, variant: &str) -> BTreeSet<String> {
    all_rules(stage, variant).into_iter().filter(|rule| intention(rule).is_none()).collect()
}

/// Services of every kind and policy.
fn services() -> Vec<Value> {
    let local = |mut service: Value| {
        service["spec"]["internalTrafficPolicy"] = json!("Local");
        service
    };
    let balanced = |name: &str, host: u16, policy: &str| {
        let mut service = manifest::service(name, host);
        service["spec"]["type"] = json!("LoadBalancer");
        service["spec"]["externalTrafficPolicy"] = json!(policy);
        service
    };
    let mut sticky = manifest::service("sticky", 20);
    sticky["spec"]["sessionAffinity"] = json!("ClientIP");
    sticky["spec"]["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": 600}});
    let outside = |name: &str, host: u16| {
        let mut service = manifest::service(name, host);
        service["spec"]["externalIPs"] = json!([format!("198.51.100.{host}"), format!("2001:db8::{host}")]);
        service
    };
    let guarded = |name: &str, host: u16| {
        let mut service = balanced(name, host, "Cluster");
        service["spec"]["loadBalancerSourceRanges"] =
            json!(["192.0.2.0/24", "10.1.0.0/16", "2001:db8:1::/64"]);
        service
    };
    let mut streams = manifest::service("streams", 34);
    streams["spec"]["ports"] = json!([{"name": "", "protocol": "SCTP", "port": 80, "targetPort": 8080}]);
    vec![
        manifest::exposed("web", 10, 30_080),
        manifest::service("empty", 11),
        local(manifest::service("inside-both", 12)),
        local(manifest::service("inside-here", 13)),
        local(manifest::service("inside-there", 14)),
        local(manifest::exposed("inside-exposed", 15, 30_085)),
        balanced("wide", 16, "Cluster"),
        balanced("near-both", 17, "Local"),
        balanced("near-here", 18, "Local"),
        balanced("near-there", 19, "Local"),
        sticky,
        outside("outside", 30),
        outside("outside-empty", 31),
        guarded("guarded", 32),
        guarded("guarded-empty", 33),
        streams,
        manifest::exposed("exposed-empty", 35, 30_095),
    ]
}

/// The same, with endpoints here, elsewhere, both and none.
fn mixed(stage: &Stage) {
    stage.apply(&services());
    for (name, pods) in [
        ("web", &["a1", "a2", "b1"][..]),
        ("inside-both", &["a1", "b1"]),
        ("inside-here", &["a1", "a2"]),
        ("inside-there", &["b1"]),
        ("inside-exposed", &["a1", "b1"]),
        ("wide", &["a1", "b1"]),
        ("near-both", &["a1", "b1"]),
        ("near-here", &["a1", "a2"]),
        ("near-there", &["b1"]),
        ("sticky", &["a1", "b1"]),
        ("outside", &["a1", "b1"]),
        ("guarded", &["a1", "b1"]),
    ] {
        stage.apply(&manifest::slices(name, pods));
    }
    for (name, host) in [
        ("wide", 16),
        ("near-both", 17),
        ("near-here", 18),
        ("near-there", 19),
        ("guarded", 32),
        ("guarded-empty", 33),
    ] {
        let status = json!({"status": {"loadBalancer": {"ingress": [
            {"ip": format!("203.0.113.{host}")}, {"ip": format!("2001:db8:2::{host}")},
        ]}}});
        let arguments =
            ["patch", "service", name, "--subresource=status", "--type=merge", "-p", &status.to_string()];
        stage.control.kubectl(&arguments, None);
    }
}

#[track_caller]
fn must_equal(found: &BTreeSet<String>, wanted: &BTreeSet<String>) {
    let gone: Vec<_> = wanted.difference(found).collect();
    let new: Vec<_> = found.difference(wanted).collect();
    assert!(gone.is_empty() && new.is_empty(), "gone: {gone:#?}\nnew: {new:#?}");
}

/// kube-proxy's rules once it has nothing more to write.
fn settled(stage: &Stage, variant: &str) -> BTreeSet<String> {
    let mut last = BTreeSet::new();
    eventually("kube-proxy is done", || {
        let before = std::mem::replace(&mut last, rules(stage, variant));
        // It waits a second between two writes.
        std::thread::sleep(std::time::Duration::from_secs(3));
        let is_served = last.iter().any(|rule| rule.contains("default/guarded:tcp loadbalancer IP"));
        if before == last && is_served { Ok(()) } else { Err("it goes on".to_owned()) }
    });
    last
}

#[test]
fn kube_proxy_and_portolan_replace_each_other_in_place() {
    for (way, variant) in [(Way::IptablesNft, "nft"), (Way::IptablesLegacy, "legacy")] {
        let Some(mut stage) = Stage::build() else { return };
        on_node(&stage, &[&format!("iptables-{variant}"), "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"]);
        mixed(&stage);
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
        let theirs = settled(&stage, variant);
        let mut met: BTreeSet<usize> =
            all_rules(&stage, variant).iter().filter_map(|rule| intention(rule)).collect();
        rival.kill();

        stage
            .daemon
            .start(&[format!("--kubeconfig={}", kubeconfig.display()), "--proxy-mode=iptables".into()]);
        stage.daemon.must_serve();
        web.iter().for_each(|target| target.expect(&stage.lab, &["a1", "a2", "b1"]));
        must_equal(&rules(&stage, variant), &theirs);
        met.extend(all_rules(&stage, variant).iter().filter_map(|rule| intention(rule)));
        for (index, (words, why)) in INTENDED.iter().enumerate() {
            assert!(met.contains(&index), "nobody has a rule with {words:?} any more: {why}");
        }
        println!("{variant}: {} rules and chains are the same", theirs.len());
        stage.daemon.stop();

        let back = begin(&stage);
        eventually("kube-proxy has written its own again", || {
            let is_ours =
                |rule: &String| rule.contains("-A KUBE-SERVICES") && rule.contains("externally-visible");
            match all_rules(&stage, variant).iter().find(|rule| is_ours(rule)) {
                Some(ours) => Err(ours.clone()),
                None => Ok(()),
            }
        });
        must_equal(&rules(&stage, variant), &theirs);
        back.kill();
    }
}
