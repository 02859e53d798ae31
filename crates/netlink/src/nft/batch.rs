// SPDX-License-Identifier: Apache-2.0

//! A batch: many changes that take force together or not at all.

use super::{
    encode::{self, msg},
    types::{Chain, Element, Rule, Set, Table, TableRef},
};
use crate::{
    Family,
    attr::{NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, Writer},
    codec::{Message, Reader},
    error::{Error, Op},
};

/// Whether an object may exist already when it is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Create {
    /// It must not: the batch fails with [`Error::already_exists`].
    Exclusive,
    /// It may: it stays as it is. If it is something else under that name, the batch fails.
    IfMissing,
}

/// Whether an object may be missing when it is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delete {
    /// It must be there: else the batch fails with [`Error::is_not_found`].
    Existing,
    /// It may be missing. Needs Linux 6.3; before, the batch fails.
    IfPresent,
}

/// Changes that [`Nft::commit`](super::Nft::commit) makes at once.
///
/// Each operation carries a tag of the caller's choice, by which an error names it. Operations take effect in order:
/// a chain must be added before a rule that jumps to it.
///
/// The kernel remembers each change until it has made all of them, so that the cost of an element grows with the
/// batch. Where nothing needs to be at once, batches of a few thousand elements are the cheapest.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Begin, operations, end. The last operation, and only it, asks for an acknowledgement.
    writer: Writer,
    /// One for each message between begin and end.
    messages: Vec<Posted>,
    elements: usize,
    operations: usize,
    /// The first operation that could not be written.
    spoiled_by: Option<u32>,
}

/// One message of a batch.
#[derive(Debug, Clone, Copy)]
struct Posted {
    tag: u32,
    /// Where it begins.
    start: usize,
    /// Elements of the same operation in messages before it.
    elements_before: u32,
}

impl Default for Batch {
    fn default() -> Batch {
        Batch::new()
    }
}

impl Batch {
    /// An empty batch.
    pub fn new() -> Batch {
        Batch::begin(None)
    }

    /// An empty batch that takes force only if nothing has changed since
    /// [`Nft::generation`](super::Nft::generation) gave this number; else it fails with [`Error::is_stale`].
    pub fn for_generation(generation: u32) -> Batch {
        Batch::begin(Some(generation))
    }

    fn begin(generation: Option<u32>) -> Batch {
        let mut writer = Writer::with_capacity(SMALL_BATCH);
        encode::batch_begin(&mut writer, generation);
        let mut batch = Batch { writer, messages: Vec::new(), elements: 0, operations: 0, spoiled_by: None };
        encode::batch_end(&mut batch.writer, 1);
        batch
    }

