// SPDX-License-Identifier: Apache-2.0

//! The binary as operators and manifests call it: what it says and how it exits, without touching a kernel.

use std::{
    fs,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    process::{Command, Output},
};

const BIN: &str = env!("CARGO_BIN_EXE_portolan");

/// Should it run on where it ought to refuse, it runs in a network that nobody else uses. Who may not make one
/// cannot do harm either.
fn portolan(args: &[&str]) -> Output {
    let run = || Command::new(BIN).args(args).output().expect("the binary runs");
    match netlink::Netns::new() {
        Ok(netns) => netns.run(run).expect("entered"),
        Err(_) => run(),
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Exit code 1, and the last line of stderr.
fn refused(args: &[&str]) -> String {
    let output = portolan(args);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {}", stderr(&output));
    assert_eq!(stdout(&output), "", "{args:?}");
    let text = stderr(&output);
    text.lines().last().expect("a reason").to_owned()
}

#[test]
fn bad_command_lines() {
    assert_eq!(refused(&["--foo"]), "Error: unknown flag: --foo");
    assert_eq!(
        refused(&["--cluster-cdir=10.0.0.0/8"]),
        "Error: unknown flag: --cluster-cdir (did you mean --cluster-cidr?)"
    );
    assert_eq!(refused(&["extra"]), "Error: \"portolan\" does not take any arguments, got [\"extra\"]");
    assert_eq!(refused(&["--kubeconfig"]), "Error: flag needs an argument: --kubeconfig");
    assert!(refused(&["--iptables-sync-period=5"]).ends_with("time: missing unit in duration \"5\""));
    for command in ["demo", "plan", "dump"] {
        assert_eq!(refused(&[command, "--foo"]), "Error: unknown flag: --foo", "{command}");
    }
    let hint = stderr(&portolan(&["--foo"]));
    assert!(hint.starts_with("See 'portolan --help'"), "{hint}");
}

#[test]
fn help_and_version() {
    let help = portolan(&["--help"]);
    assert!(help.status.success() && stdout(&help).contains("--cluster-cidr"));
    assert!(portolan(&["-h"]).status.success());
    let version = portolan(&["--version"]);
    assert!(version.status.success());
    assert_eq!(stdout(&version), format!("Portolan v{}\n", env!("CARGO_PKG_VERSION")));
    assert!(portolan(&["demo", "--help"]).status.success());
}

#[test]
fn a_configuration_that_is_wrong_is_one_line_with_its_fields() {
    let line = refused(&["--proxy-mode=IPTables", "--oom-score-adj=2000", "--cleanup"]);
    assert!(line.contains("mode: invalid value") && line.contains("oomScoreAdj: invalid value"), "{line}");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("config.yaml");
    fs::write(&path, "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nnftables:\n  syncPeriod: 5\n")
        .expect("written");
    let path = path.to_str().expect("UTF-8");
    let line = refused(&["--config", path]);
    assert!(line.contains("line 4: nftables.syncPeriod"), "{line}");
    assert!(refused(&["--config", "/nonexistent"]).contains("/nonexistent: No such file"));
}

#[test]
fn an_unknown_field_is_told_and_ignored() {
    let folder = tempfile::tempdir().expect("a folder");
    let (config, written) = (folder.path().join("config.yaml"), folder.path().join("written.yaml"));
    let text = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nclusterCIDR: 10.0.0.0/8\nmod: x\n";
    fs::write(&config, text).expect("written");
    let (config, to) = (config.to_str().expect("UTF-8"), written.to_str().expect("UTF-8"));
    let output = portolan(&["--config", config, "--write-config-to", to]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("line 4: unknown field \"mod\""), "{}", stderr(&output));
    // What was written is what is read: a second round gives the same text.
    let first = fs::read_to_string(&written).expect("it was written");
    assert!(first.contains("clusterCIDR: 10.0.0.0/8") && first.contains("mode: nftables"), "{first}");
    let again = folder.path().join("again.yaml");
    assert!(
        portolan(&["--config", to, "--write-config-to", again.to_str().expect("UTF-8")]).status.success()
    );
    assert_eq!(fs::read_to_string(&again).expect("it was written"), first);
    assert!(refused(&["--write-config-to", "/nonexistent/x"]).contains("cannot write"));
}

#[test]
fn what_cannot_run_says_why() {
    let line = refused(&["--proxy-mode=kernelspace", "--source=file:/"]);
    assert!(line.contains("must be nftables, iptables, ipvs or userspace"), "{line}");
    let line = refused(&["--kubeconfig=/nonexistent"]);
    assert!(line.contains("cannot use the kubeconfig /nonexistent: No such file"), "{line}");
    assert!(refused(&["--source=file:/nonexistent"]).contains("cannot read /nonexistent"));
    assert!(refused(&["--source=file:/", "--hostname-override= "]).contains("name is empty"));
}

#[test]
fn json_logs_are_json() {
    let line = refused(&["--logging-format=json", "--kubeconfig=/nonexistent"]);
    let value: serde_json::Value = serde_json::from_str(&line).expect("JSON");
    assert!(value["msg"].as_str().expect("a message").contains("/nonexistent"));
}

#[test]
fn a_plan_needs_no_kernel_and_no_privileges() {
    let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples");
    let output = portolan(&["plan", examples, "--cluster-cidr=10.244.0.0/16", "--hostname-override=node-a"]);
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stderr(&output), "", "the examples are flawless");
    for frontend in
        ["10.96.0.10:80/tcp", "nodeport:30080/tcp IPv4", "198.51.100.10:80/tcp", "10.96.0.53:53/udp"]
    {
        assert!(text.contains(frontend), "{frontend} is missing in\n{text}");
    }
    assert!(text.contains("10.244.1.1:8080* 10.244.2.1:8080 10.244.2.2:8080"), "{text}");
    let by_flag = portolan(&[
        "plan",
        &format!("--source=file:{examples}"),
        "--cluster-cidr=10.244.0.0/16",
        "--hostname-override=node-a",
    ]);
    assert_eq!(stdout(&by_flag), text);
    assert!(refused(&["plan"]).contains("file"));
}

/// As nobody, with no capability at all.
#[test]
fn without_privileges_one_sentence_says_what_is_missing() {
    if !rustix::process::geteuid().is_root() {
        assert!(std::env::var_os("CI").is_none(), "this test must run as root in CI");
        println!("skipped: only root can become nobody");
        return;
    }
    // Where the binary was built may be closed to others.
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("opened");
    let binary = folder.path().join("portolan");
    fs::copy(BIN, &binary).expect("copied");
    for (args, word) in [
        (&["--source=file:/etc/hostname", "--healthz-port=0", "--metrics-port=0"][..], "CAP_NET_ADMIN"),
        (&["--cleanup"], "CAP_NET_ADMIN"),
        (&["withdraw"], "CAP_NET_ADMIN"),
        (&["--init-only"], "CAP_NET_ADMIN"),
        (&["dump"], "CAP_NET_ADMIN"),
        (&["demo"], "root"),
    ] {
        let output = loop {
            // A child that another test makes may hold the copy open for writing until it has started.
            match Command::new(&binary).args(args).uid(65534).gid(65534).output() {
                Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {}
                output => break output.expect("it runs"),
            }
        };
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let line = stderr(&output).lines().last().expect("a reason").to_owned();
        assert!(line.contains(word), "{args:?}: {line}");
    }
}

#[test]
fn a_mode_that_does_not_exist_is_found_before_the_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("config.conf");
    let text =
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: kernelspace\n";
    std::fs::write(&file, text).expect("written");
    // Compared with itself, so that nothing that runs here matters.
    let check = || {
        let run =
            Command::new(env!("CARGO_BIN_EXE_portolan")).arg("check-config").args([&file, &file]).output();
        let output = run.expect("it runs");
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (code, said) = check();
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("config.conf:3") && said.contains("must be nftables, iptables, ipvs or userspace"),
        "{said}"
    );
    let ours = "apiVersion: portolan.dev/v1alpha1\nkind: PortolanConfiguration\nmode: nftables\n";
    std::fs::write(folder.path().join("portolan.conf"), ours).expect("written");
    let (code, said) = check();
    assert_eq!(code, Some(0), "{said}");
}
