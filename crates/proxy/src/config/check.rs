// SPDX-License-Identifier: Apache-2.0

//! [`Config`] into values that are right: parsed once here, and never looked at as text again.
//!
//! Everything wrong is found in one go, each with the path of its field.

use std::{
    collections::HashSet,
    fmt,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use dataplane::Mode;
use ipnet::IpNet;
use model::{DetectLocal, Family, NodePortAddress, PerFamily, Scheduler};

use super::{Config, StreamOptions, gates, own};
use crate::syntax::{GoDuration, parse_cidr, parse_ip, parse_socket};

/// The minor version whose hidden metrics could still be asked for; kube-proxy refuses any other.
const PREVIOUS_MINOR: &str = "1.36";

/// What the configuration says, parsed.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked {
    /// Connections are counted up to so many endpoints; from our own settings.
    pub counted_endpoints: u32,
    pub mode: Mode,
    /// `bindAddress`, where it is a specific one.
    pub bind_address: Option<IpAddr>,
    /// `None` is off.
    pub healthz: Option<SocketAddr>,
    /// `None` is off.
    pub metrics: Option<SocketAddr>,
    /// Exit if one of the two cannot be bound.
    pub bind_address_hard_fail: bool,
    pub detect_local: DetectLocal,
    pub node_port_addresses: Box<[NodePortAddress]>,
    pub min_sync_period: Duration,
    pub sync_period: Duration,
    /// The bit of the packet mark that asks for masquerading.
    pub masquerade_bit: u8,
    /// For the ipvs mode.
    pub ipvs: dataplane::ipvs::Settings,
    /// The mode to take where the kernel cannot do ipvs; from our own settings.
    pub ipvs_fallback: own::Fallback,
    /// The userspace mode's own; the handle in it is shared by all copies.
    pub userspace: dataplane::userspace::Options,
    /// How long connections that are open in userspace mode may go on when the process is told to end.
    pub drain: Duration,
}

impl Checked {
    /// Another configuration in force of a proxy that runs: what takes a restart stays as it is. Files do not know of some
    /// of it, such as the mode that was taken instead of another.
    pub fn followed_by(self, next: Checked) -> Checked {
        let Checked { mode, masquerade_bit, counted_endpoints, ipvs_fallback, userspace, drain, .. } = self;
        Checked { mode, masquerade_bit, counted_endpoints, ipvs_fallback, userspace, drain, ..next }
    }
}

/// One field that cannot be as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid {
    pub field: &'static str,
    pub value: String,
    pub reason: String,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: invalid value {:?}: {}", self.field, self.value, self.reason)
    }
}

/// All that is wrong, in one sentence.
pub fn sentence(wrong: &[Invalid]) -> String {
    let wrong: Vec<String> = wrong.iter().map(ToString::to_string).collect();
    format!("the configuration is not valid: {}", wrong.join("; "))
}

/// Checks a configuration that has been filled and settled.
pub fn check(config: &Config) -> Result<Checked, Vec<Invalid>> {
    let mut list = Wrong::default();
    let mode = mode(config, &mut list);
    let bind_address = parse_ip(&config.bind_address);
    if bind_address.is_none() {
        list.add("bindAddress", &config.bind_address, "must be an IP address");
    }
    let healthz = bind("healthzBindAddress", &config.healthz_bind_address, &mut list);
    let metrics = bind("metricsBindAddress", &config.metrics_bind_address, &mut list);
    let detect_local = detect_local(config, &mut list);
    let node_port_addresses = node_port_addresses(config, &mut list);
    client_and_logging(config, &mut list);
    numbers(config, mode, &mut list);
    let (min, max) = periods(config, &mut list);
    if mode == Mode::Ipvs {
        ipvs(config, &mut list);
    }
    let ports = port_range(config, &mut list);
    if !list.0.is_empty() {
        return Err(list.0);
    }
    let bit =
        if mode == Mode::Nftables { config.nftables.masquerade_bit } else { config.iptables.masquerade_bit };
    Ok(Checked {
        counted_endpoints: own::COUNTED_ENDPOINTS,
        mode,
        bind_address: bind_address.filter(|ip| !ip.is_unspecified()),
        healthz,
        metrics,
        bind_address_hard_fail: config.bind_address_hard_fail,
        detect_local,
        node_port_addresses,
        min_sync_period: min.to_std(),
        sync_period: max.to_std(),
        masquerade_bit: u8::try_from(bit.unwrap_or(14)).unwrap_or(14),
        ipvs: ipvs_settings(config),
        ipvs_fallback: own::Fallback::default(),
        userspace: dataplane::userspace::Options { ports, ..Default::default() },
        drain: Duration::ZERO,
    })
}

