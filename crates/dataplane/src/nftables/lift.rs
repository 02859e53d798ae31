// SPDX-License-Identifier: Apache-2.0

//! The reverse of [`super::lower`]: rules as read from the kernel, in statements again.
//!
//! What it does not recognise becomes [`Statement::Foreign`]; it never says of a rule that it is ours unless
//! lowering gives exactly the same expressions.

use std::{net::IpAddr, time::Duration};

use ipnet::IpNet;
use model::Family;
use netlink::nft::{
    CmpOp, CtKey, DynsetOp, Expr, FibFlags, FibResult, MetaKey, NatFlags, NatKind, NumgenMode, Reg, Verdict,
    expr::{addr_type, ct_state, ct_status},
};

use super::{
    lower::{self, FIRST},
    program::{Field, Rule, Statement, address_len, read_address},
};

/// The rule these expressions came from.
pub(super) fn rule(family: Family, exprs: &[Expr]) -> Rule {
    let mut rest = exprs;
    let mut statements = Vec::new();
    while let Some((statement, tail)) = statement(family, rest) {
        statements.push(statement);
        rest = tail;
    }
    let rule = Rule(statements);
    if rest.is_empty() && lower::rule(family, &rule) == exprs {
        return rule;
    }
    let words: Vec<String> = exprs.iter().map(|expr| format!("{expr:?}")).collect();
    Rule(vec![Statement::Foreign(format!("[ {} ]", words.join(" ] [ ")))])
}

/// The statement at the beginning, and what follows it.
fn statement(family: Family, exprs: &[Expr]) -> Option<(Statement, &[Expr])> {
    let number = |bytes: &[u8]| bytes.try_into().ok().map(u32::from_ne_bytes);
    Some(match exprs {
        [Expr::Verdict(Verdict::Drop), rest @ ..] => (Statement::Drop, rest),
        [Expr::Verdict(Verdict::Jump(chain)), rest @ ..] => (Statement::Jump(chain.clone()), rest),
        [Expr::Verdict(Verdict::Goto(chain)), rest @ ..] => (Statement::Goto(chain.clone()), rest),
        [Expr::Reject(_), rest @ ..] => (Statement::Reject, rest),
        [Expr::Masq { flags: NatFlags::FULLY_RANDOM }, rest @ ..] => (Statement::Masquerade, rest),
        [Expr::Ct { key: CtKey::State, .. }, Expr::Bitwise { mask, .. }, Expr::Cmp { .. }, rest @ ..]
            if number(mask)? == ct_state::NEW =>
        {
            (Statement::IsNew, rest)
        }
        [Expr::Ct { key: CtKey::Status, .. }, Expr::Bitwise { mask, .. }, Expr::Cmp { .. }, rest @ ..]
            if number(mask)? == ct_status::DST_NAT =>
        {
            (Statement::IsTranslated, rest)
        }
        [
            Expr::Meta { key: MetaKey::Mark, .. },
            Expr::Bitwise { mask, .. },
            Expr::Cmp { op, .. },
            rest @ ..,
        ] => {
            let bit = number(mask)?;
            let statement = match op {
                CmpOp::Eq => Statement::IsUnmarked(bit),
                _ => Statement::IsMarked(bit),
            };
            (statement, rest)
        }
        [
            Expr::Meta { key: MetaKey::Mark, .. },
            Expr::Bitwise { mask, xor, .. },
            Expr::SetMark { .. },
            rest @ ..,
        ] => {
            let bit = !number(mask)?;
            (if number(xor)? == bit { Statement::Mark(bit) } else { Statement::Unmark(bit) }, rest)
        }
        [Expr::Fib { result: FibResult::AddrType, flags, .. }, Expr::Cmp { value, .. }, rest @ ..]
            if number(value)? == addr_type::LOCAL =>
        {
            let field = if *flags == FibFlags::SADDR { Field::Source } else { Field::Destination };
            (Statement::IsLocal(field), rest)
        }
        [Expr::Meta { key: MetaKey::Iifname, .. }, Expr::Cmp { op, value, .. }, rest @ ..] => {
            (arrives(*op, value)?, rest)
        }
        _ => return within(family, exprs).or_else(|| keyed(family, exprs)),
    })
}

fn arrives(op: CmpOp, value: &[u8]) -> Option<Statement> {
    let prefix = value.len() < 16;
    let name = value.split(|byte| *byte == 0).next()?;
    let on = std::str::from_utf8(name).ok()?.to_owned();
    Some(Statement::Arrives { on, prefix, is: op == CmpOp::Eq })
}

