// SPDX-License-Identifier: Apache-2.0

//! The same in ipvs mode, where the kernel has it (`make test-vm`): restart, crash, take-over, change of mode, and others
//! who meddle.

use std::{env, time::Instant};

use lab::address::{NODE_A, Version, address_of};
use stage::{eventually, manifest};

use crate::bed::{Bed, NODE_PORT, Traffic, program};

const IPVS: &str = "--proxy-mode=ipvs";

/// `None` where the kernel has no IPVS.
pub(crate) fn build() -> Option<Bed> {
    if env::var_os("PORTOLAN_HAS_IPVS").is_none() && netlink::ipvs::Ipvs::open().is_err() {
        println!("skipped: this kernel has no IPVS; `make test-vm` runs it on one that does");
        return None;
    }
    Bed::build()
}

/// What the kernel holds, without counts, in a stable order.
fn state(bed: &Bed) -> Vec<String> {
    let servers = bed.command(&["ipvsadm", "-Sn"]);
    let sets = bed.command(&["ipset", "save"]);
    let link = bed.command(&["ip", "-o", "address", "show", "dev", "kube-ipvs0"]);
    let members = sets.lines().filter(|line| line.starts_with("add "));
    let addresses = link.lines().filter_map(|line| line.split_whitespace().nth(3));
    let mut lines: Vec<String> = servers.lines().chain(members).chain(addresses).map(str::to_owned).collect();
    lines.sort();
    lines.extend(bed.daemon.rules());
    lines
}

#[track_caller]
fn must_hold(bed: &Bed, wanted: &[String]) {
    let now = state(bed);
    let gone: Vec<&String> = wanted.iter().filter(|line| !now.contains(line)).collect();
    let new: Vec<&String> = now.iter().filter(|line| !wanted.contains(line)).collect();
    assert!(gone.is_empty() && new.is_empty(), "gone: {gone:#?}, and new: {new:#?}");
}

#[test]
fn restarts_and_crashes_go_unnoticed() {
    let Some(mut bed) = build() else { return };
    bed.start_with(&[IPVS]);
    let first = state(&bed);
    bed.under_load(Traffic::All, "ipvs: SIGTERM, then SIGKILL, and start", |bed, go_on| {
        bed.daemon.stop();
        must_hold(bed, &first);
        go_on();
        bed.start_with(&[IPVS]);
        must_hold(bed, &first);
        go_on();
        bed.daemon.kill();
        must_hold(bed, &first);
        go_on();
        bed.start_with(&[IPVS]);
        must_hold(bed, &first);
    });
}

/// Leaves its rules, and the other mode removes them once its own serve.
fn leave_for(bed: &mut Bed, other: &str) {
    bed.start_with(&[IPVS]);
    let flag = format!("--proxy-mode={other}");
    bed.under_load(Traffic::All, &format!("ipvs to {other}"), |bed, go_on| {
        bed.daemon.stop();
        bed.start_with(&[&flag]);
        go_on();
        go_on();
    });
}

fn to_and_from(other: &str) {
    let Some(mut bed) = build() else { return };
    leave_for(&mut bed, other);
    bed.under_load(Traffic::All, &format!("{other} to ipvs"), |bed, go_on| {
        bed.daemon.stop();
        bed.start_with(&[IPVS]);
        go_on();
        eventually("what the other mode left is gone", || match bed.command(&["nft", "list", "ruleset"]) {
            rules if ["table ip portolan", "KUBE-SVC-", "KUBE-SEP-"].iter().any(|it| rules.contains(it)) => {
                Err(rules)
            }
            _ => Ok(()),
        });
    });
}

#[test]
fn to_nftables_and_back() {
    to_and_from("nftables");
}

#[test]
fn to_iptables_and_back() {
    to_and_from("iptables");
}

/// What is open stays with IPVS, and only that.
#[test]
fn to_userspace() {
    let Some(mut bed) = build() else { return };
    leave_for(&mut bed, "userspace");
}

/// What the process carries ends with it; whoever comes new is refused by nobody.
#[test]
fn from_userspace() {
    let Some(mut bed) = build() else { return };
    bed.start_with(&["--proxy-mode=userspace", "--userspace-drain=2s"]);
    come_from_userspace(&mut bed);
}

/// Virtual servers that wait for connections of the time before, and their addresses, are in nobody's way.
#[test]
fn back_from_userspace() {
    let Some(mut bed) = build() else { return };
    leave_for(&mut bed, "userspace");
    come_from_userspace(&mut bed);
}

