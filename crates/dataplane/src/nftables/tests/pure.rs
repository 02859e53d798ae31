// SPDX-License-Identifier: Apache-2.0

//! Slots, names, rules there and back, differences.

use std::collections::{BTreeMap, BTreeSet};

use model::{Family, Pool};
use proptest::prelude::*;

use super::make::{decisions, drafts, frontends, pool, pools};
use crate::{
    Loopback,
    nftables::{
        diff::{self, Delta},
        entry::{Entry, Placed, Refusal},
        frame::InUse,
        layout::{self, Container, Kind, Mark, Side, Space, Way},
        lift, lower, render,
        slots::{self, Class, Slots},
    },
};

fn families() -> impl Strategy<Value = Family> {
    prop::sample::select(&Family::BOTH[..])
}

/// Pools one after the other, of one family.
fn pool_histories() -> impl Strategy<Value = (Family, Vec<std::sync::Arc<Pool>>)> {
    families().prop_flat_map(|family| (Just(family), prop::collection::vec(pools(family), 1..6)))
}

proptest! {
    #[test]
    fn slots_hold_the_pool_and_as_few_as_possible_move((family, pools) in pool_histories()) {
        let mut slots: Option<Slots> = None;
        for pool in pools {
            let next = slots::assign(family, slots.as_ref(), &pool.backends, &vec![1; pool.backends.len()]);
            let mut held: Vec<_> = next.endpoints().collect();
            held.sort();
            let wanted: Vec<_> = pool.backends.iter().map(|backend| (backend.address, backend.port)).collect();
            prop_assert_eq!(&held, &wanted);
            if let Some(before) = &slots {
                let unchanged = before.packed().zip(next.packed()).filter(|(was, is)| was == is).count();
                let could_stay = before.endpoints().take(wanted.len()).filter(|at| wanted.contains(at)).count();
                prop_assert_eq!(unchanged, could_stay);
            }
            slots = Some(next);
        }
    }

    #[test]
    fn a_class_fits_and_is_kept_while_it_does(counts in prop::collection::vec(1usize..300, 1..20)) {
        let mut class: Option<Class> = None;
        for count in counts {
            let next = Class::of(count, class);
            prop_assert!(next.fits(count));
            prop_assert!(class.is_none_or(|class| class == next || !class.fits(count)));
            class = Some(next);
        }
    }

    #[test]
    fn a_frontend_there_and_back(frontend in families().prop_flat_map(frontends)) {
        let key = layout::key(&frontend).number(7);
        let read = layout::read_key(frontend.family(), Space::of(&frontend), &key);
        prop_assert_eq!(read, Some((frontend, &7u32.to_ne_bytes()[..])));
    }

    #[test]
    fn any_key_from_a_kernel_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
        for family in Family::BOTH {
            for space in Space::BOTH {
                let _ = layout::read_key(family, space, &bytes);
            }
            let _ = slots::pack(family, &bytes);
            let _ = slots::unpack(family, &bytes);
        }
    }

    #[test]
    fn what_is_held_plus_the_difference_is_what_is_wanted(
        (frontend, old, new) in families().prop_flat_map(|family| {
            (frontends(family), decisions(family, true), decisions(family, true))
        })
    ) {
        let old = render::entry(&frontend, &old, None);
        let new = render::entry(&frontend, &new, Some(&old));
        let empty = Entry::default();
        for (from, to) in [(&empty, &new), (&old, &new), (&new, &old), (&old, &empty)] {
            let quick = diff::entry(&frontend, from, to);
            prop_assert_eq!(apply(from.elements(&frontend), &quick), sorted(to.elements(&frontend)));
            let thorough = diff::elements(from.elements(&frontend), to.elements(&frontend));
            prop_assert_eq!(sorted(quick.removed), sorted(thorough.removed));
            prop_assert_eq!(sorted(quick.added), sorted(thorough.added));
        }
    }

    #[test]
    fn every_rule_there_and_back(draft in drafts()) {
        let plan = draft.plan();
        for family in Family::BOTH {
            for loopback in [Loopback::Closed, Loopback::Guarded, Loopback::Served] {
                let program = render::program(&plan, family, 0x4000, loopback);
                for rule in program.frame.chains.iter().flat_map(|chain| &chain.rules) {
                    let exprs = lower::rule(family, rule);
                    prop_assert_eq!(&lift::rule(family, &exprs), rule, "{}", rule.text(family));
                }
            }
        }
    }

    #[test]
    fn a_frame_differs_from_itself_in_nothing(draft in drafts()) {
        let plan = draft.plan();
        for family in Family::BOTH {
            let frame = render::program(&plan, family, 0x4000, Loopback::Closed).frame;
            prop_assert_eq!(diff::frame(&frame, &frame), diff::FrameDelta::default());
        }
    }
}

