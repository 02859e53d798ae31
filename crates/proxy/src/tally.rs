// SPDX-License-Identifier: Apache-2.0

//! Service ports that starve: a Local traffic policy, endpoints somewhere, but none on this node, so traffic is
//! dropped. Kept with each change, because looking at the whole plan each time would cost too much.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::Arc,
};

use model::{Changes, Decision, Family, Frontend, PerFamily, Plan, Role, ServicePortName, Verdict};

use crate::metrics::{Metrics, ip_family};

/// See the module.
#[derive(Debug, Default)]
pub struct Tally {
    starved: BTreeMap<Frontend, (Policy, Arc<ServicePortName>)>,
    /// How many frontends each of them has: a service port counts once for each family and policy.
    ports: PerFamily<[BTreeMap<Arc<ServicePortName>, u32>; Policy::BOTH.len()]>,
    /// What the gauges were last set to.
    published: PerFamily<[Option<usize>; Policy::BOTH.len()]>,
}

/// The policy that wants endpoints here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Policy {
    Internal,
    External,
}

impl Policy {
    const BOTH: [Policy; 2] = [Policy::Internal, Policy::External];

    fn label(self) -> &'static str {
        match self {
            Policy::Internal => "internal",
            Policy::External => "external",
        }
    }
}

impl Tally {
    /// Looks at everything.
    pub fn rebuild(&mut self, plan: &Plan) {
        *self = Tally { published: self.published, ..Tally::default() };
        for (frontend, decision) in plan.frontends() {
            self.put(*frontend, Some(decision));
        }
    }

    /// Looks at what changed.
    pub fn update(&mut self, plan: &Plan, changes: &Changes) {
        for frontend in &changes.frontends {
            self.put(*frontend, plan.decision(frontend));
        }
    }

    fn put(&mut self, frontend: Frontend, decision: Option<&Decision>) {
        if let Some((policy, port)) = self.starved.remove(&frontend)
            && let Entry::Occupied(mut count) = self.ports[frontend.family()][policy as usize].entry(port)
        {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        // Nothing else makes the plan drop: without any endpoint at all it rejects.
        if let Some(Decision { service, role, outside: Verdict::Drop, .. }) = decision {
            let policy = if *role == Role::ClusterIp { Policy::Internal } else { Policy::External };
            *self.ports[frontend.family()][policy as usize].entry(Arc::clone(service)).or_default() += 1;
            self.starved.insert(frontend, (policy, Arc::clone(service)));
        }
    }

    /// Sets the gauges that are not right any more.
    pub fn publish(&mut self, metrics: &Metrics, families: impl Iterator<Item = Family>) {
        for family in families {
            for policy in Policy::BOTH {
                let count = self.ports[family][policy as usize].len();
                if self.published[family][policy as usize].replace(count) != Some(count) {
                    let labels = [ip_family(family), policy.label()];
                    metrics.no_local_endpoints.with(&labels).set(count as f64);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use model::{Address, PlanBuilder, Protocol, ServiceKey};

    use super::*;

    fn frontend(port: u16) -> Frontend {
        Frontend { address: Address::Ip([192, 0, 2, 1].into()), protocol: Protocol::Tcp, port }
    }

    fn plan(frontends: &[(u16, &str, Role, Verdict)]) -> Plan {
        frontends
            .iter()
            .fold(PlanBuilder::new(), |plan, (port, name, role, verdict)| {
                let service = ServiceKey { namespace: "default".into(), name: (*name).into() };
                let service = ServicePortName { service, port: "".into(), protocol: Protocol::Tcp };
                let decision = Decision {
                    service: Arc::new(service),
                    role: *role,
                    inside: verdict.clone(),
                    outside: verdict.clone(),
                    affinity: None,
                    tuning: None,
                    source_ranges: None,
                    reach: model::Reach::Cluster,
                    rank: 0,
                };
                plan.frontend(frontend(*port), decision)
            })
            .build()
    }

    #[test]
    fn a_port_counts_once_until_its_last_frontend_goes() {
        let metrics = Metrics::new(SystemTime::now());
        let mut tally = Tally::default();
        let counts = |tally: &mut Tally| {
            tally.publish(&metrics, [Family::V4].into_iter());
            Policy::BOTH.map(|policy| metrics.no_local_endpoints.with(&["IPv4", policy.label()]).value())
        };
        let drop = Verdict::Drop;
        tally.rebuild(&plan(&[
            (1, "a", Role::LoadBalancer, drop.clone()),
            (2, "a", Role::NodePort, drop.clone()),
            (3, "b", Role::ClusterIp, drop.clone()),
            (4, "c", Role::ClusterIp, Verdict::Reject),
        ]));
        assert_eq!(counts(&mut tally), [1.0, 1.0]);
        let now = plan(&[(2, "a", Role::NodePort, drop.clone()), (4, "c", Role::ClusterIp, drop)]);
        let changes = Changes { frontends: [1, 3, 4].map(frontend).into(), ..Changes::default() };
        tally.update(&now, &changes);
        assert_eq!(counts(&mut tally), [1.0, 1.0], "a has one frontend left, c replaced b");
        let changes = Changes { frontends: [2].map(frontend).into(), ..Changes::default() };
        tally.update(&plan(&[]), &changes);
        assert_eq!(counts(&mut tally), [1.0, 0.0]);
    }
}
