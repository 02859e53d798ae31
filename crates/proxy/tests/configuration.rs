// SPDX-License-Identifier: Apache-2.0

//! The binary and its configuration files: what it says of them, how it follows them, and that what runs us also runs
//! kube-proxy.

mod daemon;

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use daemon::{BIN, Daemon, fetch, node, privileged, run_in, until};
use netlink::Netns;
use rustix::process::Signal;

const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
const OWN: &str = "apiVersion: portolan.dev/v1alpha1\nkind: PortolanConfiguration\n";

fn portolan(args: &[&str]) -> (Option<i32>, String, String) {
    let run = || Command::new(BIN).args(args).env("RUST_BACKTRACE", "1").output().expect("the binary runs");
    // Should it run on where it ought to refuse, it runs in a network that nobody else uses.
    let output = match Netns::new() {
        Ok(netns) => netns.run(run).expect("entered"),
        Err(_) => run(),
    };
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, text).expect("written");
    path
}

/// What a user tries, and what he is told: one sentence, exit code 1, and no traces of the program's insides.
#[test]
fn what_is_wrong_is_one_sentence() {
    let folder = tempfile::tempdir().expect("a folder");
    let broken = write(folder.path(), "broken.yaml", "apiVersion: [\n");
    let folder_path = folder.path().to_str().expect("UTF-8").to_owned();
    let secret = write(folder.path(), "kubeconfig", "not: a: kubeconfig\n");
    let config = |path: &Path| format!("--config={}", path.display());
    let alien = write(folder.path(), "pod.yaml", "apiVersion: v1\nkind: Pod\n");
    let two = write(folder.path(), "two.yaml", &format!("{HEAD}---\n{HEAD}"));
    let own = write(folder.path(), "own", &format!("{OWN}flavour: sweet\n"));
    for (args, says) in [
        (vec!["--kubeconfg=/x".to_owned()], "unknown flag: --kubeconfg (did you mean --kubeconfig?)"),
        (vec!["--healthz-bind-address=0.0.0.0:70000".to_owned()], "with a port from 1 to 65535"),
        (vec!["--metrics-bind-address=127.0.0.1:0".to_owned()], "with a port from 1 to 65535"),
        (vec!["--healthz-port=many".to_owned()], "invalid argument \"many\""),
        (vec!["--node-port-range=30000".to_owned()], "must be two ports from 1 to 65535"),
        (vec!["--source=somewhere".to_owned()], "must be kubernetes, or file:PATH"),
        (vec!["--iptables-masquerade-bit=32".to_owned()], "iptables.masqueradeBit"),
        (vec!["--feature-gates=Nonsense=true".to_owned()], "unrecognized feature gate: Nonsense"),
        (vec!["--kubeconfig=/nonexistent".to_owned()], "cannot use the kubeconfig /nonexistent"),
        (vec![format!("--kubeconfig={}", secret.display())], "cannot use the kubeconfig"),
        (vec![config(&broken)], "line 1"),
        (vec![config(&alien)], "kind is \"Pod\""),
        (vec![config(&two)], "there is more than one document in it; a configuration is one"),
        (vec![config(Path::new(&folder_path))], "Is a directory"),
        (vec![format!("--portolan-config={}", own.display())], "line 3: flavour: unknown field"),
        (vec!["--version=maybe".to_owned()], "must be true, false, raw, or a version"),
    ] {
        let words: Vec<&str> = args.iter().map(String::as_str).collect();
        let (code, stdout, stderr) = portolan(&words);
        assert_eq!((code, stdout.as_str()), (Some(1), ""), "{args:?}: {stderr}");
        let last = stderr.lines().last().expect("a reason");
        assert!(last.contains(says), "{args:?}: {last}");
        assert!(!stderr.contains("panicked") && !stderr.contains("backtrace"), "{args:?}: {stderr}");
        let reasons = stderr.lines().filter(|line| line.starts_with('E')).count();
        assert_eq!(reasons, 1, "{args:?}: {stderr}");
    }
}

