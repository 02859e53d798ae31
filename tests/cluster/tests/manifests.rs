// SPDX-License-Identifier: Apache-2.0

//! The API server's word on what is in deploy/.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use lab::address::Version;
use serde_json::Value;
use stage::{Stage, Target, eventually, manifest};

/// Nothing is created, everything is decoded, defaulted and validated; an unknown field is an error.
const DRY_RUN: [&str; 5] = ["apply", "--server-side", "--dry-run=server", "--validate=strict", "-f"];
/// kube-proxy as kubeadm deploys it.
const KUBEADM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kubeadm.yaml");
const OUR_ACCOUNT: &str = "system:serviceaccount:kube-system:portolan";
/// What the daemon does to the API.
const NEEDED: [(&str, &str); 9] = [
    ("list", "services"),
    ("watch", "services"),
    ("list", "endpointslices.discovery.k8s.io"),
    ("watch", "endpointslices.discovery.k8s.io"),
    ("list", "servicecidrs.networking.k8s.io"),
    ("watch", "servicecidrs.networking.k8s.io"),
    ("list", "nodes"),
    ("watch", "nodes"),
    ("create", "events.events.k8s.io"),
];

fn deploy(path: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(path).to_string_lossy().into_owned()
}

fn daemon_set(stage: &Stage) -> Value {
    let text =
        stage.control.kubectl(&["get", "-n", "kube-system", "daemonset", "kube-proxy", "-o", "json"], None);
    serde_json::from_str(&text).expect("kubectl writes JSON")
}

/// Dry-runs rendered manifests, without the kinds that only the Prometheus operator brings; returns how many.
#[track_caller]
fn accepted(stage: &Stage, rendered: &str) -> usize {
    let documents: Vec<&str> = rendered.split("\n---").filter(|text| text.contains("\nkind:")).collect();
    let known: Vec<&str> =
        documents.iter().copied().filter(|text| !text.contains("monitoring.coreos.com")).collect();
    stage.control.kubectl(&[&DRY_RUN[..], &["-"]].concat(), Some(&known.join("\n---\n")));
    known.len()
}

#[test]
fn the_api_server_takes_the_manifests() {
    let Some(stage) = Stage::build() else { return };
    let rendered = stage.control.kubectl(&["kustomize", &deploy("kustomize/base")], None);
    assert_eq!(accepted(&stage, &rendered), 5, "account, role, binding, configuration, pods");
    let image = rendered.lines().filter(|line| line.contains("image: portolan:")).count();
    assert_eq!(image, 2, "both containers have the image that kustomize sets");
    let rendered_iptables = stage.control.kubectl(&["kustomize", &deploy("kustomize/iptables")], None);
    assert_eq!(accepted(&stage, &rendered_iptables), 5);
    assert!(rendered_iptables.contains("mountPath: /var/lib/kube-proxy"), "the patch adds to the mounts");
    let withdraw = stage.control.kubectl(&["kustomize", &deploy("kustomize/withdraw")], None);
    assert_eq!(accepted(&stage, &withdraw), 1);
    // And it can say no.
    let wrong = rendered.replace("maxUnavailable: 10%", "maxUnavailable: 10 of them");
    let refused = stage.control.try_kubectl(&[&DRY_RUN[..], &["-"]].concat(), Some(&wrong));
    assert!(!refused.status.success());
    let wrong = rendered.replace("hostNetwork: true", "hostNetwok: true");
    let refused = stage.control.try_kubectl(&[&DRY_RUN[..], &["-"]].concat(), Some(&wrong));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("hostNetwok"));
    let monitoring = stage.control.kubectl(&["kustomize", &deploy("monitoring")], None);
    assert!(monitoring.contains("kind: PodMonitor") && monitoring.contains("kind: PrometheusRule"));
}

