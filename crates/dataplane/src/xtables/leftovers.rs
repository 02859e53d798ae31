// SPDX-License-Identifier: Apache-2.0

//! Which chains are of Kubernetes proxies.
//!
//! Not those that are the kubelet's: its hint, its canaries, and `KUBE-FIREWALL`, which it shares with the proxies.

use crate::names::xt;

/// A chain of the iptables mode, kube-proxy's or ours, of this time.
pub fn is_current(name: &str) -> bool {
    const FIXED: [&str; 8] = [
        xt::SERVICES,
        xt::NODEPORTS,
        xt::EXTERNAL_SERVICES,
        xt::FORWARD,
        xt::PROXY_FIREWALL,
        xt::POSTROUTING,
        xt::MARK_MASQ,
        xt::PROXY_CANARY,
    ];
    FIXED.contains(&name) || is_per_service(name)
}

/// A chain of one service port, of this time.
pub fn is_per_service(name: &str) -> bool {
    [xt::SVC, xt::SVL, xt::EXT, xt::FW, xt::SEP].iter().any(|prefix| name.starts_with(prefix))
}

/// A chain of an iptables or userspace mode of the past, which has no duty any more.
pub fn is_old(name: &str) -> bool {
    xt::OLD.contains(&name) || name.starts_with(xt::XLB)
}

/// A chain that only kube-proxy's ipvs mode has.
pub fn is_ipvs(name: &str) -> bool {
    xt::IPVS.contains(&name)
}
