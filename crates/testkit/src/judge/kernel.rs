// SPDX-License-Identifier: Apache-2.0

//! The third judge: a real kernel. Real packets in a lab, with the plan in force on node-a.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    net::{IpAddr, SocketAddr},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use dataplane::{
    Applied, Config, Dataplane, Error, Mode, Scope,
    conntrack::Sweeper,
    xtables::{Failure, Variant},
};
use lab::{Answer, Flow, Lab, Layout, Reply, Route, Transport, address::name_of};
use model::{Address, Changes, Decision, Frontend, Plan, Protocol, Update};

use super::{Host, Judge, promised, seen};
use crate::{
    pace::slowness,
    scenario::{Entry, Expect, Line, Probe, SourceSeen, Stick, Target},
};

/// How long to wait for what must come. Long, because a busy machine is no reason to fail.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long to wait for other scenarios, on a machine of usual speed.
const LOCK: Duration = Duration::from_secs(10);
/// How long to wait for what must not come. Short: a slow answer then goes unnoticed, but is never taken for one.
const SILENCE: Duration = Duration::from_millis(300);
/// The same for TCP over IPv6: an ICMP error that comes back while `connect` still holds the socket, as it does over a
/// veth pair, is only believed when the SYN is sent again, after a second (seen on Linux 6.18; IPv4 is faster).
const SILENCE_TCP6: Duration = Duration::from_millis(1500);

/// Of a mode that can be had in several ways, which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    Plain,
    /// With this variant of iptables.
    Tools(Variant),
    /// With listeners on the service addresses themselves, and no packet filter.
    Bind,
}

impl Flavour {
    /// What a dataplane is opened with.
    pub fn config(self) -> Config {
        let mut config = Config::default();
        // An endpoint on a busy machine is not to be taken for a dead one.
        config.userspace.relay.first_attempt = PATIENCE;
        match self {
            Flavour::Plain => {}
            Flavour::Tools(variant) => config.xtables = Some(variant),
            Flavour::Bind => config.userspace.bind = true,
        }
        config
    }
}

impl fmt::Display for Flavour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Flavour::Plain => Ok(()),
            Flavour::Tools(variant) => write!(f, "-{variant}"),
            Flavour::Bind => f.write_str("-bind"),
        }
    }
}

/// A lab, and a dataplane at work in it.
pub struct Kernel {
    mode: Mode,
    config: Config,
    lab: Lab,
    host: Host,
    dataplane: Box<dyn Dataplane>,
    has_begun: bool,
    /// Connections kept open, with what they were opened for.
    flows: HashMap<String, (Flow, Probe)>,
    /// Connections that this mode cannot have.
    left_out: BTreeSet<String>,
    /// Whom each source met last, by the beginning of the line.
    met: HashMap<Beginning, Vec<Met>>,
}

type Beginning = (String, Protocol, SocketAddr);
/// An endpoint by name and port.
type Met = (String, u16);

impl Kernel {
    /// Needs the privileges to make namespaces.
    pub fn new(mode: Mode, flavour: Flavour) -> Result<Kernel, String> {
        let config = flavour.config();
        let lab = Lab::build(Layout::default()).map_err(text)?;
        let node = lab.netns("node-a").map_err(text)?;
        let dataplane = node.run(|| dataplane::open(mode, &config)).map_err(text)?;
        Ok(Kernel {
            mode,
            config,
            dataplane: dataplane.map_err(text)?,
            lab,
            host: Host::default(),
            has_begun: false,
            flows: HashMap::new(),
            left_out: BTreeSet::new(),
            met: HashMap::new(),
        })
    }
}

impl Judge for Kernel {
    fn name(&self) -> String {
        let variant = self.config.xtables.map(|variant| format!(" {variant}")).unwrap_or_default();
        let bind = if self.config.userspace.bind { " bind" } else { "" };
        format!("kernel with {:?}{variant}{bind}", self.mode).to_lowercase()
    }

    /// Every endpoint that lives in the lab answers from the moment it is known, usable or not, so that a wrong
    /// choice is seen.
    fn observe(&mut self, updates: &[Update]) -> Result<(), String> {
        for slice in updates.iter().filter_map(|update| match update {
            Update::Slice(slice) => Some(slice),
            _ => None,
        }) {
            for (endpoint, port) in
                slice.endpoints.iter().flat_map(|e| slice.ports.iter().map(move |p| (e, p)))
            {
                if let Some(name) = name_of(endpoint.address) {
                    let at = SocketAddr::new(endpoint.address, port.port);
                    self.lab.respond(&name, transport(port.protocol), at).map_err(text)?;
                }
            }
        }
        Ok(())
    }

