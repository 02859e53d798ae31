// SPDX-License-Identifier: Apache-2.0

//! One listing, and whether it can be trusted.
//!
//! The kernel counts commits for all tables of a network namespace, and marks a listing during which there was one. It
//! does not stop there: it goes on to the end (5.13 to 6.18). So a listing that somebody's commit fell into is as good
//! as any, if the commit was about something else. A [`Witness`] knows: it hears what each commit changes.

use std::time::Duration;

use super::{
    batch::Batch,
    connection::Nft,
    decode::Generic,
    encode,
    monitor::{Change, Event, Monitor, Object},
    types::TableRef,
};
use crate::{
    Family,
    attr::{NLM_F_DUMP, Writer},
    error::Error,
    socket::{Socket, Transport},
};

/// What to list.
pub(super) struct Listing<'a> {
    request: (&'static str, u16),
    family: Family,
    /// Writes the request's body.
    ask: &'a dyn Fn(&mut Writer),
    /// Whether a change makes a listing that it fell into useless.
    spoils: &'a dyn Fn(&Change) -> bool,
}

impl<'a> Listing<'a> {
    pub(super) fn new(
        request: (&'static str, u16),
        family: Family,
        ask: &'a dyn Fn(&mut Writer),
        spoils: &'a dyn Fn(&Change) -> bool,
    ) -> Listing<'a> {
        Listing { request, family, ask, spoils }
    }
}

/// Whether a change is of this table, and if of elements, then of this set.
pub(super) fn is_of(change: &Change, table: TableRef<'_>, set: Option<&str>) -> bool {
    let is_here = change.family == Some(table.family) && change.table == table.name;
    is_here && (change.object != Object::Elements || change.name.as_deref() == set)
}

/// Whether a change makes chains of this family come or go.
pub(super) fn is_of_chains(change: &Change, family: Family) -> bool {
    change.family == Some(family) && matches!(change.object, Object::Table | Object::Chain)
}

/// Hears what is committed from the beginning of a listing on.
pub(super) struct Witness {
    monitor: Monitor<Socket>,
    /// The number of commits when it began.
    since: u32,
}

impl<T: Transport> Nft<T> {
    /// Lists until nobody has disturbed it. Most often the first time; from the second on a witness is there.
    pub(super) fn retry<R>(
        &mut self,
        mut attempt: impl FnMut(&mut Nft<T>, Option<Witness>) -> Result<R, Error>,
    ) -> Result<R, Error> {
        for number in 0..ATTEMPTS {
            let witness = if number == 0 { None } else { self.witness()? };
            match attempt(self, witness) {
                Err(Error::Interrupted) => {}
                outcome => return outcome,
            }
        }
        Err(Error::Interrupted)
    }

    /// Lists objects.
    pub(super) fn list<R>(
        &mut self,
        listing: &Listing<'_>,
        mut read: impl FnMut(&[u8]) -> Result<Option<R>, Error>,
    ) -> Result<Vec<R>, Error> {
        self.retry(|nft, witness| {
            let mut found = Vec::new();
            nft.dump(listing, witness, |attrs| {
                found.extend(read(attrs)?);
                Ok(())
            })?;
            Ok(found)
        })
    }

    /// One listing. It fails with [`Error::Interrupted`] unless all of it was said in one generation, or the witness says
    /// that the others do not matter.
    pub(super) fn dump(
        &mut self,
        listing: &Listing<'_>,
        witness: Option<Witness>,
        mut read: impl FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (what, kind) = listing.request;
        let mut generation = None;
        let mut moved = false;
        let fill = |w: &mut Writer| {
            encode::genmsg(w, listing.family.number());
            (listing.ask)(w);
        };
        let outcome = self.channel().exchange(what, (kind, NLM_F_DUMP), fill, |message| {
            let generic = Generic::read(message)?;
            // The kernel marks listings that changed under its hands, but not those of elements.
            moved |= *generation.get_or_insert(generic.generation) != generic.generation;
            match generic.family == Some(listing.family) {
                true => read(generic.attrs),
                false => Ok(()),
            }
        });
        match outcome {
            Err(Error::Interrupted) => moved = true,
            outcome => outcome?,
        }
        // A commit may also fall into the making of the last part, which then still bears the number from before.
        if let Some(generation) = generation.filter(|_| !moved) {
            moved = self.generation()? as u16 != generation;
        }
        let is_good = match witness {
            _ if !moved => true,
            Some(witness) => self.is_unspoiled(listing, witness)?,
            None => false,
        };
        if is_good { Ok(()) } else { Err(Error::Interrupted) }
    }

    /// Returns when no commit is under way. A new generation begins before what the commit removes is gone: the kernel counts
    /// what it removes as long as it is there, and a listing that began in between would pass over as many elements as go
    /// meanwhile, without a word.
    pub(super) fn await_commits(&mut self) -> Result<(), Error> {
        // A batch waits for the lock that whoever commits holds. An empty one changes nothing, and is not answered.
        self.channel().transport_mut().send(Batch::new().bytes())
    }

    fn witness(&mut self) -> Result<Option<Witness>, Error> {
        let Some(socket) = self.transport().sibling()? else { return Ok(None) };
        let monitor = Monitor::on(socket)?;
        // A commit that began before anybody listened is told in part, or not at all.
        self.await_commits()?;
        Ok(Some(Witness { monitor, since: self.generation()? }))
    }

    /// Whether nothing of what was committed since the witness came spoils the listing. What is not known does.
    fn is_unspoiled(&mut self, listing: &Listing<'_>, mut witness: Witness) -> Result<bool, Error> {
        let now = self.generation()?;
        // The number moves first. Whoever commits keeps the lock until all of it has been told.
        self.await_commits()?;
        let mut told = witness.since;
        loop {
            match witness.monitor.next(Duration::ZERO) {
                Ok(Some(Event::Change(change))) if (listing.spoils)(&change) => return Ok(false),
                Ok(Some(Event::Change(_))) => {}
                // What comes after is none of this listing's business, and may go on for ever.
                Ok(Some(Event::Generation { id, .. })) if id.wrapping_sub(now).cast_signed() >= 0 => {
                    return Ok(true);
                }
                Ok(Some(Event::Generation { id, .. })) => told = id,
                Ok(None) => return Ok(told == now),
                Err(Error::Overrun) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Whoever changes what we list between any two of this many listings would keep us listing forever.
const ATTEMPTS: usize = 10;
