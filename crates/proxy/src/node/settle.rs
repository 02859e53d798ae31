// SPDX-License-Identifier: Apache-2.0

//! Kernel settings that the configuration asks for: connection tracking, and what a mode needs.
//!
//! Read first, write only what differs: where somebody with more privileges has set them (`--init-only`), none
//! are needed here. The limit of tracked connections is only ever raised. A refusal does not keep the proxy
//! from serving; it is told, and `--init-only` fails by it.

use std::{fmt, io};

use dataplane::Mode;

use super::sysctl::Sysctls;
use crate::config::{Config, check::Checked};
use model::{Family, NodePortAddress};

/// kube-proxy's bound on what is computed from the number of CPUs.
const MOST_CONNECTIONS: u64 = 1 << 20;

/// What node ports on loopback addresses need, and opens them to the network. So only `--init-only` sets it here: on a
/// node that serves, the dataplane does, once its rules keep strangers out.
pub const ROUTE_LOCALNET: &str = "net/ipv4/conf/all/route_localnet";

/// One setting that should be so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    pub name: &'static str,
    pub value: u64,
    pub rule: Rule,
    /// What asks for it.
    pub field: &'static str,
}

/// What satisfies a [`Wish`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// This value.
    Exactly,
    /// This value, or a greater one.
    AtLeast,
}

/// A wish that was not granted.
#[derive(Debug)]
pub struct Refusal {
    pub wish: Wish,
    /// What is in force instead, if it can be read.
    pub is: Option<u64>,
    pub error: io::Error,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refusal { wish, is, error } = self;
        write!(f, "cannot set {} to {}", wish.name, wish.value)?;
        if let Some(is) = is {
            write!(f, " (it is {is})")?;
        }
        write!(f, ", as {} asks: {error}", wish.field)
    }
}

impl Refusal {
    /// The kernel does not have the setting, or not yet: its module comes with the first rule that needs it.
    pub fn is_missing(&self) -> bool {
        self.error.kind() == io::ErrorKind::NotFound
    }
}

/// What the configuration asks for on a machine with so many CPUs, in the order in which to set it.
pub fn wishes(config: &Config, checked: &Checked, cpus: u64) -> Vec<Wish> {
    let conntrack = &config.conntrack;
    let mut wishes = Vec::new();
    if let Some(most) = most_connections(conntrack.max_per_core, conntrack.min, cpus) {
        let field = "conntrack.maxPerCore";
        let at_least = |name, value| Wish { name, value, rule: Rule::AtLeast, field };
        wishes.push(at_least("net/netfilter/nf_conntrack_max", most));
        wishes.push(at_least("net/netfilter/nf_conntrack_buckets", most / 4));
    }
    for (name, timeout, field) in [
        (
            "net/netfilter/nf_conntrack_tcp_timeout_established",
            conntrack.tcp_established_timeout.unwrap_or_default(),
            "conntrack.tcpEstablishedTimeout",
        ),
        (
            "net/netfilter/nf_conntrack_tcp_timeout_close_wait",
            conntrack.tcp_close_wait_timeout.unwrap_or_default(),
            "conntrack.tcpCloseWaitTimeout",
        ),
        ("net/netfilter/nf_conntrack_udp_timeout", conntrack.udp_timeout, "conntrack.udpTimeout"),
        (
            "net/netfilter/nf_conntrack_udp_timeout_stream",
            conntrack.udp_stream_timeout,
            "conntrack.udpStreamTimeout",
        ),
    ] {
        let secs = timeout.to_std().as_secs();
        // Zero leaves what is there; so does less than a second, which the kernel cannot express.
        if secs > 0 {
            wishes.push(Wish { name, value: secs, rule: Rule::Exactly, field });
        }
    }
    if conntrack.tcp_be_liberal {
        let name = "net/netfilter/nf_conntrack_tcp_be_liberal";
        wishes.push(Wish { name, value: 1, rule: Rule::AtLeast, field: "conntrack.tcpBeLiberal" });
    }
    // Only where the kernel translates node ports on loopback addresses.
    let field = match checked.mode {
        Mode::Iptables => Some("iptables.localhostNodePorts"),
        Mode::Nftables => Some("nodePortAddresses"),
        Mode::Ipvs | Mode::Userspace | Mode::None => None,
    };
    let addresses = node_port_addresses(config, checked);
    let is_served = addresses.iter().any(|entry| entry.names_loopback(Family::V4));
    let wish = |field| Wish { name: ROUTE_LOCALNET, value: 1, rule: Rule::Exactly, field };
    wishes.extend(field.filter(|_| is_served).map(wish));
    if checked.mode == Mode::Ipvs {
        wishes.extend(for_ipvs(checked));
    }
    if checked.mode == Mode::Userspace && checked.userspace.bind {
        // A listener that closes gives clients it has not accepted yet to the next process's, instead of resetting them.
        // From Linux 5.14 on; without it a hand-over may cost a client its first attempt.
        let name = "net/ipv4/tcp_migrate_req";
        wishes.push(Wish { name, value: 1, rule: Rule::Exactly, field: "userspaceBind" });
    }
    wishes
}

