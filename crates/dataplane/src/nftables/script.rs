// SPDX-License-Identifier: Apache-2.0

//! A batch under construction, that remembers what each of its operations is about: when the kernel refuses one,
//! the error names the service and not a number.

use std::net::IpAddr;

use model::{Family, Plan};
use netlink::{
    Errno,
    nft::{self, Batch, Create, Delete, Element, ElementValue, ElementWriter, TableRef},
};

use super::{
    diff::FrameDelta,
    entry::{Mapped, Placed},
    holdings::Holdings,
    layout::{Container, wire},
    lower,
    program::Chain,
    render,
    text::keyword,
    turn::{AddressChange, Chunk},
};
use crate::{Error, names};

/// See the module.
pub(super) struct Script {
    family: Family,
    pub(super) batch: Batch,
    pub(super) added: u64,
    pub(super) removed: u64,
    pub(super) chains: u64,
    /// By tag.
    operations: Vec<Operation>,
}

struct Operation {
    act: &'static str,
    object: Object,
}

/// What an operation works on. Without names that must be allocated for elements, since there are so many.
enum Object {
    Table,
    /// A set or chain.
    Named(String),
    Elements(Container, Subject),
}

/// On whose behalf elements change.
#[derive(Clone, Copy)]
pub(super) enum Subject {
    /// The frontend at this place of the chunk.
    Unit(usize),
    Address(IpAddr),
    /// Nobody's.
    Strays,
}

impl Script {
    /// A batch for our table of a family.
    pub(super) fn new(family: Family) -> Script {
        Script { family, batch: Batch::new(), added: 0, removed: 0, chains: 0, operations: Vec::new() }
    }

    /// Creates what is new of sets and chains, and writes rules.
    pub(super) fn begin_frame(&mut self, holdings: &Holdings, delta: &FrameDelta<'_>) {
        if holdings.replace {
            let tag = self.tag("delete", Object::Table);
            self.batch.delete_table(tag, table(self.family), Delete::Existing);
        }
        if !holdings.exists {
            let comment = Some(names::TABLE_COMMENT.to_owned());
            let new = nft::Table { comment, ..nft::Table::new(wire(self.family), names::TABLE) };
            let tag = self.tag("create", Object::Table);
            self.batch.add_table(tag, &new, Create::IfMissing);
        }
        for set in &delta.added_sets {
            let tag = self.frame_tag("create set", &set.name);
            self.batch.add_set(tag, table(self.family), set, Create::IfMissing);
        }
        for chain in &delta.added_chains {
            let tag = self.frame_tag("create chain", &chain.name);
            let new = nft::Chain { base: chain.base, ..nft::Chain::regular(&chain.name) };
            self.batch.add_chain(tag, table(self.family), &new, Create::IfMissing);
        }
        for written in &delta.written {
            self.chains += 1;
            if written.flush {
                let tag = self.frame_tag("empty chain", &written.chain.name);
                self.batch.flush_chain(tag, table(self.family), &written.chain.name);
            }
            self.rules(written.chain);
        }
    }

    fn rules(&mut self, chain: &Chain) {
        for rule in &chain.rules {
            let tag = self.frame_tag("write a rule of chain", &chain.name);
            let exprs = lower::rule(self.family, rule);
            let rule = nft::Rule { chain: chain.name.clone(), exprs, comment: None };
            self.batch.add_rule(tag, table(self.family), &rule);
        }
    }

    /// Removes what is gone of sets and chains.
    pub(super) fn end_frame(&mut self, delta: &FrameDelta<'_>) {
        self.remove_objects(&delta.removed_chains, &delta.removed_sets);
    }

    /// Removes all of these chains and sets: first all rules, since one chain may jump to another; then sets, since a map
    /// may lead to a chain.
    pub(super) fn remove_objects(&mut self, chains: &[&str], sets: &[&str]) {
        self.empty_chains(chains);
        for set in sets {
            let tag = self.frame_tag("delete set", set);
            self.batch.delete_set(tag, table(self.family), set, Delete::Existing);
        }
        for chain in chains {
            self.chains += 1;
            let tag = self.frame_tag("delete chain", chain);
            self.batch.delete_chain(tag, table(self.family), chain, Delete::Existing);
        }
    }

    /// Removes all rules of these chains.
    pub(super) fn empty_chains(&mut self, chains: &[&str]) {
        for chain in chains {
            let tag = self.frame_tag("empty chain", chain);
            self.batch.flush_chain(tag, table(self.family), chain);
        }
    }

