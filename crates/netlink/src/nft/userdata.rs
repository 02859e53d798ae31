// SPDX-License-Identifier: Apache-2.0

//! What the kernel stores without looking at it, for `nft list` to print a set or a comment as it was written.
//!
//! The format is that of libnftnl: entries of a type byte, a length byte and a value, some of them nested. Numbers are
//! in the byte order of the machine.

use super::types::{Field, Set, Type, Typeof, Value};
use crate::{
    Family,
    attr::Writer,
    codec::{Reader, text},
    nft::encode::SET_USERDATA,
};

/// The comment of a table, chain, rule or element.
pub(crate) const COMMENT: u8 = 0;

const SET_KEYBYTEORDER: u8 = 0;
const SET_DATABYTEORDER: u8 = 1;
const SET_KEY_TYPEOF: u8 = 3;
const SET_DATA_TYPEOF: u8 = 4;
/// Without it nft 1.0.6 aborts on a map of ranges.
const SET_DATA_INTERVAL: u8 = 6;
const SET_COMMENT: u8 = 7;

const BYTEORDER_INVALID: u32 = 0;
const BYTEORDER_HOST: u32 = 1;
const BYTEORDER_NETWORK: u32 = 2;

const TYPEOF_EXPR: u8 = 0;
const TYPEOF_ARGUMENTS: u8 = 1;
/// The kinds of expression, by nft's own numbers.
const EXPR_PAYLOAD: u32 = 7;
const EXPR_META: u32 = 9;
const EXPR_CONCAT: u32 = 13;
const EXPR_NUMGEN: u32 = 23;
/// The headers and their fields, by nft's own numbers.
const HEADER_TRANSPORT: u32 = 11;
const HEADER_IP: u32 = 12;
const HEADER_IP6: u32 = 13;

/// The kernel takes no more.
const MAX_LEN: usize = 256;

/// Writes a comment as an object's user data.
pub(crate) fn comment(w: &mut Writer, attr: u16, kind: u8, comment: &str) {
    let mut entries = Entries::default();
    entries.text(kind, comment);
    entries.write(w, attr);
}

/// Writes how to print a set.
pub(crate) fn set(w: &mut Writer, set: &Set) {
    let mut entries = Entries::default();
    entries.number(SET_KEYBYTEORDER, byteorder(&set.key));
    if let Some(Value::Fields(fields) | Value::Range(fields)) = &set.value {
        entries.number(SET_DATABYTEORDER, byteorder(fields));
    }
    entries.typeof_fields(SET_KEY_TYPEOF, &set.key);
    if let Some(Value::Fields(fields) | Value::Range(fields)) = &set.value {
        entries.typeof_fields(SET_DATA_TYPEOF, fields);
        let interval = matches!(set.value, Some(Value::Range(_)));
        entries.number(SET_DATA_INTERVAL, u32::from(interval));
    }
    if let Some(comment) = &set.comment {
        entries.text(SET_COMMENT, comment);
    }
    entries.write(w, SET_USERDATA);
}

/// A concatenation has no byte order: each of its parts has its own.
fn byteorder(fields: &[Field]) -> u32 {
    match fields {
        [field] if field.ty().is_host_endian() => BYTEORDER_HOST,
        [_] => BYTEORDER_NETWORK,
        _ => BYTEORDER_INVALID,
    }
}

/// Entries being written.
#[derive(Default)]
struct Entries {
    bytes: Vec<u8>,
    too_long: bool,
}

impl Entries {
    fn entry(&mut self, kind: u8, value: &[u8]) {
        match u8::try_from(value.len()) {
            Ok(len) => self.bytes.extend_from_slice(&[kind, len]),
            Err(_) => self.too_long = true,
        }
        self.bytes.extend_from_slice(value);
    }

    fn number(&mut self, kind: u8, value: u32) {
        self.entry(kind, &value.to_ne_bytes());
    }