/// What virtual servers need; see the ipvs mode of the dataplane, which looks again.
fn for_ipvs(checked: &Checked) -> impl Iterator<Item = Wish> {
    let always = [
        ("net/ipv4/vs/conntrack", 1),
        ("net/ipv4/vs/expire_nodest_conn", 1),
        ("net/ipv4/vs/expire_quiescent_template", 1),
        ("net/ipv4/ip_forward", 1),
    ];
    let strict = [("net/ipv4/conf/all/arp_ignore", 1), ("net/ipv4/conf/all/arp_announce", 2)];
    let strict = strict.into_iter().filter(|_| checked.ipvs.strict_arp).map(|it| (it, "ipvs.strictARP"));
    let wished = always.into_iter().map(|it| (it, "mode")).chain(strict);
    let wish = |((name, value), field)| Wish { name, value, rule: Rule::Exactly, field };
    wished.map(wish).collect::<Vec<_>>().into_iter()
}

/// `None` leaves the limit alone.
fn most_connections(per_core: Option<i32>, min: Option<i32>, cpus: u64) -> Option<u64> {
    let natural = |value: Option<i32>| u64::try_from(value.unwrap_or(0)).unwrap_or(0);
    let scaled = natural(per_core).saturating_mul(cpus);
    match scaled {
        0 => None,
        // Even where the minimum is greater, as upstream.
        scaled if scaled > MOST_CONNECTIONS => Some(MOST_CONNECTIONS),
        scaled => Some(scaled.max(natural(min))),
    }
}

/// Which addresses serve node ports. In iptables mode those on loopback are among them unless they are switched off, as
/// in kube-proxy; elsewhere only where they are named.
pub fn node_port_addresses(config: &Config, checked: &Checked) -> Box<[NodePortAddress]> {
    let mut addresses = checked.node_port_addresses.to_vec();
    if checked.mode != Mode::Iptables {
        return addresses.into();
    }
    if config.iptables.localhost_node_ports == Some(true) {
        include_loopback(&mut addresses);
    } else {
        exclude_loopback(&mut addresses);
    }
    addresses.into()
}

/// In IPv4 only, as the kernel cannot translate ::1; and unless the list excludes it, or says more exactly which.
fn include_loopback(addresses: &mut Vec<NodePortAddress>) {
    let loopback = ipnet::IpNet::from(ipnet::Ipv4Net::new_assert(std::net::Ipv4Addr::new(127, 0, 0, 0), 8));
    let includes = |entry: &NodePortAddress| match entry {
        NodePortAddress::All => true,
        NodePortAddress::Cidr(cidr) => cidr.contains(&loopback),
        NodePortAddress::Primary | NodePortAddress::Localhost | NodePortAddress::Nothing(_) => false,
    };
    let names_none = !addresses.iter().any(|entry| entry.speaks_of(Family::V4));
    if names_none {
        addresses.push(NodePortAddress::Cidr(ipnet::Ipv4Net::default().into()));
    }
    let is_named = addresses.iter().any(|entry| entry.names_loopback(Family::V4));
    if !is_named && addresses.iter().any(includes) {
        addresses.push(NodePortAddress::Cidr(loopback));
    }
}

/// A family that had nothing else has nothing then; an empty list would mean all.
fn exclude_loopback(addresses: &mut Vec<NodePortAddress>) {
    let names = |entry: &NodePortAddress, family| entry.names_loopback(family);
    let concerned = Family::BOTH.into_iter().filter(|family| addresses.iter().any(|it| names(it, *family)));
    let concerned: Vec<Family> = concerned.collect();
    addresses.retain(|entry| !Family::BOTH.into_iter().any(|family| names(entry, family)));
    addresses.extend(concerned.into_iter().map(NodePortAddress::Nothing));
}

