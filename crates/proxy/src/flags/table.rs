// SPDX-License-Identifier: Apache-2.0

//! Which flags there are: name, type, default, meaning, and the field they set. In kube-proxy's groups; where
//! a flag is not marked `always`, it is without effect beside `--config`.

use super::{Options, parse::Flag};
use crate::{
    config::VModule,
    syntax::{GoDuration, parse_bool, parse_ip, parse_socket},
};

type Outcome = Result<(), String>;

/// All flags of the proxy.
pub const FLAGS: &[Flag<Options>] = &[
    // What to do.
    value("config", "file", "", "Read the configuration from this KubeProxyConfiguration file.", |o, v| {
        o.config_file = path(v);
        Ok(())
    })
    .always(),
    value(
        "portolan-config",
        "file",
        "",
        "Read Portolan's own settings from this file; without it, from portolan.conf beside --config.",
        |o, v| {
            o.own_file = path(v);
            Ok(())
        },
    )
    .always(),
    value("source", "where", "kubernetes", "Where Services come from: kubernetes, or file:PATH.", |o, v| {
        o.source = v.parse()?;
        Ok(())
    })
    .always(),
    value(
        "node-port-range",
        "first-last",
        "30000-32767",
        "The API server's range of node ports, to warn where this node gives them away.",
        |o, v| {
            o.node_port_range = v.parse()?;
            Ok(())
        },
    )
    .always(),
    value(
        "udp-timeout",
        "duration",
        "30s",
        "How long an idle UDP flow is remembered (userspace).",
        |o, v| duration(&mut o.userspace.udp_timeout, v),
    )
    .always(),
    value(
        "userspace-drain",
        "duration",
        "25s",
        "How long open connections may go on after SIGTERM (userspace).",
        |o, v| duration(&mut o.userspace.drain, v),
    )
    .always(),
    switch(
        "userspace-bind",
        "false",
        "Listen on the service addresses themselves, without a packet filter (userspace).",
        |o, v| boolean(&mut o.userspace.bind, v),
    )
    .always(),
    value(
        "proxy-port-range",
        "first-last",
        "",
        "Listen on ports of this range only; any if empty or 0-0 (userspace).",
        |o, v| {
            o.config.port_range = v.to_owned();
            Ok(())
        },
    ),
    value(
        "counted-endpoints",
        "uint32",
        "10000",
        "Count connections for metrics up to so many endpoints; 0 counts none.",
        |o, v| {
            o.counted_endpoints = number(v, "ParseUint")?;
            Ok(())
        },
    )
    .always(),
    value(
        "ipvs-fallback",
        "mode",
        "iptables",
        "The mode to take where the kernel cannot do ipvs: iptables, nftables, or none to end instead.",
        |o, v| {
            o.ipvs_fallback = v.parse()?;
            Ok(())
        },
    )
    .always(),
    value(
        "write-config-to",
        "file",
        "",
        "Write the resulting configuration to this file and exit.",
        |o, v| {
            o.write_config_to = path(v);
            Ok(())
        },
    )
    .always(),
    switch("cleanup", "false", "Remove what any mode of Portolan or kube-proxy left, and exit.", |o, v| {
        boolean(&mut o.cleanup, v)
    })
    .always(),
    switch("init-only", "false", "Do what needs full privileges, then exit.", |o, v| {
        boolean(&mut o.init_only, v)
    })
    .always(),
    value("hostname-override", "string", "", "The name of this node, if not the host's name.", |o, v| {
        text(&mut o.config.hostname_override, v)
    })
    .always(),
    Flag { alone: Some("true"), ..value("version", "version", "", "Print the version and exit.", version) }
        .always(),
    switch("help", "false", "Print this text and exit.", |o, v| boolean(&mut o.help, v)).letter('h').always(),
    // The API.
    value("kubeconfig", "file", "", "How to reach the API server; in-cluster without it.", |o, v| {
        text(&mut o.config.client_connection.kubeconfig, v)
    }),
    value("master", "url", "", "The API server's address; beats the kubeconfig.", |o, v| {
        text(&mut o.master, v)
    })
    .always(),
    value(
        "kube-api-content-type",
        "string",
        "application/vnd.kubernetes.protobuf",
        "Content type of requests to the API server.",
        |o, v| text(&mut o.config.client_connection.content_type, v),
    ),
    value(
        "kube-api-qps",
        "float32",
        "5",
        "Accepted for compatibility: queries to the API per second.",
        |o, v| {
            o.config.client_connection.qps = number(v, "ParseFloat")?;
            Ok(())
        },
    ),
    value(
        "kube-api-burst",
        "int32",
        "10",
        "Accepted for compatibility: burst of queries to the API.",
        |o, v| int32(&mut o.config.client_connection.burst, v),
    ),
    value(
        "config-sync-period",
        "duration",
        "15m0s",
        "Accepted for compatibility: changes are followed as they come, and nothing is asked anew.",
        |o, v| duration(&mut o.config.config_sync_period, v),
    ),
    value("feature-gates", "name=bool,...", "", "Feature gates to set.", |o, v| {
        feature_gates(o.config.feature_gates.get_or_insert_default(), v)
    }),
    // Servers.
    value(
        "bind-address",
        "ip",
        "0.0.0.0",
        "Replaces this node's address of its family, if specific.",
        |o, v| ip(&mut o.config.bind_address, v),
    ),
    value(
        "healthz-bind-address",
        "ip[:port]",
        "0.0.0.0:10256",
        "Where the health server listens.",
        |o, v| ip_port(&mut o.config.healthz_bind_address, v),
    ),
    value(
        "metrics-bind-address",
        "ip[:port]",
        "127.0.0.1:10249",
        "Where the metrics server listens.",
        |o, v| ip_port(&mut o.config.metrics_bind_address, v),
    ),
    value("healthz-port", "int32", "10256", "", |o, v| int32(&mut o.healthz_port, v))
        .deprecated("use --healthz-bind-address instead."),
    value("metrics-port", "int32", "10249", "", |o, v| int32(&mut o.metrics_port, v))
        .deprecated("use --metrics-bind-address instead."),
    switch("bind-address-hard-fail", "false", "Exit if a server's address cannot be bound.", |o, v| {
        boolean(&mut o.config.bind_address_hard_fail, v)
    }),
    switch("profiling", "false", "PUT /debug/flags/v on the metrics port sets the verbosity.", |o, v| {
        boolean(&mut o.config.enable_profiling, v)
    }),
    value("show-hidden-metrics-for-version", "version", "", "Accepted for compatibility.", |o, v| {
        text(&mut o.config.show_hidden_metrics_for_version, v)
    }),
    // Traffic.
    value(
        "proxy-mode",
        "mode",
        "nftables",
        "How traffic is served: nftables, iptables, ipvs, userspace.",
        |o, v| text(&mut o.config.mode, v),
    ),
    value("cluster-cidr", "cidr[,cidr]", "", "The range of pod addresses, one for each family.", |o, v| {
        text(&mut o.config.cluster_cidr, v)
    }),
    value(
        "detect-local-mode",
        "mode",
        "ClusterCIDR",
        "How pods' traffic is told: ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix.",
        |o, v| text(&mut o.config.detect_local_mode, v),
    ),
    value("pod-bridge-interface", "string", "", "Pods' traffic comes from this bridge.", |o, v| {
        text(&mut o.config.detect_local.bridge_interface, v)
    }),
    value(
        "pod-interface-name-prefix",
        "string",
        "",
        "Pods' traffic comes from interfaces named so.",
        |o, v| text(&mut o.config.detect_local.interface_name_prefix, v),
    ),
    value(
        "nodeport-addresses",
        "list",
        "",
        "Addresses that serve node ports: CIDRs, primary, localhost, all.",
        |o, v| list(&mut o.config.node_port_addresses, v),
    ),
    switch("masquerade-all", "false", "Masquerade all traffic to cluster IPs.", |o, v| {
        boolean(&mut o.per_mode.masquerade_all, v)
    }),
    value(
        "iptables-masquerade-bit",
        "int32",
        "14",
        "The mark bit for masquerading (iptables, ipvs).",
        |o, v| int32(o.config.iptables.masquerade_bit.get_or_insert_default(), v),
    ),
    switch("iptables-localhost-nodeports", "true", "Node ports on 127.0.0.1 (iptables).", |o, v| {
        boolean(o.config.iptables.localhost_node_ports.get_or_insert_default(), v)
    }),
    value(
        "iptables-sync-period",
        "duration",
        "30s",
        "Half of the time after which stuck work makes the node unhealthy; for all modes but ipvs.",
        |o, v| duration(&mut o.per_mode.sync_period, v),
    ),
    value(
        "iptables-min-sync-period",
        "duration",
        "1s",
        "The longest pause between two writes under load; for all modes but ipvs.",
        |o, v| duration(&mut o.per_mode.min_sync_period, v),
    ),
    value("ipvs-sync-period", "duration", "30s", "The same for ipvs.", |o, v| {
        duration(&mut o.per_mode.ipvs_sync_period, v)
    }),
    value("ipvs-min-sync-period", "duration", "1s", "The same for ipvs.", |o, v| {
        duration(&mut o.per_mode.ipvs_min_sync_period, v)
    }),
    value("ipvs-scheduler", "string", "", "The ipvs scheduler.", |o, v| {
        text(&mut o.config.ipvs.scheduler, v)
    }),
    value("ipvs-exclude-cidrs", "list", "", "Virtual servers that are not ours (ipvs).", |o, v| {
        list(&mut o.config.ipvs.exclude_cidrs, v)
    }),
    switch("ipvs-strict-arp", "false", "Set arp_ignore and arp_announce (ipvs).", |o, v| {
        boolean(&mut o.config.ipvs.strict_arp, v)
    }),
    value("ipvs-tcp-timeout", "duration", "0s", "Idle TCP connections (ipvs); 0 leaves it.", |o, v| {
        duration(&mut o.config.ipvs.tcp_timeout, v)
    }),
    value("ipvs-tcpfin-timeout", "duration", "0s", "TCP after FIN (ipvs); 0 leaves it.", |o, v| {
        duration(&mut o.config.ipvs.tcp_fin_timeout, v)
    }),
    value("ipvs-udp-timeout", "duration", "0s", "UDP flows (ipvs); 0 leaves it.", |o, v| {
        duration(&mut o.config.ipvs.udp_timeout, v)
    }),
    // The host.
    value("oom-score-adj", "int32", "-999", "oom_score_adj of this process.", |o, v| {
        int32(o.config.oom_score_adj.get_or_insert_default(), v)
    }),
    value("conntrack-max-per-core", "int32", "32768", "Tracked connections per CPU; 0 leaves it.", |o, v| {
        int32(o.config.conntrack.max_per_core.get_or_insert_default(), v)
    }),
    value("conntrack-min", "int32", "131072", "Tracked connections, at least.", |o, v| {
        int32(o.config.conntrack.min.get_or_insert_default(), v)
    }),
    value("conntrack-tcp-timeout-established", "duration", "24h0m0s", "Idle TCP; 0 leaves it.", |o, v| {
        duration(o.config.conntrack.tcp_established_timeout.get_or_insert_default(), v)
    }),
    value(
        "conntrack-tcp-timeout-close-wait",
        "duration",
        "1h0m0s",
        "TCP in CLOSE_WAIT; 0 leaves it.",
        |o, v| duration(o.config.conntrack.tcp_close_wait_timeout.get_or_insert_default(), v),
    ),
    switch("conntrack-tcp-be-liberal", "false", "Track TCP without checking windows.", |o, v| {
        boolean(&mut o.config.conntrack.tcp_be_liberal, v)
    }),
    value("conntrack-udp-timeout", "duration", "0s", "UDP without answer; 0 leaves it.", |o, v| {
        duration(&mut o.config.conntrack.udp_timeout, v)
    }),
    value("conntrack-udp-timeout-stream", "duration", "0s", "UDP with answers; 0 leaves it.", |o, v| {
        duration(&mut o.config.conntrack.udp_stream_timeout, v)
    }),
    // Logs.
    value("v", "level", "0", "How much to log.", |o, v| {
        o.config.logging.verbosity = number(v, "ParseUint")?;
        Ok(())
    })
    .letter('v')
    .always(),
    value("vmodule", "pattern=N,...", "", "How much to log from source files that match.", |o, v| {
        vmodule(&mut o.config.logging.vmodule, v)
    })
    .always(),
    value("logging-format", "string", "text", "text or json.", |o, v| text(&mut o.config.logging.format, v))
        .always(),
    value(
        "log-flush-frequency",
        "duration",
        "5s",
        "Accepted for compatibility: nothing is buffered.",
        |o, v| duration(&mut o.config.logging.flush_frequency, v),
    )
    .always(),
    switch("log-text-split-stream", "false", "Accepted for compatibility.", |o, v| {
        boolean(&mut o.config.logging.options.text.split_stream, v)
    })
    .always(),
    switch("log-json-split-stream", "false", "Accepted for compatibility.", |o, v| {
        boolean(&mut o.config.logging.options.json.split_stream, v)
    })
    .always(),
    value("log-text-info-buffer-size", "quantity", "0", "Accepted for compatibility.", |o, v| {
        quantity(&mut o.config.logging.options.text.info_buffer_size, v)
    })
    .always(),
    value("log-json-info-buffer-size", "quantity", "0", "Accepted for compatibility.", |o, v| {
        quantity(&mut o.config.logging.options.json.info_buffer_size, v)
    })
    .always(),
];

