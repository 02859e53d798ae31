// SPDX-License-Identifier: Apache-2.0

//! Notifications of the real kernel.

use std::time::Duration;

use crate::{Error, Family, nft::*, testing::scratch_netns};

const WAIT: Duration = Duration::from_secs(10);

/// The events of one commit, and who made it.
fn commit_events(monitor: &mut Monitor) -> (Vec<Change>, Event) {
    let mut changes = Vec::new();
    loop {
        match monitor.next(WAIT).expect("an event").expect("an event in time") {
            Event::Change(change) => changes.push(change),
            generation => return (changes, generation),
        }
    }
}

#[test]
fn a_monitor_tells_what_and_who() {
    let Some(netns) = scratch_netns("a_monitor_tells_what_and_who") else { return };
    let mut monitor = Monitor::open_in(&netns).expect("a monitor");
    let mut ours = Nft::open_in(&netns).expect("a socket");
    let mut other = Nft::open_in(&netns).expect("a socket");
    assert_ne!(ours.port(), other.port());
    assert_eq!(monitor.next(Duration::ZERO), Ok(None));

    let table = TableRef { family: Family::V6, name: "watched" };
    let mut batch = Batch::new();
    batch.add_table(1, &Table::new(table.family, table.name), Create::Exclusive);
    batch.add_chain(2, table, &Chain::regular("chain"), Create::Exclusive);
    batch.add_set(3, table, &Set::new("set", [Type::INET_SERVICE.into()]), Create::Exclusive);
    batch.add_elements(4, table, "set", Create::Exclusive).push(&Element::key(&[0, 80]));
    let rule = Rule { chain: "chain".into(), exprs: vec![Expr::Verdict(Verdict::Drop)], comment: None };
    batch.add_rule(5, table, &rule);
    ours.commit(&batch).expect("commit");
    let (changes, generation) = commit_events(&mut monitor);
    let change = |object, name: Option<&str>| Change {
        object,
        added: true,
        family: Some(Family::V6),
        table: "watched".into(),
        name: name.map(str::to_owned),
        port: ours.port(),
    };
    assert_eq!(
        changes,
        [
            change(Object::Table, None),
            change(Object::Chain, Some("chain")),
            change(Object::Set, Some("set")),
            change(Object::Elements, Some("set")),
            change(Object::Rule, Some("chain")),
        ]
    );
    let Event::Generation { id, port, pid, process } = generation else { panic!("{generation:?}") };
    assert_eq!(id, ours.generation().expect("generation"));
    assert_eq!(port, ours.port());
    assert!(pid.is_some());
    // The name of this test's thread.
    assert!(process.is_some_and(|name| !name.is_empty()));

    let mut batch = Batch::new();
    batch.flush_chain(1, table, "chain");
    other.commit(&batch).expect("commit");
    let (changes, generation) = commit_events(&mut monitor);
    assert_eq!(changes.len(), 1);
    assert_eq!((changes[0].object, changes[0].added), (Object::Rule, false));
    assert_eq!(generation.port(), other.port());
}

#[test]
fn a_writer_need_not_hear_itself() {
    let Some(netns) = scratch_netns("a_writer_need_not_hear_itself") else { return };
    let mut ours = Nft::open_in(&netns).expect("a socket");
    let mut other = Nft::open_in(&netns).expect("a socket");
    let mut monitor =
        Monitor::open_in(&netns).and_then(|monitor| monitor.passing_over(ours.port())).expect("a monitor");
    let table = TableRef { family: Family::V4, name: "watched" };
    let mut batch = Batch::new();
    batch.add_table(1, &Table::new(table.family, table.name), Create::Exclusive);
    batch.add_chain(2, table, &Chain::regular("chain"), Create::Exclusive);
    ours.commit(&batch).expect("commit");
    assert_eq!(monitor.next(Duration::ZERO), Ok(None));

    let mut batch = Batch::new();
    batch.delete_chain(1, table, "chain", Delete::Existing);
    other.commit(&batch).expect("commit");
    let (changes, generation) = commit_events(&mut monitor);
    assert_eq!(changes.len(), 1);
    assert_eq!(generation.port(), other.port());
}

#[test]
fn an_overrun_is_told_and_over() {
    let Some(netns) = scratch_netns("an_overrun_is_told_and_over") else { return };
    let mut monitor = Monitor::open_in(&netns).expect("a monitor");
    monitor.shrink_for_test();
    let mut nft = Nft::open_in(&netns).expect("a socket");
    let table = TableRef { family: Family::V4, name: "busy" };
    let mut batch = Batch::new();
    batch.add_table(1, &Table::new(table.family, table.name), Create::Exclusive);
    batch.add_set(2, table, &Set::new("set", [Type::IPV4_ADDR.into()]), Create::Exclusive);
    let mut writer = batch.add_elements(3, table, "set", Create::Exclusive);
    for i in 0..20_000u32 {
        writer.push(&Element::key(&i.to_be_bytes()));
    }
    drop(writer);
    nft.commit(&batch).expect("commit");
    let mut overruns = 0;
    loop {
        match monitor.next(Duration::ZERO) {
            Ok(None) => break,
            Ok(Some(_)) => {}
            Err(Error::Overrun) => overruns += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(overruns > 0);
    let mut batch = Batch::new();
    batch.delete_table(1, table, Delete::Existing);
    nft.commit(&batch).expect("commit");
    let (changes, _) = commit_events(&mut monitor);
    assert!(changes.iter().any(|change| change.object == Object::Table && !change.added));
}
