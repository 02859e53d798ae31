// SPDX-License-Identifier: Apache-2.0

//! Expressions as attributes.

use super::{
    encode::{millis, value, verdict},
    expr::{
        CmpOp, CtKey, Direction, DynsetOp, Expr, FibResult, Header, MetaKey, NatFlags, NatKind, NumgenMode,
        Reg, Reject,
    },
};
use crate::{Family, attr::Writer};

pub(crate) const EXPR_NAME: u16 = 1;
pub(crate) const EXPR_DATA: u16 = 2;

pub(crate) const META_MARK: u32 = 3;
pub(crate) const SOCKET_TRANSPARENT: u32 = 0;

/// The expression that counts; also what a set gives to each element.
pub(crate) fn counter(w: &mut Writer) {
    expr(w, &Expr::Counter);
}

pub(crate) fn expr(w: &mut Writer, expr: &Expr) {
    w.str(EXPR_NAME, name(expr));
    w.nest(EXPR_DATA, |w| match expr {
        Expr::Payload { .. } | Expr::Meta { .. } | Expr::Ct { .. } | Expr::Fib { .. } => load(w, expr),
        Expr::Cmp { .. } | Expr::Range { .. } | Expr::Lookup { .. } => matching(w, expr),
        Expr::Bitwise { .. } | Expr::Numgen { .. } | Expr::Hash { .. } | Expr::Immediate { .. } => {
            compute(w, expr)
        }
        Expr::Nat { .. } | Expr::Masq { .. } | Expr::Redirect { .. } => translate(w, expr),
        Expr::Verdict(decision) => {
            w.be32(1, Reg::VERDICT.number());
            w.nest(2, |w| verdict(w, decision.as_ref()));
        }
        Expr::SetPayload { base, offset, len, src } => {
            place(w, *base, *offset, *len);
            w.be32(5, src.number());
        }
        Expr::SetMark { src } => {
            w.be32(2, META_MARK);
            w.be32(3, src.number());
        }
        Expr::SetCtMark { src } => {
            w.be32(2, ct_key(CtKey::Mark));
            w.be32(4, src.number());
        }
        Expr::TransparentSocket { dst } => {
            w.be32(1, SOCKET_TRANSPARENT);
            w.be32(2, dst.number());
        }
        Expr::Tproxy { family, address, port } => {
            w.be32(1, u32::from(family.number()));
            w.be32(2, address.number());
            w.be32(3, port.number());
        }
        Expr::Reject(reject) => rejection(w, *reject),
        Expr::Dynset { set, op, key, value, timeout } => {
            w.str(1, set);
            w.be32(
                3,
                match op {
                    DynsetOp::Add => 0,
                    DynsetOp::Update => 1,
                    DynsetOp::Delete => 2,
                },
            );
            w.be32(4, key.number());
            if let Some(value) = value {
                w.be32(5, value.number());
            }
            if let Some(timeout) = timeout {
                w.be64(6, millis(*timeout));
            }
        }
        Expr::Counter | Expr::Notrack => {}
        // Listed only: to send it on would be to send something else.
        Expr::Unknown { .. } => w.spoil(),
    });
}

fn name(expr: &Expr) -> &str {
    match expr {
        Expr::Payload { .. } | Expr::SetPayload { .. } => "payload",
        Expr::Meta { .. } | Expr::SetMark { .. } => "meta",
        Expr::Ct { .. } | Expr::SetCtMark { .. } => "ct",
        Expr::TransparentSocket { .. } => "socket",
        Expr::Tproxy { .. } => "tproxy",
        Expr::Cmp { .. } => "cmp",
        Expr::Range { .. } => "range",
        Expr::Bitwise { .. } => "bitwise",
        Expr::Lookup { .. } => "lookup",
        Expr::Immediate { .. } | Expr::Verdict(_) => "immediate",
        Expr::Numgen { .. } => "numgen",
        Expr::Hash { .. } => "hash",
        Expr::Nat { .. } => "nat",
        Expr::Masq { .. } => "masq",
        Expr::Redirect { .. } => "redir",
        Expr::Reject(_) => "reject",
        Expr::Fib { .. } => "fib",
        Expr::Dynset { .. } => "dynset",
        Expr::Counter => "counter",
        Expr::Notrack => "notrack",
        Expr::Unknown { name } => name,
    }
}

/// Where in a packet.
fn place(w: &mut Writer, base: Header, offset: u32, len: u32) {
    let base = match base {
        Header::Link => 0,
        Header::Network => 1,
        Header::Transport => 2,
    };
    w.be32(2, base);
    w.be32(3, offset);
    w.be32(4, len);
}

