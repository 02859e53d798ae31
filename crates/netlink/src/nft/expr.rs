// SPDX-License-Identifier: Apache-2.0

//! The expressions a rule is made of.
//!
//! Values that compare equal mean the same to the kernel, and what the kernel lists compares equal to what was sent:
//! defaults the kernel fills in, and the two names it has for one register, do not show here.

use std::time::Duration;

use super::types::Verdict;
use crate::Family;

/// One step of a rule. It reads and writes registers, and may end the rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    /// Loads bytes of the packet.
    Payload {
        /// Which header.
        base: Header,
        /// From which byte of it.
        offset: u32,
        /// How many.
        len: u32,
        /// To where.
        dst: Reg,
    },
    /// Writes bytes of a header, and leaves its checksums as they are.
    SetPayload {
        /// Which header.
        base: Header,
        /// From which byte of it.
        offset: u32,
        /// How many.
        len: u32,
        /// From where.
        src: Reg,
    },
    /// Loads what the kernel knows about the packet.
    Meta {
        /// What.
        key: MetaKey,
        /// To where.
        dst: Reg,
    },
    /// Sets the packet's mark.
    SetMark {
        /// From where.
        src: Reg,
    },
    /// Loads what the kernel knows about the flow.
    Ct {
        /// What.
        key: CtKey,
        /// Of which direction, for addresses and ports.
        direction: Option<Direction>,
        /// To where.
        dst: Reg,
    },
    /// Goes on if the comparison holds.
    Cmp {
        /// Left side.
        src: Reg,
        /// The relation.
        op: CmpOp,
        /// Right side.
        value: Vec<u8>,
    },
    /// Goes on if the register is within the bounds, both inclusive (or outside, if inverted).
    Range {
        /// What is looked at.
        src: Reg,
        /// Outside rather than within.
        invert: bool,
        /// Lower bound.
        from: Vec<u8>,
        /// Upper bound, of the same length.
        to: Vec<u8>,
    },
    /// `dst = (src & mask) ^ xor`
    Bitwise {
        /// From where.
        src: Reg,
        /// To where.
        dst: Reg,
        /// The mask; its length is the length of the value.
        mask: Vec<u8>,
        /// The bits to flip, of the same length.
        xor: Vec<u8>,
    },
    /// Goes on if the key is in the set (or is not, if inverted). A map also loads the value.
    Lookup {
        /// The set's name.
        set: String,
        /// The key.
        key: Reg,
        /// Where a map's value goes; [`Reg::VERDICT`] for a verdict map.
        dst: Option<Reg>,
        /// Goes on if the key is *not* in the set.
        invert: bool,
    },
    /// Loads a constant.
    Immediate {
        /// To where.
        dst: Reg,
        /// The constant.
        value: Vec<u8>,
    },
    /// Decides.
    Verdict(Verdict),
    /// Makes a number below `modulus`, plus `offset`, in the byte order of the machine.
    Numgen {
        /// To where.
        dst: Reg,
        /// Random, or one after the other.
        mode: NumgenMode,
        /// How many different numbers.
        modulus: u32,
        /// The lowest number.
        offset: u32,
    },
    /// Makes a number below `modulus`, plus `offset`, from a value; in the byte order of the machine.
    Hash {
        /// What is hashed.
        src: Reg,
        /// How many bytes of it.
        len: u32,
        /// To where.
        dst: Reg,
        /// How many different numbers.
        modulus: u32,
        /// Makes the hash a different one; `None` lets the kernel choose once.
        seed: Option<u32>,
        /// The lowest number.
        offset: u32,
    },
    /// Rewrites the destination or the source of the flow.
    Nat {
        /// Which of the two.
        kind: NatKind,
        /// The family of the address.
        family: Family,
        /// The register with the address; `None` keeps it.
        address: Option<Reg>,
        /// The register with the port; `None` keeps it.
        port: Option<Reg>,
        /// How to choose.
        flags: NatFlags,
    },
    /// Rewrites the source to the address of the outgoing interface.
    Masq {
        /// How to choose the port.
        flags: NatFlags,
    },
    /// Rewrites the destination to this machine.
    Redirect {
        /// The register with the port; `None` keeps it.
        port: Option<Reg>,
        /// How to choose.
        flags: NatFlags,
    },
    /// Drops, and says so to the sender.
    Reject(Reject),
    /// Asks the routing table.
    Fib {
        /// What.
        result: FibResult,
        /// About which address, and with which restrictions.
        flags: FibFlags,
        /// To where.
        dst: Reg,
    },
    /// Adds or renews an element.
    Dynset {
        /// The set's name.
        set: String,
        /// What to do.
        op: DynsetOp,
        /// The key.
        key: Reg,
        /// The value, for a map.
        value: Option<Reg>,
        /// How long the element stays, where that is not the set's timeout. Whole seconds survive the kernel's clock
        /// ticks unchanged, fractions may not.
        timeout: Option<Duration>,
    },
    /// Sets the flow's mark.
    SetCtMark {
        /// From where.
        src: Reg,
    },
    /// Loads whether a socket that takes packets for others' addresses has this packet: 1 byte, 0 or 1. Ends the rule
    /// if there is no socket.
    TransparentSocket {
        /// To where.
        dst: Reg,
    },
    /// Gives the packet to a local socket without rewriting it. Ends the rule if there is none that may take it.
    Tproxy {
        /// The family of the address.
        family: Family,
        /// The register with the address the socket listens on.
        address: Reg,
        /// The register with its port.
        port: Reg,
    },
    /// Counts. What it has counted is no part of the rule: see [`ListedRule::counters`](super::ListedRule::counters).
    Counter,
    /// Leaves the packet out of connection tracking.
    Notrack,
    /// Something this crate does not write (only when listed).
    Unknown {
        /// The kernel's name for it.
        name: String,
    },
}

