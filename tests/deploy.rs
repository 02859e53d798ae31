// SPDX-License-Identifier: Apache-2.0

//! What is in deploy/ hangs together, without a cluster. The API server's word on it is in `tests/cluster`.

use std::{
    fs,
    path::Path,
    process::Command,
    sync::Arc,
    time::{Duration, SystemTime},
};

use model::PerFamily;
use portolan_tests::root;
use proxy::{
    config::{
        check, decode,
        own::{FILE_NAME, Own},
    },
    health,
    metrics::Metrics,
    status::Status,
};
use serde_json::{Value, json};

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The documents of a YAML file.
fn documents(path: &str) -> Vec<Value> {
    let text = read(path);
    serde_saphyr::from_multiple(&text).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The one document of this kind.
fn object(path: &str, kind: &str) -> Value {
    let mut found = documents(path).into_iter().filter(|document| document["kind"] == kind);
    let object = found.next().unwrap_or_else(|| panic!("{path} has no {kind}"));
    assert!(found.next().is_none(), "{path} has two of kind {kind}");
    object
}

const BASE: &str = "deploy/kustomize/base";

fn pod() -> Value {
    object(&format!("{BASE}/daemonset.yaml"), "DaemonSet")["spec"]["template"]["spec"].clone()
}

#[test]
fn every_yaml_file_can_be_read() {
    let mut seen = 0;
    let mut folders = vec![root().join("deploy")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
            let is_template = entry.parent().is_some_and(|folder| folder.ends_with("templates"));
            if entry.is_dir() {
                folders.push(entry);
            } else if entry.extension().is_some_and(|end| end == "yaml") && !is_template {
                let path = entry.strip_prefix(root()).expect("inside").to_string_lossy().into_owned();
                assert!(!documents(&path).is_empty(), "{path} is empty");
                seen += 1;
            }
        }
    }
    assert!(seen > 8, "only {seen} files were found");
}

#[test]
fn the_program_takes_its_configuration() {
    let map = object(&format!("{BASE}/configmap.yaml"), "ConfigMap");
    let text = map["data"]["config.conf"].as_str().expect("the key that kubeadm uses");
    let decoded = decode::decode(text).expect("it can be read");
    assert_eq!(decoded.notices.len(), 0, "nothing unknown or twice");
    let mut config = decoded.config;
    config.settle();
    let checked = check::check(&config).expect("it is valid");
    assert_eq!(checked.mode, dataplane::Mode::Nftables);
    let kubeconfig = map["data"]["kubeconfig.conf"].as_str().expect("the key that kubeadm uses");
    let kubeconfig: Value = serde_saphyr::from_str(kubeconfig).expect("YAML");
    assert_eq!(kubeconfig["current-context"], kubeconfig["contexts"][0]["name"]);
    // The mount, the flag and the file name one place.
    let mount = &pod()["containers"][0]["volumeMounts"][0]["mountPath"];
    let named = format!("{}/kubeconfig.conf", mount.as_str().expect("a path"));
    assert_eq!(config.client_connection.kubeconfig, named);
}

#[test]
fn settings_of_our_own_are_ones_we_know() {
    let map = object("deploy/kustomize/iptables/mode.yaml", "ConfigMap");
    let text = map["data"][FILE_NAME].as_str().expect("the name that is looked for beside the configuration");
    assert_eq!(Own::decode(text).expect("it can be read").mode.as_deref(), Some("iptables"));
}

