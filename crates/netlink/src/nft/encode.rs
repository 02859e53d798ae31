// SPDX-License-Identifier: Apache-2.0

//! Objects and elements as messages.

use std::time::Duration;

use super::{
    encode_expr,
    types::{
        Base, Chain, ChainKind, Element, ElementValue, Field, Hook, Lifetime, Policy, Rule, Set, Table,
        Value, Verdict, fields_len,
    },
    userdata,
};
use crate::{
    attr::{HEADER_LEN, Writer},
    codec::{Attr, Message, Reader},
};

/// The subsystem in the upper byte of a message's type.
const SUBSYS_NFTABLES: u16 = 10 << 8;

/// Message types of nf_tables.
pub(crate) mod msg {
    use super::SUBSYS_NFTABLES;

    pub(crate) const NEWTABLE: u16 = SUBSYS_NFTABLES;
    pub(crate) const GETTABLE: u16 = SUBSYS_NFTABLES | 1;
    pub(crate) const DELTABLE: u16 = SUBSYS_NFTABLES | 2;
    pub(crate) const NEWCHAIN: u16 = SUBSYS_NFTABLES | 3;
    pub(crate) const GETCHAIN: u16 = SUBSYS_NFTABLES | 4;
    pub(crate) const DELCHAIN: u16 = SUBSYS_NFTABLES | 5;
    pub(crate) const NEWRULE: u16 = SUBSYS_NFTABLES | 6;
    pub(crate) const GETRULE: u16 = SUBSYS_NFTABLES | 7;
    pub(crate) const DELRULE: u16 = SUBSYS_NFTABLES | 8;
    pub(crate) const NEWSET: u16 = SUBSYS_NFTABLES | 9;
    pub(crate) const GETSET: u16 = SUBSYS_NFTABLES | 10;
    pub(crate) const DELSET: u16 = SUBSYS_NFTABLES | 11;
    pub(crate) const NEWSETELEM: u16 = SUBSYS_NFTABLES | 12;
    pub(crate) const GETSETELEM: u16 = SUBSYS_NFTABLES | 13;
    pub(crate) const DELSETELEM: u16 = SUBSYS_NFTABLES | 14;
    pub(crate) const NEWGEN: u16 = SUBSYS_NFTABLES | 15;
    pub(crate) const GETGEN: u16 = SUBSYS_NFTABLES | 16;
    pub(crate) const DESTROYTABLE: u16 = SUBSYS_NFTABLES | 26;
    pub(crate) const DESTROYCHAIN: u16 = SUBSYS_NFTABLES | 27;
    pub(crate) const DESTROYSET: u16 = SUBSYS_NFTABLES | 29;
    pub(crate) const DESTROYSETELEM: u16 = SUBSYS_NFTABLES | 30;
}

pub(crate) const TABLE_NAME: u16 = 1;
pub(crate) const TABLE_FLAGS: u16 = 2;
pub(crate) const TABLE_HANDLE: u16 = 4;
pub(crate) const TABLE_USERDATA: u16 = 6;
pub(crate) const TABLE_F_DORMANT: u32 = 1;
pub(crate) const TABLE_F_OWNER: u32 = 2;

pub(crate) const CHAIN_TABLE: u16 = 1;
pub(crate) const CHAIN_HANDLE: u16 = 2;
pub(crate) const CHAIN_NAME: u16 = 3;
pub(crate) const CHAIN_HOOK: u16 = 4;
pub(crate) const CHAIN_POLICY: u16 = 5;
pub(crate) const CHAIN_TYPE: u16 = 7;
pub(crate) const CHAIN_USERDATA: u16 = 12;
pub(crate) const HOOK_NUMBER: u16 = 1;
pub(crate) const HOOK_PRIORITY: u16 = 2;

pub(crate) const RULE_TABLE: u16 = 1;
pub(crate) const RULE_CHAIN: u16 = 2;
pub(crate) const RULE_HANDLE: u16 = 3;
pub(crate) const RULE_EXPRESSIONS: u16 = 4;
pub(crate) const RULE_USERDATA: u16 = 7;

