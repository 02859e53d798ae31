// SPDX-License-Identifier: Apache-2.0

//! What the kernel counts is what was answered.

use std::{collections::BTreeMap, process::Command};

use dataplane::{Config, Dataplane, Reading, Scope, nftables::Nftables};
use model::{Masquerade, Protocol};

use crate::stage::{Stage, on_stage, same};

const VIP: &str = "10.96.0.10";

fn counting(stage: &Stage, limit: usize) -> Nftables {
    let config = Config { counted_endpoints: limit, ..Config::default() };
    stage.lab.netns("node-a").unwrap().run(|| Nftables::open(&config).unwrap()).unwrap()
}

fn read(stage: &Stage) -> Vec<Reading> {
    let meter = || stage.nftables.meter().unwrap().unwrap().read().unwrap();
    stage.lab.netns("node-a").unwrap().run(meter).unwrap()
}

/// By the name of the pod.
fn by_name(stage: &Stage, readings: &[Reading]) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for name in ["a1", "b1", "b2"] {
        let of_pod = readings.iter().filter(|reading| reading.endpoint.ip() == stage.address(name));
        let count: u64 = of_pod.map(|reading| reading.connections).sum();
        if count > 0 {
            counts.insert(name.to_owned(), count);
        }
    }
    counts
}

#[test]
fn each_connection_is_counted_where_it_went_and_none_is_lost() {
    on_stage("each_connection_is_counted_where_it_went_and_none_is_lost", |stage| {
        stage.nftables = counting(stage, 100);
        let (frontend, node_port) = (stage.at(VIP, Protocol::Tcp, 80), stage.node_port(Protocol::Tcp, 30080));
        let all = same(stage.forward(&["a1", "b1", "b2"], Masquerade::OffPods));
        stage.set(frontend, all.clone());
        stage.set(node_port, all);
        let mut wanted: BTreeMap<String, u64> = BTreeMap::new();
        for (to, port) in [(VIP, 80), ("node-a", 30080)] {
            for (name, count) in stage.tally("client", to, port, 40) {
                *wanted.entry(name).or_default() += u64::from(count);
            }
        }
        let readings = read(stage);
        assert_eq!(by_name(stage, &readings), wanted);
        assert_eq!(readings.len(), 6, "a reading for each frontend and endpoint: {readings:?}");

        // One goes, and another takes its slot: what both had counted is told with the change.
        let applied = stage.set(frontend, same(stage.forward(&["b1", "b2"], Masquerade::OffPods)));
        let all: Vec<Reading> = read(stage).into_iter().chain(applied.retired.clone()).collect();
        assert_eq!(by_name(stage, &all), wanted, "retired: {:?}", applied.retired);
        let gone = applied.retired.iter().find(|reading| reading.endpoint.ip() == stage.address("a1"));
        assert!(gone.is_some_and(|gone| gone.connections > 0 && gone.frontend == frontend));

        // Read again by somebody new, as after a restart: nothing is made anew.
        let mut again = counting(stage, 100);
        let plan = stage.plan();
        let applied = again.apply(&plan, Scope::All).unwrap();
        assert!(applied.changed_nothing(), "{applied:?}");
        let list = || Command::new("nft").args(["list", "ruleset"]).output();
        if let Ok(listed) = stage.lab.netns("node-a").unwrap().run(list).unwrap() {
            let text = String::from_utf8_lossy(&listed.stdout);
            assert!(
                listed.status.success() && text.contains("counter packets"),
                "nft cannot list it: {text}"
            );
        }
    });
}

#[test]
fn beyond_the_limit_nothing_is_counted_and_all_is_served() {
    on_stage("beyond_the_limit_nothing_is_counted_and_all_is_served", |stage| {
        let frontend = stage.at(VIP, Protocol::Tcp, 80);
        stage.nftables = counting(stage, 100);
        stage.set(frontend, same(stage.forward(&["a1", "b1", "b2"], Masquerade::OffPods)));
        stage.tally("client", VIP, 80, 5);
        // Three endpoints. What does not count begins to only when a quarter is to spare.
        for (limit, counted) in [(2, false), (3, false), (4, true), (3, true), (0, false)] {
            stage.nftables = counting(stage, limit);
            let plan = stage.plan();
            stage.nftables.apply(&plan, Scope::All).unwrap();
            let before: u64 = if limit == 0 { 0 } else { read(stage).iter().map(|it| it.connections).sum() };
            assert_eq!(stage.tally("client", VIP, 80, 10).values().sum::<u32>(), 10, "{limit}");
            let after: u64 = if limit == 0 { 0 } else { read(stage).iter().map(|it| it.connections).sum() };
            assert_eq!(after - before, if counted { 10 } else { 0 }, "{limit}");
        }
    });
}
