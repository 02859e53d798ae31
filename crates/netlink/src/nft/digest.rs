// SPDX-License-Identifier: Apache-2.0

//! A number that stands for the rules of a chain, whoever made them and whatever they are made of.

use std::hash::{DefaultHasher, Hasher as _};

use super::{
    connection::Nft,
    decode_expr,
    encode::{self, RULE_CHAIN, RULE_EXPRESSIONS, RULE_TABLE, RULE_USERDATA, msg},
    listing::{Listing, is_of},
    monitor::Change,
    types::TableRef,
};
use crate::{attr::Writer, codec::each_attr, error::Error, socket::Transport};

impl<T: Transport> Nft<T> {
    /// Changes when a rule of the chain does, or their order, and not with what they count. A chain that is not there is
    /// as one without rules.
    pub fn digest(&mut self, table: TableRef<'_>, chain: &str) -> Result<u64, Error> {
        let ask = |w: &mut Writer| {
            w.str(encode::RULE_TABLE, table.name);
            w.str(encode::RULE_CHAIN, chain);
        };
        let spoils = |change: &Change| is_of(change, table, None);
        let listing = Listing::new(("list rules", msg::GETRULE), table.family, &ask, &spoils);
        self.retry(|nft, witness| {
            let mut digest = DefaultHasher::new();
            nft.dump(&listing, witness, |attrs| {
                let mut of_rule = DefaultHasher::new();
                if add(&mut of_rule, attrs, (table.name, chain))? {
                    digest.write_u64(of_rule.finish());
                }
                Ok(())
            })?;
            Ok(digest.finish())
        })
    }
}

/// Whether the rule is one of this chain.
pub(super) fn add(
    digest: &mut DefaultHasher,
    attrs: &[u8],
    (table, chain): (&str, &str),
) -> Result<bool, Error> {
    let mut is_here = [false; 2];
    each_attr(attrs, |attr| {
        match attr.kind {
            RULE_TABLE => is_here[0] = attr.str()? == table,
            RULE_CHAIN => is_here[1] = attr.str()? == chain,
            RULE_USERDATA => digest.write(attr.payload),
            RULE_EXPRESSIONS => attr.each(|item| {
                match decode_expr::counter(&item)? {
                    Some(_) => digest.write_u8(1),
                    None => digest.write(item.payload),
                }
                Ok(())
            })?,
            _ => {}
        }
        Ok(())
    })?;
    Ok(is_here == [true; 2])
}
