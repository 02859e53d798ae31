// SPDX-License-Identifier: Apache-2.0

//! A real kernel, in namespaces of their own: after every change it holds what the Plan says, whatever fails.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use model::{Changes, Family, Frontend, PerFamily, Plan, Protocol};
use netlink::{
    Errno, Netns, Socket, Transport,
    fake::{Fault, Faulty, Request},
    nft::{self, Nft},
};
use proptest::test_runner::TestRunner;

use super::{
    judges::assert_agreement,
    make::{Draft, at, forward, histories, ip, pool, same, sample, sampler},
};
use crate::{
    Config, Dataplane, Error, Loopback, Scope,
    names::{TABLE, hook::FIREWALL_PREROUTING},
    nftables::{
        Nftables, diff,
        entry::Entry,
        frame,
        holdings::{self, Held},
        kernel,
        meter::Meter,
        probe,
        program::{Frame, Statement},
        render,
        slots::{Class, Draw, Slots},
    },
};

/// Runs a test in a namespace of its own; skips it, with a printed line, where that is not allowed. Under `CI` it
/// must be allowed.
pub(super) fn in_namespace<R: Send>(test: &str, work: impl FnOnce() -> R + Send) -> Option<R> {
    match Netns::new() {
        Ok(netns) => {
            netns.run(crate::loopback::close).unwrap();
            Some(netns.run(work).unwrap())
        }
        Err(error) if error.is_permission() && std::env::var_os("CI").is_none() => {
            println!("skipped {test}: a network namespace needs privileges ({error})");
            None
        }
        Err(error) => panic!("{test}: no network namespace: {error}"),
    }
}

pub(super) fn open() -> Nftables {
    Nftables::open(&Config::default()).unwrap()
}

pub(super) fn load(nftables: &mut impl Dataplane, plan: &Plan) {
    nftables.apply(plan, Scope::All).unwrap();
}

/// The kernel holds exactly what the plan says: read anew, and judged by the packets that meet it.
pub(super) fn assert_kernel_matches(plan: &Plan) {
    let mut nft = Nft::open().unwrap();
    for family in Family::BOTH {
        let found = kernel::read(&mut nft, family).unwrap();
        let mut wanted: BTreeMap<Frontend, Entry> = BTreeMap::new();
        for (frontend, decision) in plan.frontends().filter(|(frontend, _)| frontend.family() == family) {
            wanted.insert(*frontend, canonical(render::entry(frontend, decision, None)));
        }
        let held = found.frontends.iter().map(|(frontend, held)| match held {
            Held::Entry(entry) => (*frontend, canonical(entry.clone())),
            Held::Irregular(elements) => panic!("{frontend} is irregular: {elements:?}"),
        });
        assert_eq!(held.collect::<BTreeMap<_, _>>(), wanted);
        assert!(found.strays.is_empty(), "{:?}", found.strays);
        let ours = |address: &std::net::IpAddr| Family::of(*address) == family;
        assert_eq!(found.cluster_ips, plan.cluster_ips().filter(ours).collect());
        assert_eq!(found.hairpin, plan.local_backends().filter(ours).collect());
        let addresses = render::node_port_addresses(plan, family, Loopback::Closed);
        assert_eq!(found.node_port_addresses, addresses.into_iter().collect());

        let around = render::surroundings(plan, family, 0x4000, Loopback::Closed);
        let rendered = frame::frame(&around, &holdings::installed(&found.frame));
        assert_eq!(diff::frame(&found.frame, &rendered), diff::FrameDelta::default());
        assert_agreement(plan, &kernel::program(&mut nft, family).unwrap().unwrap());
    }
}

/// There is nothing in the table that the plan does not need.
pub(super) fn assert_kernel_tidy() {
    let mut nft = Nft::open().unwrap();
    for family in Family::BOTH {
        let found = kernel::read(&mut nft, family).unwrap();
        assert_eq!(found.installed, found.in_use());
        assert_eq!(found.foreign, Default::default());
    }
}

