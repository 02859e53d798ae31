// SPDX-License-Identifier: Apache-2.0

use dataplane::Mode;
use model::{Family, NodePortAddress};

use super::{
    check::{Checked, check},
    decode::{Reason, decode},
    *,
};

const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

fn read(body: &str) -> Config {
    let decoded = decode(&format!("{HEAD}{body}")).expect(body);
    assert_eq!(decoded.notices, [], "{body}");
    decoded.config
}

fn settled(body: &str) -> Config {
    let mut config = read(body);
    config.settle();
    config
}

fn checked(body: &str) -> Checked {
    check(&settled(body)).expect(body)
}

/// The fields that are refused.
fn wrong(body: &str) -> Vec<&'static str> {
    check(&settled(body)).expect_err(body).into_iter().map(|invalid| invalid.field).collect()
}

#[test]
fn an_empty_object_has_the_documented_defaults() {
    let config = settled("");
    let text = serde_saphyr::to_string(&config).expect("it is plain");
    assert_eq!(text, include_str!("defaults.yaml"));
    let mut again = decode(&text).expect("what we write we read").config;
    again.settle();
    assert_eq!(again, config);
}

#[test]
fn defaults_that_depend_on_other_fields() {
    let v6 = settled("bindAddress: \"::1\"\n");
    assert_eq!((&*v6.healthz_bind_address, &*v6.metrics_bind_address), ("[::]:10256", "[::1]:10249"));
    let bare = settled("healthzBindAddress: 10.0.0.1\nmetricsBindAddress: \"fd00::1\"\n");
    assert_eq!(
        (&*bare.healthz_bind_address, &*bare.metrics_bind_address),
        ("10.0.0.1:10256", "[fd00::1]:10249")
    );
    // A zero in a file is nothing; ipvs has no least period of its own.
    let zero = settled("nftables: {minSyncPeriod: 0s, syncPeriod: 0s}\nconfigSyncPeriod: 0s\n");
    assert_eq!(zero.periods(), (GoDuration::from_secs(1), GoDuration::from_secs(30)));
    assert_eq!(zero.config_sync_period, GoDuration::from_secs(900));
    assert_eq!(settled("mode: ipvs\n").periods(), (GoDuration::ZERO, GoDuration::from_secs(30)));
    assert_eq!(settled("mode: iptables\n").node_port_addresses, None);
    let zeros =
        settled("clientConnection: {qps: 0, burst: 0, contentType: \"\"}\nconntrack: {maxPerCore: null}\n");
    assert_eq!((zeros.client_connection.qps, zeros.client_connection.burst), (5.0, 10));
    assert_eq!(zeros.conntrack.max_per_core, Some(32768));
    assert_eq!(settled("conntrack: {maxPerCore: 0}\n").conntrack.max_per_core, Some(0));
}

#[test]
fn json_and_null_are_read() {
    let text = r#"{"apiVersion":"kubeproxy.config.k8s.io/v1alpha1","kind":"KubeProxyConfiguration",
        "mode":null,"nftables":null,"bindAddress":null,"clientConnection":{"qps":2},"nodePortAddresses":["all"]}"#;
    let config = decode(text).expect("JSON is YAML").config;
    assert_eq!(config.client_connection.qps, 2.0);
    assert_eq!(config.nftables.masquerade_bit, Some(14));
}

#[test]
fn unknown_and_doubled_fields_are_noticed_with_their_line() {
    let decoded = decode(&format!(
        "{HEAD}mod: iptables\niptables:\n  masqueradBit: 3\n  masqueradeBit: 4\nclusterCIDR: 10.0.0.0/8\n\
         clusterCIDR: 10.1.0.0/16\nfeatureGates:\n  KubeProxyIPVS: true\n"
    ))
    .expect("these are no errors");
    let notices: Vec<_> =
        decoded.notices.iter().map(|notice| (notice.line, notice.field.as_str(), notice.reason)).collect();
    assert_eq!(
        notices,
        [
            (3, "mod", Reason::Unknown),
            (5, "iptables.masqueradBit", Reason::Unknown),
            (8, "clusterCIDR", Reason::Duplicate)
        ]
    );
    assert_eq!(decoded.config.cluster_cidr, "10.1.0.0/16", "the last one counts");
    assert_eq!(decoded.config.iptables.masquerade_bit, Some(4));
    assert_eq!(decoded.notices[0].to_string(), "line 3: unknown field \"mod\", ignored");
}

