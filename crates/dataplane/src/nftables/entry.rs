// SPDX-License-Identifier: Apache-2.0

//! What one frontend puts into the table, in a form small enough to be kept for every one of them.

use std::{num::NonZeroU32, sync::Arc};

use ipnet::IpNet;
use model::Frontend;

use super::{
    layout::{self, Container, Kind, Mark, Side, Space, Way},
    program::{Bytes, Element, Value},
    slots::{self, Draw, Slots},
};

/// See the module. Equal entries are equal in the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    /// Where traffic goes; from outside only, if `inside` is given too.
    pub(super) everyone: Option<Target>,
    pub(super) inside: Option<Target>,
    /// What becomes of traffic that has no target.
    pub(super) refusal: Option<Refusal>,
    /// Clients are remembered for so long.
    pub(super) sticky_secs: Option<NonZeroU32>,
    /// Who may connect at all.
    pub(super) sources: Option<Arc<[IpNet]>>,
}

/// Endpoints, and the chain that draws among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) mark: Mark,
    pub(super) draw: Draw,
    pub(super) slots: Slots,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    Reject,
    Drop,
}

/// One element and where it goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) container: Container,
    pub(super) key: Bytes,
    /// The last key of an interval. Boxed, since few elements have one.
    pub(super) key_end: Option<Box<Bytes>>,
    pub(super) value: Mapped,
}

/// What an element of ours is mapped to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mapped {
    Nothing,
    Chain(Kind),
    Endpoint(Bytes),
    /// Read from the kernel, and nothing we would write.
    Foreign,
}

impl Entry {
    /// Draws by chance what it would draw by a hash, from the same slots.
    pub(super) fn draw_at_random(&mut self) {
        for target in [&mut self.everyone, &mut self.inside].into_iter().flatten() {
            if let Draw::Hash { class, .. } = target.draw {
                target.draw = Draw::Random(class);
            }
        }
    }
}

impl Placed {
    pub(super) fn new(container: Container, key: Bytes) -> Placed {
        Placed { container, key, key_end: None, value: Mapped::Nothing }
    }

    /// The same in nft's nouns.
    pub(super) fn element(&self) -> Element {
        let value = match self.value {
            Mapped::Nothing => Value::None,
            Mapped::Chain(kind) => Value::Goto(kind.name()),
            Mapped::Endpoint(bytes) => Value::Bytes(bytes),
            Mapped::Foreign => Value::Foreign(String::new()),
        };
        Element { key_end: self.key_end.as_deref().copied(), ..Element::new(value) }
    }
}

impl Entry {
    pub(super) fn target(&self, side: Side) -> Option<&Target> {
        match side {
            Side::Everyone => self.everyone.as_ref(),
            Side::Inside => self.inside.as_ref(),
        }
    }

    /// The chain on this side.
    pub(super) fn kind(&self, frontend: &Frontend, side: Side) -> Option<Kind> {
        let target = self.target(side)?;
        let way = Way::of(target.draw, frontend, target.slots.len());
        let sticky = self.sticky_secs.is_some();
        Some(Kind { space: Space::of(frontend), side, mark: target.mark, sticky, way })
    }

    /// The endpoints whose clients are remembered, on whichever side; sorted, packed. Empty without affinity.
    pub(super) fn sticky_endpoints(&self) -> Vec<&[u8]> {
        if self.sticky_secs.is_none() {
            return Vec::new();
        }
        let targets = Side::BOTH.into_iter().filter_map(|side| self.target(side));
        let mut endpoints: Vec<&[u8]> = targets.flat_map(|target| target.slots.packed()).collect();
        endpoints.sort_unstable();
        endpoints.dedup();
        endpoints
    }

    /// Every element this entry stands for.
    pub(super) fn elements(&self, frontend: &Frontend) -> Vec<Placed> {
        let space = Space::of(frontend);
        let key = layout::key(frontend);
        let mut elements = Vec::new();
        for side in Side::BOTH {
            elements.extend(self.kind(frontend, side).map(|kind| verdict(key, kind)));
            let Some(target) = self.target(side) else { continue };
            let container = layout::endpoints(target.draw, frontend, side);
            let slots = target.slots.packed().enumerate();
            elements.extend(slots.map(|(slot, at)| endpoint(frontend, container, slot, at)));
        }
        elements.extend(self.refusal.map(|refusal| Placed::new(refusal.container(space), key)));
        if let Some(secs) = self.sticky_secs {
            let endpoints = self.sticky_endpoints();
            elements.extend(endpoints.iter().map(|endpoint| sticky(frontend, secs, endpoint)));
        }
        if let Some(nets) = &self.sources {
            elements.push(Placed::new(Container::Firewalled, key));
            elements.extend(nets.iter().map(|net| source(key, net)));
        }
        elements
    }
}

impl Refusal {
    pub(super) fn container(self, space: Space) -> Container {
        match self {
            Refusal::Reject => Container::Reject(space),
            Refusal::Drop => Container::Drop(space),
        }
    }
}

pub(super) fn verdict(key: Bytes, kind: Kind) -> Placed {
    let container = Container::Verdicts(kind.space, kind.side);
    Placed { value: Mapped::Chain(kind), ..Placed::new(container, key) }
}

/// The endpoint, packed, in a slot of one of the maps of endpoints.
pub(super) fn endpoint(frontend: &Frontend, container: Container, slot: usize, packed: &[u8]) -> Placed {
    let key = layout::key(frontend).number(slot as u32);
    let value = Mapped::Endpoint(slots::value(frontend.family(), packed));
    Placed { value, ..Placed::new(container, key) }
}

/// A frontend and one of its endpoints, packed.
pub(super) fn sticky(frontend: &Frontend, secs: NonZeroU32, packed: &[u8]) -> Placed {
    let container = Container::Sticky(Space::of(frontend), secs.get());
    let endpoint = slots::value(frontend.family(), packed);
    let (address, port) = endpoint.split_at(endpoint.len() - 4);
    Placed::new(container, layout::key(frontend).field(address).field(port))
}

/// A frontend, by its key, and who may connect to it.
pub(super) fn source(key: Bytes, net: &IpNet) -> Placed {
    let key_end = Some(Box::new(key.address(net.broadcast())));
    Placed { key_end, ..Placed::new(Container::SourceRanges, key.address(net.network())) }
}
