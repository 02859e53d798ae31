// SPDX-License-Identifier: Apache-2.0

//! From the decisions of one service port to its chains, and its lines in the chains that all share. Pure.

use std::sync::Arc;

use ipnet::IpNet;
use model::{
    Address, Affinity, Backend, Decision, Family, Forward, Frontend, HealthCheck, Masquerade, Plan, Pool,
    Protocol, Reach, Role, ServiceKey, ServicePortName, Verdict,
};

use super::{
    frame::{Scene, Top, fixed, footholds, loopback_net, node_port_destinations},
    name::{self, Name},
    program::Program,
    rule::{Match, Rule, Target},
};
use crate::names::xt;

/// What one service port has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// Chains of its own, in nat.
    pub chains: Vec<(Name, Vec<Rule>)>,
    /// Lines in chains that all share. Those of one chain keep their order.
    pub lines: Vec<(Top, Rule)>,
}

/// Everything, from scratch.
pub fn program(scene: &Scene<'_>) -> Program {
    let mut program = Program::new(scene.family);
    for (table, chain, rules) in fixed(scene) {
        program.chain(table, chain).extend(rules);
    }
    for top in Top::ALL {
        program.chain(top.table(), top.chain());
    }
    for (service, frontends) in services(scene.plan, scene.family) {
        let block = block(scene, &service, &frontends);
        for (chain, rules) in block.chains {
            program.chain(crate::xtables::Table::Nat, chain).extend(rules);
        }
        for (top, rule) in block.lines {
            program.chain(top.table(), top.chain()).push(rule);
        }
    }
    for (key, check) in scene.plan.health() {
        let line = health_line(key, check, scene.family);
        program.chain(Top::HealthChecks.table(), Top::HealthChecks.chain()).extend(line);
    }
    for top in Top::ALL {
        program.chain(top.table(), top.chain()).extend(top.tail(scene));
    }
    for foothold in footholds(scene) {
        program.chain(foothold.table, Name::known(foothold.chain)).push(foothold.rule);
    }
    program
}

type Served<'a> = Vec<(Frontend, &'a Decision)>;

/// All service ports of a family with their frontends; those that the rest of the cluster needs come first, since a
/// packet meets their lines first.
pub(super) fn services(plan: &Plan, family: Family) -> Vec<(Arc<ServicePortName>, Served<'_>)> {
    let mut by_service: hashbrown::HashMap<&Arc<ServicePortName>, Served<'_>> = hashbrown::HashMap::new();
    for (frontend, decision) in plan.frontends().filter(|(frontend, _)| frontend.family() == family) {
        by_service.entry(&decision.service).or_default().push((*frontend, decision));
    }
    let mut services: Vec<_> =
        by_service.into_iter().map(|(service, frontends)| (service.clone(), frontends)).collect();
    services.sort_by(|(one, of_one), (other, of_other)| {
        let rank = |served: &Served<'_>| served.first().map(|(_, decision)| decision.rank);
        (rank(of_one), one).cmp(&(rank(of_other), other))
    });
    services
}

/// The line that lets load balancers ask whether this node has endpoints.
pub(super) fn health_line(key: &ServiceKey, check: &HealthCheck, family: Family) -> Option<Rule> {
    let comment = || Match::comment(format_args!("{key} health check node port"));
    let rule = || Rule::to(Target::Accept).over(Protocol::Tcp).with([comment(), Match::Port(check.port)]);
    check.families[family].then(rule)
}

/// See [`Block`]. All frontends are of one service port and of the scene's family.
pub(super) fn block(
    scene: &Scene<'_>,
    service: &ServicePortName,
    frontends: &[(Frontend, &Decision)],
) -> Block {
    let writer = Writer { scene, service, frontends, pools: pools(frontends) };
    let mut block = Block::default();
    writer.pool_chains(&mut block);
    writer.external_chains(&mut block);
    for (frontend, decision) in frontends {
        writer.lines(frontend, decision, &mut block);
    }
    block
}

