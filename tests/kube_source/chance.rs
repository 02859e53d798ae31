// SPDX-License-Identifier: Apache-2.0

//! Random changes and random mischief. `SEED=n` repeats one run.

use std::{thread, time::Duration};

use model::Kind;
use testkit::apiserver::{ApiServer, Fault, Login, Mischief, Refusal, When};

use crate::{
    follow::Following,
    objects::{NODE, addresses, cluster_ip, node, server, service, service_cidr, slice},
};

#[test]
fn whatever_happens_it_ends_up_with_what_there_is() {
    let seeds: Vec<u64> = match std::env::var("SEED") {
        Ok(seed) => vec![seed.parse().expect("SEED is a number")],
        Err(_) => (1..=8).collect(),
    };
    for seed in seeds {
        println!("SEED={seed}");
        run(seed);
    }
}

fn run(seed: u64) {
    let mut dice = Dice(seed);
    let server = server(40);
    let login = dice.pick(&[Login::Token, Login::TokenFile, Login::Certificate]);
    // Does not say, lists best by a stream, lists best in one piece.
    server.be_release(dice.pick(&[0, 32, 33]));
    let following = Following::start_with(&server, login, dice.roll(4) == 0);
    for _ in 0..60 {
        match dice.roll(10) {
            0..5 => change(&server, &mut dice),
            5..8 => trouble(&server, &following, login, &mut dice),
            _ => following.pass(Duration::from_millis(dice.roll(4000))),
        }
        thread::sleep(Duration::from_millis(dice.roll(20)));
        check(&following, seed);
    }
    server.behave();
    server.mute(false);
    server.come_up();
    server.kubeconfig(following.dir.path(), login);
    // Streams may be stalled; backoffs may be long.
    for _ in 0..2 {
        thread::sleep(Duration::from_millis(100));
        following.skip(Duration::from_secs(160));
    }
    following.converge(&server);
    check(&following, seed);
}

/// The first half of the services is never deleted, so it must never be missing.
fn check(following: &Following, seed: u64) {
    let removed = following.removed();
    let wrong: Vec<_> = removed
        .iter()
        .filter(|key| (0..20).any(|at| key.contains(&format!("svc{at:04}"))) || key.contains(NODE))
        .collect();
    assert!(wrong.is_empty(), "SEED={seed}: removed, though it was there: {wrong:?}");
    assert_eq!(following.mirror().complaints, [""; 0], "SEED={seed}");
}

fn change(server: &ApiServer, dice: &mut Dice) {
    for _ in 0..=dice.roll(5) {
        let at = dice.roll(40) as usize;
        let name = format!("svc{at:04}");
        let slice_name = format!("{name}-x");
        match dice.roll(10) {
            0..5 => {
                server.put(slice(&slice_name, &addresses(dice.roll(2000) as usize, dice.roll(6) as usize)));
            }
            5..7 => {
                server.put(service(&name, &cluster_ip(dice.roll(5000) as usize)));
            }
            7 if at >= 20 => {
                server.delete(Kind::Service, "shop", &name);
                server.delete(Kind::EndpointSlice, "shop", &slice_name);
            }
            8 => {
                server.put(node(NODE, &format!("z{}", dice.roll(3))));
            }
            9 if dice.roll(2) == 0 => {
                server.put(service_cidr("extra", &format!("10.{}.0.0/16", 100 + dice.roll(50))));
            }
            9 => {
                server.delete(Kind::ServiceCidr, "", "extra");
            }
            _ => {}
        }
    }
}

fn trouble(server: &ApiServer, following: &Following, login: Login, dice: &mut Dice) {
    match dice.roll(12) {
        0 => server.cut_connections(),
        1 => server.freeze_connections(),
        2 => server.compact(),
        3 => server.go_down(),
        4 => server.come_up(),
        5 => server.mute(dice.roll(3) == 0),
        6 => server.send_bookmarks(),
        7 => {
            if login == Login::Certificate {
                server.rotate_certificate();
            } else {
                server.rotate_token();
            }
            if dice.roll(2) == 0 {
                server.kubeconfig(following.dir.path(), login);
            }
        }
        8 => following.skip(Duration::from_secs(dice.roll(200))),
        _ => {
            let when = dice.pick(&[When::ANY, When::LIST, When::WATCH, When::WATCH_LIST, When::STREAM]);
            let when = if dice.roll(2) == 0 { when } else { when.of(dice.pick(&Kind::ALL)) };
            server.misbehave(when, 1 + dice.roll(4) as usize, mischief(dice));
            if dice.roll(2) == 0 {
                server.cut_connections();
            }
        }
    }
}

fn mischief(dice: &mut Dice) -> Mischief {
    let refusal = Refusal::new(dice.pick(&[400, 401, 403, 406, 410, 422, 429, 500, 503, 504]));
    match dice.roll(11) {
        0..2 => Mischief::Refuse(refusal),
        2 => Mischief::Silence,
        3 => Mischief::HangUp,
        4 => Mischief::Empty,
        5 => Mischief::Page,
        6 => Mischief::Mislabel(dice.pick(&["text/plain", "application/json"])),
        7 => Mischief::Drip { bytes: 1 + dice.roll(500) as usize, pause: Duration::from_millis(1) },
        8 => Mischief::Twice,
        9 => Mischief::Swap,
        _ => {
            let fault = match dice.roll(6) {
                0 => Fault::Cut,
                1 => Fault::End,
                2 => Fault::Stall,
                3 => Fault::Truncate,
                4 => Fault::Garbage,
                _ => Fault::Error(refusal),
            };
            Mischief::Break { after: dice.roll(50) as usize, with: fault }
        }
    }
}

/// SplitMix64.
struct Dice(u64);

impl Dice {
    /// From 0 to below `sides`.
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % sides
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.roll(from.len() as u64) as usize].clone()
    }
}
