// SPDX-License-Identifier: Apache-2.0

//! Asks the kernel once whether it can do all that our tables need, and says in one sentence what it cannot.
//!
//! The question is a batch with every kind of set and rule, in a table of another name, that is never committed.

use model::{Family, PerFamily, PodTraffic};
use netlink::{
    Errno, Transport,
    nft::{self, Batch, Create, Nft, TableRef},
};

use super::{
    frame::{self, InUse, Surroundings, loopback_net},
    layout::{Kind, Mark, Side, Space, Way, wire},
    lower,
    program::{Chain, Frame, Rule},
    slots::Class,
    text::keyword,
};
use crate::{Loopback, Unsupported, names};

/// Whether the kernel can do all that tables of these families need.
pub(super) fn probe<T: Transport>(nft: &mut Nft<T>, families: PerFamily<bool>) -> Result<(), Unsupported> {
    for family in Family::BOTH.into_iter().filter(|family| families[*family]) {
        ask(nft, family, &everything(family, &[Way::Random(Class::of(3, None))]))?;
    }
    Ok(())
}

/// Whether the kernel can draw by a hash of the client, which not every kernel is built with and few services ask for.
pub(super) fn hashes<T: Transport>(nft: &mut Nft<T>, families: PerFamily<bool>) -> bool {
    let mut asked = Family::BOTH.into_iter().filter(|family| families[*family]);
    asked.all(|family| {
        let ways = [false, true].map(|port| Way::Hash { class: Class::of(3, None), port });
        match nft.rehearse(&Question::new(family, &everything(family, &ways)).batch) {
            // Anything else says nothing about what it can do.
            Err(error) => !error.is_not_found() && !error.is_unsupported(),
            Ok(()) => true,
        }
    })
}

/// Whether the kernel would take this frame.
pub(super) fn ask<T: Transport>(nft: &mut Nft<T>, family: Family, frame: &Frame) -> Result<(), Unsupported> {
    let question = Question::new(family, frame);
    let answer = nft.rehearse(&question.batch);
    answer.map_err(|error| Unsupported(question.reason(nft, family, frame, &error)))
}

/// A frame in which every statement occurs that drawing in these ways needs.
fn everything(family: Family, ways: &[Way]) -> Frame {
    let around = Surroundings {
        family,
        mark: 1,
        pods: Some(PodTraffic::Source(loopback_net(family))),
        all_addresses: true,
        loopback: Loopback::Served,
        service_cidrs: vec![loopback_net(family)],
        counted: true,
    };
    let (space, side) = (Space::Service, Side::Everyone);
    let kinds = ways.iter().flat_map(|way| {
        let kind = |mark| Kind { space, side, mark, sticky: true, way: *way };
        [kind(Mark::OffPods), kind(Mark::Always), Kind::drawing(space, side, *way)]
    });
    let kinds = kinds.collect();
    let in_use = InUse { kinds, timeouts_secs: [3_600].into(), firewall: true };
    frame::frame(&around, &in_use)
}

/// A batch that makes a frame, and what each of its operations asks for.
struct Question {
    batch: Batch,
    asked: Vec<Asked>,
}

/// What an operation asks for.
#[derive(Clone)]
enum Asked {
    Table,
    Object(String),
    Rule(Rule),
}

impl Question {
    fn new(family: Family, frame: &Frame) -> Question {
        let mut question = Question { batch: Batch::new(), asked: Vec::new() };
        let tag = question.ask(Asked::Table);
        let new = nft::Table::new(wire(family), names::PROBE_TABLE);
        question.batch.add_table(tag, &new, Create::IfMissing);
        for set in &frame.sets {
            let tag = question.ask(Asked::Object(format!("set {}", set.name)));
            question.batch.add_set(tag, table(family), set, Create::IfMissing);
        }
        for chain in &frame.chains {
            let tag = question.ask(Asked::Object(format!("chain {}", chain.name)));
            let new = nft::Chain { base: chain.base, ..nft::Chain::regular(&chain.name) };
            question.batch.add_chain(tag, table(family), &new, Create::IfMissing);
        }
        for chain in &frame.chains {
            for rule in &chain.rules {
                let tag = question.ask(Asked::Rule(rule.clone()));
                let exprs = lower::rule(family, rule);
                let rule = nft::Rule { chain: chain.name.clone(), exprs, comment: None };
                question.batch.add_rule(tag, table(family), &rule);
            }
        }
        question
    }

    fn ask(&mut self, asked: Asked) -> u32 {
        self.asked.push(asked);
        (self.asked.len() - 1) as u32
    }

    /// The sentence.
    fn reason<T: Transport>(
        &self,
        nft: &mut Nft<T>,
        family: Family,
        frame: &Frame,
        error: &netlink::Error,
    ) -> String {
        if error.is_permission() {
            return "nftables needs CAP_NET_ADMIN, which this process lacks".into();
        }
        let asked = error.tag().and_then(|tag| self.asked.get(tag as usize)).cloned();
        let reason = words(error);
        match asked {
            None => format!(
                "this kernel has no usable nf_tables: {reason}; load the module nf_tables, or choose another mode"
            ),
            Some(Asked::Table) => {
                format!("this kernel has no nf_tables for family {}: {reason}", keyword(family))
            }
            Some(Asked::Object(object)) => {
                format!(
                    "this kernel's nf_tables cannot make {object} in family {}: {reason}",
                    keyword(family)
                )
            }
            Some(Asked::Rule(rule)) => {
                let culprit = culprit(nft, family, frame, &rule).unwrap_or(rule);
                let statement = culprit.text(family);
                format!("this kernel's nf_tables lacks what `{statement}` needs: {reason}")
            }
        }
    }
}

/// The single statement of a rule that the kernel refuses.
fn culprit<T: Transport>(nft: &mut Nft<T>, family: Family, frame: &Frame, rule: &Rule) -> Option<Rule> {
    let alone = rule.0.iter().map(|statement| Rule(vec![statement.clone()]));
    let mut refused = alone.filter(|rule| {
        // In all chains the rule may stand in, since some statements are good in some only.
        frame.chains.iter().filter(|chain| chain.rules.iter().any(|of| of.0.contains(&rule.0[0]))).all(|of| {
            let mut frame = frame.clone();
            let chains = frame.chains.iter_mut();
            chains.for_each(|chain| chain.rules.clear());
            let empty = Chain { rules: vec![rule.clone()], ..of.clone() };
            frame.chains.retain(|chain| chain.name != of.name);
            frame.chains.push(empty);
            nft.rehearse(&Question::new(family, &frame).batch).is_err()
        })
    });
    refused.next()
}

/// The kernel's words, else its number's.
fn words(error: &netlink::Error) -> String {
    match error {
        netlink::Error::Kernel { extack: Some(extack), errno, .. } => format!("{extack} ({errno})"),
        netlink::Error::Kernel { errno, .. } => match *errno {
            Errno::NOENT => "its module is missing".into(),
            errno => errno.to_string(),
        },
        other => other.to_string(),
    }
}

fn table(family: Family) -> TableRef<'static> {
    TableRef { family: wire(family), name: names::PROBE_TABLE }
}
