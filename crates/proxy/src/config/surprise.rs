// SPDX-License-Identifier: Apache-2.0

//! What is valid, but does not mean on this host what it seems to mean.

use model::{DetectLocal, Family, PerFamily};

use super::check::Checked;

/// Why these settings cannot work on a host that serves these families, if so.
pub fn impossible(checked: &Checked, families: PerFamily<bool>) -> Option<String> {
    let DetectLocal::ClusterCidr(cidrs) = &checked.detect_local else { return None };
    let served = Family::BOTH.into_iter().find(|family| families[*family])?;
    let single = !(families[Family::V4] && families[Family::V6]);
    let other = if served == Family::V4 { Family::V6 } else { Family::V4 };
    let wrong = single && cidrs[served].is_none() && cidrs[other].is_some();
    wrong.then(|| {
        format!(
            "clusterCIDR has no {served} range, and this host speaks only {served}: add one, or choose another \
             detectLocalMode"
        )
    })
}

/// What will surprise, a sentence for each.
pub fn surprises(checked: &Checked, families: PerFamily<bool>) -> Vec<String> {
    let mut told = Vec::new();
    if let DetectLocal::ClusterCidr(PerFamily { v4: None, v6: None }) = checked.detect_local {
        told.push(
            "without clusterCIDR (or another detectLocalMode) pods cannot be told from others: connections to \
             cluster IPs are never masqueraded"
                .to_owned(),
        );
    }
    let addresses = &checked.node_port_addresses;
    let names = |family: Family| addresses.iter().any(|entry| entry.speaks_of(family));
    for family in Family::BOTH.into_iter().filter(|family| families[*family]) {
        if !addresses.is_empty() && !names(family) {
            told.push(format!(
                "nodePortAddresses names no {family} range: node ports are open on all {family} addresses of this node"
            ));
        }
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{check::check, decode::decode};

    const BOTH: PerFamily<bool> = PerFamily { v4: true, v6: true };
    const V4: PerFamily<bool> = PerFamily { v4: true, v6: false };

    fn checked(body: &str) -> Checked {
        let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
        let mut config = decode(&format!("{head}{body}")).expect(body).config;
        config.settle();
        check(&config).expect(body)
    }

    #[test]
    fn a_range_of_the_family_that_is_not_there_is_impossible() {
        let v6 = checked("clusterCIDR: fd00::/48\n");
        assert!(impossible(&v6, V4).is_some_and(|says| says.contains("no IPv4 range")));
        assert_eq!(impossible(&v6, BOTH), None);
        assert_eq!(impossible(&checked("clusterCIDR: fd00::/48,10.0.0.0/8\n"), V4), None);
        assert_eq!(impossible(&checked(""), V4), None, "none at all is a surprise, no error");
        assert_eq!(impossible(&checked("clusterCIDR: fd00::/48\ndetectLocalMode: NodeCIDR\n"), V4), None);
    }

    #[test]
    fn what_surprises_is_told_for_the_families_that_are_served() {
        let count = |body: &str, families| surprises(&checked(body), families).len();
        let cidr = "clusterCIDR: 10.0.0.0/8\n";
        assert_eq!(count("", BOTH), 1);
        assert_eq!(count(cidr, BOTH), 0);
        assert_eq!(count("detectLocalMode: NodeCIDR\n", BOTH), 0);
        let ports = |list: &str| format!("{cidr}nodePortAddresses: [{list}]\n");
        let told = surprises(&checked(&ports("10.0.0.0/8")), BOTH);
        assert!(told.len() == 1 && told[0].contains("open on all IPv6 addresses"), "{told:?}");
        assert_eq!(count(&ports("10.0.0.0/8"), V4), 0);
        assert_eq!(count(&ports("10.0.0.0/8, primary"), BOTH), 0);
        assert_eq!(count(&ports("10.0.0.0/8, \"fd00::/8\""), BOTH), 0);
    }
}