    /// Nothing to do.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.writer.len()
    }

    /// How many elements it adds or deletes.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// How many operations it has.
    pub fn operations(&self) -> usize {
        self.operations
    }

    /// The datagram.
    pub fn bytes(&self) -> &[u8] {
        self.writer.bytes()
    }

    /// Adds a table.
    pub fn add_table(&mut self, tag: u32, table: &Table, create: Create) {
        self.object(tag, (msg::NEWTABLE, create.flags()), table.family.number(), |w| encode::table(w, table));
    }

    /// Deletes a table and all that is in it.
    pub fn delete_table(&mut self, tag: u32, table: TableRef<'_>, delete: Delete) {
        let kind = delete.kind(msg::DELTABLE, msg::DESTROYTABLE);
        self.object(tag, (kind, 0), table.family.number(), |w| encode::table_name(w, table.name));
    }

    /// Deletes the table with this handle.
    pub fn delete_table_by_handle(&mut self, tag: u32, family: Family, handle: u64, delete: Delete) {
        let kind = delete.kind(msg::DELTABLE, msg::DESTROYTABLE);
        self.object(tag, (kind, 0), family.number(), |w| encode::table_handle(w, handle));
    }

    /// Adds a chain.
    pub fn add_chain(&mut self, tag: u32, table: TableRef<'_>, chain: &Chain, create: Create) {
        let family = table.family.number();
        self.object(tag, (msg::NEWCHAIN, create.flags()), family, |w| encode::chain(w, table.name, chain));
    }

    /// Deletes a chain with its rules. Nothing may jump to it any more.
    pub fn delete_chain(&mut self, tag: u32, table: TableRef<'_>, chain: &str, delete: Delete) {
        let kind = delete.kind(msg::DELCHAIN, msg::DESTROYCHAIN);
        self.object(tag, (kind, 0), table.family.number(), |w| encode::chain_name(w, table.name, chain));
    }

    /// Deletes all rules of a chain.
    pub fn flush_chain(&mut self, tag: u32, table: TableRef<'_>, chain: &str) {
        self.object(tag, (msg::DELRULE, 0), table.family.number(), |w| {
            encode::rule_ref(w, table.name, chain, None);
        });
    }

    /// Adds a rule at the end of its chain.
    pub fn add_rule(&mut self, tag: u32, table: TableRef<'_>, rule: &Rule) {
        self.object(tag, (msg::NEWRULE, NLM_F_CREATE | NLM_F_APPEND), table.family.number(), |w| {
            encode::rule(w, table.name, rule, None);
        });
    }

    /// Adds a rule at the beginning of its chain.
    pub fn insert_rule(&mut self, tag: u32, table: TableRef<'_>, rule: &Rule) {
        self.object(tag, (msg::NEWRULE, NLM_F_CREATE), table.family.number(), |w| {
            encode::rule(w, table.name, rule, None);
        });
    }

    /// Puts a rule in the place of another. It gets a handle of its own.
    pub fn replace_rule(&mut self, tag: u32, table: TableRef<'_>, handle: u64, rule: &Rule) {
        self.object(tag, (msg::NEWRULE, NLM_F_REPLACE), table.family.number(), |w| {
            encode::rule(w, table.name, rule, Some(handle));
        });
    }

    /// Deletes the rule with this handle.
    pub fn delete_rule(&mut self, tag: u32, table: TableRef<'_>, chain: &str, handle: u64) {
        self.object(tag, (msg::DELRULE, 0), table.family.number(), |w| {
            encode::rule_ref(w, table.name, chain, Some(handle));
        });
    }

    /// Adds a set or map.
    pub fn add_set(&mut self, tag: u32, table: TableRef<'_>, set: &Set, create: Create) {
        // The kernel wants a number by which a batch can name its new sets; ours go by their names.
        let id = u32::try_from(self.messages.len() + 1).unwrap_or(u32::MAX);
        let family = table.family.number();
        self.object(tag, (msg::NEWSET, create.flags()), family, |w| encode::set(w, table.name, set, id));
    }

    /// Deletes a set or map. No rule may use it any more.
    pub fn delete_set(&mut self, tag: u32, table: TableRef<'_>, set: &str, delete: Delete) {
        let kind = delete.kind(msg::DELSET, msg::DESTROYSET);
        self.object(tag, (kind, 0), table.family.number(), |w| encode::set_name(w, table.name, set));
    }

    /// Deletes all elements of a set or map.
    pub fn flush_set(&mut self, tag: u32, table: TableRef<'_>, set: &str) {
        self.object(tag, (msg::DELSETELEM, 0), table.family.number(), |w| {
            encode::set_name(w, table.name, set)
        });
    }

    /// Begins an operation that adds elements: those pushed into the writer.
    ///
    /// With [`Create::IfMissing`] an element that is there already must be mapped to the same.
    pub fn add_elements<'b>(
        &'b mut self,
        tag: u32,
        table: TableRef<'b>,
        set: &'b str,
        create: Create,
    ) -> ElementWriter<'b> {
        ElementWriter::new(self, tag, (msg::NEWSETELEM, create.flags()), (table, set))
    }

    /// Begins an operation that deletes elements. Only their keys matter.
    pub fn delete_elements<'b>(
        &'b mut self,
        tag: u32,
        table: TableRef<'b>,
        set: &'b str,
        delete: Delete,
    ) -> ElementWriter<'b> {
        let kind = delete.kind(msg::DELSETELEM, msg::DESTROYSETELEM);
        ElementWriter::new(self, tag, (kind, 0), (table, set))
    }

    fn object(&mut self, tag: u32, kind: (u16, u16), family: u8, fill: impl FnOnce(&mut Writer)) {
        self.operations += 1;
        let start = self.begin_message(tag, kind, family, 0);
        fill(&mut self.writer);
        self.end_message(start);
    }

    fn begin_message(
        &mut self,
        tag: u32,
        (kind, flags): (u16, u16),
        family: u8,
        elements_before: u32,
    ) -> usize {
        let end = self.writer.len() - encode::BATCH_END_LEN;
        self.writer.truncate(end);
        if let Some(last) = self.messages.last() {
            self.writer.set_flags(last.start, |flags| flags & !NLM_F_ACK);
        }
        self.messages.push(Posted { tag, start: end, elements_before });
        let seq = self.last_seq();
        encode::begin(&mut self.writer, (kind, flags | NLM_F_ACK), family, seq)
    }

    fn end_message(&mut self, start: usize) {
        self.writer.end_message(start);
        if self.writer.spoiled() && self.spoiled_by.is_none() {
            self.spoiled_by = self.messages.last().map(|message| message.tag);
        }
        let seq = self.last_seq().wrapping_add(1);
        encode::batch_end(&mut self.writer, seq);
    }

    /// The begin of the batch has sequence number 0, the messages follow from 1. Answers of an earlier batch cannot
    /// be taken for ours: they are thrown away before we send.
    fn last_seq(&self) -> u32 {
        u32::try_from(self.messages.len()).unwrap_or(u32::MAX)
    }

    /// The operation that could not be written, if any. The batch is not to be sent then.
    pub(crate) fn unencodable(&self) -> Option<Error> {
        self.spoiled_by.map(|tag| Error::Unencodable(Op::Tag(tag)))
    }

    /// The sequence number of the message that asks for an acknowledgement.
    pub(crate) fn ack_seq(&self) -> u32 {
        self.last_seq()
    }

    /// Which operation has the message with this sequence number.
    pub(crate) fn op(&self, seq: u32) -> Op {
        self.posted(seq).map_or(Op::Batch, |message| Op::Tag(message.tag))
    }

    /// Which element of its operation begins at `offset` of the message with this sequence number.
    pub(crate) fn element_at(&self, seq: u32, offset: u32) -> Option<u32> {
        let posted = self.posted(seq)?;
        let mut rest = Reader::new(self.bytes().get(posted.start..)?);
        let message = Message::next(&mut rest).ok()??;
        let index = encode::element_index(&message, offset as usize)?;
        posted.elements_before.checked_add(index)
    }

    fn posted(&self, seq: u32) -> Option<&Posted> {
        self.messages.get(usize::try_from(seq).ok()?.checked_sub(1)?)
    }
}