/// Elements after a difference: what is removed must be there, what is added must not.
fn apply(elements: Vec<Placed>, delta: &Delta) -> BTreeMap<String, Placed> {
    let mut elements = sorted(elements);
    for placed in &delta.removed {
        assert!(elements.remove(&name(placed)).is_some(), "{placed:?} is not there");
    }
    for placed in &delta.added {
        assert!(elements.insert(name(placed), placed.clone()).is_none(), "{placed:?} is there already");
    }
    elements
}

fn sorted(elements: Vec<Placed>) -> BTreeMap<String, Placed> {
    let len = elements.len();
    let sorted: BTreeMap<_, _> = elements.into_iter().map(|placed| (name(&placed), placed)).collect();
    assert_eq!(sorted.len(), len, "a key twice");
    sorted
}

fn name(placed: &Placed) -> String {
    format!("{} {:?}", placed.container.name(), placed.key)
}

#[test]
fn one_endpoint_more_or_less_is_one_or_two_changes() {
    let family = Family::V4;
    let frontend = super::make::node_port(family, model::Protocol::Tcp, 30_000);
    let entry = |hosts: &[u8], previous: Option<&Entry>| {
        let verdict = super::make::forward(pool(family, hosts.iter().copied()), model::Masquerade::Never);
        render::entry(&frontend, &super::make::same(verdict), previous)
    };
    let five = entry(&[101, 102, 103, 104, 105], None);
    let added = entry(&[101, 102, 103, 104, 105, 106], Some(&five));
    assert_eq!(diff::entry(&frontend, &five, &added).len(), 1);
    let last_gone = entry(&[101, 102, 103, 104], Some(&five));
    assert_eq!(diff::entry(&frontend, &five, &last_gone).len(), 1, "the class is kept");
    let first_gone = entry(&[102, 103, 104, 105], Some(&five));
    let delta = diff::entry(&frontend, &five, &first_gone);
    assert_eq!((delta.removed.len(), delta.added.len()), (2, 1), "the last one moves into the hole");
    let swapped = entry(&[101, 102, 103, 104, 109], Some(&five));
    let delta = diff::entry(&frontend, &five, &swapped);
    assert_eq!((delta.removed.len(), delta.added.len()), (1, 1));
}

fn turn_frontends() -> [model::Frontend; 4] {
    use super::make::{at, ip, node_port};
    let [v4, v6] = Family::BOTH;
    [
        at(ip(v4, "10.96.0.1"), model::Protocol::Tcp, 80),
        at(ip(v6, "10.96.0.1"), model::Protocol::Sctp, 80),
        node_port(v4, model::Protocol::Udp, 30_000),
        node_port(v6, model::Protocol::Udp, 30_000),
    ]
}

