// SPDX-License-Identifier: Apache-2.0

//! Which endpoint stands in which slot, and how many slots a balancing chain draws from.
//!
//! A chain draws a number below N, its *size class*, and looks the frontend and the number up. N is a power of
//! two, so that a frontend changes its chain only when its pool outgrows or underfills the class; slots beyond
//! the pool are empty, and a draw that misses is repeated by the next rule. After [`tries`] draws a last rule
//! draws below N/2, where every slot is filled. Where endpoints take turns, N is their number.

use std::net::IpAddr;

use model::{Backend, Family};

use super::program::{Bytes, address_len, read_address};

/// The endpoints of a pool, the one in slot 0 first; one that shall get more stands in several. Packed, since a node
/// may have 100,000 of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slots {
    family: Family,
    packed: Box<[u8]>,
}

impl Slots {
    /// Backends of another family are left out; there are none in a Plan.
    pub(super) fn new(family: Family, endpoints: impl IntoIterator<Item = (IpAddr, u16)>) -> Slots {
        let endpoints = endpoints.into_iter();
        let (least, most) = endpoints.size_hint();
        let mut packed = Vec::with_capacity(most.unwrap_or(least) * stride(family));
        for (address, port) in endpoints {
            match (family, address) {
                (Family::V4, IpAddr::V4(ip)) => packed.extend(ip.octets()),
                (Family::V6, IpAddr::V6(ip)) => packed.extend(ip.octets()),
                _ => continue,
            }
            packed.extend(port.to_be_bytes());
        }
        Slots { family, packed: packed.into() }
    }

    pub(super) fn len(&self) -> usize {
        self.packed.len() / stride(self.family)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.packed.is_empty()
    }

    /// Every endpoint as packed bytes: equal bytes, equal endpoint.
    pub(super) fn packed(&self) -> impl ExactSizeIterator<Item = &[u8]> + Clone {
        self.packed.chunks_exact(stride(self.family))
    }

    pub(super) fn endpoints(&self) -> impl Iterator<Item = (IpAddr, u16)> + '_ {
        self.packed().filter_map(|packed| unpack(self.family, packed))
    }
}

/// Gives every wanted backend as many slots as its share, all below their sum, and moves as few as possible: whoever
/// has such a slot keeps it, and the holes are filled with the others.
///
/// `wanted` is sorted by address and port and without duplicates; `shares` has one number for each of them.
pub(super) fn assign(family: Family, previous: Option<&Slots>, wanted: &[Backend], shares: &[u32]) -> Slots {
    let mut left = shares.to_vec();
    let total: u32 = left.iter().sum();
    let mut slots = vec![None; total as usize];
    if let Some(previous) = previous {
        for (slot, endpoint) in slots.iter_mut().zip(previous.endpoints()) {
            let found = wanted.binary_search_by_key(&endpoint, |backend| (backend.address, backend.port));
            // An endpoint that stands in more slots than it should keeps the first ones.
            if let Some(at) = found.ok().filter(|at| left[*at] > 0) {
                left[at] -= 1;
                *slot = Some(at);
            }
        }
    }
    // One of each before a second of any, so that turns do not come in a row.
    let most = left.iter().copied().max().unwrap_or(0);
    let mut others = (0..most)
        .flat_map(|round| left.iter().enumerate().filter(move |(_, left)| **left > round).map(|(at, _)| at));
    let order = slots.into_iter().filter_map(|slot| slot.or_else(|| others.next()));
    Slots::new(family, order.map(|at| (wanted[at].address, wanted[at].port)))
}

/// How many slots each backend gets: one, or if they are weighed, in proportion to their weights.
///
/// The proportion is exact as long as the weights, divided by what they have in common, need no more slots than
/// [`room`]; beyond that it is rounded to so many, and nobody gets less than one.
pub(super) fn shares(wanted: &[Backend], are_weighed: bool) -> Vec<u32> {
    let first = wanted.first().map_or(1, |backend| backend.weight);
    if !are_weighed || wanted.iter().all(|backend| backend.weight == first) {
        return vec![1; wanted.len()];
    }
    let common = wanted.iter().fold(0, |common, backend| greatest_common_divisor(common, backend.weight));
    let weights: Vec<u64> =
        wanted.iter().map(|backend| u64::from(backend.weight / common.max(1)).max(1)).collect();
    let total: u64 = weights.iter().sum();
    let room = room(wanted.len());
    if total <= room {
        return weights.into_iter().map(|weight| weight as u32).collect();
    }
    let mut shares: Vec<u32> = weights.iter().map(|weight| (weight * room / total).max(1) as u32).collect();
    // What rounding down left over goes to those that lost most by it.
    let given: u64 = shares.iter().map(|share| u64::from(*share)).sum();
    let mut losers: Vec<usize> = (0..wanted.len()).collect();
    losers.sort_by_key(|at| std::cmp::Reverse(weights[*at] * room % total));
    for at in losers.into_iter().take(room.saturating_sub(given) as usize) {
        shares[at] += 1;
    }
    shares
}

