// SPDX-License-Identifier: Apache-2.0

//! One turn for one family: what is wanted goes in, and one restore comes out.

use std::{collections::BTreeSet, sync::Arc};

use hashbrown::{HashMap, HashSet};
use model::{Changes, Decision, Frontend, ServicePortName, Verdict};

use super::{
    frame::{Foothold, Scene, Top, fixed, footholds},
    holdings::{Count, Held, Holdings, replace_lines},
    name::Name,
    readback::Readback,
    render::{self, Block},
    script::{Fingerprint, Script},
};
use crate::{names::xt, xtables::Table};

/// The service ports that a change is about.
fn touched(holdings: &mut Holdings, scene: &Scene<'_>, changes: &Changes) -> BTreeSet<Arc<ServicePortName>> {
    let mut touched = BTreeSet::new();
    for frontend in changes.frontends.iter().filter(|frontend| frontend.family() == scene.family) {
        if let Some(owner) = holdings.owners.remove(frontend) {
            if let Some(held) = holdings.services.get_mut(&owner) {
                held.frontends.retain(|held| held != frontend);
            }
            touched.insert(owner);
        }
        if let Some(decision) = scene.plan.decision(frontend) {
            let owner = &decision.service;
            holdings.services.entry(owner.clone()).or_default().frontends.push(*frontend);
            holdings.owners.insert(*frontend, owner.clone());
            touched.insert(owner.clone());
        }
    }
    touched
}

/// What a change comes to. The holdings are then what the tables hold once the script has run.
pub(super) fn change(holdings: &mut Holdings, scene: &Scene<'_>, changes: &Changes) -> Script {
    let mut script = Script::default();
    for service in touched(holdings, scene, changes) {
        let Some(old) = holdings.services.remove(&service) else { continue };
        let mut frontends = old.frontends.clone();
        frontends.sort_unstable();
        let block = block(scene, &service, &frontends);
        let is_gone = frontends.is_empty();
        let next = Held::of(frontends, &block);
        holdings.rules.replace(old.rules, next.rules);
        old.replace(&next, &block, &mut script);
        if !is_gone {
            holdings.services.insert(service, next);
        }
    }
    for key in &changes.health {
        let old = holdings.health.remove(key);
        let check = scene.plan.health().get(key);
        let new = check.and_then(|check| render::health_line(key, check, scene.family));
        let new: Option<Box<str>> = new.map(|rule| rule.to_string().into());
        let count = |line: &Option<Box<str>>| Count { filter: u64::from(line.is_some()), ..Count::default() };
        holdings.rules.replace(count(&old), count(&new));
        replace_lines(Top::HealthChecks, old.as_deref().as_slice(), new.as_deref().as_slice(), &mut script);
        holdings.health.extend(new.map(|line| (key.clone(), line)));
    }
    holdings.written = script.written;
    script
}

fn block(scene: &Scene<'_>, service: &ServicePortName, frontends: &[Frontend]) -> Block {
    let decided: Vec<(Frontend, &Decision)> =
        frontends.iter().filter_map(|frontend| Some((*frontend, scene.plan.decision(frontend)?))).collect();
    render::block(scene, service, &decided)
}

/// What is missing of the whole Plan, and what is too much. Chains of services are written `at_once` to a commit: nothing
/// leads to those that are new before the last one, so that the kernel has little to check until then.
pub(super) fn everything(mut found: Readback, scene: &Scene<'_>, at_once: usize) -> (Holdings, Script) {
    let mut script = Script::default();
    let mut holdings = Holdings { comments: scene.comments, ..Holdings::default() };
    let mut order = Vec::new();
    for (table, chain, rules) in fixed(scene) {
        holdings.rules.add(table, rules.len());
        if !found.claim(table, chain, Fingerprint::of(&rules)) {
            script.write(table, chain, &rules);
        }
    }
    for (service, decided) in render::services(scene.plan, scene.family) {
        let block = render::block(scene, &service, &decided);
        let held = Held::of(decided.into_iter().map(|(frontend, _)| frontend).collect(), &block);
        for ((chain, rules), (_, print)) in block.chains.iter().zip(held.chains()) {
            if !found.claim(Table::Nat, *chain, print) {
                script.write(Table::Nat, *chain, rules);
            }
        }
        script.cut(Table::Nat, at_once);
        holdings.rules.replace(Count::default(), held.rules);
        holdings.owners.extend(held.frontends.iter().map(|frontend| (*frontend, service.clone())));
        order.push(service.clone());
        holdings.services.insert(service, held);
    }
    for (key, check) in scene.plan.health() {
        let line = render::health_line(key, check, scene.family).map(|rule| rule.to_string().into());
        holdings.health.extend(line.map(|line| (key.clone(), line)));
    }
    holdings.rules.add(Top::HealthChecks.table(), holdings.health.len());
    for top in Top::ALL {
        let mut groups: Vec<Vec<&str>> =
            order.iter().filter_map(|service| Some(holdings.services.get(service)?.lines(top))).collect();
        if top == Top::HealthChecks {
            groups = holdings.health.values().map(|line| vec![&**line]).collect();
            groups.sort_unstable();
        }
        let tail: Vec<String> = top.tail(scene).iter().map(ToString::to_string).collect();
        holdings.rules.add(top.table(), tail.len());
        mend(top, found.claim_top(top), &groups, &tail, &mut script);
    }
    stand(&found, scene, &mut script);
    for (table, chain) in found.stale() {
        script.remove(table, chain);
    }
    holdings.written = script.written;
    (holdings, script)
}

