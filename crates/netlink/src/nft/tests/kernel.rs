// SPDX-License-Identifier: Apache-2.0

//! Through the real kernel, in a network namespace of the test's own.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use super::gallery::{self, Gallery, OwnedElement, TABLE};
use crate::{Errno, Error, Family, Netns, Op, nft::*, testing::scratch_netns};

fn connect(netns: &Netns) -> Nft {
    Nft::open_in(netns).expect("a socket")
}

fn listed_elements(nft: &mut Nft, table: TableRef<'_>, set: &str) -> Vec<OwnedElement> {
    let mut found = Vec::new();
    nft.elements(table, set, |visit| match visit {
        Visit::Start => found.clear(),
        Visit::Element(element) => found.push(OwnedElement::from(&element)),
    })
    .expect("elements");
    found.sort_by(|a, b| (&a.key, a.interval_end).cmp(&(&b.key, b.interval_end)));
    found
}

fn check_gallery(gallery: &Gallery, nft: &mut Nft) {
    let table = gallery.table();
    let tables = nft.tables(gallery.family).expect("tables");
    assert_eq!(tables.len(), 1);
    assert_eq!(tables[0].object.comment.as_deref(), Some("every construct"));

    let chains: Vec<Chain> =
        nft.chains(table).expect("chains").into_iter().map(|listed| listed.object).collect();
    assert_eq!(chains, gallery.chains);

    let sets: Vec<Set> = nft.sets(table).expect("sets").into_iter().map(|listed| listed.object).collect();
    for (listed, sent) in sets.iter().zip(&gallery.sets) {
        assert_eq!(listed, sent);
    }
    assert_eq!(sets.len(), gallery.sets.len());

    // Listed chain by chain, sent in any order.
    let by_chain = |rules: Vec<Rule>| {
        let mut chains = BTreeMap::<String, Vec<Rule>>::new();
        for rule in rules {
            chains.entry(rule.chain.clone()).or_default().push(rule);
        }
        chains
    };
    let listed = nft.rules(table).expect("rules").into_iter().map(|listed| listed.rule).collect();
    let (listed, sent) = (by_chain(listed), by_chain(gallery.rules.clone()));
    for (chain, rules) in &sent {
        for (index, rule) in rules.iter().enumerate() {
            assert_eq!(listed.get(chain).and_then(|rules| rules.get(index)), Some(rule), "in {chain}");
        }
    }
    assert_eq!(listed, sent);

    for (set, elements) in &gallery.elements {
        let mut sent = elements.clone();
        sent.sort_by(|a, b| (&a.key, a.interval_end).cmp(&(&b.key, b.interval_end)));
        let mut listed = listed_elements(nft, table, set);
        // The kernel closes the first interval from below by an end at 0, if nobody else does.
        listed.retain(|element| !element.interval_end || element.key.iter().any(|&byte| byte != 0));
        assert_eq!(listed, sent, "in {set}");
    }
}

#[test]
fn all_constructs_come_back_as_sent() {
    let Some(netns) = scratch_netns("all_constructs_come_back_as_sent") else { return };
    let mut nft = connect(&netns);
    for family in [Family::V4, Family::V6] {
        let gallery = gallery::complete(family);
        nft.commit(&gallery.batch()).expect("commit");
        check_gallery(&gallery, &mut nft);
        // What was listed makes the same table again.
        let mut batch = Batch::new();
        batch.delete_table(0, gallery.table(), Delete::Existing);
        nft.commit(&batch).expect("delete");
        assert_eq!(nft.tables(family), Ok(vec![]));
        nft.commit(&gallery.batch()).expect("commit again");
        check_gallery(&gallery, &mut nft);
    }
}

fn small_table(nft: &mut Nft) -> TableRef<'static> {
    let table = TableRef { family: Family::V4, name: "small" };
    let mut batch = Batch::new();
    batch.add_table(1, &Table::new(table.family, table.name), Create::Exclusive);
    batch.add_chain(2, table, &Chain::regular("one"), Create::Exclusive);
    batch.add_set(3, table, &Set::new("set", [Type::IPV4_ADDR.into()]), Create::Exclusive);
    nft.commit(&batch).expect("commit");
    table
}