/// As many slots as a weighted pool of so many backends may fill, about: each is an element in the kernel.
fn room(backends: usize) -> u64 {
    (backends as u64 * 4).max(256)
}

fn greatest_common_divisor(a: u16, b: u16) -> u16 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// How a slot is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Draw {
    Random(Class),
    /// By the client's address, or by its port too: always the same slot for the same client. A slot that is empty
    /// is followed by one that another hash finds.
    Hash {
        class: Class,
        port: bool,
    },
    /// One after the other.
    Turns,
}

impl Draw {
    /// It can be made of so many slots.
    pub(super) fn fits(self, count: usize) -> bool {
        self.class().is_none_or(|class| class.fits(count))
    }

    /// `None` where the number of slots is taken as it is.
    pub(super) fn class(self) -> Option<Class> {
        match self {
            Draw::Random(class) | Draw::Hash { class, .. } => Some(class),
            Draw::Turns => None,
        }
    }
}

/// A size class: the chain draws below 2 to the power of this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Class(u8);

impl Class {
    /// The class for a pool of `count`, never 0. A previous class is kept as long as it fits, so that a pool
    /// that goes back and forth by one (a rolling update) does not change its chain each time.
    pub(super) fn of(count: usize, previous: Option<Class>) -> Class {
        if let Some(previous) = previous.filter(|class| class.fits(count)) {
            return previous;
        }
        Class(count.max(1).next_power_of_two().trailing_zeros() as u8)
    }

    /// The classes that nearly all pools have.
    pub(super) fn usual() -> impl Iterator<Item = Class> {
        (0..=8).map(Class)
    }

    /// The class with this many slots, if there is one.
    pub(super) fn of_size(size: u32) -> Option<Class> {
        size.is_power_of_two().then(|| Class(size.trailing_zeros() as u8))
    }

    /// Between half full and full. At exactly half the draw is still uniform, since the last rule is.
    pub(super) fn fits(self, count: usize) -> bool {
        count >= self.last_draw() as usize && count <= self.size() as usize
    }

    /// The number of slots.
    pub(super) fn size(self) -> u32 {
        1 << self.0
    }

    /// What the last rule draws below. Every one of these slots is filled.
    pub(super) fn last_draw(self) -> u32 {
        (self.size() / 2).max(1)
    }

    /// How often a draw over all slots is tried before the last rule.
    ///
    /// With all but the emptiest pool in mind, N/2 + 1 endpoints, a draw misses with probability 1/2 - 1/N. What
    /// is left after k draws favours the lower half, so k is chosen to leave less than half a percent.
    pub(super) fn tries(self) -> u32 {
        let miss = 0.5 - 1.0 / f64::from(self.size());
        (1..).find(|tries| miss.max(0.0).powi(*tries as i32) < 0.005).unwrap_or(1)
    }
}

/// An endpoint as a map's value.
pub(super) fn value(family: Family, packed: &[u8]) -> Bytes {
    let (address, port) = packed.split_at(address_len(family).min(packed.len()));
    Bytes::EMPTY.field(address).field(port)
}

/// The reverse of [`value`]: packed, if it is an endpoint at all.
pub(super) fn pack(family: Family, value: &[u8]) -> Option<&[u8]> {
    let is_endpoint = value.len() == address_len(family) + 4;
    value.strip_suffix(&[0, 0]).filter(|_| is_endpoint)
}

/// What packed bytes say.
pub(super) fn unpack(family: Family, packed: &[u8]) -> Option<(IpAddr, u16)> {
    let port = packed.get(address_len(family)..)?;
    Some((read_address(family, packed)?, u16::from_be_bytes(port.try_into().ok()?)))
}

/// Bytes of a packed endpoint.
pub(super) fn stride(family: Family) -> usize {
    address_len(family) + 2
}
