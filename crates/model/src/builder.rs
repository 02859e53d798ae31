// SPDX-License-Identifier: Apache-2.0

//! A plan made by hand, without a world: for tests of dataplanes and for tools.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{
    claims::Claim,
    decision::{Backend, Decision, Frontend, HealthCheck, NodePortScope, PodTraffic, Role, Verdict},
    family::{Family, Protocol},
    plan::{Address, Plan},
    service::ServiceKey,
    vantage::disjoint,
};

/// Starts from [`Plan::new`]: no frontend, no pod traffic told, node ports on no address. What it builds is not
/// for [`Plan::update`], which would never take back what was put in here.
#[derive(Debug, Default)]
pub struct PlanBuilder {
    plan: Plan,
}

impl PlanBuilder {
    pub fn new() -> PlanBuilder {
        PlanBuilder::default()
    }

    /// Adds a frontend and what follows from it: the cluster IP by its role, local backends by its pools. A
    /// second one for the same place competes with the first, as claims of two services do.
    pub fn frontend(mut self, frontend: Frontend, decision: Decision) -> PlanBuilder {
        if let (Role::ClusterIp, Address::Ip(ip)) = (decision.role, frontend.address) {
            self.plan.cluster_ips.add(ip);
        }
        let mut serving: Vec<Backend> = [&decision.inside, &decision.outside]
            .into_iter()
            .flat_map(|verdict| match verdict {
                Verdict::Forward(forward) => forward.pool.backends.to_vec(),
                Verdict::Reject | Verdict::Drop => Vec::new(),
            })
            .collect();
        serving.sort_unstable();
        serving.dedup();
        for backend in serving.iter().filter(|backend| backend.local) {
            self.plan.local_backends.add(backend.address);
        }
        let serving = (frontend.protocol != Protocol::Tcp).then(|| serving.into());
        self.plan.claims.insert(frontend, Claim { decision, created_secs: 0, serving });
        self
    }

    pub fn cluster_ip(mut self, address: IpAddr) -> PlanBuilder {
        self.plan.cluster_ips.add(address);
        self
    }

    pub fn local_backend(mut self, address: IpAddr) -> PlanBuilder {
        self.plan.local_backends.add(address);
        self
    }

    pub fn pod_traffic(mut self, family: Family, traffic: PodTraffic) -> PlanBuilder {
        self.plan.node_wide[family].pod_traffic = Some(traffic);
        self
    }

    pub fn node_ports(mut self, family: Family, scope: NodePortScope) -> PlanBuilder {
        self.plan.node_wide[family].node_ports = scope;
        self
    }

    /// See [`Plan::loopback_node_ports`].
    pub fn loopback_node_ports(mut self, family: Family) -> PlanBuilder {
        self.plan.node_wide[family].loopback = true;
        self
    }

    pub fn service_cidr(mut self, net: IpNet) -> PlanBuilder {
        let cidrs = &mut self.plan.node_wide[Family::of(net.addr())].service_cidrs;
        cidrs.push(net);
        *cidrs = disjoint(cidrs);
        self
    }

    pub fn health(mut self, service: ServiceKey, health: HealthCheck) -> PlanBuilder {
        self.plan.health.insert(service, health);
        self
    }

    pub fn build(mut self) -> Plan {
        self.plan.claims.settle(|_, _, _| {});
        self.plan.cluster_ips.settle();
        self.plan.local_backends.settle();
        self.plan
    }
}
