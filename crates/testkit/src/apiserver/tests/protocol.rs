// SPDX-License-Identifier: Apache-2.0

//! A server that behaves.

use model::Kind;
use serde_json::json;

use super::{
    SERVICES, SLICES, brief,
    client::{JSON, PROTOBUF, ask, each, first, get, unwrap_envelope},
    pair, service, slice,
};
use crate::apiserver::{ApiServer, Credential, Verb};

#[test]
fn lists_in_pages_that_go_on_as_they_began() {
    let server = ApiServer::start();
    for name in ["a", "b", "c", "d", "e"] {
        server.put(slice(name, "10.0.0.1"));
    }
    let page = get(&server, &format!("{SLICES}?limit=2"), JSON).json();
    assert_eq!(page["kind"], "EndpointSliceList");
    assert_eq!(page["items"].as_array().unwrap().len(), 2);
    assert_eq!(page["metadata"]["remainingItemCount"], 3);
    assert_eq!(page["metadata"]["resourceVersion"], "6");

    server.delete(Kind::EndpointSlice, "shop", "d");
    let token = page["metadata"]["continue"].as_str().unwrap().to_owned();
    let rest = get(&server, &format!("{SLICES}?limit=7&continue={token}"), JSON).json();
    let names: Vec<_> =
        rest["items"].as_array().unwrap().iter().map(|item| &item["metadata"]["name"]).collect();
    assert_eq!(names, ["c", "d", "e"]);
    assert_eq!(rest["metadata"]["resourceVersion"], "6");
    assert_eq!(rest["metadata"]["continue"], json!(null));

    server.compact();
    let expired = get(&server, &format!("{SLICES}?limit=7&continue={token}"), JSON);
    assert_eq!(expired.status, 410);
    assert_eq!(expired.json()["reason"], "Expired");
}

#[test]
fn lists_in_protobuf() {
    let server = ApiServer::start();
    server.put(service("cart", "10.96.0.1"));
    server.put(service("desk", "10.96.0.2"));
    let reply = get(&server, SERVICES, PROTOBUF);
    assert_eq!(reply.header("content-type"), PROTOBUF);
    let (kind, list) = unwrap_envelope(&reply.body().unwrap());
    assert_eq!(kind, "ServiceList");
    assert_eq!(first(&first(&list, 1), 2), b"3");
    let addresses: Vec<_> = each(&list, 2).iter().map(|item| first(&first(item, 2), 3)).collect();
    assert_eq!(addresses, [b"10.96.0.1", b"10.96.0.2"]);
}

#[test]
fn watches_from_a_version() {
    let server = ApiServer::start();
    server.put(slice("a", "10.0.0.1"));
    let version = server.put(slice("b", "10.0.0.1"));
    server.put(slice("b", "10.0.0.2"));
    let path =
        format!("{SLICES}?watch=1&resourceVersion={version}&allowWatchBookmarks=true&timeoutSeconds=1");
    let mut watch = get(&server, &path, JSON);
    assert_eq!(brief(&watch.json_event().unwrap().unwrap()), pair("MODIFIED", "b"));
    server.put(service("elsewhere", "10.96.0.1"));
    server.put(slice("c", "10.0.0.3"));
    assert_eq!(brief(&watch.json_event().unwrap().unwrap()), pair("ADDED", "c"));
    server.delete(Kind::EndpointSlice, "shop", "a");
    let event = watch.json_event().unwrap().unwrap();
    assert_eq!(brief(&event), pair("DELETED", "a"));
    assert_eq!(event["object"]["metadata"]["resourceVersion"], "7");
    // At the end of its time a bookmark, and a proper end.
    let event = watch.json_event().unwrap().unwrap();
    assert_eq!(brief(&event), pair("BOOKMARK", ""));
    assert_eq!(event["object"]["metadata"]["resourceVersion"], "7");
    assert!(watch.json_event().unwrap().is_none());
}

#[test]
fn a_version_too_old_is_an_error_event() {
    let server = ApiServer::start();
    let version = server.put(slice("a", "10.0.0.1"));
    server.compact();
    let mut watch = get(&server, &format!("{SLICES}?watch=true&resourceVersion={version}"), JSON);
    assert_eq!(watch.status, 200);
    let event = watch.json_event().unwrap().unwrap();
    assert_eq!((&event["type"], &event["object"]["code"]), (&json!("ERROR"), &json!(410)));
    assert!(watch.json_event().unwrap().is_none());
}

