// SPDX-License-Identifier: Apache-2.0

//! Lists in every way a server grants them, and what changes afterwards.

use std::time::Duration;

use model::Kind;
use serde_json::json;
use testkit::apiserver::{ALWAYS, ApiServer, Fault, Login, Mischief, Refusal, Request, Verb, When};

use crate::{
    follow::Following,
    objects::{NODE, addresses, expected, node, server, service, service_cidr, slice},
};

/// Whether some request for slices that was granted is like this.
fn asked(server: &ApiServer, is_so: impl Fn(&Request) -> bool) -> bool {
    let requests = server.requests();
    requests
        .iter()
        .any(|request| request.kind == Some(Kind::EndpointSlice) && request.status == 200 && is_so(request))
}

fn is_page(request: &Request) -> bool {
    request.verb == Verb::List && request.param("limit") == "500" && !request.param("continue").is_empty()
}

/// What was asked for but the server's release.
fn lists(server: &ApiServer) -> Vec<Request> {
    server.requests().into_iter().filter(|request| request.path != "/version").collect()
}

#[test]
fn a_server_that_sends_object_by_object_is_asked_for_all_at_once() {
    for json in [false, true] {
        let server = server(501);
        server.be_release(33);
        let following = Following::start_with(&server, Login::Token, json);
        following.converge(&server);
        assert!(Kind::ALL.iter().all(|kind| following.ends(*kind) == 1));
        assert_eq!(following.mirror().told, expected(&server).len(), "each object once");
        server.put(slice("svc0000-x", &addresses(7, 3)));
        following.converge(&server);
        let requests = lists(&server);
        let count = |verb: Verb| requests.iter().filter(|request| request.verb == verb).count();
        assert_eq!((count(Verb::List), count(Verb::Watch), requests.len()), (4, 4, 8), "{requests:?}");
        assert!(requests.iter().all(|request| request.param("limit").is_empty()), "{requests:?}");
    }
}

#[test]
fn older_servers_are_asked_for_a_stream() {
    let server = server(3);
    server.be_release(32);
    Following::start(&server).converge(&server);
    assert!(lists(&server).iter().all(|request| request.verb == Verb::WatchList));
}

#[test]
fn a_list_in_one_piece_that_never_ends_is_streamed() {
    for fault in [Fault::Cut, Fault::End, Fault::Stall, Fault::Garbage] {
        let server = server(30);
        server.be_release(33);
        server.misbehave(
            When::LIST.of(Kind::EndpointSlice),
            ALWAYS,
            Mischief::Break { after: 3, with: fault.clone() },
        );
        let following = Following::start(&server);
        following.pass(Duration::from_secs(120));
        following.converge(&server);
        let of_slices = |verb: Verb| {
            lists(&server)
                .iter()
                .filter(|request| request.kind == Some(Kind::EndpointSlice) && request.verb == verb)
                .count()
        };
        assert_eq!((of_slices(Verb::List), of_slices(Verb::WatchList)), (2, 1), "{fault:?}");
    }
}

#[test]
fn a_streamed_list_in_protobuf_is_the_first_choice_without_a_release() {
    let server = server(30);
    let following = Following::start(&server);
    following.converge(&server);
    let requests = lists(&server);
    assert_eq!(requests.len(), 4, "one for each kind: {requests:?}");
    for request in &requests {
        assert_eq!(request.verb, Verb::WatchList);
        assert_eq!(request.accept, "application/vnd.kubernetes.protobuf;stream=watch");
        assert_eq!(request.user_agent, "portolan/test");
        assert_eq!(request.param("allowWatchBookmarks"), "true");
        let timeout: u32 = request.param("timeoutSeconds").parse().expect("a number");
        assert!((300..=600).contains(&timeout), "{timeout}");
        let selectors = (request.param("labelSelector"), request.param("fieldSelector"));
        let node = format!("metadata.name={NODE}");
        let expected = match request.kind.expect("a known path") {
            Kind::Service => ("!service.kubernetes.io/service-proxy-name", "spec.clusterIP!=None"),
            Kind::EndpointSlice => ("!service.kubernetes.io/headless", ""),
            Kind::Node => ("", node.as_str()),
            Kind::ServiceCidr => ("", ""),
        };
        assert_eq!(selectors, expected);
    }
    assert!(Kind::ALL.iter().all(|kind| following.ends(*kind) == 1));
    assert_eq!(following.mirror().told, expected(&server).len(), "each object once");
}

#[test]
fn a_server_that_cannot_stream_lists_is_asked_for_pages() {
    for refusal in [
        Mischief::Refuse(Refusal::new(400)),
        Mischief::Refuse(Refusal::new(422)),
        Mischief::Break { after: 0, with: Fault::Error(Refusal::new(500)) },
    ] {
        for json in [false, true] {
            let server = server(501);
            server.misbehave(When::WATCH_LIST, ALWAYS, refusal.clone());
            let following = Following::start_with(&server, Login::Token, json);
            following.converge(&server);
            assert!(asked(&server, is_page), "{refusal:?}");
            assert!(Kind::ALL.iter().all(|kind| following.ends(*kind) == 1), "{refusal:?}");
            server.put(slice("svc0000-x", &addresses(7, 3)));
            following.converge(&server);
            assert!(asked(&server, |request| request.verb == Verb::Watch), "{refusal:?}");
        }
    }
}

