// SPDX-License-Identifier: Apache-2.0

//! Expressions from the kernel's attributes, made equal to those that were sent.
//!
//! The kernel lists what it filled in beside what it was told: flags that follow from other attributes, upper bounds
//! equal to the lower ones, zeros. What says no more than the rest is left out here; what says something this crate
//! cannot write makes the expression [`Expr::Unknown`].

use std::time::Duration;

use super::{
    decode::{self, bytes, counter_values},
    encode::{DATA_VALUE, DATA_VERDICT},
    encode_expr::{EXPR_DATA, EXPR_NAME, META_MARK, SOCKET_TRANSPARENT},
    expr::{
        CmpOp, CtKey, Direction, DynsetOp, Expr, FibFlags, FibResult, Header, MetaKey, NatFlags, NatKind,
        NumgenMode, Reg, Reject,
    },
    types::Counter,
};
use crate::{
    Family,
    codec::{Attr, Reader, each_attr},
    error::Error,
};

/// One expression; for a counter, also what it has counted.
pub(crate) fn expr(item: &Attr<'_>) -> Result<(Expr, Option<Counter>), Error> {
    let (name, arguments) = parts(item)?;
    let expr = known(name, &arguments).unwrap_or_else(|| Expr::Unknown { name: name.to_owned() });
    let counter = match expr {
        Expr::Counter => Some(counter_values(arguments.all)?),
        _ => None,
    };
    Ok((expr, counter))
}

/// What a counter has counted, if the expression is one.
pub(crate) fn counter(item: &Attr<'_>) -> Result<Option<Counter>, Error> {
    let (name, arguments) = parts(item)?;
    if name == "counter" { counter_values(arguments.all).map(Some) } else { Ok(None) }
}

fn parts<'a>(item: &Attr<'a>) -> Result<(&'a str, Arguments<'a>), Error> {
    let mut name = "";
    let mut all: &[u8] = &[];
    item.each(|attr| {
        match attr.kind {
            EXPR_NAME => name = attr.str()?,
            EXPR_DATA => all = attr.payload,
            _ => {}
        }
        Ok(())
    })?;
    // Looks at each attribute once, so that a broken one is found whatever the expression is.
    each_attr(all, |_| Ok(()))?;
    Ok((name, Arguments { all }))
}

/// The attributes of an expression.
struct Arguments<'a> {
    all: &'a [u8],
}

impl<'a> Arguments<'a> {
    fn attr(&self, kind: u16) -> Option<Attr<'a>> {
        let mut reader = Reader::new(self.all);
        while let Some(attr) = reader.attr().ok()? {
            if attr.kind == kind {
                return Some(attr);
            }
        }
        None
    }

    fn has(&self, kind: u16) -> bool {
        self.attr(kind).is_some()
    }

    fn number(&self, kind: u16) -> Option<u32> {
        self.attr(kind)?.be32().ok()
    }

    /// A number the kernel may leave out if it is 0.
    fn number_or_zero(&self, kind: u16) -> Option<u32> {
        match self.attr(kind) {
            Some(attr) => attr.be32().ok(),
            None => Some(0),
        }
    }

    fn reg(&self, kind: u16) -> Option<Reg> {
        Reg::from_number(self.number(kind)?)
    }

    /// A register that need not be there. The outer `None` says that it makes no sense.
    fn optional_reg(&self, kind: u16) -> Option<Option<Reg>> {
        match self.attr(kind) {
            Some(_) => self.reg(kind).map(Some),
            None => Some(None),
        }
    }

    /// A register for the lower and one for the upper end of a range, of which we only write such as have one value.
    fn single_reg(&self, min: u16, max: u16) -> Option<Option<Reg>> {
        let (low, high) = (self.optional_reg(min)?, self.optional_reg(max)?);
        (high.is_none() || low == high).then_some(low)
    }

    fn bytes(&self, kind: u16) -> Option<Vec<u8>> {
        bytes(&self.attr(kind)?).ok().map(<[u8]>::to_vec)
    }

    fn text(&self, kind: u16) -> Option<String> {
        self.attr(kind)?.str().ok().map(str::to_owned)
    }

    fn nat_flags(&self, kind: u16) -> Option<NatFlags> {
        // The two lowest only say that there is an address and a port.
        let flags = self.number_or_zero(kind)? & !0b11;
        let ours = NatFlags::RANDOM | NatFlags::PERSISTENT | NatFlags::FULLY_RANDOM;
        (flags & !ours.0 == 0).then_some(NatFlags(flags))
    }
}