#[test]
fn what_is_no_configuration_is_refused() {
    for (text, says) in [
        ("", "empty"),
        ("# nothing\n", "empty"),
        ("[1]", "not an object"),
        ("kind: KubeProxyConfiguration\n", "apiVersion is missing"),
        ("apiVersion: kubeproxy.config.k8s.io/v1alpha1\n", "kind is missing"),
        ("apiVersion: kubeproxy.config.k8s.io/v1alpha2\nkind: KubeProxyConfiguration\n", "v1alpha2"),
        (
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeletConfiguration\n",
            "KubeletConfiguration",
        ),
        ("apiVersion: [\n", "line"),
        ("a: b: c\n", "line 1"),
    ] {
        let error = decode(text).expect_err(text);
        assert!(error.contains(says) && !error.contains('\n'), "{text:?} -> {error}");
    }
}

#[test]
fn a_value_of_the_wrong_type_is_named_with_its_line() {
    for (body, says) in [
        ("nftables:\n  syncPeriod: 5\n", "line 4: nftables.syncPeriod: "),
        ("nftables:\n  syncPeriod: 5x\n", "line 4: nftables.syncPeriod: time: unknown unit"),
        ("iptables: {masqueradeBit: \"5\"}\n", "line 3: iptables.masqueradeBit: "),
        ("oomScoreAdj: 99999999999\n", "line 3: oomScoreAdj: "),
        ("clusterCIDR: 5\n", "line 3: clusterCIDR: "),
        ("bindAddressHardFail: \"yes\"\n", "line 3: bindAddressHardFail: "),
        ("nodePortAddresses: primary\n", "line 3: nodePortAddresses: "),
        ("mode: nftables\nnftables: on\n", "line 4: nftables: "),
        ("featureGates: {A: 1}\n", "featureGates.A: "),
    ] {
        let error = decode(&format!("{HEAD}{body}")).expect_err(body);
        assert!(error.contains(says), "{body:?} -> {error}");
    }
    let nanos = read("logging: {flushFrequency: 7000000000}\n");
    assert_eq!(nanos.logging.flush_frequency, GoDuration::from_secs(7));
}

#[test]
fn good_values_are_parsed() {
    let plain = checked("");
    assert_eq!((plain.mode, plain.masquerade_bit, plain.bind_address), (Mode::Nftables, 14, None));
    assert_eq!(plain.healthz.expect("on").to_string(), "0.0.0.0:10256");
    assert_eq!(&*plain.node_port_addresses, [NodePortAddress::Primary]);

    let dual = checked("clusterCIDR: 010.244.0.0/16,fd00:1::/48\nbindAddress: 10.0.0.7\n");
    let model::DetectLocal::ClusterCidr(cidrs) = dual.detect_local else {
        panic!("cluster CIDR is the default")
    };
    assert_eq!(cidrs[Family::V4].expect("v4").to_string(), "10.244.0.0/16");
    assert_eq!(cidrs[Family::V6].expect("v6").to_string(), "fd00:1::/48");
    assert_eq!(dual.bind_address.expect("specific").to_string(), "10.0.0.7");

    let ports = checked("nodePortAddresses: [localhost, 10.0.0.0/8, 10.0.0.0/8, all, primary]\n");
    assert_eq!(ports.node_port_addresses.len(), 5, "a CIDR may be there twice");
    assert_eq!(checked("mode: ipvs\n").mode, Mode::Ipvs);
    assert_eq!(checked("mode: userspace\n").mode, Mode::Userspace);
    // Checked only where they are in use.
    checked("ipvs: {tcpTimeout: -1s, excludeCIDRs: [x]}\n");
    checked("mode: iptables\nnftables: {masqueradeBit: 99, syncPeriod: -1s}\n");
    checked("detectLocalMode: NodeCIDR\nclusterCIDR: nonsense\n");
    checked("showHiddenMetricsForVersion: \"1.36\"\n");
    checked("clientConnection: {qps: -1}\n");
    checked("featureGates: {LoggingAlphaOptions: true}\nlogging: {options: {text: {splitStream: true}}}\n");
}