#[test]
fn names_there_and_back() {
    let classes = [1, 2, 4, 1024].map(|size| Class::of_size(size).unwrap());
    let mut names = BTreeSet::new();
    for (space, side) in Space::BOTH.into_iter().flat_map(|space| Side::BOTH.map(|side| (space, side))) {
        for mark in [Mark::Never, Mark::OffPods, Mark::Always] {
            let shared = classes.into_iter().flat_map(|class| {
                let hash = [false, true].map(|port| Way::Hash { class, port });
                [Way::Random(class)].into_iter().chain(hash)
            });
            let turns = turn_frontends().into_iter().filter(|frontend| Space::of(frontend) == space);
            let turns = turns.flat_map(|frontend| [1, 3, 300].map(|slots| Way::Turns { frontend, slots }));
            for way in shared.chain(turns) {
                for sticky in [false, true] {
                    let kind = Kind { space, side, mark, sticky, way };
                    assert_eq!(Kind::parse(&kind.name()), Some(kind));
                    assert!(names.insert(kind.name()), "two kinds named {}", kind.name());
                }
            }
        }
    }
    let on_demand =
        [Container::Sticky(Space::NodePort, 60), Container::Hashed(Space::NodePort, Side::Inside)];
    let turns = turn_frontends().map(|frontend| Container::Turns(frontend, Side::Inside));
    for container in Container::FIXED.into_iter().chain(on_demand).chain(turns) {
        assert_eq!(Container::parse(&container.name()), Some(container));
    }
    for other in [
        "endpoints-3",
        "endpoints-04",
        "endpoints",
        "services-4",
        "endpoints-4-sticky-masq",
        "endpoints-port-4",
        "hash-endpoints-3",
        "turns-10.96.0.1-tcp-80",
        "turns-10.96.0.1-tcp-80-0",
        "turns-10.96.0.1-tcp-80-03",
        "turns-10.96.0.1-icmp-80-3",
        "nat-output",
        "",
    ] {
        assert_eq!(Kind::parse(other), None, "{other}");
    }
    for other in ["turns-10.96.0.01-tcp-80", "turns-fd00::1-tcp-80", "turns-ip5-node-port-tcp-80", "turns-"] {
        assert_eq!(Container::parse(other), None, "{other}");
    }
    for other in ["sticky-services-", "sticky-services-060", "sticky-services-0", "mine", ""] {
        assert_eq!(Container::parse(other), None, "{other}");
    }
}

#[test]
fn in_use_covers_what_was_added() {
    let family = Family::V4;
    let frontend = super::make::node_port(family, model::Protocol::Tcp, 30_000);
    let verdict = super::make::forward(pool(family, 101..=105), model::Masquerade::Always);
    let entry = render::entry(&frontend, &super::make::sticky(60, super::make::same(verdict)), None);
    let mut in_use = InUse::default();
    let other = super::make::at(super::make::ip(family, "10.96.0.1"), model::Protocol::Tcp, 80);
    assert!(!in_use.covers(&frontend, &entry) && in_use.covers(&frontend, &Entry::default()));
    in_use.add(&frontend, &entry);
    assert!(in_use.covers(&frontend, &entry) && !in_use.covers(&other, &entry));
    let names: Vec<String> = in_use.kinds.iter().map(Kind::name).collect();
    assert!(names.contains(&"node-port-endpoints-8-masq-sticky".into()), "{names:?}");
    assert!(names.contains(&"node-port-endpoints-256".into()), "{names:?}");
}

#[test]
fn what_no_plan_has_is_closed() {
    let family = Family::V4;
    let frontend = super::make::node_port(family, model::Protocol::Tcp, 30_000);
    let verdict = |hosts: Vec<u8>| super::make::forward(pool(family, hosts), model::Masquerade::Never);
    let mut decision = super::make::same(verdict(vec![101]));
    decision.source_ranges = Some([].into());
    let dropped = Entry { refusal: Some(Refusal::Drop), ..Entry::default() };
    assert_eq!(render::entry(&frontend, &decision, None), dropped, "source ranges of a node port");
    let rejected = Entry { refusal: Some(Refusal::Reject), ..Entry::default() };
    let empty = super::make::same(verdict(vec![]));
    assert_eq!(render::entry(&frontend, &empty, None), rejected, "an empty pool");
}