#[test]
fn on_kubeadm_only_the_image_changes_and_back() {
    let Some(stage) = Stage::build() else { return };
    let overlay = deploy("kustomize/kubeadm");
    let swap = [
        "apply",
        "--server-side",
        "--force-conflicts",
        "--field-manager=portolan",
        "--validate=strict",
        "-k",
        &overlay,
    ];
    // Where kube-proxy is not there, a part of it is not made.
    let refused = stage.control.try_kubectl(&swap, None);
    assert!(!refused.status.success());

    stage.control.kubectl(&["create", "-f", KUBEADM], None);
    let before = daemon_set(&stage);
    stage.control.kubectl(&swap, None);
    let after = daemon_set(&stage);
    let image = "/spec/template/spec/containers/0/image";
    assert_eq!(
        after.pointer(image).and_then(Value::as_str),
        Some(concat!("portolan:", env!("CARGO_PKG_VERSION")))
    );
    let mut without_image = after.clone();
    *without_image.pointer_mut(image).expect("it has one") =
        before.pointer(image).expect("it had one").clone();
    assert_eq!(without_image["spec"], before["spec"]);
    // Again changes nothing, and the way back is kubectl's own.
    stage.control.kubectl(&swap, None);
    assert_eq!(daemon_set(&stage)["metadata"]["generation"], after["metadata"]["generation"]);
    let back = ["set", "image", "-n", "kube-system", "daemonset/kube-proxy", "kube-proxy=kube-proxy:v1.36.3"];
    stage.control.kubectl(&back, None);
    assert_eq!(daemon_set(&stage)["spec"], before["spec"]);
}

/// In their order, on a cluster as kubeadm makes it. Nothing is rolled out here, so that cannot be waited for.
#[test]
fn the_commands_of_the_guides_work() {
    let Some(stage) = Stage::build() else { return };
    stage.control.kubectl(&["create", "-f", KUBEADM], None);
    let settings = "--from-literal=config.conf=kind: KubeProxyConfiguration";
    stage.control.kubectl(&["-n", "kube-system", "create", "configmap", "kube-proxy", settings], None);
    let mut tried = 0;
    for guide in ["migrating.md", "operating.md"] {
        let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(guide);
        let guide = fs::read_to_string(guide).expect("the guide is there");
        // There are no kubelets: nothing is ever rolled out, and nobody logs.
        let is_for_us = |line: &&String| {
            line.starts_with("kubectl ") && !line.contains(" rollout status ") && !line.contains(" logs ")
        };
        for command in commands(&guide).iter().filter(is_for_us) {
            let command = command.replace("IMAGE-YOU-KEPT", "kube-proxy:v1.36.3");
            stage.control.shell(&command.replace("> config.conf", "> /dev/null"));
            tried += 1;
        }
    }
    assert!(tried > 12, "the guides are written otherwise now: {tried} commands");
}

/// The commands in a guide; one goes on over lines as long as a quote is open.
fn commands(guide: &str) -> Vec<String> {
    let mut commands: Vec<String> = Vec::new();
    for line in guide.lines().filter_map(|line| line.strip_prefix("    ")) {
        match commands.last_mut() {
            Some(open) if open.matches('\'').count() % 2 == 1 => open.extend(["\n", line]),
            _ => commands.push(line.trim_start().to_owned()),
        }
    }
    commands
}

/// A kubeconfig for our service account.
fn with_token(stage: &Stage, token: &str) -> PathBuf {
    let text = fs::read_to_string(stage.control.by_token()).expect("`up` wrote it");
    let lines = text.lines().map(|line| match line.trim_start().starts_with("token:") {
        true => format!("    token: {}\n", token.trim()),
        false => format!("{line}\n"),
    });
    let path = stage.state().join("account.kubeconfig");
    fs::write(&path, lines.collect::<String>()).expect("the state folder takes files");
    path
}