type Set = fn(&mut Options, &str) -> Outcome;

/// [`Flag::new`] for the one type here, so that the closures above need not name it.
const fn value(
    name: &'static str,
    value: &'static str,
    default: &'static str,
    help: &'static str,
    set: Set,
) -> Flag<Options> {
    Flag::new(name, value, default, help, set)
}

const fn switch(name: &'static str, default: &'static str, help: &'static str, set: Set) -> Flag<Options> {
    Flag::boolean(name, default, help, set)
}

fn text(field: &mut String, value: &str) -> Outcome {
    value.clone_into(field);
    Ok(())
}

fn path(value: &str) -> Option<std::path::PathBuf> {
    (!value.is_empty()).then(|| value.into())
}

fn version(options: &mut Options, value: &str) -> Outcome {
    let fits = matches!(value, "raw" | "true" | "false") || value.starts_with('v');
    if !fits {
        return Err("must be true, false, raw, or a version such as v1.2.3".into());
    }
    // A version by name is what kube-proxy then reports in the place of its own; we have nothing to pretend.
    options.version = matches!(value, "raw" | "true").then(|| value.to_owned());
    Ok(())
}

fn boolean(field: &mut bool, value: &str) -> Outcome {
    *field =
        parse_bool(value).ok_or_else(|| format!("strconv.ParseBool: parsing {value:?}: invalid syntax"))?;
    Ok(())
}

