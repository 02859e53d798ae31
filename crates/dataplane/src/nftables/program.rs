// SPDX-License-Identifier: Apache-2.0

//! A table in nft's own nouns: sets, chains, rules as statements, elements.
//!
//! Nothing here knows what a Service is. Three read it: `text` prints it in the language of the manual
//! page, `lower` turns rules into what the kernel takes, [`sim`](super::sim) walks packets through it.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use model::Family;
pub use netlink::nft::{Base, ChainKind, Hook, Policy, Set, Type, Typeof};

/// A table and all that is in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    pub family: Family,
    pub frame: Frame,
    /// By set, and by key within it.
    pub elements: BTreeMap<String, BTreeMap<Bytes, Element>>,
}

/// What of a table does not change with every service: sets without their elements, and chains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// In an order in which they can be created.
    pub sets: Vec<Set>,
    /// In no particular order; a chain may jump to one further down.
    pub chains: Vec<Chain>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    pub name: String,
    /// Where packets enter it; `None` for a chain that is only jumped to.
    pub base: Option<Base>,
    pub rules: Vec<Rule>,
}

impl Chain {
    pub fn regular(name: impl Into<String>, rules: Vec<Rule>) -> Chain {
        Chain { name: name.into(), base: None, rules }
    }

    /// A chain at a hook; what no rule decides goes on.
    pub fn base(name: &str, kind: ChainKind, hook: Hook, priority: i32, rules: Vec<Rule>) -> Chain {
        let base = Base { kind, hook, priority, policy: Policy::Accept };
        Chain { name: name.to_owned(), base: Some(base), rules }
    }
}

/// Statements are carried out in order, until one does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule(pub Vec<Statement>);

impl<const N: usize> From<[Statement; N]> for Rule {
    fn from(statements: [Statement; N]) -> Rule {
        Rule(statements.into())
    }
}

/// One step of a rule: a test that may end it, or an act.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Statement {
    /// `ct state new`
    IsNew,
    /// `ct status dnat`
    IsTranslated,
    /// `meta mark & BIT != 0`
    IsMarked(u32),
    /// `meta mark & BIT == 0`
    IsUnmarked(u32),
    /// `fib daddr type local` or `fib saddr type local`
    IsLocal(Field),
    /// `iifname "NAME"`, `iifname != "NAME"`; with a `*` at the end if it is only a prefix.
    Arrives {
        on: String,
        prefix: bool,
        is: bool,
    },
    /// `ip saddr NET`, `ip saddr != NET`
    Within {
        field: Field,
        net: IpNet,
        is: bool,
    },
    /// `KEY @SET`, `KEY != @SET`
    Contained {
        key: Vec<Field>,
        set: String,
        is: bool,
    },
    /// `meta mark set meta mark | BIT`
    Mark(u32),
    /// `meta mark set meta mark & ~BIT`
    Unmark(u32),
    /// `KEY vmap @MAP`
    Vmap {
        key: Vec<Field>,
        map: String,
    },
    /// `dnat ip to KEY map @MAP`: does nothing if the map has no such key.
    Dnat {
        key: Vec<Field>,
        map: String,
    },
    /// `update @MAP { KEY timeout SECONDS : VALUE }`
    Update {
        map: String,
        key: Vec<Field>,
        timeout_secs: u32,
        value: Vec<Field>,
    },
    /// `masquerade fully-random`
    Masquerade,
    /// `reject`: ICMP port unreachable.
    Reject,
    Drop,
    Jump(String),
    Goto(String),
    /// Something we never write, as it was read from the kernel.
    Foreign(String),
}

/// A value a packet has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Field {
    /// `ip saddr`
    Source,
    /// `ip daddr`
    Destination,
    /// `meta l4proto`
    Protocol,
    /// `th dport`
    Port,
    /// `ct original ip saddr`: before any translation.
    OriginalSource,
    /// `ct original ip daddr`
    OriginalDestination,
    /// `ct original proto-dst`
    OriginalPort,
    /// `numgen random mod N`: each number below N, as likely as the others.
    Random(u32),
    /// `numgen inc mod N`: the numbers below N one after the other, for as long as the rule is there.
    Turn(u32),
    /// `jhash ip saddr mod N seed S`, or of `ip saddr . th sport`: a number below N, always the same for one client.
    Hash { below: u32, seed: u32, port: bool },
}