/// A register: 16 words of 4 bytes, and one for the verdict. A value takes as many words as it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reg(u8);

impl Reg {
    /// The register that decides what happens to the packet.
    pub const VERDICT: Reg = Reg(u8::MAX);

    /// The word number `index`, below 16. A register of 16 bytes begins at each fourth.
    ///
    /// # Panics
    /// If there is no such word. In a `const` that is an error of compilation.
    pub const fn word(index: u8) -> Reg {
        assert!(index < 16, "there are 16 words");
        Reg(index)
    }

    /// The register `len` bytes further on, where the next part of a concatenation goes.
    ///
    /// # Panics
    /// If there is none.
    pub const fn after(self, len: usize) -> Reg {
        let index = self.0 as usize + len.div_ceil(4);
        assert!(index < 16, "there are 16 words");
        Reg(index as u8)
    }

    /// The number in messages: the kernel lists a word that begins a 16-byte register by that register's number.
    pub(crate) const fn number(self) -> u32 {
        match self {
            Reg::VERDICT => 0,
            Reg(word) if word % 4 == 0 => word as u32 / 4 + 1,
            Reg(word) => word as u32 + 8,
        }
    }

    pub(crate) const fn from_number(number: u32) -> Option<Reg> {
        match number {
            0 => Some(Reg::VERDICT),
            1..=4 => Some(Reg((number as u8 - 1) * 4)),
            8..=23 => Some(Reg(number as u8 - 8)),
            _ => None,
        }
    }
}

/// Which header of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Header {
    /// Ethernet.
    Link,
    /// IPv4 or IPv6.
    Network,
    /// TCP, UDP, SCTP ...
    Transport,
}

/// What the kernel knows about a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MetaKey {
    /// The mark, 4 bytes in the byte order of the machine.
    Mark,
    /// The index of the interface it came in by.
    Iif,
    /// The index of the interface it goes out by.
    Oif,
    /// The name of the interface it came in by, 16 bytes.
    Iifname,
    /// The name of the interface it goes out by, 16 bytes.
    Oifname,
    /// IPv4 or IPv6, 1 byte.
    Nfproto,
    /// The transport protocol, 1 byte.
    L4Proto,
}

/// What the kernel knows about a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CtKey {
    /// New, established ...: a bit mask, see [`ct_state`].
    State,
    /// The direction of this packet.
    Direction,
    /// Whether its addresses are rewritten ...: a bit mask, see [`ct_status`].
    Status,
    /// Its mark.
    Mark,
    /// The source address, by the family of the table.
    Src,
    /// The destination address, by the family of the table.
    Dst,
    /// The transport protocol.
    Protocol,
    /// The source port.
    ProtoSrc,
    /// The destination port.
    ProtoDst,
    /// The source address, IPv4. What `nft` writes for `ct original ip saddr`.
    SrcIp,
    /// The destination address, IPv4.
    DstIp,
    /// The source address, IPv6.
    SrcIp6,
    /// The destination address, IPv6.
    DstIp6,
}

