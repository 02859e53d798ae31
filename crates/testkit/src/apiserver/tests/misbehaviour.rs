// SPDX-License-Identifier: Apache-2.0

//! A server that misbehaves, exactly as told.

use std::{io, net::TcpStream, time::Duration};

use model::Kind;
use serde_json::Value;

use super::{
    SERVICES, SLICES, brief,
    client::{JSON, PROTOBUF, Reply, ask, get},
    pair, slice,
};
use crate::apiserver::{ALWAYS, ApiServer, Fault, Mischief, Refusal, When};

const WATCH_LIST: &str =
    "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";

fn watch_list(server: &ApiServer) -> Reply {
    get(server, &format!("{SLICES}?{WATCH_LIST}"), JSON)
}

fn three_slices() -> ApiServer {
    let server = ApiServer::start();
    for name in ["a", "b", "c"] {
        server.put(slice(name, "10.0.0.1"));
    }
    server
}

fn next(reply: &mut Reply) -> (String, String) {
    brief(&reply.json_event().unwrap().expect("another event"))
}

#[test]
fn only_those_requests_and_only_so_often() {
    let server = three_slices();
    server.misbehave(When::LIST.of(Kind::EndpointSlice), 2, Mischief::Refuse(Refusal::new(503)));
    server.misbehave(When::ANY, 1, Mischief::Refuse(Refusal::new(429).retry_after(3)));
    assert_eq!(get(&server, SLICES, JSON).status, 503);
    let reply = get(&server, SERVICES, JSON);
    assert_eq!((reply.status, reply.header("retry-after")), (429, "3"));
    assert_eq!(reply.json()["details"]["retryAfterSeconds"], 3);
    assert_eq!(server.mischief_left(), 1);
    assert_eq!(get(&server, SLICES, PROTOBUF).status, 503);
    assert_eq!(get(&server, SLICES, PROTOBUF).status, 200);
    server.misbehave(When::ANY, ALWAYS, Mischief::HangUp);
    assert!(ask(&server, SLICES, &[("Authorization", "Bearer token-0")], false).is_err());
    server.behave();
    assert_eq!(get(&server, SLICES, PROTOBUF).status, 200);
}

#[test]
fn streams_break_after_so_many_events() {
    let server = three_slices();
    for (fault, expected) in [
        (Fault::Cut, Err(io::ErrorKind::UnexpectedEof)),
        (Fault::End, Ok(None)),
        (Fault::Stall, Err(io::ErrorKind::WouldBlock)),
        (Fault::Garbage, Err(io::ErrorKind::InvalidData)),
    ] {
        server.misbehave(When::WATCH_LIST, 1, Mischief::Break { after: 2, with: fault.clone() });
        let mut watch = watch_list(&server);
        assert_eq!(next(&mut watch), pair("ADDED", "a"), "{fault:?}");
        assert_eq!(next(&mut watch), pair("ADDED", "b"), "{fault:?}");
        watch.set_patience(Duration::from_millis(200));
        let end = watch.json_event().map(|event| event.map(|_| ())).map_err(|error| error.kind());
        assert_eq!(end, expected, "{fault:?}");
    }
    server.misbehave(
        When::WATCH_LIST,
        1,
        Mischief::Break { after: 0, with: Fault::Error(Refusal::new(500)) },
    );
    let event: Value = watch_list(&server).json_event().unwrap().unwrap();
    assert_eq!((event["type"].as_str(), event["object"]["code"].as_u64()), (Some("ERROR"), Some(500)));
}

#[test]
fn lists_break_in_the_middle() {
    let server = three_slices();
    let whole = get(&server, SLICES, JSON).body().unwrap().len();
    server.misbehave(When::LIST, 1, Mischief::Break { after: 0, with: Fault::Truncate });
    assert_eq!(get(&server, SLICES, JSON).body().unwrap().len(), whole / 2);
    server.misbehave(When::LIST, 1, Mischief::Break { after: 0, with: Fault::Cut });
    assert!(get(&server, SLICES, JSON).body().is_err());
    server.misbehave(When::LIST, 1, Mischief::Drip { bytes: 200, pause: Duration::from_millis(1) });
    assert_eq!(get(&server, SLICES, JSON).body().unwrap().len(), whole);
    server.misbehave(When::LIST, 1, Mischief::Empty);
    assert!(get(&server, SLICES, JSON).body().unwrap().is_empty());
}

#[test]
fn events_twice_and_swapped_but_not_across_a_bookmark() {
    let server = three_slices();
    server.misbehave(When::WATCH_LIST, 1, Mischief::Twice);
    let mut watch = watch_list(&server);
    for name in ["a", "a", "b", "b", "c", "c"] {
        assert_eq!(next(&mut watch), pair("ADDED", name));
    }
    assert_eq!(next(&mut watch), pair("BOOKMARK", ""));

    server.misbehave(When::WATCH_LIST, 1, Mischief::Swap);
    let mut watch = watch_list(&server);
    for name in ["b", "a", "c"] {
        assert_eq!(next(&mut watch), pair("ADDED", name));
    }
    assert_eq!(next(&mut watch), pair("BOOKMARK", ""));
    server.put(slice("d", "10.0.0.1"));
    assert_eq!(next(&mut watch), pair("ADDED", "d"), "alone, after a moment");
}

#[test]
fn without_protobuf() {
    let server = three_slices();
    server.speak_protobuf(false);
    assert_eq!(get(&server, SLICES, PROTOBUF).status, 406);
    let both = get(&server, SLICES, &format!("{PROTOBUF},{JSON}"));
    assert_eq!((both.status, both.header("content-type")), (200, JSON));
}

#[test]
fn goes_down_and_comes_up_on_the_same_port() {
    let server = three_slices();
    let mut watch = watch_list(&server);
    assert_eq!(next(&mut watch), pair("ADDED", "a"));
    server.go_down();
    while let Ok(event) = watch.json_event() {
        assert!(event.is_some(), "no proper end");
    }
    let refused = ask(&server, SLICES, &[], false).map(|_| ()).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    server.come_up();
    assert_eq!(get(&server, SLICES, JSON).status, 200);
}

#[test]
fn frozen_connections_stay_and_say_nothing() {
    let server = three_slices();
    let mut watch = watch_list(&server);
    while next(&mut watch).0 != "BOOKMARK" {}
    server.freeze_connections();
    server.put(slice("d", "10.0.0.1"));
    watch.set_patience(Duration::from_millis(200));
    assert_eq!(watch.json_event().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    assert_eq!(get(&server, SLICES, JSON).status, 200, "others are served");
    server.cut_connections();
    assert_ne!(watch.json_event().unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn dropping_it_ends_everything() {
    let server = three_slices();
    let address = server.port.address();
    let mut watch = watch_list(&server);
    drop(server);
    while let Ok(event) = watch.json_event() {
        assert!(event.is_some(), "no proper end");
    }
    let refused = TcpStream::connect(address).map(|_| ()).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
}
