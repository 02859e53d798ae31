// SPDX-License-Identifier: Apache-2.0

//! What there is on this node that others decide and Services depend on. Only looks; starts no other program.

use std::{fs, os::unix::fs::MetadataExt as _};

use dataplane::Mode;
use model::{Family, PerFamily};
use netlink::{
    legacy,
    nft::{Hook, Nft, Policy, Surveyed},
    route::Route,
};

use super::sysctl::Sysctls;
use crate::{
    config::{Config, check::Checked, own::PortRange},
    host,
    node::settle,
};

/// What was seen. `None` and empty also mean: could not be seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Packets of this family are forwarded.
    pub forwarding: PerFamily<Option<bool>>,
    /// There is an IPv6 address that is valid beyond its link.
    pub has_global_v6: bool,
    /// Chains of others that drop what is forwarded unless a rule accepts it: `ip filter FORWARD`.
    pub forward_drops: Vec<String>,
    /// Interfaces with a strict reverse path filter.
    pub strict_interfaces: Vec<String>,
    /// Bridges that are switched on.
    pub bridges: Vec<String>,
    /// What crosses a bridge is seen by the rules of IP; `None` if the module is missing.
    pub bridge_calls: Option<bool>,
    /// Ports that this node's own connections start from.
    pub local_ports: Option<PortRange>,
    /// Ports that are not handed out although they are in that range.
    pub reserved_ports: Vec<PortRange>,
    /// Tracked connections now, at most, and as many as the configuration asks for.
    pub connections: Option<u64>,
    pub most_connections: Option<u64>,
    pub wanted_connections: Option<u64>,
    /// Tables of iptables-legacy.
    pub legacy_tables: Vec<String>,
    /// Some of them could not be looked into.
    pub legacy_unseen: bool,
    /// Tables of iptables-nft: `ip nat`.
    pub iptables_nft_tables: Vec<String>,
    /// Tables with rules of kube-proxy.
    pub kube_proxy_tables: Vec<String>,
    /// The mode in use has the same chains in iptables: what is there is kept, or is ours.
    pub shares_chains: bool,
    /// Processes named kube-proxy that are not this program.
    pub kube_proxies: Vec<u32>,
    /// Why the rules of others could not be listed.
    pub unseen: Option<String>,
}

impl Facts {
    /// Looks around in the network namespace of this thread.
    pub fn gather(config: &Config, checked: &Checked) -> Facts {
        let sysctls = Sysctls::host();
        let mut facts = Facts::read(&sysctls);
        let limit = |wish: &settle::Wish| wish.name == "net/netfilter/nf_conntrack_max";
        let wishes = settle::wishes(config, checked, sysctls.cpus());
        facts.wanted_connections = wishes.into_iter().find(limit).map(|wish| wish.value);
        facts.has_global_v6 =
            host::addresses().is_ok_and(|all| all.iter().any(|ip| ip.is_ipv6() && host::is_global(*ip)));
        let links = Route::open().and_then(|mut route| route.links()).unwrap_or_default();
        facts.bridges = links.into_iter().filter(|l| l.bridge && l.up).map(|link| link.name).collect();
        match Nft::open().and_then(|mut nft| nft.survey(is_of_interest)) {
            Ok(chains) => facts.sort_chains(&chains),
            Err(error) => facts.unseen = Some(error.to_string()),
        }
        facts.look_into_legacy(&sysctls);
        facts.shares_chains = matches!(checked.mode, Mode::Iptables | Mode::Ipvs);
        facts
    }

    /// Reads the legacy tables that there are.
    fn look_into_legacy(&mut self, sysctls: &Sysctls) {
        for (family, file) in
            [(netlink::Family::V4, "ip_tables_names"), (netlink::Family::V6, "ip6_tables_names")]
        {
            for table in legacy_tables_of(sysctls, file) {
                let entries = match legacy::Tables::open(family).and_then(|tables| tables.read(&table)) {
                    Ok(entries) => entries,
                    Err(_) => {
                        self.legacy_unseen = true;
                        continue;
                    }
                };
                if entries.policy("FORWARD") == Some(legacy::Policy::Drop) && table == "filter" {
                    self.forward_drops.push(format!("legacy {family} filter FORWARD"));
                }
                if entries.chains().any(|chain| chain == "KUBE-SERVICES") {
                    self.kube_proxy_tables.push(format!("legacy {family} {table}"));
                }
            }
        }
    }