#[test]
fn a_file_is_checked_without_being_used() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = write(
        folder.path(),
        "config.conf",
        &format!("{HEAD}mod: x\noomScoreAdj: 2000\nconntrack:\n  min: -1\nportRange: 1-2\n"),
    );
    let path = path.to_str().expect("UTF-8");
    let (code, table, _) = portolan(&["check-config", path]);
    assert_eq!(code, Some(1), "{table}");
    for words in ["cannot be used", "config.conf:3", "config.conf:4", "conntrack.min", "unused"] {
        assert!(table.contains(words), "{words:?} is missing in\n{table}");
    }
    let (code, json, _) = portolan(&["check-config", path, "-o", "json"]);
    let value: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!((code, value["valid"].as_bool()), (Some(1), Some(false)));
    let errors = value["remarks"].as_array().expect("a list").iter().filter(|r| r["severity"] == "error");
    let lines: Vec<_> = errors.map(|remark| remark["line"].as_u64()).collect();
    assert_eq!(lines, [Some(4), Some(6)], "all of them, not the first only");

    let old = write(folder.path(), "old.conf", &format!("{HEAD}clusterCIDR: 10.0.0.0/8\n"));
    let new = format!("{HEAD}clusterCIDR: 10.1.0.0/16\nhealthzBindAddress: 0.0.0.0:1\nwhat: 1\n");
    let new = write(folder.path(), "new.conf", &new);
    let args = ["check-config", new.to_str().expect("UTF-8"), old.to_str().expect("UTF-8")];
    let (code, table, _) = portolan(&args);
    assert_eq!(code, Some(0), "an unknown field is no error: {table}");
    let row = |field: &str| {
        let line = table.lines().find(|line| line.starts_with(field)).unwrap_or_else(|| panic!("{table}"));
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(row("clusterCIDR"), "clusterCIDR 10.0.0.0/8 10.1.0.0/16 applied at once");
    assert_eq!(row("healthzBind"), "healthzBindAddress 0.0.0.0:10256 0.0.0.0:1 needs a restart");
    assert_eq!(
        portolan(&[args[0], args[1], args[2], "--strict"]).0,
        Some(1),
        "but it is one when asked to be"
    );

    let own = write(folder.path(), "portolan.conf", &format!("{OWN}mode: sideways\nsource: nowhere\n"));
    let (code, table, _) = portolan(&["check-config", own.to_str().expect("UTF-8")]);
    assert!(code == Some(1) && table.contains("portolan.conf:4"), "{table}");
    let (code, table, _) = portolan(&args);
    assert!(
        code == Some(1) && table.contains("portolan.conf:4"),
        "it is checked with its neighbour: {table}"
    );
    assert_eq!(portolan(&["check-config"]).0, Some(1));
    assert_eq!(portolan(&["check-config", "/nonexistent"]).0, Some(1));
}

/// With nothing that runs and no other file, the mode is what differs most.
#[test]
fn another_mode_than_the_default_is_a_change() {
    let folder = tempfile::tempdir().expect("a folder");
    for (mode, changed) in [("iptables", true), ("ipvs", true), ("userspace", true), ("nftables", false)] {
        let path = write(folder.path(), "config.conf", &format!("{HEAD}mode: {mode}\n"));
        let (code, table, _) = portolan(&["check-config", path.to_str().expect("UTF-8")]);
        assert_eq!(code, Some(0), "{table}");
        assert_eq!(table.contains("changes nothing"), !changed, "{table}");
        let rows: Vec<Vec<&str>> = table
            .lines()
            .skip_while(|line| !line.starts_with("FIELD"))
            .skip(1)
            .map(|line| line.split_whitespace().collect())
            .collect();
        let told = [vec!["mode", "nftables", mode]];
        assert_eq!(
            rows,
            if changed { &told[..] } else { &[] },
            "what hangs on the mode is no change: {table}"
        );
    }
}

/// A mounted ConfigMap: files are links through `..data`, which is turned to a new folder as a whole.
struct ConfigMap {
    folder: tempfile::TempDir,
    version: u32,
}

impl ConfigMap {
    fn new(files: &[(&str, &str)]) -> ConfigMap {
        let mut map = ConfigMap { folder: tempfile::tempdir().expect("a folder"), version: 0 };
        map.update(files);
        for (name, _) in files {
            symlink(format!("..data/{name}"), map.folder.path().join(name)).expect("linked");
        }
        map
    }

    fn update(&mut self, files: &[(&str, &str)]) {
        self.version += 1;
        let fresh = self.folder.path().join(format!("..version{}", self.version));
        fs::create_dir(&fresh).expect("made");
        for (name, text) in files {
            write(&fresh, name, text);
        }
        let beside = self.folder.path().join("..data_tmp");
        symlink(&fresh, &beside).expect("linked");
        fs::rename(&beside, self.folder.path().join("..data")).expect("turned");
    }

    fn path(&self) -> String {
        format!("--config={}", self.folder.path().join("config.conf").display())
    }
}