#[test]
fn an_error_names_operation_and_element() {
    let Some(netns) = scratch_netns("an_error_names_operation_and_element") else { return };
    let mut nft = connect(&netns);
    let table = small_table(&mut nft);
    let generation = nft.generation().expect("generation");

    let mut batch = Batch::new();
    batch.add_chain(10, table, &Chain::regular("two"), Create::Exclusive);
    batch.add_chain(11, table, &Chain::regular("one"), Create::Exclusive);
    batch.delete_chain(12, table, "missing", Delete::Existing);
    let error = nft.commit(&batch).expect_err("exists");
    assert!(error.already_exists(), "{error}");
    assert_eq!(error.tag(), Some(11));
    assert_eq!(nft.chains(table).expect("chains").len(), 1, "all or nothing");

    // The 2,001st element of the operation is there already; it is not in the first message.
    let mut batch = Batch::new();
    batch.add_elements(20, table, "set", Create::Exclusive).push(&Element::key(&[10, 0, 7, 208]));
    nft.commit(&batch).expect("one element");
    let mut batch = Batch::new();
    let mut writer = batch.add_elements(21, table, "set", Create::Exclusive);
    for i in 0..5000u32 {
        writer.push(&Element::key(&(0x0a00_0000 + i).to_be_bytes()));
    }
    drop(writer);
    assert_eq!(batch.elements(), 5000);
    let error = nft.commit(&batch).expect_err("exists");
    let Error::Kernel { op, errno, element, .. } = error else { panic!("{error}") };
    assert_eq!((op, errno, element), (Op::Tag(21), Errno::EXIST, Some(2000)));
    assert_eq!(nft.generation(), Ok(generation + 1));
}

#[test]
fn a_stale_generation_is_refused() {
    let Some(netns) = scratch_netns("a_stale_generation_is_refused") else { return };
    let mut nft = connect(&netns);
    let generation = nft.generation().expect("generation");
    let table = small_table(&mut nft);
    let mut batch = Batch::for_generation(generation);
    batch.flush_chain(1, table, "one");
    let error = nft.commit(&batch).expect_err("stale");
    assert!(error.is_stale(), "{error}");
    let mut batch = Batch::for_generation(nft.generation().expect("generation"));
    batch.flush_chain(1, table, "one");
    nft.commit(&batch).expect("current");
}

#[test]
fn a_rehearsal_changes_nothing_and_tells() {
    let Some(netns) = scratch_netns("a_rehearsal_changes_nothing_and_tells") else { return };
    let mut nft = connect(&netns);
    let gallery = gallery::complete(Family::V6);
    let generation = nft.generation().expect("generation");
    nft.rehearse(&gallery.batch()).expect("the kernel would take it");
    assert_eq!(nft.generation(), Ok(generation));
    assert_eq!(nft.tables(Family::V6), Ok(vec![]));

    let mut batch = gallery.batch();
    let missing = Expr::Lookup { set: "missing".into(), key: Reg::word(0), dst: None, invert: false };
    let rule = Rule { chain: "input".into(), exprs: vec![missing], comment: None };
    batch.add_rule(77, gallery.table(), &rule);
    let error = nft.rehearse(&batch).expect_err("no such set");
    assert_eq!(error.tag(), Some(77));
}

#[test]
fn a_batch_of_many_elements_goes_at_once() {
    let Some(netns) = scratch_netns("a_batch_of_many_elements_goes_at_once") else { return };
    let mut nft = connect(&netns);
    let table = small_table(&mut nft);
    let mut batch = Batch::new();
    let mut writer = batch.add_elements(1, table, "set", Create::Exclusive);
    for i in 0..100_000u32 {
        writer.push(&Element::key(&i.to_be_bytes()));
    }
    drop(writer);
    assert!(batch.len() > 1_500_000, "{} bytes", batch.len());
    nft.commit(&batch).expect("commit");
    assert_eq!(listed_elements(&mut nft, table, "set").len(), 100_000);

    let mut batch = Batch::new();
    let mut writer = batch.delete_elements(2, table, "set", Delete::Existing);
    for i in (0..100_000u32).step_by(2) {
        writer.push(&Element::key(&i.to_be_bytes()));
    }
    drop(writer);
    nft.commit(&batch).expect("delete");
    let left = listed_elements(&mut nft, table, "set");
    assert_eq!(left.len(), 50_000);
    assert!(left.iter().all(|element| element.key[3] % 2 == 1));

    let mut batch = Batch::new();
    batch.flush_set(3, table, "set");
    nft.commit(&batch).expect("flush");
    assert_eq!(listed_elements(&mut nft, table, "set"), []);
}

