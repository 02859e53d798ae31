// SPDX-License-Identifier: Apache-2.0

//! The direction of dependencies, which is the architecture: who may know whom.

use std::{collections::BTreeMap, process::Command};

use portolan_tests::root;
use serde_json::Value;

/// Each crate of ours, and the crates of ours it may use. Its tests may also use the lab and the testkit.
const MAY_USE: [(&str, &[&str]); 10] = [
    ("portolan-model", &[]),
    ("portolan-netlink", &[]),
    ("portolan-relay", &[]),
    ("portolan-dataplane", &["portolan-model", "portolan-netlink", "portolan-relay"]),
    ("portolan-source", &["portolan-model"]),
    ("portolan-lab", &["portolan-netlink"]),
    (
        "portolan",
        &["portolan-model", "portolan-netlink", "portolan-dataplane", "portolan-source", "portolan-lab"],
    ),
    (
        "portolan-testkit",
        &["portolan-model", "portolan-netlink", "portolan-dataplane", "portolan-source", "portolan-lab"],
    ),
    ("portolan-cluster-tests", &["portolan-netlink", "portolan-lab", "portolan-testkit"]),
    ("portolan-tests", &[]),
];

/// What a crate must not know of the world outside, directly or through others.
const MUST_NOT_REACH: [(&str, &[&str]); 5] = [
    ("portolan-relay", &["tokio", "kube", "kube-client", "tracing"]),
    ("portolan-model", &["tokio", "libc", "rustix", "kube", "kube-client", "tracing", "serde_json"]),
    ("portolan-netlink", &["tokio", "kube", "kube-client", "tracing"]),
    ("portolan-dataplane", &["tokio", "kube", "kube-client", "serde-saphyr"]),
    ("portolan-lab", &["tokio", "kube", "kube-client"]),
];

#[test]
fn our_crates_use_only_whom_they_may() {
    let workspace = Workspace::read();
    let mut wrong = Vec::new();
    for (name, uses) in &workspace.ours {
        let Some((_, may_use)) = MAY_USE.iter().find(|(known, _)| known == name) else {
            // The bench and the fuzzers stand at the end of the line: nobody may use them.
            continue;
        };
        for used in uses.iter().filter(|used| workspace.ours.contains_key(&used.name)) {
            let for_tests = ["portolan-lab", "portolan-testkit"].contains(&used.name.as_str());
            let is_test_support = used.is_dev && (for_tests || name == "portolan-tests");
            if !may_use.contains(&used.name.as_str()) && !is_test_support {
                wrong.push(format!("{name} uses {}", used.name));
            }
        }
    }
    assert!(wrong.is_empty(), "against the direction: {wrong:?}");
}

#[test]
fn every_crate_of_the_pipeline_is_known_here() {
    let workspace = Workspace::read();
    for (name, _) in MAY_USE {
        assert!(workspace.ours.contains_key(name), "{name} is gone: mend this test");
    }
    for name in workspace.ours.keys().filter(|name| MAY_USE.iter().all(|(known, _)| known != name)) {
        let is_used = workspace.ours.values().flatten().any(|used| used.name == *name);
        assert!(!is_used, "{name} is used by others, but has no place in the direction");
    }
}

#[test]
fn lower_crates_stay_ignorant() {
    let workspace = Workspace::read();
    for (name, forbidden) in MUST_NOT_REACH {
        for reached in workspace.reach(name) {
            assert!(!forbidden.contains(&reached.as_str()), "{name} reaches {reached}");
        }
    }
}

#[derive(Debug)]
struct Use {
    name: String,
    is_dev: bool,
}

/// What `cargo metadata` says, by package name.
struct Workspace {
    ours: BTreeMap<String, Vec<Use>>,
    /// Every package with those it is built from, development dependencies left out.
    graph: BTreeMap<String, Vec<String>>,
}

impl Workspace {
    fn read() -> Workspace {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        // Of this platform only: what other systems would need was never downloaded.
        let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let output = Command::new(cargo)
            .args([
                "metadata",
                "--format-version",
                "1",
                "--offline",
                "--locked",
                "--filter-platform",
                &platform,
            ])
            .current_dir(root())
            .output()
            .expect("cargo can be run");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo writes JSON");
        let packages = metadata["packages"].as_array().expect("a list of packages");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let names: BTreeMap<String, String> =
            packages.iter().map(|package| (text(&package["id"]), text(&package["name"]))).collect();
        let members: Vec<String> =
            metadata["workspace_members"].as_array().expect("members").iter().map(text).collect();

        let mut ours = BTreeMap::new();
        let mut graph = BTreeMap::new();
        for node in metadata["resolve"]["nodes"].as_array().expect("a graph") {
            let uses: Vec<Use> = node["deps"]
                .as_array()
                .expect("dependencies")
                .iter()
                .map(|dep| Use {
                    name: names[&text(&dep["pkg"])].clone(),
                    is_dev: dep["dep_kinds"]
                        .as_array()
                        .is_some_and(|kinds| kinds.iter().all(|kind| kind["kind"] == "dev")),
                })
                .collect();
            let id = text(&node["id"]);
            let built_from = uses.iter().filter(|used| !used.is_dev).map(|used| used.name.clone()).collect();
            graph.insert(names[&id].clone(), built_from);
            if members.contains(&id) {
                ours.insert(names[&id].clone(), uses);
            }
        }
        Workspace { ours, graph }
    }

    /// All packages this one is built from.
    fn reach(&self, name: &str) -> Vec<String> {
        let mut reached: Vec<String> = self.graph[name].clone();
        let mut next = 0;
        while let Some(name) = reached.get(next).cloned() {
            for used in self.graph.get(&name).into_iter().flatten() {
                if !reached.contains(used) {
                    reached.push(used.clone());
                }
            }
            next += 1;
        }
        reached
    }
}