    fn readdress(&mut self, extra: &[IpAddr]) -> Result<(), String> {
        self.host.readdress(extra);
        self.lab.readdress(extra).map_err(text)
    }

    fn changed(&mut self, plan: &Plan, changes: &Changes) -> Result<(), String> {
        let scope = if self.has_begun { Scope::Only(changes) } else { Scope::All };
        self.has_begun = true;
        let dataplane = &mut self.dataplane;
        let node = self.lab.netns("node-a").map_err(text)?;
        node.run(|| {
            apply(&mut **dataplane, plan, scope)?;
            sweep(plan, changes)
        })
        .map_err(text)?
    }

    fn wait(&mut self, time: Duration) {
        thread::sleep(time);
    }

    fn judge(&mut self, plan: &Plan, line: &Line) -> Result<(), String> {
        let mode = self.mode;
        match &line.entry {
            Entry::Flow { name, .. } if self.left_out.contains(name) => Ok(()),
            Entry::Flow { name, expect } => {
                let (flow, probe) = self.flows.get_mut(name).ok_or("has no such flow")?;
                let expect = &seen(mode, expect);
                let is_bound = self.config.userspace.bind;
                // There a flow has nobody who speaks for it once nobody listens any more.
                if is_bound && probe.protocol == Protocol::Udp && !is_forwarded(plan, probe) {
                    return Ok(());
                }
                let referee = Referee { mode, is_bound, host: &self.host, lab: &self.lab, probe, expect };
                referee.hear(&flow.ask(referee.patience()), probe.sources[0]).map(drop)
            }
            // A proxy process cannot carry SCTP: its associations have several addresses.
            Entry::Probe(probe) if mode == Mode::Userspace && probe.protocol == Protocol::Sctp => {
                self.left_out.extend(probe.flow.clone());
                Ok(())
            }
            // Where we listen on the node's own addresses, no other process can.
            Entry::Probe(probe)
                if self.config.userspace.bind
                    && probe.expect == Expect::Pass
                    && self.host.owns(probe.destination.ip()) =>
            {
                Ok(())
            }
            Entry::Probe(probe) => {
                let owner = self.lab.owner(probe.destination.ip());
                // A proxy can only answer as an address that no other process has bound. TCP needs no such thing.
                let is_in_the_way = mode == Mode::Userspace
                    && probe.protocol == Protocol::Udp
                    && self.host.owns(probe.destination.ip())
                    && probe.expect != Expect::Pass;
                // Where we listen on the address itself, so does nobody else, whatever the protocol.
                let is_taken = self.config.userspace.bind
                    && probe.expect != Expect::Pass
                    && self.host.owns(probe.destination.ip());
                if !is_in_the_way && !is_taken {
                    self.lab.respond(&owner, transport(probe.protocol), probe.destination).map_err(text)?;
                }
                match &probe.flow {
                    Some(name) => {
                        self.open(name, &Probe { expect: seen(mode, &probe.expect), ..probe.clone() })
                    }
                    None => {
                        let mut expect = promised(self.mode, plan, probe, &self.host);
                        if self.config.userspace.bind {
                            expect = without_filter(plan, probe, &self.host, expect);
                        }
                        self.probe(&Probe { expect, ..probe.clone() })
                    }
                }
            }
        }
    }

    /// What was changed step by step must be what a new process would make of the plan at once.
    fn finish(&mut self, plan: &Plan) -> Result<(), String> {
        self.see_off()?;
        let (mode, config) = (self.mode, &self.config);
        let node = self.lab.netns("node-a").map_err(text)?;
        let applied = node
            .run(|| {
                let mut fresh = dataplane::open(mode, config).map_err(text)?;
                apply(&mut *fresh, plan, Scope::All)
            })
            .map_err(text)??;
        // Chains that are idle now may be left for a full turn to remove; elements may not.
        if applied.added == 0 && applied.removed == 0 {
            return Ok(());
        }
        Err(format!("a new process would change what it finds: {applied:?}"))
    }
}

/// As a caller has to: what fails because others have the lock of the iptables tools is tried again, and then in full. All
/// scenarios that run at once share it.
fn apply(dataplane: &mut dyn Dataplane, plan: &Plan, scope: Scope<'_>) -> Result<Applied, String> {
    let until = Instant::now() + LOCK * slowness();
    let mut outcome = dataplane.apply(plan, scope);
    while let Err(Error::Tool { source: Failure::Locked { .. }, .. }) = &outcome
        && Instant::now() < until
    {
        outcome = dataplane.apply(plan, Scope::All);
    }
    outcome.map_err(text)
}

