// SPDX-License-Identifier: Apache-2.0

//! Weights, turns and hashes.

use model::{Backend, Changes, Family, Pool, Scheduler};
use netlink::{Errno, Socket, fake::Faulty, nft::Nft};

use super::{
    kernel::{assert_kernel_matches, assert_kernel_tidy, in_namespace, open},
    make::{Draft, at, ip, pool, sampler, wishes},
};
use crate::{
    Abilities, Config, Dataplane, Scope,
    nftables::{Nftables, kernel, layout::Container, slots},
};

fn weighted(weights: &[u16]) -> Vec<Backend> {
    let mut backends: Pool = (*pool(Family::V4, (0..weights.len()).map(|host| host as u8 + 1))).clone();
    backends.backends.iter_mut().zip(weights).for_each(|(backend, weight)| backend.weight = *weight);
    backends.backends.into()
}

#[test]
fn shares_are_exact_while_they_fit() {
    let shares = |weights: &[u16]| slots::shares(&weighted(weights), true);
    assert_eq!(shares(&[7, 7, 7]), [1, 1, 1]);
    assert_eq!(shares(&[1, 2, 3]), [1, 2, 3]);
    assert_eq!(shares(&[100, 300]), [1, 3]);
    assert_eq!(shares(&[]), [0; 0]);
    assert_eq!(slots::shares(&weighted(&[1, 2, 3]), false), [1, 1, 1], "where they do not count");
}

#[test]
fn shares_beyond_the_bound_are_rounded_and_nobody_is_left_out() {
    for weights in
        [vec![65_535, 1], vec![1_000, 999, 3], vec![997, 991, 983, 977], [vec![1; 90], vec![9_999]].concat()]
    {
        let shares = slots::shares(&weighted(&weights), true);
        let (slots, total): (u32, u64) = (shares.iter().sum(), weights.iter().map(|w| u64::from(*w)).sum());
        let room = 256.max(weights.len() as u32 * 4);
        assert!(slots <= room + weights.len() as u32, "{slots}");
        for (weight, share) in weights.iter().zip(&shares) {
            let ideal = f64::from(*weight) * f64::from(room) / total as f64;
            assert!(
                *share >= 1 && (f64::from(*share) - ideal).abs() <= 1.0,
                "{share} for {ideal} in {weights:?}"
            );
        }
    }
}

#[test]
fn a_weight_that_grows_moves_nobody() {
    let slots_of = |weights: &[u16], previous: Option<&slots::Slots>| {
        let backends = weighted(weights);
        slots::assign(Family::V4, previous, &backends, &slots::shares(&backends, true))
    };
    let before = slots_of(&[2, 1], None);
    let after = slots_of(&[2, 3], Some(&before));
    assert_eq!((before.len(), after.len()), (3, 5));
    assert!(before.packed().zip(after.packed()).all(|(was, is)| was == is));
    let fresh: Vec<_> = slots_of(&[3, 1, 1], None).endpoints().map(|(ip, _)| ip).collect();
    assert_eq!(fresh[..3].iter().collect::<std::collections::BTreeSet<_>>().len(), 3, "turns are spread");
}

#[test]
fn the_kernel_takes_every_wish_and_gives_it_back() {
    in_namespace("the_kernel_takes_every_wish_and_gives_it_back", || {
        let plan = wishes().plan();
        let mut nftables = open();
        nftables.apply(&plan, Scope::All).unwrap();
        assert_kernel_matches(&plan);
        assert_kernel_tidy();
        assert!(open().apply(&plan, Scope::All).unwrap().changed_nothing());
        let plain = sampler().plan();
        nftables.apply(&plain, Scope::All).unwrap();
        assert_kernel_matches(&plain);
        assert_kernel_tidy();
    });
}

#[test]
fn services_that_come_and_go_leave_few_chains() {
    in_namespace("services_that_come_and_go_leave_few_chains", || {
        let rr = wishes().frontends[&at(ip(Family::V4, "10.96.0.2"), model::Protocol::Tcp, 80)].clone();
        let mut nftables = open();
        nftables.apply(&sampler().plan(), Scope::All).unwrap();
        let mut last = None;
        for number in 0..200_u16 {
            let frontend = at(ip(Family::V4, "10.96.1.1"), model::Protocol::Tcp, 1_000 + number);
            let mut draft: Draft = sampler();
            draft.frontends.insert(frontend, rr.clone());
            let mut changes = Changes { frontends: vec![frontend], ..Changes::default() };
            changes.frontends.extend(last.replace(frontend));
            changes.frontends.sort();
            nftables.apply(&draft.plan(), Scope::Only(&changes)).unwrap();
        }
        let sets = netlink::nft::Nft::open().unwrap();
        let mut sets = sets;
        let listed = sets.set_sizes(crate::nftables::script::table(Family::V4)).unwrap();
        let is_turns = |name: &str| matches!(Container::parse(name), Some(Container::Turns(..)));
        let left = listed.iter().filter(|(name, _)| is_turns(name)).count();
        assert!((1..=66).contains(&left), "{left} maps");
    });
}

/// As one without NFT_HASH says it.
#[test]
fn a_kernel_without_hashes_draws_at_random_and_says_so() {
    in_namespace("a_kernel_without_hashes_draws_at_random_and_says_so", || {
        let hashes = |abilities: &Abilities| abilities.schedulers.contains(&Scheduler::SourceHash);
        assert!(hashes(&open().abilities()), "this one has them");
        let socket = Socket::open(netlink::Protocol::Netfilter).unwrap();
        let without = Nft::over(Faulty::refusing(socket, b"hash\0", Errno::NOENT));
        let mut nftables = Nftables::probed(without, &Config::default()).unwrap();
        let abilities = nftables.abilities();
        assert!(!hashes(&abilities) && abilities.schedulers.contains(&Scheduler::RoundRobin));
        let draft = wishes();
        let by_hash =
            |decision: &&model::Decision| decision.algorithm().scheduler == Some(Scheduler::SourceHash);
        let asking = draft.frontends.values().find(by_hash).unwrap();
        assert!(abilities.shortfall(asking).is_some(), "its people are told");

        nftables.apply(&draft.plan(), Scope::All).unwrap();
        for family in Family::BOTH {
            let held = kernel::read(&mut Nft::open().unwrap(), family).unwrap();
            let wanted = draft.frontends.keys().filter(|frontend| frontend.family() == family).count();
            assert_eq!(held.frontends.len(), wanted, "all are served");
        }
        assert!(nftables.apply(&draft.plan(), Scope::All).unwrap().changed_nothing());
    });
}
