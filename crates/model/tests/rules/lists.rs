// SPDX-License-Identifier: Apache-2.0

//! What a world makes of lists, repetitions and odd orders.

use std::sync::Arc;

use model::{
    Conditions, Endpoint, EndpointSlice, Family, Hints, Kind, PerFamily, Protocol, Service, Settings, Update,
    World,
};

use crate::build::{hinted, key, net, node, ready, service, settings, slice, slice_key, slice_port, web};

const V4: Family = Family::V4;

/// A world whose first dirt has been taken away, since that is everything.
fn world() -> World {
    let mut world = World::new(settings());
    assert!(world.take_dirty().all_services);
    world
}

fn apply(world: &mut World, updates: impl IntoIterator<Item = Update>) -> Vec<String> {
    updates.into_iter().for_each(|update| world.apply(update));
    let mut dirty: Vec<_> = world.take_dirty().services.iter().map(ToString::to_string).collect();
    dirty.sort();
    dirty
}

fn services(world: &World) -> Vec<String> {
    let mut names: Vec<_> = world.services().map(|service| service.key.to_string()).collect();
    names.sort();
    names
}

#[test]
fn a_world_is_complete_when_every_kind_was_listed_once() {
    let mut world = world();
    for kind in Kind::ALL {
        assert!(!world.is_complete());
        world.apply(Update::End(kind));
        assert!(!world.is_listed(kind), "an end without a beginning is no list");
        world.apply(Update::Begin(kind));
        assert!(!world.is_listed(kind));
        world.apply(Update::End(kind));
        assert!(world.is_listed(kind));
    }
    assert!(world.is_complete());
    world.apply(Update::Begin(Kind::Service));
    assert!(world.is_complete(), "a relist does not make it forget");
}

#[test]
fn what_a_relist_does_not_contain_goes_at_its_end() {
    let mut world = world();
    let [a, b] = [service("shop/a", 1), service("shop/b", 2)];
    apply(&mut world, [Update::Service(a.clone()), Update::Service(b)]);
    let during = apply(&mut world, [Update::Begin(Kind::Service), Update::Service(a)]);
    assert_eq!(during, [""; 0]);
    assert_eq!(services(&world), ["shop/a", "shop/b"]);
    assert_eq!(apply(&mut world, [Update::End(Kind::Service)]), ["shop/b"]);
    assert_eq!(services(&world), ["shop/a"]);
}

#[test]
fn a_list_that_is_cut_short_removes_nothing() {
    let mut world = world();
    let [a, b] = [service("shop/a", 1), service("shop/b", 2)];
    apply(&mut world, [Update::Service(a.clone()), Update::Service(b.clone())]);
    let second_try = [
        Update::Begin(Kind::Service),
        Update::Service(a),
        Update::Begin(Kind::Service),
        Update::Service(b),
        Update::End(Kind::Service),
    ];
    assert_eq!(apply(&mut world, second_try), ["shop/a"], "seen in the first try only");
    assert_eq!(services(&world), ["shop/b"]);
    assert_eq!(apply(&mut world, [Update::End(Kind::Service)]), [""; 0], "a second end means nothing");
    assert_eq!(services(&world), ["shop/b"]);
}

#[test]
fn a_relist_of_slices_sweeps_slices_and_leaves_services() {
    let mut world = world();
    let kept = slice("kept", V4, &[ready(V4, 1, 1)]);
    let gone = slice("gone", V4, &[ready(V4, 1, 2)]);
    let orphan = EndpointSlice { service: key("shop/orphan"), ..slice("orphan", V4, &[ready(V4, 1, 3)]) };
    apply(&mut world, [Update::Service(web()), Update::Slice(kept.clone()), Update::Slice(gone)]);
    apply(&mut world, [Update::Slice(orphan)]);
    assert_eq!(world.endpoint_count(), 3);
    let relist = [Update::Begin(Kind::EndpointSlice), Update::Slice(kept), Update::End(Kind::EndpointSlice)];
    assert_eq!(apply(&mut world, relist), ["shop/orphan", "shop/web"]);
    assert_eq!(world.endpoint_count(), 1);
    assert_eq!(services(&world), ["shop/web"]);
    assert_eq!(apply(&mut world, [Update::SliceGone(slice_key("shop/gone"))]), [""; 0]);
}

#[test]
fn an_empty_list_of_nodes_ends_eligibility() {
    let mut world = world();
    let list =
        |nodes: Vec<Update>| [vec![Update::Begin(Kind::Node)], nodes, vec![Update::End(Kind::Node)]].concat();
    apply(&mut world, list(vec![Update::Node(node())]));
    assert_eq!(world.node().map(|node| node.eligible), Some(true));
    apply(&mut world, list(vec![]));
    assert_eq!(world.node().map(|node| node.eligible), Some(false));
}

#[test]
fn a_relist_of_cidrs_removes_what_is_missing() {
    let mut world = world();
    let cidr = |name: &str| Update::ServiceCidr { name: name.into(), cidrs: [net("10.96.0.0/16")].into() };
    apply(&mut world, [cidr("a"), cidr("b")]);
    for (list, is_dirty) in [(vec![cidr("a"), cidr("b")], false), (vec![cidr("a")], true)] {
        world.apply(Update::Begin(Kind::ServiceCidr));
        list.into_iter().for_each(|update| world.apply(update));
        world.apply(Update::End(Kind::ServiceCidr));
        assert_eq!(world.take_dirty().node_wide, is_dirty);
    }
}

