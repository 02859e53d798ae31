// SPDX-License-Identifier: Apache-2.0

//! Who says what becomes of a packet. Each judge looks at another layer, so that a disagreement names the guilty one.

mod kernel;
mod oracle;
mod simulator;

use std::{collections::BTreeSet, fmt, net::IpAddr, time::Duration};

use dataplane::Mode;
pub use kernel::{Flavour, Kernel};
use lab::address::{NODE_A, NODE_A_SECOND, Version, name_of};
use model::{
    Address, Algorithm, Backend, Changes, Decision, Frontend, Origin, Outcome, Packet, Plan, Scheduler,
    Update, Verdict,
};
pub use oracle::Oracle;
pub use simulator::Simulator;

use crate::scenario::{Expect, Line, Probe, SourceSeen, Stick, Target};

/// Follows a script step by step, and says of each line of packets whether it is so. An `Err` is a sentence for
/// people; the caller adds file and line.
pub trait Judge {
    /// For messages: `oracle`, `kernel with nftables`.
    fn name(&self) -> String;

    /// These objects came or went; told before [`Judge::changed`].
    fn observe(&mut self, _updates: &[Update]) -> Result<(), String> {
        Ok(())
    }

    /// node-a has these extra addresses from now on; told before [`Judge::changed`].
    fn readdress(&mut self, extra: &[IpAddr]) -> Result<(), String>;

    /// The plan has become this one, by these changes.
    fn changed(&mut self, plan: &Plan, changes: &Changes) -> Result<(), String>;

    fn wait(&mut self, _time: Duration) {}

    fn judge(&mut self, plan: &Plan, line: &Line) -> Result<(), String>;

    /// The script is at its end.
    fn finish(&mut self, plan: &Plan) -> Result<(), String>;
}

/// node-a as judges without a kernel must imagine it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Host {
    extra: Vec<IpAddr>,
}

impl Host {
    pub(crate) fn readdress(&mut self, extra: &[IpAddr]) {
        self.extra = extra.to_vec();
    }

    /// The packets a probe begins with as they meet node-a, one for each source.
    pub(crate) fn packets(&self, probe: &Probe) -> impl Iterator<Item = Packet> {
        let destination = probe.destination.ip();
        probe.sources.iter().map(move |source| Packet {
            origin: origin(&probe.from),
            source: *source,
            destination,
            destination_is_local: self.owns(destination),
            protocol: probe.protocol,
            port: probe.destination.port(),
        })
    }

    /// All of node-a's addresses.
    pub(crate) fn addresses(&self) -> BTreeSet<IpAddr> {
        let usual = Version::BOTH.map(|v| [v.address(NODE_A), v.address(NODE_A_SECOND)]);
        usual.into_iter().flatten().chain(self.extra.iter().copied()).collect()
    }

    pub(crate) fn owns(&self, address: IpAddr) -> bool {
        let is_own = Version::BOTH
            .iter()
            .any(|version| address == version.address(NODE_A) || address == version.address(NODE_A_SECOND));
        is_own || address.is_loopback() || self.extra.contains(&address)
    }
}

/// Where packets of somebody enter node-a.
fn origin(from: &str) -> Origin {
    let interface = match from {
        "node-a" => return Origin::Node,
        "node-b" => "to-node-b",
        "node-c" => "to-node-c",
        "outside" => "to-outside",
        "client" | "client2" | "clients" => "to-client",
        pod => match pod.chars().next() {
            Some('b') => "to-node-b",
            Some('c') => "to-node-c",
            _ => return Origin::Interface(format!("pod-{pod}").into()),
        },
    };
    Origin::Interface(interface.into())
}