/// Slots in order, and the class by the count: which of several good ones is taken depends on history.
fn canonical(mut entry: Entry) -> Entry {
    for target in [&mut entry.everyone, &mut entry.inside].into_iter().flatten() {
        assert!(target.draw.fits(target.slots.len()));
        match &mut target.draw {
            Draw::Random(class) | Draw::Hash { class, .. } => *class = Class::of(target.slots.len(), None),
            Draw::Turns => {}
        }
        let mut endpoints: Vec<_> = target.slots.endpoints().collect();
        endpoints.sort();
        let family = Family::of(endpoints[0].0);
        target.slots = Slots::new(family, endpoints);
    }
    entry
}

fn random_histories(count: usize, len: usize) -> Vec<Vec<Draft>> {
    let mut runner = TestRunner::deterministic();
    let strategy = histories(len);
    (0..count).map(|_| sample(&strategy, &mut runner)).collect()
}

#[test]
fn a_plan_is_loaded_once() {
    in_namespace("a_plan_is_loaded_once", || {
        let plan = sampler().plan();
        let mut nftables = open();
        let applied = nftables.apply(&plan, Scope::All).unwrap();
        assert!(applied.added > 50 && applied.removed == 0, "{applied:?}");
        assert!(applied.warnings.is_empty());
        assert_kernel_matches(&plan);
        assert_kernel_tidy();
        let again = nftables.apply(&plan, Scope::All).unwrap();
        assert!(again.changed_nothing(), "{again:?}");
        let restarted = open().apply(&plan, Scope::All).unwrap();
        assert!(restarted.changed_nothing(), "{restarted:?}");
    });
}

#[test]
fn the_kernel_follows_any_history() {
    for history in random_histories(8, 6) {
        in_namespace("the_kernel_follows_any_history", || {
            let mut nftables = open();
            load(&mut nftables, &history[0].plan());
            for step in history.windows(2) {
                let changes = step[1].changes_since(&step[0]);
                let plan = step[1].plan();
                let applied = nftables.apply(&plan, Scope::Only(&changes)).unwrap();
                let touched = Family::BOTH.into_iter().filter(|family| is_touched(&changes, *family)).count();
                assert!(applied.batches as usize <= touched, "one change, one commit a family: {applied:?}");
                assert_kernel_matches(&plan);
            }
            let last = history.last().unwrap().plan();
            load(&mut nftables, &last);
            assert_kernel_matches(&last);
            assert_kernel_tidy();
            assert!(open().apply(&last, Scope::All).unwrap().changed_nothing());
        });
    }
}

fn is_touched(changes: &Changes, family: Family) -> bool {
    let addresses = changes.cluster_ips.iter().chain(&changes.local_backends);
    changes.node_wide
        || changes.frontends.iter().any(|frontend| frontend.family() == family)
        || addresses.into_iter().any(|address| Family::of(*address) == family)
}

#[test]
fn the_kernel_follows_any_history_through_failures() {
    let mut total = 0;
    for (seed, history) in random_histories(8, 6).into_iter().enumerate() {
        let failures = in_namespace("the_kernel_follows_any_history_through_failures", || {
            let socket = Socket::open(netlink::Protocol::Netfilter).unwrap();
            let mut nft = Nft::over(Faulty::new(socket, failing(seed as u64)));
            nft.set_patience(std::time::Duration::from_millis(1));
            let mut nftables = Nftables::over(nft, &Config::default());
            let mut failures = 0;
            for step in std::iter::once(&history[0]).chain(&history).collect::<Vec<_>>().windows(2) {
                let changes = step[1].changes_since(step[0]);
                let plan = step[1].plan();
                // A caller may retry with either scope: after an error it is complete.
                while let Err(error) = nftables.apply(&plan, Scope::Only(&changes)) {
                    failures += 1;
                    assert!(!error.to_string().is_empty());
                    assert!(failures < 5_000, "{error}");
                }
                assert_kernel_matches(&plan);
            }
            nftables.connection().transport_mut().set_enabled(false);
            let last = history.last().unwrap().plan();
            load(&mut nftables, &last);
            assert_kernel_tidy();
            failures
        });
        let Some(failures) = failures else { return };
        total += failures;
    }
    assert!(total > 20, "too little failed: {total}");
}