/// An address compared with a network.
fn within(family: Family, exprs: &[Expr]) -> Option<(Statement, &[Expr])> {
    let (first, rest) = exprs.split_first()?;
    let field = [Field::Source, Field::Destination]
        .into_iter()
        .find(|field| lower::load(family, *field, FIRST) == std::slice::from_ref(first))?;
    let (mask, op, value, rest) = match rest {
        [Expr::Cmp { op, value, .. }, rest @ ..] => (None, op, value, rest),
        [Expr::Bitwise { mask, .. }, Expr::Cmp { op, value, .. }, rest @ ..] => (Some(mask), op, value, rest),
        _ => return None,
    };
    let address = read_address(family, value)?;
    let net = match mask {
        None => IpNet::from(address),
        Some(mask) => IpNet::with_netmask(address, read_address(family, mask)?).ok()?,
    };
    Some((Statement::Within { field, net, is: *op == CmpOp::Eq }, rest))
}

/// Statements that begin by loading a key.
fn keyed(family: Family, exprs: &[Expr]) -> Option<(Statement, &[Expr])> {
    let (key, rest) = loads(family, exprs);
    if key.is_empty() {
        return None;
    }
    Some(match rest {
        [Expr::Lookup { set: map, dst: Some(Reg::VERDICT), .. }, rest @ ..] => {
            (Statement::Vmap { key, map: map.clone() }, rest)
        }
        [Expr::Lookup { set: map, dst: Some(_), .. }, Expr::Nat { kind: NatKind::Dnat, .. }, rest @ ..] => {
            (Statement::Dnat { key, map: map.clone() }, rest)
        }
        [Expr::Lookup { set, dst: None, invert, .. }, rest @ ..] => {
            (Statement::Contained { key, set: set.clone(), is: !invert }, rest)
        }
        [Expr::Dynset { set, op: DynsetOp::Update, value: Some(at), timeout, .. }, rest @ ..] => {
            (update(family, set, key, *at, *timeout)?, rest)
        }
        _ => return None,
    })
}

/// Key and value of an update are loaded in one go; where the value begins is told by its register.
fn update(
    family: Family,
    map: &str,
    mut fields: Vec<Field>,
    value_at: Reg,
    timeout: Option<Duration>,
) -> Option<Statement> {
    let starts = (0..fields.len()).find(|len| register(words(family, &fields[..*len])) == Some(value_at));
    let value = fields.split_off(starts?);
    let timeout_secs = u32::try_from(timeout?.as_secs()).ok()?;
    Some(Statement::Update { map: map.to_owned(), key: fields, timeout_secs, value })
}

/// As many fields as are loaded one behind the other. The last register is left alone: no rule of ours is that
/// long, and a foreign one need not be understood.
fn loads(family: Family, exprs: &[Expr]) -> (Vec<Field>, &[Expr]) {
    let mut fields = Vec::new();
    let mut rest = exprs;
    while let Some(at) = register(words(family, &fields)) {
        let Some((field, tail)) = field(family, rest, at) else { break };
        fields.push(field);
        if register(words(family, &fields)).is_none() {
            fields.pop();
            break;
        }
        rest = tail;
    }
    (fields, rest)
}

/// How many words the fields fill.
fn words(family: Family, fields: &[Field]) -> usize {
    fields.iter().map(|field| field.len(family).div_ceil(4)).sum()
}

fn register(word: usize) -> Option<Reg> {
    (word < 16).then(|| Reg::word(word as u8))
}

/// The field that these expressions begin with, loaded to this place, and what follows it.
fn field(family: Family, exprs: &[Expr], at: Reg) -> Option<(Field, &[Expr])> {
    let hashed = |field: &Expr| match field {
        Expr::Hash { modulus, seed: Some(seed), len, .. } => {
            let port = *len as usize > address_len(family);
            Some(Field::Hash { below: *modulus, seed: *seed, port })
        }
        _ => None,
    };
    // A hash begins as the address that it is of.
    let hash = exprs.get(1).and_then(hashed).or_else(|| exprs.get(2).and_then(hashed));
    let drawn = match exprs.first()? {
        Expr::Numgen { mode: NumgenMode::Random, modulus, .. } => Some(Field::Random(*modulus)),
        Expr::Numgen { mode: NumgenMode::Inc, modulus, .. } => Some(Field::Turn(*modulus)),
        _ => hash,
    };
    let all = [
        Field::Source,
        Field::Destination,
        Field::Protocol,
        Field::Port,
        Field::OriginalSource,
        Field::OriginalDestination,
        Field::OriginalPort,
    ];
    let candidates = drawn.into_iter().chain(all);
    candidates.filter_map(|field| Some((field, exprs.strip_prefix(&*lower::load(family, field, at))?))).next()
}

/// The network that begins with one address and ends with the other, if there is one.
pub(super) fn net_between(first: IpAddr, last: IpAddr) -> Option<IpNet> {
    let max = if first.is_ipv4() { 32 } else { 128 };
    (0..=max)
        .filter_map(|len| IpNet::new(first, len).ok())
        .find(|net| net.network() == first && net.broadcast() == last)
}
