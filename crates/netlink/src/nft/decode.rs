// SPDX-License-Identifier: Apache-2.0

//! Objects and elements from the kernel's messages.

use std::time::Duration;

use super::{
    decode_expr,
    encode::*,
    types::{
        Base, Chain, ChainKind, Counter, Element, ElementValue, Hook, Lifetime, Listed, ListedRule, Policy,
        Rule, Set, Table, Value, Verdict,
    },
    userdata,
};
use crate::{
    Family,
    codec::{Attr, Message, Reader, each_attr},
    error::Error,
};

/// The part that all messages of nf_tables begin with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Generic<'a> {
    /// `None` for a family that is none of ours.
    pub(crate) family: Option<Family>,
    /// The lower half of the generation in which this was said.
    pub(crate) generation: u16,
    pub(crate) attrs: &'a [u8],
}

impl<'a> Generic<'a> {
    pub(crate) fn read(message: &Message<'a>) -> Result<Generic<'a>, Error> {
        let mut body = Reader::new(message.body);
        let [family, _version, high, low] = body.array()?;
        Ok(Generic {
            family: Family::from_number(family),
            generation: u16::from_be_bytes([high, low]),
            attrs: body.rest(),
        })
    }
}

/// An object and the table it is in.
#[derive(Debug)]
pub(crate) struct InTable<'a, T> {
    pub(crate) table: &'a str,
    pub(crate) object: T,
}

pub(crate) fn table(family: Family, attrs: &[u8]) -> Result<Listed<Table>, Error> {
    let mut table = Table::new(family, "");
    let mut handle = 0;
    each_attr(attrs, |attr| {
        match attr.kind {
            TABLE_NAME => table.name = attr.str()?.to_owned(),
            TABLE_FLAGS => {
                let flags = attr.be32()?;
                table.dormant = flags & TABLE_F_DORMANT != 0;
                table.owned = flags & TABLE_F_OWNER != 0;
            }
            TABLE_HANDLE => handle = attr.be64()?,
            TABLE_USERDATA => table.comment = comment(attr.payload, userdata::COMMENT),
            _ => {}
        }
        Ok(())
    })?;
    Ok(Listed { handle, object: table })
}

pub(crate) fn chain(attrs: &[u8]) -> Result<InTable<'_, Listed<Chain>>, Error> {
    let mut found = InTable { table: "", object: Listed { handle: 0, object: Chain::regular("") } };
    let chain = &mut found.object.object;
    let (mut hook, mut policy, mut kind) = (None, Policy::Accept, ChainKind::Other);
    each_attr(attrs, |attr| {
        match attr.kind {
            CHAIN_TABLE => found.table = attr.str()?,
            CHAIN_HANDLE => found.object.handle = attr.be64()?,
            CHAIN_NAME => chain.name = attr.str()?.to_owned(),
            CHAIN_HOOK => hook = Some(chain_hook(&attr)?),
            CHAIN_POLICY if attr.be32()? == 0 => policy = Policy::Drop,
            CHAIN_TYPE => {
                kind = match attr.str()? {
                    "filter" => ChainKind::Filter,
                    "nat" => ChainKind::Nat,
                    "route" => ChainKind::Route,
                    _ => ChainKind::Other,
                };
            }
            CHAIN_USERDATA => chain.comment = comment(attr.payload, userdata::COMMENT),
            _ => {}
        }
        Ok(())
    })?;
    chain.base = hook.map(|(hook, priority)| Base { kind, hook, priority, policy });
    Ok(found)
}

fn chain_hook(attr: &Attr<'_>) -> Result<(Hook, i32), Error> {
    let (mut number, mut priority) = (u32::MAX, 0);
    attr.each(|attr| {
        match attr.kind {
            HOOK_NUMBER => number = attr.be32()?,
            HOOK_PRIORITY => priority = attr.be32()?.cast_signed(),
            _ => {}
        }
        Ok(())
    })?;
    let hook = match number {
        0 => Hook::Prerouting,
        1 => Hook::Input,
        2 => Hook::Forward,
        3 => Hook::Output,
        4 => Hook::Postrouting,
        other => Hook::Other(other),
    };
    Ok((hook, priority))
}

