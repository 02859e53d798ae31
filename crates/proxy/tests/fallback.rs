// SPDX-License-Identifier: Apache-2.0

//! The ipvs mode on a kernel that has no IPVS: another mode serves, and everybody hears of it.

mod daemon;

use std::{fs, path::Path};

use daemon::{Daemon, fetch, node, privileged, until};
use netlink::{Netns, ipvs::Ipvs};

const SERVICE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: web, annotations: {portolan.dev/endpoints: \
                       \"10.244.1.1:8080\"}}\nspec: {clusterIP: 10.96.0.10, ports: [{port: 80}]}\n";

/// `None` where IPVS is to be had, or privileges are not.
fn without_ipvs() -> Option<Netns> {
    let netns = privileged(node())?;
    if Ipvs::open_in(&netns).is_ok() {
        println!("skipped: this kernel has IPVS");
        return None;
    }
    Some(netns)
}

fn args(folder: &Path, fallback: &str) -> Vec<String> {
    fs::write(folder.join("web.yaml"), SERVICE).expect("written");
    [
        format!("--source=file:{}", folder.display()),
        "--hostname-override=node-a".to_owned(),
        "--proxy-mode=ipvs".to_owned(),
        format!("--ipvs-fallback={fallback}"),
        "--healthz-port=0".to_owned(),
        "--metrics-bind-address=127.0.0.1:10249".to_owned(),
    ]
    .into()
}

#[test]
fn another_mode_is_taken_and_told() {
    for fallback in ["iptables", "nftables"] {
        let Some(netns) = without_ipvs() else { return };
        let folder = tempfile::tempdir().expect("a folder");
        let args = args(folder.path(), fallback);
        let daemon = Daemon::spawn(&netns, &args.iter().map(String::as_str).collect::<Vec<_>>());
        let page = |path: &str| fetch(&netns, 10_249, path).unwrap_or_default();
        until("it tells its mode", || page("/proxyMode").ends_with(fallback));
        let metric = format!("portolan_mode_fallback{{in_force=\"{fallback}\",wanted=\"ipvs\"}} 1");
        assert!(page("/metrics").contains(&metric), "{}", page("/metrics"));
        let log = daemon.log();
        let says = format!("mode {fallback} is in force, not ipvs: ");
        assert!(log.contains(&says) && log.contains("ip_vs"), "{log}");
        until("it serves", || {
            daemon.log().contains("in force") && page("/metrics").contains("portolan_frontends 1")
        });
    }
}

#[test]
fn who_wants_no_other_mode_gets_a_sentence() {
    let Some(netns) = without_ipvs() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let args = args(folder.path(), "none");
    let daemon = Daemon::spawn(&netns, &args.iter().map(String::as_str).collect::<Vec<_>>());
    let (code, log) = daemon.wait();
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("ipvs mode cannot work here: the kernel has not") && log.contains("ip_vs"), "{log}");
    assert!(log.contains("--ipvs-fallback=none"), "{log}");
}
