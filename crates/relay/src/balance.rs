// SPDX-License-Identifier: Apache-2.0

//! Which of the members of a service is next.

use std::{
    cell::Cell,
    hash::{BuildHasher, Hash, Hasher, RandomState},
    net::IpAddr,
};

use crate::service::Member;

/// A schedule is no longer than this, however large the weights are; then they are rounded.
const LONGEST: u64 = 4_096;

/// In which order members come, so that each comes as often as its weight says, and spread out (as smooth weighted
/// round robin does). Members of weight 0 do not come.
pub(crate) fn schedule(weights: &[u32]) -> Box<[u32]> {
    let common = weights.iter().copied().fold(0, gcd).max(1);
    let mut weights: Vec<u64> = weights.iter().map(|weight| u64::from(weight / common)).collect();
    let total: u64 = weights.iter().sum();
    if total > LONGEST.max(weights.len() as u64) {
        for weight in weights.iter_mut().filter(|weight| **weight > 0) {
            *weight = (*weight * LONGEST / total).max(1);
        }
    }
    if weights.iter().all(|weight| *weight == 1) {
        return (0..weights.len() as u32).collect();
    }
    let total: i64 = weights.iter().sum::<u64>() as i64;
    let mut credit = vec![0_i64; weights.len()];
    (0..total)
        .filter_map(|_| {
            credit.iter_mut().zip(&weights).for_each(|(credit, weight)| *credit += *weight as i64);
            let candidates = (0..credit.len()).filter(|at| weights[*at] > 0);
            let next = candidates.max_by_key(|at| (credit[*at], std::cmp::Reverse(*at)))?;
            credit[next] -= total;
            Some(next as u32)
        })
        .collect()
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The one with the fewest open connections for its weight; among equals, the first from `start` on.
pub(crate) fn least(members: &[Member], start: usize, ok: impl Fn(&Member) -> bool) -> Option<&Member> {
    let count = members.len();
    let from_start = (0..count).map(|at| &members[(start + at) % count]);
    from_start.filter(|member| member.weight > 0 && ok(member)).min_by(|a, b| {
        // a.open / a.weight < b.open / b.weight, without a division.
        let load = |member: &Member, other: &Member| {
            (member.endpoint.open.value() as u64 + 1) * u64::from(other.weight)
        };
        load(a, b).cmp(&load(b, a))
    })
}

/// The same one for the same client, and when one goes only its clients move: the highest of scores that depend on
/// client and endpoint, by weight (rendezvous hashing).
pub(crate) fn hashed(members: &[Member], client: IpAddr, ok: impl Fn(&Member) -> bool) -> Option<&Member> {
    let score = |member: &Member| {
        let mut hasher = Fixed(0xcbf2_9ce4_8422_2325);
        (client, member.endpoint.address).hash(&mut hasher);
        // In (0, 1); the logarithm makes weights exact.
        let unit = ((mix(hasher.finish()) >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
        f64::from(member.weight) / -unit.ln()
    };
    let eligible = members.iter().filter(|member| member.weight > 0 && ok(member));
    eligible.max_by(|a, b| score(a).total_cmp(&score(b)))
}

/// The same in every process, so that a restart moves nobody.
struct Fixed(u64);

impl Hasher for Fixed {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    value = (value ^ (value >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    value ^ (value >> 33)
}

/// A number that nobody can foresee well enough to gain from it.
pub(crate) fn random() -> u64 {
    thread_local! {
        static STATE: Cell<u64> = Cell::new(RandomState::new().hash_one(0) | 1);
    }
    STATE.with(|state| {
        let next = state.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        state.set(next);
        mix(next)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_has_each_member_as_often_as_its_weight() {
        assert_eq!(*schedule(&[1, 1, 1]), [0, 1, 2]);
        assert_eq!(*schedule(&[4, 2]), [0, 1, 0]);
        assert_eq!(*schedule(&[0, 7]), [1]);
        assert_eq!(*schedule(&[0, 0]), []);
        assert_eq!(*schedule(&[]), []);
        let long = schedule(&[u32::MAX, 1, u32::MAX / 2]);
        assert!(long.len() <= LONGEST as usize + 2, "{}", long.len());
        let count = |which| long.iter().filter(|member| **member == which).count();
        assert!(count(1) >= 1 && count(0) > 2 * count(2) - 20, "{} {} {}", count(0), count(1), count(2));
    }

    #[test]
    fn hashing_moves_only_whom_it_must() {
        let members: Vec<Member> = (1..=4)
            .map(|n| {
                Member::new(format!("10.0.0.{n}:80").parse().expect("an address"), if n == 1 { 3 } else { 1 })
            })
            .collect();
        let client = |n: u32| IpAddr::from(n.to_be_bytes());
        let all = |n| hashed(&members, client(n), |_| true).expect("a member").endpoint.address;
        let mut counts = [0; 4];
        for n in 0..6_000 {
            let before = all(n);
            counts[members.iter().position(|m| m.endpoint.address == before).expect("a member")] += 1;
            let after = hashed(&members[..3], client(n), |_| true).expect("a member").endpoint.address;
            if before != members[3].endpoint.address {
                assert_eq!(before, after);
            }
        }
        assert!(counts[0] > 2_700 && counts[0] < 3_300, "{counts:?}");
        assert!(counts[1..].iter().all(|count| (800..1_200).contains(count)), "{counts:?}");
    }
}