pub(crate) fn rule(attrs: &[u8]) -> Result<InTable<'_, ListedRule>, Error> {
    let rule = Rule { chain: String::new(), exprs: Vec::new(), comment: None };
    let mut found = InTable { table: "", object: ListedRule { handle: 0, rule, counters: Vec::new() } };
    let listed = &mut found.object;
    each_attr(attrs, |attr| {
        match attr.kind {
            RULE_TABLE => found.table = attr.str()?,
            RULE_CHAIN => listed.rule.chain = attr.str()?.to_owned(),
            RULE_HANDLE => listed.handle = attr.be64()?,
            RULE_EXPRESSIONS => attr.each(|item| {
                let (expr, counter) = decode_expr::expr(&item)?;
                listed.rule.exprs.push(expr);
                listed.counters.extend(counter);
                Ok(())
            })?,
            RULE_USERDATA => listed.rule.comment = comment(attr.payload, userdata::COMMENT),
            _ => {}
        }
        Ok(())
    })?;
    Ok(found)
}

/// The numbers of a set's message that only together mean something.
#[derive(Default)]
struct RawSet<'a> {
    flags: u32,
    key: (u32, u32),
    value: (u32, u32),
    timeout: u64,
    lens: Vec<u32>,
    userdata: &'a [u8],
}

pub(crate) fn set(attrs: &[u8]) -> Result<InTable<'_, Listed<Set>>, Error> {
    let mut found = InTable { table: "", object: Listed { handle: 0, object: Set::new("", []) } };
    let set = &mut found.object.object;
    let mut raw = RawSet::default();
    each_attr(attrs, |attr| {
        match attr.kind {
            SET_TABLE => found.table = attr.str()?,
            SET_NAME => set.name = attr.str()?.to_owned(),
            SET_HANDLE => found.object.handle = attr.be64()?,
            SET_FLAGS => raw.flags = attr.be32()?,
            SET_KEY_TYPE => raw.key.0 = attr.be32()?,
            SET_KEY_LEN => raw.key.1 = attr.be32()?,
            SET_DATA_TYPE => raw.value.0 = attr.be32()?,
            SET_DATA_LEN => raw.value.1 = attr.be32()?,
            SET_TIMEOUT => raw.timeout = attr.be64()?,
            SET_USERDATA => raw.userdata = attr.payload,
            SET_EXPR => set.counter |= decode_expr::counter(&attr)?.is_some(),
            SET_DESC => attr.each(|attr| match attr.kind {
                SET_DESC_SIZE => {
                    set.size = Some(attr.be32()?);
                    Ok(())
                }
                SET_DESC_CONCAT => attr.each(|field| {
                    field.each(|len| {
                        raw.lens.push(len.be32()?);
                        Ok(())
                    })
                }),
                _ => Ok(()),
            })?,
            _ => {}
        }
        Ok(())
    })?;
    complete_set(set, &raw);
    Ok(found)
}

/// A set's name and how many elements it holds, where the kernel says so.
pub(crate) fn set_size(attrs: &[u8]) -> Result<InTable<'_, (String, Option<u32>)>, Error> {
    let mut found = InTable { table: "", object: (String::new(), None) };
    each_attr(attrs, |attr| {
        match attr.kind {
            SET_TABLE => found.table = attr.str()?,
            SET_NAME => attr.str()?.clone_into(&mut found.object.0),
            SET_COUNT => found.object.1 = Some(attr.be32()?),
            _ => {}
        }
        Ok(())
    })?;
    Ok(found)
}

fn complete_set(set: &mut Set, raw: &RawSet<'_>) {
    let userdata = userdata::read_set(raw.userdata);
    set.interval = raw.flags & SET_F_INTERVAL != 0;
    set.dynamic = raw.flags & SET_F_EVAL != 0;
    set.lifetime = match (raw.flags & SET_F_TIMEOUT != 0, raw.timeout) {
        (false, _) => Lifetime::Forever,
        (true, 0) => Lifetime::PerElement,
        (true, timeout) => Lifetime::Default(Duration::from_millis(timeout)),
    };
    set.key = userdata::fields(raw.key.0, raw.key.1, &raw.lens, &userdata.key);
    if raw.flags & SET_F_MAP != 0 {
        set.value = Some(if raw.value.0 == DATA_TYPE_VERDICT {
            Value::Verdict
        } else if userdata.value_is_range {
            Value::Range(userdata::fields(raw.value.0, raw.value.1 / 2, &[], &userdata.value))
        } else {
            Value::Fields(userdata::fields(raw.value.0, raw.value.1, &[], &userdata.value))
        });
    }
    set.comment = userdata.comment;
}

