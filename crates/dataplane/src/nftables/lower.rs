// SPDX-License-Identifier: Apache-2.0

//! Rules as the kernel takes them: each statement becomes a few expressions on registers.
//!
//! Keys are loaded from the first register on, each field in as many words as it needs. `nft` does the same, and
//! since `nft list` has to guess the statements from the expressions, that is what keeps the table readable.

use ipnet::IpNet;
use model::Family;
use netlink::nft::{
    CmpOp, CtKey, Direction, DynsetOp, Expr, FibFlags, FibResult, Header, MetaKey, NatFlags, NatKind,
    NumgenMode, Reg, Reject, Verdict,
    expr::{addr_type, ct_state, ct_status},
};

use super::{
    layout::{affinity_timeout, wire},
    program::{Field, Rule, Statement, address_len},
};

/// The expressions of a rule.
pub(crate) fn rule(family: Family, rule: &Rule) -> Vec<Expr> {
    let mut lowering = Lowering { family, exprs: Vec::new() };
    rule.0.iter().for_each(|statement| lowering.statement(statement));
    lowering.exprs
}

struct Lowering {
    family: Family,
    exprs: Vec<Expr>,
}

impl Lowering {
    fn statement(&mut self, statement: &Statement) {
        match statement {
            Statement::IsNew => {
                self.exprs.push(Expr::Ct { key: CtKey::State, direction: None, dst: FIRST });
                self.has_bit(ct_state::NEW, true);
            }
            Statement::IsTranslated => {
                self.exprs.push(Expr::Ct { key: CtKey::Status, direction: None, dst: FIRST });
                self.has_bit(ct_status::DST_NAT, true);
            }
            Statement::IsMarked(bit) => {
                self.exprs.push(Expr::Meta { key: MetaKey::Mark, dst: FIRST });
                self.has_bit(*bit, true);
            }
            Statement::IsUnmarked(bit) => {
                self.exprs.push(Expr::Meta { key: MetaKey::Mark, dst: FIRST });
                self.has_bit(*bit, false);
            }
            Statement::IsLocal(field) => {
                let flags = if *field == Field::Source { FibFlags::SADDR } else { FibFlags::DADDR };
                self.exprs.push(Expr::Fib { result: FibResult::AddrType, flags, dst: FIRST });
                self.compare(true, addr_type::LOCAL.to_ne_bytes().into());
            }
            Statement::Arrives { on, prefix, is } => {
                self.exprs.push(Expr::Meta { key: MetaKey::Iifname, dst: FIRST });
                self.compare(*is, interface(on, *prefix));
            }
            Statement::Within { field, net, is } => self.within(*field, net, *is),
            Statement::Contained { key, set, is } => {
                self.load(key, FIRST);
                self.exprs.push(Expr::Lookup { set: set.clone(), key: FIRST, dst: None, invert: !is });
            }
            Statement::Mark(bit) => self.set_mark(!bit, *bit),
            Statement::Unmark(bit) => self.set_mark(!bit, 0),
            Statement::Vmap { key, map } => {
                self.load(key, FIRST);
                let dst = Some(Reg::VERDICT);
                self.exprs.push(Expr::Lookup { set: map.clone(), key: FIRST, dst, invert: false });
            }
            Statement::Dnat { key, map } => self.dnat(key, map),
            Statement::Update { map, key, timeout_secs, value } => {
                let at = self.load(key, FIRST);
                self.load(value, at);
                let timeout = Some(affinity_timeout(*timeout_secs));
                let (set, op) = (map.clone(), DynsetOp::Update);
                self.exprs.push(Expr::Dynset { set, op, key: FIRST, value: Some(at), timeout });
            }
            Statement::Masquerade => self.exprs.push(Expr::Masq { flags: NatFlags::FULLY_RANDOM }),
            Statement::Reject => self.exprs.push(Expr::Reject(port_unreachable(self.family))),
            Statement::Drop => self.exprs.push(Expr::Verdict(Verdict::Drop)),
            Statement::Jump(chain) => self.exprs.push(Expr::Verdict(Verdict::Jump(chain.clone()))),
            Statement::Goto(chain) => self.exprs.push(Expr::Verdict(Verdict::Goto(chain.clone()))),
            Statement::Foreign(_) => (),
        }
    }

    /// Loads the fields one after the other, and returns the register behind them.
    fn load(&mut self, fields: &[Field], from: Reg) -> Reg {
        let mut at = from;
        for field in fields {
            self.exprs.extend(load(self.family, *field, at));
            at = at.after(field.len(self.family));
        }
        at
    }

    fn has_bit(&mut self, bit: u32, has: bool) {
        let mask = bit.to_ne_bytes().into();
        self.exprs.push(Expr::Bitwise { src: FIRST, dst: FIRST, mask, xor: vec![0; 4] });
        self.compare(!has, vec![0; 4]);
    }

