// SPDX-License-Identifier: Apache-2.0

//! nf_tables: tables, chains, rules, sets and maps, written and read without the `nft` binary.
//!
//! ```no_run
//! use netlink::{Family, nft::*};
//!
//! # fn main() -> Result<(), netlink::Error> {
//! let table = TableRef { family: Family::V4, name: "example" };
//! let mut batch = Batch::new();
//! batch.add_table(1, &Table::new(table.family, table.name), Create::IfMissing);
//! batch.add_set(2, table, &Set::new("blocked", [Type::IPV4_ADDR.into()]), Create::IfMissing);
//! batch.add_elements(3, table, "blocked", Create::IfMissing).push(&Element::key(&[192, 0, 2, 1]));
//! Nft::open()?.commit(&batch)?;
//! # Ok(())
//! # }
//! ```
//!
//! What is listed compares equal to what was sent: see [`expr`].

mod batch;
mod connection;
mod decode;
mod decode_expr;
mod digest;
mod encode;
mod encode_expr;
pub mod expr;
mod listing;
mod monitor;
mod survey;
mod types;
mod userdata;

pub use batch::{Batch, Create, Delete, ElementWriter};
pub use connection::{Nft, Visit};
pub use expr::{
    CmpOp, CtKey, Direction, DynsetOp, Expr, FibFlags, FibResult, Header, MetaKey, NatFlags, NatKind,
    NumgenMode, Reg, Reject,
};
pub use monitor::{Change, Event, Monitor, Object};
pub use survey::Surveyed;
pub use types::{
    Base, Chain, ChainKind, Counter, Element, ElementValue, Field, Hook, Lifetime, Listed, ListedRule,
    Policy, Rule, Set, Table, TableRef, Type, Typeof, Value, Verdict,
};

/// For [`crate::fuzzing`].
pub(crate) mod fuzzing {
    use super::{Event, decode, digest, monitor};
    use crate::{Family, codec::Message};

    pub(crate) fn decode_message(message: &Message<'_>) {
        if let Ok(Some(event)) = monitor::event(message) {
            let _: u32 = Event::port(&event);
        }
        if let Ok(generic) = decode::Generic::read(message) {
            decode_attrs(generic.family.unwrap_or(Family::V4), generic.attrs);
        }
    }

    pub(crate) fn decode_attrs(family: Family, attrs: &[u8]) {
        decode::table(family, attrs).ok();
        decode::chain(attrs).ok();
        decode::rule(attrs).ok();
        decode::set(attrs).ok();
        decode::elements(attrs, |_| {}).ok();
        digest::add(&mut std::hash::DefaultHasher::new(), attrs, ("", "")).ok();
    }
}

#[cfg(test)]
mod tests;