/// Makes the ways into our chains stand where they should. If one is missing, those beside it are put up again too, so
/// that all stand in their order.
fn stand(found: &Readback, scene: &Scene<'_>, script: &mut Script) {
    let footholds = footholds(scene);
    let place = |foothold: &Foothold| (foothold.table, foothold.chain);
    let broken: HashSet<_> = footholds.iter().filter(|foothold| !found.has(foothold)).map(place).collect();
    if broken.contains(&(Table::Filter, xt::FIREWALL)) && !found.has_chain(Table::Filter, xt::FIREWALL) {
        script.declare(Table::Filter, Name::known(xt::FIREWALL));
    }
    for foothold in footholds.iter().rev().filter(|foothold| broken.contains(&place(foothold))) {
        let rule = foothold.rule.to_string();
        if found.has(foothold) {
            script.delete(foothold.table, foothold.chain, &rule);
        }
        script.insert(foothold.table, foothold.chain, &rule);
    }
}

/// Makes a chain that all share hold the lines of all groups, in any order but that within a group, and then the tail.
fn mend(top: Top, found: Option<Vec<Box<str>>>, groups: &[Vec<&str>], tail: &[String], script: &mut Script) {
    let rewrite = |script: &mut Script| {
        script.declare(top.table(), top.chain());
        groups.iter().flatten().for_each(|line| script.append(top, line));
        tail.iter().for_each(|line| script.append(top, line));
    };
    let Some(found) = found else { return rewrite(script) };
    let body = found.len().saturating_sub(tail.len());
    if found[body..].iter().map(|line| &**line).ne(tail.iter().map(String::as_str)) {
        return rewrite(script);
    }
    let places: HashMap<&str, usize> =
        found[..body].iter().enumerate().map(|(place, line)| (&**line, place)).collect();
    let mut kept: HashSet<&str> = HashSet::new();
    let mut missing: Vec<&Vec<&str>> = Vec::new();
    for group in groups {
        let at: Option<Vec<usize>> = group.iter().map(|line| places.get(line).copied()).collect();
        match at.filter(|at| at.is_sorted()) {
            Some(_) => kept.extend(group),
            None => missing.push(group),
        }
    }
    // What is there a second time is too much. Each is taken out of `kept` when it is met.
    let extra: Vec<&str> =
        found[..body].iter().map(|line| &**line).filter(|line| !kept.remove(line)).collect();
    let count = missing.iter().map(|group| group.len()).sum::<usize>() + extra.len();
    if count > FEW.max(groups.len() / 4) {
        return rewrite(script);
    }
    extra.iter().for_each(|line| script.delete(top.table(), top.chain().as_str(), line));
    for line in missing.iter().rev().flat_map(|group| group.iter().rev()) {
        script.insert(top.table(), top.chain().as_str(), line);
    }
}

/// So many lines are changed one by one; the tool looks for each that goes from the beginning of the chain.
const FEW: usize = 16;

/// Rules for endpoints bear comments up to so many endpoints; the same number as kube-proxy's.
const MANY_ENDPOINTS: usize = 1000;

/// Are there so few endpoints that comments cost little?
pub(super) fn affords_comments(plan: &model::Plan) -> bool {
    let size = |verdict: &Verdict| match verdict {
        Verdict::Forward(forward) => forward.pool.backends.len(),
        Verdict::Reject | Verdict::Drop => 0,
    };
    let mut counted: HashSet<&Arc<ServicePortName>> = HashSet::new();
    let of_each = plan.frontends().filter(|(_, decision)| counted.insert(&decision.service));
    let total: usize = of_each.map(|(_, decision)| size(&decision.inside)).sum();
    total <= MANY_ENDPOINTS
}