fn come_from_userspace(bed: &mut Bed) {
    bed.under_load(Traffic::New, "userspace to ipvs", |bed, go_on| {
        bed.daemon.stop();
        go_on();
        bed.start_with(&[IPVS]);
        go_on();
        eventually("what the userspace mode left is gone", || {
            let left = bed.command(&["nft", "list", "tables"]) + &bed.command(&["ip", "rule"]);
            if left.contains("portolan") || left.contains("20043") { Err(left) } else { Ok(()) }
        });
    });
}

/// What kube-proxy's ipvs mode writes for the service `web` and for one that is gone meanwhile.
fn like_kube_proxy(version: Version) -> Vec<String> {
    let (six, inet, tool) = match version {
        Version::V4 => ("", "inet", "iptables"),
        Version::V6 => ("6-", "inet6", "ip6tables"),
    };
    let [web, gone] = [10, 99].map(|host| manifest::cluster_ip(version, host));
    let node = version.address(NODE_A);
    let at = |ip: std::net::IpAddr, port: u16| std::net::SocketAddr::new(ip, port).to_string();
    let pod = |name: &str| at(version.address(address_of(name).expect("a pod")), manifest::POD_PORT);
    let mut lines = Vec::new();
    let prefix = if version == Version::V4 { 32 } else { 128 };
    for ip in [web, gone] {
        lines.push(format!("ip address add {ip}/{prefix} dev kube-ipvs0"));
    }
    for (place, pods) in [
        (at(web, 80), &["a1", "a2", "b1"][..]),
        (at(node, NODE_PORT), &["a1", "a2", "b1"]),
        (at(gone, 80), &["b2"]),
    ] {
        for kind in ["-t", "-u"] {
            lines.push(format!("ipvsadm -A {kind} {place} -s rr"));
            lines.extend(
                pods.iter().map(|name| format!("ipvsadm -a {kind} {place} -r {} -m -w 1", pod(name))),
            );
        }
    }
    let set = |name: &str| format!("KUBE-{six}{name}");
    lines.extend([
        format!(
            "ipset create {} hash:ip,port,ip family {inet} hashsize 1024 maxelem 65536",
            set("LOOP-BACK")
        ),
        format!("ipset create {} hash:ip,port family {inet} hashsize 1024 maxelem 65536", set("CLUSTER-IP")),
        format!("ipset create {} hash:ip family {inet} hashsize 1024 maxelem 65536", set("IPVS-IPS")),
        format!("ipset create {} bitmap:port range 0-65535", set("NODE-PORT-TCP")),
        format!("ipset create {} bitmap:port range 0-65535", set("NODE-PORT-UDP")),
    ]);
    for ip in [web, gone] {
        lines.push(format!("ipset add {} {ip}", set("IPVS-IPS")));
        lines.extend(["tcp", "udp"].map(|it| format!("ipset add {} {ip},{it}:80", set("CLUSTER-IP"))));
    }
    lines.extend(
        ["TCP", "UDP"].map(|it| format!("ipset add {} {NODE_PORT}", set(&format!("NODE-PORT-{it}")))),
    );
    for chain in
        ["KUBE-SERVICES", "KUBE-POSTROUTING", "KUBE-NODE-PORT", "KUBE-LOAD-BALANCER", "KUBE-MARK-MASQ"]
    {
        lines.push(format!("{tool} -w -t nat -N {chain}"));
    }
    for rule in [
        "-A PREROUTING -m comment --comment portals -j KUBE-SERVICES".to_owned(),
        "-A OUTPUT -m comment --comment portals -j KUBE-SERVICES".to_owned(),
        "-A POSTROUTING -m comment --comment postrouting -j KUBE-POSTROUTING".to_owned(),
        "-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000".to_owned(),
        "-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT".to_owned(),
        format!("-A KUBE-SERVICES -m set --match-set {} dst,dst -j ACCEPT", set("CLUSTER-IP")),
        format!("-A KUBE-NODE-PORT -p tcp -m set --match-set {} dst -j KUBE-MARK-MASQ", set("NODE-PORT-TCP")),
        format!("-A KUBE-NODE-PORT -p udp -m set --match-set {} dst -j KUBE-MARK-MASQ", set("NODE-PORT-UDP")),
        "-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN".to_owned(),
        "-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000".to_owned(),
        "-A KUBE-POSTROUTING -j MASQUERADE --random-fully".to_owned(),
    ] {
        lines.push(format!("{tool} -w -t nat {rule}"));
    }
    lines
}

