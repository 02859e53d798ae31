// SPDX-License-Identifier: Apache-2.0

//! The objects of the tests, in the addresses of the lab.

use std::net::{IpAddr, Ipv4Addr};

use lab::address::{NODE_A, Version, address_of};
use serde_json::{Value, json};

/// What the API server gives services addresses from: the lab's own ranges.
pub const SERVICE_RANGES: &str = "10.96.0.0/16,fd00::a60:0/112";
/// The lab's pods.
pub const CLUSTER_RANGES: &str = "10.244.0.0/16,fd00::af4:0/112";
/// Where every pod answers, TCP and UDP, in both families.
pub const POD_PORT: u16 = 8080;

/// A cluster IP by its last two bytes, in both families.
pub fn cluster_ip(version: Version, host: u16) -> IpAddr {
    let [high, low] = host.to_be_bytes();
    version.address(Ipv4Addr::new(10, 96, high, low))
}

/// The node the daemon runs on.
pub fn node() -> Value {
    let addresses: Vec<Value> =
        Version::BOTH.map(|version| json!({"type": "InternalIP", "address": version.address(NODE_A)})).into();
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": "node-a", "labels": {"topology.kubernetes.io/zone": "here"}},
        "status": {"addresses": addresses},
    })
}

/// A Service with a TCP and a UDP port 80, in both families, at `host` of the range.
pub fn service(name: &str, host: u16) -> Value {
    let addresses = Version::BOTH.map(|version| cluster_ip(version, host));
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"namespace": "default", "name": name},
        "spec": {
            "type": "ClusterIP", "clusterIP": addresses[0], "clusterIPs": addresses,
            "ipFamilies": ["IPv4", "IPv6"], "ipFamilyPolicy": "RequireDualStack",
            "ports": [
                {"name": "tcp", "protocol": "TCP", "port": 80, "targetPort": POD_PORT},
                {"name": "udp", "protocol": "UDP", "port": 80, "targetPort": POD_PORT},
            ],
        },
    })
}

/// The same with a node port for each of the two.
pub fn exposed(name: &str, host: u16, node_port: u16) -> Value {
    let mut service = service(name, host);
    service["spec"]["type"] = json!("NodePort");
    for port in service["spec"]["ports"].as_array_mut().into_iter().flatten() {
        port["nodePort"] = json!(node_port);
    }
    service
}

/// The EndpointSlices of a service, one for each family: these pods, all of them ready.
pub fn slices(service: &str, pods: &[&str]) -> Vec<Value> {
    Version::BOTH.iter().map(|version| slice(service, pods, *version)).collect()
}

fn slice(service: &str, pods: &[&str], version: Version) -> Value {
    let (suffix, kind) = match version {
        Version::V4 => ("v4", "IPv4"),
        Version::V6 => ("v6", "IPv6"),
    };
    let endpoint = |pod: &&str| {
        let address = version.address(address_of(pod).expect("a pod of the lab"));
        json!({"addresses": [address], "nodeName": format!("node-{}", &pod[..1]), "conditions": {"ready": true}})
    };
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": kind,
        "metadata": {
            "namespace": "default", "name": format!("{service}-{suffix}"),
            "labels": {"kubernetes.io/service-name": service},
        },
        "endpoints": pods.iter().map(endpoint).collect::<Vec<_>>(),
        "ports": [
            {"name": "tcp", "protocol": "TCP", "port": POD_PORT},
            {"name": "udp", "protocol": "UDP", "port": POD_PORT},
        ],
    })
}

/// Several objects as kubectl reads them.
pub fn list(objects: &[Value]) -> String {
    json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string()
}