#[test]
fn what_is_known_already_changes_nothing() {
    let mut world = world();
    let known = || {
        let endpoints = [hinted(&["a"], &["here"], ready(V4, 0, 1)), ready(V4, 1, 2)];
        [Update::Service(web()), Update::Slice(slice("a", V4, &endpoints)), Update::Node(node())]
    };
    assert_eq!(apply(&mut world, known()), ["shop/web"]);
    known().into_iter().for_each(|update| world.apply(update));
    assert!(world.take_dirty().is_empty());
}

#[test]
fn what_this_node_cannot_tell_apart_changes_nothing() {
    let mut world = world();
    let hints = |nodes: &[&str]| hinted(&["a"], nodes, ready(V4, 1, 1));
    assert_eq!(apply(&mut world, [Update::Slice(slice("a", V4, &[hints(&["x"])]))]), ["shop/web"]);
    assert_eq!(apply(&mut world, [Update::Slice(slice("a", V4, &[hints(&["y"])]))]), [""; 0]);
    assert_eq!(apply(&mut world, [Update::Slice(slice("a", V4, &[hints(&["here"])]))]), ["shop/web"]);
    let zones = Arc::new(Hints { zones: ["b".into()].into(), nodes: ["here".into()].into() });
    let other_zone = Endpoint { hints: Some(zones), ..ready(V4, 1, 1) };
    assert_eq!(apply(&mut world, [Update::Slice(slice("a", V4, &[other_zone]))]), ["shop/web"]);
}

#[test]
fn every_part_of_a_slice_counts() {
    let known = || slice("a", V4, &[hinted(&["a"], &[], ready(V4, 1, 1))]);
    let with = |endpoint: Endpoint| EndpointSlice { endpoints: [endpoint].into(), ..known() };
    let conditions = Conditions { serving: false, ..Conditions::default() };
    let others = [
        EndpointSlice { ports: [slice_port("http", Protocol::Tcp, 8081)].into(), ..known() },
        EndpointSlice { family: Family::V6, endpoints: Box::default(), ..known() },
        with(hinted(&["b"], &[], ready(V4, 1, 1))),
        with(hinted(&["a"], &["here"], ready(V4, 1, 1))),
        with(hinted(&["a"], &[], ready(V4, 1, 2))),
        with(Endpoint { node: Some("here".into()), ..known().endpoints[0].clone() }),
        with(Endpoint { node: Some("elsewhere".into()), ..known().endpoints[0].clone() }),
        with(Endpoint { zone: Some("c".into()), ..known().endpoints[0].clone() }),
        EndpointSlice { weight: 2, ..known() },
        with(Endpoint { conditions, ..known().endpoints[0].clone() }),
        EndpointSlice { endpoints: Box::default(), ..known() },
    ];
    for other in others {
        let mut world = world();
        apply(&mut world, [Update::Slice(known())]);
        assert_eq!(apply(&mut world, [Update::Slice(other.clone())]), ["shop/web"], "{other:?}");
    }
}

#[test]
fn trigger_times_come_with_slices_that_bring_something_new() {
    let mut world = world();
    let at = |nanos, number| {
        let slice = slice("a", V4, &[ready(V4, 1, number)]);
        Update::Slice(EndpointSlice { trigger_time_nanos: Some(nanos), ..slice })
    };
    let updates = [at(1, 1), at(2, 1), at(3, 2), Update::Slice(slice("b", V4, &[]))];
    updates.into_iter().for_each(|update| world.apply(update));
    let dirty = world.take_dirty();
    assert_eq!(dirty.trigger_times_nanos, [1, 3]);
    assert_eq!(model::Plan::new().update(&world, dirty).trigger_times_nanos, [1, 3]);
    assert_eq!(world.take_dirty().trigger_times_nanos, [0; 0]);
}

#[test]
fn a_slice_can_move_to_another_service() {
    let mut world = world();
    let moved = |to: &str| EndpointSlice { service: key(to), ..slice("a", V4, &[ready(V4, 1, 1)]) };
    apply(&mut world, [Update::Slice(moved("shop/a"))]);
    assert_eq!(apply(&mut world, [Update::Slice(moved("shop/b"))]), ["shop/a", "shop/b"]);
    assert_eq!(world.endpoint_count(), 1);
    assert_eq!(apply(&mut world, [Update::SliceGone(slice_key("shop/a"))]), ["shop/b"]);
    assert_eq!(world.endpoint_count(), 0);
}

#[test]
fn a_slice_of_a_family_that_is_not_served_is_not_kept() {
    let families = PerFamily { v4: true, v6: false };
    let mut world = World::new(Settings { families, ..settings() });
    world.take_dirty();
    let v6 = slice("a", Family::V6, &[ready(Family::V6, 1, 1)]);
    assert_eq!(apply(&mut world, [Update::Slice(v6)]), [""; 0]);
    assert_eq!(world.endpoint_count(), 0);
}

#[test]
fn slices_that_come_first_wait_for_their_service() {
    let mut world = world();
    apply(&mut world, [Update::Slice(slice("a", V4, &[ready(V4, 1, 1)])), Update::Service(web())]);
    assert_eq!(apply(&mut world, [Update::ServiceGone(web().key)]), ["shop/web"]);
    assert_eq!(apply(&mut world, [Update::ServiceGone(web().key)]), [""; 0]);
    apply(&mut world, [Update::Service(Service { created_secs: 7, ..web() })]);
    let plan = model::Plan::from_world(&world);
    assert!(plan.to_string().contains("10.1.1.1:8080"), "{plan}");
}
