// SPDX-License-Identifier: Apache-2.0

//! One sort of trouble at a time: while it lasts nothing is removed, and afterwards all is known.

use std::{thread, time::Duration};

use model::Kind;
use testkit::apiserver::{ALWAYS, ApiServer, Fault, Login, Mischief, Refusal, Verb, When};

use crate::{
    follow::Following,
    objects::{addresses, server, service, slice},
};

/// Longer than the source waits for anything: a server that is said not to have a kind is asked again after ten
/// minutes.
const LONG: Duration = Duration::from_secs(700);

fn breaking(after: usize, with: Fault) -> Mischief {
    Mischief::Break { after, with }
}

/// What can go wrong with any request.
fn troubles() -> Vec<Mischief> {
    let mut troubles: Vec<Mischief> =
        [401, 403, 410, 429, 500, 503, 504].map(|code| Mischief::Refuse(Refusal::new(code))).into();
    troubles.extend([
        Mischief::Refuse(Refusal::new(429).retry_after(2)),
        Mischief::Silence,
        Mischief::HangUp,
        Mischief::Empty,
        Mischief::Page,
        Mischief::Mislabel("text/plain"),
        Mischief::Mislabel("application/json"),
        Mischief::Mislabel("application/vnd.kubernetes.protobuf"),
        Mischief::Drip { bytes: 60, pause: Duration::from_millis(1) },
        breaking(1, Fault::Cut),
        breaking(1, Fault::End),
        breaking(1, Fault::Stall),
        breaking(1, Fault::Truncate),
        breaking(1, Fault::Garbage),
        breaking(1, Fault::Oversize),
    ]);
    troubles
}

/// What can go wrong with a stream only.
fn stream_troubles() -> Vec<Mischief> {
    vec![
        Mischief::Twice,
        Mischief::Swap,
        breaking(0, Fault::Cut),
        breaking(0, Fault::Garbage),
        breaking(0, Fault::Oversize),
        breaking(0, Fault::Error(Refusal::new(410))),
        breaking(2, Fault::Error(Refusal::new(410))),
        breaking(2, Fault::Error(Refusal::new(500))),
        breaking(1, Fault::Error(Refusal::new(504))),
    ]
}

/// Changes of every sort; what they remove.
fn change(server: &ApiServer, round: usize) -> Vec<String> {
    let name = |what: &str| format!("{what}{round}");
    server.put(service(&name("new"), "10.96.9.1"));
    server.put(slice(&format!("new{round}-a"), &addresses(300 + round, 3)));
    for count in 1..4 {
        server.put(slice("svc0001-x", &addresses(round, count)));
    }
    server.put(service(&name("brief"), "10.96.9.2"));
    server.delete(Kind::Service, "shop", &name("brief"));
    let old = format!("svc{:04}", 10 + round);
    server.delete(Kind::Service, "shop", &old);
    server.delete(Kind::EndpointSlice, "shop", &format!("{old}-x"));
    vec![format!("Service shop/{old}"), format!("EndpointSlice shop/{old}-x")]
}

/// Everything removed was to be removed, and once.
fn check_removed(following: &Following, mut allowed: Vec<String>, trouble: &Mischief) {
    let mut removed = following.removed();
    removed.retain(|key| !key.starts_with("Service shop/brief"));
    removed.sort();
    allowed.sort();
    assert_eq!(removed, allowed, "{trouble:?}");
}

/// Lets the trouble happen, and time go by.
fn suffer(server: &ApiServer, following: &Following) {
    following.wait_until("the trouble happened", || server.mischief_left() == 0);
    thread::sleep(Duration::from_millis(50));
    following.skip(LONG);
}

#[test]
fn a_watch_in_trouble() {
    for json in [false, true] {
        let server = server(80);
        let following = Following::start_with(&server, Login::Token, json);
        following.converge(&server);
        for (round, trouble) in troubles().into_iter().chain(stream_troubles()).enumerate() {
            following.settle(&server);
            following.begin();
            server.misbehave(When::STREAM, 4, trouble.clone());
            server.cut_connections();
            let removed = change(&server, round);
            suffer(&server, &following);
            following.converge(&server);
            check_removed(&following, removed, &trouble);
        }
    }
}

#[test]
fn a_streamed_list_in_trouble() {
    list_in_trouble(Way::Streamed, troubles().into_iter().chain(stream_troubles()).collect());
}

#[test]
fn a_paged_list_in_trouble() {
    list_in_trouble(Way::Paged, troubles());
}

#[test]
fn a_list_in_one_piece_in_trouble() {
    list_in_trouble(Way::AtOnce, troubles());
}

/// How the server likes to list.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Streamed,
    Paged,
    AtOnce,
}

/// A list at the start, and again after history was lost.
fn list_in_trouble(way: Way, troubles: Vec<Mischief>) {
    let order = |server: &ApiServer, trouble: &Mischief| {
        match way {
            Way::Streamed => {}
            Way::Paged => server.misbehave(When::WATCH_LIST, ALWAYS, Mischief::Refuse(Refusal::new(422))),
            Way::AtOnce => server.be_release(34),
        }
        // After some troubles the source pages by itself.
        server.misbehave(When::ANY_LIST, 4, trouble.clone());
    };
    for (round, trouble) in troubles.into_iter().enumerate() {
        let server = server(80);
        order(&server, &trouble);
        let following = Following::start_with(&server, Login::Token, round % 2 == 1);
        suffer(&server, &following);
        following.converge(&server);
        assert_eq!(following.removed(), [""; 0], "{trouble:?}");

        server.behave();
        following.settle(&server);
        following.begin();
        order(&server, &trouble);
        server.go_down();
        let removed = change(&server, round);
        server.compact();
        server.come_up();
        suffer(&server, &following);
        following.converge(&server);
        check_removed(&following, removed, &trouble);
    }
}