    fn text(&mut self, kind: u8, text: &str) {
        self.too_long |= text.as_bytes().contains(&0);
        let mut value = text.as_bytes().to_vec();
        value.push(0);
        self.entry(kind, &value);
    }

    fn nest(&mut self, kind: u8, fill: impl FnOnce(&mut Entries)) {
        let mut inner = Entries::default();
        fill(&mut inner);
        self.too_long |= inner.too_long;
        self.entry(kind, &inner.bytes);
    }

    fn typeof_fields(&mut self, kind: u8, fields: &[Field]) {
        let typeofs: Option<Vec<Typeof>> = fields
            .iter()
            .map(|field| match field {
                Field::Of(of) => Some(*of),
                Field::Plain(_) => None,
            })
            .collect();
        match typeofs.as_deref() {
            None | Some([]) => {}
            Some([of]) => self.nest(kind, |e| e.typeof_one(*of)),
            Some(several) => self.nest(kind, |e| {
                e.number(TYPEOF_EXPR, EXPR_CONCAT);
                e.nest(TYPEOF_ARGUMENTS, |e| {
                    for (index, of) in several.iter().enumerate() {
                        e.nest(index as u8, |e| e.typeof_one(*of));
                    }
                });
            }),
        }
    }

    fn typeof_one(&mut self, of: Typeof) {
        let (expr, arguments): (u32, &[u32]) = match of {
            Typeof::Saddr(Family::V4) => (EXPR_PAYLOAD, &[HEADER_IP, 11]),
            Typeof::Daddr(Family::V4) => (EXPR_PAYLOAD, &[HEADER_IP, 12]),
            Typeof::Saddr(Family::V6) => (EXPR_PAYLOAD, &[HEADER_IP6, 8]),
            Typeof::Daddr(Family::V6) => (EXPR_PAYLOAD, &[HEADER_IP6, 9]),
            Typeof::Sport => (EXPR_PAYLOAD, &[HEADER_TRANSPORT, 1]),
            Typeof::Dport => (EXPR_PAYLOAD, &[HEADER_TRANSPORT, 2]),
            Typeof::Mark => (EXPR_META, &[3]),
            Typeof::Iifname => (EXPR_META, &[6]),
            Typeof::Oifname => (EXPR_META, &[7]),
            Typeof::L4Proto => (EXPR_META, &[16]),
            Typeof::NumgenInc(modulus) => (EXPR_NUMGEN, &[0, modulus, 0]),
            Typeof::NumgenRandom(modulus) => (EXPR_NUMGEN, &[1, modulus, 0]),
        };
        self.number(TYPEOF_EXPR, expr);
        self.nest(TYPEOF_ARGUMENTS, |e| {
            for (index, argument) in arguments.iter().enumerate() {
                e.number(index as u8, *argument);
            }
        });
    }

    fn write(self, w: &mut Writer, attr: u16) {
        if self.too_long || self.bytes.len() > MAX_LEN {
            return w.spoil();
        }
        w.attr(attr, &self.bytes);
    }
}

/// Reads entries: whoever wrote them, at worst they say nothing.
fn entries(bytes: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    let mut reader = Reader::new(bytes);
    std::iter::from_fn(move || {
        let [kind, len] = reader.array().ok()?;
        Some((kind, reader.take(len.into()).ok()?))
    })
}

fn entry(bytes: &[u8], kind: u8) -> Option<&[u8]> {
    entries(bytes).find(|entry| entry.0 == kind).map(|entry| entry.1)
}

fn number(bytes: &[u8], kind: u8) -> Option<u32> {
    entry(bytes, kind)?.try_into().ok().map(u32::from_ne_bytes)
}

/// The comment among the entries.
pub(crate) fn read_comment(bytes: &[u8], kind: u8) -> Option<&str> {
    text(entry(bytes, kind)?).ok()
}

/// What the user data of a set says.
#[derive(Debug, Default)]
pub(crate) struct SetUserdata {
    pub(crate) key: Vec<Typeof>,
    pub(crate) value: Vec<Typeof>,
    pub(crate) value_is_range: bool,
    pub(crate) comment: Option<String>,
}

