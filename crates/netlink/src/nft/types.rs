// SPDX-License-Identifier: Apache-2.0

//! The objects of nf_tables, as one asks for them and as the kernel lists them.

use std::time::Duration;

use super::expr::Expr;
use crate::Family;

/// Names a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TableRef<'a> {
    /// Its family.
    pub family: Family,
    /// Its name.
    pub name: &'a str,
}

/// A table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Its family.
    pub family: Family,
    /// Its name.
    pub name: String,
    /// Its chains are not hooked in, as after `nft add table ip x '{ flags dormant; }'`.
    pub dormant: bool,
    /// Nobody but the socket that made it may write to it, and it goes with that socket.
    pub owned: bool,
    /// A remark, shown by `nft list`.
    pub comment: Option<String>,
}

impl Table {
    /// A plain table.
    pub fn new(family: Family, name: impl Into<String>) -> Table {
        Table { family, name: name.into(), dormant: false, owned: false, comment: None }
    }
}

/// A chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Its name.
    pub name: String,
    /// Where packets enter it; `None` for a chain that is only jumped to.
    pub base: Option<Base>,
    /// A remark, shown by `nft list`.
    pub comment: Option<String>,
}

impl Chain {
    /// A chain that is only jumped to.
    pub fn regular(name: impl Into<String>) -> Chain {
        Chain { name: name.into(), base: None, comment: None }
    }

    /// A chain at a hook, with policy accept.
    pub fn base(name: impl Into<String>, kind: ChainKind, hook: Hook, priority: i32) -> Chain {
        let base = Base { kind, hook, priority, policy: Policy::Accept };
        Chain { name: name.into(), base: Some(base), comment: None }
    }
}

/// What makes a chain a base chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// What its rules may do.
    pub kind: ChainKind,
    /// Where packets enter.
    pub hook: Hook,
    /// In which order among the chains of a hook; lower is earlier.
    pub priority: i32,
    /// What happens to a packet that no rule decides.
    pub policy: Policy,
}

/// The type of a base chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainKind {
    /// May look and drop.
    Filter,
    /// Sees the first packet of each flow, and may rewrite its addresses.
    Nat,
    /// At output: a changed packet is routed again.
    Route,
    /// A type this crate does not know (only when listed).
    Other,
}

/// Where in the network stack a base chain sits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Before the routing decision.
    Prerouting,
    /// For this machine.
    Input,
    /// Through this machine.
    Forward,
    /// From this machine.
    Output,
    /// On the way out.
    Postrouting,
    /// A hook this crate does not know (only when listed).
    Other(u32),
}

/// What happens to a packet that reaches the end of a base chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// It goes on.
    Accept,
    /// It is dropped.
    Drop,
}

/// A rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The chain it stands in.
    pub chain: String,
    /// What it does, in order.
    pub exprs: Vec<Expr>,
    /// A remark, shown by `nft list`. At most 253 bytes.
    pub comment: Option<String>,
}

/// A set, or a map if it has a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    /// Its name.
    pub name: String,
    /// The parts of a key, at most five. Several make a concatenation, each padded to 4 bytes in [`Element::key`].
    pub key: Vec<Field>,
    /// What a key is mapped to; `None` for a set.
    pub value: Option<Value>,
    /// Keys may be intervals.
    pub interval: bool,
    /// Rules may add elements while packets pass ([`Expr::Dynset`]).
    pub dynamic: bool,
    /// How long elements stay.
    pub lifetime: Lifetime,
    /// Each element counts the packets it matched.
    pub counter: bool,
    /// The largest number of elements. A fixed hash table of this size is faster to fill, but it is a hard limit.
    pub size: Option<u32>,
    /// A remark, shown by `nft list`.
    pub comment: Option<String>,
}

impl Set {
    /// A plain set with these keys.
    pub fn new(name: impl Into<String>, key: impl Into<Vec<Field>>) -> Set {
        Set {
            name: name.into(),
            key: key.into(),
            value: None,
            interval: false,
            dynamic: false,
            lifetime: Lifetime::Forever,
            counter: false,
            size: None,
            comment: None,
        }
    }

    /// A plain map from these keys.
    pub fn map(name: impl Into<String>, key: impl Into<Vec<Field>>, value: Value) -> Set {
        Set { value: Some(value), ..Set::new(name, key) }
    }

    /// Bytes of a key.
    pub fn key_len(&self) -> usize {
        fields_len(&self.key)
    }
}