#[test]
fn the_program_has_no_more_privileges_than_it_needs() {
    let pod = pod();
    let (init, main) = (&pod["initContainers"][0], &pod["containers"][0]);
    let context = &main["securityContext"];
    assert_eq!(context["capabilities"], json!({"drop": ["ALL"], "add": ["NET_ADMIN"]}));
    assert_eq!(context["readOnlyRootFilesystem"], true);
    assert_eq!(context["allowPrivilegeEscalation"], false);
    assert!(context["privileged"].is_null());
    assert_eq!(init["securityContext"]["privileged"], true);
    // What sets the node up says the same as what runs on it.
    let words = |container: &Value| container["command"].as_array().expect("a command").clone();
    let mut wanted = words(main);
    wanted.push(json!("--init-only"));
    assert_eq!(words(init), wanted);
    let rules = object(&format!("{BASE}/rbac.yaml"), "ClusterRole")["rules"].clone();
    for rule in rules.as_array().expect("rules") {
        let verbs = rule["verbs"].as_array().expect("verbs");
        let is_events = rule["resources"] == json!(["events"]);
        let may: &[&str] = if is_events { &["create"] } else { &["list", "watch"] };
        assert_eq!(verbs, may, "{rule}");
    }
}

#[test]
fn the_probes_are_answered() {
    let status = Arc::new(Status::new(PerFamily { v4: true, v6: true }, Duration::from_secs(30), true));
    let metrics = Arc::new(Metrics::new(SystemTime::now()));
    let chart = read("deploy/helm/portolan/templates/daemonset.yaml");
    for probe in ["livenessProbe", "readinessProbe"] {
        let path = pod()["containers"][0][probe]["httpGet"]["path"].as_str().expect("a path").to_owned();
        assert!(health::route(&status, &metrics, &path).is_some(), "{path} is 404");
        assert!(
            chart.contains(&format!("{probe}:\n          httpGet:\n            path: {path}\n")),
            "{probe}"
        );
    }
    // Before anything is programmed it is not ready, and no reason to restart it.
    let code = |path: &str| health::route(&status, &metrics, path).map(|answer| answer.status().as_u16());
    assert_eq!((code("/readyz"), code("/livez")), (Some(503), Some(200)));
}

#[test]
fn the_chart_allows_the_same() {
    let chart = read("deploy/helm/portolan/templates/rbac.yaml");
    let written = chart.split("rules:\n").nth(1).and_then(|rest| rest.split("---").next()).expect("rules");
    let written: Value = serde_saphyr::from_str(written).expect("YAML without templates");
    assert_eq!(written, object(&format!("{BASE}/rbac.yaml"), "ClusterRole")["rules"]);
}

#[test]
fn alert_rules_are_the_same_everywhere_and_complete() {
    let plain = documents("deploy/monitoring/alerts.yaml").remove(0);
    let rule = object("deploy/monitoring/prometheusrule.yaml", "PrometheusRule");
    assert_eq!(rule["spec"], plain);
    assert_eq!(read("deploy/helm/portolan/alerts.yaml"), read("deploy/monitoring/alerts.yaml"));
    let rules = plain["groups"][0]["rules"].as_array().expect("rules");
    for rule in rules {
        let text = |field: &Value| field.as_str().is_some_and(|text| !text.is_empty());
        assert!(text(&rule["alert"]) && text(&rule["expr"]), "{rule}");
        assert!(text(&rule["annotations"]["summary"]) && text(&rule["annotations"]["runbook"]), "{rule}");
        assert!(["info", "warning", "critical"].contains(&rule["labels"]["severity"].as_str().unwrap_or("")));
        let expression = rule["expr"].as_str().expect("text");
        let count = |sign| expression.matches(sign).count();
        assert!(
            count('(') == count(')') && count('{') == count('}') && count('[') == count(']'),
            "{expression}"
        );
    }
    assert!(rules.len() > 5);
}