#[test]
fn the_role_is_enough_and_no_more() {
    let Some(mut stage) = Stage::build() else { return };
    stage.control.kubectl(&["apply", "-f", &deploy("kustomize/base/rbac.yaml")], None);
    stage.control.until_granted(OUR_ACCOUNT, &NEEDED);
    let token = stage.control.kubectl(&["create", "token", "-n", "kube-system", "portolan"], None);
    let kubeconfig = with_token(&stage, &token);
    stage.apply(&[manifest::service("web", 10)]);
    stage.apply(&manifest::slices("web", &["a2"]));
    stage.start_daemon(&kubeconfig);
    for version in Version::BOTH {
        Target::both("a1", manifest::cluster_ip(version, 10), 80)
            .iter()
            .for_each(|target| target.expect(&stage.lab, &["a2"]));
    }
    eventually("an Event says that it started", || {
        let events =
            stage.control.kubectl(&["get", "events.events.k8s.io", "-n", "default", "-o", "json"], None);
        let events: Value = serde_json::from_str(&events).map_err(|error| error.to_string())?;
        let reasons: Vec<String> = events["items"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|event| event["reason"].to_string())
            .collect();
        if reasons.contains(&"\"Starting\"".to_owned()) { Ok(()) } else { Err(format!("{reasons:?}")) }
    });
    let said = stage.daemon.said();
    for refused in ["refuses us (403)", "takes no Events from us"] {
        assert!(!said.contains(refused), "something was refused");
    }
    for (verb, what) in [
        ("get", "secrets"),
        ("list", "secrets"),
        ("get", "configmaps"),
        ("list", "pods"),
        ("update", "nodes"),
        ("patch", "services"),
        ("delete", "events.events.k8s.io"),
    ] {
        let account = format!("--as={OUR_ACCOUNT}");
        let asked = stage.control.try_kubectl(&["auth", "can-i", verb, what, "-A", &account], None);
        assert_eq!(String::from_utf8_lossy(&asked.stdout).trim(), "no", "{verb} {what}");
    }
}

#[test]
fn the_chart_lints_and_the_api_server_takes_it() {
    let Some(stage) = Stage::build() else { return };
    let helm =
        PathBuf::from(std::env::var_os("PORTOLAN_CLUSTER_TOOLS_DIR").expect("the stage has it")).join("helm");
    if !helm.exists() {
        println!("skipped: there is no Helm; `tools/cluster/build helm` builds it");
        return;
    }
    let run = |arguments: &[&str]| {
        let output =
            Command::new(&helm).args(arguments).env("HOME", stage.state()).output().expect("Helm can be run");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned(), errors)
    };
    let chart = deploy("helm/portolan");
    let (linted, text, errors) = run(&["lint", "--strict", "--kube-version=1.36.0", &chart]);
    assert!(linted, "{text}{errors}");

    let render = |set: &[&str]| {
        let first = ["template", "--namespace=kube-system", "--kube-version=1.36.0", "portolan", &chart];
        run(&[&first[..], &set.iter().flat_map(|value| ["--set", value]).collect::<Vec<_>>()].concat())
    };
    let server = "apiServer=https://control-plane.example:6443";
    for set in [
        &[server][..],
        &[server, "config.mode=iptables", "config.clusterCIDR=10.244.0.0/16"],
        &[server, "config.mode=ipvs"],
        &[server, "legacyIptables=true"],
        &["existingConfigMap=kube-proxy", "config.metricsBindAddress=[::]:10249", "podMonitor.enabled=true"],
    ] {
        let (rendered, text, errors) = render(set);
        assert!(rendered, "{errors}");
        assert_eq!(accepted(&stage, &text), 5, "account, role, binding, configuration, pods");
    }
    // The program takes what the chart writes.
    let (_, text, _) =
        render(&[server, "config.nodePortAddresses={primary,10.0.0.0/8}", "config.conntrack.min=1000"]);
    let written = text.split("  config.conf: |-\n").nth(1).expect("it is in the ConfigMap").lines();
    let written: Vec<&str> = written.map_while(|line| line.strip_prefix("    ")).collect();
    let file = stage.state().join("chart.conf");
    fs::write(&file, written.join("\n")).expect("the state folder takes files");
    let program = std::env::var_os("PORTOLAN_PROGRAM").expect("the stage has it");
    let checked =
        Command::new(program).args(["check-config", "--strict"]).arg(&file).output().expect("it runs");
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(checked.status.success() && said.contains("conntrack.min"), "{said}");
    // What cannot work is refused in a sentence.
    for (set, word) in [
        (&[][..], "set apiServer to the real address"),
        (&["apiServer=http://plain.example"], "apiServer"),
        (&[server, "config.mode=kernelspace"], "mode"),
        (&[server, "podMonitor.enabled=true"], "set config.metricsBindAddress to 0.0.0.0:10249"),
        (&[server, "imge.tag=1"], "imge"),
    ] {
        let (rendered, _, errors) = render(set);
        assert!(!rendered && errors.contains(word), "{set:?}: {errors}");
    }
}
