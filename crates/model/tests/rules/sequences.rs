// SPDX-License-Identifier: Apache-2.0

//! Whatever a source does, in whatever order: the plan is the plan of what is known in the end, and every change
//! of it is told, and nothing else.

use std::collections::{BTreeMap, BTreeSet};

use model::{
    Address, Changes, Family, Masquerade, Origin, Outcome, Packet, Plan, Role, Settings, Verdict, World,
};
use proptest::prelude::*;

use crate::{
    build::{client, cluster_ip, node_ip, pod, vip},
    reference::{Known, Picture, stale},
    universe::{Step, settings, steps},
};

proptest! {
    #![proptest_config(config())]

    #[test]
    fn any_sequence_ends_in_the_plan_of_what_is_known(settings in settings(), batches in steps()) {
        follow(settings, &batches, |turn| {
            for is_backwards in [false, true] {
                let fresh = Plan::from_world(&turn.known.world(turn.settings.clone(), is_backwards));
                prop_assert_eq!(&turn.after, &Picture::of(&fresh, turn.known));
                prop_assert_eq!(turn.plan.to_string(), fresh.to_string());
            }
            Ok(())
        })?;
    }

    #[test]
    fn changes_tell_exactly_what_differs(settings in settings(), batches in steps()) {
        let mut mirror = BTreeMap::new();
        follow(settings, &batches, |turn| {
            check_changes(&turn)?;
            for frontend in &turn.changes.frontends {
                match turn.plan.decision(frontend) {
                    Some(decision) => mirror.insert(*frontend, decision.clone()),
                    None => mirror.remove(frontend),
                };
            }
            prop_assert_eq!(&mirror, &turn.after.frontends);
            Ok(())
        })?;
    }

    #[test]
    fn flow_rules_name_what_went_and_spare_what_serves(settings in settings(), batches in steps()) {
        follow(settings, &batches, |turn| {
            let expected = turn.after.stale_since(turn.before, turn.is_first);
            let told: Vec<_> = turn.changes.flows.iter().map(stale).collect();
            prop_assert_eq!(told, expected);
            Ok(())
        })?;
    }

    #[test]
    fn decisions_keep_what_their_types_promise(settings in settings(), batches in steps()) {
        follow(settings, &batches, |turn| {
            for (frontend, decision) in turn.plan.frontends() {
                let told = format!("{frontend} {decision}");
                let family = frontend.family();
                prop_assert!(turn.settings.families[family], "{}", told);
                let is_forward = matches!(decision.inside, Verdict::Forward(_));
                prop_assert!(is_forward || decision.inside == decision.outside, "{}", told);
                for verdict in [&decision.inside, &decision.outside] {
                    let Verdict::Forward(forward) = verdict else { continue };
                    let backends = &forward.pool.backends;
                    prop_assert!(!backends.is_empty(), "{}", told);
                    let is_sorted = backends.windows(2).all(|w| (w[0].address, w[0].port) < (w[1].address, w[1].port));
                    prop_assert!(is_sorted, "{}", told);
                    prop_assert!(backends.iter().all(|b| Family::of(b.address) == family), "{}", told);
                    let is_hairpin = |b: &model::Backend| !b.local || turn.plan.is_local_backend(&b.address);
                    prop_assert!(backends.iter().all(is_hairpin), "{}", told);
                    let tells_pods = turn.plan.pod_traffic(family).is_some();
                    prop_assert!(tells_pods || forward.masquerade != Masquerade::OffPods, "{}", told);
                }
                if let Some(nets) = &decision.source_ranges {
                    prop_assert_eq!(decision.role, Role::LoadBalancer);
                    prop_assert!(nets.iter().all(|net| Family::of(net.addr()) == family), "{}", told);
                    let is_disjoint = nets.windows(2).all(|w| w[0].broadcast() < w[1].network());
                    prop_assert!(is_disjoint, "{}", told);
                }
                let is_known = |ip| turn.plan.has_cluster_ip(ip);
                let Address::Ip(ip) = frontend.address else { continue };
                prop_assert!(decision.role != Role::ClusterIp || is_known(&ip), "{}", told);
            }
            Ok(())
        })?;
    }

    #[test]
    fn other_settings_end_in_the_plan_of_a_fresh_start(
        first in settings(), second in settings(), batches in steps()
    ) {
        let second = Settings { families: first.families, ..second };
        let (mut known, mut plan, mut mirror) = (Known::default(), Plan::new(), BTreeMap::new());
        let mut world = World::new(first.clone());
        for (at, batch) in batches.iter().enumerate() {
            for update in batch.iter().flat_map(|step| known.updates(step)).collect::<Vec<_>>() {
                known.apply(update.clone());
                world.apply(update);
            }
            let now = if at % 2 == 0 { &second } else { &first };
            // The families of a world are what they were.
            world.retune(Settings { families: model::PerFamily { v4: true, v6: true }, ..now.clone() });
            let dirty = world.take_dirty();
            for frontend in plan.update(&world, dirty).frontends {
                match plan.decision(&frontend) {
                    Some(decision) => mirror.insert(frontend, decision.clone()),
                    None => mirror.remove(&frontend),
                };
            }
            let fresh = Plan::from_world(&known.world(now.clone(), false));
            prop_assert_eq!(plan.to_string(), fresh.to_string());
            prop_assert_eq!(&mirror, &Picture::of(&plan, &known).frontends, "each change is told");
        }
    }

    #[test]
    fn every_packet_has_an_outcome(settings in settings(), batches in steps(), port in 0..100_u16) {
        follow(settings, &batches, |turn| {
            for packet in packets(port) {
                let outcome = turn.plan.decide(&packet);
                if let Outcome::Forward { backends, .. } = &outcome {
                    prop_assert!(!backends.is_empty());
                }
                let is_service_address = turn.plan.has_cluster_ip(&packet.destination);
                prop_assert!(!is_service_address || outcome != Outcome::Pass, "{:?}", packet);
            }
            Ok(())
        })?;
    }
}

