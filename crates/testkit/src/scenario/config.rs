// SPDX-License-Identifier: Apache-2.0

//! The `config` section: what the operator of node-a decided, and what its Node object says.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;
use lab::address::{self, Version};
use model::{DetectLocal, Family, Node, NodePortAddress, PerFamily, Settings};

use super::lines;
use crate::txtar::Section;

/// See the module. The default is what most scenarios run with.
#[derive(Clone, Debug)]
pub struct Config {
    pub settings: Settings,
    pub node: Node,
    /// Known service CIDRs; none by default.
    pub service_cidrs: Vec<IpNet>,
}

impl Default for Config {
    /// Pods are told by the node's pod range, node ports are served on all addresses, the node has no zone.
    fn default() -> Config {
        let name: Arc<str> = "node-a".into();
        Config {
            settings: Settings {
                node_name: name.clone(),
                families: PerFamily { v4: true, v6: true },
                node_ip_override: PerFamily::default(),
                detect_local: DetectLocal::NodeCidr,
                node_port_addresses: Box::default(),
                masquerade_all: false,
                external_ips: true,
            },
            node: Node {
                name,
                addresses: PerFamily {
                    v4: Some(Version::V4.address(address::NODE_A)),
                    v6: Some(Version::V6.address(address::NODE_A)),
                },
                pod_cidrs: PerFamily {
                    v4: Some(range(address::PODS_A, Version::V4)),
                    v6: Some(range(address::PODS_A, Version::V6)),
                },
                zone: None,
                eligible: true,
            },
            service_cidrs: Vec::new(),
        }
    }
}

impl Config {
    pub(super) fn parse(section: &Section) -> Result<Config, (usize, String)> {
        let mut config = Config::default();
        for (number, line) in lines(section) {
            line.split_once(": ")
                .ok_or_else(|| "a setting is KEY: VALUE".to_owned())
                .and_then(|(key, value)| config.set(key, value.trim()))
                .map_err(|reason| (number, reason))?;
        }
        Ok(config)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "detectLocal" => self.settings.detect_local = detect_local(value)?,
            "nodePortAddresses" => {
                self.settings.node_port_addresses = list(value, node_port_address)?.into_boxed_slice();
            }
            "masqueradeAll" => self.settings.masquerade_all = boolean(value)?,
            "externalIPs" => self.settings.external_ips = boolean(value)?,
            "bindAddress" => {
                let address: IpAddr = value.parse().map_err(|_| format!("not an address: {value}"))?;
                self.settings.node_ip_override[Family::of(address)] = Some(address);
            }
            "nodeZone" => self.node.zone = Some(value.into()),
            "nodePodCIDRs" if value == "none" => self.node.pod_cidrs = PerFamily::default(),
            "serviceCIDR" => self.service_cidrs = list(value, cidr)?,
            _ => return Err(format!("no such setting as {key}")),
        }
        Ok(())
    }
}

/// A range of the lab's address plan in the model's words.
pub(crate) fn range(range: address::Range, version: Version) -> IpNet {
    IpNet::new(version.address(range.base), version.prefix(range.bits)).expect("the plan's ranges are ranges")
}

fn detect_local(value: &str) -> Result<DetectLocal, String> {
    let (mode, argument) = value.split_once(' ').unwrap_or((value, ""));
    match (mode, argument) {
        ("ClusterCIDR", ranges) => {
            let mut by_family = PerFamily::default();
            for range in list(ranges, cidr)? {
                by_family[Family::of(range.addr())] = Some(range);
            }
            Ok(DetectLocal::ClusterCidr(by_family))
        }
        ("NodeCIDR", "") => Ok(DetectLocal::NodeCidr),
        ("BridgeInterface", name) if !name.is_empty() => Ok(DetectLocal::Bridge(name.into())),
        ("InterfaceNamePrefix", prefix) if !prefix.is_empty() => {
            Ok(DetectLocal::InterfacePrefix(prefix.into()))
        }
        // As kube-proxy is without a detector: the mode is ClusterCIDR, and no CIDR is given.
        ("none", "") => Ok(DetectLocal::ClusterCidr(PerFamily::default())),
        _ => Err(format!("no such way to detect local traffic: {value}")),
    }
}

fn node_port_address(value: &str) -> Result<NodePortAddress, String> {
    Ok(match value {
        "primary" => NodePortAddress::Primary,
        "localhost" => NodePortAddress::Localhost,
        "all" => NodePortAddress::All,
        _ => NodePortAddress::Cidr(cidr(value)?),
    })
}

fn cidr(value: &str) -> Result<IpNet, String> {
    value.parse().map_err(|_| format!("not a range: {value}"))
}

fn boolean(value: &str) -> Result<bool, String> {
    value.parse().map_err(|_| format!("neither true nor false: {value}"))
}

fn list<T>(value: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
    value.split(',').map(|item| parse(item.trim())).collect()
}
