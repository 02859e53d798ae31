// SPDX-License-Identifier: Apache-2.0

//! From elements as the kernel lists them, one by one and in no order, to [`Holdings`].
//!
//! Whatever the kernel holds, it is kept: as an entry where the elements of a frontend are exactly those of one,
//! else one by one, so that the difference to what is wanted can be told either way.

use std::num::NonZeroU32;

use hashbrown::HashMap;
use ipnet::IpNet;
use model::{Family, Frontend};
use netlink::nft::{self, ElementValue, Verdict};

use super::{
    entry::{self, Entry, Mapped, Placed, Refusal, Target},
    holdings::{Held, Holdings},
    layout::{self, Container, Kind, Side, Space, Way},
    lift::net_between,
    program::{Bytes, read_address},
    slots::{self, Slots},
};

/// Collects the elements of one table.
#[derive(Debug)]
pub(super) struct Readback {
    family: Family,
    gathered: HashMap<Frontend, Gathered>,
    holdings: Holdings,
}

/// The elements of one frontend, as far as they are understood. Small, since all frontends are gathered at once.
#[derive(Debug, Default)]
struct Gathered {
    kinds: [Option<Kind>; 2],
    /// Slot and packed endpoint, one behind the other.
    slots: [Vec<u8>; 2],
    rejected: bool,
    dropped: bool,
    firewalled: bool,
    rare: Option<Box<Rare>>,
}

/// What most frontends do not have.
#[derive(Debug, Default)]
struct Rare {
    sources: Vec<IpNet>,
    /// Timeout and packed endpoint.
    sticky: Vec<(u32, Vec<u8>)>,
    /// The same as `slots`, in other maps of endpoints than the common ones.
    elsewhere: Vec<(Container, Vec<u8>)>,
    /// What is not understood.
    odd: Vec<Placed>,
}

impl Readback {
    pub(super) fn new(family: Family) -> Readback {
        Readback { family, gathered: HashMap::new(), holdings: Holdings::default() }
    }

    /// Forgets what was said about a set: its elements are told again, from the first on.
    pub(super) fn begin(&mut self, container: Container) {
        self.holdings.strays.retain(|stray| stray.container != container);
        if let Some(addresses) = self.holdings.addresses(container) {
            addresses.clear();
        }
        let space = container.space();
        let of_space = self.gathered.iter_mut().filter(|(frontend, _)| Some(Space::of(frontend)) == space);
        of_space.for_each(|(_, gathered)| gathered.forget(container));
    }

    /// Takes one element. The affinity map is not ours to compare: the kernel fills it.
    pub(super) fn element(&mut self, container: Container, element: &nft::Element<'_>) {
        let Some(placed) = place(container, element) else { return };
        match container.space() {
            _ if container == Container::Affinity => (),
            None => self.address(placed),
            Some(space) => self.of_frontend(space, placed),
        }
    }

    pub(super) fn finish(self) -> Holdings {
        let mut holdings = self.holdings;
        let held = self.gathered.into_iter().map(|(frontend, gathered)| (frontend, gathered.held(&frontend)));
        holdings.frontends = held.collect();
        holdings
    }

    fn address(&mut self, placed: Placed) {
        let address = read_address(self.family, &placed.key);
        let understood = address.filter(|ip| super::render::plain(placed.container, *ip) == placed);
        match (understood, self.holdings.addresses(placed.container)) {
            (Some(address), Some(addresses)) => drop(addresses.insert(address)),
            _ => self.holdings.strays.push(placed),
        }
    }

    fn of_frontend(&mut self, space: Space, placed: Placed) {
        match layout::read_key(self.family, space, &placed.key) {
            Some((frontend, rest)) => {
                let gathered = self.gathered.entry(frontend).or_default();
                if !gathered.take(&frontend, &placed, rest) {
                    gathered.rare().odd.push(placed);
                }
            }
            None => self.holdings.strays.push(placed),
        }
    }
}

/// An element in our form. `None` if its key is longer than any of ours, which the set's type forbids.
fn place(container: Container, element: &nft::Element<'_>) -> Option<Placed> {
    let value = match element.value {
        ElementValue::None => Mapped::Nothing,
        ElementValue::Bytes(bytes) => Bytes::new(bytes).map_or(Mapped::Foreign, Mapped::Endpoint),
        ElementValue::Verdict(Verdict::Goto(chain)) => {
            Kind::parse(chain).map_or(Mapped::Foreign, Mapped::Chain)
        }
        ElementValue::Verdict(_) => Mapped::Foreign,
    };
    let key_end = element.key_end.and_then(Bytes::new).map(Box::new);
    Some(Placed { container, key: Bytes::new(element.key)?, key_end, value })
}

