// SPDX-License-Identifier: Apache-2.0

//! Annotations that set how one Service is balanced. This is the one place that reads them.
//!
//! | annotation | on | value |
//! |---|---|---|
//! | `portolan.dev/scheduler` | Service | a scheduler of IPVS by its name or by a word: `rr`, `round-robin`, ... |
//! | `portolan.dev/scheduler-flags` | Service | flags of that scheduler, `sh-port, sh-fallback` |
//! | `portolan.dev/weights` | Service | who gets how much, `node:big=3, zone:a=2, 10.1.2.0/24=0, *=1` |
//! | `portolan.dev/proxy-protocol` | Service | `v2` |
//! | `portolan.dev/max-connections` | Service | a number |
//! | `portolan.dev/check` | Service | `tcp`, `http:/path` |
//! | `portolan.dev/weight` | EndpointSlice | a number, for all endpoints in it |
//!
//! kube-router's `kube-router.io/service.scheduler` and `.schedflags` mean the same as ours, and ours win. What cannot
//! be read is reported and left out, alone; the service is served by what is left. An annotation with our prefix that
//! nobody knows is reported too: it is a slip of the pen.
//!
//! To add one: a constant here, a field in [`model::Tuning`] (which reaches every dataplane in
//! [`model::Decision::tuning`]), an arm in [`Wishes::take`], a [`Reason`] that says what the value must look like, a row
//! above and in docs/configuration.md. Annotations that a mode cannot honour are said by that mode, not here.

use std::sync::Arc;

use ipnet::IpNet;
use model::{Check, DEFAULT_WEIGHT, Scheduler, SchedulerFlags, Tuning, WeightRule, Weights, Whose};

use super::{Subject, parse_cidr, parse_ip};
use crate::{file::endpoints::ENDPOINTS, problem::Reason};

const SCHEDULER: &str = "portolan.dev/scheduler";
const SCHEDULER_FLAGS: &str = "portolan.dev/scheduler-flags";
const WEIGHTS: &str = "portolan.dev/weights";
const WEIGHT: &str = "portolan.dev/weight";
const PROXY_PROTOCOL: &str = "portolan.dev/proxy-protocol";
const MAX_CONNECTIONS: &str = "portolan.dev/max-connections";
const CHECK: &str = "portolan.dev/check";
const PREFIX: &str = "portolan.dev/";
const KUBE_ROUTER_SCHEDULER: &str = "kube-router.io/service.scheduler";
const KUBE_ROUTER_FLAGS: &str = "kube-router.io/service.schedflags";

/// More rules than this are nobody's intention, and each is looked at for each endpoint.
const MAX_RULES: usize = 256;

/// What the annotations of a Service wish.
#[derive(Debug, Default)]
pub(super) struct Wishes {
    tuning: Tuning,
    pub(super) weights: Weights,
}

impl Wishes {
    /// Reads the annotations of a Service.
    pub(super) fn of(subject: &mut Subject<'_, '_>) -> Wishes {
        let mut wishes = Wishes::default();
        let metadata = subject.metadata;
        let foreign = metadata.annotations.iter().filter(|pair| !pair.key.starts_with(PREFIX.as_bytes()));
        let own = metadata.annotations.iter().filter(|pair| pair.key.starts_with(PREFIX.as_bytes()));
        // Ours last, so that they win.
        for pair in foreign.chain(own) {
            if let (Ok(key), Ok(value)) = (str::from_utf8(&pair.key), str::from_utf8(&pair.value)) {
                wishes.take(subject, key, value.trim());
            }
        }
        wishes
    }

    /// `None` if there is no wish, as for most.
    pub(super) fn tuning(&self) -> Option<Arc<Tuning>> {
        (self.tuning != Tuning::default()).then(|| Arc::new(self.tuning.clone()))
    }

    fn take(&mut self, subject: &mut Subject<'_, '_>, key: &str, value: &str) {
        match key {
            SCHEDULER | KUBE_ROUTER_SCHEDULER => match Scheduler::parse(value) {
                Some(scheduler) => self.tuning.algorithm.scheduler = Some(scheduler),
                None => problem(subject, key, Reason::BadScheduler, value),
            },
            SCHEDULER_FLAGS | KUBE_ROUTER_FLAGS => {
                self.tuning.algorithm.flags = flags(subject, key, value);
            }
            WEIGHTS => self.weights = weights(subject, value),
            PROXY_PROTOCOL => match value {
                "v2" => self.tuning.relay.proxy_protocol = true,
                _ => problem(subject, key, Reason::BadProxyProtocol, value),
            },
            MAX_CONNECTIONS => match value.parse() {
                Ok(count) => self.tuning.relay.connections = Some(count),
                Err(_) => problem(subject, key, Reason::BadMaxConnections, value),
            },
            CHECK => match Check::parse(value) {
                Some(check) => self.tuning.relay.check = Some(check),
                None => problem(subject, key, Reason::BadCheck, value),
            },
            ENDPOINTS => {}
            _ if key.starts_with(PREFIX) => problem(subject, key, Reason::UnknownAnnotation, ""),
            _ => {}
        }
    }
}