    /// What stands in files.
    fn read(sysctls: &Sysctls) -> Facts {
        let flag = |name: &str| sysctls.number(name).map(|value| value != 0);
        let number = |name: &str| sysctls.number(name);
        Facts {
            forwarding: PerFamily::from_fn(|family| match family {
                Family::V4 => flag("net/ipv4/ip_forward"),
                Family::V6 => flag("net/ipv6/conf/all/forwarding"),
            }),
            strict_interfaces: strict_interfaces(sysctls),
            bridge_calls: flag("net/bridge/bridge-nf-call-iptables"),
            local_ports: sysctls.read("net/ipv4/ip_local_port_range").ok().and_then(|text| pair(&text)),
            reserved_ports: sysctls
                .read("net/ipv4/ip_local_reserved_ports")
                .map(|text| text.split(',').filter_map(range).collect())
                .unwrap_or_default(),
            connections: number("net/netfilter/nf_conntrack_count"),
            most_connections: number("net/netfilter/nf_conntrack_max"),
            legacy_tables: legacy_tables(sysctls),
            kube_proxies: kube_proxies(sysctls),
            ..Facts::default()
        }
    }

    fn sort_chains(&mut self, chains: &[Surveyed]) {
        for chain in chains {
            let Surveyed { family, table, chain } = chain;
            let place = format!("{family} {table}");
            let base = chain.base.as_ref();
            if base.is_some_and(|base| base.hook == Hook::Forward && base.policy == Policy::Drop) {
                self.forward_drops.push(format!("{place} {}", chain.name));
            }
            if table == "kube-proxy" || chain.name == "KUBE-SERVICES" {
                self.kube_proxy_tables.push(place);
            } else if base.is_some() && IPTABLES_CHAINS.contains(&chain.name.as_str()) {
                self.iptables_nft_tables.push(place);
            }
        }
        for tables in [&mut self.kube_proxy_tables, &mut self.iptables_nft_tables, &mut self.forward_drops] {
            tables.sort_unstable();
            tables.dedup();
        }
    }
}

const IPTABLES_CHAINS: [&str; 5] = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];

/// There may be many thousands that are not.
fn is_of_interest(chain: &Surveyed) -> bool {
    let is_ip = matches!(chain.family, "ip" | "ip6" | "inet");
    is_ip && chain.table != "portolan" && (chain.chain.base.is_some() || chain.chain.name == "KUBE-SERVICES")
}

/// The greater of an interface's own value and that of `all` counts: 1 is strict, 2 is loose.
fn strict_interfaces(sysctls: &Sysctls) -> Vec<String> {
    let value = |name: &str| sysctls.number(&format!("net/ipv4/conf/{name}/rp_filter")).unwrap_or(0);
    let all = value("all");
    let names = sysctls.folders("net/ipv4/conf").into_iter();
    let real = names.filter(|name| !matches!(name.as_str(), "all" | "default" | "lo"));
    real.filter(|name| value(name).max(all) == 1).collect()
}

/// Of both families. The file lists what this network namespace has in use.
fn legacy_tables(sysctls: &Sysctls) -> Vec<String> {
    let files = ["ip_tables_names", "ip6_tables_names"].into_iter();
    let mut tables: Vec<String> = files.flat_map(|file| legacy_tables_of(sysctls, file)).collect();
    tables.sort_unstable();
    tables.dedup();
    tables
}