/// How long the elements of a set stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    /// Until they are deleted.
    Forever,
    /// As each element says; for good where it says nothing.
    PerElement,
    /// This long, unless an element says otherwise. Whole seconds survive the kernel's clock ticks unchanged,
    /// fractions may not.
    Default(Duration),
}

/// What a map's keys are mapped to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// What happens to the packet.
    Verdict,
    /// A value of these parts.
    Fields(Vec<Field>),
    /// From one value to another, both inclusive, one after the other in [`ElementValue::Bytes`].
    Range(Vec<Field>),
}

/// One part of a key or value.
///
/// A plain type is enough for most. [`Typeof`] gives the expression instead; `nft list` then prints `typeof`, which
/// it needs for what has no named type, such as `numgen`. Either all parts of a key give it, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Field {
    /// By its type.
    Plain(Type),
    /// By an expression that has this type.
    Of(Typeof),
}

impl Field {
    /// The type.
    pub const fn ty(self) -> Type {
        match self {
            Field::Plain(ty) => ty,
            Field::Of(of) => of.ty(),
        }
    }
}

impl From<Type> for Field {
    fn from(ty: Type) -> Field {
        Field::Plain(ty)
    }
}

impl From<Typeof> for Field {
    fn from(of: Typeof) -> Field {
        Field::Of(of)
    }
}

/// A data type of the `nft` tool: its number there and its length in bytes. The kernel only stores the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Type {
    pub(crate) id: u8,
    pub(crate) len: u8,
}

impl Type {
    /// `ipv4_addr`
    pub const IPV4_ADDR: Type = Type { id: 7, len: 4 };
    /// `ipv6_addr`
    pub const IPV6_ADDR: Type = Type { id: 8, len: 16 };
    /// `inet_proto`
    pub const INET_PROTO: Type = Type { id: 12, len: 1 };
    /// `inet_service`: a port, in network byte order.
    pub const INET_SERVICE: Type = Type { id: 13, len: 2 };
    /// `mark`: in the byte order of the machine.
    pub const MARK: Type = Type { id: 19, len: 4 };
    /// `ifname`: padded with zeros.
    pub const IFNAME: Type = Type { id: 41, len: 16 };
    /// A 32-bit number in the byte order of the machine, such as `numgen` makes. Prints only with [`Typeof`].
    pub const INTEGER: Type = Type { id: 4, len: 4 };

    /// The address type of a family.
    pub const fn address(family: Family) -> Type {
        match family {
            Family::V4 => Type::IPV4_ADDR,
            Family::V6 => Type::IPV6_ADDR,
        }
    }

    /// Its length in bytes, without padding.
    #[expect(clippy::len_without_is_empty, reason = "no type is empty")]
    pub const fn len(self) -> usize {
        self.len as usize
    }

    /// Its length in a concatenation.
    pub const fn padded_len(self) -> usize {
        self.len().next_multiple_of(4)
    }

    /// Whether values are in the byte order of the machine rather than of the network.
    pub const fn is_host_endian(self) -> bool {
        self.id == Type::MARK.id || self.id == Type::INTEGER.id || self.id == Type::IFNAME.id
    }
}

/// An expression of the `nft` language whose type a key or value has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Typeof {
    /// `ip saddr` or `ip6 saddr`
    Saddr(Family),
    /// `ip daddr` or `ip6 daddr`
    Daddr(Family),
    /// `meta l4proto`
    L4Proto,
    /// `meta mark`
    Mark,
    /// `iifname`
    Iifname,
    /// `oifname`
    Oifname,
    /// `th sport`
    Sport,
    /// `th dport`
    Dport,
    /// `numgen random mod N`
    NumgenRandom(u32),
    /// `numgen inc mod N`
    NumgenInc(u32),
}

impl Typeof {
    /// The type the expression has.
    pub const fn ty(self) -> Type {
        match self {
            Typeof::Saddr(family) | Typeof::Daddr(family) => Type::address(family),
            Typeof::L4Proto => Type::INET_PROTO,
            Typeof::Mark => Type::MARK,
            Typeof::Iifname | Typeof::Oifname => Type::IFNAME,
            Typeof::Sport | Typeof::Dport => Type::INET_SERVICE,
            Typeof::NumgenRandom(_) | Typeof::NumgenInc(_) => Type::INTEGER,
        }
    }
}