/// The weight that an EndpointSlice gives its endpoints.
pub(super) fn slice_weight(subject: &mut Subject<'_, '_>) -> u16 {
    let Some(text) = subject.metadata.annotation(WEIGHT).map(str::trim) else { return DEFAULT_WEIGHT };
    text.parse().unwrap_or_else(|_| {
        problem(subject, WEIGHT, Reason::BadWeight, text);
        DEFAULT_WEIGHT
    })
}

fn flags(subject: &mut Subject<'_, '_>, key: &str, text: &str) -> SchedulerFlags {
    let mut flags = SchedulerFlags::NONE;
    for name in entries(text) {
        match SchedulerFlags::parse(name) {
            Some(flag) => flags = flags | flag,
            None => problem(subject, key, Reason::BadSchedulerFlag, name),
        }
    }
    flags
}

fn weights(subject: &mut Subject<'_, '_>, text: &str) -> Weights {
    let mut rules = Vec::new();
    for entry in entries(text) {
        match rule(subject, entry) {
            Some(_) if rules.len() == MAX_RULES => {
                problem(subject, WEIGHTS, Reason::TooManyWeights, entry);
                break;
            }
            Some(rule) => rules.push(rule),
            None => problem(subject, WEIGHTS, Reason::BadWeights, entry),
        }
    }
    Weights(rules.into())
}

fn rule(subject: &mut Subject<'_, '_>, entry: &str) -> Option<WeightRule> {
    let (whose, weight) = entry.split_once('=')?;
    let mut named = |name: &str| (!name.is_empty()).then(|| subject.string(name));
    let whose = if whose == "*" {
        Whose::Everyone
    } else if let Some(name) = whose.strip_prefix("node:") {
        Whose::Node(named(name)?)
    } else if let Some(name) = whose.strip_prefix("zone:") {
        Whose::Zone(named(name)?)
    } else {
        Whose::Net(parse_ip(whose).map(IpNet::from).or_else(|| parse_cidr(whose))?)
    };
    Some(WeightRule { whose, weight: weight.parse().ok()? })
}

fn entries(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| c == ',' || c.is_whitespace()).filter(|entry| !entry.is_empty())
}

fn problem(subject: &mut Subject<'_, '_>, key: &str, reason: Reason, value: &str) {
    subject.problem(format!("metadata.annotations[{key}]"), reason, value);
}

#[cfg(test)]
mod tests {
    use model::Algorithm;

    use super::*;
    use crate::{
        intern::Interner,
        lower::Scope,
        object::{Metadata, Pair},
    };

    /// What is wished, and the reasons of the problems.
    fn read<T>(
        annotations: &[(&str, &str)],
        read: impl FnOnce(&mut Subject<'_, '_>) -> T,
    ) -> (T, Vec<Reason>) {
        let annotations = annotations.iter().map(|(key, value)| Pair::new(key, value)).collect();
        let metadata = Metadata { annotations, ..Metadata::default() };
        let (mut interner, mut reasons) = (Interner::default(), Vec::new());
        let mut report = |problem: crate::Problem| reasons.push(problem.reason);
        let mut scope = Scope { interner: &mut interner, node_name: "n", report: &mut report };
        let result = read(&mut Subject { kind: "Service", metadata: &metadata, scope: &mut scope });
        (result, reasons)
    }

    fn algorithm(annotations: &[(&str, &str)]) -> (String, Vec<Reason>) {
        let (wishes, reasons) = read(annotations, Wishes::of);
        (wishes.tuning.algorithm.to_string(), reasons)
    }

    #[test]
    fn schedulers_and_flags_by_either_name() {
        assert_eq!(algorithm(&[(SCHEDULER, " rr ")]), ("rr".into(), vec![]));
        assert_eq!(algorithm(&[(SCHEDULER, "source-hash")]), ("sh".into(), vec![]));
        let theirs = [(KUBE_ROUTER_FLAGS, "flag-1,flag-2"), (KUBE_ROUTER_SCHEDULER, "mh")];
        assert_eq!(algorithm(&theirs), ("mh mh-fallback mh-port".into(), vec![]));
        let both = [(SCHEDULER, "wrr"), (KUBE_ROUTER_SCHEDULER, "mh"), (SCHEDULER_FLAGS, "")];
        assert_eq!(algorithm(&both), ("wrr".into(), vec![]), "ours wins, wherever it stands");
    }

