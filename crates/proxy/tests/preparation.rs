// SPDX-License-Identifier: Apache-2.0

//! The node as the binary finds and leaves it: kernel settings, what gets in the way, and how little it may be allowed.

mod daemon;

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Output},
};

use daemon::{BIN, Daemon, fetch, node, privileged, run_in, until};
use netlink::Netns;
use rustix::process::Signal;

/// Settings that every network namespace has for itself.
const ESTABLISHED: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established";
const UDP: &str = "/proc/sys/net/netfilter/nf_conntrack_udp_timeout";
/// One that only the whole machine has: nothing here may change it.
const MAX: &str = "/proc/sys/net/netfilter/nf_conntrack_max";

fn read(netns: &Netns, path: &str) -> Option<u64> {
    let text = netns.run(|| fs::read_to_string(path)).expect("entered").ok()?;
    text.trim().parse().ok()
}

/// `None`, with a word about it, where there are no privileges or no connection tracking.
fn tracked_node() -> Option<Netns> {
    let netns = privileged(node())?;
    if read(&netns, MAX).is_none() {
        assert!(std::env::var_os("CI").is_none(), "CI must have connection tracking");
        println!("skipped: this kernel has no connection tracking loaded");
        return None;
    }
    Some(netns)
}

fn services() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let text = "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\n  annotations:\n    \
                portolan.dev/endpoints: \"10.244.1.1:8080\"\nspec:\n  clusterIP: 10.96.0.10\n  ports:\n  - port: 80\n";
    fs::write(folder.path().join("web.yaml"), text).expect("written");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("opened");
    folder
}

#[test]
fn kernel_settings_are_set_at_start_by_init_only_and_when_they_change() {
    let Some(netns) = tracked_node() else { return };
    let before = fs::read_to_string(MAX).expect("read");
    let init = |args: &[&str]| run_in(&netns, &[&["--init-only"], args].concat());
    let (code, log) =
        init(&["--conntrack-max-per-core=1", "--conntrack-min=1", "--conntrack-udp-timeout=77s"]);
    assert_eq!(code, Some(0), "{log}");
    assert_eq!((read(&netns, ESTABLISHED), read(&netns, UDP)), (Some(86_400), Some(77)));
    assert!(log.contains("changed a kernel setting") && log.contains("nf_conntrack_udp_timeout"), "{log}");
    assert_eq!(fs::read_to_string(MAX).expect("read"), before, "a limit is never lowered");

    // Only the machine as a whole may raise the limit, so that here it is refused: an error for --init-only, ...
    let (code, log) = init(&["--conntrack-min=2000000000"]);
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("this node is not prepared: cannot set net/netfilter/nf_conntrack_max"), "{log}");

    // ... and a word of warning for one who serves.
    let (services, folder) = (services(), tempfile::tempdir().expect("a folder"));
    let config = folder.path().join("config.conf");
    let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
    let write = |conntrack: &str| fs::write(&config, format!("{head}conntrack: {{{conntrack}}}\n"));
    write("min: 2000000000, tcpEstablishedTimeout: 1h").expect("written");
    let args =
        [format!("--config={}", config.display()), format!("--source=file:{}", services.path().display())];
    let daemon = Daemon::spawn(&netns, &[&args[0], &args[1]]);
    until("it serves", || {
        fetch(&netns, 10256, "/healthz").is_some_and(|text| text.starts_with("HTTP/1.1 200"))
    });
    until("it is told", || daemon.log().contains("serving goes on: set it on the host"));
    assert_eq!(read(&netns, ESTABLISHED), Some(3_600));
    write("min: 1, tcpEstablishedTimeout: 2h").expect("written");
    until("the change is in force", || read(&netns, ESTABLISHED) == Some(7_200));
    daemon.signal(Signal::TERM);
    let (code, log) = daemon.wait();
    assert_eq!(code, Some(0), "{log}");
    assert_eq!(read(&netns, ESTABLISHED), Some(7_200), "stopping takes nothing back");
    assert_eq!(fs::read_to_string(MAX).expect("read"), before);
}

/// After `--init-only`: another user, CAP_NET_ADMIN and nothing else, and nothing that can be written to.
#[test]
fn net_admin_alone_on_a_read_only_root_is_enough() {
    let Some(netns) = tracked_node() else { return };
    let (code, log) = run_in(&netns, &["--init-only", "--conntrack-min=1", "--conntrack-max-per-core=1"]);
    assert_eq!(code, Some(0), "{log}");
    let services = services();
    // Where the binary was built may be closed to others.
    let binary = services.path().join("portolan");
    fs::copy(BIN, &binary).expect("copied");
    let script = format!(
        "set -e; mount --make-rprivate /; \
         for at in / /tmp /proc/sys; do mount --bind $at $at; mount -o remount,ro,bind $at; done; \
         if touch {0}/written 2>/dev/null; then echo 'the root can be written to' >&2; exit 9; fi; \
         exec setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs --bounding-set=-all,+net_admin \
         --inh-caps=-all,+net_admin --ambient-caps=-all,+net_admin {0}/portolan --source=file:{0} \
         --conntrack-min=1 --conntrack-max-per-core=1 --oom-score-adj=0",
        services.path().display()
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script]);
    let daemon = Daemon::of(&netns, command);
    until("it serves", || {
        assert!(!daemon.log().contains("the root can be written to"));
        fetch(&netns, 10256, "/healthz").is_some_and(|text| text.starts_with("HTTP/1.1 200"))
    });
    assert!(run_in(&netns, &["dump"]).1.contains("10.244.1.1"), "it is in the kernel");
    daemon.signal(Signal::TERM);
    let (code, log) = daemon.wait();
    assert_eq!(code, Some(0), "{log}");
    assert!(!log.contains("cannot set"), "nothing more was needed: {log}");
    let (code, text) = run_in(&netns, &["--cleanup"]);
    assert_eq!(code, Some(0), "{text}");
}

