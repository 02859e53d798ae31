// SPDX-License-Identifier: Apache-2.0

//! The bytes of a batch, and what becomes of answers: without a kernel.

use crate::{
    Errno, Error, Family, Op,
    codec::{Message, Reader, each_attr},
    fake::{Fault, Faulty, Recorder},
    nft::*,
};

const TABLE: TableRef<'static> = TableRef { family: Family::V4, name: "t" };

fn messages(batch: &Batch) -> Vec<Message<'_>> {
    let mut reader = Reader::new(batch.bytes());
    let mut found = Vec::new();
    while let Some(message) = Message::next(&mut reader).expect("well-formed") {
        found.push(message);
    }
    found
}

fn elements_batch(count: u32) -> Batch {
    let mut batch = Batch::new();
    let mut writer = batch.add_elements(9, TABLE, "s", Create::IfMissing);
    for i in 0..count {
        let key = i.to_be_bytes();
        writer.push(&Element::verdict(&key, Verdict::Goto("somewhere")));
    }
    drop(writer);
    batch
}

#[test]
fn a_batch_begins_ends_and_asks_once() {
    let mut batch = Batch::new();
    assert!(batch.is_empty());
    batch.add_table(1, &Table::new(Family::V4, "t"), Create::Exclusive);
    batch.flush_chain(2, TABLE, "c");
    batch.flush_set(3, TABLE, "s");
    let messages = messages(&batch);
    let kinds: Vec<u16> = messages.iter().map(|message| message.kind).collect();
    assert_eq!(kinds, [0x10, 0xa00, 0xa08, 0xa0e, 0x11]);
    let asks: Vec<bool> = messages.iter().map(|message| message.flags & 4 != 0).collect();
    assert_eq!(asks, [false, false, false, true, false]);
    let seqs: Vec<u32> = messages.iter().map(|message| message.seq).collect();
    assert_eq!(seqs, [0, 1, 2, 3, 4]);
    assert_eq!(batch.operations(), 3);
}

#[test]
fn an_empty_batch_is_not_sent() {
    let mut nft = Nft::over(Recorder::new());
    let mut batch = Batch::new();
    // An operation without elements is none.
    drop(batch.add_elements(1, TABLE, "s", Create::Exclusive));
    assert!(batch.is_empty());
    nft.commit(&batch).expect("nothing to do");
    assert!(nft.transport().sent().is_empty());
}

#[test]
fn elements_are_split_into_moderate_messages() {
    let batch = elements_batch(10_000);
    assert_eq!((batch.elements(), batch.operations()), (10_000, 1));
    let messages = messages(&batch);
    assert!(messages.len() > 10, "{} messages", messages.len());
    let mut count = 0u32;
    for message in &messages[1..messages.len() - 1] {
        assert!(message.body.len() < 40_000, "{} bytes", message.body.len());
        each_attr(&message.body[4..], |attr| match attr.kind {
            3 => attr.each(|_| {
                count += 1;
                Ok(())
            }),
            _ => Ok(()),
        })
        .expect("well-formed");
    }
    assert_eq!(count, 10_000);
}

fn check_unencodable(what: &str, spoil: impl FnOnce(&mut Batch)) {
    let mut batch = Batch::new();
    batch.flush_chain(4, TABLE, "c");
    spoil(&mut batch);
    batch.flush_chain(6, TABLE, "c");
    let mut nft = Nft::over(Recorder::new());
    assert_eq!(nft.commit(&batch), Err(Error::Unencodable(Op::Tag(5))), "{what}");
    assert!(nft.transport().sent().is_empty(), "{what}");
}

#[test]
fn what_cannot_be_written_is_not_sent() {
    check_unencodable("a name too long", |batch| {
        batch.add_chain(5, TABLE, &Chain::regular("x".repeat(70_000)), Create::Exclusive);
    });
    check_unencodable("a name with a zero", |batch| batch.delete_chain(5, TABLE, "a\0b", Delete::Existing));
    check_unencodable("a comment too long", |batch| {
        let comment = Some("x".repeat(254));
        batch.add_rule(5, TABLE, &Rule { chain: "c".into(), exprs: vec![], comment });
    });
    check_unencodable("a key too long", |batch| {
        batch.add_elements(5, TABLE, "s", Create::Exclusive).push(&Element::key(&[0; 70_000]));
    });
    check_unencodable("an expression we do not know", |batch| {
        let exprs = vec![Expr::Unknown { name: "quota".into() }];
        batch.add_rule(5, TABLE, &Rule { chain: "c".into(), exprs, comment: None });
    });
}