fn load(w: &mut Writer, expr: &Expr) {
    match expr {
        Expr::Payload { base, offset, len, dst } => {
            w.be32(1, dst.number());
            place(w, *base, *offset, *len);
        }
        Expr::Meta { key, dst } => {
            w.be32(1, dst.number());
            w.be32(2, meta_key(*key));
        }
        Expr::Ct { key, direction, dst } => {
            w.be32(1, dst.number());
            w.be32(2, ct_key(*key));
            if let Some(direction) = direction {
                w.u8(
                    3,
                    match direction {
                        Direction::Original => 0,
                        Direction::Reply => 1,
                    },
                );
            }
        }
        Expr::Fib { result, flags, dst } => {
            w.be32(1, dst.number());
            w.be32(
                2,
                match result {
                    FibResult::Oif => 1,
                    FibResult::Oifname => 2,
                    FibResult::AddrType => 3,
                },
            );
            w.be32(3, flags.0);
        }
        _ => {}
    }
}

fn meta_key(key: MetaKey) -> u32 {
    match key {
        MetaKey::Mark => META_MARK,
        MetaKey::Iif => 4,
        MetaKey::Oif => 5,
        MetaKey::Iifname => 6,
        MetaKey::Oifname => 7,
        MetaKey::Nfproto => 15,
        MetaKey::L4Proto => 16,
    }
}

fn ct_key(key: CtKey) -> u32 {
    match key {
        CtKey::State => 0,
        CtKey::Direction => 1,
        CtKey::Status => 2,
        CtKey::Mark => 3,
        CtKey::Src => 8,
        CtKey::Dst => 9,
        CtKey::Protocol => 10,
        CtKey::ProtoSrc => 11,
        CtKey::ProtoDst => 12,
        CtKey::SrcIp => 19,
        CtKey::DstIp => 20,
        CtKey::SrcIp6 => 21,
        CtKey::DstIp6 => 22,
    }
}

fn matching(w: &mut Writer, expr: &Expr) {
    match expr {
        Expr::Cmp { src, op, value: right } => {
            w.be32(1, src.number());
            w.be32(
                2,
                match op {
                    CmpOp::Eq => 0,
                    CmpOp::Neq => 1,
                    CmpOp::Lt => 2,
                    CmpOp::Lte => 3,
                    CmpOp::Gt => 4,
                    CmpOp::Gte => 5,
                },
            );
            value(w, 3, right);
        }
        Expr::Range { src, invert, from, to } => {
            w.be32(1, src.number());
            w.be32(2, u32::from(*invert));
            value(w, 3, from);
            value(w, 4, to);
        }
        Expr::Lookup { set, key, dst, invert } => {
            w.str(1, set);
            w.be32(2, key.number());
            if let Some(dst) = dst {
                w.be32(3, dst.number());
            }
            if *invert {
                w.be32(5, 1);
            }
        }
        _ => {}
    }
}

fn compute(w: &mut Writer, expr: &Expr) {
    match expr {
        Expr::Bitwise { src, dst, mask, xor } => {
            w.be32(1, src.number());
            w.be32(2, dst.number());
            w.be32(3, mask.len() as u32);
            value(w, 4, mask);
            value(w, 5, xor);
        }
        Expr::Immediate { dst, value: constant } => {
            w.be32(1, dst.number());
            value(w, 2, constant);
        }
        Expr::Numgen { dst, mode, modulus, offset } => {
            w.be32(1, dst.number());
            w.be32(2, *modulus);
            w.be32(
                3,
                match mode {
                    NumgenMode::Inc => 0,
                    NumgenMode::Random => 1,
                },
            );
            w.be32(4, *offset);
        }
        Expr::Hash { src, len, dst, modulus, seed, offset } => {
            w.be32(1, src.number());
            w.be32(2, dst.number());
            w.be32(3, *len);
            w.be32(4, *modulus);
            if let Some(seed) = seed {
                w.be32(5, *seed);
            }
            w.be32(6, *offset);
            // The Jenkins hash; the other kind hashes the flow symmetrically.
            w.be32(7, 0);
        }
        _ => {}
    }
}

fn translate(w: &mut Writer, expr: &Expr) {
    match expr {
        Expr::Nat { kind, family, address, port, flags } => {
            w.be32(
                1,
                match kind {
                    NatKind::Snat => 0,
                    NatKind::Dnat => 1,
                },
            );
            w.be32(2, u32::from(Family::number(*family)));
            if let Some(address) = address {
                w.be32(3, address.number());
            }
            if let Some(port) = port {
                w.be32(5, port.number());
            }
            nat_flags(w, 7, *flags);
        }
        Expr::Masq { flags } => nat_flags(w, 1, *flags),
        Expr::Redirect { port, flags } => {
            if let Some(port) = port {
                w.be32(1, port.number());
            }
            nat_flags(w, 3, *flags);
        }
        _ => {}
    }
}

fn nat_flags(w: &mut Writer, kind: u16, flags: NatFlags) {
    if flags != NatFlags::NONE {
        w.be32(kind, flags.0);
    }
}

fn rejection(w: &mut Writer, reject: Reject) {
    let (kind, code) = match reject {
        Reject::Icmp(code) => (0, Some(code)),
        Reject::TcpReset => (1, None),
        Reject::Icmpx(code) => (2, Some(code)),
    };
    w.be32(1, kind);
    if let Some(code) = code {
        w.u8(2, code);
    }
}
