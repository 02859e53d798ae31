// SPDX-License-Identifier: Apache-2.0

//! A server in trouble is not hammered: every node of a cluster does the same at the same time.

use std::{thread, time::Duration};

use model::Kind;
use testkit::apiserver::{ALWAYS, ApiServer, Fault, Mischief, Refusal, When};

use crate::{
    follow::Following,
    objects::{addresses, expected, server, service, slice},
};

const MINUTE: Duration = Duration::from_secs(60);

/// Requests for slices in a minute of the source's time.
fn requests_in_a_minute(server: &ApiServer, following: &Following) -> usize {
    server.forget_requests();
    following.pass(MINUTE);
    server.requests().iter().filter(|request| request.kind == Some(Kind::EndpointSlice)).count()
}

#[test]
fn trouble_that_lasts_is_met_with_patience() {
    let event = |code| Mischief::Break { after: 0, with: Fault::Error(Refusal::new(code)) };
    let end = Mischief::Break { after: 0, with: Fault::End };
    for (when, mischief, most) in [
        (When::ANY, Mischief::Refuse(Refusal::new(410)), 16),
        (When::ANY, Mischief::Refuse(Refusal::new(429)), 16),
        (When::ANY, Mischief::Refuse(Refusal::new(429).retry_after(20)), 5),
        (When::ANY, Mischief::Refuse(Refusal::new(503)), 16),
        (When::ANY, Mischief::Refuse(Refusal::new(401)), 16),
        (When::ANY, Mischief::HangUp, 16),
        (When::STREAM, event(410), 24),
        (When::STREAM, event(500), 24),
        // A watch that lived for a second may be repeated at once.
        (When::STREAM, end.clone(), 70),
        (When::WATCH, Mischief::Refuse(Refusal::new(410)), 24),
        (When::WATCH, event(410), 24),
        (When::WATCH, end, 70),
    ] {
        let server = server(5);
        // Without streamed lists each list is followed by a watch.
        server.misbehave(When::WATCH_LIST, ALWAYS, Mischief::Refuse(Refusal::new(422)));
        let following = Following::start(&server);
        following.converge(&server);
        following.begin();
        server.misbehave(when, ALWAYS, mischief.clone());
        server.compact();
        server.cut_connections();
        let requests = requests_in_a_minute(&server, &following);
        assert!((2..=most).contains(&requests), "{when:?} {mischief:?}: {requests} requests in a minute");
        assert_eq!(following.removed(), [""; 0], "{mischief:?}");
        server.behave();
        following.skip(MINUTE);
        following.converge(&server);
    }
}

/// Each list works and is followed by an event, and then it is lost again.
#[test]
fn lists_are_not_repeated_without_pause() {
    let server = server(5);
    let following = Following::start(&server);
    following.converge(&server);
    let lost = Fault::Error(Refusal::new(410));
    // One initial event for each of five slices, the bookmark, and one event more.
    server.misbehave(
        When::WATCH_LIST.of(Kind::EndpointSlice),
        ALWAYS,
        Mischief::Break { after: 7, with: lost },
    );
    server.compact();
    server.cut_connections();
    server.forget_requests();
    for round in 0..300 {
        server.put(slice("svc0001-x", &addresses(round, 1 + round % 7)));
        following.pass(Duration::from_millis(200));
    }
    let requests = server.requests();
    let lists = requests.iter().filter(|request| request.kind == Some(Kind::EndpointSlice)).count();
    assert!((3..=24).contains(&lists), "{lists} lists in a minute");
}

/// Load balancers cut connections on which nothing is said, and know nothing of bookmarks that are due.
#[test]
fn quiet_watches_that_are_cut_are_opened_again_at_once() {
    let server = server(5);
    let following = Following::start(&server);
    following.converge(&server);
    let watches = || Kind::ALL.map(|kind| following.status.of(kind).watches);
    for _ in 0..8 {
        let before = watches();
        following.skip(MINUTE);
        server.cut_connections();
        following.wait_until("watches are open again", || {
            watches().iter().zip(before).all(|(now, before)| *now > before)
        });
    }
    assert_eq!(Kind::ALL.map(|kind| following.status.of(kind).failures), [0; 4], "no failure of anybody");
    following.skip(MINUTE);
    server.cut_connections();
    server.put(service("new", "10.96.9.1"));
    // Slowly, since the connection is made in our time.
    let is_known = (0..100).any(|_| {
        following.skip(Duration::from_millis(50));
        thread::sleep(Duration::from_millis(50));
        following.view() == expected(&server)
    });
    assert!(is_known, "a new Service waits for the end of a backoff");
}