#[test]
fn json_when_asked_for_or_when_there_is_nothing_else() {
    for by_server in [false, true] {
        let server = server(20);
        server.speak_protobuf(!by_server);
        let following = Following::start_with(&server, Login::Token, !by_server);
        following.converge(&server);
        assert!(asked(&server, |request| request.accept == "application/json"));
        server.put(slice("svc0003-x", &addresses(9, 5)));
        server.delete(Kind::Service, "shop", "svc0004");
        following.converge(&server);
    }
}

#[test]
fn changes_follow_the_list() {
    let server = server(10);
    let following = Following::start(&server);
    following.converge(&server);
    server.forget_requests();
    following.begin();

    server.put(service("new", "10.96.9.1"));
    server.put(slice("new-1", &addresses(500, 4)));
    server.put(slice("new-2", &addresses(501, 4)));
    server.put(slice("svc0001-x", &[]));
    server.put(node(NODE, "z7"));
    server.put(node("node-b", "z7"));
    server.put(service_cidr("more", "10.97.0.0/16"));
    let mut two_ports = service("svc0002", "10.96.0.3");
    two_ports["spec"]["ports"] = json!([{"name": "a", "port": 1}, {"name": "b", "port": 2}]);
    server.put(two_ports);
    following.converge(&server);
    assert_eq!(following.removed(), [""; 0]);

    server.delete(Kind::EndpointSlice, "shop", "new-1");
    server.delete(Kind::ServiceCidr, "", "more");
    let mut foreign = service("svc0003", "10.96.0.4");
    foreign["metadata"]["labels"] = json!({"service.kubernetes.io/service-proxy-name": "other"});
    server.put(foreign);
    server.put(service("svc0004", "None"));
    let mut headless = slice("svc0004-x", &addresses(4, 2));
    headless["metadata"]["labels"]["service.kubernetes.io/headless"] = json!("");
    server.put(headless);
    server.delete(Kind::Node, "", NODE);
    following.converge(&server);
    let mut removed = following.removed();
    removed.sort();
    let expected = [
        "EndpointSlice shop/new-1",
        "EndpointSlice shop/svc0004-x",
        "Node node-a",
        "Service shop/svc0003",
        "Service shop/svc0004",
        "ServiceCIDR more",
    ];
    assert_eq!(removed, expected);

    server.put(service("svc0003", "10.96.0.4"));
    server.put(service("svc0004", "10.96.0.5"));
    server.put(node(NODE, "z1"));
    following.converge(&server);
    assert_eq!(server.requests().len(), 0, "all of it by the first four watches");
}

#[test]
fn a_watch_that_breaks_goes_on_where_it_was() {
    let server = server(10);
    let following = Following::start(&server);
    following.converge(&server);
    following.begin();
    for round in 0..3 {
        server.forget_requests();
        server.cut_connections();
        let resumed = || server.requests().iter().filter(|request| request.status == 200).count() == 4;
        following.wait_until("four watches again", resumed);
        assert!(server.requests().iter().all(|request| request.verb == Verb::Watch), "round {round}");
    }
    assert_eq!(following.mirror().told, 0, "nothing is told twice");
    assert!(!following.mirror().take_is_dirty());

    server.go_down();
    server.put(service("new", "10.96.9.1"));
    server.put(service("svc0001", "10.96.9.2"));
    server.delete(Kind::Service, "shop", "svc0002");
    server.delete(Kind::EndpointSlice, "shop", "svc0002-x");
    let before = following.view();
    following.pass(Duration::from_secs(120));
    assert_eq!(following.view(), before, "away, so nothing changes");
    assert_eq!(following.removed(), [""; 0]);
    server.come_up();
    following.converge(&server);
    assert_eq!(following.mirror().told, 4, "each change once");
    assert!(Kind::ALL.iter().all(|kind| following.ends(*kind) == 1), "and no list was needed");
}

#[test]
fn what_was_deleted_while_history_was_lost_is_found_by_a_new_list() {
    for pages in [false, true] {
        let server = server(10);
        if pages {
            server.misbehave(When::WATCH_LIST, ALWAYS, Mischief::Refuse(Refusal::new(422)));
        }
        let following = Following::start(&server);
        following.converge(&server);
        following.begin();
        server.go_down();
        server.delete(Kind::Service, "shop", "svc0002");
        server.delete(Kind::EndpointSlice, "shop", "svc0003-x");
        server.delete(Kind::ServiceCidr, "", "kubernetes");
        server.delete(Kind::Node, "", NODE);
        server.put(slice("svc0004-x", &addresses(77, 9)));
        server.compact();
        following.pass(Duration::from_secs(30));
        assert_eq!(following.removed(), [""; 0]);
        server.come_up();
        following.converge(&server);
        let mut removed = following.removed();
        removed.sort();
        let expected =
            ["EndpointSlice shop/svc0003-x", "Node node-a", "Service shop/svc0002", "ServiceCIDR kubernetes"];
        assert_eq!(removed, expected);
        assert!(Kind::ALL.iter().all(|kind| following.ends(*kind) == 2));
    }
}

