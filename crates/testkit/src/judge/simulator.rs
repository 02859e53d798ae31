// SPDX-License-Identifier: Apache-2.0

//! The second judge: the program that a dataplane would load, walked packet by packet.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use dataplane::{
    Loopback, Mode,
    iptables::{self, Scene},
    ipvs,
    nftables::{
        self,
        sim::{Choice, Fate, Learned},
    },
};
use lab::address::name_of;
use model::{Changes, Family, Origin, Packet, PerFamily, Plan};

use super::{Host, Judge, promised};
use crate::scenario::{Entry, Expect, Line, Probe, SourceSeen, Stick};

/// Renders the plan from scratch after each change. That the kernel's table, which is changed step by step, comes
/// to the same is for the third judge.
#[derive(Debug)]
pub struct Simulator {
    mode: Mode,
    host: Host,
    programs: Option<PerFamily<Program>>,
}

/// What a dataplane would load.
#[derive(Clone, Debug)]
enum Program {
    Nftables(nftables::program::Program),
    /// With the lists that remember the client.
    Iptables(iptables::program::Program, BTreeSet<iptables::name::Name>),
    /// With the real servers that virtual servers remember for the client.
    Ipvs(Box<ipvs::program::Program>, ipvs::sim::Memory),
}

/// One way a packet can end.
#[derive(Debug)]
struct Ending {
    probability: f64,
    fate: Fate,
    choice: Choice,
    learned: Option<Lesson>,
}

/// What a packet leaves behind for the next of the same client.
#[derive(Debug)]
enum Lesson {
    Nftables(Learned),
    Iptables(BTreeSet<iptables::name::Name>),
    Ipvs(ipvs::sim::Memory),
}

impl Program {
    fn render(mode: Mode, plan: &Plan, family: Family, host: &Host) -> Program {
        let mark = 1 << dataplane::names::MASQUERADE_BIT;
        // The kernel can serve loopback addresses in IPv4 only.
        let loopback = match family == Family::V4 && plan.loopback_node_ports(family) {
            true => Loopback::Served,
            false => Loopback::Closed,
        };
        match mode {
            Mode::Iptables => {
                let scene =
                    Scene { plan, family, mark, loopback, liberal: false, accounts: false, comments: true };
                Program::Iptables(iptables::render::program(&scene), BTreeSet::new())
            }
            Mode::Ipvs => {
                let (settings, own) = (ipvs::Settings::default(), host.addresses());
                let scene =
                    ipvs::render::Scene { plan, family, settings: &settings, own: &own, mark, loopback };
                Program::Ipvs(Box::new(ipvs::program::Program::render(&scene)), ipvs::sim::Memory::new())
            }
            Mode::Nftables | Mode::Userspace | Mode::None => {
                Program::Nftables(nftables::render::program(plan, family, mark, loopback))
            }
        }
    }

    fn walk(&self, packet: &Packet, host: &Host) -> Vec<Ending> {
        let is_local = |address| host.owns(address);
        match self {
            Program::Nftables(program) => nftables::sim::simulate(program, packet, &is_local)
                .into_iter()
                .map(|ending| Ending {
                    probability: ending.probability,
                    fate: ending.fate,
                    choice: ending.choice,
                    learned: ending.learned.into_iter().next().map(Lesson::Nftables),
                })
                .collect(),
            Program::Iptables(program, memory) => iptables::sim::simulate(program, packet, &is_local, memory)
                .into_iter()
                .map(|ending| Ending {
                    probability: ending.probability,
                    fate: ending.fate,
                    choice: Choice::Random,
                    learned: Some(ending.remembered).filter(|lists| !lists.is_empty()).map(Lesson::Iptables),
                })
                .collect(),
            Program::Ipvs(program, memory) => ipvs::sim::simulate(program, packet, &is_local, memory)
                .into_iter()
                .map(|simulated| Ending {
                    probability: simulated.ending.probability,
                    fate: simulated.ending.fate,
                    choice: simulated.choice,
                    learned: simulated.remembered.map(|known| Lesson::Ipvs([known].into())),
                })
                .collect(),
        }
    }

    fn learn(&mut self, lesson: &Lesson) {
        match (self, lesson) {
            (Program::Nftables(program), Lesson::Nftables(learned)) => program.learn(learned),
            (Program::Iptables(_, memory), Lesson::Iptables(lists)) => memory.extend(lists),
            (Program::Ipvs(_, memory), Lesson::Ipvs(known)) => memory.extend(known),
            _ => unreachable!("a lesson is of the program that taught it"),
        }
    }
}

impl Simulator {
    pub fn new(mode: Mode) -> Simulator {
        Simulator { mode, host: Host::default(), programs: None }
    }
}

impl Judge for Simulator {
    fn name(&self) -> String {
        format!("simulator of {:?}", self.mode).to_lowercase()
    }

    fn readdress(&mut self, extra: &[IpAddr]) -> Result<(), String> {
        self.host.readdress(extra);
        Ok(())
    }