#[test]
fn without_net_admin_it_says_so_in_one_sentence() {
    let Some(netns) = privileged(node()) else { return };
    let services = services();
    let binary = services.path().join("portolan");
    fs::copy(BIN, &binary).expect("copied");
    // Every other capability, so that it is the one that is missing.
    let without = |capability: &str| {
        let all_but = |set: &str| format!("--{set}=-{capability}");
        let mut command = Command::new("setpriv");
        command.args([&all_but("bounding-set"), &all_but("inh-caps"), "--no-new-privs"]);
        command
    };
    // Root of a user namespace has it, but not for this network namespace.
    let nested = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user"]);
        command
    };
    // A folder that would be complained of, if it were looked at.
    let source = "--source=file:/nowhere/at/all";
    for mode in ["nftables", "iptables", "ipvs", "userspace"] {
        for mut command in [without("net_admin"), nested()] {
            command.arg(&binary).args([source, "--oom-score-adj=0"]).arg(format!("--proxy-mode={mode}"));
            let Output { status, stderr, .. } =
                netns.run(|| command.output()).expect("entered").expect("it runs");
            let text = String::from_utf8_lossy(&stderr).into_owned();
            assert_eq!(status.code(), Some(1), "{mode}: {text}");
            let errors: Vec<&str> = text.lines().filter(|line| line.starts_with('E')).collect();
            assert!(errors.len() == 1 && errors[0].contains("CAP_NET_ADMIN"), "{mode}: {text}");
            assert!(!text.contains("nowhere"), "it looked at the manifests first: {text}");
        }
    }
}

#[test]
fn what_gets_in_the_way_is_ranked_with_its_remedy() {
    let Some(netns) = tracked_node() else { return };
    let set = |path: &str, value: &str| netns.run(|| fs::write(path, value)).expect("entered").expect("set");
    set("/proc/sys/net/ipv4/ip_forward", "1");
    set("/proc/sys/net/ipv4/ip_local_port_range", "20000 60999");
    set("/proc/sys/net/ipv4/conf/lo/rp_filter", "1");
    let names = |args: &[&str]| {
        let (code, text) = run_in(&netns, &[&["check-node", "-o", "json"], args].concat());
        let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let list = value["findings"].as_array().expect("a list").clone();
        assert!(list.iter().all(|f| f["remedy"].as_str().is_some_and(|remedy| !remedy.is_empty())), "{text}");
        let names: Vec<String> = list.iter().filter_map(|f| Some(f["name"].as_str()?.to_owned())).collect();
        (code, names)
    };
    let quiet = ["--conntrack-max-per-core=0"];
    assert_eq!(names(&quiet), (Some(0), vec!["ports-overlap".to_owned()]));
    assert_eq!(names(&["--node-port-range=100-200", quiet[0]]), (Some(0), vec![]));
    set("/proc/sys/net/ipv4/ip_local_reserved_ports", "30000-32767");
    assert_eq!(names(&quiet), (Some(0), vec![]));
    assert!(run_in(&netns, &["check-node", quiet[0]]).1.contains("Nothing on this node gets in the way"));

    set("/proc/sys/net/ipv4/ip_forward", "0");
    if Path::new("/usr/sbin/nft").exists() {
        let wall = "add table inet wall; add chain inet wall gate { type filter hook forward priority 0; policy drop; }";
        let made = netns.run(|| Command::new("/usr/sbin/nft").arg(wall).status()).expect("entered");
        assert!(made.expect("nft runs").success());
        let found = names(&quiet);
        assert_eq!(found, (Some(1), vec!["forwarding-off".to_owned(), "forward-drop".to_owned()]));
        assert!(run_in(&netns, &["check-node"]).1.contains("inet wall gate"));
    } else {
        assert_eq!(names(&quiet), (Some(1), vec!["forwarding-off".to_owned()]));
    }

    // The daemon says the same at start.
    let services = services();
    let daemon = Daemon::spawn(&netns, &[&format!("--source=file:{}", services.path().display())]);
    until("it is told", || {
        daemon.log().contains("name=\"forwarding-off\" remedy=\"Run: sysctl -w net.ipv4.ip_forward=1\"")
    });
}
