// SPDX-License-Identifier: Apache-2.0

//! The second judge: the program that nftables would load, walked packet by packet.

use std::{collections::BTreeMap, net::IpAddr};

use dataplane::nftables::{
    program::Program,
    render,
    sim::{Ending, Fate, simulate},
};
use lab::address::name_of;
use model::{Changes, Family, Origin, Packet, PerFamily, Plan};

use super::{Host, Judge};
use crate::scenario::{Entry, Expect, Line, Probe, SourceSeen};

/// Renders the plan from scratch after each change. That the kernel's table, which is changed step by step, comes
/// to the same is for the third judge.
#[derive(Debug, Default)]
pub struct Simulator {
    host: Host,
    programs: Option<PerFamily<Program>>,
}

impl Judge for Simulator {
    fn name(&self) -> String {
        "simulator of nftables".to_owned()
    }

    fn readdress(&mut self, extra: &[IpAddr]) -> Result<(), String> {
        self.host.readdress(extra);
        Ok(())
    }

    fn changed(&mut self, plan: &Plan, _changes: &Changes) -> Result<(), String> {
        let mark = 1 << dataplane::names::MASQUERADE_BIT;
        // The kernel can serve loopback addresses in IPv4 only.
        let loopback = |family| family == Family::V4 && plan.loopback_node_ports(family);
        let program = |family| render::program(plan, family, mark, loopback(family));
        self.programs = Some(PerFamily { v4: program(Family::V4), v6: program(Family::V6) });
        Ok(())
    }

    fn judge(&mut self, _plan: &Plan, line: &Line) -> Result<(), String> {
        let Entry::Probe(probe) = &line.entry else { return Ok(()) };
        let programs = self.programs.as_ref().ok_or("has no program")?;
        let program = &programs[Family::of(probe.destination.ip())];
        let walk = |program: &Program, packet: &Packet| {
            simulate(program, packet, &|address| self.host.owns(address))
        };
        for packet in self.host.packets(probe) {
            let endings = walk(program, &packet);
            compare(probe, &self.host, &packet, &endings)?;
            let Expect::Forward { stick, .. } = &probe.expect else { continue };
            let learned = endings.iter().find_map(|ending| Some((ending, ending.learned.first()?)));
            match (stick, learned) {
                (None, None) => {}
                (None, Some(_)) => return Err("remembers the client".to_owned()),
                (Some(_), None) => return Err("does not remember the client".to_owned()),
                (Some(_), Some((met, learned))) => {
                    let mut wiser = program.clone();
                    wiser.learn(learned);
                    let again = walk(&wiser, &packet);
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

/// Shares of endpoints may differ from equal ones by this fraction; why they do is said in docs/why.md.
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
        Expect::Forward { to, count, source, .. } => {
            let mut shares: BTreeMap<(IpAddr, u16), f64> = BTreeMap::new();
            for ending in endings {
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
            let is_fair = |share: &f64| (share * wanted as f64 - 1.0).abs() <= TOLERANCE;
            if !all_met || shares.len() != wanted || !shares.values().all(is_fair) {
                return Err(format!("says {shares:?}"));
            }
            Ok(())
        }
    }
}