pub(crate) const SET_TABLE: u16 = 1;
pub(crate) const SET_NAME: u16 = 2;
pub(crate) const SET_FLAGS: u16 = 3;
pub(crate) const SET_KEY_TYPE: u16 = 4;
pub(crate) const SET_KEY_LEN: u16 = 5;
pub(crate) const SET_DATA_TYPE: u16 = 6;
pub(crate) const SET_DATA_LEN: u16 = 7;
pub(crate) const SET_DESC: u16 = 9;
pub(crate) const SET_ID: u16 = 10;
pub(crate) const SET_TIMEOUT: u16 = 11;
pub(crate) const SET_USERDATA: u16 = 13;
pub(crate) const SET_HANDLE: u16 = 16;
pub(crate) const SET_COUNT: u16 = 20;
pub(crate) const SET_EXPR: u16 = 17;
pub(crate) const SET_DESC_SIZE: u16 = 1;
pub(crate) const SET_DESC_CONCAT: u16 = 2;
pub(crate) const SET_FIELD_LEN: u16 = 1;

pub(crate) const SET_F_INTERVAL: u32 = 0x4;
pub(crate) const SET_F_MAP: u32 = 0x8;
pub(crate) const SET_F_TIMEOUT: u32 = 0x10;
pub(crate) const SET_F_EVAL: u32 = 0x20;
/// Needed as soon as a concatenation is described; the kernel refuses the description without it.
pub(crate) const SET_F_CONCAT: u32 = 0x80;

pub(crate) const LIST_TABLE: u16 = 1;
pub(crate) const LIST_SET: u16 = 2;
pub(crate) const LIST_ELEMENTS: u16 = 3;

pub(crate) const ELEM_KEY: u16 = 1;
pub(crate) const ELEM_DATA: u16 = 2;
pub(crate) const ELEM_FLAGS: u16 = 3;
pub(crate) const ELEM_TIMEOUT: u16 = 4;
pub(crate) const ELEM_EXPIRATION: u16 = 5;
pub(crate) const ELEM_USERDATA: u16 = 6;
pub(crate) const ELEM_EXPR: u16 = 7;
pub(crate) const ELEM_KEY_END: u16 = 10;
pub(crate) const ELEM_EXPRESSIONS: u16 = 11;
pub(crate) const ELEM_F_INTERVAL_END: u32 = 1;
pub(crate) const ELEM_F_CATCHALL: u32 = 2;

pub(crate) const LIST_ITEM: u16 = 1;
pub(crate) const DATA_VALUE: u16 = 1;
pub(crate) const DATA_VERDICT: u16 = 2;
pub(crate) const VERDICT_CODE: u16 = 1;
pub(crate) const VERDICT_CHAIN: u16 = 2;
pub(crate) const DATA_TYPE_VERDICT: u32 = 0xffff_ff00;

const NFNL_MSG_BATCH_BEGIN: u16 = 0x10;
const NFNL_MSG_BATCH_END: u16 = 0x11;
const BATCH_GENID: u16 = 1;
/// `nfgenmsg`: family, version, resource.
pub(crate) const GENMSG_LEN: usize = 4;
pub(crate) const BATCH_END_LEN: usize = HEADER_LEN + GENMSG_LEN;

pub(crate) fn batch_begin(w: &mut Writer, generation: Option<u32>) {
    let start = w.begin_message(NFNL_MSG_BATCH_BEGIN, 0, 0);
    w.raw(&[0, 0, 0, (SUBSYS_NFTABLES >> 8) as u8]);
    if let Some(generation) = generation {
        w.be32(BATCH_GENID, generation);
    }
    w.end_message(start);
}

pub(crate) fn batch_end(w: &mut Writer, seq: u32) {
    let start = w.begin_message(NFNL_MSG_BATCH_END, 0, seq);
    w.raw(&[0, 0, 0, (SUBSYS_NFTABLES >> 8) as u8]);
    w.end_message(start);
}

/// Begins a message of nf_tables.
pub(crate) fn begin(w: &mut Writer, (kind, flags): (u16, u16), family: u8, seq: u32) -> usize {
    let start = w.begin_message(kind, flags, seq);
    genmsg(w, family);
    start
}

pub(crate) fn genmsg(w: &mut Writer, family: u8) {
    w.raw(&[family, 0, 0, 0]);
}