impl Create {
    fn flags(self) -> u16 {
        match self {
            Create::Exclusive => NLM_F_CREATE | NLM_F_EXCL,
            Create::IfMissing => NLM_F_CREATE,
        }
    }
}

impl Delete {
    fn kind(self, existing: u16, if_present: u16) -> u16 {
        match self {
            Delete::Existing => existing,
            Delete::IfPresent => if_present,
        }
    }
}

/// Writes the elements of one operation, in as many messages as they need. Ends when it is dropped.
#[derive(Debug)]
pub struct ElementWriter<'b> {
    batch: &'b mut Batch,
    table: TableRef<'b>,
    set: &'b str,
    tag: u32,
    kind: (u16, u16),
    pushed: u32,
    open: Option<OpenList>,
}

#[derive(Debug, Clone, Copy)]
struct OpenList {
    message: usize,
    list: usize,
}

impl<'b> ElementWriter<'b> {
    fn new(batch: &'b mut Batch, tag: u32, kind: (u16, u16), (table, set): (TableRef<'b>, &'b str)) -> Self {
        batch.operations += 1;
        ElementWriter { batch, table, set, tag, kind, pushed: 0, open: None }
    }

    /// Adds an element to the operation.
    pub fn push(&mut self, element: &Element<'_>) {
        let open = self.open.unwrap_or_else(|| self.open());
        encode::element(&mut self.batch.writer, element);
        self.batch.elements += 1;
        self.pushed = self.pushed.saturating_add(1);
        if self.batch.writer.len() - open.list > LIST_LEN {
            self.close();
        }
    }

    /// Adds several.
    pub fn extend<'e>(&mut self, elements: impl IntoIterator<Item = Element<'e>>) {
        for element in elements {
            self.push(&element);
        }
    }

    fn open(&mut self) -> OpenList {
        let family = self.table.family.number();
        let message = self.batch.begin_message(self.tag, self.kind, family, self.pushed);
        let list = encode::begin_elements(&mut self.batch.writer, self.table.name, self.set);
        let open = OpenList { message, list };
        self.open = Some(open);
        open
    }

    fn close(&mut self) {
        if let Some(open) = self.open.take() {
            self.batch.writer.end_attr(open.list);
            self.batch.end_message(open.message);
        }
    }
}

impl Drop for ElementWriter<'_> {
    fn drop(&mut self) {
        self.close();
    }
}

/// Room for a batch that puts one endpoint in another's place.
const SMALL_BATCH: usize = 512;
/// Elements go into lists of about this many bytes. An attribute holds 64 KiB at most; smaller lists make an error's
/// offset name the element sooner, and cost a header of some 60 bytes each.
const LIST_LEN: usize = 32 * 1024;