fn number<N: std::str::FromStr>(value: &str, parser: &str) -> Result<N, String> {
    value.parse().map_err(|_| format!("strconv.{parser}: parsing {value:?}: invalid syntax or out of range"))
}

fn int32(field: &mut i32, value: &str) -> Outcome {
    *field = number(value, "ParseInt")?;
    Ok(())
}

fn duration(field: &mut GoDuration, value: &str) -> Outcome {
    *field = GoDuration::parse(value)?;
    Ok(())
}

/// Lists add up over repeated flags.
fn list(field: &mut Option<Vec<String>>, value: &str) -> Outcome {
    let entries = field.get_or_insert_default();
    if !value.is_empty() {
        entries.extend(value.split(',').map(str::to_owned));
    }
    Ok(())
}

fn ip(field: &mut String, value: &str) -> Outcome {
    if value.is_empty() {
        return Ok(());
    }
    let ip = parse_ip(value).ok_or_else(|| format!("{value:?} is not a valid IP address"))?;
    *field = ip.to_string();
    Ok(())
}

/// An empty value leaves the default.
fn ip_port(field: &mut String, value: &str) -> Outcome {
    if value.is_empty() {
        return Ok(());
    }
    if parse_ip(value).is_none() && parse_socket(value).is_none() {
        return Err(format!("{value:?} is not an IP address, or one with a port from 1 to 65535"));
    }
    text(field, value)
}