    /// Removes elements. One operation for each run of elements of one set.
    pub(super) fn remove(&mut self, subject: Subject, elements: &[Placed]) {
        self.removed += elements.len() as u64;
        for run in elements.chunk_by(|a, b| a.container == b.container) {
            let set = run[0].container.name();
            let tag = self.tag("remove from", Object::Elements(run[0].container, subject));
            let mut writer = self.batch.delete_elements(tag, table(self.family), &set, Delete::Existing);
            run.iter().for_each(|placed| writer.push(&key_only(placed)));
        }
    }

    /// Adds elements. An element that is there already is no error, if it is the same.
    pub(super) fn add(&mut self, subject: Subject, elements: &[Placed]) {
        self.added += elements.len() as u64;
        for run in elements.chunk_by(|a, b| a.container == b.container) {
            let set = run[0].container.name();
            let tag = self.tag("add to", Object::Elements(run[0].container, subject));
            let mut writer = self.batch.add_elements(tag, table(self.family), &set, Create::IfMissing);
            run.iter().for_each(|placed| push(&mut writer, placed));
        }
    }

    pub(super) fn address(&mut self, change: &AddressChange) {
        let placed = [render::plain(change.container, change.address)];
        let subject = Subject::Address(change.address);
        if change.added {
            self.add(subject, &placed);
        } else {
            self.remove(subject, &placed);
        }
    }

    /// On whose behalf the elements are that the kernel does not take; `None` where it is not about one object.
    pub(super) fn culprit(&self, error: &netlink::Error) -> Option<Subject> {
        let passes = matches!(error.errno(), Some(Errno::NOMEM | Errno::NOBUFS | Errno::BUSY | Errno::AGAIN));
        let is_of_node = passes || error.is_permission();
        match self.operations.get(error.tag()? as usize)?.object {
            Object::Elements(_, subject) if !is_of_node => Some(subject),
            _ => None,
        }
    }

    /// Which operation an error is about, in words.
    pub(super) fn explain(&self, error: netlink::Error, chunk: &Chunk, plan: &Plan) -> Error {
        let table = format!("table {} {}", keyword(self.family), names::TABLE);
        let operation = error.tag().and_then(|tag| self.operations.get(tag as usize));
        let Some(operation) = operation else {
            return Error::kernel("commit to", table, error);
        };
        let object = match &operation.object {
            Object::Table => table,
            Object::Named(name) => format!("{name} in {table}"),
            Object::Elements(set, subject) => {
                format!("{} in {table} {}", set.name(), subject.explain(chunk, plan))
            }
        };
        Error::kernel(operation.act, object, error)
    }

    pub(super) fn frame_tag(&mut self, act: &'static str, name: &str) -> u32 {
        self.tag(act, Object::Named(name.to_owned()))
    }

    fn tag(&mut self, act: &'static str, object: Object) -> u32 {
        self.operations.push(Operation { act, object });
        (self.operations.len() - 1) as u32
    }
}

impl Subject {
    fn explain(self, chunk: &Chunk, plan: &Plan) -> String {
        match self {
            Subject::Unit(index) => match chunk.units.get(index) {
                Some(unit) => {
                    format!("for {}", render::describe(&unit.frontend, plan.decision(&unit.frontend)))
                }
                None => "for a frontend".into(),
            },
            Subject::Address(address) => format!("the address {address}"),
            Subject::Strays => "an element that is not ours".into(),
        }
    }
}

/// Our table of a family.
pub(super) fn table(family: Family) -> TableRef<'static> {
    TableRef { family: wire(family), name: names::TABLE }
}

fn push(writer: &mut ElementWriter<'_>, placed: &Placed) {
    let chain;
    let value = match &placed.value {
        Mapped::Endpoint(bytes) => ElementValue::Bytes(bytes),
        Mapped::Chain(kind) => {
            chain = kind.name();
            ElementValue::Verdict(nft::Verdict::Goto(&chain))
        }
        Mapped::Nothing | Mapped::Foreign => ElementValue::None,
    };
    writer.push(&Element { value, ..key_only(placed) });
}

fn key_only(placed: &Placed) -> Element<'_> {
    let key_end = placed.key_end.as_deref().map(|bytes| &bytes[..]);
    Element { key_end, ..Element::key(&placed.key) }
}