fn services() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let text = "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\n  annotations:\n    \
                portolan.dev/endpoints: \"10.244.1.1:8080\"\nspec:\n  clusterIP: 10.96.0.10\n  ports:\n  - port: 80\n";
    write(folder.path(), "web.yaml", text);
    folder
}

fn healthy(netns: &Netns) {
    until("/healthz is 200", || {
        fetch(netns, 10256, "/healthz").is_some_and(|text| text.starts_with("HTTP/1.1 200"))
    });
}

#[test]
fn a_changed_file_is_applied_or_refused_or_ends_the_process() {
    let Some(netns) = privileged(node()) else { return };
    let services = services();
    let own = format!("{OWN}source: file:{}\n", services.path().display());
    let body = |more: &str| format!("{HEAD}{more}");
    let first = body("clusterCIDR: 10.244.0.0/16\n");
    let mut map = ConfigMap::new(&[("config.conf", &first), ("portolan.conf", &own)]);
    let daemon = Daemon::spawn(&netns, &[&map.path()]);
    healthy(&netns);
    let configz = || fetch(&netns, 10249, "/configz").unwrap_or_default();
    assert!(configz().contains("10.244.0.0/16"));
    assert!(run_in(&netns, &["dump"]).1.contains("10.244.0.0/16"), "pods are told by their addresses");

    // Applied while it runs.
    let second = body("clusterCIDR: 10.9.0.0/16\nlogging: {verbosity: 2}\nnftables: {masqueradeAll: true}\n");
    map.update(&[("config.conf", &second), ("portolan.conf", &own)]);
    until("the new range is known", || configz().contains("10.9.0.0/16"));
    until("and in force", || {
        let dump = run_in(&netns, &["dump"]).1;
        dump.contains("10.9.0.0/16") && !dump.contains("10.244.0.0/16")
    });

    // Refused: what is in force stays.
    map.update(&[("config.conf", &body("clusterCIDR: nonsense\n")), ("portolan.conf", &own)]);
    until("the reason is told", || daemon.log().contains("the settings in force stay"));
    assert!(configz().contains("10.9.0.0/16"));
    // Asked for: read again, although nothing has changed.
    map.update(&[("config.conf", &second), ("portolan.conf", &own)]);
    until("it is as it was", || daemon.log().contains("no setting has"));
    daemon.signal(Signal::HUP);
    until("the question is answered", || daemon.log().contains("asked to reload"));

    // What would change is told by comparing with what runs.
    let third = body(
        "clusterCIDR: 10.9.0.0/16\nlogging: {verbosity: 2}\nnftables: {masqueradeAll: true}\n\
                      healthzBindAddress: 127.0.0.1:10256\n",
    );
    let candidate = write(services.path(), "candidate.conf", &third);
    let (code, table) = run_in(&netns, &["check-config", candidate.to_str().expect("UTF-8")]);
    assert!(code == Some(0) && table.contains("runs now (at 127.0.0.1:10249)"), "{table}");
    let changes: Vec<_> = table.lines().skip_while(|line| !line.starts_with("FIELD")).skip(1).collect();
    assert_eq!(changes.len(), 1, "{table}");
    assert!(
        changes[0].starts_with("healthzBindAddress") && changes[0].contains("needs a restart"),
        "{table}"
    );

    // Cannot be changed while it runs.
    map.update(&[("config.conf", &third), ("portolan.conf", &own)]);
    let (code, log) = daemon.wait();
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("in what needs a restart: healthzBindAddress"), "{log}");
    for words in [
        "the configuration has changed and is in force\" fields=\"clusterCIDR, logging.verbosity, nftables.masqueradeAll\"",
        "clusterCIDR: invalid value \\\"nonsense\\\"",
    ] {
        assert!(
            log.contains(words) || log.contains(&words.replace("\\\"", "\"")),
            "{words:?} is missing in\n{log}"
        );
    }
    assert!(run_in(&netns, &["dump"]).1.contains("10.244.1.1"), "what is in the kernel stays");
    let (code, text) = run_in(&netns, &["--cleanup"]);
    assert_eq!(code, Some(0), "{text}");
}