fn legacy_tables_of(sysctls: &Sysctls, file: &str) -> Vec<String> {
    let text = fs::read_to_string(sysctls.file(&format!("proc/thread-self/net/{file}"))).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

/// Those of this network namespace. Where our program has kube-proxy's name, because only an image was swapped,
/// it is told by its file.
fn kube_proxies(sysctls: &Sysctls) -> Vec<u32> {
    let node = |path: &str| fs::metadata(sysctls.file(path)).map(|file| (file.dev(), file.ino())).ok();
    let (our_file, our_netns) = (node("proc/self/exe"), node("proc/thread-self/ns/net"));
    let Ok(entries) = fs::read_dir(sysctls.file("proc")) else { return Vec::new() };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let mut found: Vec<u32> = pids
        .filter(|pid| {
            let name = fs::read_to_string(sysctls.file(&format!("proc/{pid}/comm")));
            if !name.is_ok_and(|name| name.trim() == "kube-proxy") {
                return false;
            }
            let (file, netns) = (node(&format!("proc/{pid}/exe")), node(&format!("proc/{pid}/ns/net")));
            // What may not be looked at is taken for a neighbour.
            (file.is_none() || file != our_file) && (netns.is_none() || netns == our_netns)
        })
        .collect();
    found.sort_unstable();
    found
}

/// `32768 60999`.
fn pair(text: &str) -> Option<PortRange> {
    let mut ports = text.split_whitespace().map(str::parse);
    Some(PortRange { first: ports.next()?.ok()?, last: ports.next()?.ok()? })
}

/// `30000-32767`, or `8080`.
fn range(text: &str) -> Option<PortRange> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    Some(PortRange { first: first.trim().parse().ok()?, last: last.trim().parse().ok()? })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use netlink::nft::{Chain, ChainKind};

    use super::*;

    fn put(root: &Path, name: &str, value: &str) {
        let path = root.join(name);
        fs::create_dir_all(path.parent().expect("it has one")).expect("made");
        fs::write(path, value).expect("written");
    }

    #[test]
    fn files_become_facts() {
        let root = tempfile::tempdir().expect("a folder");
        for (name, value) in [
            ("proc/sys/net/ipv4/ip_forward", "0\n"),
            ("proc/sys/net/ipv6/conf/all/forwarding", "1\n"),
            ("proc/sys/net/ipv4/conf/all/rp_filter", "0\n"),
            ("proc/sys/net/ipv4/conf/default/rp_filter", "1\n"),
            ("proc/sys/net/ipv4/conf/lo/rp_filter", "1\n"),
            ("proc/sys/net/ipv4/conf/eth0/rp_filter", "1\n"),
            ("proc/sys/net/ipv4/conf/eth1/rp_filter", "2\n"),
            ("proc/sys/net/bridge/bridge-nf-call-iptables", "0\n"),
            ("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n"),
            ("proc/sys/net/ipv4/ip_local_reserved_ports", "30000-30010,8080\n"),
            ("proc/sys/net/netfilter/nf_conntrack_max", "100\n"),
            ("proc/sys/net/netfilter/nf_conntrack_count", "7\n"),
            ("proc/thread-self/net/ip_tables_names", "nat\nfilter\n"),
            ("proc/thread-self/net/ip6_tables_names", "nat\n"),
            ("proc/41/comm", "kube-proxy\n"),
            ("proc/42/comm", "kubelet\n"),
            ("proc/43/comm", "kube-proxy\n"),
            ("proc/43/ns/net", ""),
            ("proc/44/comm", "kube-proxy\n"),
            ("proc/thread-self/ns/net", ""),
        ] {
            put(root.path(), name, value);
        }
        // 43 is elsewhere, 44 is here, and 45 is this program by another name.
        fs::create_dir_all(root.path().join("proc/44/ns")).expect("made");
        let link = |from: &str, to: &str| fs::hard_link(root.path().join(from), root.path().join(to));
        link("proc/thread-self/ns/net", "proc/44/ns/net").expect("linked");
        put(root.path(), "proc/self/exe", "");
        put(root.path(), "proc/45/comm", "kube-proxy\n");
        link("proc/self/exe", "proc/45/exe").expect("linked");
        let range = |first, last| PortRange { first, last };
        let expected = Facts {
            forwarding: PerFamily { v4: Some(false), v6: Some(true) },
            strict_interfaces: vec!["eth0".into()],
            bridge_calls: Some(false),
            local_ports: Some(range(32_768, 60_999)),
            reserved_ports: vec![range(30_000, 30_010), range(8080, 8080)],
            connections: Some(7),
            most_connections: Some(100),
            legacy_tables: vec!["filter".into(), "nat".into()],
            kube_proxies: vec![41, 44],
            ..Facts::default()
        };
        assert_eq!(Facts::read(&Sysctls::below(root.path())), expected);
        assert_eq!(Facts::read(&Sysctls::below("/nonexistent")), Facts::default());
        // All loosens those that are strict, and makes those strict that say nothing.
        put(root.path(), "proc/sys/net/ipv4/conf/all/rp_filter", "2\n");
        assert_eq!(strict_interfaces(&Sysctls::below(root.path())), [""; 0]);
    }

    #[test]
    fn chains_become_facts() {
        let chain = |family, table: &str, chain: Chain| Surveyed { family, table: table.into(), chain };
        let mut drops = Chain::base("FORWARD", ChainKind::Filter, Hook::Forward, 0);
        if let Some(base) = &mut drops.base {
            base.policy = Policy::Drop;
        }
        let nat = Chain::base("PREROUTING", ChainKind::Nat, Hook::Prerouting, -100);
        let mut facts = Facts::default();
        facts.sort_chains(&[
            chain("ip", "filter", drops.clone()),
            chain("inet", "firewall", Chain { name: "forward".into(), ..drops }),
            chain("ip", "nat", nat.clone()),
            chain("ip", "nat", Chain::regular("KUBE-SERVICES")),
            chain("ip6", "kube-proxy", Chain { name: "nat-prerouting".into(), ..nat }),
        ]);
        assert_eq!(facts.forward_drops, ["inet firewall forward", "ip filter FORWARD"]);
        assert_eq!(facts.iptables_nft_tables, ["ip filter", "ip nat"]);
        assert_eq!(facts.kube_proxy_tables, ["ip nat", "ip6 kube-proxy"]);
    }

    #[test]
    fn a_kernel_is_looked_at() {
        let Ok(netns) = netlink::Netns::new() else {
            assert!(std::env::var_os("CI").is_none(), "this test must have privileges in CI");
            println!("skipped: no network namespaces");
            return;
        };
        let mut config = Config::with_defaults();
        config.settle();
        let checked = crate::config::check::check(&config).expect("the defaults are valid");
        let (empty, full) = netns
            .run(|| {
                let empty = Facts::gather(&config, &checked);
                let mut route = Route::open().expect("opened");
                route.add_link("br0", netlink::route::LinkKind::Bridge).expect("made");
                let index = route.link_index("br0").expect("there");
                route.set_up(index, true).expect("up");
                let table = netlink::nft::Table::new(netlink::Family::V4, "wall");
                let name = netlink::nft::TableRef { family: netlink::Family::V4, name: "wall" };
                let mut chain = Chain::base("gate", ChainKind::Filter, Hook::Forward, 0);
                chain.base.as_mut().expect("a base chain").policy = Policy::Drop;
                let mut batch = netlink::nft::Batch::new();
                batch.add_table(0, &table, netlink::nft::Create::IfMissing);
                batch.add_chain(1, name, &chain, netlink::nft::Create::IfMissing);
                Nft::open().expect("opened").commit(&batch).expect("committed");
                (empty, Facts::gather(&config, &checked))
            })
            .expect("entered");
        assert_eq!(empty.unseen, None);
        assert_eq!((empty.bridges.len(), empty.forward_drops.len()), (0, 0));
        assert!(empty.forwarding[Family::V4].is_some() && empty.local_ports.is_some());
        assert_eq!(full.bridges, ["br0"]);
        assert_eq!(full.forward_drops, ["ip wall gate"]);
    }

    #[test]
    fn legacy_tables_are_looked_into() {
        let Ok(netns) = netlink::Netns::new() else {
            assert!(std::env::var_os("CI").is_none(), "this test must have privileges in CI");
            println!("skipped: no network namespaces");
            return;
        };
        let run = |arguments: &[&str]| {
            let status = std::process::Command::new("iptables-legacy").args(arguments).status();
            status.is_ok_and(|status| status.success())
        };
        let facts = netns
            .run(|| {
                let is_there = run(&["-P", "FORWARD", "DROP"]) && run(&["-t", "nat", "-N", "KUBE-SERVICES"]);
                let mut facts = Facts::default();
                facts.look_into_legacy(&Sysctls::host());
                is_there.then_some(facts)
            })
            .expect("entered");
        let Some(facts) = facts else {
            assert!(std::env::var_os("CI").is_none(), "this test must have the tools in CI");
            println!("skipped: no iptables-legacy, or no kernel for it");
            return;
        };
        assert_eq!(facts.forward_drops, ["legacy ip filter FORWARD"]);
        assert_eq!(facts.kube_proxy_tables, ["legacy ip nat"]);
        assert!(!facts.legacy_unseen);
    }
}