#[test]
fn a_server_that_comes_and_goes() {
    let server = server(80);
    let following = Following::start(&server);
    following.converge(&server);
    following.begin();
    let mut removed = Vec::new();
    for round in 0..6 {
        server.go_down();
        removed.extend(change(&server, round));
        following.pass(Duration::from_secs(5));
        server.come_up();
        if round % 2 == 0 {
            following.converge(&server);
        }
    }
    following.converge(&server);
    check_removed(&following, removed, &Mischief::HangUp);
}

#[test]
fn a_server_that_is_not_there_at_the_start() {
    let server = server(10);
    server.go_down();
    let following = Following::start(&server);
    following.pass(Duration::from_secs(60));
    assert!(!following.mirror().is_complete());
    assert_eq!(following.mirror().told, 0);
    server.come_up();
    following.converge(&server);
}

#[test]
fn connections_the_network_lost() {
    let server = server(80);
    let following = Following::start(&server);
    following.converge(&server);
    following.begin();
    server.forget_requests();
    server.freeze_connections();
    let removed = change(&server, 0);
    let before = following.view();
    following.pass(Duration::from_secs(60));
    assert_eq!(following.view(), before);
    following.skip(LONG);
    following.converge(&server);
    check_removed(&following, removed, &Mischief::Silence);
    assert!(server.requests().iter().all(|request| request.verb == Verb::Watch), "no list was needed");
}

#[test]
fn a_server_that_accepts_and_says_nothing() {
    let server = server(80);
    let following = Following::start(&server);
    following.converge(&server);
    following.begin();
    server.mute(true);
    server.cut_connections();
    let removed = change(&server, 0);
    following.pass(Duration::from_secs(120));
    assert_eq!(following.removed(), [""; 0]);
    for kind in Kind::ALL {
        let status = following.status.of(kind);
        assert!((2..20).contains(&status.failures), "{kind:?}: {status:?}");
        assert!(status.last_error.is_some_and(|error| error.contains("answer")), "{kind:?}");
    }
    server.mute(false);
    following.converge(&server);
    check_removed(&following, removed, &Mischief::Silence);
}

/// An etcd restored from a backup. The server grants watches from versions it has yet to reach, and tells them nothing.
#[test]
fn a_server_that_went_back_in_time() {
    for json in [false, true] {
        let server = server(20);
        let following = Following::start_with(&server, Login::Token, json);
        following.converge(&server);
        let backup = server.version();
        for round in 0..50 {
            server.put(slice("svc0001-x", &addresses(round, 3)));
        }
        server.delete(Kind::Service, "shop", "svc0002");
        server.put(service("late", "10.96.9.1"));
        following.converge(&server);
        following.begin();
        server.go_back(backup);
        server.put(service("new", "10.96.9.2"));
        for _ in 0..3 {
            thread::sleep(Duration::from_millis(300));
            following.skip(Duration::from_secs(160));
        }
        following.converge(&server);
        assert_eq!(following.removed(), ["Service shop/late"]);
        for (kind, lists) in [(Kind::Service, 2), (Kind::EndpointSlice, 2), (Kind::Node, 1)] {
            assert_eq!(following.ends(kind), lists, "{kind:?}");
        }
    }
}

/// Bookmarks are a promise no server has to keep.
#[test]
fn a_server_without_bookmarks_is_not_listed_again() {
    let server = server(5);
    let following = Following::start(&server);
    following.converge(&server);
    server.forget_requests();
    for _ in 0..6 {
        thread::sleep(Duration::from_millis(300));
        following.skip(Duration::from_secs(160));
    }
    following.converge(&server);
    assert!(Kind::ALL.iter().all(|kind| following.ends(*kind) == 1), "no list was needed");
    let probes = server.requests().iter().filter(|request| request.verb == Verb::List).count();
    assert!((4..=16).contains(&probes), "{probes}");
}

/// A load balancer that has lost its way answers everything with 404. That is no cluster without services.
#[test]
fn not_found_is_not_none() {
    let server = server(10);
    let following = Following::start(&server);
    following.converge(&server);
    following.begin();
    server.misbehave(When::ANY, ALWAYS, Mischief::Refuse(Refusal::new(404)));
    server.compact();
    server.cut_connections();
    following.pass(Duration::from_secs(120));
    let mut removed = following.removed();
    removed.retain(|key| !key.starts_with("ServiceCIDR "));
    assert_eq!(removed, [""; 0]);
    server.behave();
    following.skip(Duration::from_secs(700));
    following.converge(&server);
}

/// Broken for ever, but only where there is another way.
#[test]
fn a_streamed_list_that_never_works_gives_way_to_pages() {
    for trouble in [
        Mischief::Silence,
        Mischief::Empty,
        breaking(3, Fault::End),
        breaking(3, Fault::Stall),
        breaking(3, Fault::Garbage),
    ] {
        let server = server(10);
        server.misbehave(When::WATCH_LIST, ALWAYS, trouble.clone());
        let following = Following::start(&server);
        following.converge(&server);
    }
}

/// An object that cannot be read must not hold up those after it.
#[test]
fn an_event_that_can_never_be_read_is_passed_by() {
    let server = server(10);
    let following = Following::start(&server);
    following.converge(&server);
    server.misbehave(When::WATCH, ALWAYS, breaking(0, Fault::Garbage));
    server.cut_connections();
    server.put(slice("svc0001-x", &addresses(99, 3)));
    following.pass(Duration::from_secs(120));
    following.converge(&server);
}
