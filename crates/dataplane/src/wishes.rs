// SPDX-License-Identifier: Apache-2.0

//! What services ask for beyond their spec, and what of it a mode can do.
//!
//! A mode states its [`Abilities`] once; whoever runs it compares them with each decision and tells people what is
//! not done. A mode never ignores a wish in silence, and never refuses a service for one.

use model::{Decision, Protocol, Scheduler, SchedulerFlags, Verdict};

/// What a mode can do of what a [`model::Tuning`] and weights ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Abilities {
    /// The schedulers it follows.
    pub schedulers: Vec<Scheduler>,
    /// Backends of greater weight get more.
    pub weights: bool,
    /// Packets of UDP can be scheduled one by one.
    pub one_packet: bool,
    /// It carries connections itself, and so can do what [`model::RelayWishes`] ask for.
    pub relay: bool,
    /// What becomes of connections for which another scheduler is asked: `endpoints are drawn at random`.
    pub instead: &'static str,
}

/// What is asked for a frontend and not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortfall {
    pub kind: Kind,
    /// What a person is told; it follows the name of the mode.
    pub sentence: String,
}

/// What a shortfall is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Its protocol: the frontend is not served.
    Protocol,
    /// How connections are shared out or carried: it is served, in another way.
    Tuning,
}

impl Abilities {
    /// What is asked for a frontend and not done; `None` if all is.
    pub fn shortfall(&self, decision: &Decision) -> Option<Shortfall> {
        if self.relay && decision.service.protocol == Protocol::Sctp {
            return Some(Shortfall { kind: Kind::Protocol, sentence: NO_SCTP.to_owned() });
        }
        let scheduler = decision.algorithm().scheduler;
        let unknown = scheduler.filter(|scheduler| !self.schedulers.contains(scheduler));
        let asks_weights = scheduler.is_none_or(Scheduler::weighs) && is_weighted(decision);
        let ignores_weights = asks_weights && !self.weights;
        let asks_relay =
            |tuning: &std::sync::Arc<model::Tuning>| tuning.relay != model::RelayWishes::default();
        let lacks_relay = !self.relay && decision.tuning.as_ref().is_some_and(asks_relay);
        let choice = match (unknown, ignores_weights) {
            (None, false) => None,
            (None, true) => Some("the weights of its endpoints are ignored".to_owned()),
            (Some(scheduler), false) => {
                Some(format!("the scheduler {scheduler} is not to be had; {}", self.instead))
            }
            (Some(scheduler), true) => Some(format!(
                "the scheduler {scheduler} is not to be had; {}, and the weights of its endpoints are ignored",
                self.instead
            )),
        };
        let lacks_one_packet = !self.one_packet && asks_one_packet(decision);
        let one_packet = lacks_one_packet.then(|| ONE_PACKET.to_owned());
        let relay = lacks_relay.then(|| RELAY.to_owned());
        let all: Vec<String> = [choice, one_packet, relay].into_iter().flatten().collect();
        (!all.is_empty()).then(|| Shortfall { kind: Kind::Tuning, sentence: all.join("; ") })
    }
}

/// What a mode that carries connections says of SCTP.
const NO_SCTP: &str = "SCTP is not served: an association has addresses of its own, which a process between the two ends cannot carry; \
     choose another mode";

/// Where the wish has a meaning: other protocols have connections.
fn asks_one_packet(decision: &Decision) -> bool {
    decision.service.protocol == Protocol::Udp
        && decision.algorithm().flags.contains(SchedulerFlags::ONE_PACKET)
}

const ONE_PACKET: &str = "packets are not scheduled one by one (ops), but with the flow that they are of";
const RELAY: &str = "PROXY protocol, limits of connections and checks are to be had in userspace mode only";

fn is_weighted(decision: &Decision) -> bool {
    [&decision.inside, &decision.outside]
        .into_iter()
        .any(|verdict| matches!(verdict, Verdict::Forward(forward) if forward.pool.is_weighted()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use model::{
        Algorithm, Backend, Forward, Masquerade, Pool, Reach, Role, ServiceKey, ServicePortName, Tuning,
    };

    use super::*;

    fn decision(scheduler: Option<Scheduler>, weights: [u16; 2]) -> Decision {
        let backend =
            |(last, weight)| Backend { address: [10, 0, 0, last].into(), port: 80, local: false, weight };
        let backends = [1, 2].into_iter().zip(weights).map(backend).collect();
        let forward = Forward { pool: Arc::new(Pool { backends }), masquerade: Masquerade::Never };
        let service = ServiceKey { namespace: "n".into(), name: "a".into() };
        let algorithm = Algorithm { scheduler, ..Algorithm::default() };
        Decision {
            service: Arc::new(ServicePortName { service, port: "".into(), protocol: Protocol::Tcp }),
            role: Role::ClusterIp,
            inside: Verdict::Forward(forward.clone()),
            outside: Verdict::Forward(forward),
            affinity: None,
            tuning: Some(Arc::new(Tuning { algorithm, ..Tuning::default() })),
            source_ranges: None,
            reach: Reach::Cluster,
            rank: 2,
        }
    }

    #[test]
    fn only_what_is_not_done_is_said() {
        let all = Abilities {
            schedulers: Scheduler::ALL.to_vec(),
            weights: true,
            one_packet: true,
            relay: true,
            instead: "",
        };
        let none = Abilities { instead: "something else is done", ..Abilities::default() };
        let weighted = [1, 3];
        for scheduler in [None, Some(Scheduler::RoundRobin), Some(Scheduler::WeightedRoundRobin)] {
            assert_eq!(all.shortfall(&decision(scheduler, weighted)), None);
        }
        assert_eq!(none.shortfall(&decision(None, [2, 2])), None);
        let mut sctp = decision(None, [1, 1]);
        sctp.service = Arc::new(ServicePortName { protocol: Protocol::Sctp, ..(*sctp.service).clone() });
        let refused = Shortfall { kind: Kind::Protocol, sentence: NO_SCTP.to_owned() };
        assert_eq!(all.shortfall(&sctp), Some(refused), "a process cannot carry it");
        assert_eq!(none.shortfall(&sctp), None, "a kernel can");
        let words = |shortfall: Shortfall| {
            assert_eq!(shortfall.kind, Kind::Tuning, "it is served");
            shortfall.sentence
        };
        let said =
            |scheduler, weights| words(none.shortfall(&decision(scheduler, weights)).expect("something"));
        assert_eq!(said(None, weighted), "the weights of its endpoints are ignored");
        let rr = "the scheduler rr is not to be had; something else is done";
        assert_eq!(said(Some(Scheduler::RoundRobin), weighted), rr, "it has no use for weights");
        let both = "the scheduler wlc is not to be had; something else is done, and the weights of its endpoints \
                    are ignored";
        assert_eq!(said(Some(Scheduler::WeightedLeastConnections), weighted), both);
        let ops = |protocol| {
            let flags = SchedulerFlags::ONE_PACKET;
            let algorithm = Algorithm { scheduler: None, flags };
            let plain = decision(None, [1, 1]);
            let service = ServicePortName { protocol, ..(*plain.service).clone() };
            let tuning = Some(Arc::new(Tuning { algorithm, ..Tuning::default() }));
            Decision { service: Arc::new(service), tuning, ..plain }
        };
        assert_eq!(none.shortfall(&ops(Protocol::Udp)).map(words).as_deref(), Some(ONE_PACKET));
        assert_eq!(none.shortfall(&ops(Protocol::Tcp)), None, "it has no meaning there");
        assert_eq!(all.shortfall(&ops(Protocol::Udp)), None);
    }
}