fn known(name: &str, a: &Arguments<'_>) -> Option<Expr> {
    match name {
        "payload" | "meta" | "ct" | "fib" => load(name, a),
        "cmp" | "range" | "lookup" => matching(name, a),
        "bitwise" | "numgen" | "hash" | "immediate" => compute(name, a),
        "nat" | "masq" | "redir" => translate(name, a),
        "dynset" => dynset(a),
        "socket" if a.number(1)? == SOCKET_TRANSPARENT => Some(Expr::TransparentSocket { dst: a.reg(2)? }),
        "tproxy" => Some(Expr::Tproxy {
            family: Family::from_number(u8::try_from(a.number(1)?).ok()?)?,
            address: a.reg(2)?,
            port: a.reg(3)?,
        }),
        "reject" => {
            let code = || a.attr(2)?.u8().ok();
            Some(Expr::Reject(match a.number(1)? {
                0 => Reject::Icmp(code()?),
                1 => Reject::TcpReset,
                2 => Reject::Icmpx(code()?),
                _ => return None,
            }))
        }
        "counter" => Some(Expr::Counter),
        "notrack" => Some(Expr::Notrack),
        _ => None,
    }
}

fn load(name: &str, a: &Arguments<'_>) -> Option<Expr> {
    Some(match name {
        "payload" => {
            let base = match a.number(2)? {
                0 => Header::Link,
                1 => Header::Network,
                2 => Header::Transport,
                _ => return None,
            };
            let (offset, len) = (a.number(3)?, a.number(4)?);
            match a.has(5) {
                // One that mends checksums is none of ours.
                true if a.number_or_zero(6)? != 0 || a.number_or_zero(8)? != 0 => return None,
                true => Expr::SetPayload { base, offset, len, src: a.reg(5)? },
                false => Expr::Payload { base, offset, len, dst: a.reg(1)? },
            }
        }
        "meta" if a.has(3) => match a.number(2)? {
            META_MARK => Expr::SetMark { src: a.reg(3)? },
            _ => return None,
        },
        "meta" => Expr::Meta { key: meta_key(a.number(2)?)?, dst: a.reg(1)? },
        "ct" if a.has(4) => match ct_key(a.number(2)?)? {
            CtKey::Mark => Expr::SetCtMark { src: a.reg(4)? },
            _ => return None,
        },
        "ct" => Expr::Ct {
            key: ct_key(a.number(2)?)?,
            direction: match a.attr(3) {
                None => None,
                Some(attr) => Some(match attr.u8().ok()? {
                    0 => Direction::Original,
                    1 => Direction::Reply,
                    _ => return None,
                }),
            },
            dst: a.reg(1)?,
        },
        "fib" => Expr::Fib {
            result: match a.number(2)? {
                1 => FibResult::Oif,
                2 => FibResult::Oifname,
                3 => FibResult::AddrType,
                _ => return None,
            },
            flags: match a.number_or_zero(3)? {
                flags @ 0..0x20 => FibFlags(flags),
                _ => return None,
            },
            dst: a.reg(1)?,
        },
        _ => return None,
    })
}

fn meta_key(number: u32) -> Option<MetaKey> {
    Some(match number {
        META_MARK => MetaKey::Mark,
        4 => MetaKey::Iif,
        5 => MetaKey::Oif,
        6 => MetaKey::Iifname,
        7 => MetaKey::Oifname,
        15 => MetaKey::Nfproto,
        16 => MetaKey::L4Proto,
        _ => return None,
    })
}

fn ct_key(number: u32) -> Option<CtKey> {
    Some(match number {
        0 => CtKey::State,
        1 => CtKey::Direction,
        2 => CtKey::Status,
        3 => CtKey::Mark,
        8 => CtKey::Src,
        9 => CtKey::Dst,
        10 => CtKey::Protocol,
        11 => CtKey::ProtoSrc,
        12 => CtKey::ProtoDst,
        19 => CtKey::SrcIp,
        20 => CtKey::DstIp,
        21 => CtKey::SrcIp6,
        22 => CtKey::DstIp6,
        _ => return None,
    })
}