#[test]
fn streams_a_list_in_protobuf() {
    let server = ApiServer::start();
    server.put(slice("a", "10.0.0.1"));
    server.put(slice("b", "10.0.0.1"));
    let path = format!(
        "{SLICES}?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
    );
    let mut watch = get(&server, &path, "application/vnd.kubernetes.protobuf;stream=watch");
    assert_eq!(watch.header("content-type"), "application/vnd.kubernetes.protobuf;stream=watch");
    for name in ["a", "b"] {
        let (kind, object) = watch.protobuf_event();
        assert_eq!((kind.as_str(), first(&first(&object, 1), 1)), ("ADDED", name.into()));
    }
    let (kind, object) = watch.protobuf_event();
    assert_eq!(kind, "BOOKMARK");
    let annotation = first(&first(&object, 1), 12);
    assert_eq!((first(&annotation, 1), first(&annotation, 2)), (END.into(), b"true".into()));
    server.put(slice("a", "10.0.0.9"));
    let (kind, object) = watch.protobuf_event();
    assert_eq!(kind, "MODIFIED");
    assert_eq!(first(&first(&object, 2), 1), b"10.0.0.9");

    let without_match = get(&server, &format!("{SLICES}?watch=1&sendInitialEvents=true"), JSON);
    assert_eq!(without_match.status, 422);
}

const END: &[u8] = b"k8s.io/initial-events-end";

#[test]
fn what_stops_matching_is_deleted_for_the_watcher() {
    let server = ApiServer::start();
    let version = server.put(service("cart", "10.96.0.1"));
    let selectors =
        "labelSelector=%21service.kubernetes.io%2Fservice-proxy-name&fieldSelector=spec.clusterIP%21%3DNone";
    let path = format!("{SERVICES}?watch=1&resourceVersion={version}&{selectors}");
    let mut watch = get(&server, &path, JSON);
    let mut labelled = service("cart", "10.96.0.1");
    labelled["metadata"]["labels"] = json!({"service.kubernetes.io/service-proxy-name": "other"});
    server.put(labelled.clone());
    let event = watch.json_event().unwrap().unwrap();
    assert_eq!(brief(&event), pair("DELETED", "cart"));
    assert_eq!(event["object"]["metadata"]["labels"], json!(null), "the state that matched last");
    server.put(labelled);
    server.put(service("cart", "10.96.0.1"));
    assert_eq!(brief(&watch.json_event().unwrap().unwrap()), pair("ADDED", "cart"));
    server.put(service("cart", "None"));
    assert_eq!(brief(&watch.json_event().unwrap().unwrap()), pair("DELETED", "cart"));
    let list = get(&server, &format!("{SERVICES}?{selectors}"), JSON).json();
    assert_eq!(list["items"], json!([]));

    for name in ["one", "two"] {
        server.put(json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": name}}));
    }
    let list = get(&server, "/api/v1/nodes?fieldSelector=metadata.name%3Dtwo", JSON).json();
    assert_eq!(list["items"][0]["metadata"]["name"], "two");
    assert_eq!(list["items"].as_array().unwrap().len(), 1);
}

#[test]
fn lets_in_tokens_and_certificates_and_nobody_else() {
    let server = ApiServer::start();
    let cidrs = "/apis/networking.k8s.io/v1/servicecidrs";
    let status =
        |headers: &[(&str, &str)], certified| ask(&server, cidrs, headers, certified).unwrap().status;
    assert_eq!(status(&[], false), 401);
    assert_eq!(status(&[("Authorization", "Bearer wrong")], false), 401);
    assert_eq!(status(&[("Authorization", "Bearer token-0")], false), 200);
    assert_eq!(status(&[], true), 200);
    server.rotate_token();
    assert_eq!(status(&[("Authorization", "Bearer token-0")], false), 401);
    assert_eq!(status(&[("Authorization", "Bearer token-1")], false), 200);
    server.rotate_certificate();
    assert_eq!(status(&[("User-Agent", "me/1")], true), 200);

    let requests = server.requests();
    let last = requests.last().unwrap();
    assert_eq!((last.kind, last.verb, last.status), (Some(Kind::ServiceCidr), Verb::List, 200));
    assert_eq!((last.user_agent.as_str(), &last.credential), ("me/1", &Credential::Certificate));
    assert_eq!(requests.len(), 7);
}