#[test]
fn elements_are_found_by_key() {
    let Some(netns) = scratch_netns("elements_are_found_by_key") else { return };
    let mut nft = connect(&netns);
    let table = small_table(&mut nft);
    let keys: Vec<[u8; 4]> = (0..1000u32).map(u32::to_be_bytes).collect();
    let mut batch = Batch::new();
    batch.add_elements(1, table, "set", Create::Exclusive).extend(keys.iter().map(|key| Element::key(key)));
    nft.commit(&batch).expect("commit");
    let find = |nft: &mut Nft, keys: &[[u8; 4]]| {
        let mut found = Vec::new();
        let keys = keys.iter().map(|key| Element::key(key));
        let outcome = nft.find_elements(table, "set", keys, |element| found.push(element.key.to_vec()));
        (found, outcome)
    };
    let (found, outcome) = find(&mut nft, &keys);
    assert_eq!((found.len(), outcome), (1000, Ok(())));
    assert_eq!(found, keys);
    assert_eq!(find(&mut nft, &[]), (vec![], Ok(())));

    let mut batch = Batch::new();
    batch.delete_elements(1, table, "set", Delete::Existing).push(&Element::key(&keys[700]));
    nft.commit(&batch).expect("commit");
    let (found, outcome) = find(&mut nft, &keys);
    assert_eq!(found, keys[..700]);
    let error = outcome.expect_err("one is missing");
    assert!(error.is_not_found(), "{error}");
    let Error::Kernel { element, .. } = error else { panic!("{error}") };
    // Kernels that do not point at it are too old to matter here, but not wrong.
    assert!(element.is_none_or(|element| element == 700), "{element:?}");
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Somebody else commits all the time: a listing is complete and of one moment, or says that it is not.
#[test]
fn a_listing_is_of_one_moment() {
    // So many that they go for longer than it takes to begin a listing.
    const ALL: usize = 6_000;
    let Some(netns) = scratch_netns("a_listing_is_of_one_moment") else { return };
    let mut nft = connect(&netns);
    let table = small_table(&mut nft);
    let move_all = |from: u8, to: u8| {
        let mut batch = Batch::new();
        batch.flush_set(1, table, "set");
        let mut writer = batch.add_elements(2, table, "set", Create::Exclusive);
        (0..ALL as u16).for_each(|i| writer.push(&Element::key(&[to, from, (i >> 8) as u8, i as u8])));
        drop(writer);
        batch
    };
    let (there, back) = (move_all(1, 2), move_all(2, 1));
    nft.commit(&there).expect("commit");
    let done = AtomicBool::new(false);
    // In the namespace, so that there is a witness.
    let listings = || {
        std::thread::scope(|scope| {
            let mut other = connect(&netns);
            let (done, there, back) = (&done, &there, &back);
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    for all in [back, there] {
                        other.commit(all).expect("commit");
                        // A table that grows settles within that time also on a slow machine.
                        std::thread::sleep(Duration::from_millis(100));
                    }
                }
            });
            // Also if an assertion fails: the scope waits for the other thread.
            let _stop = SetOnDrop(done);
            let (mut complete, mut interrupted) = (0, 0);
            while complete < 20 && interrupted < 50 {
                // The worst moment to begin: what is new counts already, and what it replaces is still going.
                let before = nft.generation().expect("a number");
                while nft.generation().expect("a number") == before {}
                let mut first = BTreeMap::<u8, usize>::new();
                let outcome = nft.elements(table, "set", |visit| match visit {
                    Visit::Start => first.clear(),
                    Visit::Element(element) => *first.entry(element.key[0]).or_default() += 1,
                });
                match outcome {
                    Ok(()) => {
                        complete += 1;
                        assert_eq!(first.into_values().collect::<Vec<_>>(), [ALL], "all of one kind");
                    }
                    Err(Error::Interrupted) => interrupted += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            (complete, interrupted)
        })
    };
    let (complete, interrupted) = netns.run(listings).expect("entered");
    assert!(complete > 0, "never, in {interrupted} attempts");
}

#[test]
fn without_privileges_the_reason_is_told() {
    let Some(netns) = scratch_netns("without_privileges_the_reason_is_told") else { return };
    // In a thread of its own, which alone loses its privileges.
    let (small, large) = netns
        .run(|| {
            let mut sets = capabilities(None).expect("capabilities");
            sets.effective = CapabilitySet::empty();
            set_capabilities(None, sets).expect("fewer capabilities");
            let mut nft = Nft::open().expect("a socket");
            let table = TableRef { family: Family::V4, name: "t" };
            let mut batch = Batch::new();
            batch.add_table(1, &Table::new(table.family, table.name), Create::Exclusive);
            let small = nft.commit(&batch);
            let mut writer = batch.add_elements(2, table, "set", Create::Exclusive);
            (0..2_000_000u32).for_each(|i| writer.push(&Element::key(&i.to_be_bytes())));
            drop(writer);
            (small, nft.commit(&batch))
        })
        .expect("entered");
    let error = small.expect_err("not allowed");
    assert!(error.is_permission(), "{error}");
    assert!(matches!(error, Error::Kernel { op: Op::Batch, .. }), "{error:?}");
    // More than an ordinary socket may send at once (`net.core.wmem_max`), unless that was raised beyond reason.
    let error = large.expect_err("not allowed");
    assert!(matches!(error, Error::TooLarge(_)) || error.is_permission(), "{error}");
}

