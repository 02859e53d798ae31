// SPDX-License-Identifier: Apache-2.0

//! Listings of the real kernel while others commit.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use crate::{Error, Family, Socket, Transport, nft::*, testing::scratch_netns};

const OURS: TableRef<'static> = TableRef { family: Family::V4, name: "ours" };
const THEIRS: TableRef<'static> = TableRef { family: Family::V4, name: "theirs" };
/// So many that they come in several parts.
const ALL: u32 = 5_000;

/// Our table with many elements, and somebody else's.
fn make(nft: &mut Nft) {
    let mut batch = Batch::new();
    for table in [THEIRS, OURS] {
        batch.add_table(1, &Table::new(table.family, table.name), Create::Exclusive);
        batch.add_chain(2, table, &Chain::regular("chain"), Create::Exclusive);
        for set in ["set", "other"] {
            batch.add_set(3, table, &Set::new(set, [Type::IPV4_ADDR.into()]), Create::Exclusive);
        }
        let rule = Rule { chain: "chain".into(), exprs: vec![Expr::Verdict(Verdict::Drop)], comment: None };
        batch.add_rule(4, table, &rule);
    }
    let mut writer = batch.add_elements(5, OURS, "set", Create::Exclusive);
    (0..ALL).for_each(|i| writer.push(&Element::key(&i.to_be_bytes())));
    drop(writer);
    nft.commit(&batch).expect("commit");
    // A hash table that has just grown settles within that time also on a slow machine.
    std::thread::sleep(Duration::from_millis(100));
}

fn count<T: Transport>(nft: &mut Nft<T>) -> Result<u32, Error> {
    let mut found = 0;
    nft.elements(OURS, "set", |visit| match visit {
        Visit::Start => found = 0,
        Visit::Element(_) => found += 1,
    })?;
    Ok(found)
}

fn all_of_it<T: Transport>(nft: &mut Nft<T>) -> Result<(), Error> {
    assert_eq!(nft.table(OURS)?.expect("our table").name, OURS.name);
    assert_eq!((nft.sets(OURS)?.len(), nft.chains(OURS)?.len()), (2, 1));
    assert_eq!((nft.rules(OURS)?.len(), nft.rules_of(OURS, "chain")?.len()), (1, 1));
    nft.digest(OURS, "chain")?;
    assert_eq!(count(nft)?, ALL);
    Ok(())
}

/// Does something between any two datagrams that are received.
struct Meddling<F>(Socket, F);

impl<F: FnMut() + Send> Transport for Meddling<F> {
    fn send(&mut self, datagram: &[u8]) -> Result<(), Error> {
        self.0.send(datagram)
    }

    fn recv(&mut self, buffer: &mut Vec<u8>, wait: Duration) -> Result<bool, Error> {
        let received = self.0.recv(buffer, wait)?;
        (self.1)();
        Ok(received)
    }

    fn port(&self) -> u32 {
        self.0.port()
    }

    fn sibling(&self) -> Result<Option<Socket>, Error> {
        self.0.sibling()
    }
}

/// Lists while somebody commits, between any two parts of it, what `edit` makes with a number that counts up.
fn list_while(
    edit: impl Fn(&mut Batch, [u8; 4]) + Send,
    list: impl FnOnce(&mut dyn FnMut() -> Result<u32, Error>),
) {
    let mut other = Nft::open().expect("a socket");
    let mut number = 0u32;
    let meddle = move || {
        number += 1;
        let mut batch = Batch::new();
        edit(&mut batch, (0x0a00_0000 + number).to_be_bytes());
        other.commit(&batch).expect("commit");
    };
    let socket = Socket::open(crate::Protocol::Netfilter).expect("a socket");
    let mut nft = Nft::over(Meddling(socket, meddle));
    list(&mut || count(&mut nft));
}

#[test]
fn commits_to_other_tables_and_sets_spoil_no_listing() {
    let Some(netns) = scratch_netns("commits_to_other_tables_and_sets_spoil_no_listing") else { return };
    let work = || {
        make(&mut Nft::open().expect("a socket"));
        for (table, set) in [(THEIRS, "set"), (OURS, "other")] {
            let edit = |batch: &mut Batch, key: [u8; 4]| {
                batch.add_elements(1, table, set, Create::Exclusive).push(&Element::key(&key));
            };
            list_while(edit, |count| assert_eq!(count(), Ok(ALL), "{set} of {}", table.name));
        }
    };
    netns.run(work).expect("entered");
}

#[test]
fn commits_to_what_is_listed_spoil_it() {
    let Some(netns) = scratch_netns("commits_to_what_is_listed_spoil_it") else { return };
    let work = || {
        make(&mut Nft::open().expect("a socket"));
        // One goes and one comes, so that their number tells nothing.
        let edit = |batch: &mut Batch, key: [u8; 4]| {
            let number = u32::from_be_bytes(key) - 0x0a00_0001;
            batch
                .delete_elements(1, OURS, "set", Delete::Existing)
                .push(&Element::key(&number.to_be_bytes()));
            batch.add_elements(2, OURS, "set", Create::Exclusive).push(&Element::key(&key));
        };
        list_while(edit, |count| assert_eq!(count(), Err(Error::Interrupted)));
    };
    netns.run(work).expect("entered");
}

/// As the other one, by a thread that never rests.
#[test]
fn a_busy_neighbour_does_not_keep_us_from_listing() {
    let Some(netns) = scratch_netns("a_busy_neighbour_does_not_keep_us_from_listing") else { return };
    let work = || {
        let mut nft = Nft::open().expect("a socket");
        make(&mut nft);
        let mut other = Nft::open().expect("a socket");
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    for added in [true, false] {
                        let mut batch = Batch::new();
                        match added {
                            true => batch.add_elements(1, THEIRS, "set", Create::Exclusive),
                            false => batch.delete_elements(1, THEIRS, "set", Delete::Existing),
                        }
                        .push(&Element::key(&[1, 1, 1, 1]));
                        other.commit(&batch).expect("commit");
                    }
                }
            });
            let outcome: Vec<_> = (0..10).map(|_| all_of_it(&mut nft)).collect();
            done.store(true, Ordering::Relaxed);
            assert_eq!(outcome, vec![Ok(()); 10]);
        });
    };
    netns.run(work).expect("entered");
}
