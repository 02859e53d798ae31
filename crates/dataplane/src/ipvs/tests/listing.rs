// SPDX-License-Identifier: Apache-2.0

//! What operators see, against a golden file (`UPDATE=1` writes it anew), and against the tools themselves where the
//! kernel has IPVS.

use std::{collections::BTreeSet, env, fs, net::IpAddr, path::Path, process::Command};

use model::Family;
use netlink::Netns;

use crate::{
    Config, Dataplane as _, Loopback, Scope,
    iptables::tests::make::sampler,
    ipvs::{Ipvs, Settings, program::Program, render::Scene, text},
    nftables::tests::make::node_ip,
};

fn programs(own: &BTreeSet<IpAddr>) -> [Program; 2] {
    let (cluster, settings) = (sampler(), Settings::default());
    let scene = |family| Scene {
        plan: &cluster.plan,
        family,
        settings: &settings,
        own,
        mark: 1 << 14,
        loopback: Loopback::Closed,
    };
    Family::BOTH.map(|family| Program::render(&scene(family)))
}

#[test]
fn operators_see_what_they_know() {
    let own = Family::BOTH.map(node_ip).into();
    let text = programs(&own).iter().map(|p| text::ipvsadm(p) + &text::ipset(p)).collect::<String>();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ipvs/tests/sampler.txt");
    if env::var_os("UPDATE").is_some() {
        fs::write(&path, &text).unwrap();
    }
    assert_eq!(text, fs::read_to_string(&path).unwrap(), "UPDATE=1 writes it anew");
}

/// Only where a kernel has IPVS: `make test-vm` sees to it.
#[test]
fn the_tools_show_it_so() {
    if env::var_os("PORTOLAN_HAS_IPVS").is_none() {
        println!("skipped: this kernel may have no IPVS; `make test-vm` runs it on one that does");
        return;
    }
    let netns = Netns::new().unwrap();
    netns
        .run(|| {
            let mut route = netlink::route::Route::open().unwrap();
            let lo = route.link_index("lo").unwrap();
            route.set_up(lo, true).unwrap();
            for family in Family::BOTH {
                let ip = node_ip(family);
                route.add_address(lo, ip, if ip.is_ipv4() { 32 } else { 128 }).unwrap();
            }
            let mut ipvs = Ipvs::open(&Config::default()).unwrap();
            let cluster = sampler();
            ipvs.apply(&cluster.plan, Scope::All).unwrap();
            let mut own: BTreeSet<IpAddr> = Family::BOTH.map(node_ip).into();
            own.extend(["127.0.0.1", "::1"].map(|ip| ip.parse::<IpAddr>().unwrap()));
            let programs = programs(&own);
            let wanted: BTreeSet<String> = programs.iter().flat_map(|p| lines(&text::ipvsadm(p))).collect();
            let found: BTreeSet<String> = lines(&run("ipvsadm", &["-ln"])).into_iter().collect();
            assert_eq!(found, wanted);
            let dump = ipvs.dump().unwrap();
            assert_eq!(lines(&dump).into_iter().collect::<BTreeSet<_>>(), wanted, "{dump}");
            assert!(dump.contains("-A KUBE-SERVICES ") && dump.contains("kube-ipvs0 10.96.0."), "{dump}");
            let wanted: BTreeSet<String> = programs
                .iter()
                .flat_map(|p| text::ipset(p).lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>())
                .filter(|line| !line.starts_with("KUBE-"))
                .collect();
            let found: BTreeSet<String> = run("ipset", &["list"])
                .lines()
                .filter(|line| !line.is_empty() && !line.contains(": ") && !line.ends_with(':'))
                .map(str::to_owned)
                .collect();
            assert_eq!(found, wanted);
            assert!(ipvs.apply(&cluster.plan, Scope::All).unwrap().changed_nothing());
            ipvs.cleanup().unwrap();
            assert_eq!(lines(&run("ipvsadm", &["-ln"])), Vec::<String>::new());
            assert_eq!(run("ipset", &["list", "-n"]), "");
        })
        .unwrap();
}

fn run(tool: &str, args: &[&str]) -> String {
    let output = Command::new(tool).args(args).output().unwrap();
    assert!(output.status.success(), "{tool}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Servers, each real one with its virtual one before it; without counts and the heads of columns.
fn lines(text: &str) -> Vec<String> {
    let (mut server, mut lines) = (String::new(), Vec::new());
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.first() {
            Some(&"->") if words.get(1) != Some(&"RemoteAddress:Port") => {
                lines.push(format!("{server} {}", words[..words.len().min(4)].join(" ")));
            }
            Some(&("TCP" | "UDP" | "SCTP" | "FWM")) => {
                server = words.join(" ");
                lines.push(server.clone());
            }
            _ => {}
        }
    }
    lines
}
