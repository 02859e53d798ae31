// SPDX-License-Identifier: Apache-2.0

//! Tests of the whole; see README.md. What they share.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

/// The repository.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().map_or_else(|| here.to_owned(), Path::to_owned)
}

/// Where the scenarios are.
pub fn scenarios() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios")
}

/// Is this scenario asked for? `SCENARIO` is a part of its name, or several with commas between; without it all are.
pub fn is_asked_for(name: &str) -> bool {
    std::env::var("SCENARIO").map_or(true, |parts| parts.split(',').any(|part| name.contains(part)))
}

/// A scenario of which every packet line is false, for judges that must be able to say no.
pub const LIES: &str = r#"
Nothing that is said of packets here is true.
-- apply web.yaml --
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.10
  loadBalancerSourceRanges: [203.0.113.1/32]
  ports:
  - {name: http, port: 80, nodePort: 30080}
  - {name: dns, port: 53, protocol: UDP}
  - {name: empty, port: 81}
status: {loadBalancer: {ingress: [{ip: 198.51.100.1}]}}
---
apiVersion: v1
kind: Service
metadata: {name: sticky, namespace: default}
spec:
  clusterIP: 10.96.0.11
  sessionAffinity: ClientIP
  ports: [{name: http, port: 80}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}, {name: dns, port: 5353, protocol: UDP}]
endpoints:
- {addresses: [10.244.1.1], nodeName: node-a}  # a1
- {addresses: [10.244.4.1], nodeName: node-c}  # c1
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: sticky-1, namespace: default, labels: {kubernetes.io/service-name: sticky}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints:
- {addresses: [10.244.1.1], nodeName: node-a}  # a1
- {addresses: [10.244.4.1], nodeName: node-c}  # c1
-- packets --
a3      tcp  10.96.0.10:80      -> a1,c1 masq         # not masqueraded
client  tcp  10.96.0.10:80      -> a1,c1 nomasq       # masqueraded
a3      tcp  10.96.0.10:80      -> a1 nomasq          # one too few
a3      tcp  10.96.0.10:80      -> a1,b1,c1 nomasq    # one too many
a3      tcp  10.96.0.10:80      -> a1:8081,c1 nomasq  # another port
a3      udp  10.96.0.10:53      -> a2 nomasq          # another endpoint
a3      tcp  10.96.0.10:80      -> a1,c1 nomasq sticky
a3      tcp  10.96.0.10:80      -> a1=3,c1 nomasq      # equal shares
a3      tcp  10.96.0.10:80      -> a1=2,c1 nomasq turns  # in ipvs mode they do, but with equal shares
a3      tcp  10.96.0.10:80      -> a1,c1 nomasq hashed
a3      tcp  10.96.0.10:80      -> reject
a3      tcp  10.96.0.10:80      -> drop
a3      tcp  10.96.0.10:80      -> pass
a3      udp  10.96.0.10:53      -> reject
a3      tcp  10.96.0.10:81      -> a1,c1 nomasq
a3      tcp  10.96.0.10:81      -> drop
a3      tcp  10.96.0.10:81      -> pass
client2 tcp  198.51.100.1:80    -> reject
client2 tcp  198.51.100.1:80    -> pass
client2 tcp  198.51.100.1:80    -> a1,c1 masq
client  tcp  10.96.0.99:80      -> reject
client  tcp  10.96.0.99:80      -> drop
client  tcp  10.96.0.99:80      -> a1,c1 masq
clients tcp  10.96.0.11:80      -> a1,c1 masq         # each client meets one of them
client  tcp  192.168.0.1:30080  -> a1,c1 nomasq       # masqueraded
"#;

/// Those of [`lies`] that are about the source an endpoint sees.
pub fn lies_about_sources() -> Vec<usize> {
    let lines: Vec<&str> = LIES.lines().collect();
    lies().into_iter().filter(|line| lines[line - 1].ends_with("masqueraded")).collect()
}

/// The lines of [`LIES`] that hold packets.
pub fn lies() -> Vec<usize> {
    let is_packet = |line: &&str| line.contains(" -> ");
    LIES.lines().enumerate().filter(|(_, line)| is_packet(line)).map(|(index, _)| index + 1).collect()
}