/// Visits the elements of one message. The table and set they are in come back.
pub(crate) fn elements<'a>(
    attrs: &'a [u8],
    mut visit: impl FnMut(&Element<'a>),
) -> Result<InTable<'a, &'a str>, Error> {
    let mut found = InTable { table: "", object: "" };
    each_attr(attrs, |attr| {
        match attr.kind {
            LIST_TABLE => found.table = attr.str()?,
            LIST_SET => found.object = attr.str()?,
            LIST_ELEMENTS => attr.each(|item| {
                visit(&element(&item)?);
                Ok(())
            })?,
            _ => {}
        }
        Ok(())
    })?;
    Ok(found)
}

fn element<'a>(item: &Attr<'a>) -> Result<Element<'a>, Error> {
    let mut element = Element::key(&[]);
    item.each(|attr| {
        match attr.kind {
            ELEM_KEY => element.key = bytes(&attr)?,
            ELEM_KEY_END => element.key_end = Some(bytes(&attr)?),
            ELEM_DATA => element.value = element_value(&attr)?,
            ELEM_FLAGS => element.interval_end = attr.be32()? & ELEM_F_INTERVAL_END != 0,
            ELEM_TIMEOUT => element.timeout = duration(&attr)?,
            ELEM_EXPIRATION => element.expires_in = duration(&attr)?,
            ELEM_USERDATA => element.comment = userdata::read_comment(attr.payload, userdata::COMMENT),
            ELEM_EXPR => element.counter = decode_expr::counter(&attr)?,
            ELEM_EXPRESSIONS => attr.each(|item| {
                element.counter = element.counter.or(decode_expr::counter(&item)?);
                Ok(())
            })?,
            _ => {}
        }
        Ok(())
    })?;
    Ok(element)
}

fn duration(attr: &Attr<'_>) -> Result<Option<Duration>, Error> {
    let millis = attr.be64()?;
    Ok((millis != 0).then(|| Duration::from_millis(millis)))
}

fn element_value<'a>(attr: &Attr<'a>) -> Result<ElementValue<'a>, Error> {
    let mut value = ElementValue::None;
    attr.each(|attr| {
        match attr.kind {
            DATA_VALUE => value = ElementValue::Bytes(attr.payload),
            DATA_VERDICT => value = ElementValue::Verdict(verdict(&attr)?),
            _ => {}
        }
        Ok(())
    })?;
    Ok(value)
}

/// The bytes in a nest that holds a value.
pub(crate) fn bytes<'a>(attr: &Attr<'a>) -> Result<&'a [u8], Error> {
    let mut value: &[u8] = &[];
    attr.each(|attr| {
        if attr.kind == DATA_VALUE {
            value = attr.payload;
        }
        Ok(())
    })?;
    Ok(value)
}

pub(crate) fn verdict<'a>(attr: &Attr<'a>) -> Result<Verdict<&'a str>, Error> {
    let (mut code, mut chain) = (0, "");
    attr.each(|attr| {
        match attr.kind {
            VERDICT_CODE => code = attr.be32()?.cast_signed(),
            VERDICT_CHAIN => chain = attr.str()?,
            _ => {}
        }
        Ok(())
    })?;
    Ok(match code {
        0 => Verdict::Drop,
        1 => Verdict::Accept,
        -1 => Verdict::Continue,
        -2 => Verdict::Break,
        -3 => Verdict::Jump(chain),
        -4 => Verdict::Goto(chain),
        -5 => Verdict::Return,
        other => Verdict::Other(other),
    })
}

/// Packets and bytes, in the attributes of a counter.
pub(crate) fn counter_values(attrs: &[u8]) -> Result<Counter, Error> {
    let mut counter = Counter::default();
    each_attr(attrs, |attr| {
        match attr.kind {
            1 => counter.bytes = attr.be64()?,
            2 => counter.packets = attr.be64()?,
            _ => {}
        }
        Ok(())
    })?;
    Ok(counter)
}

fn comment(userdata: &[u8], kind: u8) -> Option<String> {
    userdata::read_comment(userdata, kind).map(str::to_owned)
}