impl Kernel {
    fn referee<'a>(&'a self, probe: &'a Probe) -> Referee<'a> {
        let is_bound = self.config.userspace.bind;
        Referee { mode: self.mode, is_bound, host: &self.host, lab: &self.lab, probe, expect: &probe.expect }
    }

    /// In ipvs mode a service that was deleted stays as long as connections of it are open; the last may just be ending.
    fn see_off(&mut self) -> Result<(), String> {
        if self.mode != Mode::Ipvs {
            return Ok(());
        }
        self.flows.clear();
        let node = self.lab.netns("node-a").map_err(text)?;
        let mut ipvs = netlink::ipvs::Ipvs::open_in(node).map_err(text)?;
        let mut is_busy = || -> Result<bool, netlink::Error> {
            for held in ipvs.services()? {
                if ipvs.dests(held.service.key)?.iter().any(|dest| dest.active > 0) {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        let end = Instant::now() + SILENCE * slowness();
        while is_busy().map_err(text)? && Instant::now() < end {
            thread::sleep(Duration::from_millis(10));
        }
        node.run(|| self.dataplane.audit()).map_err(text)?.map(drop).map_err(text)
    }

    fn open(&mut self, name: &str, probe: &Probe) -> Result<(), String> {
        let referee = self.referee(probe);
        let opened = self
            .lab
            .open(&probe.from, referee.route(probe.sources[0]), PATIENCE * slowness())
            .map_err(text)?;
        let mut flow = opened.map_err(|answer| said(&answer))?;
        referee.hear(&flow.ask(referee.patience()), probe.sources[0])?;
        self.flows.insert(name.to_owned(), (flow, probe.clone()));
        Ok(())
    }

    /// New connections, as many as the expectation needs to be shown.
    fn probe(&mut self, probe: &Probe) -> Result<(), String> {
        let referee = self.referee(probe);
        let has_addresses = self.mode == Mode::Ipvs || self.config.userspace.bind;
        let before = self.met.get(&beginning(probe));
        let node = self.lab.netns(&probe.from).map_err(text)?;
        let met = node
            .run(|| match &probe.expect {
                Expect::Forward { to, stick: None, turns: true, .. } => referee.take_turns(to),
                Expect::Forward { to, stick: None, .. } if is_weighted(to) => referee.weigh(to),
                Expect::Forward { to, stick: None, .. } => referee.meet_all(to),
                Expect::Forward { to, stick: Some(stick), .. } => referee.meet_again(to, *stick, before),
                // While connections of a service that was deleted go on, its address is still the node's.
                Expect::Pass if has_addresses && !referee.host.owns(probe.destination.ip()) => {
                    referee.once().or_else(|_| Referee { expect: &Expect::Reject, ..referee }.once())
                }
                Expect::Reject | Expect::Drop | Expect::Pass => referee.once(),
            })
            .map_err(text)??;
        self.met.insert(beginning(probe), met);
        Ok(())
    }
}

/// Asks, and compares the answers with one expectation. Asks in the namespace of the calling thread.
#[derive(Clone, Copy)]
struct Referee<'a> {
    mode: Mode,
    /// We listen on the service addresses themselves.
    is_bound: bool,
    host: &'a Host,
    lab: &'a Lab,
    probe: &'a Probe,
    expect: &'a Expect,
}

impl Referee<'_> {
    fn route(&self, source: IpAddr) -> Route {
        Route { source, destination: self.probe.destination, transport: transport(self.probe.protocol) }
    }

    fn patience(&self) -> Duration {
        match (self.expect, self.probe.protocol) {
            (Expect::Drop, Protocol::Tcp) if self.probe.destination.is_ipv6() => SILENCE_TCP6,
            (Expect::Drop, _) => SILENCE,
            _ => PATIENCE * slowness(),
        }
    }

    fn ask(&self, source: IpAddr) -> Result<Option<Met>, String> {
        let answer = match Flow::open(self.route(source), self.patience()) {
            Ok(mut flow) => flow.ask(self.patience()),
            Err(answer) => answer,
        };
        self.hear(&answer, source)
    }

    fn once(&self) -> Result<Vec<Met>, String> {
        self.ask(self.probe.sources[0]).map(|met| met.into_iter().collect())
    }

    /// Connects until every endpoint was met, and some times more, for one that should not be there. The bound is
    /// such that an endpoint with its fair share is missed once in fifty million lines.
    fn meet_all(&self, to: &[Target]) -> Result<Vec<Met>, String> {
        let wanted = to.len().min(ENOUGH);
        let count = to.len() as f64;
        let least = 24.max(8 * wanted);
        let most = least.max((count * (count.ln() + 18.0)).ceil() as usize);
        let mut met = BTreeSet::new();
        for attempt in 1..=most {
            met.extend(self.ask(self.probe.sources[0])?);
            if met.len() >= wanted && attempt >= least {
                return Ok(met.into_iter().collect());
            }
        }
        Err(format!("meets only {met:?} in {most} connections"))
    }

    /// Some rounds in a row, of which each must bring exactly its share to everyone.
    fn take_turns(&self, to: &[Target]) -> Result<Vec<Met>, String> {
        let total: u32 = to.iter().map(|target| target.share).sum();
        let mut met = BTreeMap::new();
        // So many rounds that chance does not pass for turns.
        for _ in 0..(48 / total).max(3) {
            met = self.count(total)?;
            if to.iter().any(|target| times(&met, target) != target.share) {
                return Err(format!("does not take turns: {met:?}"));
            }
        }
        Ok(met.into_keys().collect())
    }

    /// So many connections that shares can be told. One that is drawn as it should be is found off by five standard
    /// deviations once in two million lines.
    fn weigh(&self, to: &[Target]) -> Result<Vec<Met>, String> {
        const DRAWS: u32 = 240;
        let total: u32 = to.iter().map(|target| target.share).sum();
        let met = self.count(DRAWS)?;
        let is_fair = |target: &Target| {
            let share = f64::from(target.share) / f64::from(total);
            let deviation = (f64::from(DRAWS) * share * (1.0 - share)).sqrt();
            (f64::from(times(&met, target)) - f64::from(DRAWS) * share).abs() <= 5.0 * deviation
        };
        match to.iter().all(is_fair) {
            true => Ok(met.into_keys().collect()),
            false => Err(format!("gives other shares: {met:?} of {DRAWS}")),
        }
    }

    /// Connects so often, and counts who answers.
    fn count(&self, connections: u32) -> Result<BTreeMap<Met, u32>, String> {
        let mut met = BTreeMap::new();
        for _ in 0..connections {
            let who = self.ask(self.probe.sources[0])?.ok_or("is silent")?;
            *met.entry(who).or_default() += 1;
        }
        Ok(met)
    }

    /// Each source comes several times in a row, and must meet the same endpoint.
    fn meet_again(&self, to: &[Target], stick: Stick, before: Option<&Vec<Met>>) -> Result<Vec<Met>, String> {
        let is_crowd = self.probe.sources.len() > 1;
        let times = if is_crowd { 3 } else { 24 };
        let mut all = Vec::new();
        for source in &self.probe.sources {
            let first = self.ask(*source)?.ok_or("is silent")?;
            for _ in 0..times {
                let next = self.ask(*source)?.ok_or("is silent")?;
                if next != first {
                    return Err(format!("sends {source} to {next:?} after {first:?}"));
                }
            }
            all.push(first);
        }
        let distinct: BTreeSet<&Met> = all.iter().collect();
        match (stick, before) {
            (Stick::Sticky | Stick::Hashed, _) if is_crowd && distinct.len() < to.len() => {
                Err(format!("sends so many clients to {distinct:?} only"))
            }
            (Stick::Sticky | Stick::Hashed, _) => Ok(all),
            (_, None) => Err("has nothing to compare with".to_owned()),
            (Stick::Same, Some(before)) => {
                let is_left = |(name, port): &Met| to.iter().any(|target| target.is(name, *port));
                match all.iter().zip(before).find(|(now, before)| is_left(before) && now != before) {
                    Some((now, before)) => Err(format!("sends a client of {before:?} to {now:?}")),
                    None => Ok(all),
                }
            }
            (Stick::Moved, Some(before)) if all == *before => Err("has forgotten nobody".to_owned()),
            (Stick::Moved, Some(_)) => Ok(all),
        }
    }

    /// Is this the answer that is expected? Returns who gave it.
    fn hear(&self, answer: &Answer, source: IpAddr) -> Result<Option<Met>, String> {
        match (self.expect, answer) {
            // Without a packet filter a client is let in before it is known who he is. He gets no answer.
            (Expect::Reject | Expect::Drop, Answer::Refused | Answer::TimedOut | Answer::Other(_))
                if self.is_bound =>
            {
                Ok(None)
            }
            (Expect::Reject, Answer::Refused) | (Expect::Drop, Answer::TimedOut) => Ok(None),
            (Expect::Pass, Answer::Answered(reply)) => {
                let owner = self.lab.owner(self.probe.destination.ip());
                let is_untouched = reply.at == self.probe.destination && reply.source_seen.ip() == source;
                if reply.by == owner && is_untouched { Ok(None) } else { Err(said(answer)) }
            }
            (Expect::Forward { to, source: seen, .. }, Answer::Answered(reply)) => {
                let is_expected = to.iter().any(|target| target.is(&reply.by, reply.at.port()));
                if !is_expected || !self.is_seen_as(*seen, reply, source) {
                    return Err(said(answer));
                }
                Ok(Some((reply.by.clone(), reply.at.port())))
            }
            _ => Err(said(answer)),
        }
    }

    /// node-a's own connections have its address either way; that they are masqueraded is for other judges.
    fn is_seen_as(&self, expected: SourceSeen, reply: &Reply, source: IpAddr) -> bool {
        let is_own_client = reply.by == self.probe.from;
        let is_node = self.host.owns(reply.source_seen.ip());
        match expected {
            _ if self.mode == Mode::Userspace => is_node,
            _ if reply.by == "node-a" && !is_own_client => reply.source_seen.ip() == source,
            SourceSeen::Masqueraded => is_node,
            SourceSeen::Hairpin => is_own_client && is_node,
            SourceSeen::Original if is_own_client || self.probe.from == "node-a" => is_node,
            SourceSeen::Original => reply.source_seen.ip() == source,
        }
    }
}

/// What is promised where no packet filter may be asked: free addresses of the service range are left alone, the node has
/// all service addresses, and where node ports are on every address nobody else listens on loopback ones.
fn without_filter(plan: &Plan, probe: &Probe, host: &Host, expect: Expect) -> Expect {
    let address = probe.destination.ip();
    let is_service = || plan.frontends().any(|(frontend, _)| frontend.address == Address::Ip(address));
    match expect {
        Expect::Drop if !is_service() && !host.owns(address) => Expect::Pass,
        Expect::Pass if is_service() && !host.owns(address) => Expect::Reject,
        expect => expect,
    }
}

/// Whether anybody gets an endpoint.
fn is_forwarded(plan: &Plan, probe: &Probe) -> bool {
    let address = Address::Ip(probe.destination.ip());
    let frontend = Frontend { address, protocol: probe.protocol, port: probe.destination.port() };
    plan.decision(&frontend).is_some_and(Decision::forwards)
}

fn is_weighted(to: &[Target]) -> bool {
    to.windows(2).any(|pair| pair[0].share != pair[1].share)
}

fn times(met: &BTreeMap<Met, u32>, target: &Target) -> u32 {
    met.iter().filter(|((name, port), _)| target.is(name, *port)).map(|(_, times)| times).sum()
}

/// Removes the flows that a change made stale, and waits until that is done.
fn sweep(plan: &Plan, changes: &Changes) -> Result<(), String> {
    let (report, reports) = mpsc::channel();
    let sweeper = Sweeper::start(move |outcome| drop(report.send(outcome))).map_err(text)?;
    sweeper.add(plan, &changes.flows);
    drop(sweeper);
    reports.iter().try_for_each(|outcome| outcome.map(drop).map_err(text))
}

/// So many different endpoints are proof enough that all are used.
const ENOUGH: usize = 16;

fn beginning(probe: &Probe) -> Beginning {
    (probe.from.clone(), probe.protocol, probe.destination)
}

fn transport(protocol: Protocol) -> Transport {
    match protocol {
        Protocol::Tcp => Transport::Tcp,
        Protocol::Udp => Transport::Udp,
        Protocol::Sctp => Transport::Sctp,
    }
}

fn said(answer: &Answer) -> String {
    match answer {
        Answer::Answered(reply) => {
            let source =
                name_of(reply.source_seen.ip()).unwrap_or_else(|| reply.source_seen.ip().to_string());
            format!("gets an answer from {} at {}, which saw {source}", reply.by, reply.at)
        }
        Answer::Refused => "is refused".to_owned(),
        Answer::TimedOut => "gets no answer".to_owned(),
        Answer::Other(errno) => format!("fails: {errno}"),
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