/// Bits of [`CtKey::State`], in the byte order of the machine.
pub mod ct_state {
    /// Not a valid packet of any flow.
    pub const INVALID: u32 = 1;
    /// Of a flow that was answered.
    pub const ESTABLISHED: u32 = 2;
    /// Of a flow that belongs to another.
    pub const RELATED: u32 = 4;
    /// The first of a flow.
    pub const NEW: u32 = 8;
    /// Left out of tracking.
    pub const UNTRACKED: u32 = 64;
}

/// Bits of [`CtKey::Status`] and of a flow's status, in the byte order of the machine.
pub mod ct_status {
    /// Answered.
    pub const SEEN_REPLY: u32 = 1 << 1;
    /// Will not be forgotten early.
    pub const ASSURED: u32 = 1 << 2;
    /// In the table, not just about to be.
    pub const CONFIRMED: u32 = 1 << 3;
    /// The source is rewritten.
    pub const SRC_NAT: u32 = 1 << 4;
    /// The destination is rewritten.
    pub const DST_NAT: u32 = 1 << 5;
}

/// Of a flow: as it began, or the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// As it began.
    Original,
    /// The answer.
    Reply,
}

/// A relation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CmpOp {
    /// Equal.
    Eq,
    /// Not equal.
    Neq,
    /// Less.
    Lt,
    /// Less or equal.
    Lte,
    /// Greater.
    Gt,
    /// Greater or equal.
    Gte,
}

/// How numbers are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NumgenMode {
    /// One after the other.
    Inc,
    /// At random.
    Random,
}

/// Which address is rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NatKind {
    /// The source.
    Snat,
    /// The destination.
    Dnat,
}

/// How a rewritten address or port is chosen. Flags add up by `|`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NatFlags(pub(crate) u32);

impl NatFlags {
    /// Keep what can be kept.
    pub const NONE: NatFlags = NatFlags(0);
    /// A port by a keyed hash.
    pub const RANDOM: NatFlags = NatFlags(1 << 2);
    /// The same address for the same client.
    pub const PERSISTENT: NatFlags = NatFlags(1 << 3);
    /// A port at random.
    pub const FULLY_RANDOM: NatFlags = NatFlags(1 << 4);
}

impl std::ops::BitOr for NatFlags {
    type Output = NatFlags;

    fn bitor(self, other: NatFlags) -> NatFlags {
        NatFlags(self.0 | other.0)
    }
}

/// What the sender of a refused packet is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reject {
    /// ICMP (in `ip`) or ICMPv6 (in `ip6`) unreachable, with this code. In `ip` 3 means port, in `ip6` 4 does.
    Icmp(u8),
    /// A TCP reset. Only for TCP packets.
    TcpReset,
    /// ICMP unreachable by a code that stands for either family. Only in `inet` tables.
    Icmpx(u8),
}

/// What the routing table is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FibResult {
    /// The index of the outgoing interface.
    Oif,
    /// The name of the outgoing interface.
    Oifname,
    /// Local, unicast, broadcast ...: 4 bytes in the byte order of the machine, see [`addr_type`].
    AddrType,
}

/// Answers of [`FibResult::AddrType`].
pub mod addr_type {
    /// Routed.
    pub const UNICAST: u32 = 1;
    /// An address of this machine.
    pub const LOCAL: u32 = 2;
    /// A broadcast address.
    pub const BROADCAST: u32 = 3;
}

/// About which address the routing table is asked, and with which restrictions. Flags add up by `|`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FibFlags(pub(crate) u32);

impl FibFlags {
    /// About the source.
    pub const SADDR: FibFlags = FibFlags(1);
    /// About the destination.
    pub const DADDR: FibFlags = FibFlags(1 << 1);
    /// By the packet's mark.
    pub const MARK: FibFlags = FibFlags(1 << 2);
    /// On the incoming interface only.
    pub const IIF: FibFlags = FibFlags(1 << 3);
    /// On the outgoing interface only.
    pub const OIF: FibFlags = FibFlags(1 << 4);
}

impl std::ops::BitOr for FibFlags {
    type Output = FibFlags;

    fn bitor(self, other: FibFlags) -> FibFlags {
        FibFlags(self.0 | other.0)
    }
}

/// What a rule does to a dynamic set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DynsetOp {
    /// Adds; an element that exists stays as it is.
    Add,
    /// Adds; an element that exists lives on for the full timeout.
    Update,
    /// Removes.
    Delete,
}
