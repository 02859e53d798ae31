// SPDX-License-Identifier: Apache-2.0

//! Reads tables from the kernel.

use std::collections::BTreeMap;

use model::Family;
use netlink::{
    Transport,
    nft::{self, ElementValue, Nft, Verdict, Visit},
};

use super::{
    holdings::{self, Holdings},
    layout::{Container, Kind},
    lift,
    program::{Bytes, Chain, Element, Frame, Program, Value},
    readback::Readback,
    script::table,
};
use crate::{
    Error,
    names::{self, chain, hook},
};

/// What our table of a family holds.
pub(super) fn read<T: Transport>(nft: &mut Nft<T>, family: Family) -> Result<Holdings, Error> {
    read_holdings(nft, family).map_err(|error| failed(family, error))
}

/// Sets, and chains with their rules, of our table of a family; `None` if there is none, or it is switched off.
pub(super) fn frame<T: Transport>(nft: &mut Nft<T>, family: Family) -> Result<Option<Frame>, Error> {
    let frame = |nft: &mut Nft<T>| match nft.table(table(family))? {
        Some(found) if !found.dormant => read_frame(nft, family).map(Some),
        _ => Ok(None),
    };
    frame(nft).map_err(|error| failed(family, error))
}

/// Our table of a family as it is, whoever wrote what is in it; `None` if there is none.
pub(super) fn program<T: Transport>(nft: &mut Nft<T>, family: Family) -> Result<Option<Program>, Error> {
    read_program(nft, family).map_err(|error| failed(family, error))
}

fn failed(family: Family, error: netlink::Error) -> Error {
    Error::kernel("read", format!("table {} {}", super::text::keyword(family), names::TABLE), error)
}

fn read_holdings<T: Transport>(nft: &mut Nft<T>, family: Family) -> Result<Holdings, netlink::Error> {
    let Some(found) = nft.table(table(family))? else { return Ok(Holdings::default()) };
    let (frame, foreign) = sort_out(read_frame(nft, family)?);
    let unlike = |set: &nft::Set| {
        Container::parse(&set.name).is_none_or(|container| container.definition(family, set.counter) != *set)
    };
    if found.dormant || frame.sets.iter().any(unlike) {
        return Ok(Holdings { exists: false, replace: true, ..Holdings::default() });
    }
    let mut readback = Readback::new(family);
    for set in &frame.sets {
        let Some(container) = Container::parse(&set.name).filter(|it| *it != Container::Affinity) else {
            continue;
        };
        nft.elements(table(family), &set.name, |visit| match visit {
            Visit::Start => readback.begin(container),
            Visit::Element(element) => readback.element(container, &element),
        })?;
    }
    let installed = holdings::installed(&frame);
    Ok(Holdings { exists: true, frame, foreign, installed, ..readback.finish() })
}

fn read_program<T: Transport>(nft: &mut Nft<T>, family: Family) -> Result<Option<Program>, netlink::Error> {
    if nft.table(table(family))?.is_none() {
        return Ok(None);
    }
    let frame = read_frame(nft, family)?;
    let mut elements = BTreeMap::new();
    for set in &frame.sets {
        let mut of_set = BTreeMap::new();
        nft.elements(table(family), &set.name, |visit| match visit {
            Visit::Start => of_set.clear(),
            Visit::Element(element) => of_set.extend(printable(&element)),
        })?;
        elements.insert(set.name.clone(), of_set);
    }
    Ok(Some(Program { family, frame, elements }))
}

fn read_frame<T: Transport>(nft: &mut Nft<T>, family: Family) -> Result<Frame, netlink::Error> {
    let sets = nft.sets(table(family))?.into_iter().map(|listed| listed.object).collect();
    let mut chains: Vec<Chain> = Vec::new();
    for listed in nft.chains(table(family))? {
        chains.push(Chain { name: listed.object.name, base: listed.object.base, rules: Vec::new() });
    }
    for listed in nft.rules(table(family))? {
        // A chain may have come between the two listings. Then it is not ours, and seen the next time.
        if let Some(chain) = chains.iter_mut().find(|chain| chain.name == listed.rule.chain) {
            chain.rules.push(lift::rule(family, &listed.rule.exprs));
        }
    }
    Ok(Frame { sets, chains })
}

/// What is ours, and what is not, going by the names. What the kernel named itself is part of the rule that uses it, goes
/// with it, and cannot be deleted.
fn sort_out(mut frame: Frame) -> (Frame, Frame) {
    frame.chains.retain(|chain| chain.base.is_some() || !chain.name.starts_with("__chain"));
    frame.sets.retain(|set| !["__set", "__map"].iter().any(|prefix| set.name.starts_with(prefix)));
    let is_ours =
        |name: &str| hook::ALL.contains(&name) || chain::ALL.contains(&name) || Kind::parse(name).is_some();
    let (chains, foreign_chains) = frame.chains.into_iter().partition(|chain| is_ours(&chain.name));
    let (sets, foreign_sets) =
        frame.sets.into_iter().partition(|set: &nft::Set| Container::parse(&set.name).is_some());
    (Frame { sets, chains }, Frame { sets: foreign_sets, chains: foreign_chains })
}

fn printable(element: &nft::Element<'_>) -> Option<(Bytes, Element)> {
    let value = match element.value {
        ElementValue::None => Value::None,
        ElementValue::Bytes(bytes) => Value::Bytes(Bytes::new(bytes)?),
        ElementValue::Verdict(Verdict::Goto(chain)) => Value::Goto(chain.to_owned()),
        ElementValue::Verdict(verdict) => Value::Foreign(format!("{verdict:?}")),
    };
    let timeout_secs = element.timeout.and_then(|timeout| u32::try_from(timeout.as_secs()).ok());
    let key_end = element.key_end.and_then(Bytes::new);
    Some((Bytes::new(element.key)?, Element { key_end, value, timeout_secs }))
}
