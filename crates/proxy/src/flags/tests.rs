// SPDX-License-Identifier: Apache-2.0

use std::{io::Write, time::Duration};

use super::*;
use crate::config::VModule;

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

fn options(line: &str) -> Options {
    let (mut options, positional) = Options::parse(&words(line)).expect(line);
    assert!(positional.is_empty(), "{line}");
    options.complete().expect(line);
    options
}

fn config(line: &str) -> Config {
    options(line).config
}

fn refused(line: &str) -> String {
    Options::parse(&words(line)).expect_err(line)
}

/// One flag of each type and what becomes of it.
#[test]
fn flags_reach_their_fields() {
    assert_eq!(config("--kubeconfig=/k").client_connection.kubeconfig, "/k");
    assert_eq!(config("--kube_api_qps -1").client_connection.qps, -1.0);
    assert_eq!(config("--kube-api-burst=7").client_connection.burst, 7);
    assert_eq!(config("--cluster-cidr 10.0.0.0/8,fd00::/48").cluster_cidr, "10.0.0.0/8,fd00::/48");
    assert_eq!(config("--bind-address 010.0.0.1").bind_address, "10.0.0.1");
    assert_eq!(config("--oom-score-adj=-5").oom_score_adj, Some(-5));
    assert!(config("--conntrack-tcp-be-liberal").conntrack.tcp_be_liberal);
    assert_eq!(config("--iptables-localhost-nodeports=false").iptables.localhost_node_ports, Some(false));
    assert_eq!(config("--conntrack-udp-timeout 30s").conntrack.udp_timeout, GoDuration::from_secs(30));
    assert_eq!(config("-v 4").logging.verbosity, 4);
    assert_eq!(config("--v=4").logging.verbosity, 4);
    let addresses = config("--nodeport-addresses 10.0.0.0/8,localhost --nodeport-addresses=primary");
    assert_eq!(addresses.node_port_addresses.expect("set"), ["10.0.0.0/8", "localhost", "primary"]);
    let gates = config("--feature-gates A=true,B=0").feature_gates.expect("set");
    assert_eq!(gates.into_iter().collect::<Vec<_>>(), [("A".to_owned(), true), ("B".to_owned(), false)]);
    let vmodule = config("--vmodule kube=4,app=2").logging.vmodule;
    assert_eq!(vmodule[1], VModule { file_pattern: "app".into(), verbosity: 2 });
    assert_eq!(options("--source file:/etc/portolan").source, Source::File("/etc/portolan".into()));
    assert!(options("--cleanup").cleanup);
    assert_eq!(config("--proxy-port-range 40000-40100").port_range, "40000-40100");
    assert_eq!(options("--udp-timeout 1m").userspace.udp_timeout, GoDuration::from_secs(60));
    assert_eq!(options("--userspace-drain 1s").userspace.drain, GoDuration::from_secs(1));
    assert_eq!(options("--version").version.as_deref(), Some("true"));
    assert_eq!(options("--version=raw").version.as_deref(), Some("raw"));
}

#[test]
fn every_flag_of_kube_proxy_is_there() {
    let table = "config write-config-to cleanup init-only hostname-override master version help feature-gates \
        kubeconfig kube-api-content-type kube-api-qps kube-api-burst bind-address healthz-bind-address healthz-port \
        metrics-bind-address metrics-port bind-address-hard-fail profiling show-hidden-metrics-for-version \
        proxy-mode iptables-masquerade-bit masquerade-all iptables-localhost-nodeports iptables-sync-period \
        iptables-min-sync-period ipvs-sync-period ipvs-min-sync-period ipvs-scheduler ipvs-exclude-cidrs \
        ipvs-strict-arp ipvs-tcp-timeout ipvs-tcpfin-timeout ipvs-udp-timeout detect-local-mode \
        pod-bridge-interface pod-interface-name-prefix cluster-cidr nodeport-addresses oom-score-adj \
        conntrack-max-per-core conntrack-min conntrack-tcp-timeout-established conntrack-tcp-timeout-close-wait \
        conntrack-tcp-be-liberal conntrack-udp-timeout conntrack-udp-timeout-stream config-sync-period \
        logging-format log-flush-frequency v vmodule log-text-split-stream log-json-split-stream \
        log-text-info-buffer-size log-json-info-buffer-size";
    for name in table.split_whitespace() {
        assert!(table::FLAGS.iter().any(|flag| flag.name == name), "--{name} is missing");
    }
    let ours = ["portolan-config", "source", "node-port-range", "counted-endpoints", "ipvs-fallback"];
    // Of kube-proxy's userspace mode as it was, and two beside them.
    let userspace = ["udp-timeout", "proxy-port-range", "userspace-drain", "userspace-bind"];
    let ours = [&ours[..], &userspace].concat();
    let foreign = table::FLAGS.iter().filter(|flag| !ours.contains(&flag.name)).count();
    assert_eq!(foreign, table.split_whitespace().count(), "only these are ours");
}

