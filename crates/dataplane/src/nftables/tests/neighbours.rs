// SPDX-License-Identifier: Apache-2.0

//! What others do, or have done, does not keep us from serving.

use std::sync::atomic::{AtomicBool, Ordering};

use model::{Family, Masquerade, Protocol};
use netlink::nft::{self, Nft};

use super::{
    kernel::{in_namespace, load, open},
    make::{at, forward, ip, pool, same, sampler},
};
use crate::{Dataplane, Scope};

/// The sampler, and so many services with ten endpoints each.
fn many(services: u16) -> model::Plan {
    let mut draft = sampler();
    let verdict = forward(pool(Family::V4, 101..=110), Masquerade::OffPods);
    for port in 1..=services {
        let frontend = at(ip(Family::V4, "10.97.0.1"), Protocol::Tcp, port);
        draft.frontends.insert(frontend, same(verdict.clone()));
    }
    draft.plan()
}

/// An agent that counts in a set of its own, say. Every listing of ours meets some of its commits.
#[test]
fn a_neighbour_that_commits_all_the_time_does_not_keep_us_from_reading() {
    let work = || {
        let plan = many(500);
        load(&mut open(), &plan);
        let table = nft::TableRef { family: netlink::Family::V4, name: "theirs" };
        let mut other = Nft::open().unwrap();
        let mut batch = nft::Batch::new();
        batch.add_table(0, &nft::Table::new(table.family, table.name), nft::Create::Exclusive);
        batch.add_chain(0, table, &nft::Chain::regular("chain"), nft::Create::Exclusive);
        other.commit(&batch).unwrap();
        let done = AtomicBool::new(false);
        let restarted = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut batch = nft::Batch::new();
                batch.flush_chain(0, table, "chain");
                let exprs = vec![nft::Expr::Verdict(nft::Verdict::Accept)];
                batch.add_rule(0, table, &nft::Rule { chain: "chain".into(), exprs, comment: None });
                while !done.load(Ordering::Relaxed) {
                    other.commit(&batch).unwrap();
                }
            });
            let restarted: Vec<_> = (0..3).map(|_| open().apply(&plan, Scope::All)).collect();
            done.store(true, Ordering::Relaxed);
            restarted
        });
        for applied in restarted {
            assert!(applied.unwrap().changed_nothing());
        }
    };
    in_namespace("a_neighbour_that_commits_all_the_time_does_not_keep_us_from_reading", work);
}