pub(crate) fn table(w: &mut Writer, table: &Table) {
    w.str(TABLE_NAME, &table.name);
    let flags = [(table.dormant, TABLE_F_DORMANT), (table.owned, TABLE_F_OWNER)];
    w.be32(TABLE_FLAGS, flags.iter().filter(|(set, _)| *set).map(|(_, flag)| flag).sum());
    if let Some(comment) = &table.comment {
        userdata::comment(w, TABLE_USERDATA, userdata::COMMENT, comment);
    }
}

pub(crate) fn table_name(w: &mut Writer, name: &str) {
    w.str(TABLE_NAME, name);
}

pub(crate) fn table_handle(w: &mut Writer, handle: u64) {
    w.be64(TABLE_HANDLE, handle);
}

pub(crate) fn chain(w: &mut Writer, table: &str, chain: &Chain) {
    chain_name(w, table, &chain.name);
    if let Some(base) = chain.base {
        base_chain(w, base);
    }
    if let Some(comment) = &chain.comment {
        userdata::comment(w, CHAIN_USERDATA, userdata::COMMENT, comment);
    }
}

fn base_chain(w: &mut Writer, base: Base) {
    let hook = match base.hook {
        Hook::Prerouting => 0,
        Hook::Input => 1,
        Hook::Forward => 2,
        Hook::Output => 3,
        Hook::Postrouting => 4,
        Hook::Other(number) => number,
    };
    w.nest(CHAIN_HOOK, |w| {
        w.be32(HOOK_NUMBER, hook);
        w.be32(HOOK_PRIORITY, base.priority.cast_unsigned());
    });
    w.be32(
        CHAIN_POLICY,
        match base.policy {
            Policy::Drop => 0,
            Policy::Accept => 1,
        },
    );
    w.str(
        CHAIN_TYPE,
        match base.kind {
            ChainKind::Filter => "filter",
            ChainKind::Nat => "nat",
            ChainKind::Route => "route",
            ChainKind::Other => "",
        },
    );
}

pub(crate) fn chain_name(w: &mut Writer, table: &str, chain: &str) {
    w.str(CHAIN_TABLE, table);
    w.str(CHAIN_NAME, chain);
}

pub(crate) fn rule(w: &mut Writer, table: &str, rule: &Rule, replaced: Option<u64>) {
    rule_ref(w, table, &rule.chain, replaced);
    w.nest(RULE_EXPRESSIONS, |w| {
        for expr in &rule.exprs {
            w.nest(LIST_ITEM, |w| encode_expr::expr(w, expr));
        }
    });
    if let Some(comment) = &rule.comment {
        userdata::comment(w, RULE_USERDATA, userdata::COMMENT, comment);
    }
}

pub(crate) fn rule_ref(w: &mut Writer, table: &str, chain: &str, handle: Option<u64>) {
    w.str(RULE_TABLE, table);
    w.str(RULE_CHAIN, chain);
    if let Some(handle) = handle {
        w.be64(RULE_HANDLE, handle);
    }
}

pub(crate) fn set_name(w: &mut Writer, table: &str, set: &str) {
    w.str(SET_TABLE, table);
    w.str(SET_NAME, set);
}

pub(crate) fn set(w: &mut Writer, table: &str, set: &Set, id: u32) {
    set_name(w, table, &set.name);
    w.be32(SET_FLAGS, set_flags(set));
    w.be32(SET_KEY_TYPE, concat_type(&set.key));
    w.be32(SET_KEY_LEN, set.key_len() as u32);
    match &set.value {
        None => {}
        Some(Value::Verdict) => {
            w.be32(SET_DATA_TYPE, DATA_TYPE_VERDICT);
            w.be32(SET_DATA_LEN, 0);
        }
        Some(Value::Fields(fields)) => {
            w.be32(SET_DATA_TYPE, concat_type(fields));
            w.be32(SET_DATA_LEN, fields_len(fields) as u32);
        }
        Some(Value::Range(fields)) => {
            w.be32(SET_DATA_TYPE, concat_type(fields));
            w.be32(SET_DATA_LEN, 2 * fields_len(fields) as u32);
        }
    }
    w.be32(SET_ID, id);
    if let Lifetime::Default(timeout) = set.lifetime {
        w.be64(SET_TIMEOUT, millis(timeout));
    }
    userdata::set(w, set);
    w.nest(SET_DESC, |w| set_description(w, set));
    if set.counter {
        w.nest(SET_EXPR, encode_expr::counter);
    }
}