impl Gathered {
    fn rare(&mut self) -> &mut Rare {
        self.rare.get_or_insert_default()
    }

    fn forget(&mut self, container: Container) {
        if let Some(rare) = &mut self.rare {
            rare.odd.retain(|placed| placed.container != container);
            rare.elsewhere.retain(|(other, _)| *other != container);
            match container {
                Container::SourceRanges => rare.sources.clear(),
                Container::Sticky(_, secs) => rare.sticky.retain(|(of, _)| *of != secs),
                _ => (),
            }
        }
        match container {
            Container::Verdicts(_, side) => self.kinds[side as usize] = None,
            Container::Endpoints(_, side) => self.slots[side as usize].clear(),
            Container::Reject(_) => self.rejected = false,
            Container::Drop(_) => self.dropped = false,
            Container::Firewalled => self.firewalled = false,
            _ => (),
        }
    }

    /// Takes an element whose key goes on with `rest` behind the frontend; `false` if it is not understood.
    fn take(&mut self, frontend: &Frontend, placed: &Placed, rest: &[u8]) -> bool {
        let family = frontend.family();
        match (placed.container, placed.value) {
            (Container::Verdicts(space, side), Mapped::Chain(kind)) if rest.is_empty() => {
                let fits = kind.space == space && kind.side == side;
                self.kinds[side as usize] = fits.then_some(kind);
                fits
            }
            // In the map of another frontend it would be drawn by nobody.
            (Container::Turns(other, _), _) if other != *frontend => false,
            (container, Mapped::Endpoint(value)) if container.endpoints_side().is_some() => {
                let packed = slots::pack(family, &value).filter(|_| rest.len() == SLOT);
                if let Some(packed) = packed {
                    let records = self.records_mut(container);
                    records.extend_from_slice(rest);
                    records.extend_from_slice(packed);
                }
                packed.is_some()
            }
            (Container::Reject(_), _) if rest.is_empty() => set(&mut self.rejected),
            (Container::Drop(_), _) if rest.is_empty() => set(&mut self.dropped),
            (Container::Firewalled, _) if rest.is_empty() => set(&mut self.firewalled),
            (Container::SourceRanges, _) => {
                let net = range(family, rest, placed);
                self.rare().sources.extend(net);
                net.is_some()
            }
            (Container::Sticky(_, secs), _) => {
                let packed = slots::pack(family, rest);
                self.rare().sticky.extend(packed.map(|packed| (secs, packed.to_vec())));
                packed.is_some()
            }
            _ => false,
        }
    }

    fn records_mut(&mut self, container: Container) -> &mut Vec<u8> {
        if let Container::Endpoints(_, side) = container {
            return &mut self.slots[side as usize];
        }
        let elsewhere = &mut self.rare().elsewhere;
        let at = elsewhere.iter().position(|(other, _)| *other == container).unwrap_or_else(|| {
            elsewhere.push((container, Vec::new()));
            elsewhere.len() - 1
        });
        &mut elsewhere[at].1
    }

    /// The maps of endpoints that hold something for this frontend, with slots and packed endpoints one behind the other.
    fn records(&self, space: Space) -> impl Iterator<Item = (Container, &[u8])> {
        let common = Side::BOTH.map(|side| (Container::Endpoints(space, side), &*self.slots[side as usize]));
        let elsewhere = self.rare.iter().flat_map(|rare| &rare.elsewhere);
        let elsewhere = elsewhere.map(|(container, records)| (*container, records.as_slice()));
        common.into_iter().chain(elsewhere).filter(|(_, records)| !records.is_empty())
    }

    /// Slots and packed endpoints, in the order of the slots.
    fn slots(family: Family, records: &[u8]) -> Vec<(u32, &[u8])> {
        let records = records.chunks_exact(SLOT + slots::stride(family));
        let mut slots: Vec<(u32, &[u8])> = records
            .filter_map(|record| record.split_first_chunk::<SLOT>())
            .map(|(slot, packed)| (u32::from_ne_bytes(*slot), packed))
            .collect();
        slots.sort_unstable();
        slots
    }

    fn held(self, frontend: &Frontend) -> Held {
        match self.entry(frontend) {
            Some(entry) => Held::Entry(entry),
            None => Held::Irregular(self.elements(frontend)),
        }
    }