/// Grants what can be granted, tells what it changed, and returns the rest.
pub fn apply(sysctls: &Sysctls, wishes: &[Wish]) -> Vec<Refusal> {
    let mut refused = Vec::new();
    for wish in wishes {
        let is = sysctls.number(wish.name);
        let granted = match (wish.rule, is) {
            (_, None) => false,
            (Rule::Exactly, Some(is)) => is == wish.value,
            (Rule::AtLeast, Some(is)) => is >= wish.value,
        };
        if granted {
            continue;
        }
        match sysctls.write(wish.name, wish.value) {
            Ok(()) => tracing::info!(
                setting = wish.name,
                from = is.map_or("unreadable".to_owned(), |is| is.to_string()),
                to = wish.value,
                field = wish.field,
                "changed a kernel setting"
            ),
            Err(error) => refused.push(Refusal { wish: wish.clone(), is, error }),
        }
    }
    refused
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;
    use crate::config::{check::check, decode::decode};

    fn config(body: &str) -> Config {
        let text =
            format!("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n{body}");
        let mut config = decode(&text).expect(body).config;
        config.settle();
        config
    }

    fn asked(body: &str, cpus: u64) -> Vec<(&'static str, u64)> {
        let config = config(body);
        let checked = check(&config).expect(body);
        let short = |name: &'static str| name.rsplit('/').next().unwrap_or(name);
        wishes(&config, &checked, cpus).iter().map(|wish| (short(wish.name), wish.value)).collect()
    }

    #[test]
    fn the_defaults_ask_for_what_kube_proxy_sets() {
        assert_eq!(
            asked("", 2),
            [
                ("nf_conntrack_max", 131_072),
                ("nf_conntrack_buckets", 32_768),
                ("nf_conntrack_tcp_timeout_established", 86_400),
                ("nf_conntrack_tcp_timeout_close_wait", 3_600),
            ]
        );
    }

    #[test]
    fn the_limit_follows_cpus_minimum_and_bound() {
        let limit = |per_core, min, cpus| most_connections(Some(per_core), Some(min), cpus);
        assert_eq!(limit(32_768, 131_072, 8), Some(262_144));
        assert_eq!(limit(32_768, 131_072, 1), Some(131_072));
        assert_eq!(limit(0, 131_072, 8), None, "zero leaves it, whatever the minimum");
        assert_eq!(limit(32_768, 2_000_000, 64), Some(1 << 20), "the bound beats the minimum");
        assert_eq!(limit(32_768, 2_000_000, 2), Some(2_000_000));
        assert_eq!(limit(i32::MAX, 0, u64::MAX), Some(1 << 20));
    }

    #[test]
    fn zero_leaves_and_liberal_only_switches_on() {
        let body = "conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}\n";
        assert_eq!(asked(body, 2), []);
        let body = "conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 90s, tcpCloseWaitTimeout: 0s, \
                    tcpBeLiberal: true, udpTimeout: 1500ms, udpStreamTimeout: 500ms}\n";
        assert_eq!(
            asked(body, 2),
            [
                ("nf_conntrack_tcp_timeout_established", 90),
                ("nf_conntrack_udp_timeout", 1),
                ("nf_conntrack_tcp_be_liberal", 1)
            ]
        );
    }

    #[test]
    fn loopback_node_ports_need_route_localnet() {
        let wants = |body: &str| asked(body, 2).iter().any(|(name, _)| *name == "route_localnet");
        assert!(wants("mode: iptables\n"));
        assert!(wants("mode: iptables\nnodePortAddresses: [127.0.0.0/8]\n"));
        assert!(wants("mode: iptables\nnodePortAddresses: ['fd00::/8']\n"), "IPv4 is not restricted");
        assert!(!wants("mode: iptables\nnodePortAddresses: [10.0.0.0/8]\n"));
        let off = "mode: iptables\niptables: {localhostNodePorts: false}\n";
        assert!(!wants(off));
        assert!(!wants(&format!("{off}nodePortAddresses: [primary, localhost]\n")), "switched off");
        assert!(!wants("mode: nftables\n"));
        assert!(!wants("mode: nftables\nnodePortAddresses: [all]\n"));
        assert!(wants("mode: nftables\nnodePortAddresses: [primary, localhost]\n"), "asked for by name");
        assert!(wants("mode: nftables\nnodePortAddresses: [127.0.0.0/8]\n"), "or by range");
        assert!(!wants("mode: nftables\nnodePortAddresses: ['::1/128']\n"), "the relay serves it");
        for other in ["ipvs", "userspace"] {
            let body = format!("mode: {other}\nnodePortAddresses: [primary, localhost]\n");
            assert!(!wants(&body), "{other}: the kernel translates nothing there");
        }
    }

    #[test]
    fn clients_that_wait_are_handed_over_where_we_listen_ourselves() {
        let config = config("mode: userspace\n");
        let mut checked = check(&config).expect("valid");
        let wants = |checked: &Checked| {
            wishes(&config, checked, 2).iter().any(|wish| wish.name == "net/ipv4/tcp_migrate_req")
        };
        assert!(!wants(&checked));
        checked.userspace.bind = true;
        assert!(wants(&checked));
    }

    #[test]
    fn iptables_serves_node_ports_on_loopback_unless_it_is_switched_off() {
        let addresses = |body: &str| {
            let config = config(body);
            let checked = check(&config).expect("valid");
            node_port_addresses(&config, &checked).to_vec()
        };
        let cidr = |text: &str| NodePortAddress::Cidr(text.parse().expect("a range"));
        let (loopback, ten, every) = (cidr("127.0.0.0/8"), cidr("10.0.0.0/8"), cidr("0.0.0.0/0"));
        assert_eq!(addresses("mode: iptables\n"), [every, loopback]);
        assert_eq!(addresses("mode: nftables\nnodePortAddresses: [10.0.0.0/8]\n"), [ten]);
        let on = |list: &str| addresses(&format!("mode: iptables\nnodePortAddresses: {list}\n"));
        assert_eq!(on("[10.0.0.0/8]"), [ten]);
        assert_eq!(on("['fd00::/8']"), [cidr("fd00::/8"), every, loopback], "IPv4 is not restricted");
        assert_eq!(on("[127.0.0.1/32]"), [cidr("127.0.0.1/32")], "no more than was named");
        assert_eq!(on("[all]"), [NodePortAddress::All, loopback]);

        let body = "mode: iptables\niptables: {localhostNodePorts: false}\n";
        let off = |list: &str| addresses(&format!("{body}nodePortAddresses: {list}\n"));
        let no = NodePortAddress::Nothing;
        assert_eq!(addresses(body), []);
        assert_eq!(off("[127.0.0.0/8, 10.0.0.0/8]"), [ten, no(Family::V4)]);
        // An empty list would mean all.
        assert_eq!(off("[127.0.0.0/8]"), [no(Family::V4)]);
        assert_eq!(off("[localhost]"), [no(Family::V4), no(Family::V6)]);
        assert_eq!(off("[localhost, 10.0.0.0/8]"), [ten, no(Family::V4), no(Family::V6)]);
    }

    fn put(root: &Path, name: &str, value: &str) {
        let path = root.join("proc/sys").join(name);
        fs::create_dir_all(path.parent().expect("it has one")).expect("made");
        fs::write(path, value).expect("written");
    }

    #[test]
    fn only_what_differs_is_written_and_limits_only_rise() {
        let root = tempfile::tempdir().expect("a folder");
        let sysctls = Sysctls::below(root.path());
        put(root.path(), "a", "5\n");
        put(root.path(), "b", "5\n");
        put(root.path(), "c", "9\n");
        let wish = |name, value, rule| Wish { name, value, rule, field: "f" };
        let wishes = [
            wish("a", 5, Rule::Exactly),
            wish("b", 7, Rule::AtLeast),
            wish("c", 7, Rule::AtLeast),
            wish("d", 1, Rule::Exactly),
        ];
        let refused = apply(&sysctls, &wishes);
        assert_eq!(["a", "b", "c"].map(|name| sysctls.number(name)), [Some(5), Some(7), Some(9)]);
        assert_eq!(fs::read_to_string(root.path().join("proc/sys/a")).expect("there"), "5\n", "untouched");
        assert_eq!(refused.len(), 1);
        assert!(refused[0].is_missing());
        assert_eq!(
            refused[0].to_string(),
            "cannot set d to 1, as f asks: No such file or directory (os error 2)"
        );
    }
}