/// Every third commit fails, one way or the other, and few questions do.
fn failing(seed: u64) -> impl FnMut(Request) -> Option<Fault> {
    let mut random = seed;
    move |request| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let ways = [
            Fault::Before(Errno::NOBUFS),
            Fault::Refused(Errno::NOMEM),
            Fault::Refused(Errno::BUSY),
            Fault::After(Errno::NOBUFS),
            Fault::After(Errno::TIMEDOUT),
        ];
        let one_in = if request.is_batch { 3 } else { 100 };
        let way = ways[(random >> 40) as usize % ways.len()];
        (random >> 20).is_multiple_of(one_in).then_some(way)
    }
}

#[test]
fn an_error_names_the_service_and_the_next_turn_is_complete() {
    in_namespace("an_error_names_the_service_and_the_next_turn_is_complete", || {
        let before = sampler();
        let mut nftables = open();
        load(&mut nftables, &before.plan());
        let mut batch = nft::Batch::new();
        let table = nft::TableRef { family: netlink::Family::V4, name: TABLE };
        batch.flush_set(0, table, "endpoints");
        Nft::open().unwrap().commit(&batch).unwrap();

        let mut after = before.clone();
        let frontend = at(ip(Family::V4, "10.96.0.1"), Protocol::Tcp, 443);
        let verdict = forward(pool(Family::V4, [102]), model::Masquerade::OffPods);
        after.frontends.insert(frontend, same(verdict));
        let changes = after.changes_since(&before);
        let error = nftables.apply(&after.plan(), Scope::Only(&changes)).unwrap_err();
        let words = error.to_string();
        assert!(words.contains("default/web:http") && words.contains("10.96.0.1:443/tcp"), "{words}");
        assert!(words.contains("remove from endpoints in table ip portolan"), "{words}");
        assert!(matches!(error, Error::Kernel { source, .. } if source.is_not_found()));

        nftables.apply(&after.plan(), Scope::Only(&Default::default())).unwrap();
        assert_kernel_matches(&after.plan());
    });
}

#[test]
fn cleanup_removes_our_tables_and_nothing_else() {
    in_namespace("cleanup_removes_our_tables_and_nothing_else", || {
        let mut nft = Nft::open().unwrap();
        let mut batch = nft::Batch::new();
        let theirs = nft::Table::new(netlink::Family::V4, "theirs");
        batch.add_table(0, &theirs, nft::Create::Exclusive);
        nft.commit(&batch).unwrap();
        let mut nftables = open();
        nftables.cleanup().unwrap();
        load(&mut nftables, &sampler().plan());
        nftables.cleanup().unwrap();
        let left = |nft: &mut Nft, family| -> Vec<nft::Table> {
            nft.tables(family).unwrap().into_iter().map(|listed| listed.object).collect()
        };
        assert_eq!(left(&mut nft, netlink::Family::V4), [theirs]);
        assert_eq!(left(&mut nft, netlink::Family::V6), []);
        load(&mut nftables, &sampler().plan());
        assert_kernel_matches(&sampler().plan());
    });
}

#[test]
fn cleanup_goes_on_after_errors_and_reports_them_all() {
    in_namespace("cleanup_goes_on_after_errors_and_reports_them_all", || {
        let socket = Socket::open(netlink::Protocol::Netfilter).unwrap();
        let refuse = Some(Fault::Refused(Errno::PERM));
        let mut nftables =
            Nftables::over(Nft::over(Faulty::scripted(socket, [refuse, refuse])), &Config::default());
        let words = nftables.cleanup().unwrap_err().to_string();
        assert!(
            words.contains("delete table ip portolan") && words.contains("delete table ip6 portolan"),
            "{words}"
        );
        nftables.cleanup().unwrap();
    });
}

