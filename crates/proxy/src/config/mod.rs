// SPDX-License-Identifier: Apache-2.0

//! The configuration: `KubeProxyConfiguration` of `kubeproxy.config.k8s.io/v1alpha1`, whether it was written
//! in a file or put together from flags.
//!
//! - this file: the type, its defaults
//! - [`decode`]: a file's text into the type, with a note on what nobody knows
//! - [`check`]: the type into values that are right, or the list of what is wrong
//! - [`fields`]: what differs between two, and what follows from it for a running proxy
//! - [`own`]: what kube-proxy knows nothing of, in a file of its own
//! - [`review`]: all that can be said of a file, for `check-config`
//! - [`surprise`]: what is valid, but does not mean here what it seems to
//! - [`gates`]: feature gates
//!
//! One type serves both ways. Flags overlay the defaults; a file replaces them. Every field that kube-proxy
//! knows is kept, also where it means nothing here, so that `--write-config-to` and `/configz` give back what
//! was put in.

pub mod check;
pub mod decode;
pub mod fields;
pub mod gates;
pub mod own;
pub mod review;
pub mod surprise;
#[cfg(test)]
mod tests;
pub mod tree;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::syntax::{GoDuration, parse_ip};

/// The group and version of the configuration's type.
pub const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";
/// Its kind.
pub const KIND: &str = "KubeProxyConfiguration";

/// See the module. Fields stand in the order of their written names, so that every way of writing them out
/// gives the same text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Config {
    pub api_version: String,
    pub bind_address: String,
    pub bind_address_hard_fail: bool,
    pub client_connection: ClientConnection,
    #[serde(rename = "clusterCIDR")]
    pub cluster_cidr: String,
    pub config_sync_period: GoDuration,
    pub conntrack: Conntrack,
    pub detect_local: DetectLocal,
    pub detect_local_mode: String,
    pub enable_profiling: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub feature_gates: Option<BTreeMap<String, bool>>,
    pub healthz_bind_address: String,
    pub hostname_override: String,
    pub iptables: Iptables,
    pub ipvs: Ipvs,
    pub kind: String,
    pub logging: Logging,
    pub metrics_bind_address: String,
    pub mode: String,
    pub nftables: Nftables,
    pub node_port_addresses: Option<Vec<String>>,
    pub oom_score_adj: Option<i32>,
    /// For the userspace mode, as of old; newer ones of kube-proxy's have no such mode, and ignore it.
    pub port_range: String,
    pub show_hidden_metrics_for_version: String,
    /// The same; kube-proxy dropped the field with that mode. Zero, as kubeadm wrote it, is nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub udp_idle_timeout: Option<GoDuration>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub windows_run_as_service: bool,
    pub winkernel: Winkernel,
}

/// How to talk to the API server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ClientConnection {
    pub accept_content_types: String,
    pub burst: i32,
    pub content_type: String,
    pub kubeconfig: String,
    #[serde(serialize_with = "decode::plain_float")]
    pub qps: f32,
}

/// Limits and timeouts of connection tracking; zero leaves the host's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Conntrack {
    pub max_per_core: Option<i32>,
    pub min: Option<i32>,
    pub tcp_be_liberal: bool,
    pub tcp_close_wait_timeout: Option<GoDuration>,
    pub tcp_established_timeout: Option<GoDuration>,
    pub udp_stream_timeout: GoDuration,
    pub udp_timeout: GoDuration,
}

/// What the interface modes of `detectLocalMode` look for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct DetectLocal {
    pub bridge_interface: String,
    pub interface_name_prefix: String,
}

/// For the iptables mode; the mark also for ipvs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Iptables {
    pub localhost_node_ports: Option<bool>,
    pub masquerade_all: bool,
    pub masquerade_bit: Option<i32>,
    pub min_sync_period: GoDuration,
    pub sync_period: GoDuration,
}

/// For the ipvs mode.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Ipvs {
    #[serde(rename = "excludeCIDRs")]
    pub exclude_cidrs: Option<Vec<String>>,
    pub min_sync_period: GoDuration,
    pub scheduler: String,
    #[serde(rename = "strictARP")]
    pub strict_arp: bool,
    pub sync_period: GoDuration,
    pub tcp_fin_timeout: GoDuration,
    pub tcp_timeout: GoDuration,
    pub udp_timeout: GoDuration,
}

/// What is logged, and how.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Logging {
    #[serde(deserialize_with = "decode::duration_or_nanos")]
    pub flush_frequency: GoDuration,
    pub format: String,
    pub options: LoggingOptions,
    pub verbosity: u32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub vmodule: Vec<VModule>,
}

/// Options of each format.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LoggingOptions {
    pub json: StreamOptions,
    pub text: StreamOptions,
}

/// Accepted, checked and given back; every line goes to stderr at once here.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct StreamOptions {
    #[serde(deserialize_with = "decode::quantity")]
    pub info_buffer_size: String,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub split_stream: bool,
}

/// Another verbosity for the source files that match.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct VModule {
    pub file_pattern: String,
    pub verbosity: u32,
}

/// For the nftables mode.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Nftables {
    pub masquerade_all: bool,
    pub masquerade_bit: Option<i32>,
    pub min_sync_period: GoDuration,
    pub sync_period: GoDuration,
}

