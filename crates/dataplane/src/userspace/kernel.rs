// SPDX-License-Identifier: Apache-2.0

//! Reads and writes the table of a family.

use std::collections::BTreeSet;

use model::Family;
use netlink::{
    Transport,
    nft::{self, Batch, Create, Delete, Element, Nft, TableRef, Visit},
};

use super::{
    elements::{Place, Placed},
    frame::Written,
};
use crate::{
    Applied, Error,
    names::{self, userspace::TABLE},
    nftables::{program::Bytes, wire},
};

/// What a table holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Holdings {
    pub(super) chains: Vec<Written>,
    pub(super) elements: BTreeSet<Placed>,
    pub(super) exists: bool,
    /// Something is in the way that cannot be changed in place.
    replace: bool,
}

pub(super) fn table(family: Family) -> TableRef<'static> {
    TableRef { family: wire(family), name: TABLE }
}

/// What the table of a family holds; something by others' hands makes it one to be written anew.
pub(super) fn read<T: Transport>(nft: &mut Nft<T>, family: Family) -> Result<Holdings, Error> {
    read_table(nft, family)
        .map_err(|error| Error::kernel("read", format!("table {} {TABLE}", wire(family)), error))
}

fn read_table<T: Transport>(nft: &mut Nft<T>, family: Family) -> Result<Holdings, netlink::Error> {
    let tables = nft.tables(wire(family))?;
    let Some(found) = tables.into_iter().find(|listed| listed.object.name == TABLE) else {
        return Ok(Holdings::default());
    };
    let mut holdings = Holdings { exists: true, replace: found.object.dormant, ..Holdings::default() };
    for listed in nft.sets(table(family))? {
        let place = Place::parse(&listed.object.name);
        let Some(place) = place.filter(|place| place.definition(family) == listed.object) else {
            holdings.replace = true;
            continue;
        };
        let mut found = Vec::new();
        nft.elements(table(family), place.name(), |visit| match visit {
            Visit::Start => found.clear(),
            Visit::Element(element) => {
                let key_end = element.key_end.and_then(Bytes::new);
                found.extend(Bytes::new(element.key).map(|key| (place, key, key_end)));
            }
        })?;
        holdings.elements.extend(found);
    }
    for listed in nft.chains(table(family))? {
        holdings.chains.push(Written { chain: listed.object, rules: Vec::new() });
    }
    for listed in nft.rules(table(family))? {
        let chain = holdings.chains.iter_mut().find(|written| written.chain.name == listed.rule.chain);
        if let Some(written) = chain {
            written.rules.push(listed.rule.exprs);
        }
    }
    Ok(holdings)
}

impl Holdings {
    /// What is there cannot be changed into this, but only be made anew.
    pub(super) fn is_to_be_replaced(&self, chains: &[Written]) -> bool {
        let same_base = |written: &Written| {
            let known = self.chains.iter().find(|known| known.chain.name == written.chain.name);
            known.is_none_or(|known| known.chain.base == written.chain.base)
        };
        self.replace || !self.exists || !chains.iter().all(same_base)
    }
}

/// A table with nothing in its sets, to be rehearsed.
pub(super) fn probe(family: Family, chains: &[Written]) -> Batch {
    let mut batch = Batch::new();
    write_frame(&mut batch, (family, names::PROBE_TABLE), &mut Holdings::default(), chains);
    batch
}

/// Makes a table what is wanted, in one commit. `holdings` is what it has, and then what it has become.
pub(super) fn write<T: Transport>(
    nft: &mut Nft<T>,
    family: Family,
    holdings: &mut Holdings,
    wanted: (Option<Vec<Written>>, Vec<Placed>, Vec<Placed>),
    applied: &mut Applied,
) -> Result<(), Error> {
    let (chains, removed, added) = wanted;
    let mut batch = Batch::new();
    if let Some(chains) = &chains {
        applied.chains += write_frame(&mut batch, (family, TABLE), holdings, chains);
    }
    let replaced = holdings.replace || !holdings.exists;
    if !replaced {
        elements(&removed, |place, of_place| {
            let mut writer = batch.delete_elements(0, table(family), place.name(), Delete::Existing);
            of_place.iter().for_each(|placed| writer.push(&element(placed)));
        });
    }
    elements(&added, |place, of_place| {
        let mut writer = batch.add_elements(0, table(family), place.name(), Create::IfMissing);
        of_place.iter().for_each(|placed| writer.push(&element(placed)));
    });
    if !batch.is_empty() {
        nft.commit(&batch)
            .map_err(|error| Error::kernel("write", format!("table {} {TABLE}", wire(family)), error))?;
        applied.batches += 1;
        applied.added += added.len() as u64;
        applied.removed += removed.len() as u64;
    }
    for placed in &removed {
        holdings.elements.remove(placed);
    }
    holdings.elements.extend(added);
    holdings.chains = chains.unwrap_or_else(|| std::mem::take(&mut holdings.chains));
    (holdings.exists, holdings.replace) = (true, false);
    Ok(())
}

/// Sets and chains; returns how many chains differ.
fn write_frame(batch: &mut Batch, at: (Family, &str), has: &mut Holdings, wants: &[Written]) -> u64 {
    let (family, name) = at;
    let table = |_| TableRef { family: wire(family), name };
    if has.exists && has.is_to_be_replaced(wants) {
        batch.delete_table(0, table(family), Delete::Existing);
        *has = Holdings { replace: true, ..Holdings::default() };
    }
    if !has.exists {
        let comment = Some(names::TABLE_COMMENT.to_owned());
        let new = nft::Table { comment, ..nft::Table::new(wire(family), name) };
        batch.add_table(0, &new, Create::IfMissing);
        for place in Place::ALL {
            batch.add_set(0, table(family), &place.definition(family), Create::IfMissing);
        }
    }
    let differs = |written: &&Written| !has.chains.contains(written);
    let different: Vec<&Written> = wants.iter().filter(differs).collect();
    for written in &different {
        batch.add_chain(0, table(family), &written.chain, Create::IfMissing);
    }
    for written in &different {
        let name = &written.chain.name;
        if has.chains.iter().any(|known| known.chain.name == *name && !known.rules.is_empty()) {
            batch.flush_chain(0, table(family), name);
        }
        for exprs in &written.rules {
            let rule = nft::Rule { chain: name.clone(), exprs: exprs.clone(), comment: None };
            batch.add_rule(0, table(family), &rule);
        }
    }
    let is_wanted = |name: &str| wants.iter().any(|written| written.chain.name == name);
    let strangers: Vec<&str> =
        has.chains.iter().map(|it| it.chain.name.as_str()).filter(|it| !is_wanted(it)).collect();
    for name in &strangers {
        batch.flush_chain(0, table(family), name);
    }
    for name in &strangers {
        batch.delete_chain(0, table(family), name, Delete::Existing);
    }
    (different.len() + strangers.len()) as u64
}

fn elements(placed: &[Placed], mut each: impl FnMut(Place, &[Placed])) {
    let mut sorted = placed.to_vec();
    sorted.sort_unstable();
    for of_place in sorted.chunk_by(|a, b| a.0 == b.0) {
        each(of_place[0].0, of_place);
    }
}

fn element(placed: &Placed) -> Element<'_> {
    match &placed.2 {
        Some(last) => Element::range(&placed.1, last),
        None => Element::key(&placed.1),
    }
}
