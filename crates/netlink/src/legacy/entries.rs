// SPDX-License-Identifier: Apache-2.0

//! The rules of a table of ip_tables, as far as it takes to tell one list of them from another.
//!
//! ```text
//!   entry: addresses, interfaces, protocol | offsets of target and next entry | counters | matches | target
//!   chain: a head, which is an entry with the target ERROR and the chain's name | rules | a RETURN
//! ```
//!
//! The built-in chains come first and have a policy in place of head and RETURN. A jump is the offset of the first rule
//! of its chain.

use super::Shape;
use crate::Family;

/// What is done with a packet for which a built-in chain has no rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    Accept,
    Drop,
}

/// A table as it was when it was read. Nothing in it can panic whoever looks at it.
pub struct Entries {
    family: Family,
    shape: Shape,
    bytes: Vec<u8>,
    /// What of `bytes` comes before the entries.
    head: usize,
}

/// The built-in chains by the number of their hook.
const BUILT_IN: [&str; 5] = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];
/// The size of `struct xt_entry_target`, after which its own bytes follow.
const TARGET_HEAD: usize = 32;
/// A chain's name in its head: the kernel's limit.
const LONGEST_NAME: usize = 30;

/// Where things are in an entry.
struct Layout {
    /// Addresses, interfaces and protocol end here.
    packet_end: usize,
    /// The offset of the target, then that of the next entry, two bytes each.
    offsets: usize,
    /// Matches begin here, after the counters.
    matches: usize,
}

const V4: Layout = Layout { packet_end: 84, offsets: 88, matches: 112 };
const V6: Layout = Layout { packet_end: 136, offsets: 140, matches: 168 };

/// One entry.
struct Entry<'a> {
    /// From the beginning of all.
    offset: u32,
    bytes: &'a [u8],
    layout: &'static Layout,
    target: usize,
}

impl<'a> Entry<'a> {
    fn end(&self) -> u32 {
        self.offset.saturating_add(self.bytes.len() as u32)
    }

    /// The chain that begins here.
    fn chain(&self) -> Option<&'a str> {
        let name = self.bytes.get(self.target + 2..)?;
        let own = self.bytes.get(self.target + TARGET_HEAD..)?;
        name.starts_with(b"ERROR\0").then(|| text(own))
    }

    /// What the standard target does; `None` if it has another.
    fn verdict(&self) -> Option<i32> {
        let is_standard = self.bytes.get(self.target + 2)? == &0;
        let own = self.bytes.get(self.target + TARGET_HEAD..)?.first_chunk()?;
        is_standard.then(|| i32::from_ne_bytes(*own))
    }

    /// Where the standard target goes; `None` if it goes nowhere but on.
    fn jump(&self) -> Option<u32> {
        let to = u32::try_from(self.verdict()?).ok()?;
        (to != self.end()).then_some(to)
    }

    /// All that was asked for, and none of what was counted.
    fn digest(&self, jump: Option<u64>) -> u64 {
        let mut digest = Digest(1);
        digest.add(&self.bytes[..self.layout.packet_end.min(self.bytes.len())]);
        let rest = self.layout.matches.min(self.bytes.len());
        match jump {
            // Where the chain is changes with every rule before it.
            Some(chain) => {
                digest.add(&self.bytes[rest..self.target.clamp(rest, self.bytes.len())]);
                digest.word(chain);
            }
            None if self.verdict().is_some_and(|verdict| verdict >= 0) => {
                digest.add(&self.bytes[rest..self.target.clamp(rest, self.bytes.len())]);
            }
            None => digest.add(&self.bytes[rest..]),
        }
        digest.0
    }
}

/// The text before the first zero; empty if it is none.
fn text(bytes: &[u8]) -> &str {
    let bytes = &bytes[..bytes.len().min(LONGEST_NAME)];
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    std::str::from_utf8(&bytes[..end]).unwrap_or_default()
}

/// Fast and short. Nobody is to be kept from finding two tables with the same one: who may write a table may do worse.
struct Digest(u64);

impl Digest {
    fn add(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks();
        words.iter().for_each(|word| self.word(u64::from_ne_bytes(*word)));
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.word(u64::from_ne_bytes(last) ^ (bytes.len() as u64) << 56);
    }

    fn word(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn of(name: &str) -> u64 {
        let mut digest = Digest(1);
        digest.add(name.as_bytes());
        digest.0
    }
}

impl Entries {
    pub(super) fn new(family: Family, shape: Shape, bytes: Vec<u8>, head: usize) -> Entries {
        Entries { family, shape, bytes, head }
    }