impl Field {
    /// Bytes of it, without padding.
    pub fn len(self, family: Family) -> usize {
        match self {
            Field::Source | Field::Destination | Field::OriginalSource | Field::OriginalDestination => {
                address_len(family)
            }
            Field::Protocol => 1,
            Field::Port | Field::OriginalPort => 2,
            Field::Random(_) | Field::Turn(_) | Field::Hash { .. } => 4,
        }
    }

    /// For a field that a packet does not determine, or only by a hash: all its values are below this.
    pub fn drawn_below(self) -> Option<u32> {
        match self {
            Field::Random(below) | Field::Turn(below) | Field::Hash { below, .. } => Some(below),
            _ => None,
        }
    }
}

/// One element of a set or map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Element {
    /// In a set with intervals: the last key, inclusive.
    pub key_end: Option<Bytes>,
    pub value: Value,
    /// In a map that forgets: after how long.
    pub timeout_secs: Option<u32>,
}

impl Element {
    pub fn new(value: Value) -> Element {
        Element { key_end: None, value, timeout_secs: None }
    }
}

/// What an element is mapped to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Nothing: an element of a set.
    None,
    Bytes(Bytes),
    Goto(String),
    /// A verdict we never write, as it was read from the kernel.
    Foreign(String),
}

/// A key or value as the kernel holds it: fields one after the other, each padded with zeros to 4 bytes.
///
/// Kept in place, because a cold start makes hundreds of thousands of them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bytes {
    bytes: [u8; Bytes::MAX],
    len: u8,
}

impl Bytes {
    /// Two IPv6 addresses, a protocol and two ports.
    pub const MAX: usize = 44;

    pub const EMPTY: Bytes = Bytes { bytes: [0; Bytes::MAX], len: 0 };

    /// The same bytes; `None` if there are more than any key of ours has.
    pub fn new(bytes: &[u8]) -> Option<Bytes> {
        let mut copy = Bytes::EMPTY;
        copy.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        copy.len = bytes.len() as u8;
        Some(copy)
    }

    pub fn address(self, address: IpAddr) -> Bytes {
        match address {
            IpAddr::V4(ip) => self.field(&ip.octets()),
            IpAddr::V6(ip) => self.field(&ip.octets()),
        }
    }

    pub fn protocol(self, number: u8) -> Bytes {
        self.field(&[number])
    }

    pub fn port(self, port: u16) -> Bytes {
        self.field(&port.to_be_bytes())
    }

    /// The kernel's random numbers are in the byte order of the machine.
    pub fn number(self, number: u32) -> Bytes {
        self.field(&number.to_ne_bytes())
    }

    /// Appends one field.
    ///
    /// # Panics
    /// If there is no room. Only programs of more fields than [`Bytes::MAX`] allows get here, and no packet or
    /// kernel chooses the fields.
    pub fn field(mut self, field: &[u8]) -> Bytes {
        let at = usize::from(self.len);
        self.bytes[at..at + field.len()].copy_from_slice(field);
        self.len = (at + field.len().next_multiple_of(4)) as u8;
        self
    }
}

impl std::ops::Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for byte in &**self {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// Bytes of an address.
pub fn address_len(family: Family) -> usize {
    match family {
        Family::V4 => 4,
        Family::V6 => 16,
    }
}

/// The address at the start of `bytes`, if there are enough.
pub fn read_address(family: Family, bytes: &[u8]) -> Option<IpAddr> {
    Some(match family {
        Family::V4 => IpAddr::from(<[u8; 4]>::try_from(bytes.get(..4)?).ok()?),
        Family::V6 => IpAddr::from(<[u8; 16]>::try_from(bytes.get(..16)?).ok()?),
    })
}