#[test]
fn bookmarks_keep_a_quiet_watch_from_growing_old() {
    let server = server(3);
    let following = Following::start(&server);
    following.converge(&server);
    server.compact();
    server.forget_requests();
    following.settle(&server);
    server.cut_connections();
    following.wait_until("four requests", || server.requests().len() >= 4);
    server.put(slice("svc0000-x", &addresses(3, 3)));
    following.converge(&server);
    assert!(Kind::ALL.iter().all(|kind| following.ends(*kind) == 1), "no new list: {:?}", server.requests());
}

#[test]
fn a_list_that_never_ends_removes_nothing_and_completes_nothing() {
    for (when, pages) in [(When::WATCH_LIST, false), (When::LIST, true)] {
        let server = server(600);
        if pages {
            server.misbehave(When::WATCH_LIST, ALWAYS, Mischief::Refuse(Refusal::new(422)));
        }
        let cut = Mischief::Break { after: 100, with: Fault::Cut };
        server.misbehave(when.of(Kind::EndpointSlice), ALWAYS, cut.clone());
        let following = Following::start(&server);
        let others = [Kind::Service, Kind::Node, Kind::ServiceCidr];
        following
            .wait_until("other kinds are listed", || others.iter().all(|kind| following.ends(*kind) == 1));
        following.pass(Duration::from_secs(30));
        assert_eq!(following.ends(Kind::EndpointSlice), 0);
        assert!(!following.mirror().is_complete());
        server.behave();
        if pages {
            server.misbehave(When::WATCH_LIST, ALWAYS, Mischief::Refuse(Refusal::new(422)));
        }
        following.converge(&server);

        // The same when it is a list again.
        following.begin();
        server.misbehave(when.of(Kind::EndpointSlice), ALWAYS, cut);
        server.delete(Kind::EndpointSlice, "shop", "svc0599-x");
        following.converge(&server);
        server.compact();
        server.cut_connections();
        following.pass(Duration::from_secs(30));
        assert_eq!(following.ends(Kind::EndpointSlice), 1);
        assert_eq!(following.removed(), ["EndpointSlice shop/svc0599-x"]);
        server.behave();
        following.converge(&server);
        assert_eq!(following.removed(), ["EndpointSlice shop/svc0599-x"]);
    }
}

#[test]
fn a_page_token_that_expires_starts_a_list_that_ends() {
    let server = server(501);
    server.misbehave(When::WATCH_LIST, ALWAYS, Mischief::Refuse(Refusal::new(422)));
    let as_ever = Mischief::Drip { bytes: usize::MAX, pause: Duration::ZERO };
    server.misbehave(When::LIST.of(Kind::Service), 1, as_ever);
    server.misbehave(When::LIST.of(Kind::Service), 1, Mischief::Refuse(Refusal::new(410)));
    let following = Following::start(&server);
    following.converge(&server);
    assert_eq!(server.mischief_left(), 0);
    assert_eq!(following.ends(Kind::Service), 1);
    assert_eq!(following.removed(), [""; 0]);
}

#[test]
fn a_server_without_service_cidrs_has_none() {
    let server = server(5);
    server.misbehave(When::ANY.of(Kind::ServiceCidr), ALWAYS, Mischief::Refuse(Refusal::new(404)));
    server.delete(Kind::ServiceCidr, "", "kubernetes");
    let following = Following::start(&server);
    following.converge(&server);
    let older = |request: &Request| request.path == "/apis/networking.k8s.io/v1beta1/servicecidrs";
    assert!(server.requests().iter().any(older), "the older version was tried");
}

/// A server that was away and has just been started refuses everybody at first. That is no cluster without them.
#[test]
fn the_first_refusal_after_an_outage_is_not_believed() {
    let server = server(5);
    server.go_down();
    let following = Following::start(&server);
    following.pass(Duration::from_secs(60));
    server.misbehave(When::ANY.of(Kind::ServiceCidr), 2, Mischief::Refuse(Refusal::new(403)));
    server.come_up();
    following.converge(&server);
    assert_eq!(following.ends(Kind::ServiceCidr), 1, "none were told of before there were some");
}

#[test]
fn what_goes_wrong_with_an_object_a_second_time_is_said_a_second_time() {
    let server = server(1);
    let following = Following::start(&server);
    following.converge(&server);
    // Another address each time, so that there is something to wait for.
    let put = |node_port: u32, address: &str| {
        let mut object = service("bad", address);
        object["spec"]["ports"][0]["nodePort"] = json!(node_port);
        server.put(object);
        following.converge(&server);
        following.problems.recent().len()
    };
    assert_eq!(put(70000, "10.96.7.1"), 1);
    assert_eq!(put(70000, "10.96.7.2"), 1, "it has not changed");
    assert_eq!(put(30080, "10.96.7.3"), 1);
    assert_eq!(put(70000, "10.96.7.4"), 2);
}