#[derive(Default)]
struct Wrong(Vec<Invalid>);

impl Wrong {
    fn add(&mut self, field: &'static str, value: impl ToString, reason: impl Into<String>) {
        self.0.push(Invalid { field, value: value.to_string(), reason: reason.into() });
    }

    fn range(&mut self, field: &'static str, value: Option<i32>, range: std::ops::RangeInclusive<i32>) {
        if let Some(value) = value.filter(|value| !range.contains(value)) {
            self.add(field, value, format!("must be from {} to {}", range.start(), range.end()));
        }
    }

    fn not_negative(&mut self, field: &'static str, value: GoDuration) {
        if value < GoDuration::ZERO {
            self.add(field, value, "must not be negative");
        }
    }

    fn positive(&mut self, field: &'static str, value: GoDuration) {
        if value <= GoDuration::ZERO {
            self.add(field, value, "must be greater than 0");
        }
    }
}

fn mode(config: &Config, list: &mut Wrong) -> Mode {
    match config.mode.as_str() {
        "nftables" => Mode::Nftables,
        "iptables" => Mode::Iptables,
        "userspace" => Mode::Userspace,
        "ipvs" if config.gate("KubeProxyIPVS") => Mode::Ipvs,
        "ipvs" => {
            list.add("mode", "ipvs", "the feature gate KubeProxyIPVS is off");
            Mode::Ipvs
        }
        other => {
            list.add("mode", other, "must be nftables, iptables, ipvs or userspace, in lower case");
            Mode::Nftables
        }
    }
}

/// The ports of listeners in userspace mode: `first-last`, `first+count`, one port, or nothing for any.
fn port_range(config: &Config, list: &mut Wrong) -> Option<std::ops::RangeInclusive<u16>> {
    let text = config.port_range.trim();
    let ends = match (text.split_once('-'), text.split_once('+')) {
        (Some((first, last)), _) => first.parse::<u16>().ok().zip(last.parse::<u16>().ok()),
        (None, Some((first, more))) => {
            let ends = first.parse::<u16>().ok().zip(more.parse::<u16>().ok());
            ends.and_then(|(first, more)| Some((first, first.checked_add(more)?)))
        }
        (None, None) if text.is_empty() => Some((0, 0)),
        (None, None) => text.parse().ok().map(|port| (port, port)),
    };
    let wrong = match ends {
        Some((0, 0)) => return None,
        // TCP and UDP, IPv4 and IPv6 have ports of their own, and in each two listeners.
        Some((first, last)) if 0 < first && first < last => return Some(first..=last),
        Some((first, last)) if 0 < first && first == last => {
            "is too small: it must hold two ports at least, four where the next process starts before the last one ends"
        }
        _ => "must be two ports, as in 40000-40100, or 0-0 for any",
    };
    // Other modes have no use for it, and kube-proxy looks at it in none.
    if config.mode == "userspace" {
        list.add("portRange", text, wrong);
    }
    None
}

/// Only `--healthz-port=0` and `--metrics-port=0` leave an address empty, and mean off by it.
fn bind(field: &'static str, text: &str, list: &mut Wrong) -> Option<SocketAddr> {
    let address = parse_socket(text);
    if address.is_none() && !text.is_empty() {
        list.add(field, text, "must be IP:port with a port from 1 to 65535");
    }
    address
}