/// Compares an outcome, given without dice, with what a line expects.
pub(crate) fn compare(probe: &Probe, plan: &Plan, outcome: &Outcome) -> Result<(), String> {
    match (&probe.expect, outcome) {
        (Expect::Reject, Outcome::Reject) | (Expect::Drop, Outcome::Drop) | (Expect::Pass, Outcome::Pass) => {
            Ok(())
        }
        (
            Expect::Forward { to, count, source, stick, turns },
            Outcome::Forward { backends, masquerade, algorithm },
        ) => {
            let met: BTreeSet<(String, u16)> = backends.iter().map(place).collect();
            let missing = to.iter().find(|target| !met.iter().any(|(name, port)| target.is(name, *port)));
            let excess = met.iter().find(|(name, port)| !to.iter().any(|target| target.is(name, *port)));
            if missing.is_some() || excess.is_some() {
                return Err(format!("says {}", Said(outcome)));
            }
            if count.is_some_and(|count| count != backends.len()) {
                return Err(format!("has {} entries", backends.len()));
            }
            match source {
                SourceSeen::Masqueraded if !masquerade => return Err("does not masquerade".to_owned()),
                SourceSeen::Original if *masquerade => return Err("masquerades".to_owned()),
                _ => {}
            }
            choice(to, backends, *algorithm)?;
            let (takes_turns, hashes) = (takes_turns(*algorithm), hashes(*algorithm));
            if *turns != takes_turns {
                return Err(if takes_turns { "takes turns" } else { "takes no turns" }.to_owned());
            }
            match (stick, affinity(plan, probe)) {
                (Some(Stick::Hashed), false) if hashes => Ok(()),
                (None, false) if hashes => Err("chooses by a hash of the client".to_owned()),
                (Some(_), false) => Err("has no affinity".to_owned()),
                (None, true) => Err("has affinity".to_owned()),
                _ => Ok(()),
            }
        }
        _ => Err(format!("says {}", Said(outcome))),
    }
}

/// Does every target get its share?
fn choice(to: &[Target], backends: &[Backend], algorithm: Algorithm) -> Result<(), String> {
    let are_weighed = algorithm.scheduler.is_none_or(Scheduler::weighs);
    let weight = |backend: &Backend| if are_weighed { u32::from(backend.weight) } else { 1 };
    let shares: u32 = to.iter().map(|target| target.share).sum();
    let weights: u32 = backends.iter().map(weight).sum();
    let unfair = backends.iter().find(|backend| {
        let (name, port) = place(backend);
        let share = to.iter().find(|target| target.is(&name, port)).map_or(1, |target| target.share);
        // A name without port may stand for several backends.
        backends.len() == to.len() && weight(backend) * shares != share * weights
    });
    match unfair {
        Some(backend) => Err(format!("gives {} to {}", weight(backend), place(backend).0)),
        None => Ok(()),
    }
}

fn takes_turns(algorithm: Algorithm) -> bool {
    matches!(algorithm.scheduler, Some(Scheduler::RoundRobin | Scheduler::WeightedRoundRobin))
}

fn hashes(algorithm: Algorithm) -> bool {
    matches!(algorithm.scheduler, Some(Scheduler::SourceHash | Scheduler::Maglev))
}

