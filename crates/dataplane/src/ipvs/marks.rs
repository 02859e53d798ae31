// SPDX-License-Identifier: Apache-2.0

//! Marks of traffic from inside that has a virtual server of its own.
//!
//! ```text
//!   13      12       11       10 ... 0
//!   always  inside   never    number of the frontend
//! ```
//!
//! The kernel looks for a virtual server by all bits of the mark. So nothing else may be in it when IPVS sees the packet;
//! whether it is masqueraded is told by bits of its own, and done after IPVS. Where the bit for masquerading is among
//! these, ours are sixteen bits further up.

use hashbrown::{HashMap, HashSet};
use model::{Frontend, Masquerade};

const INSIDE: u32 = 1 << 12;
const ALWAYS: u32 = 1 << 13;
const NEVER: u32 = 1 << 11;
/// Never all 0 in a mark, unless ours are further up.
pub(crate) const NUMBERS: u32 = NEVER - 1;
/// So many frontends can have a mark. Each has endpoints on this node, so that there are not many.
pub(super) const MOST: usize = NUMBERS as usize;

fn shift(masquerade: u32) -> u32 {
    if masquerade <= ALWAYS { 16 } else { 0 }
}

/// The mark of a frontend. `masquerade` is the bit that asks for masquerading.
pub(super) fn of(number: u16, when: Masquerade, masquerade: u32) -> u32 {
    let class = match when {
        Masquerade::Never => NEVER,
        Masquerade::OffPods => 0,
        Masquerade::Always => ALWAYS,
    };
    (u32::from(number) & NUMBERS | class | INSIDE) << shift(masquerade)
}

/// The number in a mark, if it is one of ours.
pub(super) fn number(mark: u32, masquerade: u32) -> Option<u16> {
    let bits = mark >> shift(masquerade);
    let is_ours = bits & INSIDE != 0 && bits < (ALWAYS << 1) && (bits << shift(masquerade)) == mark;
    u16::try_from(bits & NUMBERS).ok().filter(|number| is_ours && *number != 0)
}

/// The bits that rules look at.
pub(super) struct Bits {
    pub(super) inside: u32,
    pub(super) always: u32,
    pub(super) never: u32,
}

pub(super) fn bits(masquerade: u32) -> Bits {
    let shift = shift(masquerade);
    Bits { inside: INSIDE << shift, always: ALWAYS << shift, never: NEVER << shift }
}

/// Who has which number.
#[derive(Clone, Debug, Default)]
pub(super) struct Marks {
    numbers: HashMap<Frontend, u16>,
    taken: HashSet<u16>,
}

impl Marks {
    /// Takes a number that the kernel already has for this frontend, if it is free.
    pub(super) fn adopt(&mut self, frontend: Frontend, number: u16) {
        if self.taken.insert(number) {
            self.numbers.insert(frontend, number);
        }
    }

    /// The frontend's number, a new one if need be; `None` if all are taken.
    pub(super) fn number(&mut self, frontend: &Frontend) -> Option<u16> {
        if let Some(number) = self.numbers.get(frontend) {
            return Some(*number);
        }
        let free =
            (1..=u16::try_from(NUMBERS).unwrap_or(u16::MAX)).find(|number| !self.taken.contains(number))?;
        self.adopt(*frontend, free);
        Some(free)
    }

    pub(super) fn release(&mut self, frontend: &Frontend) {
        if let Some(number) = self.numbers.remove(frontend) {
            self.taken.remove(&number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_never_has_the_bit_for_masquerading() {
        for bit in 0..32 {
            let masquerade = 1 << bit;
            for when in [Masquerade::Never, Masquerade::OffPods, Masquerade::Always] {
                for number in [1, 2047] {
                    let mark = of(number, when, masquerade);
                    assert_eq!(mark & masquerade, 0, "bit {bit}");
                    assert_eq!(super::number(mark, masquerade), Some(number));
                    assert_ne!(mark & bits(masquerade).inside, 0);
                }
            }
        }
        assert_eq!(number(0x1000, 1 << 14), None);
        assert_eq!(number(0x0801_1001, 1 << 14), None);
    }
}
