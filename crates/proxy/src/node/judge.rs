// SPDX-License-Identifier: Apache-2.0

//! What on this node will get in the way of Services, and what to do about it. A function of [`Facts`].

use std::fmt;

use model::Family;
use serde::Serialize;

use super::facts::Facts;
use crate::config::own::PortRange;

/// One thing that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub rank: Rank,
    /// A name for scripts; it stays the same.
    pub name: &'static str,
    pub says: String,
    /// What to do, in one sentence.
    pub remedy: String,
}

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Rank {
    /// Connections fail.
    Breaks,
    /// Connections may fail, now or under load.
    Risk,
    /// Good to know when they do.
    Note,
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Rank::Breaks => "breaks",
            Rank::Risk => "risk",
            Rank::Note => "note",
        })
    }
}

/// Everything there is to say, the worst first.
pub fn judge(facts: &Facts, node_ports: PortRange) -> Vec<Finding> {
    let mut findings = Vec::new();
    forwarding(facts, &mut findings);
    conntrack(facts, &mut findings);
    neighbours(facts, &mut findings);
    bridges(facts, &mut findings);
    ports(facts, node_ports, &mut findings);
    reverse_paths(facts, &mut findings);
    if let Some(error) = &facts.unseen {
        findings.push(Finding {
            rank: Rank::Note,
            name: "rules-unseen",
            says: format!("the rules of others cannot be listed: {error}"),
            remedy: "Ask again with CAP_NET_ADMIN.".to_owned(),
        });
    }
    // Stable: within a rank the order is the one in which they were asked for above.
    findings.sort_by_key(|finding| finding.rank);
    findings
}

fn forwarding(facts: &Facts, findings: &mut Vec<Finding>) {
    for family in Family::BOTH {
        let (rank, setting) = match family {
            Family::V4 => (Rank::Breaks, "net.ipv4.ip_forward"),
            // Without an address that is valid beyond the link nothing of this family is to be forwarded.
            Family::V6 if !facts.has_global_v6 => continue,
            Family::V6 => (Rank::Risk, "net.ipv6.conf.all.forwarding"),
        };
        if facts.forwarding[family] == Some(false) {
            findings.push(Finding {
                rank,
                name: "forwarding-off",
                says: format!("{family} packets are not forwarded: pods and node ports are cut off"),
                remedy: format!("Run: sysctl -w {setting}=1"),
            });
        }
    }
    if !facts.forward_drops.is_empty() {
        findings.push(Finding {
            rank: Rank::Risk,
            name: "forward-drop",
            says: format!(
                "forwarded packets are dropped unless a rule accepts them, by policy of {}",
                facts.forward_drops.join(", ")
            ),
            remedy:
                "Accept traffic from and to the pods there (many network plugins do), or make the policy \
                     accept (for iptables: iptables -P FORWARD ACCEPT)."
                    .to_owned(),
        });
    }
}

fn conntrack(facts: &Facts, findings: &mut Vec<Finding>) {
    let remedy =
        || "Raise conntrack.maxPerCore, or run: sysctl -w net.netfilter.nf_conntrack_max=N".to_owned();
    let (count, max) = (facts.connections, facts.most_connections);
    if let (Some(count), Some(max)) = (count, max.filter(|max| *max > 0)) {
        let percent = count.saturating_mul(100) / max;
        let rank = match percent {
            95.. => Some(Rank::Breaks),
            75.. => Some(Rank::Risk),
            _ => None,
        };
        findings.extend(rank.map(|rank| Finding {
            rank,
            name: "conntrack-full",
            says: format!(
                "{count} of at most {max} connections are tracked ({percent} %): new ones fail when it is full"
            ),
            remedy: remedy(),
        }));
    }
    if let (Some(max), Some(wanted)) = (max, facts.wanted_connections)
        && max < wanted
    {
        findings.push(Finding {
            rank: Rank::Risk,
            name: "conntrack-small",
            says: format!("at most {max} connections are tracked, where the configuration asks for {wanted}"),
            remedy: format!(
                "Run portolan --init-only with full privileges, or: sysctl -w net.netfilter.nf_conntrack_max={wanted}"
            ),
        });
    }
}