#[test]
fn bad_values_are_named_by_field() {
    let table: &[(&str, &[&str])] = &[
        ("bindAddress: host\n", &["bindAddress"]),
        ("healthzBindAddress: 1.2.3.4:0\n", &["healthzBindAddress"]),
        ("healthzBindAddress: 1.2.3.4:65536\n", &["healthzBindAddress"]),
        ("metricsBindAddress: localhost:10249\n", &["metricsBindAddress"]),
        ("mode: IPTables\n", &["mode"]),
        ("mode: kernelspace\n", &["mode"]),
        ("mode: ipvs\nfeatureGates: {KubeProxyIPVS: false}\n", &["mode"]),
        ("featureGates: {Nonsense: true}\n", &["featureGates"]),
        ("featureGates: {NFTablesProxyMode: false}\n", &["featureGates"]),
        ("clientConnection: {burst: -1}\n", &["clientConnection.burst"]),
        ("logging: {flushFrequency: -1s}\n", &["logging.flushFrequency"]),
        ("logging: {format: xml}\n", &["logging.format"]),
        ("logging: {format: json, vmodule: [{filePattern: a}]}\n", &["logging.vmodule"]),
        (
            "logging: {vmodule: [{filePattern: \"\"}, {filePattern: \"a=b\"}]}\n",
            &["logging.vmodule", "logging.vmodule"],
        ),
        ("logging: {options: {text: {splitStream: true}}}\n", &["logging.options.text"]),
        ("logging: {options: {json: {infoBufferSize: 64Ki}}}\n", &["logging.options.json"]),
        ("showHiddenMetricsForVersion: \"1.30\"\n", &["showHiddenMetricsForVersion"]),
        ("iptables: {masqueradeBit: 32}\n", &["iptables.masqueradeBit"]),
        ("nftables: {masqueradeBit: -1}\n", &["nftables.masqueradeBit"]),
        ("nftables: {syncPeriod: -1s}\n", &["nftables.syncPeriod", "nftables.minSyncPeriod"]),
        ("nftables: {minSyncPeriod: -1s}\n", &["nftables.minSyncPeriod"]),
        ("nftables: {minSyncPeriod: 31s}\n", &["nftables.minSyncPeriod"]),
        ("mode: iptables\niptables: {minSyncPeriod: 31s}\n", &["iptables.minSyncPeriod"]),
        (
            "mode: ipvs\nipvs: {tcpTimeout: -1s, tcpFinTimeout: -1s, udpTimeout: -1s}\n",
            &["ipvs.tcpTimeout", "ipvs.tcpFinTimeout", "ipvs.udpTimeout"],
        ),
        ("mode: ipvs\nipvs: {excludeCIDRs: [10.0.0.1]}\n", &["ipvs.excludeCIDRs"]),
        ("mode: ipvs\nipvs: {scheduler: fastest}\n", &["ipvs.scheduler"]),
        ("detectLocalMode: clustercidr\n", &["detectLocalMode"]),
        ("detectLocalMode: BridgeInterface\n", &["detectLocal.bridgeInterface"]),
        ("detectLocalMode: InterfaceNamePrefix\n", &["detectLocal.interfaceNamePrefix"]),
        ("clusterCIDR: 10.0.0.1\n", &["clusterCIDR"]),
        ("clusterCIDR: 10.0.0.0/8,10.1.0.0/16\n", &["clusterCIDR"]),
        ("clusterCIDR: \"10.0.0.0/8, fd00::/8\"\n", &["clusterCIDR"]),
        ("clusterCIDR: 10.0.0.0/8,fd00::/8,fd01::/8\n", &["clusterCIDR"]),
        ("nodePortAddresses: [10.0.0.1]\n", &["nodePortAddresses"]),
        ("nodePortAddresses: [all, all]\n", &["nodePortAddresses"]),
        ("oomScoreAdj: 1001\n", &["oomScoreAdj"]),
        ("conntrack: {maxPerCore: -1, min: -1}\n", &["conntrack.maxPerCore", "conntrack.min"]),
        (
            "conntrack: {tcpEstablishedTimeout: -1s, udpTimeout: -1s}\n",
            &["conntrack.tcpEstablishedTimeout", "conntrack.udpTimeout"],
        ),
        (
            "conntrack: {tcpCloseWaitTimeout: -1s, udpStreamTimeout: -1s}\n",
            &["conntrack.tcpCloseWaitTimeout", "conntrack.udpStreamTimeout"],
        ),
        ("configSyncPeriod: -1s\n", &["configSyncPeriod"]),
    ];
    for (body, fields) in table {
        assert_eq!(wrong(body), *fields, "{body}");
    }
    let said = check(&settled("oomScoreAdj: 1001\n")).expect_err("out of range")[0].to_string();
    assert_eq!(said, "oomScoreAdj: invalid value \"1001\": must be from -1000 to 1000");
}