/// For Windows; accepted and ignored.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Winkernel {
    #[serde(rename = "enableDSR")]
    pub enable_dsr: bool,
    pub forward_health_check_vip: bool,
    pub network_name: String,
    pub root_hns_endpoint_name: String,
    pub source_vip: String,
}

impl Config {
    /// What an empty file, and no flag, means.
    pub fn with_defaults() -> Config {
        let mut config = Config { api_version: API_VERSION.into(), kind: KIND.into(), ..Config::default() };
        config.fill();
        config
    }

    /// Fills in what was left out, as an API type's defaults: a zero that cannot be meant counts as left out.
    pub fn fill(&mut self) {
        or(&mut self.bind_address, "0.0.0.0");
        let v6 = parse_ip(&self.bind_address).is_some_and(|ip| ip.is_ipv6());
        let (any, loopback) = if v6 { ("[::]", "[::1]") } else { ("0.0.0.0", "127.0.0.1") };
        bind(&mut self.healthz_bind_address, any, 10256);
        bind(&mut self.metrics_bind_address, loopback, 10249);
        self.oom_score_adj.get_or_insert(-999);
        period(&mut self.config_sync_period, 15 * 60);
        self.fill_modes();

        let conntrack = &mut self.conntrack;
        conntrack.max_per_core.get_or_insert(32 * 1024);
        conntrack.min.get_or_insert(128 * 1024);
        conntrack.tcp_established_timeout.get_or_insert(GoDuration::from_secs(24 * 3600));
        conntrack.tcp_close_wait_timeout.get_or_insert(GoDuration::from_secs(3600));

        let client = &mut self.client_connection;
        or(&mut client.content_type, "application/vnd.kubernetes.protobuf");
        if client.qps == 0.0 {
            client.qps = 5.0;
        }
        if client.burst == 0 {
            client.burst = 10;
        }

        let logging = &mut self.logging;
        or(&mut logging.format, "text");
        period(&mut logging.flush_frequency, 5);
        or(&mut logging.options.json.info_buffer_size, "0");
        or(&mut logging.options.text.info_buffer_size, "0");
    }

    fn fill_modes(&mut self) {
        self.iptables.masquerade_bit.get_or_insert(14);
        self.iptables.localhost_node_ports.get_or_insert(true);
        period(&mut self.iptables.sync_period, 30);
        period(&mut self.iptables.min_sync_period, 1);
        self.nftables.masquerade_bit.get_or_insert(14);
        period(&mut self.nftables.sync_period, 30);
        period(&mut self.nftables.min_sync_period, 1);
        period(&mut self.ipvs.sync_period, 30);
    }

    /// What only the program itself can decide, after file and flags: the mode, and what hangs on it. The
    /// periods and masqueradeAll of the modes that are not in use go back to zero, since nothing reads them.
    pub fn settle(&mut self) {
        or(&mut self.mode, "nftables");
        or(&mut self.detect_local_mode, "ClusterCIDR");
        let nftables = self.mode == "nftables";
        if nftables && self.node_port_addresses.as_ref().is_none_or(Vec::is_empty) {
            self.node_port_addresses = Some(vec!["primary".into()]);
        }
        if !nftables {
            self.nftables.masquerade_all = false;
            (self.nftables.sync_period, self.nftables.min_sync_period) = Default::default();
        }
        if self.mode != "ipvs" {
            (self.ipvs.sync_period, self.ipvs.min_sync_period) = Default::default();
        }
        // Everything but nftables reads masqueradeAll here; ipvs has periods of its own.
        if nftables {
            self.iptables.masquerade_all = false;
        }
        if nftables || self.mode == "ipvs" {
            (self.iptables.sync_period, self.iptables.min_sync_period) = Default::default();
        }
    }

    /// Least and greatest time between two writes: `(minSyncPeriod, syncPeriod)` of the mode in use.
    pub fn periods(&self) -> (GoDuration, GoDuration) {
        match self.mode.as_str() {
            "nftables" => (self.nftables.min_sync_period, self.nftables.sync_period),
            "ipvs" => (self.ipvs.min_sync_period, self.ipvs.sync_period),
            _ => (self.iptables.min_sync_period, self.iptables.sync_period),
        }
    }

    /// Masquerade all traffic to cluster IPs, in the mode in use.
    pub fn masquerade_all(&self) -> bool {
        match self.mode.as_str() {
            "nftables" => self.nftables.masquerade_all,
            _ => self.iptables.masquerade_all,
        }
    }

    /// Whether a feature gate is on.
    pub fn gate(&self, name: &str) -> bool {
        match &self.feature_gates {
            Some(set) => gates::enabled(set, name),
            None => gates::enabled(&BTreeMap::new(), name),
        }
    }
}

fn or(field: &mut String, default: &str) {
    if field.is_empty() {
        field.push_str(default);
    }
}

fn period(field: &mut GoDuration, default_secs: i64) {
    if *field == GoDuration::ZERO {
        *field = GoDuration::from_secs(default_secs);
    }
}

/// An empty address becomes `host:port`, a bare IP gets the port.
fn bind(field: &mut String, host: &str, port: u16) {
    if field.is_empty() {
        *field = format!("{host}:{port}");
    } else if let Some(ip) = parse_ip(field) {
        *field = std::net::SocketAddr::new(ip, port).to_string();
    }
}