fn detect_local(config: &Config, list: &mut Wrong) -> DetectLocal {
    let bridge = &config.detect_local.bridge_interface;
    let prefix = &config.detect_local.interface_name_prefix;
    match config.detect_local_mode.as_str() {
        "ClusterCIDR" => DetectLocal::ClusterCidr(cluster_cidr(&config.cluster_cidr, list)),
        "NodeCIDR" => DetectLocal::NodeCidr,
        "BridgeInterface" => {
            if bridge.is_empty() {
                list.add(
                    "detectLocal.bridgeInterface",
                    bridge,
                    "is needed with detectLocalMode BridgeInterface",
                );
            }
            DetectLocal::Bridge(bridge.as_str().into())
        }
        "InterfaceNamePrefix" => {
            if prefix.is_empty() {
                let reason = "is needed with detectLocalMode InterfaceNamePrefix";
                list.add("detectLocal.interfaceNamePrefix", prefix, reason);
            }
            DetectLocal::InterfacePrefix(prefix.as_str().into())
        }
        other => {
            let reason = "must be ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix";
            list.add("detectLocalMode", other, reason);
            DetectLocal::NodeCidr
        }
    }
}

fn cluster_cidr(text: &str, list: &mut Wrong) -> PerFamily<Option<IpNet>> {
    let mut by_family = PerFamily::default();
    if text.is_empty() {
        return by_family;
    }
    let parts: Vec<&str> = text.split(',').collect();
    if parts.len() > 2 {
        list.add("clusterCIDR", text, "must be one CIDR, or one of each family");
        return by_family;
    }
    for part in parts {
        let Some(net) = parse_cidr(part) else {
            list.add("clusterCIDR", text, format!("{part:?} is not a CIDR such as 10.244.0.0/16"));
            continue;
        };
        let slot = &mut by_family[Family::of(net.addr())];
        if slot.is_some() {
            list.add("clusterCIDR", text, "two CIDRs must be one of each family");
        }
        *slot = Some(net);
    }
    by_family
}

fn node_port_addresses(config: &Config, list: &mut Wrong) -> Box<[NodePortAddress]> {
    let mut seen = HashSet::new();
    let entries = config.node_port_addresses.as_deref().unwrap_or_default();
    let parse = |entry: &String| {
        let keyword = match entry.as_str() {
            "primary" => Some(NodePortAddress::Primary),
            "localhost" => Some(NodePortAddress::Localhost),
            "all" => Some(NodePortAddress::All),
            _ => None,
        };
        if keyword.is_some() && !seen.insert(entry.clone()) {
            list.add("nodePortAddresses", entry, "this keyword is given twice");
        }
        let parsed = keyword.or_else(|| parse_cidr(entry).map(NodePortAddress::Cidr));
        if parsed.is_none() {
            list.add("nodePortAddresses", entry, "must be a CIDR, or primary, localhost or all");
        }
        parsed
    };
    entries.iter().filter_map(parse).collect()
}

fn client_and_logging(config: &Config, list: &mut Wrong) {
    for (gate, wrong) in config.feature_gates.iter().flat_map(gates::check) {
        list.add("featureGates", gate, wrong);
    }
    if config.client_connection.burst < 0 {
        list.add("clientConnection.burst", config.client_connection.burst, "must not be negative");
    }
    let asked = &config.show_hidden_metrics_for_version;
    if !asked.is_empty() && asked != PREVIOUS_MINOR {
        list.add("showHiddenMetricsForVersion", asked, format!("must be empty or {PREVIOUS_MINOR}"));
    }
    let logging = &config.logging;
    list.positive("logging.flushFrequency", logging.flush_frequency);
    if !matches!(logging.format.as_str(), "text" | "json") {
        list.add("logging.format", &logging.format, "must be text or json");
    }
    for entry in &logging.vmodule {
        if logging.format != "text" {
            list.add("logging.vmodule", &entry.file_pattern, "works only with the text format");
        }
        if entry.file_pattern.is_empty() || entry.file_pattern.contains(['=', ',']) {
            list.add("logging.vmodule", &entry.file_pattern, "must not be empty and have no '=' or ','");
        }
    }
    let options =
        [("logging.options.text", &logging.options.text), ("logging.options.json", &logging.options.json)];
    for (field, options) in options {
        let StreamOptions { info_buffer_size, split_stream } = options;
        if !config.gate("LoggingAlphaOptions") && (*split_stream || info_buffer_size != "0") {
            list.add(field, info_buffer_size, "needs the feature gate LoggingAlphaOptions");
        }
    }
}