/// One element of a set or map, borrowed: to be written, or just read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Element<'a> {
    /// The key; in a concatenation each part padded to 4 bytes. Empty for the catch-all element `*`.
    pub key: &'a [u8],
    /// The last key of an interval, in a concatenation with intervals.
    pub key_end: Option<&'a [u8]>,
    /// In an interval set of a single field: this key is the first *after* an interval.
    pub interval_end: bool,
    /// What it is mapped to.
    pub value: ElementValue<'a>,
    /// How long it stays, where that is not the set's [`Lifetime`].
    pub timeout: Option<Duration>,
    /// How long it still stays. When writing: sets the time left.
    pub expires_in: Option<Duration>,
    /// What it has counted (only when listed).
    pub counter: Option<Counter>,
    /// A remark, shown by `nft list`. At most 253 bytes.
    pub comment: Option<&'a str>,
}

impl<'a> Element<'a> {
    /// An element of a set; also what to name when deleting one.
    pub const fn key(key: &'a [u8]) -> Element<'a> {
        Element {
            key,
            key_end: None,
            interval_end: false,
            value: ElementValue::None,
            timeout: None,
            expires_in: None,
            counter: None,
            comment: None,
        }
    }

    /// An element of a map with values.
    pub const fn value(key: &'a [u8], value: &'a [u8]) -> Element<'a> {
        Element { value: ElementValue::Bytes(value), ..Element::key(key) }
    }

    /// An element of a verdict map.
    pub const fn verdict(key: &'a [u8], verdict: Verdict<&'a str>) -> Element<'a> {
        Element { value: ElementValue::Verdict(verdict), ..Element::key(key) }
    }

    /// From one key to another, both inclusive, in a concatenation with intervals.
    pub const fn range(first: &'a [u8], last: &'a [u8]) -> Element<'a> {
        Element { key_end: Some(last), ..Element::key(first) }
    }

    /// The end of an interval that an earlier element began: the first key outside. For sets of a single field.
    pub const fn interval_end(key: &'a [u8]) -> Element<'a> {
        Element { interval_end: true, ..Element::key(key) }
    }
}

/// What an element is mapped to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementValue<'a> {
    /// Nothing: an element of a set.
    None,
    /// A value; in a concatenation each part padded to 4 bytes.
    Bytes(&'a [u8]),
    /// What happens to the packet.
    Verdict(Verdict<&'a str>),
}

/// What happens to a packet. `N` is a chain's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict<N = String> {
    /// It leaves this hook's chain for the next.
    Accept,
    /// It is gone.
    Drop,
    /// On with the next rule.
    Continue,
    /// Leaves the rule.
    Break,
    /// Back to the chain that jumped here.
    Return,
    /// Into another chain, and back here at its end.
    Jump(N),
    /// Into another chain, and not back here.
    Goto(N),
    /// A verdict this crate does not know, such as `queue` (only when listed).
    Other(i32),
}

impl<N: AsRef<str>> Verdict<N> {
    /// The same with a borrowed name.
    pub fn as_ref(&self) -> Verdict<&str> {
        self.map(|name| name.as_ref())
    }
}

impl<N> Verdict<N> {
    fn map<'a, M>(&'a self, name: impl FnOnce(&'a N) -> M) -> Verdict<M> {
        match self {
            Verdict::Accept => Verdict::Accept,
            Verdict::Drop => Verdict::Drop,
            Verdict::Continue => Verdict::Continue,
            Verdict::Break => Verdict::Break,
            Verdict::Return => Verdict::Return,
            Verdict::Jump(n) => Verdict::Jump(name(n)),
            Verdict::Goto(n) => Verdict::Goto(name(n)),
            Verdict::Other(code) => Verdict::Other(*code),
        }
    }
}

impl Verdict<&str> {
    /// The same with a name of its own.
    pub fn to_owned(&self) -> Verdict<String> {
        self.map(|name| (*name).to_owned())
    }
}

/// What a counter has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Counter {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}

/// An object as the kernel lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed<T> {
    /// The kernel's number for it. Never reused within a table.
    pub handle: u64,
    /// The object.
    pub object: T,
}

/// A rule as the kernel lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedRule {
    /// The kernel's number for it. Never reused within a table.
    pub handle: u64,
    /// The rule.
    pub rule: Rule,
    /// What its [`Expr::Counter`]s have counted, in order.
    pub counters: Vec<Counter>,
}

pub(crate) fn fields_len(fields: &[Field]) -> usize {
    match fields {
        [field] => field.ty().len(),
        fields => fields.iter().map(|field| field.ty().padded_len()).sum(),
    }
}