/// The ConfigMap that runs us, settings of our own included, also runs kube-proxy.
#[test]
fn the_same_configuration_starts_kube_proxy() {
    let Some(kube_proxy) = kube_proxy() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    // As kubeadm writes it.
    let text = format!(
        "{HEAD}bindAddress: 0.0.0.0\nbindAddressHardFail: false\nclientConnection:\n  acceptContentTypes: \"\"\n  \
         burst: 0\n  contentType: \"\"\n  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf\n  qps: 0\nclusterCIDR: \
         10.244.0.0/16\nconfigSyncPeriod: 0s\nconntrack:\n  maxPerCore: null\n  min: null\n  tcpBeLiberal: false\n  \
         tcpCloseWaitTimeout: null\n  tcpEstablishedTimeout: null\n  udpStreamTimeout: 0s\n  udpTimeout: 0s\n\
         detectLocal:\n  bridgeInterface: \"\"\n  interfaceNamePrefix: \"\"\ndetectLocalMode: \"\"\nenableProfiling: \
         false\nhealthzBindAddress: \"\"\nhostnameOverride: \"\"\niptables:\n  localhostNodePorts: null\n  \
         masqueradeAll: false\n  masqueradeBit: null\n  minSyncPeriod: 0s\n  syncPeriod: 0s\nlogging:\n  \
         flushFrequency: 0\n  options:\n    json:\n      infoBufferSize: \"0\"\n    text:\n      infoBufferSize: \"0\"\n  \
         verbosity: 0\nmetricsBindAddress: \"\"\nmode: nftables\nnodePortAddresses: null\noomScoreAdj: null\n\
         portRange: \"\"\nshowHiddenMetricsForVersion: \"\"\n"
    );
    let config = write(folder.path(), "config.conf", &text);
    write(folder.path(), "portolan.conf", &format!("{OWN}mode: nftables\nnodePortRange: 30000-30999\n"));
    let resolve = |program: &Path, name: &str| {
        let to = folder.path().join(name);
        let output = Command::new(program)
            .arg(format!("--config={}", config.display()))
            .arg(format!("--write-config-to={}", to.display()))
            .output()
            .expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = fs::read_to_string(to).expect("written");
        serde_saphyr::from_str::<serde_json::Value>(&text).expect("YAML")
    };
    assert_eq!(
        resolve(Path::new(BIN), "ours"),
        resolve(&kube_proxy, "theirs"),
        "and both understand the same"
    );
    // What we write, it reads, and the other way round.
    for (from, program) in [("ours", kube_proxy.as_path()), ("theirs", Path::new(BIN))] {
        let output = Command::new(program)
            .arg(format!("--config={}", folder.path().join(from).display()))
            .arg(format!("--write-config-to={}", folder.path().join("again").display()))
            .output()
            .expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Flags make the same configuration as kube-proxy's, in every mode. (Which flags there are is compared in
/// tests/cluster.)
#[test]
fn flags_resolve_as_those_of_kube_proxy() {
    let Some(kube_proxy) = kube_proxy() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let resolve = |program: &Path, args: &[&str]| {
        let to = folder.path().join("resolved");
        let output =
            Command::new(program).args(args).arg(format!("--write-config-to={}", to.display())).output();
        assert!(output.expect("it runs").status.success(), "{args:?}");
        serde_saphyr::from_str::<serde_json::Value>(&fs::read_to_string(&to).expect("written")).expect("YAML")
    };
    for args in [
        &["--proxy-mode=nftables"][..],
        &["--proxy-mode=iptables"],
        &["--proxy-mode=ipvs"],
        &["--proxy-mode=nftables", "--bind-address=::1", "--masquerade-all", "--iptables-min-sync-period=0s"],
        &["--proxy-mode=iptables", "--iptables-sync-period=1m", "--nodeport-addresses=10.0.0.0/8,fd00::/8"],
        &[
            "--proxy-mode=ipvs",
            "--ipvs-sync-period=1m",
            "--ipvs-scheduler=rr",
            "--ipvs-exclude-cidrs=10.0.0.0/8",
        ],
        &["--proxy-mode=nftables", "--conntrack-max-per-core=0", "--conntrack-udp-timeout=1m", "-v=3"],
    ] {
        assert_eq!(resolve(Path::new(BIN), args), resolve(&kube_proxy, args), "{args:?}");
    }
}

/// The real one, where it has been built for the cluster tests.
fn kube_proxy() -> Option<PathBuf> {
    let home = std::env::var_os("HOME").map(PathBuf::from)?;
    let versions = fs::read_dir(home.join(".cache/portolan/cluster-tools")).into_iter().flatten().flatten();
    let found = versions.map(|version| version.path().join("kube-proxy")).find(|path| path.exists());
    if found.is_none() {
        println!("skipped: there is no kube-proxy; tools/cluster/build makes one");
    }
    found
}