/// The distinct pools, each with whose endpoints it has. A service port has two at most, one of each reach.
fn pools<'a>(frontends: &[(Frontend, &'a Decision)]) -> Vec<(Reach, &'a Arc<Pool>)> {
    let inside = frontends.iter().map(|(_, decision)| (inside_reach(decision), &decision.inside));
    let outside = frontends.iter().map(|(_, decision)| (decision.reach, &decision.outside));
    let mut pools: Vec<(Reach, &Arc<Pool>)> = Vec::new();
    for (reach, forward) in inside.chain(outside).filter_map(|(reach, to)| Some((reach, forward(to)?))) {
        if !pools.contains(&(reach, &forward.pool)) {
            pools.push((reach, &forward.pool));
        }
    }
    pools.sort_by_key(|(reach, _)| *reach);
    pools
}

/// Whose endpoints traffic from inside may get: where it is told apart, it takes the short way to all.
fn inside_reach(decision: &Decision) -> Reach {
    if decision.inside == decision.outside { decision.reach } else { Reach::Cluster }
}

fn forward(verdict: &Verdict) -> Option<&Forward> {
    match verdict {
        Verdict::Forward(forward) => Some(forward),
        Verdict::Reject | Verdict::Drop => None,
    }
}

struct Writer<'a> {
    scene: &'a Scene<'a>,
    service: &'a ServicePortName,
    frontends: &'a [(Frontend, &'a Decision)],
    pools: Vec<(Reach, &'a Arc<Pool>)>,
}

