// SPDX-License-Identifier: Apache-2.0

//! What others do, or have done, does not keep us from serving.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicBool, Ordering},
};

use model::{Changes, Family, Masquerade, Protocol};
use netlink::{
    Errno, Socket,
    fake::{Fault, Faulty},
    nft::{self, Nft},
};

use super::{
    kernel::{assert_kernel_matches, assert_kernel_tidy, in_namespace, load, open},
    make::{at, forward, ip, pool, same, sampler, wishes},
};
use crate::{
    Config, Dataplane, Error, Scope,
    names::TABLE,
    nftables::{Nftables, kernel, layout::wire, text},
};

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

/// Somebody holds our table of one family, so that the kernel lets nobody else write there.
#[test]
fn a_family_that_is_refused_does_not_keep_the_other_from_being_served() {
    for held in Family::BOTH {
        in_namespace("a_family_that_is_refused_does_not_keep_the_other_from_being_served", || {
            let mut other = Nft::open().unwrap();
            let mut batch = nft::Batch::new();
            let owned = nft::Table { owned: true, ..nft::Table::new(wire(held), TABLE) };
            batch.add_table(0, &owned, nft::Create::Exclusive);
            other.commit(&batch).unwrap();
            let free = if held == Family::V4 { Family::V6 } else { Family::V4 };
            let (before, after) = (sampler(), wishes());
            let mut nftables = open();
            // From nothing, a change, and to mend.
            for draft in [&before, &after, &before] {
                let plan = draft.plan();
                let words = nftables.apply(&plan, Scope::Only(&Changes::default())).unwrap_err().to_string();
                assert!(words.contains(&format!("table {} portolan", text::keyword(held))), "{words}");
                assert!(!words.contains(&format!("table {} portolan", text::keyword(free))), "{words}");
                let served = kernel::read(&mut Nft::open().unwrap(), free).unwrap();
                let wanted = draft.frontends.keys().filter(|frontend| frontend.family() == free);
                assert_eq!(
                    served.frontends.keys().copied().collect::<BTreeSet<_>>(),
                    wanted.copied().collect::<BTreeSet<_>>()
                );
            }
            // Its table goes with whoever held it, a moment later.
            drop(other);
            let ours = nft::TableRef { family: wire(held), name: TABLE };
            while Nft::open().unwrap().table(ours).unwrap().is_some() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            load(&mut nftables, &before.plan());
            assert_kernel_matches(&before.plan());
        });
    }
}

#[test]
fn what_fails_in_both_families_is_told_of_both() {
    in_namespace("what_fails_in_both_families_is_told_of_both", || {
        let socket = Socket::open(netlink::Protocol::Netfilter).unwrap();
        let refusing =
            Faulty::new(socket, |request| request.is_batch.then_some(Fault::Before(Errno::NOBUFS)));
        let mut nftables = Nftables::over(Nft::over(refusing), &Config::default());
        let error = nftables.apply(&sampler().plan(), Scope::All).unwrap_err();
        assert!(matches!(&error, Error::Several(errors) if errors.len() == 2), "{error:?}");
    });
}

/// What a later release might leave, or somebody who tries something: it translates before we do, and its parts hold on
/// to each other, to ours, and to sets and chains without names.
const ANOTHER_LAYOUT: &str = "
    add chain ip portolan oldc { tcp dport { 80, 81 } counter; jump { accept; }; }
    add chain ip portolan older { goto oldc; }
    add map ip portolan old-services { type ipv4_addr : verdict; elements = { 10.96.0.10 : goto oldc, 10.96.0.1 : goto endpoints-4 }; }
    add chain ip portolan old-hook { type nat hook output priority -101; }
    add rule ip portolan old-hook ip daddr vmap @old-services
    add rule ip portolan old-hook ip daddr 10.96.0.10 tcp dport 80 dnat to 192.0.2.1:9
    add rule ip portolan nat-output ip saddr { 192.0.2.7, 192.0.2.8 } jump older
";

#[test]
fn another_layout_in_our_table_is_removed() {
    in_namespace("another_layout_in_our_table_is_removed", || {
        let plan = sampler().plan();
        let mut nftables = open();
        load(&mut nftables, &plan);
        if !nft_runs(ANOTHER_LAYOUT) {
            return;
        }
        let mended = nftables.apply(&plan, Scope::All).unwrap();
        assert!(mended.warnings.is_empty(), "{:?}", mended.warnings);
        assert_kernel_matches(&plan);
        assert_kernel_tidy();
        assert!(nftables.apply(&plan, Scope::All).unwrap().changed_nothing());
    });
}

/// As kernels before 6.2 do for a moment.
#[test]
fn what_the_kernel_holds_on_to_is_told_and_does_no_harm() {
    in_namespace("what_the_kernel_holds_on_to_is_told_and_does_no_harm", || {
        let plan = sampler().plan();
        load(&mut open(), &plan);
        if !nft_runs(ANOTHER_LAYOUT) {
            return;
        }
        let socket = Socket::open(netlink::Protocol::Netfilter).unwrap();
        let busy = Faulty::refusing(socket, b"old-services\0", Errno::BUSY);
        let mut nftables = Nftables::over(Nft::over(busy), &Config::default());
        let mended = nftables.apply(&plan, Scope::All).unwrap();
        assert!(mended.warnings.iter().any(|words| words.contains("old-services")), "{:?}", mended.warnings);
        let left = kernel::read(&mut Nft::open().unwrap(), Family::V4).unwrap().foreign;
        assert!(left.chains.iter().all(|chain| chain.base.is_none() && chain.rules.is_empty()), "{left:?}");
        assert_kernel_matches(&plan);

        nftables.connection().transport_mut().set_enabled(false);
        assert!(nftables.apply(&plan, Scope::All).unwrap().warnings.is_empty());
        assert_kernel_tidy();
    });
}

/// Runs what `nft -f` would; `false`, with a printed line, where there is no such tool.
fn nft_runs(script: &str) -> bool {
    match std::process::Command::new("nft").arg(script).output() {
        Ok(output) => {
            assert!(output.status.success(), "nft: {}", String::from_utf8_lossy(&output.stderr));
            true
        }
        Err(error) => {
            println!("skipped: no nft: {error}");
            assert!(std::env::var_os("CI").is_none(), "nft must be installed");
            false
        }
    }
}
