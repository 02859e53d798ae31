// SPDX-License-Identifier: Apache-2.0

//! Objects for the server, and what a proxy should know of them.

use std::collections::BTreeMap;

use model::Kind;
use serde_json::{Value, json};
use testkit::apiserver::ApiServer;

pub(crate) const NODE: &str = "node-a";

/// A service with one port.
pub(crate) fn service(name: &str, cluster_ip: &str) -> Value {
    json!({
        "kind": "Service", "apiVersion": "v1",
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {
            "type": "ClusterIP", "clusterIP": cluster_ip, "clusterIPs": [cluster_ip], "ipFamilies": ["IPv4"],
            "selector": {"app": name},
            "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": "web"}],
        },
    })
}

/// A slice of the service of the same name up to the last dash.
pub(crate) fn slice(name: &str, addresses: &[String]) -> Value {
    let service = name.rsplit_once('-').map_or(name, |(service, _)| service);
    let endpoint = |address: &String| {
        json!({
            "addresses": [address], "nodeName": NODE, "zone": "z1",
            "conditions": {"ready": true, "serving": true, "terminating": false},
            "targetRef": {"kind": "Pod", "namespace": "shop", "name": format!("pod-{address}")},
        })
    };
    json!({
        "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"name": name, "namespace": "shop", "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "endpoints": addresses.iter().map(endpoint).collect::<Vec<_>>(),
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
    })
}

pub(crate) fn node(name: &str, zone: &str) -> Value {
    json!({
        "kind": "Node", "apiVersion": "v1",
        "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone}},
        "spec": {"podCIDR": "10.1.0.0/24", "podCIDRs": ["10.1.0.0/24"]},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
    })
}

pub(crate) fn service_cidr(name: &str, cidr: &str) -> Value {
    json!({
        "kind": "ServiceCIDR", "apiVersion": "networking.k8s.io/v1",
        "metadata": {"name": name},
        "spec": {"cidrs": [cidr]},
    })
}

/// `count` addresses that differ with `seed`.
pub(crate) fn addresses(seed: usize, count: usize) -> Vec<String> {
    (0..count).map(|at| format!("10.{}.{}.{}", 1 + seed / 250 % 250, seed % 250, at + 1)).collect()
}

/// A server with so many services of one slice each, this node and a range.
pub(crate) fn server(services: usize) -> ApiServer {
    let server = ApiServer::start();
    for at in 0..services {
        server.put(service(&format!("svc{at:04}"), &cluster_ip(at)));
        server.put(slice(&format!("svc{at:04}-x"), &addresses(at, 2)));
    }
    server.put(node(NODE, "z1"));
    server.put(node("node-b", "z2"));
    server.put(service_cidr("kubernetes", "10.96.0.0/16"));
    server
}

pub(crate) fn cluster_ip(at: usize) -> String {
    format!("10.96.{}.{}", at / 250, at % 250 + 1)
}

/// Every object a proxy on [`NODE`] follows, by kind and name, with what it says.
pub(crate) type View = BTreeMap<String, String>;

/// What there is to be known of the server's objects, read from their JSON and from nothing else.
pub(crate) fn expected(server: &ApiServer) -> View {
    let mut view = View::new();
    for object in Kind::ALL.into_iter().flat_map(|kind| server.objects(kind)) {
        if let Some((key, said)) = reading(&object) {
            view.insert(key, said);
        }
    }
    view
}

fn reading(object: &Value) -> Option<(String, String)> {
    let metadata = &object["metadata"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let has_label = |label: &str| metadata["labels"].get(label).is_some();
    let name = text(&metadata["name"]);
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    Some(match object["kind"].as_str()? {
        "Service" => {
            let ip = text(&object["spec"]["clusterIP"]);
            if ip == "None" || has_label("service.kubernetes.io/service-proxy-name") {
                return None;
            }
            let ports = list(&object["spec"]["ports"]);
            let ports: Vec<_> =
                ports.iter().map(|port| format!("{} {}", text(&port["name"]), port["port"])).collect();
            (format!("Service shop/{name}"), format!("{ip} {}", ports.join(",")))
        }
        "EndpointSlice" => {
            if has_label("service.kubernetes.io/headless") {
                return None;
            }
            let endpoints = list(&object["endpoints"]);
            let said: Vec<_> = endpoints
                .iter()
                .map(|endpoint| {
                    format!("{} {}", text(&endpoint["addresses"][0]), endpoint["conditions"]["ready"])
                })
                .collect();
            (format!("EndpointSlice shop/{name}"), said.join(","))
        }
        "Node" if name == NODE => {
            let zone = text(&metadata["labels"]["topology.kubernetes.io/zone"]);
            (format!("Node {name}"), zone)
        }
        "ServiceCIDR" => {
            let cidrs: Vec<_> = list(&object["spec"]["cidrs"]).iter().map(text).collect();
            (format!("ServiceCIDR {name}"), cidrs.join(","))
        }
        _ => return None,
    })
}