    /// The entry that these elements are exactly those of.
    fn entry(&self, frontend: &Frontend) -> Option<Entry> {
        let none = Rare::default();
        let rare = self.rare.as_deref().unwrap_or(&none);
        let kinds = self.kinds.iter().flatten();
        let sticky = kinds.clone().any(|kind| kind.sticky);
        let regular = rare.odd.is_empty()
            && !(self.rejected && self.dropped)
            && (self.firewalled || rare.sources.is_empty())
            && kinds.clone().all(|kind| kind.sticky == sticky);
        if !regular {
            return None;
        }
        let mut sources = rare.sources.clone();
        sources.sort();
        let entry = Entry {
            everyone: self.target(frontend, Side::Everyone)?,
            inside: self.target(frontend, Side::Inside)?,
            refusal: match (self.rejected, self.dropped) {
                (true, _) => Some(Refusal::Reject),
                (_, true) => Some(Refusal::Drop),
                _ => None,
            },
            sticky_secs: rare.sticky.first().and_then(|(secs, _)| NonZeroU32::new(*secs)),
            sources: self.firewalled.then(|| sources.into()),
        };
        let mut pairs: Vec<&[u8]> = rare.sticky.iter().map(|(_, packed)| &**packed).collect();
        pairs.sort_unstable();
        let one_timeout = rare.sticky.windows(2).all(|two| two[0].0 == two[1].0);
        let sticks =
            one_timeout && entry.sticky_endpoints() == pairs && entry.sticky_secs.is_some() == sticky;
        sticks.then_some(entry)
    }

    /// The target on one side, if there is none or a complete one.
    #[expect(clippy::option_option, reason = "whether it is understood, and whether there is one")]
    fn target(&self, frontend: &Frontend, side: Side) -> Option<Option<Target>> {
        let family = frontend.family();
        let here = self.records(Space::of(frontend)).filter(|(map, _)| map.endpoints_side() == Some(side));
        let here: Vec<(Container, &[u8])> = here.collect();
        let Some(kind) = self.kinds[side as usize] else {
            return here.is_empty().then_some(None);
        };
        let [(map, records)] = here[..] else { return None };
        let slots = Self::slots(family, records);
        let draw = kind.way.draw();
        let complete = slots.iter().enumerate().all(|(at, (slot, _))| *slot as usize == at);
        let is_drawn = map == kind.container() && kind.way == Way::of(draw, frontend, slots.len());
        if !complete || !is_drawn || !draw.fits(slots.len()) {
            return None;
        }
        let endpoints = slots.iter().filter_map(|(_, packed)| slots::unpack(family, packed));
        Some(Some(Target { mark: kind.mark, draw, slots: Slots::new(family, endpoints) }))
    }

    /// All of them, one by one.
    fn elements(mut self, frontend: &Frontend) -> Vec<Placed> {
        let space = Space::of(frontend);
        let key = layout::key(frontend);
        let mut elements = Vec::new();
        elements.extend(self.kinds.iter().flatten().map(|kind| entry::verdict(key, *kind)));
        for (map, records) in self.records(space) {
            let slots = Self::slots(frontend.family(), records).into_iter();
            elements.extend(slots.map(|(slot, at)| entry::endpoint(frontend, map, slot as usize, at)));
        }
        let rare = std::mem::take(self.rare());
        elements.extend(rare.odd);
        let flags = [
            (self.rejected, Container::Reject(space)),
            (self.dropped, Container::Drop(space)),
            (self.firewalled, Container::Firewalled),
        ];
        elements.extend(flags.iter().filter(|(is, _)| *is).map(|(_, set)| Placed::new(*set, key)));
        elements.extend(rare.sources.iter().map(|net| entry::source(key, net)));
        let sticky = rare.sticky.iter().filter_map(|(secs, at)| Some((NonZeroU32::new(*secs)?, at)));
        elements.extend(sticky.map(|(secs, at)| entry::sticky(frontend, secs, at)));
        elements
    }
}

/// Bytes of a slot's number.
const SLOT: usize = 4;

fn set(flag: &mut bool) -> bool {
    *flag = true;
    true
}

/// The network from the source at the end of the key to that at the end of its last key.
fn range(family: Family, rest: &[u8], placed: &Placed) -> Option<IpNet> {
    let first = read_address(family, rest)?;
    let last = placed.key_end.as_ref().map_or(Some(first), |key_end| {
        let key_end: &[u8] = key_end;
        let at = placed.key.len().checked_sub(rest.len())?;
        // Nobody but us writes here; a range over frontends would not be understood.
        (placed.key[..at] == *key_end.get(..at)?).then_some(())?;
        read_address(family, key_end.get(at..)?)
    })?;
    net_between(first, last)
}