fn feature_gates(field: &mut std::collections::BTreeMap<String, bool>, value: &str) -> Outcome {
    for pair in value.split(',').filter(|pair| !pair.trim().is_empty()) {
        let (name, on) =
            pair.split_once('=').ok_or_else(|| format!("missing bool value for {}", pair.trim()))?;
        let (name, on) = (name.trim(), on.trim());
        let on = parse_bool(on).ok_or_else(|| format!("invalid value of {name}={on}, err: not a bool"))?;
        field.insert(name.to_owned(), on);
    }
    Ok(())
}

/// Entries of the flag come before those of the file, so that they are found first.
fn vmodule(field: &mut Vec<VModule>, value: &str) -> Outcome {
    let mut entries = Vec::new();
    for pair in value.split(',').filter(|pair| !pair.is_empty()) {
        let (pattern, level) =
            pair.split_once('=').ok_or("syntax error: expect comma-separated list of filename=N")?;
        if pattern.is_empty() {
            return Err("syntax error: expect comma-separated list of filename=N".into());
        }
        entries.push(VModule { file_pattern: pattern.to_owned(), verbosity: number(level, "ParseUint")? });
    }
    entries.append(field);
    *field = entries;
    Ok(())
}

fn quantity(field: &mut String, value: &str) -> Outcome {
    let digits =
        value.trim_start_matches(['+', '-']).trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    let known = ["", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    if !value.contains(|c: char| c.is_ascii_digit()) || !known.contains(&digits) {
        return Err("quantities must be a number with a suffix such as Ki or M".into());
    }
    text(field, value)
}