#[test]
fn one_family_alone() {
    in_namespace("one_family_alone", || {
        let config = Config { families: PerFamily { v4: true, v6: false }, ..Config::default() };
        let mut nftables = Nftables::open(&config).unwrap();
        let before = sampler();
        load(&mut nftables, &before.plan());
        let mut after = before.clone();
        after.frontends.clear();
        nftables.apply(&after.plan(), Scope::Only(&after.changes_since(&before))).unwrap();
        let mut nft = Nft::open().unwrap();
        assert_eq!(nft.tables(netlink::Family::V6).unwrap(), []);
        assert!(kernel::read(&mut nft, Family::V4).unwrap().frontends.is_empty());
    });
}

#[test]
fn large_loads_come_in_bounded_batches_and_the_important_first() {
    in_namespace("large_loads_come_in_bounded_batches_and_the_important_first", || {
        let mut draft = sampler();
        let many = |family| forward(pool(family, 101..=110), model::Masquerade::OffPods);
        for index in 0..1_000u32 {
            let address = format!("10.97.{}.{}", index / 250, index % 250);
            let frontend = at(ip(Family::V4, &address), Protocol::Tcp, 80);
            draft.frontends.insert(frontend, same(many(Family::V4)));
        }
        let first = at(ip(Family::V4, "10.97.3.249"), Protocol::Tcp, 80);
        draft.frontends.get_mut(&first).unwrap().rank = 0;
        let plan = draft.plan();
        // The third batch fails: what came before stays.
        let socket = Socket::open(netlink::Protocol::Netfilter).unwrap();
        let mut batches = 0;
        let faulty = Faulty::new(socket, move |request| {
            batches += u32::from(request.is_batch);
            (batches == 3).then_some(Fault::Refused(Errno::NOMEM))
        });
        let mut nftables = Nftables::over(Nft::over(faulty), &Config::default());
        assert!(nftables.apply(&plan, Scope::All).is_err());
        let held = kernel::read(&mut Nft::open().unwrap(), Family::V4).unwrap();
        assert!(held.frontends.contains_key(&first), "the important one is served");
        assert!(held.frontends.len() < 500);
        let rest = open().apply(&plan, Scope::All).unwrap();
        assert!((2..10).contains(&rest.batches), "{rest:?}");
        assert_kernel_matches_quickly(&plan);
    });
}

/// Without the packets, which are too many for a large plan.
fn assert_kernel_matches_quickly(plan: &Plan) {
    let applied = open().apply(plan, Scope::All).unwrap();
    assert!(applied.changed_nothing(), "{applied:?}");
}

#[test]
fn loopback_node_ports_need_a_setting() {
    in_namespace("loopback_node_ports_need_a_setting", || {
        let setting = || std::fs::read_to_string(crate::names::ROUTE_LOCALNET).unwrap();
        let mut nftables = open();
        load(&mut nftables, &sampler().plan());
        assert_eq!(setting().trim(), "0", "not needed, not written");
        let asked = |family| model::PlanBuilder::new().loopback_node_ports(family).build();
        let socket = Socket::open(netlink::Protocol::Netfilter).unwrap();
        let refuse = |request: Request| request.is_batch.then_some(Fault::Refused(Errno::NOMEM));
        let mut refused = Nftables::over(Nft::over(Faulty::new(socket, refuse)), &Config::default());
        assert!(refused.apply(&asked(Family::V4), Scope::All).is_err());
        assert_eq!(setting().trim(), "0", "nothing guards it yet");
        let applied = nftables.apply(&asked(Family::V4), Scope::All).unwrap();
        assert_eq!((setting().trim(), applied.warnings.len()), ("1", 0));
        let applied = nftables.apply(&asked(Family::V6), Scope::All).unwrap();
        assert_eq!(applied.warnings.len(), 1, "{:?}", applied.warnings);
    });
}