    fn compare(&mut self, equal: bool, value: Vec<u8>) {
        let op = if equal { CmpOp::Eq } else { CmpOp::Neq };
        self.exprs.push(Expr::Cmp { src: FIRST, op, value });
    }

    fn within(&mut self, field: Field, net: &IpNet, is: bool) {
        self.load(&[field], FIRST);
        if net.prefix_len() < net.max_prefix_len() {
            let mask = octets(net.netmask());
            let xor = vec![0; mask.len()];
            self.exprs.push(Expr::Bitwise { src: FIRST, dst: FIRST, mask, xor });
        }
        self.compare(is, octets(net.network()));
    }

    fn set_mark(&mut self, mask: u32, xor: u32) {
        let (mask, xor) = (mask.to_ne_bytes().into(), xor.to_ne_bytes().into());
        self.exprs.push(Expr::Meta { key: MetaKey::Mark, dst: FIRST });
        self.exprs.push(Expr::Bitwise { src: FIRST, dst: FIRST, mask, xor });
        self.exprs.push(Expr::SetMark { src: FIRST });
    }

    fn dnat(&mut self, key: &[Field], map: &str) {
        self.load(key, FIRST);
        self.exprs.push(Expr::Lookup { set: map.into(), key: FIRST, dst: Some(FIRST), invert: false });
        self.exprs.push(Expr::Nat {
            kind: NatKind::Dnat,
            family: wire(self.family),
            address: Some(FIRST),
            port: Some(FIRST.after(address_len(self.family))),
            flags: NatFlags::NONE,
        });
    }
}

/// Loads one field. A hash is of what is loaded into the same place just before.
pub(super) fn load(family: Family, field: Field, dst: Reg) -> Vec<Expr> {
    let Field::Hash { below: modulus, seed, port } = field else { return vec![load_one(family, field, dst)] };
    let mut len = address_len(family);
    let mut exprs = vec![load_one(family, Field::Source, dst)];
    if port {
        exprs.push(Expr::Payload { base: Header::Transport, offset: 0, len: 2, dst: dst.after(len) });
        len += 4;
    }
    let len = len as u32;
    exprs.push(Expr::Hash { src: dst, len, dst, modulus, seed: Some(seed), offset: 0 });
    exprs
}

fn load_one(family: Family, field: Field, dst: Reg) -> Expr {
    let len = field.len(family) as u32;
    let network = |offset| Expr::Payload { base: Header::Network, offset, len, dst };
    let original = |key| Expr::Ct { key, direction: Some(Direction::Original), dst };
    match (field, family) {
        (Field::Source, Family::V4) => network(12),
        (Field::Source, Family::V6) => network(8),
        (Field::Destination, Family::V4) => network(16),
        (Field::Destination, Family::V6) => network(24),
        (Field::Protocol, _) => Expr::Meta { key: MetaKey::L4Proto, dst },
        (Field::Port, _) => Expr::Payload { base: Header::Transport, offset: 2, len, dst },
        (Field::OriginalSource, Family::V4) => original(CtKey::SrcIp),
        (Field::OriginalSource, Family::V6) => original(CtKey::SrcIp6),
        (Field::OriginalDestination, Family::V4) => original(CtKey::DstIp),
        (Field::OriginalDestination, Family::V6) => original(CtKey::DstIp6),
        (Field::OriginalPort, _) => original(CtKey::ProtoDst),
        (Field::Random(modulus), _) => Expr::Numgen { dst, mode: NumgenMode::Random, modulus, offset: 0 },
        // A hash is loaded by more than one; see above.
        (Field::Turn(modulus) | Field::Hash { below: modulus, .. }, _) => {
            Expr::Numgen { dst, mode: NumgenMode::Inc, modulus, offset: 0 }
        }
    }
}

pub(super) fn port_unreachable(family: Family) -> Reject {
    match family {
        Family::V4 => Reject::Icmp(3),
        Family::V6 => Reject::Icmp(4),
    }
}

/// An interface's name is 16 bytes with zeros at the end, a prefix of one is shorter. A name too long for an
/// interface fills all 16 and so equals none.
fn interface(name: &str, prefix: bool) -> Vec<u8> {
    let mut value = name.as_bytes().to_vec();
    value.truncate(16);
    if !prefix {
        value.resize(16, 0);
    }
    value
}

fn octets(address: std::net::IpAddr) -> Vec<u8> {
    match address {
        std::net::IpAddr::V4(ip) => ip.octets().into(),
        std::net::IpAddr::V6(ip) => ip.octets().into(),
    }
}

/// Where keys begin.
pub(super) const FIRST: Reg = Reg::word(0);
