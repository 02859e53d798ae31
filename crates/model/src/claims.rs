// SPDX-License-Identifier: Apache-2.0

//! Who owns which frontend.
//!
//! Nothing in the API stops two services from claiming one external IP, and a cluster in transition can show one
//! node port twice. Exactly one claim then decides, and which one must not depend on the order of arrival: the
//! others wait, and the best of them takes over when the owner goes.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, btree_map::Entry},
    sync::Arc,
};

use crate::{
    decision::{Backend, Decision, Frontend, Role},
    plan::Conflict,
    service::{ServiceKey, ServicePortName},
};

/// One service port's wish to decide about a frontend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) decision: Decision,
    /// Creation of the service; 0 is unknown.
    pub(crate) created_secs: i64,
    /// All endpoints whose flows may go on, usable for new ones or not; for protocols without connections only.
    pub(crate) serving: Option<Arc<[Backend]>>,
}

impl Claim {
    /// Less is the better claim. A cluster IP cannot be taken away by an external IP (CVE-2020-8554), nor by a
    /// load balancer's; then age counts, then the name.
    fn precedence(&self, other: &Claim) -> Ordering {
        let role = |claim: &Claim| match claim.decision.role {
            Role::ClusterIp => 0,
            Role::LoadBalancer => 1,
            Role::ExternalIp => 2,
            Role::NodePort => 3,
        };
        let created = |claim: &Claim| if claim.created_secs == 0 { i64::MAX } else { claim.created_secs };
        role(self)
            .cmp(&role(other))
            .then_with(|| created(self).cmp(&created(other)))
            .then_with(|| self.decision.service.cmp(&other.decision.service))
    }

    fn is_of(&self, service: &ServiceKey) -> bool {
        self.decision.service.service == *service
    }
}

/// A frontend as it was before the first touch since the last settlement.
#[derive(Clone, Debug)]
pub(crate) struct Before {
    pub(crate) owner: Claim,
    losers: Vec<Arc<ServicePortName>>,
}

/// All claims. Mutations remember what was there before, until it is taken.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    owners: BTreeMap<Frontend, Claim>,
    /// Claims that did not win, where there are any; the best first.
    losers: BTreeMap<Frontend, Vec<Claim>>,
    /// What was there before, of each frontend touched since the last settlement. `None` until the first: up to
    /// then all is new, and a cold start need not remember it.
    touched: Option<BTreeMap<Frontend, Option<Box<Before>>>>,
}

impl Claims {
    pub(crate) fn owner(&self, frontend: &Frontend) -> Option<&Claim> {
        self.owners.get(frontend)
    }

    pub(crate) fn owners(&self) -> &BTreeMap<Frontend, Claim> {
        &self.owners
    }

    pub(crate) fn insert(&mut self, frontend: Frontend, mut claim: Claim) {
        self.touch(frontend);
        match self.owners.entry(frontend) {
            Entry::Vacant(slot) => {
                slot.insert(claim);
            }
            Entry::Occupied(mut slot) => {
                if claim.precedence(slot.get()).is_lt() {
                    std::mem::swap(slot.get_mut(), &mut claim);
                }
                let losers = self.losers.entry(frontend).or_default();
                let at = losers.partition_point(|loser| loser.precedence(&claim).is_lt());
                losers.insert(at, claim);
            }
        }
    }

    /// Withdraws all that the service claims of this frontend.
    pub(crate) fn remove(&mut self, frontend: Frontend, service: &ServiceKey) {
        self.touch(frontend);
        let is_owner = self.owners.get(&frontend).is_some_and(|owner| owner.is_of(service));
        if is_owner {
            self.owners.remove(&frontend);
        }
        let Entry::Occupied(mut losers) = self.losers.entry(frontend) else { return };
        losers.get_mut().retain(|loser| !loser.is_of(service));
        if is_owner && !losers.get().is_empty() {
            self.owners.insert(frontend, losers.get_mut().remove(0));
        }
        if losers.get().is_empty() {
            losers.remove();
        }
    }

    /// Whether the service has exactly one claim to this frontend, and nobody else has any.
    pub(crate) fn is_sole(&self, frontend: &Frontend, service: &ServiceKey) -> bool {
        !self.losers.contains_key(frontend)
            && self.owners.get(frontend).is_some_and(|owner| owner.is_of(service))
    }

    /// Puts another claim in the place of the owner's. What removing and inserting would do where the owner's is the only
    /// one, but it moves nothing around.
    pub(crate) fn renew(&mut self, frontend: Frontend, claim: Claim) {
        let Some(owner) = self.owners.get_mut(&frontend) else { return self.insert(frontend, claim) };
        let was = std::mem::replace(owner, claim);
        if let Some(touched) = &mut self.touched {
            let before = || Some(Box::new(Before { owner: was, losers: Vec::new() }));
            touched.entry(frontend).or_insert_with(before);
        }
    }

    /// Shows every frontend that was touched since the last call, in order, with what it was.
    pub(crate) fn settle(&mut self, mut show: impl FnMut(&Claims, Frontend, Option<&Before>)) {
        match self.touched.replace(BTreeMap::new()) {
            None => self.owners.keys().for_each(|frontend| show(self, *frontend, None)),
            Some(touched) => {
                touched.iter().for_each(|(frontend, before)| show(self, *frontend, before.as_deref()));
            }
        }
    }

    /// Every claim that is not served now.
    pub(crate) fn conflicts(&self) -> impl Iterator<Item = Conflict> + '_ {
        self.losers.keys().flat_map(|frontend| self.conflicts_of(*frontend))
    }

    /// The conflicts of a frontend that its former self did not have.
    pub(crate) fn new_conflicts(&self, frontend: Frontend, before: Option<&Before>) -> Vec<Conflict> {
        let is_old = |conflict: &Conflict| {
            before.is_some_and(|before| {
                before.owner.decision.service == conflict.owner && before.losers.contains(&conflict.loser)
            })
        };
        self.conflicts_of(frontend).filter(|conflict| !is_old(conflict)).collect()
    }

    fn conflicts_of(&self, frontend: Frontend) -> impl Iterator<Item = Conflict> + '_ {
        let owner = self.owners.get(&frontend).map(|claim| &claim.decision.service);
        let losers = self.losers.get(&frontend).into_iter().flatten();
        owner.into_iter().flat_map(move |owner| {
            losers.clone().map(move |loser| Conflict {
                frontend,
                owner: owner.clone(),
                loser: loser.decision.service.clone(),
            })
        })
    }

    fn touch(&mut self, frontend: Frontend) {
        let Some(touched) = &mut self.touched else { return };
        touched.entry(frontend).or_insert_with(|| {
            let owner = self.owners.get(&frontend)?.clone();
            let losers = self.losers.get(&frontend).into_iter().flatten();
            let losers = losers.map(|claim| claim.decision.service.clone()).collect();
            Some(Box::new(Before { owner, losers }))
        });
    }
}