/// kube-proxy served, and is not there any more; then Portolan comes, in ipvs mode or in another.
fn take_over(mode: &str) {
    let Some(mut bed) = build() else { return };
    bed.command(&["sysctl", "-w", "net.ipv4.vs.conntrack=1", "net.ipv4.vs.conn_reuse_mode=0"]);
    bed.command(&["ip", "link", "add", "kube-ipvs0", "type", "dummy"]);
    for line in Version::BOTH.into_iter().flat_map(like_kube_proxy) {
        bed.command(&line.split(' ').collect::<Vec<_>>());
    }
    // Somebody else's, on an address that nobody of our trade has.
    bed.command(&["ipvsadm", "-A", "-t", "203.0.113.77:80", "-s", "wlc"]);
    let what = format!("kube-proxy's ipvs mode to {mode} mode");
    bed.under_load(Traffic::All, &what, |bed, go_on| {
        bed.start_with(&[&format!("--proxy-mode={mode}")]);
        go_on();
        go_on();
        if mode != "ipvs" {
            return;
        }
        eventually("what is stale is gone", || match state(bed) {
            held if held.iter().any(|line| line.contains("10.96.0.99")) => Err(format!("{held:#?}")),
            _ => Ok(()),
        });
    });
    // What the streams needed stays for minutes. Whoever cannot wait has it removed: of both families, and nothing else.
    bed.daemon.stop();
    bed.command(&[&program().to_string_lossy(), "--cleanup"]);
    let left = bed.command(&["ipset", "list", "-n"]) + &bed.command(&["ip", "-o", "link"]);
    assert!(!left.contains("KUBE-") && !left.contains("kube-ipvs0"), "{left}");
    let servers = bed.command(&["ipvsadm", "-Sn"]);
    assert!(!servers.contains("10.96.0.") && !servers.contains(&NODE_PORT.to_string()), "{servers}");
    assert!(servers.contains("203.0.113.77:80"), "it was somebody else's: {servers}");
}

#[test]
fn it_takes_over_from_kube_proxy_in_place() {
    take_over("ipvs");
}

#[test]
fn another_mode_takes_over_from_kube_proxys() {
    take_over("nftables");
}

/// What others do, and what is counted of it.
#[test]
fn what_others_change_is_mended_and_told() {
    const DEEDS: [&str; 9] = [
        "ipvsadm -D -t 10.96.0.10:80",
        "ipvsadm -E -t 10.96.0.10:80 -s lc",
        "ipvsadm -d -t 10.96.0.10:80 -r 10.244.1.1:8080",
        "ipvsadm -e -t 10.96.0.10:80 -r 10.244.1.1:8080 -m -w 7",
        "ipset del KUBE-CLUSTER-IP 10.96.0.10,tcp:80",
        "ip address del 10.96.0.10/32 dev kube-ipvs0",
        "ip link delete kube-ipvs0",
        "iptables -w -t nat -F KUBE-SERVICES",
        "sysctl -w net.ipv4.vs.conntrack=0",
    ];
    let Some(mut bed) = build() else { return };
    bed.start_with(&[IPVS]);
    let first = state(&bed);
    let conntrack = ["cat", "/proc/sys/net/ipv4/vs/conntrack"];
    for deed in DEEDS {
        // Not there before the first.
        let counted = bed.daemon.metric("portolan_drift_total").unwrap_or_default();
        bed.command(&deed.split(' ').collect::<Vec<_>>());
        let begun = Instant::now();
        eventually(&format!("{deed}: all is as it was"), || {
            let exists = bed.try_command(&["ip", "link", "show", "kube-ipvs0"]).expect("ip");
            let now = if exists.status.success() { state(&bed) } else { Vec::new() };
            let is_right = now == first && bed.command(&conntrack).trim() == "1";
            if is_right { Ok(()) } else { Err(format!("{now:?}")) }
        });
        println!("{deed}: seen to be mended after {:.1?}", begun.elapsed());
        eventually(&format!("{deed}: it is counted"), || {
            let now = bed.daemon.metric("portolan_drift_total")?;
            if now > counted { Ok(()) } else { Err(format!("{now}")) }
        });
    }
    bed.daemon.must_run();
    let said = bed.daemon.said();
    for line in said.lines().filter(|line| line.contains("somebody else changed")) {
        println!("{line}");
    }
}