    #[test]
    fn what_cannot_be_read_is_left_out_alone() {
        let bad = [(SCHEDULER, "quick"), (SCHEDULER_FLAGS, "sh-port,fast"), ("other.io/scheduler", "x")];
        let expected = vec![Reason::BadScheduler, Reason::BadSchedulerFlag];
        assert_eq!(algorithm(&bad), ("default sh-port".into(), expected));
        let slip = [("portolan.dev/schedular", "rr"), (ENDPOINTS, "10.0.0.1:80")];
        assert_eq!(algorithm(&slip), ("default".into(), vec![Reason::UnknownAnnotation]));
    }

    #[test]
    fn a_bad_own_value_does_not_hide_a_good_foreign_one() {
        let both = [(SCHEDULER, "quick"), (KUBE_ROUTER_SCHEDULER, "lc")];
        assert_eq!(algorithm(&both), ("lc".into(), vec![Reason::BadScheduler]));
    }

    #[test]
    fn wishes_for_a_relay() {
        let good = [(PROXY_PROTOCOL, "v2"), (MAX_CONNECTIONS, "100"), (CHECK, "http:/healthz")];
        let (wishes, reasons) = read(&good, Wishes::of);
        let relay = &wishes.tuning.relay;
        assert!(relay.proxy_protocol && reasons.is_empty());
        assert_eq!(relay.connections.map(u32::from), Some(100));
        assert_eq!(relay.check, Some(Check::Http("/healthz".into())));
        let bad = [(PROXY_PROTOCOL, "v1"), (MAX_CONNECTIONS, "0"), (CHECK, "icmp")];
        let (wishes, reasons) = read(&bad, Wishes::of);
        assert!(wishes.tuning().is_none());
        let expected = [Reason::BadProxyProtocol, Reason::BadMaxConnections, Reason::BadCheck];
        assert_eq!(reasons, expected);
    }

    #[test]
    fn no_wish_costs_nothing() {
        let (wishes, _) = read(&[("a", "b")], Wishes::of);
        assert!(wishes.tuning().is_none() && wishes.weights.is_empty());
        let (wishes, _) = read(&[(SCHEDULER, "rr")], Wishes::of);
        let algorithm = Algorithm::of(Scheduler::RoundRobin);
        assert_eq!(wishes.tuning().as_deref(), Some(&Tuning { algorithm, ..Tuning::default() }));
    }

    #[test]
    fn weights_by_address_range_node_zone_and_for_all() {
        let text = "10.1.0.5=5, fd00::5=4\n10.1.2.0/24=0 node:big-1=3,zone:eu-a=2,*=1";
        let (wishes, reasons) = read(&[(WEIGHTS, text)], Wishes::of);
        let net = |text| Whose::Net(parse_cidr(text).expect("a net"));
        let expected = [
            (net("10.1.0.5/32"), 5),
            (net("fd00::5/128"), 4),
            (net("10.1.2.0/24"), 0),
            (Whose::Node("big-1".into()), 3),
            (Whose::Zone("eu-a".into()), 2),
            (Whose::Everyone, 1),
        ];
        let found: Vec<_> = wishes.weights.0.iter().map(|rule| (rule.whose.clone(), rule.weight)).collect();
        assert_eq!((found, reasons), (expected.to_vec(), vec![]));
    }

    #[test]
    fn a_bad_weight_leaves_the_others() {
        let text = "10.1.0.5=-1, big=2, node:=2, *=70000, 10.1.0.6, zone:a=7";
        let (wishes, reasons) = read(&[(WEIGHTS, text)], Wishes::of);
        assert_eq!((wishes.weights.0.len(), reasons), (1, vec![Reason::BadWeights; 5]));
        let many = "*=1,".repeat(MAX_RULES + 7);
        let (wishes, reasons) = read(&[(WEIGHTS, &many)], Wishes::of);
        assert_eq!((wishes.weights.0.len(), reasons), (MAX_RULES, vec![Reason::TooManyWeights]));
    }

    #[test]
    fn a_slice_gives_one_weight() {
        assert_eq!(read(&[], slice_weight), (1, vec![]));
        assert_eq!(read(&[(WEIGHT, "0")], slice_weight), (0, vec![]));
        assert_eq!(read(&[(WEIGHT, "much")], slice_weight), (1, vec![Reason::BadWeight]));
    }
}