#[test]
fn an_accepted_batch_is_one_datagram() {
    let batch = elements_batch(1000);
    let mut nft = Nft::over(Recorder::new());
    nft.commit(&batch).expect("accepted");
    assert_eq!(nft.transport().sent(), [batch.bytes()]);
}

#[test]
fn faults_are_told_apart() {
    let batch = elements_batch(1);
    let expected = [
        (Fault::Before(Errno::NOBUFS), Error::Io { call: "sendto", errno: Errno::NOBUFS }),
        (Fault::After(Errno::NOBUFS), Error::Overrun),
        (Fault::After(Errno::IO), Error::Io { call: "recvfrom", errno: Errno::IO }),
    ];
    for (fault, error) in expected {
        let mut nft = Nft::over(Faulty::scripted(Recorder::new(), [Some(fault)]));
        assert_eq!(nft.commit(&batch), Err(error), "{fault:?}");
        let seen = usize::from(matches!(fault, Fault::After(_)));
        assert_eq!(nft.transport().inner().sent().len(), seen, "{fault:?}");
        nft.commit(&batch).expect("the fault is over");
    }
    let mut nft = Nft::over(Faulty::scripted(
        Recorder::new(),
        [None, Some(Fault::Refused(Errno::NOMEM)), Some(Fault::After(Errno::TIMEDOUT))],
    ));
    nft.commit(&batch).expect("no fault yet");
    let error = nft.commit(&batch).expect_err("refused");
    assert_eq!((error.tag(), error.errno()), (Some(9), Some(Errno::NOMEM)));
    assert!(matches!(nft.commit(&batch), Err(Error::Timeout(_))));
    assert_eq!((nft.transport().requests(), nft.transport().faults()), (3, 2));
}

#[test]
fn seeded_faults_repeat() {
    let run = |seed| {
        let mut nft = Nft::over(Faulty::seeded(Recorder::new(), seed, 4));
        (0..100).map(|_| nft.commit(&elements_batch(1)).is_ok()).collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
    let failed = run(1).iter().filter(|ok| !**ok).count();
    assert!((10..45).contains(&failed), "{failed} of 100 failed");
}

/// What the kernel sends about a message of the batch.
fn verdict(seq: u32, errno: i32) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    bytes.extend(36u32.to_ne_bytes());
    bytes.extend(2u16.to_ne_bytes());
    bytes.extend(0u16.to_ne_bytes());
    bytes.extend(seq.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes.extend((-errno).to_ne_bytes());
    bytes.extend([0; 16]);
    Ok(bytes)
}

fn answered(answers: Vec<Result<Vec<u8>, Error>>) -> Result<(), Error> {
    let mut batch = Batch::new();
    batch.flush_chain(10, TABLE, "a");
    batch.flush_chain(20, TABLE, "b");
    batch.flush_chain(30, TABLE, "c");
    let mut recorder = Recorder::new();
    // Left over from an earlier request: not ours.
    recorder.say(verdict(2, 1));
    recorder.answer_next(answers);
    Nft::over(recorder).commit(&batch)
}

#[test]
fn the_first_error_counts() {
    let kernel = |op, errno| Error::Kernel { op, errno, extack: None, offset: None, element: None };
    assert_eq!(answered(vec![verdict(3, 0)]), Ok(()));
    let several = vec![verdict(1, 2), verdict(2, 17), verdict(3, 0)];
    assert_eq!(answered(several), Err(kernel(Op::Tag(10), Errno::NOENT)));
    assert_eq!(answered(vec![verdict(3, 16)]), Err(kernel(Op::Tag(30), Errno::BUSY)));
    // The commit itself failed: that is said about the begin of the batch, and first.
    assert_eq!(answered(vec![verdict(0, 12), verdict(3, 0)]), Err(kernel(Op::Batch, Errno::NOMEM)));
    // More errors than the socket holds: the first is still there.
    let overrun = vec![Err(Error::Overrun), verdict(2, 17)];
    assert_eq!(answered(overrun), Err(kernel(Op::Tag(20), Errno::EXIST)));
    assert_eq!(answered(vec![Err(Error::Overrun), verdict(3, 0)]), Err(Error::Overrun));
    // Accepted messages, but not the last: nobody knows.
    assert!(matches!(answered(vec![verdict(1, 0)]), Err(Error::Malformed(_))));
    assert!(matches!(answered(vec![]), Err(Error::Timeout(_))));
    assert!(matches!(answered(vec![Ok(vec![1, 2, 3])]), Err(Error::Malformed(_))));
}