fn neighbours(facts: &Facts, findings: &mut Vec<Finding>) {
    if !facts.kube_proxies.is_empty() {
        let pids: Vec<String> = facts.kube_proxies.iter().map(u32::to_string).collect();
        findings.push(Finding {
            rank: Rank::Risk,
            name: "kube-proxy-runs",
            says: format!(
                "kube-proxy runs here too (process {}): two write rules for one Service",
                pids.join(", ")
            ),
            remedy: "Stop it on this node; its rules may stay, they are removed once ours serve.".to_owned(),
        });
    } else {
        findings.extend(kube_proxy_rules(facts));
    }
    if !facts.legacy_tables.is_empty() && !facts.iptables_nft_tables.is_empty() {
        findings.push(Finding {
            rank: Rank::Risk,
            name: "two-iptables",
            says: format!(
                "both variants of iptables are in use, legacy (tables {}) and nft ({}): each hides its rules from \
                 the other's tools, and a drop in either counts",
                facts.legacy_tables.join(", "),
                facts.iptables_nft_tables.join(", ")
            ),
            remedy: "Choose one (update-alternatives --config iptables) and reboot, or flush the other.".to_owned(),
        });
    }
    let (legacy, nft): (Vec<_>, Vec<_>) = facts
        .kube_proxy_tables
        .iter()
        .map(String::as_str)
        .filter(|table| !table.ends_with(" kube-proxy"))
        .partition(|table| table.starts_with("legacy "));
    if !legacy.is_empty() && !nft.is_empty() {
        findings.push(Finding {
            rank: Rank::Risk,
            name: "split-iptables",
            says: format!(
                "chains of Services are in the tables of both variants of iptables ({}; {}): the kernel obeys both, and \
                 one of them follows no change",
                legacy.join(", "),
                nft.join(", ")
            ),
            remedy: "Make all components use the variant that has the chain KUBE-IPTABLES-HINT; Portolan removes the \
                     other's chains once it serves."
                .to_owned(),
        });
    }
    if facts.legacy_unseen {
        findings.push(Finding {
            rank: Rank::Note,
            name: "legacy-filter",
            says: "iptables-legacy has tables that cannot be seen from here, and may drop what is forwarded"
                .to_owned(),
            remedy: "Ask again with CAP_NET_ADMIN and CAP_NET_RAW, or look: iptables-legacy -S FORWARD"
                .to_owned(),
        });
    }
}

fn kube_proxy_rules(facts: &Facts) -> Option<Finding> {
    let is_kept = |table: &&String| facts.shares_chains && !table.ends_with(" kube-proxy");
    let tables: Vec<&str> =
        facts.kube_proxy_tables.iter().filter(|table| !is_kept(table)).map(String::as_str).collect();
    (!tables.is_empty()).then(|| Finding {
        rank: Rank::Note,
        name: "kube-proxy-rules",
        says: format!(
            "rules of kube-proxy are there ({}): it runs in a place not visible from here, or has run",
            tables.join(", ")
        ),
        remedy: "If it has been stopped there is nothing to do: its rules go once ours serve.".to_owned(),
    })
}

fn bridges(facts: &Facts, findings: &mut Vec<Finding>) {
    if facts.bridges.is_empty() || facts.bridge_calls == Some(true) {
        return;
    }
    let (is, load) = match facts.bridge_calls {
        None => ("br_netfilter is not loaded", "modprobe br_netfilter && "),
        _ => ("bridge-nf-call-iptables is off", ""),
    };
    findings.push(Finding {
        rank: Rank::Risk,
        name: "bridge-unseen",
        says: format!(
            "{is}: what two pods on one bridge ({}) exchange passes unseen, so that a pod may fail to reach a Service \
             whose endpoint is its neighbour",
            facts.bridges.join(", ")
        ),
        remedy: format!("If pods are on it, run: {load}sysctl -w net.bridge.bridge-nf-call-iptables=1"),
    });
}

fn ports(facts: &Facts, node_ports: PortRange, findings: &mut Vec<Finding>) {
    let Some(local) = facts.local_ports else { return };
    let (first, last) = (local.first.max(node_ports.first), local.last.min(node_ports.last));
    let reserved = |port: &u16| facts.reserved_ports.iter().any(|r| (r.first..=r.last).contains(port));
    let taken = (first..=last).filter(|port| !reserved(port)).count();
    if taken > 0 {
        findings.push(Finding {
            rank: Rank::Risk,
            name: "ports-overlap",
            says: format!(
                "{taken} ports are both node ports ({node_ports}) and handed out to this node's own connections ({local})"
            ),
            remedy: format!("Run: sysctl -w net.ipv4.ip_local_reserved_ports={node_ports}"),
        });
    }
}

fn reverse_paths(facts: &Facts, findings: &mut Vec<Finding>) {
    if !facts.strict_interfaces.is_empty() {
        findings.push(Finding {
            rank: Rank::Note,
            name: "rp-filter-strict",
            says: format!(
                "packets that come in by another interface than answers would leave by are dropped on {}",
                facts.strict_interfaces.join(", ")
            ),
            remedy:
                "Where nodes have several ways to each other, run: sysctl -w net.ipv4.conf.all.rp_filter=2"
                    .to_owned(),
        });
    }
}

#[cfg(test)]
mod tests {
    use model::PerFamily;

    use super::*;

    fn names(facts: &Facts) -> Vec<(Rank, &'static str)> {
        let findings = judge(facts, PortRange::default());
        for finding in &findings {
            assert!(!finding.says.contains('\n') && !finding.remedy.contains('\n'), "{finding:?}");
            assert!(!finding.says.ends_with('.'), "no sentence of its own: {finding:?}");
        }
        findings.iter().map(|finding| (finding.rank, finding.name)).collect()
    }

    fn range(first: u16, last: u16) -> PortRange {
        PortRange { first, last }
    }

