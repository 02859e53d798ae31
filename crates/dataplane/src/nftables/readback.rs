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
    entry::{Entry, Mapped, Placed, Refusal, Target},
    holdings::{Held, Holdings},
    layout::{self, Container, Kind, Side, Space},
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

/// The elements of one frontend, as far as they are understood.
#[derive(Debug, Default)]
struct Gathered {
    kinds: [Option<Kind>; 2],
    /// Slot and packed endpoint.
    slots: [Vec<(u32, Box<[u8]>)>; 2],
    rejected: bool,
    dropped: bool,
    firewalled: bool,
    sources: Vec<IpNet>,
    /// Timeout and packed endpoint.
    sticky: Vec<(u32, Box<[u8]>)>,
    /// The rest.
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
                if !gathered.take(self.family, &placed, rest) {
                    gathered.odd.push(placed);
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
    fn forget(&mut self, container: Container) {
        self.odd.retain(|placed| placed.container != container);
        match container {
            Container::Verdicts(_, side) => self.kinds[side as usize] = None,
            Container::Endpoints(_, side) => self.slots[side as usize].clear(),
            Container::Reject(_) => self.rejected = false,
            Container::Drop(_) => self.dropped = false,
            Container::Firewalled => self.firewalled = false,
            Container::SourceRanges => self.sources.clear(),
            Container::Sticky(_, secs) => self.sticky.retain(|(of, _)| *of != secs),
            Container::ClusterIps
            | Container::Hairpin
            | Container::NodePortAddresses
            | Container::Affinity => (),
        }
    }

    /// Takes an element whose key goes on with `rest` behind the frontend; `false` if it is not understood.
    fn take(&mut self, family: Family, placed: &Placed, rest: &[u8]) -> bool {
        match (placed.container, placed.value) {
            (Container::Verdicts(space, side), Mapped::Chain(kind)) if rest.is_empty() => {
                let fits = kind.space == space && kind.side == side;
                self.kinds[side as usize] = fits.then_some(kind);
                fits
            }
            (Container::Endpoints(_, side), Mapped::Endpoint(value)) => {
                let slot = <[u8; 4]>::try_from(rest).ok().map(u32::from_ne_bytes);
                let packed = slots::pack(family, &value);
                let understood = slot.zip(packed).map(|(slot, packed)| (slot, packed.into_boxed_slice()));
                self.slots[side as usize].extend(understood.clone());
                understood.is_some()
            }
            (Container::Reject(_), _) if rest.is_empty() => replace(&mut self.rejected),
            (Container::Drop(_), _) if rest.is_empty() => replace(&mut self.dropped),
            (Container::Firewalled, _) if rest.is_empty() => replace(&mut self.firewalled),
            (Container::SourceRanges, _) => {
                let net = range(family, rest, placed);
                self.sources.extend(net);
                net.is_some()
            }
            (Container::Sticky(_, secs), _) => {
                let packed = slots::pack(family, rest);
                self.sticky.extend(packed.clone().map(|packed| (secs, packed.into_boxed_slice())));
                packed.is_some()
            }
            _ => false,
        }
    }

    fn held(self, frontend: &Frontend) -> Held {
        match self.entry(frontend.family()) {
            Some(entry) => Held::Entry(entry),
            None => Held::Irregular(self.elements(frontend)),
        }
    }

    /// The entry that these elements are exactly those of.
    fn entry(&self, family: Family) -> Option<Entry> {
        let kinds = self.kinds.iter().flatten();
        let sticky = kinds.clone().any(|kind| kind.sticky);
        let regular = self.odd.is_empty()
            && !(self.rejected && self.dropped)
            && (self.firewalled || self.sources.is_empty())
            && kinds.clone().all(|kind| kind.sticky == sticky);
        if !regular {
            return None;
        }
        let mut sources = self.sources.clone();
        sources.sort();
        let entry = Entry {
            everyone: self.target(family, Side::Everyone)?,
            inside: self.target(family, Side::Inside)?,
            refusal: match (self.rejected, self.dropped) {
                (true, _) => Some(Refusal::Reject),
                (_, true) => Some(Refusal::Drop),
                _ => None,
            },
            sticky_secs: self.sticky.first().and_then(|(secs, _)| NonZeroU32::new(*secs)),
            sources: self.firewalled.then(|| sources.into()),
        };
        let mut pairs: Vec<&[u8]> = self.sticky.iter().map(|(_, packed)| &**packed).collect();
        pairs.sort_unstable();
        let one_timeout = self.sticky.windows(2).all(|two| two[0].0 == two[1].0);
        let sticks =
            one_timeout && entry.sticky_endpoints() == pairs && entry.sticky_secs.is_some() == sticky;
        sticks.then_some(entry)
    }

    /// The target on one side, if there is none or a complete one.
    #[expect(clippy::option_option, reason = "whether it is understood, and whether there is one")]
    fn target(&self, family: Family, side: Side) -> Option<Option<Target>> {
        let mut slots: Vec<&(u32, Box<[u8]>)> = self.slots[side as usize].iter().collect();
        let Some(kind) = self.kinds[side as usize] else {
            return slots.is_empty().then_some(None);
        };
        slots.sort_unstable();
        let complete = slots.iter().enumerate().all(|(at, (slot, _))| *slot as usize == at);
        if !complete || !kind.class.fits(slots.len()) {
            return None;
        }
        let endpoints = slots.iter().filter_map(|(_, packed)| slots::unpack(family, packed));
        let slots = Slots::new(family, endpoints);
        Some(Some(Target { mark: kind.mark, class: kind.class, slots }))
    }

    /// All of them, one by one.
    fn elements(self, frontend: &Frontend) -> Vec<Placed> {
        let space = Space::of(frontend);
        let key = layout::key(frontend);
        let mut elements = self.odd;
        for side in Side::BOTH {
            let kind = self.kinds[side as usize];
            elements.extend(kind.map(|kind| super::entry::verdict(key, kind)));
            let slots = self.slots[side as usize].iter();
            elements
                .extend(slots.map(|(slot, at)| super::entry::endpoint(frontend, side, *slot as usize, at)));
        }
        let flags = [
            (self.rejected, Container::Reject(space)),
            (self.dropped, Container::Drop(space)),
            (self.firewalled, Container::Firewalled),
        ];
        elements.extend(flags.iter().filter(|(is, _)| *is).map(|(_, set)| Placed::new(*set, key)));
        elements.extend(self.sources.iter().map(|net| super::entry::source(key, net)));
        let sticky = self.sticky.iter().filter_map(|(secs, at)| Some((NonZeroU32::new(*secs)?, at)));
        elements.extend(sticky.map(|(secs, at)| super::entry::sticky(frontend, secs, at)));
        elements
    }
}

fn replace(flag: &mut bool) -> bool {
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
