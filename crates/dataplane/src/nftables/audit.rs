// SPDX-License-Identifier: Apache-2.0

//! A slow look at what the kernel really holds, a small part at a time, for what no notification told.
//!
//! A small table is read whole. Of a large one the rules are read, and of its elements those that ought to be there are
//! asked for, some hundreds at a time, so that a step costs the same however large the cluster is. At the end the sets'
//! sizes tell whether there is something that ought not to be. Kernels that do not tell the sizes leave that to the
//! next complete write, and source ranges, which cannot be asked for, too.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
};

use model::{Family, Frontend, PerFamily};
use netlink::{
    Transport,
    nft::{self, ElementValue, Nft, Verdict},
};

use super::{
    diff,
    entry::{Mapped, Placed},
    holdings::{Held, Holdings},
    kernel,
    layout::Container,
    render,
    script::table,
    text::keyword,
};
use crate::{Error, names};

/// Elements in one step, about. The kernel answers each with a datagram of its own, some 5 us of CPU time.
const STEP: usize = 128;
/// A table with no more frontends than this is read whole in one step.
const SMALL: usize = 200;

/// Where the look has got to.
#[derive(Debug)]
pub(super) struct Audit {
    /// What this round has still to look at.
    ahead: VecDeque<Part>,
    /// Up to so many frontends are a small table.
    pub(super) small: usize,
}

impl Default for Audit {
    fn default() -> Audit {
        Audit { ahead: VecDeque::new(), small: SMALL }
    }
}

#[derive(Debug)]
enum Part {
    Whole(Family),
    Rules(Family),
    Frontend(Frontend),
    Address(Container, IpAddr),
    Sizes(Family),
}

impl Audit {
    /// One step. What differs, in words, if anything does.
    pub(super) fn step<T: Transport>(
        &mut self,
        nft: &mut Nft<T>,
        known: &PerFamily<Holdings>,
        families: PerFamily<bool>,
    ) -> Result<Option<String>, Error> {
        if self.ahead.is_empty() {
            self.begin(known, families);
        }
        match self.ahead.front() {
            Some(Part::Whole(family)) => {
                let family = *family;
                self.ahead.pop_front();
                whole(nft, family, &known[family])
            }
            Some(Part::Rules(family)) => {
                let family = *family;
                self.ahead.pop_front();
                rules(nft, family, &known[family])
            }
            Some(Part::Sizes(family)) => {
                let family = *family;
                self.ahead.pop_front();
                sizes(nft, family, &known[family])
            }
            _ => self.elements(nft, known),
        }
    }

    /// Whether a round is under way.
    pub(super) fn is_under_way(&self) -> bool {
        !self.ahead.is_empty()
    }

    /// Begins a round anew: what was known is not known any more.
    pub(super) fn restart(&mut self) {
        self.ahead.clear();
    }

    fn begin(&mut self, known: &PerFamily<Holdings>, families: PerFamily<bool>) {
        for family in Family::BOTH.into_iter().filter(|family| families[*family]) {
            let holdings = &known[family];
            if holdings.frontends.len() <= self.small {
                self.ahead.push_back(Part::Whole(family));
                continue;
            }
            self.ahead.push_back(Part::Rules(family));
            self.ahead.extend(holdings.frontends.keys().map(|frontend| Part::Frontend(*frontend)));
            let sets = [
                (Container::ClusterIps, &holdings.cluster_ips),
                (Container::Hairpin, &holdings.hairpin),
                (Container::NodePortAddresses, &holdings.node_port_addresses),
            ];
            for (container, addresses) in sets {
                self.ahead.extend(addresses.iter().map(|address| Part::Address(container, *address)));
            }
            self.ahead.push_back(Part::Sizes(family));
        }
    }

    /// Some of the elements that ought to be there.
    fn elements<T: Transport>(
        &mut self,
        nft: &mut Nft<T>,
        known: &PerFamily<Holdings>,
    ) -> Result<Option<String>, Error> {
        let mut wanted: PerFamily<Vec<Placed>> = PerFamily::default();
        while wanted.v4.len() + wanted.v6.len() < STEP {
            match self.ahead.front() {
                Some(Part::Frontend(frontend)) => {
                    // One that has gone since the round began is nobody's any more.
                    let holdings = &known[frontend.family()];
                    if let Some(Held::Entry(entry)) = holdings.frontends.get(frontend) {
                        wanted[frontend.family()].extend(entry.elements(frontend));
                    }
                }
                Some(Part::Address(container, address)) => {
                    let holdings = &known[Family::of(*address)];
                    if holds(holdings, *container, address) {
                        wanted[Family::of(*address)].push(render::plain(*container, *address));
                    }
                }
                _ => break,
            }
            self.ahead.pop_front();
        }
        for family in Family::BOTH {
            // Intervals cannot be asked for one by one.
            wanted[family].retain(|placed| placed.key_end.is_none());
            wanted[family].sort_by_key(|placed| placed.container.name());
            for of_set in wanted[family].chunk_by(|a, b| a.container == b.container) {
                if let Some(found) = compare(nft, family, of_set)? {
                    return Ok(Some(found));
                }
            }
        }
        Ok(None)
    }
}