fn matching(name: &str, a: &Arguments<'_>) -> Option<Expr> {
    Some(match name {
        "cmp" => Expr::Cmp {
            src: a.reg(1)?,
            op: match a.number(2)? {
                0 => CmpOp::Eq,
                1 => CmpOp::Neq,
                2 => CmpOp::Lt,
                3 => CmpOp::Lte,
                4 => CmpOp::Gt,
                5 => CmpOp::Gte,
                _ => return None,
            },
            value: a.bytes(3)?,
        },
        "range" => Expr::Range {
            src: a.reg(1)?,
            invert: match a.number(2)? {
                0 => false,
                1 => true,
                _ => return None,
            },
            from: a.bytes(3)?,
            to: a.bytes(4)?,
        },
        "lookup" => Expr::Lookup {
            set: a.text(1)?,
            key: a.reg(2)?,
            dst: a.optional_reg(3)?,
            invert: match a.number_or_zero(5)? {
                0 => false,
                1 => true,
                _ => return None,
            },
        },
        _ => return None,
    })
}

fn compute(name: &str, a: &Arguments<'_>) -> Option<Expr> {
    Some(match name {
        "bitwise" if a.number_or_zero(6)? == 0 => {
            Expr::Bitwise { src: a.reg(1)?, dst: a.reg(2)?, mask: a.bytes(4)?, xor: a.bytes(5)? }
        }
        "numgen" => Expr::Numgen {
            dst: a.reg(1)?,
            mode: match a.number(3)? {
                0 => NumgenMode::Inc,
                1 => NumgenMode::Random,
                _ => return None,
            },
            modulus: a.number(2)?,
            offset: a.number_or_zero(4)?,
        },
        "hash" if a.number_or_zero(7)? == 0 => Expr::Hash {
            src: a.reg(1)?,
            len: a.number(3)?,
            dst: a.reg(2)?,
            modulus: a.number(4)?,
            seed: a.number(5),
            offset: a.number_or_zero(6)?,
        },
        "immediate" => return immediate(a),
        _ => return None,
    })
}

fn immediate(a: &Arguments<'_>) -> Option<Expr> {
    let dst = a.reg(1)?;
    let mut found = None;
    a.attr(2)?
        .each(|attr| {
            match attr.kind {
                DATA_VALUE => found = Some(Expr::Immediate { dst, value: attr.payload.to_vec() }),
                DATA_VERDICT => found = Some(Expr::Verdict(decode::verdict(&attr)?.to_owned())),
                _ => {}
            }
            Ok(())
        })
        .ok()?;
    found
}

fn translate(name: &str, a: &Arguments<'_>) -> Option<Expr> {
    Some(match name {
        "nat" => Expr::Nat {
            kind: match a.number(1)? {
                0 => NatKind::Snat,
                1 => NatKind::Dnat,
                _ => return None,
            },
            family: Family::from_number(u8::try_from(a.number(2)?).ok()?)?,
            address: a.single_reg(3, 4)?,
            port: a.single_reg(5, 6)?,
            flags: a.nat_flags(7)?,
        },
        "masq" if !a.has(2) => Expr::Masq { flags: a.nat_flags(1)? },
        "redir" => Expr::Redirect { port: a.single_reg(1, 2)?, flags: a.nat_flags(3)? },
        _ => return None,
    })
}

fn dynset(a: &Arguments<'_>) -> Option<Expr> {
    // An inverted one, and one that gives each element an expression, are not ours.
    if a.number_or_zero(9)? != 0 || a.has(7) || a.has(10) {
        return None;
    }
    let timeout = match a.attr(6) {
        None => 0,
        Some(attr) => attr.be64().ok()?,
    };
    Some(Expr::Dynset {
        set: a.text(1)?,
        op: match a.number(3)? {
            0 => DynsetOp::Add,
            1 => DynsetOp::Update,
            2 => DynsetOp::Delete,
            _ => return None,
        },
        key: a.reg(4)?,
        value: a.optional_reg(5)?,
        timeout: (timeout != 0).then(|| Duration::from_millis(timeout)),
    })
}