    /// The shape it had.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The chains that are not built in.
    pub fn chains(&self) -> impl Iterator<Item = &str> {
        // The last head is none: it ends the table.
        self.iter().filter(|entry| entry.end() < self.shape.size).filter_map(|entry| entry.chain())
    }

    /// The policy of a built-in chain, if the table has it.
    pub fn policy(&self, chain: &str) -> Option<Policy> {
        let hook = BUILT_IN.iter().position(|name| *name == chain)?;
        let at = self.shape.hooks[1][hook];
        let entry = self.iter().find(|entry| entry.offset == at && self.has_hook(hook))?;
        // -1 less the kernel's number.
        match entry.verdict()? {
            -1 => Some(Policy::Drop),
            -2 => Some(Policy::Accept),
            _ => None,
        }
    }

    /// Visits each of these chains with a number for each of its rules, and others that have rules which lead to one of
    /// them, with a number for each of those. A number changes when the rule does, and not when packets are counted or
    /// when chains move within the table.
    pub fn each_chain(&self, is_ours: impl Fn(&str) -> bool, mut visit: impl FnMut(&str, &[u64])) {
        // The first rule of each chain of ours, in the order of the table.
        let mut ours: Vec<(u32, u64)> = Vec::new();
        for entry in self.iter() {
            if let Some(name) = entry.chain().filter(|name| is_ours(name)) {
                ours.push((entry.end(), Digest::of(name)));
            }
        }
        let find = |at: u32| {
            let place = ours.binary_search_by_key(&at, |(first, _)| *first).ok()?;
            Some(ours[place].1)
        };
        let mut end = |place: &mut Place<'_>| {
            if place.is_ours || !place.rules.is_empty() {
                visit(place.name, &place.rules);
            }
            place.rules.clear();
        };
        let mut place = Place::default();
        for entry in self.iter() {
            if let Some(name) = entry.chain() {
                end(&mut place);
                (place.name, place.is_ours) = (name, is_ours(name));
                continue;
            }
            if let Some(hook) = (0..BUILT_IN.len()).find(|hook| self.begins(*hook, entry.offset)) {
                end(&mut place);
                (place.name, place.is_ours) = (BUILT_IN[hook], false);
            }
            let jump = entry.jump();
            match jump.and_then(find) {
                None if !place.is_ours => {}
                // Somebody else's chain is no more than that.
                to => place.rules.push(entry.digest(to.or(jump.map(|_| 0)))),
            }
        }
        end(&mut place);
    }

    fn has_hook(&self, hook: usize) -> bool {
        self.shape.valid_hooks & (1 << hook) != 0
    }

    fn begins(&self, hook: usize, offset: u32) -> bool {
        self.has_hook(hook) && self.shape.hooks[0][hook] == offset
    }

    /// In their order; ends where one is malformed.
    fn iter(&self) -> impl Iterator<Item = Entry<'_>> {
        let layout = match self.family {
            Family::V4 => &V4,
            Family::V6 => &V6,
        };
        let all = self.bytes.get(self.head..).unwrap_or_default();
        let mut offset = 0_usize;
        std::iter::from_fn(move || {
            let rest = all.get(offset..)?;
            let number = |at: usize| Some(usize::from(u16::from_ne_bytes(*rest.get(at..)?.first_chunk()?)));
            let (target, next) = (number(layout.offsets)?, number(layout.offsets + 2)?);
            let bytes = rest.get(..next).filter(|_| next >= layout.matches)?;
            let entry = Entry { offset: u32::try_from(offset).ok()?, bytes, layout, target };
            offset += next;
            Some(entry)
        })
    }
}

/// The chain that is being walked.
#[derive(Default)]
struct Place<'a> {
    name: &'a str,
    is_ours: bool,
    rules: Vec<u64>,
}

impl std::fmt::Debug for Entries {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entries").field("shape", &self.shape).finish_non_exhaustive()
    }
}

/// Any bytes, as if the kernel had sent them.
pub(crate) fn fuzz(bytes: &[u8]) {
    for family in [Family::V4, Family::V6] {
        let size = u32::try_from(bytes.len()).unwrap_or(0);
        let shape = Shape { entries: 1, size, valid_hooks: 31, hooks: [[0, 112, 168, 152, 8]; 2] };
        let entries = Entries::new(family, shape, bytes.to_vec(), 0);
        entries.each_chain(|name| name.len() % 2 == 0, |_, _| {});
        entries.policy("FORWARD");
        entries.chains().count();
    }
}
