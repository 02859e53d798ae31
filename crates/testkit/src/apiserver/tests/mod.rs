// SPDX-License-Identifier: Apache-2.0

mod client;
mod misbehaviour;
mod protocol;

use serde_json::{Value, json};

fn slice(name: &str, address: &str) -> Value {
    json!({
        "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"name": name, "namespace": "shop", "labels": {"kubernetes.io/service-name": "cart"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "conditions": {"ready": true}}],
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
    })
}

fn service(name: &str, cluster_ip: &str) -> Value {
    json!({
        "kind": "Service", "apiVersion": "v1",
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {"clusterIP": cluster_ip, "type": "ClusterIP", "ports": [{"port": 80}]},
    })
}

const SLICES: &str = "/apis/discovery.k8s.io/v1/endpointslices";
const SERVICES: &str = "/api/v1/services";

/// Type and name of an event; a bookmark has no name.
fn brief(event: &Value) -> (String, String) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    (text(&event["type"]), text(&event["object"]["metadata"]["name"]))
}

fn pair(kind: &str, name: &str) -> (String, String) {
    (kind.to_owned(), name.to_owned())
}
