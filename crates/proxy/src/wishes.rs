// SPDX-License-Identifier: Apache-2.0

//! Services that ask for more than this mode can do: a scheduler it does not have, weights it ignores.
//!
//! Each is told once in the log and by an Event, and again when what is not done becomes something else. Kept with each
//! change, and only for those services, since most ask for nothing.

use std::collections::{BTreeMap, HashMap};

use dataplane::{Abilities, wishes::Shortfall};
use model::{Changes, Decision, Frontend, Plan, ServiceKey};

/// See the module.
#[derive(Debug, Default)]
pub struct Unmet {
    services: BTreeMap<ServiceKey, Lack>,
    owners: HashMap<Frontend, ServiceKey>,
}

/// What is not done for one service.
#[derive(Debug, Default)]
struct Lack {
    frontends: BTreeMap<Frontend, Shortfall>,
    /// What people know.
    told: Option<Shortfall>,
}

impl Unmet {
    /// Looks at everything, and returns what is to be told of which service. What was told is not told again.
    pub fn rebuild(&mut self, abilities: &Abilities, plan: &Plan) -> Vec<(ServiceKey, Shortfall)> {
        self.owners.clear();
        self.services.values_mut().for_each(|lack| lack.frontends.clear());
        for (frontend, decision) in plan.frontends() {
            self.put(abilities, *frontend, Some(decision));
        }
        let all: Vec<ServiceKey> = self.services.keys().cloned().collect();
        self.settle(all)
    }

    /// Looks at what changed, and returns what is to be told.
    pub fn update(
        &mut self,
        abilities: &Abilities,
        plan: &Plan,
        changes: &Changes,
    ) -> Vec<(ServiceKey, Shortfall)> {
        let mut touched = Vec::new();
        for frontend in &changes.frontends {
            let [before, after] = self.put(abilities, *frontend, plan.decision(frontend));
            touched.extend(before.into_iter().chain(after));
        }
        self.settle(touched)
    }

    /// Takes note of what a frontend is now. Returns the services, of those that lack something, that it was and is of.
    fn put(
        &mut self,
        abilities: &Abilities,
        frontend: Frontend,
        decision: Option<&Decision>,
    ) -> [Option<ServiceKey>; 2] {
        let before = self.owners.remove(&frontend);
        if let Some(lack) = before.as_ref().and_then(|key| self.services.get_mut(key)) {
            lack.frontends.remove(&frontend);
        }
        let lacking = decision.and_then(|decision| Some((decision, abilities.shortfall(decision)?)));
        let after = lacking.map(|(decision, shortfall)| {
            let key = decision.service.service.clone();
            self.services.entry(key.clone()).or_default().frontends.insert(frontend, shortfall);
            self.owners.insert(frontend, key.clone());
            key
        });
        [before, after]
    }

    fn settle(&mut self, mut touched: Vec<ServiceKey>) -> Vec<(ServiceKey, Shortfall)> {
        touched.sort();
        touched.dedup();
        let mut news = Vec::new();
        for key in touched {
            let Some(lack) = self.services.get_mut(&key) else { continue };
            // Where frontends of a service lack different things, the longest sentence has them all.
            match lack.frontends.values().max_by_key(|shortfall| shortfall.sentence.len()) {
                None => drop(self.services.remove(&key)),
                Some(shortfall) if lack.told.as_ref() == Some(shortfall) => {}
                Some(shortfall) => {
                    lack.told = Some(shortfall.clone());
                    news.push((key, shortfall.clone()));
                }
            }
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use model::{
        Address, Algorithm, PlanBuilder, Protocol, Reach, Role, Scheduler, ServicePortName, Tuning, Verdict,
    };

    use super::*;

    fn frontend(port: u16) -> Frontend {
        Frontend { address: Address::Ip([192, 0, 2, 1].into()), protocol: Protocol::Tcp, port }
    }

    fn plan(frontends: &[(u16, &str, Scheduler)]) -> Plan {
        let add = |plan: PlanBuilder, (port, name, scheduler): &(u16, &str, Scheduler)| {
            let service = ServiceKey { namespace: "n".into(), name: (*name).into() };
            let decision = Decision {
                service: Arc::new(ServicePortName { service, port: "".into(), protocol: Protocol::Tcp }),
                role: Role::ClusterIp,
                inside: Verdict::Reject,
                outside: Verdict::Reject,
                affinity: None,
                tuning: Some(Arc::new(Tuning { algorithm: Algorithm::of(*scheduler), ..Tuning::default() })),
                source_ranges: None,
                reach: Reach::Cluster,
                rank: 2,
            };
            plan.frontend(frontend(*port), decision)
        };
        frontends.iter().fold(PlanBuilder::new(), add).build()
    }

    #[test]
    fn each_service_is_told_once_and_again_when_it_lacks_something_else() {
        use Scheduler::{LeastConnections, Overflow, RoundRobin};
        let abilities = Abilities {
            schedulers: vec![RoundRobin],
            weights: true,
            instead: "chance decides",
            ..Abilities::default()
        };
        let mut unmet = Unmet::default();
        let told = |news: Vec<(ServiceKey, Shortfall)>| -> Vec<String> {
            news.iter().map(|(key, shortfall)| format!("{key}: {}", shortfall.sentence)).collect()
        };
        let lc = "the scheduler lc is not to be had; chance decides";
        let first = plan(&[(1, "a", LeastConnections), (2, "a", LeastConnections), (3, "b", RoundRobin)]);
        assert_eq!(told(unmet.rebuild(&abilities, &first)), [format!("n/a: {lc}")]);
        assert_eq!(told(unmet.rebuild(&abilities, &first)), [""; 0], "known");

        let changed = Changes { frontends: [1, 2, 3].map(frontend).into(), ..Changes::default() };
        assert_eq!(told(unmet.update(&abilities, &first, &changed)), [""; 0], "nothing new");
        let ovf = "the scheduler ovf is not to be had; chance decides";
        let other = plan(&[(1, "a", Overflow), (2, "a", Overflow), (3, "b", LeastConnections)]);
        let news = told(unmet.update(&abilities, &other, &changed));
        assert_eq!(news, [format!("n/a: {ovf}"), format!("n/b: {lc}")]);
        assert_eq!(told(unmet.update(&abilities, &plan(&[]), &changed)), [""; 0]);
        assert!(unmet.services.is_empty() && unmet.owners.is_empty(), "nothing is kept of what is gone");
        assert_eq!(told(unmet.rebuild(&abilities, &first)).len(), 1, "it asks again");
    }
}