/// The fields of kube-proxy's old userspace mode, which a configuration of those days still has.
#[test]
fn the_old_fields_of_the_userspace_mode_count() {
    let folder = tempfile::tempdir().expect("a folder");
    let (config, own) = (folder.path().join("config.conf"), folder.path().join("portolan.conf"));
    let line = format!("--config={}", config.display());
    let with = |body: &str| {
        let head =
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: userspace\n";
        std::fs::write(&config, format!("{head}{body}")).expect("written");
        let (mut options, _) = Options::parse(&words(&line)).expect("valid");
        assert_eq!(options.complete().expect("valid"), [], "nothing is unknown");
        options
    };
    let both = with("portRange: 40000-40010\nudpIdleTimeout: 250ms\n").checked().expect("valid");
    assert_eq!(both.userspace.ports, Some(40_000..=40_010));
    assert_eq!(both.userspace.relay.udp_timeout, Duration::from_millis(250));
    let zero = with("udpIdleTimeout: 0s\n").userspace.udp_timeout;
    assert_eq!(zero, GoDuration::from_secs(30), "as kubeadm wrote it: nothing was asked for");
    with("udpIdleTimeout: -1s\n").checked().expect_err("negative");
    for range in ["40000-40000", "40000", "40000+0"] {
        let reason = with(&format!("portRange: \"{range}\"\n")).checked().expect_err("one port is too few");
        assert!(reason.contains("is too small"), "{reason}");
    }
    let text = "apiVersion: portolan.dev/v1alpha1\nkind: PortolanConfiguration\nudpTimeout: 5s\n";
    std::fs::write(&own, text).expect("written");
    let ours = with("udpIdleTimeout: 250ms\n").userspace.udp_timeout;
    assert_eq!(ours, GoDuration::from_secs(5), "what is said to us counts before what is said to both");
}

#[test]
fn our_own_settings_stand_beside_the_configuration() {
    let folder = tempfile::tempdir().expect("a folder");
    let (config, own) = (folder.path().join("config.conf"), folder.path().join("portolan.conf"));
    let text = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: iptables\n";
    std::fs::write(&config, text).expect("written");
    let line = format!("--config={}", config.display());
    let alone = options(&line);
    assert_eq!((alone.config.mode.as_str(), &alone.source), ("iptables", &Source::Kubernetes));

    let text = "apiVersion: portolan.dev/v1alpha1\nkind: PortolanConfiguration\nmode: nftables\n\
                source: file:/x\nnodePortRange: 1-9\nudpTimeout: 5s\nuserspaceDrain: 1m\nuserspaceBind: true\n";
    std::fs::write(&own, text).expect("written");
    let both = options(&line);
    assert_eq!((both.config.mode.as_str(), &both.source), ("nftables", &Source::File("/x".into())));
    assert_eq!(both.config.node_port_addresses.expect("that of the mode"), ["primary"]);
    assert_eq!(both.node_port_range.to_string(), "1-9");
    let Userspace { udp_timeout, drain, bind } = both.userspace;
    assert_eq!((udp_timeout, drain, bind), (GoDuration::from_secs(5), GoDuration::from_secs(60), true));
    options("--userspace-bind").userspace.check().expect("defaults are right");
    options("--udp-timeout=0s").userspace.check().expect_err("every flow would be forgotten at once");
    options("--userspace-drain=-1s").userspace.check().expect_err("negative");
    let flags = options(&format!("{line} --source=kubernetes --node-port-range=2-3"));
    assert_eq!((flags.source, flags.node_port_range.to_string()), (Source::Kubernetes, "2-3".to_owned()));

    // Named, it need not stand there, but has to be there.
    let elsewhere = folder.path().join("elsewhere");
    std::fs::rename(&own, &elsewhere).expect("moved");
    let named = options(&format!("--portolan-config={} --proxy-mode=iptables", elsewhere.display()));
    assert_eq!(named.config.mode, "nftables", "what is said to us counts before what is said to both");
    let (mut missing, _) = Options::parse(&words("--portolan-config=/nonexistent")).expect("valid");
    assert!(missing.complete().expect_err("not there").contains("/nonexistent"));
}

/// The defaults the table prints are the defaults the program has.
#[test]
fn printed_defaults_are_true() {
    let mut set = Options::default();
    for flag in table::FLAGS.iter().filter(|flag| !flag.default.is_empty()) {
        (flag.set)(&mut set, flag.default).expect(flag.name);
    }
    set.complete().expect("defaults are valid");
    let mut untouched = Options::default();
    untouched.complete().expect("defaults are valid");
    assert_eq!(set, untouched);
}

#[test]
fn bad_values_are_named() {
    assert_eq!(
        refused("--oom-score-adj=x"),
        "invalid argument \"x\" for \"--oom-score-adj\" flag: strconv.ParseInt: parsing \"x\": invalid syntax or out \
         of range"
    );
    for line in [
        "--v=-1",
        "--iptables-sync-period 5",
        "--cleanup=yes",
        "--bind-address host",
        "--healthz-bind-address 1.2.3.4:0",
        "--metrics-bind-address localhost:80",
        "--feature-gates A",
        "--feature-gates A=maybe",
        "--source nowhere",
        "--source file:",
        "--vmodule x",
        "--version=1.2",
        "--conntrack-min 99999999999",
        "--log-text-info-buffer-size 5Q",
    ] {
        assert!(refused(line).starts_with("invalid argument"), "{line}");
    }
    for gone in ["logtostderr", "log-dir", "boot-id-file", "cleanup-ipvs"] {
        assert!(refused(&format!("--{gone}=1")).starts_with(&format!("unknown flag: --{gone}")));
    }
}

