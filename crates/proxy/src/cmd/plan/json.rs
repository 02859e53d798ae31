// SPDX-License-Identifier: Apache-2.0

//! A plan as JSON. The names here are an interface: docs/configuration.md lists them.

use ipnet::IpNet;
use model::{
    Address, Backend, Conflict, Decision, Family, Frontend, HealthCheck, NodePortScope, Plan, PodTraffic,
    ServiceKey, Verdict,
};
use serde_json::{Value, json};
use source::Problem;

/// All of it, with what was left out of it.
pub(super) fn plan(plan: &Plan, problems: &[Problem]) -> Value {
    let frontends = plan.frontends().map(|(frontend, decision)| frontend_with(frontend, decision));
    let health = plan.health().iter().map(health_check);
    json!({
        "node": Family::BOTH.map(|family| node(plan, family)),
        "frontends": frontends.collect::<Vec<_>>(),
        "clusterIPs": plan.cluster_ips().collect::<Vec<_>>(),
        "localBackends": plan.local_backends().collect::<Vec<_>>(),
        "healthChecks": health.collect::<Vec<_>>(),
        "conflicts": plan.conflicts().map(conflict).collect::<Vec<_>>(),
        "problems": problems.iter().map(problem).collect::<Vec<_>>(),
    })
}

/// What holds for all services of a family.
fn node(plan: &Plan, family: Family) -> Value {
    let pods = plan.pod_traffic(family).map(|traffic| match traffic {
        PodTraffic::Source(net) => json!({ "source": net.to_string() }),
        PodTraffic::Interface(name) => json!({ "interface": **name }),
        PodTraffic::InterfacePrefix(prefix) => json!({ "interfacePrefix": **prefix }),
    });
    let addresses = match plan.node_ports(family) {
        NodePortScope::All => Value::Null,
        NodePortScope::Only(set) => json!(set),
    };
    json!({
        "family": family.to_string(),
        "podTraffic": pods,
        "nodePortAddresses": addresses,
        "loopbackNodePorts": plan.loopback_node_ports(family),
        "serviceCIDRs": words(plan.service_cidrs(family)),
    })
}

fn frontend_with(frontend: &Frontend, decision: &Decision) -> Value {
    let address = match frontend.address {
        Address::Ip(ip) => Some(ip),
        Address::NodePort(_) => None,
    };
    json!({
        "frontend": frontend.to_string(),
        "family": frontend.family().to_string(),
        "address": address,
        "protocol": frontend.protocol.to_string(),
        "port": frontend.port,
        "role": decision.role.to_string(),
        "service": decision.service.service.to_string(),
        "servicePort": &*decision.service.port,
        "rank": decision.rank,
        "affinitySeconds": decision.affinity.map(|affinity| affinity.timeout_secs),
        "algorithm": decision.algorithm().to_string(),
        "sourceRanges": decision.source_ranges.as_deref().map(words),
        "inside": verdict(&decision.inside),
        "outside": verdict(&decision.outside),
    })
}

fn verdict(verdict: &Verdict) -> Value {
    let backend = |backend: &Backend| {
        let Backend { address, port, local, weight } = backend;
        json!({ "address": address, "port": port, "local": local, "weight": weight })
    };
    match verdict {
        Verdict::Reject => json!({ "verdict": "reject" }),
        Verdict::Drop => json!({ "verdict": "drop" }),
        Verdict::Forward(forward) => json!({
            "verdict": "forward",
            "masquerade": forward.masquerade.to_string(),
            "backends": forward.pool.backends.iter().map(backend).collect::<Vec<_>>(),
        }),
    }
}

fn health_check((service, check): (&ServiceKey, &HealthCheck)) -> Value {
    let families = Family::BOTH.into_iter().filter(|family| check.families[*family]);
    let local = families.map(
        |family| json!({ "family": family.to_string(), "localEndpoints": check.local_endpoints[family] }),
    );
    json!({ "service": service.to_string(), "port": check.port, "families": local.collect::<Vec<_>>() })
}

fn conflict(Conflict { frontend, owner, loser }: Conflict) -> Value {
    json!({ "frontend": frontend.to_string(), "owner": owner.to_string(), "loser": loser.to_string() })
}

fn problem(problem: &Problem) -> Value {
    let (file, line) = problem.place.as_ref().map(|(file, line)| (file, line)).unzip();
    json!({
        "file": file,
        "line": line,
        "object": problem.object,
        "field": problem.field,
        "reason": problem.reason.label(),
        "says": problem.to_string(),
    })
}

fn words(nets: &[IpNet]) -> Vec<String> {
    nets.iter().map(IpNet::to_string).collect()
}