/// At least 1024 cases; more by `PROPTEST_CASES`. What fails becomes a test of its own, not a file of seeds.
fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig { cases: default.cases.max(1024), failure_persistence: None, ..default }
}

/// One update of the plan.
struct Turn<'a> {
    settings: &'a Settings,
    known: &'a Known,
    plan: &'a Plan,
    before: &'a Picture,
    after: Picture,
    changes: Changes,
    is_first: bool,
}

/// Lets it all happen, batch by batch, and looks after each.
fn follow(
    settings: Settings,
    batches: &[Vec<Step>],
    mut look: impl FnMut(Turn<'_>) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let mut known = Known::default();
    let mut world = World::new(settings.clone());
    let mut plan = Plan::new();
    let mut before = Picture::of(&plan, &known);
    for (at, batch) in batches.iter().enumerate() {
        for step in batch {
            for update in known.updates(step) {
                known.apply(update.clone());
                world.apply(update);
            }
        }
        let dirty = world.take_dirty();
        let changes = plan.update(&world, dirty);
        let after = Picture::of(&plan, &known);
        let turn = Turn {
            settings: &settings,
            known: &known,
            plan: &plan,
            before: &before,
            after: after.clone(),
            changes,
            is_first: at == 0,
        };
        look(turn)?;
        before = after;
    }
    Ok(())
}

fn check_changes(turn: &Turn<'_>) -> Result<(), TestCaseError> {
    let Turn { before, after, changes, .. } = turn;
    prop_assert_eq!(&changes.frontends, &differing(&before.frontends, &after.frontends));
    prop_assert_eq!(&changes.health, &differing(&before.health, &after.health));
    let came_or_went =
        |was: &BTreeSet<_>, is: &BTreeSet<_>| was.symmetric_difference(is).copied().collect::<Vec<_>>();
    prop_assert_eq!(&changes.cluster_ips, &came_or_went(&before.cluster_ips, &after.cluster_ips));
    prop_assert_eq!(&changes.local_backends, &came_or_went(&before.local_backends, &after.local_backends));
    prop_assert_eq!(changes.node_wide, before.node_wide != after.node_wide);
    let new_conflicts: BTreeSet<_> = after.conflicts.difference(&before.conflicts).cloned().collect();
    prop_assert_eq!(changes.conflicts.len(), new_conflicts.len());
    prop_assert_eq!(changes.conflicts.iter().cloned().collect::<BTreeSet<_>>(), new_conflicts);
    // A conflict that ends without a change of owner is nobody's work.
    let of_packets = |picture: &Picture| Picture {
        serving: BTreeMap::new(),
        conflicts: BTreeSet::new(),
        ..picture.clone()
    };
    prop_assert!(of_packets(before) == of_packets(after) || !changes.is_empty());
    Ok(())
}

fn differing<K: Ord + Clone, V: PartialEq>(was: &BTreeMap<K, V>, is: &BTreeMap<K, V>) -> Vec<K> {
    let keys: BTreeSet<&K> = was.keys().chain(is.keys()).collect();
    keys.into_iter().filter(|key| was.get(key) != is.get(key)).cloned().collect()
}

fn packets(port: u16) -> Vec<Packet> {
    let mut packets = Vec::new();
    for family in Family::BOTH {
        let places =
            [cluster_ip(family, 1), cluster_ip(family, 3), vip(family, 1), node_ip(family), client(family)];
        for destination in places {
            for (origin, source) in [
                (Origin::Node, node_ip(family)),
                (Origin::Interface("veth0".into()), pod(family, 0, 1)),
                (Origin::Interface("eth0".into()), client(family)),
            ] {
                packets.extend(
                    [port, 53, 80, 30001].into_iter().zip(model::Protocol::ALL.into_iter().cycle()).map(
                        |(port, protocol)| Packet {
                            origin: origin.clone(),
                            source,
                            destination,
                            destination_is_local: destination == node_ip(family),
                            protocol,
                            port,
                        },
                    ),
                );
            }
        }
    }
    packets
}