#[test]
fn deleting_what_is_missing() {
    let Some(netns) = scratch_netns("deleting_what_is_missing") else { return };
    let mut nft = connect(&netns);
    let table = small_table(&mut nft);
    let mut batch = Batch::new();
    batch.delete_elements(1, table, "set", Delete::Existing).push(&Element::key(&[1, 1, 1, 1]));
    let error = nft.commit(&batch).expect_err("missing");
    assert!(error.is_not_found(), "{error}");
    assert_eq!(error.tag(), Some(1));

    let mut batch = Batch::new();
    batch.delete_elements(1, table, "set", Delete::IfPresent).push(&Element::key(&[1, 1, 1, 1]));
    batch.delete_chain(2, table, "missing", Delete::IfPresent);
    batch.delete_set(3, table, "missing", Delete::IfPresent);
    batch.delete_table(4, TableRef { name: "missing", ..table }, Delete::IfPresent);
    match nft.commit(&batch) {
        Ok(()) => {}
        // Linux before 6.3.
        Err(error) => assert_eq!(error.errno(), Some(Errno::INVAL), "{error}"),
    }
}

#[test]
fn rules_are_replaced_and_deleted_by_handle() {
    let Some(netns) = scratch_netns("rules_are_replaced_and_deleted_by_handle") else { return };
    let mut nft = connect(&netns);
    let table = small_table(&mut nft);
    let rule = |verdict| Rule { chain: "one".into(), exprs: vec![Expr::Verdict(verdict)], comment: None };
    let mut batch = Batch::new();
    batch.add_rule(1, table, &rule(Verdict::Accept));
    batch.add_rule(2, table, &rule(Verdict::Drop));
    batch.insert_rule(3, table, &rule(Verdict::Return));
    nft.commit(&batch).expect("commit");
    let rules = nft.rules(table).expect("rules");
    let verdicts = |rules: &[ListedRule]| rules.iter().map(|listed| listed.rule.clone()).collect::<Vec<_>>();
    assert_eq!(verdicts(&rules), [rule(Verdict::Return), rule(Verdict::Accept), rule(Verdict::Drop)]);

    let mut batch = Batch::new();
    batch.replace_rule(1, table, rules[1].handle, &rule(Verdict::Continue));
    batch.delete_rule(2, table, "one", rules[0].handle);
    nft.commit(&batch).expect("commit");
    let rules = nft.rules(table).expect("rules");
    assert_eq!(verdicts(&rules), [rule(Verdict::Continue), rule(Verdict::Drop)]);

    let mut batch = Batch::new();
    batch.flush_chain(1, table, "one");
    nft.commit(&batch).expect("flush");
    assert_eq!(nft.rules(table), Ok(vec![]));
}

#[test]
fn tables_of_others_are_not_listed() {
    let Some(netns) = scratch_netns("tables_of_others_are_not_listed") else { return };
    let mut nft = connect(&netns);
    nft.commit(&gallery::printable(Family::V4).batch()).expect("commit");
    nft.commit(&gallery::printable(Family::V6).batch()).expect("commit");
    let table = small_table(&mut nft);
    assert_eq!(nft.chains(table).expect("chains").len(), 1);
    assert_eq!(nft.sets(table).expect("sets").len(), 1);
    assert_eq!(nft.set_sizes(table).expect("sizes").len(), 1);
    assert_eq!(nft.rules(table), Ok(vec![]));
    let missing = TableRef { name: "missing", ..table };
    assert_eq!(nft.chains(missing), Ok(vec![]));
    assert_eq!(nft.sets(missing), Ok(vec![]));
    assert_eq!(nft.rules(missing), Ok(vec![]));
    assert!(nft.elements(missing, "set", |_| {}).expect_err("no table").is_not_found());
    // An abandoned or refused listing does not disturb the next request.
    assert_eq!(nft.chains(TableRef { family: Family::V6, name: TABLE }).expect("chains").len(), 12);
}

#[test]
fn elements_expire() {
    let Some(netns) = scratch_netns("elements_expire") else { return };
    let mut nft = connect(&netns);
    let table = small_table(&mut nft);
    let lifetime = Lifetime::Default(Duration::from_secs(3600));
    let mut batch = Batch::new();
    batch.add_set(
        1,
        table,
        &Set { lifetime, ..Set::new("brief", [Type::IPV4_ADDR.into()]) },
        Create::Exclusive,
    );
    let left = Element { expires_in: Some(Duration::from_secs(1000)), ..Element::key(&[1, 2, 3, 4]) };
    batch.add_elements(2, table, "brief", Create::Exclusive).push(&left);
    nft.commit(&batch).expect("commit");
    let mut seen = 0;
    nft.elements(table, "brief", |visit| {
        if let Visit::Element(element) = visit {
            let left = element.expires_in.expect("time left");
            assert!(left <= Duration::from_secs(1000) && left > Duration::from_secs(900), "{left:?}");
            assert_eq!(element.timeout, None);
            seen += 1;
        }
    })
    .expect("elements");
    assert_eq!(seen, 1);
}