fn set_flags(set: &Set) -> u32 {
    let mut flags = 0;
    if set.interval {
        flags |= SET_F_INTERVAL;
    }
    if set.value.is_some() {
        flags |= SET_F_MAP;
    }
    if set.lifetime != Lifetime::Forever {
        flags |= SET_F_TIMEOUT;
    }
    if set.dynamic {
        flags |= SET_F_EVAL;
    }
    if set.key.len() > 1 {
        flags |= SET_F_CONCAT;
    }
    flags
}

fn set_description(w: &mut Writer, set: &Set) {
    if let Some(size) = set.size {
        w.be32(SET_DESC_SIZE, size);
    }
    if set.key.len() > 1 {
        w.nest(SET_DESC_CONCAT, |w| {
            for field in &set.key {
                w.nest(LIST_ITEM, |w| w.be32(SET_FIELD_LEN, field.ty().len() as u32));
            }
        });
    }
}

/// The type numbers of the fields, six bits each.
fn concat_type(fields: &[Field]) -> u32 {
    fields.iter().fold(0, |number, field| number << 6 | u32::from(field.ty().id))
}

/// Begins a list of elements; [`Writer::end_attr`] ends it.
pub(crate) fn begin_elements(w: &mut Writer, table: &str, set: &str) -> usize {
    w.str(LIST_TABLE, table);
    w.str(LIST_SET, set);
    w.begin_nest(LIST_ELEMENTS)
}

pub(crate) fn element(w: &mut Writer, element: &Element<'_>) {
    w.nest(LIST_ITEM, |w| {
        let mut flags = 0;
        if element.interval_end {
            flags |= ELEM_F_INTERVAL_END;
        }
        if element.key.is_empty() {
            flags |= ELEM_F_CATCHALL;
        } else {
            value(w, ELEM_KEY, element.key);
        }
        if flags != 0 {
            w.be32(ELEM_FLAGS, flags);
        }
        if let Some(end) = element.key_end {
            value(w, ELEM_KEY_END, end);
        }
        match element.value {
            ElementValue::None => {}
            ElementValue::Bytes(bytes) => value(w, ELEM_DATA, bytes),
            ElementValue::Verdict(decision) => w.nest(ELEM_DATA, |w| verdict(w, decision)),
        }
        if let Some(timeout) = element.timeout {
            w.be64(ELEM_TIMEOUT, millis(timeout));
        }
        if let Some(left) = element.expires_in {
            w.be64(ELEM_EXPIRATION, millis(left));
        }
        if let Some(comment) = element.comment {
            userdata::comment(w, ELEM_USERDATA, userdata::COMMENT, comment);
        }
    });
}

/// A value in the nest that the kernel wants around each.
pub(crate) fn value(w: &mut Writer, kind: u16, bytes: &[u8]) {
    w.nest(kind, |w| w.attr(DATA_VALUE, bytes));
}

pub(crate) fn verdict(w: &mut Writer, verdict: Verdict<&str>) {
    let (code, chain) = match verdict {
        Verdict::Drop => (0, None),
        Verdict::Accept => (1, None),
        Verdict::Continue => (-1, None),
        Verdict::Break => (-2, None),
        Verdict::Jump(chain) => (-3, Some(chain)),
        Verdict::Goto(chain) => (-4, Some(chain)),
        Verdict::Return => (-5, None),
        Verdict::Other(code) => (code, None),
    };
    w.nest(DATA_VERDICT, |w| {
        w.be32(VERDICT_CODE, i32::cast_unsigned(code));
        if let Some(chain) = chain {
            w.str(VERDICT_CHAIN, chain);
        }
    });
}

pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Which element of a list begins at `offset` of the message.
pub(crate) fn element_index(message: &Message<'_>, offset: usize) -> Option<u32> {
    let mut attrs = Reader::new(message.body.get(GENMSG_LEN..)?);
    let list = loop {
        let attr = attrs.attr().ok()??;
        if attr.kind == LIST_ELEMENTS {
            break attr;
        }
    };
    let position = |attr: &Attr<'_>| {
        let start = attr.payload.as_ptr().addr() - message.body.as_ptr().addr();
        start - 4 + HEADER_LEN
    };
    let mut items = Reader::new(list.payload);
    let mut index = 0;
    while let Some(item) = items.attr().ok()? {
        if position(&item) == offset {
            return Some(index);
        }
        index += 1;
    }
    None
}