    fn list(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn a_node_in_order_has_no_findings() {
        let facts = Facts {
            forwarding: PerFamily { v4: Some(true), v6: Some(true) },
            has_global_v6: true,
            local_ports: Some(range(32_768, 60_999)),
            most_connections: Some(262_144),
            connections: Some(1_000),
            wanted_connections: Some(131_072),
            iptables_nft_tables: list(&["ip nat"]),
            bridges: list(&["cni0"]),
            bridge_calls: Some(true),
            ..Facts::default()
        };
        assert_eq!(names(&facts), []);
        assert_eq!(names(&Facts::default()), [], "what cannot be seen is not blamed");
    }

    #[test]
    fn the_worst_comes_first() {
        let facts = Facts {
            strict_interfaces: list(&["eth0"]),
            forward_drops: list(&["ip filter FORWARD"]),
            connections: Some(96),
            most_connections: Some(100),
            wanted_connections: Some(131_072),
            forwarding: PerFamily { v4: Some(false), v6: Some(false) },
            kube_proxies: vec![17],
            legacy_tables: list(&["filter", "nat"]),
            legacy_unseen: true,
            iptables_nft_tables: list(&["ip nat"]),
            ..Facts::default()
        };
        assert_eq!(
            names(&facts),
            [
                (Rank::Breaks, "forwarding-off"),
                (Rank::Breaks, "conntrack-full"),
                (Rank::Risk, "forward-drop"),
                (Rank::Risk, "conntrack-small"),
                (Rank::Risk, "kube-proxy-runs"),
                (Rank::Risk, "two-iptables"),
                (Rank::Note, "legacy-filter"),
                (Rank::Note, "rp-filter-strict"),
            ]
        );
    }

    #[test]
    fn how_full_the_table_is_decides_the_rank() {
        let full = |count| {
            names(&Facts { connections: Some(count), most_connections: Some(1_000), ..Facts::default() })
        };
        assert_eq!(full(749), []);
        assert_eq!(full(750), [(Rank::Risk, "conntrack-full")]);
        assert_eq!(full(950), [(Rank::Breaks, "conntrack-full")]);
        assert_eq!(full(u64::MAX), [(Rank::Breaks, "conntrack-full")]);
        let none = Facts { connections: Some(1), most_connections: Some(0), ..Facts::default() };
        assert_eq!(names(&none), [], "0 is no limit");
    }

    #[test]
    fn reserved_ports_are_not_handed_out() {
        let with = |local, reserved: &[PortRange]| {
            names(&Facts { local_ports: Some(local), reserved_ports: reserved.to_vec(), ..Facts::default() })
        };
        assert_eq!(with(range(32_768, 60_999), &[]), [], "the kernel's default");
        assert_eq!(with(range(32_000, 60_999), &[]), [(Rank::Risk, "ports-overlap")]);
        assert_eq!(with(range(32_000, 60_999), &[range(32_000, 32_700)]), [(Rank::Risk, "ports-overlap")]);
        assert_eq!(with(range(32_000, 60_999), &[range(1, 2), range(30_000, 32_767)]), []);
        assert_eq!(with(range(1, 65_535), &[]), [(Rank::Risk, "ports-overlap")]);
    }

    #[test]
    fn bridges_matter_only_where_there_are_some() {
        let with = |bridges: &[&str], bridge_calls| {
            names(&Facts { bridges: list(bridges), bridge_calls, ..Facts::default() })
        };
        assert_eq!(with(&[], None), []);
        assert_eq!(with(&["cni0"], None), [(Rank::Risk, "bridge-unseen")]);
        assert_eq!(with(&["cni0"], Some(false)), [(Rank::Risk, "bridge-unseen")]);
    }

    #[test]
    fn rules_of_kube_proxy_alone_are_a_note() {
        let facts = Facts { kube_proxy_tables: list(&["ip kube-proxy"]), ..Facts::default() };
        assert_eq!(names(&facts), [(Rank::Note, "kube-proxy-rules")]);
        let facts =
            Facts { kube_proxy_tables: list(&["legacy ip nat", "ip kube-proxy"]), ..Facts::default() };
        assert_eq!(names(&facts), [(Rank::Note, "kube-proxy-rules")], "of two modes, but one variant");
        let facts = Facts { kube_proxy_tables: list(&["ip nat", "legacy ip nat"]), ..Facts::default() };
        assert_eq!(names(&facts), [(Rank::Risk, "split-iptables"), (Rank::Note, "kube-proxy-rules")]);
        // In iptables mode these are our own, after a restart, or become ours.
        let tables = list(&["ip kube-proxy", "ip nat"]);
        let mut facts = Facts { kube_proxy_tables: tables, shares_chains: true, ..Facts::default() };
        assert_eq!(names(&facts), [(Rank::Note, "kube-proxy-rules")]);
        facts.kube_proxy_tables.remove(0);
        assert_eq!(names(&facts), []);
        let facts = Facts { unseen: Some("no".to_owned()), ..Facts::default() };
        assert_eq!(names(&facts), [(Rank::Note, "rules-unseen")]);
    }
}