/// Reads how a set was written.
pub(crate) fn read_set(bytes: &[u8]) -> SetUserdata {
    SetUserdata {
        key: entry(bytes, SET_KEY_TYPEOF).and_then(typeof_fields).unwrap_or_default(),
        value: entry(bytes, SET_DATA_TYPEOF).and_then(typeof_fields).unwrap_or_default(),
        value_is_range: number(bytes, SET_DATA_INTERVAL).is_some_and(|flag| flag != 0),
        comment: read_comment(bytes, SET_COMMENT).map(str::to_owned),
    }
}

fn typeof_fields(bytes: &[u8]) -> Option<Vec<Typeof>> {
    if number(bytes, TYPEOF_EXPR)? != EXPR_CONCAT {
        return Some(vec![typeof_one(bytes)?]);
    }
    entries(entry(bytes, TYPEOF_ARGUMENTS)?).map(|(_, field)| typeof_one(field)).collect()
}

fn typeof_one(bytes: &[u8]) -> Option<Typeof> {
    let expr = number(bytes, TYPEOF_EXPR)?;
    let arguments = entry(bytes, TYPEOF_ARGUMENTS)?;
    let first = number(arguments, 0)?;
    let second = || number(arguments, 1);
    Some(match expr {
        EXPR_PAYLOAD => match (first, second()?) {
            (HEADER_IP, 11) => Typeof::Saddr(Family::V4),
            (HEADER_IP, 12) => Typeof::Daddr(Family::V4),
            (HEADER_IP6, 8) => Typeof::Saddr(Family::V6),
            (HEADER_IP6, 9) => Typeof::Daddr(Family::V6),
            (HEADER_TRANSPORT, 1) => Typeof::Sport,
            (HEADER_TRANSPORT, 2) => Typeof::Dport,
            _ => return None,
        },
        EXPR_META => match first {
            3 => Typeof::Mark,
            6 => Typeof::Iifname,
            7 => Typeof::Oifname,
            16 => Typeof::L4Proto,
            _ => return None,
        },
        EXPR_NUMGEN => match (first, second()?, number(arguments, 2).unwrap_or(0)) {
            (0, modulus, 0) => Typeof::NumgenInc(modulus),
            (1, modulus, 0) => Typeof::NumgenRandom(modulus),
            _ => return None,
        },
        _ => return None,
    })
}

/// The fields of a key or value: the numbers of their types, six bits each, and where the user data agrees, what
/// they were written as.
pub(crate) fn fields(concat: u32, total_len: u32, lens: &[u32], typeofs: &[Typeof]) -> Vec<Field> {
    let by_number = (32 - concat.leading_zeros()).div_ceil(6);
    let count = (by_number as usize).max(lens.len()).max(typeofs.len()).max(1);
    let field = |index: usize| {
        // Beyond five fields the numbers do not fit, and are lost.
        let shift = 6 * (count - 1 - index);
        let id = if shift < 32 { (concat >> shift & 0x3f) as u8 } else { 0 };
        let known = KNOWN.iter().find(|ty| ty.id == id).map_or(0, |ty| u32::from(ty.len));
        let len = match lens.get(index) {
            Some(len) => *len,
            None if count == 1 => total_len,
            None => known,
        };
        let ty = Type { id, len: u8::try_from(len).unwrap_or(u8::MAX) };
        match typeofs.get(index) {
            Some(of) if typeofs.len() == count && of.ty() == ty => Field::Of(*of),
            _ => Field::Plain(ty),
        }
    };
    (0..count).map(field).collect()
}

const KNOWN: [Type; 7] = [
    Type::IPV4_ADDR,
    Type::IPV6_ADDR,
    Type::INET_PROTO,
    Type::INET_SERVICE,
    Type::MARK,
    Type::IFNAME,
    Type::INTEGER,
];
