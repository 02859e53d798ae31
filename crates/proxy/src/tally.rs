// SPDX-License-Identifier: Apache-2.0

//! Service ports that starve: a Local traffic policy, endpoints somewhere, but none on this node, so traffic is
//! dropped. Kept with each change, because looking at the whole plan each time would cost too much.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use model::{Changes, Decision, Family, Frontend, Plan, Role, ServicePortName, Verdict};

use crate::metrics::{Metrics, ip_family};

/// See the module.
#[derive(Debug, Default)]
pub struct Tally {
    starved: BTreeMap<Frontend, (Policy, Arc<ServicePortName>)>,
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
        self.starved.clear();
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
        // Nothing else makes the plan drop: without any endpoint at all it rejects.
        match decision.filter(|decision| decision.outside == Verdict::Drop) {
            Some(Decision { service, role, .. }) => {
                let policy = if *role == Role::ClusterIp { Policy::Internal } else { Policy::External };
                self.starved.insert(frontend, (policy, Arc::clone(service)));
            }
            None => drop(self.starved.remove(&frontend)),
        }
    }

    /// A service port counts once for each family and policy, however many frontends it has.
    pub fn publish(&self, metrics: &Metrics, families: impl Iterator<Item = Family>) {
        for family in families {
            for policy in Policy::BOTH {
                let starved = self.starved.iter();
                let ports: BTreeSet<_> = starved
                    .filter(|(frontend, entry)| frontend.family() == family && entry.0 == policy)
                    .map(|(_, entry)| &entry.1)
                    .collect();
                metrics.no_local_endpoints.with(&[ip_family(family), policy.label()]).set(ports.len() as f64);
            }
        }
    }
}