impl Writer<'_> {
    fn chain_of(&self, reach: Reach, pool: &Arc<Pool>) -> Name {
        let mut of_reach = self.pools.iter().filter(|(of, _)| *of == reach);
        let index = of_reach.position(|(_, known)| *known == pool).unwrap_or_default();
        name::pool(self.service, reach, index)
    }

    /// One chain for each pool, and one for each endpoint.
    fn pool_chains(&self, block: &mut Block) {
        let affinity = self.frontends.first().and_then(|(_, decision)| decision.affinity);
        let mut endpoints: Vec<(Name, &Backend)> = Vec::new();
        for (reach, pool) in &self.pools {
            let mut members: Vec<(String, &Backend)> =
                pool.backends.iter().map(|backend| (backend.to_string(), backend)).collect();
            members.sort();
            let members: Vec<(Name, String, &Backend)> = members
                .into_iter()
                .map(|(text, backend)| (name::endpoint(self.service, backend), text, backend))
                .collect();
            let mut rules = self.masquerades(*reach, pool);
            rules.extend(self.draw(&members, affinity));
            block.chains.push((self.chain_of(*reach, pool), rules));
            for (chain, _, backend) in members {
                if !endpoints.iter().any(|(known, _)| *known == chain) {
                    endpoints.push((chain, backend));
                }
            }
        }
        for (chain, backend) in endpoints {
            block.chains.push((chain, self.endpoint(chain, backend, affinity)));
        }
    }

    /// Cluster IPs lead straight to a pool, so what of their traffic is masqueraded is said there.
    fn masquerades(&self, reach: Reach, pool: &Arc<Pool>) -> Vec<Rule> {
        let mut rules = Vec::new();
        let leads_here = |decision: &Decision| is_straight(decision) && decision.reach == reach;
        for (frontend, decision) in self.frontends.iter().filter(|(_, decision)| leads_here(decision)) {
            let Some(forward) = forward(&decision.inside).filter(|forward| forward.pool == *pool) else {
                continue;
            };
            let mark = self.at(frontend, "cluster IP", Target::Jump(Name::known(xt::MARK_MASQ)));
            rules.extend(self.masquerade(mark, forward.masquerade));
        }
        rules
    }

    /// The rule, for whom it is to be masqueraded.
    fn masquerade(&self, mark: Rule, masquerade: Masquerade) -> Option<Rule> {
        match masquerade {
            Masquerade::Never => None,
            Masquerade::OffPods => self.pods(mark, false),
            Masquerade::Always => Some(mark),
        }
    }

    /// The rule, for pods only or for all others only; `None` where they cannot be told.
    fn pods(&self, rule: Rule, is: bool) -> Option<Rule> {
        Some(rule.of_pods(self.scene.plan.pod_traffic(self.scene.family)?, is))
    }

    /// First back to where the client is remembered, then anywhere: each rule takes its share of what is left.
    fn draw(&self, members: &[(Name, String, &Backend)], affinity: Option<Affinity>) -> Vec<Rule> {
        let to = |chain: Name, at: &str| {
            let comment =
                self.scene.comments.then(|| Match::comment(format_args!("{} -> {at}", self.service)));
            Rule::jump(chain).with(comment)
        };
        let family = self.scene.family;
        let recall = affinity.into_iter().flat_map(|affinity| {
            let seconds = affinity.timeout_secs.get();
            members.iter().map(move |(chain, at, _)| (*chain, at, seconds))
        });
        let recall = recall
            .map(|(chain, at, seconds)| to(chain, at).with([Match::Remembered(chain, family, seconds)]));
        let draw = members.iter().enumerate().map(|(index, (chain, at, _))| {
            let left = members.len() - index;
            to(*chain, at).with((left > 1).then(|| Match::one_of(left)))
        });
        recall.chain(draw).collect()
    }

    fn endpoint(&self, chain: Name, backend: &Backend, affinity: Option<Affinity>) -> Vec<Rule> {
        let comment = || self.scene.comments.then(|| Match::comment(self.service));
        let to = std::net::SocketAddr::new(backend.address, backend.port);
        vec![
            // It is its own client.
            Rule::jump(Name::known(xt::MARK_MASQ)).from(IpNet::from(backend.address), true).with(comment()),
            Rule::to(Target::Dnat(to))
                .over(self.service.protocol)
                .with(comment())
                .with(affinity.map(|_| Match::Remember(chain, self.scene.family)))
                .with([Match::Protocol]),
        ]
    }

    /// The chains between external addresses and pools.
    fn external_chains(&self, block: &mut Block) {
        let external: Vec<&(Frontend, &Decision)> =
            self.frontends.iter().filter(|(_, decision)| !is_straight(decision)).collect();
        let Some((_, decision)) = external.iter().find(|(_, decision)| forward(&decision.inside).is_some())
        else {
            return;
        };
        block.chains.push((name::external(self.service), self.external(decision)));
        let ranges: Vec<(&Frontend, &[IpNet])> = external
            .iter()
            .filter_map(|(frontend, decision)| Some((frontend, &**decision.source_ranges.as_ref()?)))
            .collect();
        if !ranges.is_empty() {
            block.chains.push((name::firewall(self.service), self.firewall(&ranges)));
        }
    }

    fn external(&self, decision: &Decision) -> Vec<Rule> {
        let note = |words: &str| {
            Match::comment(format_args!("{words} traffic for {} external destinations", self.service))
        };
        let mark = || Rule::jump(Name::known(xt::MARK_MASQ));
        let mut rules = Vec::new();
        if decision.inside != decision.outside
            && let Some(inside) = forward(&decision.inside)
        {
            let to = self.chain_of(inside_reach(decision), &inside.pool);
            // Where all are masqueraded, pods are too.
            if inside.masquerade == Masquerade::Always {
                rules.extend(self.pods(mark().with([note("masquerade pod")]), true));
            }
            rules.extend(self.pods(Rule::jump(to).with([note("pod")]), true));
            if inside.masquerade != Masquerade::Never {
                rules.push(mark().with([note("masquerade LOCAL"), Match::FromLocal]));
            }
            rules.push(Rule::jump(to).with([note("route LOCAL"), Match::FromLocal]));
        }
        if let Some(outside) = forward(&decision.outside) {
            rules.extend(self.masquerade(mark().with([note("masquerade")]), outside.masquerade));
            rules.push(Rule::jump(self.chain_of(decision.reach, &outside.pool)));
        }
        rules
    }

    /// Who may connect. Ranges that not all addresses have are bound to those that do.
    fn firewall(&self, ranges: &[(&Frontend, &[IpNet])]) -> Vec<Rule> {
        let comment = || Match::comment(format_args!("{} loadbalancer IP", self.service));
        let to = || Rule::jump(name::external(self.service)).with([comment()]);
        let mut rules = Vec::new();
        let mut seen: Vec<&IpNet> = Vec::new();
        for net in ranges.iter().flat_map(|(_, nets)| *nets) {
            if seen.contains(&net) {
                continue;
            }
            seen.push(net);
            let having: Vec<_> = ranges.iter().filter(|(_, nets)| nets.contains(net)).collect();
            if having.len() == ranges.len() {
                rules.push(to().from(*net, true));
                continue;
            }
            for (frontend, _) in having {
                if let Address::Ip(ip) = frontend.address {
                    rules.push(to().from(*net, true).toward(IpNet::from(ip), true));
                }
            }
        }
        let rest = format!("other traffic to {} will be dropped by {}", self.service, xt::PROXY_FIREWALL);
        rules.push(Rule::default().with([Match::comment(rest)]));
        rules
    }

    /// A rule for what goes to one frontend.
    fn at(&self, frontend: &Frontend, words: &str, target: Target) -> Rule {
        let space = if words.is_empty() { "" } else { " " };
        let comment = Match::comment(format_args!("{}{space}{words}", self.service));
        let rule = Rule::to(target).over(frontend.protocol).with([comment]);
        let rule = match frontend.address {
            Address::Ip(ip) => rule.toward(IpNet::from(ip), true),
            Address::NodePort(_) => rule,
        };
        rule.with([Match::Port(frontend.port)])
    }

    fn lines(&self, frontend: &Frontend, decision: &Decision, block: &mut Block) {
        if let Some(inside) = forward(&decision.inside) {
            let (top, words, to) = match (decision.role, &decision.source_ranges) {
                _ if is_straight(decision) => {
                    (Top::Services, "cluster IP", self.chain_of(decision.reach, &inside.pool))
                }
                (Role::NodePort, _) => (Top::NodePorts, "", name::external(self.service)),
                (Role::LoadBalancer, Some(_)) => {
                    (Top::Services, "loadbalancer IP", name::firewall(self.service))
                }
                (Role::LoadBalancer, None) => {
                    (Top::Services, "loadbalancer IP", name::external(self.service))
                }
                (_, _) => (Top::Services, "external IP", name::external(self.service)),
            };
            if top == Top::NodePorts
                && self.scene.accounts
                && self.scene.loopback.is_served()
                && self.scene.family == Family::V4
            {
                let counted =
                    self.at(frontend, words, Target::Jump(to)).toward(loopback_net(Family::V4), true);
                block.lines.push((top, counted.with([Match::Counted(xt::LOOPBACK_ACCEPTED)])));
            }
            block.lines.push((top, self.at(frontend, words, Target::Jump(to))));
            if top == Top::Services && decision.source_ranges.is_some() {
                let words = format!("traffic not accepted by {}", name::firewall(self.service));
                block.lines.push((Top::Firewalled, self.at(frontend, &words, Target::Drop)));
            }
        }
        let refusal = match decision.outside {
            Verdict::Forward(_) => return,
            Verdict::Reject => (Target::Reject(self.scene.family), "has no endpoints"),
            Verdict::Drop => (Target::Drop, "has no local endpoints"),
        };
        self.refusals(frontend, decision, refusal, block);
    }

    /// What has no endpoints is not translated, and so has its address still where it is refused.
    fn refusals(
        &self,
        frontend: &Frontend,
        decision: &Decision,
        (target, words): (Target, &str),
        block: &mut Block,
    ) {
        let top = if decision.role == Role::ClusterIp { Top::NoEndpoints } else { Top::NoExternalEndpoints };
        let rule = self.at(frontend, words, target);
        if let Address::NodePort(_) = frontend.address {
            for mut destination in node_port_destinations(self.scene) {
                let port = rule.matches.len() - 1;
                let mut at = rule.clone();
                at.destination = destination.destination.take();
                at.matches.splice(port..port, destination.matches);
                block.lines.push((top, at));
            }
            return;
        }
        match &decision.source_ranges {
            None => block.lines.push((top, rule)),
            // A firewall does not tell strangers what is behind it.
            Some(nets) => {
                block.lines.extend(nets.iter().map(|net| (top, rule.clone().from(*net, true))));
                block.lines.push((top, self.at(frontend, "has source ranges", Target::Drop)));
            }
        }
    }
}

/// Cluster IPs need no chain between them and the pool, since all their traffic goes the same way.
fn is_straight(decision: &Decision) -> bool {
    decision.role == Role::ClusterIp && decision.inside == decision.outside
}
