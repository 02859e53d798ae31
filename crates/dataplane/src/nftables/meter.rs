// SPDX-License-Identifier: Apache-2.0

//! What the maps of endpoints have counted: each element, the new connections it was drawn for.

use std::net::SocketAddr;

use hashbrown::HashMap;
use model::{Family, Frontend, PerFamily, Plan, Verdict};
use netlink::{
    Transport,
    nft::{Element, ElementValue, Nft, Visit},
};

use super::{
    entry::Placed,
    holdings::Holdings,
    layout::{self, Container, Space},
    script::table,
    slots,
};
use crate::{Error, Reading};

/// See [`crate::Meter`]. Reads by a connection of its own, so that it never delays a commit.
#[derive(Debug)]
pub(super) struct Meter<T> {
    nft: Nft<T>,
    families: PerFamily<bool>,
}

impl<T: Transport> Meter<T> {
    pub(super) fn new(nft: Nft<T>, families: PerFamily<bool>) -> Meter<T> {
        Meter { nft, families }
    }
}

impl<T: Transport> crate::Meter for Meter<T> {
    fn read(&mut self) -> Result<Vec<Reading>, Error> {
        let mut sums = Sums::default();
        for family in Family::BOTH.into_iter().filter(|family| self.families[*family]) {
            for (set, space) in maps(&mut self.nft, family)? {
                // A listing that somebody's commit interrupts begins anew.
                let mut of_set = Sums::default();
                let listed = self.nft.elements(table(family), &set, |visit| match visit {
                    Visit::Start => of_set.0.clear(),
                    Visit::Element(element) => of_set.add(family, space, &element),
                });
                match listed {
                    // Gone meanwhile.
                    Err(error) if error.is_not_found() => continue,
                    outcome => outcome.map_err(|error| Error::kernel("read", "what was counted", error))?,
                }
                sums.merge(of_set);
            }
        }
        Ok(sums.readings())
    }
}

/// What those of these elements that are endpoints have counted. What the kernel does not tell is left out.
pub(super) fn find<T: Transport>(nft: &mut Nft<T>, family: Family, placed: &[&Placed]) -> Vec<Reading> {
    let mut sums = Sums::default();
    let mut placed: Vec<&Placed> = placed.to_vec();
    placed.retain(|placed| placed.container.endpoints_side().is_some());
    placed.sort_by_key(|placed| placed.container);
    for here in placed.chunk_by(|a, b| a.container == b.container) {
        let container = here[0].container;
        let Some(space) = container.space() else { continue };
        let keys: Vec<Element<'_>> = here.iter().map(|placed| Element::key(&placed.key)).collect();
        let found = nft.find_elements(table(family), &container.name(), keys, |element| {
            sums.add(family, space, element);
        });
        // Only if somebody else has removed one: then the rest of this map is not told.
        let _ = found;
    }
    sums.readings()
}

/// Whether counting costs less than it is worth, by family: see [`crate::Config::counted_endpoints`]. A table that
/// does not count now begins to only with room to spare, since to begin means to make it anew.
pub(super) fn worthwhile(plan: &Plan, known: &PerFamily<Holdings>, limit: usize) -> PerFamily<bool> {
    let mut endpoints = PerFamily { v4: 0, v6: 0 };
    for (frontend, decision) in plan.frontends() {
        let differs = decision.inside != decision.outside;
        for verdict in [Some(&decision.outside), differs.then_some(&decision.inside)].into_iter().flatten() {
            if let Verdict::Forward(forward) = verdict {
                endpoints[frontend.family()] += forward.pool.backends.len();
            }
        }
    }
    PerFamily::from_fn(|family| {
        let sets = &known[family].frame.sets;
        let counts = !known[family].exists || sets.iter().any(|set| set.counter);
        limit > 0 && endpoints[family] <= if counts { limit } else { limit / 4 * 3 }
    })
}

/// The maps of endpoints of a table that count, and how their keys begin; none if there is no table yet. A table of a large
/// cluster does not count ([`worthwhile`]), and to go through its elements for each scrape would be a high price for zeros.
fn maps<T: Transport>(nft: &mut Nft<T>, family: Family) -> Result<Vec<(String, Space)>, Error> {
    let listed = nft.sets(table(family)).map_err(|error| Error::kernel("list", "the maps", error))?;
    let of_endpoints = |name: String| {
        let container = Container::parse(&name)?;
        container.endpoints_side()?;
        Some((name, container.space()?))
    };
    let counting = listed.into_iter().map(|listed| listed.object).filter(|set| set.counter);
    Ok(counting.filter_map(|set| of_endpoints(set.name)).collect())
}

/// By frontend and endpoint: several slots, and both sides, may lead to one.
#[derive(Default)]
struct Sums(HashMap<(Frontend, SocketAddr), u64>);

impl Sums {
    fn add(&mut self, family: Family, space: Space, element: &Element<'_>) {
        let read = || {
            let ElementValue::Bytes(value) = element.value else { return None };
            let (frontend, _) = layout::read_key(family, space, element.key)?;
            let (address, port) = slots::unpack(family, slots::pack(family, value)?)?;
            Some((frontend, SocketAddr::new(address, port), element.counter?.packets))
        };
        if let Some((frontend, endpoint, connections)) = read() {
            *self.0.entry((frontend, endpoint)).or_default() += connections;
        }
    }

    fn merge(&mut self, other: Sums) {
        for (key, connections) in other.0 {
            *self.0.entry(key).or_default() += connections;
        }
    }

    fn readings(self) -> Vec<Reading> {
        let reading = |((frontend, endpoint), connections)| Reading { frontend, endpoint, connections };
        self.0.into_iter().map(reading).collect()
    }
}