fn numbers(config: &Config, mode: Mode, list: &mut Wrong) {
    list.range("oomScoreAdj", config.oom_score_adj, -1000..=1000);
    list.range("iptables.masqueradeBit", config.iptables.masquerade_bit, 0..=31);
    if mode == Mode::Nftables {
        list.range("nftables.masqueradeBit", config.nftables.masquerade_bit, 0..=31);
    }
    let conntrack = &config.conntrack;
    list.range("conntrack.maxPerCore", conntrack.max_per_core, 0..=i32::MAX);
    list.range("conntrack.min", conntrack.min, 0..=i32::MAX);
    for (field, value) in [
        ("conntrack.tcpEstablishedTimeout", conntrack.tcp_established_timeout.unwrap_or_default()),
        ("conntrack.tcpCloseWaitTimeout", conntrack.tcp_close_wait_timeout.unwrap_or_default()),
        ("conntrack.udpTimeout", conntrack.udp_timeout),
        ("conntrack.udpStreamTimeout", conntrack.udp_stream_timeout),
    ] {
        list.not_negative(field, value);
    }
    list.positive("configSyncPeriod", config.config_sync_period);
}

fn periods(config: &Config, list: &mut Wrong) -> (GoDuration, GoDuration) {
    let (min_field, max_field) = match config.mode.as_str() {
        "nftables" => ("nftables.minSyncPeriod", "nftables.syncPeriod"),
        "ipvs" => ("ipvs.minSyncPeriod", "ipvs.syncPeriod"),
        _ => ("iptables.minSyncPeriod", "iptables.syncPeriod"),
    };
    let (min, max) = config.periods();
    list.positive(max_field, max);
    list.not_negative(min_field, min);
    if min > max {
        list.add(min_field, min, format!("must not be greater than {max_field} ({max})"));
    }
    (min, max)
}

/// What of the configuration only the ipvs mode looks at.
fn ipvs_settings(config: &Config) -> dataplane::ipvs::Settings {
    let ipvs = &config.ipvs;
    let seconds = |duration: GoDuration| u32::try_from(duration.to_std().as_secs()).unwrap_or(u32::MAX);
    let default = dataplane::ipvs::Settings::default();
    dataplane::ipvs::Settings {
        scheduler: if ipvs.scheduler.is_empty() { default.scheduler } else { ipvs.scheduler.clone() },
        exclude: ipvs.exclude_cidrs.iter().flatten().filter_map(|text| parse_cidr(text)).collect(),
        strict_arp: ipvs.strict_arp,
        timeouts: netlink::ipvs::Timeouts {
            tcp: seconds(ipvs.tcp_timeout),
            tcp_fin: seconds(ipvs.tcp_fin_timeout),
            udp: seconds(ipvs.udp_timeout),
        },
        absent: Vec::new(),
    }
}

fn ipvs(config: &Config, list: &mut Wrong) {
    let ipvs = &config.ipvs;
    list.not_negative("ipvs.tcpTimeout", ipvs.tcp_timeout);
    list.not_negative("ipvs.tcpFinTimeout", ipvs.tcp_fin_timeout);
    list.not_negative("ipvs.udpTimeout", ipvs.udp_timeout);
    let known = || Scheduler::ALL.iter().filter_map(|scheduler| scheduler.kernel_name());
    if !ipvs.scheduler.is_empty() && !known().any(|name| name == ipvs.scheduler) {
        let all = format!("must be one of {}", known().collect::<Vec<_>>().join(", "));
        list.add("ipvs.scheduler", &ipvs.scheduler, all);
    }
    for entry in ipvs.exclude_cidrs.iter().flatten() {
        if parse_cidr(entry).is_none() {
            list.add("ipvs.excludeCIDRs", entry, "must be a CIDR");
        }
    }
}
