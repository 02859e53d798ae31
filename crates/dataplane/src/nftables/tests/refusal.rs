// SPDX-License-Identifier: Apache-2.0

//! What the kernel does not take hurts only itself.

use std::collections::BTreeSet;

use model::{Family, Frontend, Masquerade, Protocol};
use netlink::{Errno, Socket, fake::Faulty, nft::Nft};

use super::{
    kernel::{assert_kernel_matches, in_namespace},
    make::{Draft, at, forward, ip, pool, same, sampler},
};
use crate::{
    Config, Dataplane, Scope,
    nftables::{Nftables, kernel},
};

/// The key of the frontend at 10.96.0.20:80/tcp in the map of services, as an attribute: with length and kind, since
/// the IPv6 address that goes with it ends with the same bytes.
fn bad_key() -> Vec<u8> {
    let key = [10, 96, 0, 20, 6, 0, 0, 0, 0, 80, 0, 0];
    [&16u16.to_ne_bytes()[..], &1u16.to_ne_bytes(), &key].concat()
}

/// A kernel that refuses elements with these bytes.
fn refusing(bytes: &[u8]) -> Nftables<Faulty<Socket>> {
    let socket = Socket::open(netlink::Protocol::Netfilter).unwrap();
    Nftables::over(Nft::over(Faulty::refusing(socket, bytes, Errno::INVAL)), &Config::default())
}

fn served() -> BTreeSet<Frontend> {
    let mut nft = Nft::open().unwrap();
    let holdings = Family::BOTH.map(|family| kernel::read(&mut nft, family).unwrap());
    holdings.iter().flat_map(|holdings| holdings.frontends.keys().copied()).collect()
}

fn all_but(draft: &Draft, left_out: &Frontend) -> BTreeSet<Frontend> {
    draft.frontends.keys().filter(|frontend| *frontend != left_out).copied().collect()
}

#[test]
fn a_service_that_the_kernel_refuses_is_named_and_the_others_are_served() {
    in_namespace("a_service_that_the_kernel_refuses_is_named_and_the_others_are_served", || {
        let bad = at(ip(Family::V4, "10.96.0.20"), Protocol::Tcp, 80);
        let before = sampler();
        let mut nftables = refusing(&bad_key());
        let is_named = |words: &str| words.contains("10.96.0.20:80/tcp") && words.contains("default/");
        let applied = nftables.apply(&before.plan(), Scope::All).unwrap();
        assert!(applied.warnings.len() == 1 && is_named(&applied.warnings[0]), "{:?}", applied.warnings);
        assert_eq!(served(), all_but(&before, &bad));

        // A change of another one is a change as ever.
        let mut after = before.clone();
        let verdict = forward(pool(Family::V4, [102]), Masquerade::OffPods);
        after.frontends.insert(at(ip(Family::V4, "10.96.0.1"), Protocol::Tcp, 443), same(verdict.clone()));
        let changes = after.changes_since(&before);
        let applied = nftables.apply(&after.plan(), Scope::Only(&changes)).unwrap();
        assert_eq!((applied.batches, applied.warnings.len()), (1, 0), "{applied:?}");

        // One of it, too, is an error, so that all is compared; what came with it is in force.
        let (before, mut after) = (after.clone(), after);
        after.frontends.insert(bad, same(verdict.clone()));
        after.frontends.insert(at(ip(Family::V4, "10.96.0.99"), Protocol::Tcp, 1), same(verdict));
        let changes = after.changes_since(&before);
        let error = nftables.apply(&after.plan(), Scope::Only(&changes)).unwrap_err();
        assert!(is_named(&error.to_string()), "{error}");
        assert_eq!(served(), all_but(&after, &bad));
        let applied = nftables.apply(&after.plan(), Scope::Only(&Default::default())).unwrap();
        assert!(applied.warnings.len() == 1 && is_named(&applied.warnings[0]), "{:?}", applied.warnings);

        nftables.connection().transport_mut().set_enabled(false);
        assert!(nftables.apply(&after.plan(), Scope::All).unwrap().warnings.is_empty());
        assert_kernel_matches(&after.plan());
    });
}

/// Then it is not about objects, and each attempt would cost a batch for each of them.
#[test]
fn when_much_is_refused_the_family_is_given_up() {
    in_namespace("when_much_is_refused_the_family_is_given_up", || {
        let mut draft = sampler();
        for port in 1..=100 {
            let verdict = forward(pool(Family::V4, [101]), Masquerade::OffPods);
            draft.frontends.insert(at(ip(Family::V4, "10.97.0.1"), Protocol::Tcp, port), same(verdict));
        }
        let mut nftables = refusing(&[10, 97, 0, 1]);
        let error = nftables.apply(&draft.plan(), Scope::All).unwrap_err();
        assert!(error.to_string().contains("10.97.0.1:1/tcp"), "{error}");
        let faults = nftables.connection().transport().faults();
        assert!((2..30).contains(&faults), "{faults} batches in vain");
        let v6 = sampler().frontends.into_keys().filter(|frontend| frontend.family() == Family::V6);
        assert!(served().is_superset(&v6.collect()));
    });
}