#[test]
fn without_a_file_flags_overlay_the_defaults() {
    // Defaults are computed before the flags, so a v6 bind address does not move the servers.
    let v6 = config("--bind-address ::1");
    assert_eq!((v6.bind_address.as_str(), v6.healthz_bind_address.as_str()), ("::1", "0.0.0.0:10256"));
    let unset = config("");
    assert_eq!((unset.mode.as_str(), unset.detect_local_mode.as_str()), ("nftables", "ClusterCIDR"));
    assert_eq!(unset.node_port_addresses.as_deref(), Some(&["primary".to_owned()][..]));
    assert_eq!(unset.periods(), (GoDuration::from_secs(1), GoDuration::from_secs(30)));
    assert_eq!(unset.iptables.sync_period, GoDuration::ZERO);

    let zero = config("--iptables-min-sync-period=0 --iptables-sync-period 10s --masquerade-all");
    assert_eq!(zero.periods(), (GoDuration::ZERO, GoDuration::from_secs(10)));
    assert!(zero.nftables.masquerade_all && !zero.iptables.masquerade_all);

    let ipvs = config("--proxy-mode ipvs --ipvs-sync-period 9s --masquerade-all");
    assert_eq!(ipvs.periods(), (GoDuration::from_secs(1), GoDuration::from_secs(9)));
    assert!(ipvs.masquerade_all() && ipvs.node_port_addresses.is_none());
}

#[test]
fn deprecated_ports() {
    assert_eq!(config("--healthz-port 9999").healthz_bind_address, "0.0.0.0:10256");
    assert_eq!(config("--healthz-bind-address 1.2.3.4 --healthz-port 9").healthz_bind_address, "1.2.3.4:9");
    assert_eq!(config("--healthz-bind-address ::1").healthz_bind_address, "[::1]:10256");
    assert_eq!(config("--healthz-bind-address=").healthz_bind_address, "0.0.0.0:10256");
    assert_eq!(config("--healthz-port 0").healthz_bind_address, "");
    assert_eq!(config("--metrics-port 0").metrics_bind_address, "");
    assert_eq!(options("--metrics-port 1 --cleanup").deprecations().len(), 1);
}

fn with_file(body: &str, line: &str) -> Options {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
    write!(file, "{head}{body}").expect("written");
    options(&format!("--config {} {line}", file.path().display()))
}

#[test]
fn a_file_replaces_all_flags_but_the_strong_ones() {
    let all = with_file(
        "mode: iptables\nhostnameOverride: from-file\nlogging: {verbosity: 1, vmodule: [{filePattern: a, verbosity: 1}]}\n",
        "--proxy-mode ipvs --cluster-cidr 10.0.0.0/8 --masquerade-all --iptables-sync-period 5s --healthz-port 0 \
         --feature-gates X=true --hostname-override mine --master https://m --v 6 --vmodule b=2 --logging-format json",
    );
    let config = &all.config;
    assert_eq!(config.mode, "iptables");
    assert_eq!((config.cluster_cidr.as_str(), config.masquerade_all()), ("", false));
    assert_eq!(config.periods(), (GoDuration::from_secs(1), GoDuration::from_secs(30)));
    assert_eq!(config.healthz_bind_address, "0.0.0.0:10256");
    assert_eq!(config.feature_gates, None);
    assert_eq!(config.node_port_addresses, None);
    // These beat the file.
    assert_eq!(config.hostname_override, "mine");
    assert_eq!(all.master, "https://m");
    assert_eq!((config.logging.verbosity, config.logging.format.as_str()), (6, "json"));
    let patterns: Vec<_> = config.logging.vmodule.iter().map(|entry| entry.file_pattern.as_str()).collect();
    assert_eq!(patterns, ["b", "a"], "the flag's come first");
    // Without the flag the file's stay.
    assert_eq!(with_file("hostnameOverride: from-file\n", "").config.hostname_override, "from-file");
}

#[test]
fn an_unreadable_file_is_one_sentence() {
    let (mut options, _) = Options::parse(&words("--config /nonexistent/x")).expect("flags are fine");
    let error = options.complete().expect_err("no such file");
    assert!(error.starts_with("cannot read the configuration /nonexistent/x: "), "{error}");
    assert!(!error.contains('\n'));
}

#[test]
fn the_listing_has_every_flag() {
    let listing = options("--v=3 --cleanup").listing();
    assert_eq!(listing.len(), table::FLAGS.len());
    assert_eq!((listing["v"].as_str(), listing["cleanup"].as_str()), ("3", "true"));
    assert_eq!(listing["proxy-mode"], "nftables");
    assert!(help().contains("--cluster-cidr") && !help().contains("--healthz-port"));
}