    fn changed(&mut self, plan: &Plan, _changes: &Changes) -> Result<(), String> {
        let (mode, host) = (self.mode, &self.host);
        self.programs = Some(PerFamily::from_fn(|family| Program::render(mode, plan, family, host)));
        Ok(())
    }

    fn judge(&mut self, plan: &Plan, line: &Line) -> Result<(), String> {
        let Entry::Probe(probe) = &line.entry else { return Ok(()) };
        let probe = &Probe { expect: promised(self.mode, plan, probe, &self.host), ..probe.clone() };
        let programs = self.programs.as_ref().ok_or("has no program")?;
        let program = &programs[Family::of(probe.destination.ip())];
        for packet in self.host.packets(probe) {
            let mut endings = program.walk(&packet, &self.host);
            if self.mode == Mode::Ipvs && !is_particular(&probe.expect) {
                // Whoever does not care how is served by turns, or by a hash that stands for a memory.
                endings.iter_mut().for_each(|ending| ending.choice = Choice::Random);
            }
            compare(probe, &self.host, &packet, &endings)?;
            let Expect::Forward { stick, .. } = &probe.expect else { continue };
            let learned = endings.iter().find_map(|ending| Some((ending, ending.learned.as_ref()?)));
            match (stick, learned) {
                (None | Some(Stick::Hashed), None) => {}
                (None | Some(Stick::Hashed), Some(_)) => return Err("remembers the client".to_owned()),
                (Some(_), None) => return Err("does not remember the client".to_owned()),
                (Some(_), Some((met, learned))) => {
                    let mut wiser = program.clone();
                    wiser.learn(learned);
                    let again = wiser.walk(&packet, &self.host);
                    if again.iter().any(|ending| ending.fate != met.fate) {
                        return Err(format!("meets {again:?} after {:?}", met.fate));
                    }
                }
            }
        }
        Ok(())
    }

    fn finish(&mut self, _plan: &Plan) -> Result<(), String> {
        Ok(())
    }
}

/// Whether it matters how one of several is chosen.
fn is_particular(expect: &Expect) -> bool {
    matches!(expect, Expect::Forward { turns: true, .. } | Expect::Forward { stick: Some(Stick::Hashed), .. })
}

/// Shares of endpoints may differ from what they should be by this fraction; why they do is said in docs/why.md.
const TOLERANCE: f64 = 0.01;

fn compare(probe: &Probe, host: &Host, packet: &Packet, endings: &[Ending]) -> Result<(), String> {
    let untouched = Fate::Delivered {
        destination: packet.destination,
        port: packet.port,
        translated: false,
        masqueraded: false,
    };
    let all = |wanted: Fate| match endings.iter().find(|ending| ending.fate != wanted) {
        None => Ok(()),
        Some(other) => Err(format!("says {:?}", other.fate)),
    };
    match &probe.expect {
        Expect::Reject => all(Fate::Rejected),
        Expect::Drop => all(Fate::Dropped),
        Expect::Pass => all(untouched),
        Expect::Forward { to, count, source, stick, turns } => {
            let choice = match stick {
                _ if *turns => Choice::Turn,
                Some(Stick::Hashed) => Choice::Hash,
                _ => Choice::Random,
            };
            let mut shares: BTreeMap<(IpAddr, u16), f64> = BTreeMap::new();
            for ending in endings {
                if ending.choice != choice {
                    return Err(format!("chooses by {:?}", ending.choice));
                }
                let Fate::Delivered { destination, port, translated: true, masqueraded } = ending.fate else {
                    return Err(format!("says {:?}", ending.fate));
                };
                let expected = match source {
                    _ if host.owns(destination) && packet.origin != Origin::Node => false,
                    SourceSeen::Masqueraded | SourceSeen::Hairpin => true,
                    SourceSeen::Original => destination == packet.source,
                };
                if masqueraded != expected {
                    return Err(format!("says {:?}", ending.fate));
                }
                *shares.entry((destination, port)).or_default() += ending.probability;
            }
            let met = |target: &crate::scenario::Target| {
                let is = |(address, port): &(IpAddr, u16)| {
                    name_of(*address).is_some_and(|name| target.is(&name, *port))
                };
                shares.keys().any(is)
            };
            let all_met = to.iter().all(met);
            let wanted = count.unwrap_or(to.len());
            let total: u32 = to.iter().map(|target| target.share).sum();
            let total = if wanted == to.len() { total } else { wanted as u32 };
            let is_fair = |((address, port), met): (&(IpAddr, u16), &f64)| {
                let name = name_of(*address).unwrap_or_default();
                let share = to.iter().find(|target| target.is(&name, *port)).map_or(1, |target| target.share);
                (met * f64::from(total) / f64::from(share) - 1.0).abs() <= TOLERANCE
            };
            if !all_met || shares.len() != wanted || !shares.iter().all(is_fair) {
                return Err(format!("says {shares:?}"));
            }
            Ok(())
        }
    }
}
