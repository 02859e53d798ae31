// SPDX-License-Identifier: Apache-2.0

//! What somebody else does to our tables is seen and undone.

use model::Family;
use netlink::nft::{self, Nft};

use super::{
    forget::remember,
    kernel::{assert_kernel_matches, assert_kernel_tidy, in_namespace, load, open},
    make::{ip, sampler},
};
use crate::{
    Audited, Dataplane, Scope,
    names::TABLE,
    nftables::{Nftables, layout::wire},
};

/// Something that somebody else does to our table.
type Edit = fn(&mut nft::Batch, nft::TableRef<'_>);

const EDITS: [(&str, Edit); 16] = [
    ("nothing", |_, _| ()),
    ("flushes a map", |batch, table| batch.flush_set(0, table, "endpoints")),
    ("flushes the verdicts", |batch, table| batch.flush_set(0, table, "services")),
    ("flushes a set", |batch, table| batch.flush_set(0, table, "cluster-ips")),
    ("flushes the sources", |batch, table| batch.flush_set(0, table, "source-ranges")),
    ("flushes who is sticky", |batch, table| batch.flush_set(0, table, "sticky-services-10800")),
    ("flushes a chain", |batch, table| batch.flush_chain(0, table, "nat-prerouting")),
    ("deletes a chain that draws", |batch, table| {
        for chain in ["endpoints-4-masq-off-pods", "endpoints-4-masq-off-pods-sticky"] {
            batch.flush_chain(0, table, chain);
        }
        batch.delete_chain(0, table, "endpoints-4", nft::Delete::Existing);
    }),
    ("deletes who is sticky", |batch, table| {
        batch.flush_chain(0, table, "record-affinity");
        for secs in [60, 10_800] {
            batch.delete_set(0, table, &format!("sticky-services-{secs}"), nft::Delete::Existing);
            batch.delete_set(0, table, &format!("sticky-node-ports-{secs}"), nft::Delete::Existing);
        }
    }),
    ("adds a rule", |batch, table| {
        let exprs = vec![nft::Expr::Verdict(nft::Verdict::Drop)];
        batch.insert_rule(0, table, &nft::Rule { chain: "filter-forward".into(), exprs, comment: None });
    }),
    ("adds chains and a set that they use", |batch, table| {
        batch.add_set(
            0,
            table,
            &nft::Set::new("theirs", [nft::Type::INET_SERVICE.into()]),
            nft::Create::Exclusive,
        );
        batch.add_chain(0, table, &nft::Chain::regular("a"), nft::Create::Exclusive);
        let base = nft::Chain::base("b", nft::ChainKind::Filter, nft::Hook::Input, 7);
        batch.add_chain(0, table, &base, nft::Create::Exclusive);
        let dst = nft::Reg::word(0);
        let port = nft::Expr::Payload { base: nft::Header::Transport, offset: 2, len: 2, dst };
        let lookup = nft::Expr::Lookup { set: "theirs".into(), key: dst, dst: None, invert: false };
        let jump = nft::Expr::Verdict(nft::Verdict::Jump("a".into()));
        batch.add_rule(
            0,
            table,
            &nft::Rule { chain: "b".into(), exprs: vec![port, lookup, jump], comment: None },
        );
    }),
    ("adds elements", |batch, table| {
        let tail = [132, 0, 0, 0, 0x12, 0x34, 0, 0];
        let key = [address(table, 77).as_slice(), &tail].concat();
        batch
            .add_elements(0, table, "reject-services", nft::Create::Exclusive)
            .push(&nft::Element::key(&key));
        let to = nft::Verdict::Drop;
        batch
            .add_elements(0, table, "services", nft::Create::Exclusive)
            .push(&nft::Element::verdict(&key, to));
        let slot = [key.as_slice(), &9u32.to_ne_bytes()].concat();
        let value = [address(table, 78).as_slice(), &[0, 80, 0, 0]].concat();
        batch
            .add_elements(0, table, "endpoints", nft::Create::Exclusive)
            .push(&nft::Element::value(&slot, &value));
        // A protocol that no service has.
        let stray = [1, 0, 0, 0, 0, 80, 0, 0];
        batch
            .add_elements(0, table, "drop-node-ports", nft::Create::Exclusive)
            .push(&nft::Element::key(&stray));
        let pair = [address(table, 1), address(table, 2)].concat();
        batch.add_elements(0, table, "hairpin", nft::Create::Exclusive).push(&nft::Element::key(&pair));
    }),
    ("leads a node port astray", |batch, table| {
        batch.flush_set(0, table, "node-ports");
        batch.add_chain(0, table, &nft::Chain::regular("astray"), nft::Create::Exclusive);
        let verdict = nft::Verdict::Goto("astray");
        let key = [6, 0, 0, 0, 0x75, 0x80, 0, 0];
        batch
            .add_elements(0, table, "node-ports", nft::Create::Exclusive)
            .push(&nft::Element::verdict(&key, verdict));
    }),
    ("deletes the table", |batch, table| batch.delete_table(0, table, nft::Delete::Existing)),
    ("puts another table in its place", |batch, table| {
        batch.delete_table(0, table, nft::Delete::Existing);
        batch.add_table(0, &nft::Table::new(table.family, table.name), nft::Create::Exclusive);
        batch.add_set(0, table, &nft::Set::new("services", [nft::Type::MARK.into()]), nft::Create::Exclusive);
        let base = nft::Chain::base("nat-output", nft::ChainKind::Filter, nft::Hook::Input, 0);
        batch.add_chain(0, table, &base, nft::Create::Exclusive);
    }),
    ("moves a hook", |batch, table| {
        batch.delete_chain(0, table, "nat-postrouting", nft::Delete::Existing);
        let base = nft::Chain::base("nat-postrouting", nft::ChainKind::Nat, nft::Hook::Postrouting, 7);
        batch.add_chain(0, table, &base, nft::Create::Exclusive);
    }),
];

fn address(table: nft::TableRef<'_>, last: u8) -> Vec<u8> {
    match ip(
        if table.family == netlink::Family::V4 { Family::V4 } else { Family::V6 },
        &format!("10.96.9.{last}"),
    ) {
        std::net::IpAddr::V4(ip) => ip.octets().to_vec(),
        std::net::IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

#[test]
fn what_others_do_to_the_table_is_undone() {
    let plan = sampler().plan();
    for (what, edit) in EDITS {
        in_namespace("what_others_do_to_the_table_is_undone", || {
            let mut nftables = open();
            load(&mut nftables, &plan);
            for family in Family::BOTH {
                let mut batch = nft::Batch::new();
                edit(&mut batch, nft::TableRef { family: wire(family), name: TABLE });
                Nft::open().unwrap().commit(&batch).unwrap_or_else(|error| panic!("{what}: {error}"));
            }
            println!("somebody {what}");
            let mended = nftables.apply(&plan, Scope::All).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(mended.changed_nothing(), what == "nothing", "{what}: {mended:?}");
            assert_kernel_matches(&plan);
            assert_kernel_tidy();
            assert!(nftables.apply(&plan, Scope::All).unwrap().changed_nothing(), "{what}");
        });
    }
}

/// Goes through a whole round; what it finds.
fn audit(nftables: &mut Nftables) -> Option<String> {
    loop {
        let audited = nftables.audit().unwrap();
        if audited.drift.is_some() || !audited.more {
            return audited.drift;
        }
    }
}

#[test]
fn what_others_do_to_the_table_is_found_without_being_told() {
    let plan = sampler().plan();
    for (what, edit) in EDITS {
        // As a table that is read whole, and as a large one, of which what ought to be there is asked for, and counted.
        for small in [usize::MAX, 0] {
            in_namespace("what_others_do_to_the_table_is_found_without_being_told", || {
                let mut nftables = open();
                nftables.audit.small = small;
                assert_eq!(nftables.audit().unwrap(), Audited::default(), "nothing is known yet");
                load(&mut nftables, &plan);
                assert_eq!(audit(&mut nftables), None, "all is as it should be");
                // Older kernels do not tell how many there are.
                let told = Nft::open()
                    .unwrap()
                    .set_sizes(nft::TableRef { family: netlink::Family::V6, name: TABLE });
                let told = told.unwrap().iter().all(|(_, size)| size.is_some());
                let mut batch = nft::Batch::new();
                edit(&mut batch, nft::TableRef { family: netlink::Family::V6, name: TABLE });
                Nft::open().unwrap().commit(&batch).unwrap_or_else(|error| panic!("{what}: {error}"));
                let beyond = small == 0 && !told && ["adds elements", "flushes the sources"].contains(&what);
                let found = audit(&mut nftables);
                assert_eq!(found.is_some(), what != "nothing" && !beyond, "somebody {what}: {found:?}");
                load(&mut nftables, &plan);
                assert_eq!(audit(&mut nftables), None, "somebody {what}, and it was mended");
            });
        }
    }
}

#[test]
fn what_others_do_to_the_table_is_seen() {
    in_namespace("what_others_do_to_the_table_is_seen", || {
        let draft = sampler();
        let mut nftables = open();
        let mut watch = nftables.watch().unwrap().unwrap();
        let mut next = || watch.next(std::time::Duration::from_millis(50)).unwrap();
        load(&mut nftables, &draft.plan());
        assert_eq!(next(), None, "our own changes");
        let commit = |edit: Edit, name| {
            let mut batch = nft::Batch::new();
            edit(&mut batch, nft::TableRef { family: netlink::Family::V4, name });
            Nft::open().unwrap().commit(&batch).unwrap();
        };
        commit(
            |batch, table| {
                batch.add_table(0, &nft::Table::new(table.family, table.name), nft::Create::Exclusive)
            },
            "x",
        );
        assert_eq!(next(), None, "another table");
        remember(Family::V4, [(1, ip(Family::V4, "10.96.0.20"), 80, ip(Family::V4, "10.244.1.101"))]);
        assert_eq!(next(), None, "a client is remembered");
        commit(|batch, table| batch.flush_set(0, table, "endpoints"), TABLE);
        let drift = next().unwrap();
        assert_eq!(drift.what, "elements of endpoints removed in table ip portolan");
        assert!(drift.by.is_some());
        assert_eq!(next(), None, "one commit, one drift");
        load(&mut nftables, &draft.plan());
        assert_eq!(next(), None, "mending");
        commit(|batch, table| batch.delete_table(0, table, nft::Delete::Existing), TABLE);
        assert!(next().is_some());
    });
}

#[test]
fn what_others_did_before_the_watch_is_looked_for() {
    in_namespace("what_others_did_before_the_watch_is_looked_for", || {
        let draft = sampler();
        let mut nftables = open();
        let first = |nftables: &Nftables| {
            let mut watch = nftables.watch().unwrap().unwrap();
            watch.next(std::time::Duration::from_millis(50)).unwrap()
        };
        load(&mut nftables, &draft.plan());
        assert_eq!(first(&nftables), None, "our own changes");
        let mut batch = nft::Batch::new();
        batch.flush_set(0, nft::TableRef { family: netlink::Family::V4, name: TABLE }, "endpoints");
        Nft::open().unwrap().commit(&batch).unwrap();
        assert!(first(&nftables).unwrap().suspected, "somebody wrote, nobody knows what");
        load(&mut nftables, &draft.plan());
        assert_eq!(first(&nftables), None, "all has been compared since");
    });
}