/// What a mode promises for a probe. All keep what the plan says, but for a few things:
///
/// - the iptables mode leaves ports and addresses of no service alone, as kube-proxy's does; there each would cost a
///   rule that every new connection passes. And it draws at random, whatever the annotations of a service ask for;
/// - the ipvs mode has all service addresses on a link of the node, external ones too, and refuses what they do not
///   serve. It cannot serve node ports on loopback addresses, and remembers a client longer than it is told;
/// - in userspace mode it is the node that connects to the endpoint, so that the endpoint sees the node. It takes turns
///   where nothing else is asked for.
pub(crate) fn promised(mode: Mode, plan: &Plan, probe: &Probe, host: &Host) -> Expect {
    let address = probe.destination.ip();
    let frontend =
        Frontend { address: Address::Ip(address), protocol: probe.protocol, port: probe.destination.port() };
    let is_unknown = plan.decision(&frontend).is_none() && plan.decide_unknown(address) != Outcome::Pass;
    let is_service = || {
        let has_address = |(at, _): (&Frontend, _)| at.address == frontend.address;
        plan.decision(&frontend).is_none() && plan.frontends().any(has_address)
    };
    match (mode, &probe.expect) {
        (Mode::Iptables, _) if is_unknown => Expect::Pass,
        (Mode::Iptables, expect) if has_wishes(plan, probe) => plainly(expect),
        (Mode::Ipvs, Expect::Pass) if is_service() && !host.owns(address) => Expect::Reject,
        (Mode::Ipvs, _) if address.is_loopback() => Expect::Pass,
        (Mode::Ipvs, Expect::Forward { to, count, source, stick: Some(Stick::Moved), turns }) => {
            let (to, count, source, turns) = (to.clone(), *count, *source, *turns);
            Expect::Forward { to, count, source, stick: Some(Stick::Sticky), turns }
        }
        _ => seen(mode, &probe.expect),
    }
}

/// The same, with the source that an endpoint sees in this mode.
pub(crate) fn seen(mode: Mode, expect: &Expect) -> Expect {
    match (mode, expect.clone()) {
        (Mode::Userspace, Expect::Forward { to, count, stick, turns, .. }) => {
            Expect::Forward { to, count, source: SourceSeen::Masqueraded, stick, turns }
        }
        (_, expect) => expect,
    }
}

/// The same without anything that random draws do not keep.
fn plainly(expect: &Expect) -> Expect {
    match expect {
        Expect::Forward { to, count, source, stick, .. } => Expect::Forward {
            to: to.iter().map(|target| Target { share: 1, ..target.clone() }).collect(),
            count: *count,
            source: *source,
            stick: stick.filter(|stick| *stick != Stick::Hashed),
            turns: false,
        },
        other => other.clone(),
    }
}

/// Does the service ask for more than that all endpoints are drawn alike?
fn has_wishes(plan: &Plan, probe: &Probe) -> bool {
    decision(plan, probe).is_some_and(|decision| {
        let is_weighted =
            |verdict: &Verdict| matches!(verdict, Verdict::Forward(forward) if forward.pool.is_weighted());
        decision.tuning.is_some() || is_weighted(&decision.inside) || is_weighted(&decision.outside)
    })
}

/// Does what the probe is sent to have session affinity?
fn affinity(plan: &Plan, probe: &Probe) -> bool {
    decision(plan, probe).is_some_and(|decision| decision.affinity.is_some())
}

fn decision<'a>(plan: &'a Plan, probe: &Probe) -> Option<&'a Decision> {
    let address = probe.destination.ip();
    let ip =
        Frontend { address: Address::Ip(address), protocol: probe.protocol, port: probe.destination.port() };
    let node_port = Frontend { address: Address::NodePort(model::Family::of(address)), ..ip };
    plan.decision(&ip).or_else(|| plan.decision(&node_port))
}

impl Target {
    pub(crate) fn is(&self, name: &str, port: u16) -> bool {
        self.name == name && self.port.is_none_or(|expected| expected == port)
    }
}

fn place(backend: &Backend) -> (String, u16) {
    (name_of(backend.address).unwrap_or_else(|| backend.address.to_string()), backend.port)
}

/// An outcome in the words of the packet table.
struct Said<'a>(&'a Outcome);

impl fmt::Display for Said<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Outcome::Reject => f.write_str("reject"),
            Outcome::Drop => f.write_str("drop"),
            Outcome::Pass => f.write_str("pass"),
            Outcome::Forward { backends, masquerade, .. } => {
                let names: Vec<String> =
                    backends.iter().map(place).map(|(name, port)| format!("{name}:{port}")).collect();
                write!(f, "{} {}", names.join(","), if *masquerade { "masq" } else { "nomasq" })
            }
        }
    }
}