#[test]
fn the_monitor_selects_our_pods() {
    let monitor = object("deploy/monitoring/podmonitor.yaml", "PodMonitor");
    assert_eq!(monitor["apiVersion"], "monitoring.coreos.com/v1");
    let template = object(&format!("{BASE}/daemonset.yaml"), "DaemonSet")["spec"]["template"].clone();
    for (label, value) in monitor["spec"]["selector"]["matchLabels"].as_object().expect("labels") {
        assert_eq!(template["metadata"]["labels"][label], *value, "{label}");
    }
    let endpoint = &monitor["spec"]["podMetricsEndpoints"][0];
    assert_eq!(endpoint["path"], "/metrics");
    // The plain configuration finds the same targets.
    let scrape = documents("deploy/monitoring/scrape.yaml").remove(0);
    let plain = scrape["scrape_configs"][0]["relabel_configs"].as_array().expect("steps").clone();
    let steps = endpoint["relabelings"].as_array().expect("steps");
    let essence = |step: &Value, source: &str, target: &str| {
        [&step[source], &step["regex"], &step[target], &step["replacement"], &step["action"]]
            .map(Clone::clone)
    };
    let operators: Vec<_> = steps.iter().map(|step| essence(step, "sourceLabels", "targetLabel")).collect();
    let plain: Vec<_> = plain.iter().map(|step| essence(step, "source_labels", "target_label")).collect();
    assert_eq!(operators, plain);
}

#[test]
fn the_dashboard_is_whole() {
    let board: Value = serde_json::from_str(&read("deploy/monitoring/dashboard.json")).expect("JSON");
    let panels = board["panels"].as_array().expect("panels");
    assert!(panels.len() > 10);
    let mut numbers: Vec<u64> = panels.iter().map(|panel| panel["id"].as_u64().expect("a number")).collect();
    numbers.dedup();
    assert_eq!(numbers.len(), panels.len(), "numbers are unique");
    for panel in panels {
        assert!(panel["title"].is_string() && panel["description"].is_string(), "{panel}");
        assert!(panel["targets"].as_array().is_some_and(|targets| !targets.is_empty()), "{panel}");
    }
}

#[test]
fn all_say_the_same_version() {
    let version = env!("CARGO_PKG_VERSION");
    let chart = documents("deploy/helm/portolan/Chart.yaml").remove(0);
    assert_eq!((chart["version"].as_str(), chart["appVersion"].as_str()), (Some(version), Some(version)));
    for (folder, variant) in [("base", ""), ("kubeadm", ""), ("withdraw", ""), ("iptables", "-iptables")] {
        let kustomization = documents(&format!("deploy/kustomize/{folder}/kustomization.yaml")).remove(0);
        assert_eq!(kustomization["images"][0]["newTag"], format!("{version}{variant}"), "{folder}");
    }
}

#[test]
fn the_image_is_built_with_our_toolchain() {
    let manifest = read("Cargo.toml");
    let wanted = manifest.lines().find_map(|line| line.strip_prefix("rust-version = ")).expect("a version");
    let wanted = format!("FROM rust:{}-alpine", wanted.trim_matches('"'));
    assert!(read("deploy/Dockerfile").contains(&wanted), "deploy/Dockerfile: {wanted}");
    // Everything that a build reads is let into it.
    let ignored = read("deploy/Dockerfile.dockerignore");
    let members =
        manifest.split("members = [").nth(1).and_then(|rest| rest.split(']').next()).expect("members");
    for member in members.split('"').filter(|word| word.starts_with(|c: char| c.is_alphabetic())) {
        let top = Path::new(member).iter().next().expect("a folder").to_string_lossy();
        assert!(ignored.lines().any(|line| line == format!("!{top}")), "{member} is not let into the build");
    }
}

#[test]
fn the_unit_is_one_that_systemd_takes() {
    let unit = read("deploy/systemd/portolan.service");
    for line in ["Type=notify", "AmbientCapabilities=CAP_NET_ADMIN", "CapabilityBoundingSet=CAP_NET_ADMIN"] {
        assert!(unit.lines().any(|have| have == line), "{line}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let copy = folder.path().join("portolan.service");
    // It is not installed here.
    fs::write(&copy, unit.replace("/usr/local/bin/portolan", "/bin/true")).expect("written");
    match Command::new("systemd-analyze").args(["verify", "--recursive-errors=no"]).arg(&copy).output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && !said.contains("portolan.service"), "{said}");
        }
        Err(error) => println!("skipped: systemd-analyze: {error}"),
    }
}