fn holds(holdings: &Holdings, container: Container, address: &IpAddr) -> bool {
    match container {
        Container::ClusterIps => holdings.cluster_ips.contains(address),
        Container::Hairpin => holdings.hairpin.contains(address),
        Container::NodePortAddresses => holdings.node_port_addresses.contains(address),
        _ => false,
    }
}

/// Asks for elements of one set.
fn compare<T: Transport>(
    nft: &mut Nft<T>,
    family: Family,
    wanted: &[Placed],
) -> Result<Option<String>, Error> {
    let set = wanted[0].container.name();
    let keys = wanted.iter().map(|placed| nft::Element::key(&placed.key));
    let (mut seen, mut same) = (0, true);
    let outcome = nft.find_elements(table(family), &set, keys, |element| {
        same &= wanted.get(seen).is_some_and(|placed| is_same(placed, element));
        seen += 1;
    });
    let place = format!("{set} in table {} {}", keyword(family), names::TABLE);
    match outcome {
        Ok(()) if same && seen == wanted.len() => Ok(None),
        Ok(()) => Ok(Some(format!("elements of {place} are others"))),
        Err(error) if error.is_not_found() => Ok(Some(format!("elements of {place} are missing"))),
        Err(error) => Err(Error::kernel("look at", place, error)),
    }
}

fn is_same(wanted: &Placed, found: &nft::Element<'_>) -> bool {
    let same_value = match (&wanted.value, found.value) {
        (Mapped::Nothing, ElementValue::None) => true,
        (Mapped::Endpoint(bytes), ElementValue::Bytes(found)) => bytes[..] == *found,
        (Mapped::Chain(kind), ElementValue::Verdict(Verdict::Goto(chain))) => kind.name() == chain,
        _ => false,
    };
    same_value && wanted.key[..] == *found.key
}

/// Rules, chains and sets, without elements.
fn rules<T: Transport>(nft: &mut Nft<T>, family: Family, known: &Holdings) -> Result<Option<String>, Error> {
    let found = kernel::frame(nft, family)?;
    let differ = found.is_none_or(|found| diff::frame(&found, &known.frame) != diff::FrameDelta::default());
    Ok(differ.then(|| format!("the rules of table {} {} are others", keyword(family), names::TABLE)))
}

/// How many elements each set holds. Clients come and go by themselves in one of them.
fn sizes<T: Transport>(nft: &mut Nft<T>, family: Family, known: &Holdings) -> Result<Option<String>, Error> {
    let place = || format!("the sets of table {} {}", keyword(family), names::TABLE);
    let listed = nft.set_sizes(table(family)).map_err(|error| Error::kernel("list", place(), error))?;
    let mut wanted: HashMap<Container, usize> = HashMap::from([
        (Container::ClusterIps, known.cluster_ips.len()),
        (Container::Hairpin, known.hairpin.len()),
        (Container::NodePortAddresses, known.node_port_addresses.len()),
    ]);
    for (frontend, held) in &known.frontends {
        // What is not understood is mended by the next write, and is nothing to count by.
        let Held::Entry(entry) = held else { return Ok(None) };
        entry
            .elements(frontend)
            .into_iter()
            .for_each(|placed| *wanted.entry(placed.container).or_default() += 1);
    }
    let counted = Container::FIXED.into_iter().filter(|container| *container != Container::Affinity);
    for container in counted {
        let (name, wanted) = (container.name(), wanted.get(&container).copied().unwrap_or(0));
        let size = listed.iter().find(|(listed, _)| *listed == name).and_then(|(_, size)| *size);
        if let Some(size) = size.filter(|size| *size as usize != wanted) {
            return Ok(Some(format!("{size} elements instead of {wanted} in {name} of {}", place())));
        }
    }
    Ok(None)
}

/// All of a table.
fn whole<T: Transport>(nft: &mut Nft<T>, family: Family, known: &Holdings) -> Result<Option<String>, Error> {
    let found = kernel::read(nft, family)?;
    let table = format!("table {} {}", keyword(family), names::TABLE);
    if found.exists != known.exists || found.replace {
        return Ok(Some(format!("{table} is gone or another")));
    }
    if diff::frame(&found.frame, &known.frame) != diff::FrameDelta::default()
        || found.foreign != Default::default()
    {
        return Ok(Some(format!("the rules of {table} are others")));
    }
    let same_entry = |frontend: &Frontend| match found.frontends.get(frontend) {
        Some(Held::Entry(entry)) => known.delta(frontend, entry).is_empty(),
        _ => false,
    };
    let same = found.frontends.len() == known.frontends.len()
        && known.frontends.keys().all(same_entry)
        && found.strays.is_empty()
        && found.cluster_ips == known.cluster_ips
        && found.hairpin == known.hairpin
        && found.node_port_addresses == known.node_port_addresses;
    Ok((!same).then(|| format!("elements of {table} are others")))
}
