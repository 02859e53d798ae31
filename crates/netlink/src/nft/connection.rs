// SPDX-License-Identifier: Apache-2.0

//! The connection to nf_tables: commit batches, list objects.

use std::{
    collections::HashSet,
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use rustix::io::Errno;

use super::{
    batch::{Batch, Delete},
    decode::{self, Generic, InTable},
    encode::{self, msg},
    listing::{Listing, is_of, is_of_chains},
    monitor::{Change, Object},
    types::{Chain, Element, ElementValue, Listed, ListedRule, Set, Table, TableRef},
};
use crate::{
    Family,
    attr::{NLM_F_ACK, NLM_F_DUMP, Writer},
    channel::{Ack, Channel},
    codec::{Message, Reader, each_attr},
    error::{Error, Op},
    netns::Netns,
    socket::{Protocol, Socket, Transport},
};

/// A connection to nf_tables.
#[derive(Debug)]
pub struct Nft<T = Socket> {
    channel: Channel<T>,
    commits: u32,
}

/// What a listing of elements tells its visitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visit<'a> {
    /// The listing begins. It begins again if something changed meanwhile: forget what came before.
    Start,
    /// An element.
    Element(Element<'a>),
}

impl Nft<Socket> {
    /// Connects in the network namespace of this thread.
    pub fn open() -> Result<Nft<Socket>, Error> {
        Ok(Nft::over(Socket::open(Protocol::Netfilter)?))
    }

    /// Connects in another network namespace.
    pub fn open_in(netns: &Netns) -> Result<Nft<Socket>, Error> {
        Ok(Nft::over(Socket::open_in(netns, Protocol::Netfilter)?))
    }
}

impl<T: Transport> Nft<T> {
    /// A connection over any transport.
    pub fn over(transport: T) -> Nft<T> {
        Nft { channel: Channel::new(transport), commits: 0 }
    }

    /// The transport below.
    pub fn transport(&self) -> &T {
        self.channel.transport()
    }

    /// The transport below.
    pub fn transport_mut(&mut self) -> &mut T {
        self.channel.transport_mut()
    }

    pub(super) fn channel(&mut self) -> &mut Channel<T> {
        &mut self.channel
    }

    /// The number by which [`Event::port`](super::Event::port) tells our own changes from those of others.
    pub fn port(&self) -> u32 {
        self.channel.transport().port()
    }

    /// Waits no longer than this for an answer. It passes only when an answer was lost.
    pub fn set_patience(&mut self, patience: Duration) {
        self.channel.set_patience(patience);
    }

    /// Makes all changes of the batch, or none.
    ///
    /// The error is the first in the order of the batch, and names the operation by its tag. After
    /// [`Error::Kernel`], [`Error::TooLarge`] and [`Error::Unencodable`] nothing has changed; after the others it is
    /// unknown whether all or nothing has.
    pub fn commit(&mut self, batch: &Batch) -> Result<(), Error> {
        match self.post(batch)? {
            Some((seq, error)) => Err(located(batch, seq, error)),
            None => Ok(()),
        }
    }

    /// Asks whether the kernel would take the batch, and changes nothing.
    ///
    /// The kernel has no such question; but a batch with one impossible operation is never committed. What the kernel
    /// checks only when it commits, such as loops of jumps, is not found here.
    pub fn rehearse(&mut self, batch: &Batch) -> Result<(), Error> {
        let mut rehearsal = batch.clone();
        rehearsal.add_impossible();
        match self.post(&rehearsal)? {
            // Handles count up from 1.
            Some((seq, error)) if seq == rehearsal.ack_seq() && error.is_not_found() => Ok(()),
            Some((seq, error)) => Err(located(&rehearsal, seq, error)),
            None => Err(Error::Malformed("an impossible operation was accepted")),
        }
    }

    /// Sends the batch; the first error, and the sequence number of its message.
    fn post(&mut self, batch: &Batch) -> Result<Option<(u32, Error)>, Error> {
        if let Some(error) = batch.unencodable() {
            return Err(error);
        }
        if batch.is_empty() {
            return Ok(None);
        }
        let mut acknowledged = false;
        let mut first: Option<(Ack, Errno)> = None;
        let outcome = self.channel.batch(batch.bytes(), |ack| match ack.errno {
            None => acknowledged |= ack.seq == batch.ack_seq(),
            // Messages are worked on in order, and so are the answers. Only what concerns the batch as a whole
            // (it has the sequence number of the begin) may come out of order; it sorts first.
            Some(errno) if first.as_ref().is_none_or(|(known, _)| ack.seq < known.seq) => {
                first = Some((ack, errno))
            }
            Some(_) => {}
        });
        match (first, outcome) {
            // The kernel's word counts, even if it had more to say than we could hold.
            (Some((ack, errno)), _) => Ok(Some((ack.seq, ack.into_error(Op::Batch, errno)))),
            (None, Err(error)) => Err(error),
            (None, Ok(())) if acknowledged => {
                self.commits = self.commits.wrapping_add(1);
                Ok(None)
            }
            (None, Ok(())) => Err(Error::Malformed("a batch was not acknowledged")),
        }
    }

    /// The number of commits made by this connection: by so many has [`Nft::generation`] grown, if nobody else made one.
    pub fn commits(&self) -> u32 {
        self.commits
    }

    /// The number of commits there have been. It counts those of all tables and programs.
    pub fn generation(&mut self) -> Result<u32, Error> {
        let mut generation = None;
        let kind = (msg::GETGEN, NLM_F_ACK);
        self.channel.exchange(
            "read the generation",
            kind,
            |w| encode::genmsg(w, 0),
            |message| {
                let generic = Generic::read(message)?;
                each_attr(generic.attrs, |attr| {
                    if attr.kind == 1 {
                        generation = Some(attr.be32()?);
                    }
                    Ok(())
                })
            },
        )?;
        generation.ok_or(Error::Malformed("an answer without a generation"))
    }

    /// All tables of a family.
    pub fn tables(&mut self, family: Family) -> Result<Vec<Listed<Table>>, Error> {
        let spoils = |change: &Change| change.object == Object::Table && change.family == Some(family);
        let listing = Listing::new(("list tables", msg::GETTABLE), family, &|_| {}, &spoils);
        self.list(&listing, |attrs| Ok(Some(decode::table(family, attrs)?)))
    }

    /// One table; `None` if it is not there. Unlike a listing, nobody can disturb this.
    pub fn table(&mut self, table: TableRef<'_>) -> Result<Option<Table>, Error> {
        let mut found = None;
        let fill = |w: &mut Writer| {
            encode::genmsg(w, table.family.number());
            encode::table_name(w, table.name);
        };
        let outcome = self.channel.exchange("find a table", (msg::GETTABLE, NLM_F_ACK), fill, |message| {
            found = Some(decode::table(table.family, Generic::read(message)?.attrs)?.object);
            Ok(())
        });
        match outcome {
            Err(error) if error.is_not_found() => Ok(None),
            outcome => outcome.map(|()| found),
        }
    }

    /// All chains of a table. None if there is no such table.
    pub fn chains(&mut self, table: TableRef<'_>) -> Result<Vec<Listed<Chain>>, Error> {
        let read = |attrs: &[u8]| Ok(decode::chain(attrs)?.of(table));
        // The kernel goes by positions in the chains of all tables.
        let spoils = |change: &Change| is_of_chains(change, table.family);
        self.list(&Listing::new(("list chains", msg::GETCHAIN), table.family, &|_| {}, &spoils), read)
    }

    /// The tables of a family that have a chain whose name is `wanted`. One listing, however many tables there are.
    pub fn tables_with_chain(
        &mut self,
        family: Family,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<HashSet<String>, Error> {
        let spoils = |change: &Change| is_of_chains(change, family);
        let listing = Listing::new(("list chains", msg::GETCHAIN), family, &|_| {}, &spoils);
        let listed = self.list(&listing, |attrs| {
            let found = decode::chain(attrs)?;
            Ok(wanted(&found.object.object.name).then(|| found.table.to_owned()))
        })?;
        Ok(listed.into_iter().collect())
    }

    /// All rules of a table, chain by chain, in their order. None if there is no such table.
    pub fn rules(&mut self, table: TableRef<'_>) -> Result<Vec<ListedRule>, Error> {
        let ask = |w: &mut Writer| w.str(encode::RULE_TABLE, table.name);
        let spoils = |change: &Change| is_of(change, table, None);
        let listing = Listing::new(("list rules", msg::GETRULE), table.family, &ask, &spoils);
        self.list(&listing, |attrs| Ok(decode::rule(attrs)?.of(table)))
    }

    /// All rules of one chain, in their order. None if there is no such chain.
    pub fn rules_of(&mut self, table: TableRef<'_>, chain: &str) -> Result<Vec<ListedRule>, Error> {
        let ask = |w: &mut Writer| {
            w.str(encode::RULE_TABLE, table.name);
            w.str(encode::RULE_CHAIN, chain);
        };
        let spoils = |change: &Change| is_of(change, table, None);
        let listing = Listing::new(("list rules", msg::GETRULE), table.family, &ask, &spoils);
        self.list(&listing, |attrs| {
            Ok(decode::rule(attrs)?.of(table).filter(|listed| listed.rule.chain == chain))
        })
    }

    /// All sets and maps of a table. None if there is no such table.
    pub fn sets(&mut self, table: TableRef<'_>) -> Result<Vec<Listed<Set>>, Error> {
        self.list_sets(table, |attrs| Ok(decode::set(attrs)?.of(table)))
    }

    /// How many elements each set and map of a table holds, by its name. Older kernels do not say.
    pub fn set_sizes(&mut self, table: TableRef<'_>) -> Result<Vec<(String, Option<u32>)>, Error> {
        self.list_sets(table, |attrs| Ok(decode::set_size(attrs)?.of(table)))
    }

    fn list_sets<R>(
        &mut self,
        table: TableRef<'_>,
        read: impl FnMut(&[u8]) -> Result<Option<R>, Error>,
    ) -> Result<Vec<R>, Error> {
        let ask = |w: &mut Writer| w.str(encode::SET_TABLE, table.name);
        let spoils = |change: &Change| is_of(change, table, None);
        match self.list(&Listing::new(("list sets", msg::GETSET), table.family, &ask, &spoils), read) {
            // A table that is not there has no sets. For other objects the kernel gives an empty list by itself.
            Err(error) if error.is_not_found() => Ok(Vec::new()),
            listed => listed,
        }
    }

    /// Visits all elements of a set or map, in no order, without keeping them.
    ///
    /// Begins again, with [`Visit::Start`], when the set changed meanwhile; [`Error::Interrupted`] if that goes on.
    ///
    /// A hash table that grows while it is listed shows some elements twice and others never, and the kernel does not
    /// tell: that begins again as well.
    pub fn elements(
        &mut self,
        table: TableRef<'_>,
        set: &str,
        mut visit: impl FnMut(Visit<'_>),
    ) -> Result<(), Error> {
        let ask = |w: &mut Writer| {
            w.str(encode::LIST_TABLE, table.name);
            w.str(encode::LIST_SET, set);
        };
        let spoils = |change: &Change| is_of(change, table, Some(set));
        let listing = Listing::new(("list elements", msg::GETSETELEM), table.family, &ask, &spoils);
        self.retry(|nft, witness| {
            nft.await_commits()?;
            visit(Visit::Start);
            let mut seen = Seen::default();
            nft.dump(&listing, witness, |attrs| {
                let each = |element: &Element<'_>| {
                    seen.note(element);
                    visit(Visit::Element(*element));
                };
                decode::elements(attrs, each).map(|_| ())
            })?;
            if seen.twice {
                // Growing takes a moment.
                std::thread::sleep(Duration::from_millis(1));
                return Err(Error::Interrupted);
            }
            Ok(())
        })
    }

    /// One look at a set to which packets add elements, whatever is committed meanwhile: each element that shows was there.
    /// `false` if one showed twice: then the set grew, and others may not have shown.
    pub fn glance(
        &mut self,
        table: TableRef<'_>,
        set: &str,
        mut visit: impl FnMut(&Element<'_>),
    ) -> Result<bool, Error> {
        let fill = |w: &mut Writer| {
            encode::genmsg(w, table.family.number());
            w.str(encode::LIST_TABLE, table.name);
            w.str(encode::LIST_SET, set);
        };
        let mut seen = Seen::default();
        let listed = self.channel.exchange("list elements", (msg::GETSETELEM, NLM_F_DUMP), fill, |message| {
            let each = |element: &Element<'_>| {
                seen.note(element);
                visit(element);
            };
            decode::elements(Generic::read(message)?.attrs, each).map(|_| ())
        });
        match listed {
            Ok(()) | Err(Error::Interrupted) => Ok(!seen.twice),
            Err(error) => Err(error),
        }
    }

    /// Visits the elements with these keys, in their order: a look at a part of a set that costs no more than the part.
    ///
    /// A key that is missing ends it with [`Error::is_not_found`], and the error names it by its position.
    pub fn find_elements<'k>(
        &mut self,
        table: TableRef<'_>,
        set: &str,
        keys: impl IntoIterator<Item = Element<'k>>,
        mut visit: impl FnMut(&Element<'_>),
    ) -> Result<(), Error> {
        let mut keys = keys.into_iter().peekable();
        let mut asked = 0;
        while keys.peek().is_some() {
            let fill = |w: &mut Writer| {
                encode::genmsg(w, table.family.number());
                let list = encode::begin_elements(w, table.name, set);
                for key in keys.by_ref().take(FIND_AT_ONCE) {
                    encode::element(w, &Element { value: ElementValue::None, ..key });
                }
                w.end_attr(list);
            };
            let kind = (msg::GETSETELEM, NLM_F_ACK);
            let outcome = self.channel.exchange("find elements", kind, fill, |message| {
                decode::elements(Generic::read(message)?.attrs, |element| visit(element)).map(|_| ())
            });
            outcome.map_err(|error| self.locate_key(error, asked))?;
            asked += FIND_AT_ONCE as u32;
        }
        Ok(())
    }

    /// Says which key of the last request the error is about.
    fn locate_key(&self, mut error: Error, asked: u32) -> Error {
        if let Error::Kernel { offset: Some(offset), element, .. } = &mut error
            && let Ok(Some(message)) = Message::next(&mut Reader::new(self.channel.last_request()))
        {
            *element = encode::element_index(&message, *offset as usize).map(|index| index + asked);
        }
        error
    }
}

impl Batch {
    fn add_impossible(&mut self) {
        // No table ever gets this handle.
        self.delete_table_by_handle(u32::MAX, Family::V4, u64::MAX, Delete::Existing);
    }
}

impl<R> InTable<'_, R> {
    /// The object if it is in this table. Not every listing is restricted by the kernel.
    fn of(self, table: TableRef<'_>) -> Option<R> {
        (self.table == table.name).then_some(self.object)
    }
}

/// Finds out whether a listing shows an element twice, without keeping elements.
#[derive(Default)]
struct Seen {
    hashes: HashSet<u64>,
    /// Another one each time, so that two elements that happen to have the same hash have not the next time.
    hasher: RandomState,
    twice: bool,
}

impl Seen {
    fn note(&mut self, element: &Element<'_>) {
        let hash = self.hasher.hash_one((element.key, element.key_end, element.interval_end));
        self.twice |= !self.hashes.insert(hash);
    }
}

fn located(batch: &Batch, seq: u32, error: Error) -> Error {
    match error {
        Error::Kernel { errno, extack, offset, .. } => Error::Kernel {
            op: batch.op(seq),
            errno,
            extack,
            offset,
            element: offset.and_then(|offset| batch.element_at(seq, offset)),
        },
        other => other,
    }
}

/// The kernel answers with a message for each, all of them before we read the first: they must fit the receive buffer.
const FIND_AT_ONCE: usize = 256;