#[test]
fn loopback_is_guarded_while_the_kernel_would_route_it() {
    in_namespace("loopback_is_guarded_while_the_kernel_would_route_it", || {
        let frame = |loopback| render::program(&sampler().plan(), Family::V4, 0x4000, loopback).frame;
        let held = || kernel::read(&mut Nft::open().unwrap(), Family::V4).unwrap().frame;
        let chain = |frame: &Frame| frame.chains.iter().find(|it| it.name == FIREWALL_PREROUTING).cloned();
        let mut nftables = open();
        let (closed, guarded) = (Loopback::Closed, Loopback::Guarded);
        // To the kernel everything but 0 is yes.
        for (value, loopback) in [("0", closed), ("1", guarded), ("0", closed), ("2", guarded)] {
            std::fs::write(crate::names::ROUTE_LOCALNET, value).unwrap();
            load(&mut nftables, &sampler().plan());
            assert_eq!(chain(&held()), chain(&frame(loopback)), "{value}");
            assert_kernel_matches_quickly(&sampler().plan());
        }
    });
}

#[test]
fn a_kernel_that_cannot_is_told_in_a_sentence() {
    in_namespace("a_kernel_that_cannot_is_told_in_a_sentence", || {
        let say = |errno| {
            let socket = Socket::open(netlink::Protocol::Netfilter).unwrap();
            let mut nft = Nft::over(Faulty::scripted(socket, [Some(Fault::Refused(errno))]));
            probe::probe(&mut nft, Config::default().families).unwrap_err().to_string()
        };
        assert!(say(Errno::PERM).contains("CAP_NET_ADMIN"), "{}", say(Errno::PERM));
        assert!(say(Errno::OPNOTSUPP).contains("this kernel"), "{}", say(Errno::OPNOTSUPP));
        let mut frame = render::program(&sampler().plan(), Family::V6, 0x4000, Loopback::Closed).frame;
        let mut nft = Nft::open().unwrap();
        probe::ask(&mut nft, Family::V6, &frame).unwrap();
        for chain in &mut frame.chains {
            chain.rules.iter_mut().flat_map(|rule| &mut rule.0).for_each(|statement| {
                if let Statement::Dnat { map, .. } = statement {
                    map.push_str("-of-the-future");
                }
            });
        }
        let words = probe::ask(&mut nft, Family::V6, &frame).unwrap_err().to_string();
        assert!(
            words.contains("lacks what `dnat ip6 to") && words.contains("of-the-future` needs"),
            "{words}"
        );
        assert!(!words.contains("mark"), "only the statement that is refused: {words}");
        // Asking leaves nothing behind.
        assert_eq!(nft.tables(netlink::Family::V4).unwrap(), []);
        assert_eq!(nft.tables(netlink::Family::V6).unwrap(), []);
        let _: Box<dyn Dataplane> = crate::open(crate::Mode::Nftables, &Config::default()).unwrap();
        assert_eq!(nft.tables(netlink::Family::V4).unwrap(), []);
    });
}

/// Compiles only if a dataplane may be moved to the thread that reconciles.
#[expect(dead_code, reason = "the check is made by the compiler")]
fn is_send<T: Transport>(nftables: Nftables<T>) -> impl Send {
    nftables
}

/// The cost of each scrape on a large node, for zeros.
#[test]
fn a_table_that_does_not_count_is_not_gone_through() {
    let requests = |counted_endpoints| {
        let mut nftables = Nftables::open(&Config { counted_endpoints, ..Config::default() }).unwrap();
        load(&mut nftables, &sampler().plan());
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let socket = Socket::open(netlink::Protocol::Netfilter).unwrap();
        let counted = Faulty::new(socket, move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            None
        });
        let mut meter = Meter::new(Nft::over(counted), PerFamily { v4: true, v6: true });
        crate::Meter::read(&mut meter).unwrap();
        asked.load(Ordering::Relaxed)
    };
    for limit in [0, 1_000] {
        in_namespace("a_table_that_does_not_count_is_not_gone_through", || {
            let asked = requests(limit);
            // The sets of each family are listed, and each list is followed by the question whether it was disturbed.
            assert_eq!(asked <= 4, limit == 0, "{asked} requests with a limit of {limit}");
        });
    }
}
