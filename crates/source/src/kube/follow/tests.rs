// SPDX-License-Identifier: Apache-2.0

use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::*;
use crate::{kube::access::Settings, object};

/// What a follower of Services tells of a stream of these events, and what it finds wrong with them.
async fn told(events: &[Value]) -> (Vec<Update>, Vec<Problem>) {
    let settings = Settings { master: Some("http://127.0.0.1:1".into()), ..Settings::default() };
    let (out, mut updates) = mpsc::channel(100);
    let shared = Shared {
        access: Arc::new(Access::open(settings).await.unwrap()),
        status: Arc::default(),
        problems: Arc::default(),
        interner: Arc::default(),
        node_name: "node".into(),
        out,
    };
    let place = Place {
        paths: &["/api/v1/services"],
        label_selector: "",
        field_selector: String::new(),
        may_be_absent: false,
    };
    let mut follower = Follower::<object::Service>::new(shared, place);
    follower.protocol.accepted();
    let bytes = events.iter().map(|event| format!("{event}\n")).collect::<String>().into_bytes();
    let ended = follower.take_stream(Format::Json, Body::from(bytes)).await;
    assert!(matches!(ended, Err(Stop::Trouble(Trouble::Closed { .. }))));
    (std::iter::from_fn(|| updates.try_recv().ok()).collect(), follower.shared.problems.recent())
}

fn event(what: &str, version: &str, kind: &str) -> Value {
    json!({"type": what, "object": {
        "metadata": {"namespace": "shop", "name": "cart", "resourceVersion": version},
        "spec": {"type": kind, "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"],
                 "ports": [{"port": 80, "protocol": "TCP"}]},
    }})
}

#[tokio::test]
async fn an_object_that_is_nothing_any_more_goes_also_while_a_list_is_streamed() {
    let end = json!({"type": "BOOKMARK", "object": {"metadata": {
        "resourceVersion": "9", "annotations": {"k8s.io/initial-events-end": "true"}}}});
    let (told, _) =
        told(&[event("ADDED", "5", "ClusterIP"), event("MODIFIED", "8", "ExternalName"), end]).await;
    assert!(
        matches!(told[..], [Update::Service(_), Update::ServiceGone(_), Update::End(Kind::Service)]),
        "{told:?}"
    );
}

#[tokio::test]
async fn an_object_that_cannot_be_read_is_named_and_can_go() {
    let mut bad = event("MODIFIED", "5", "ClusterIP");
    bad["object"]["spec"]["ports"] = json!("none");
    let (nothing, problems) = told(&[bad.clone()]).await;
    assert_eq!(nothing, []);
    assert_eq!(problems[0].object, "Service shop/cart");
    bad["type"] = json!("DELETED");
    let (gone, _) = told(&[bad]).await;
    assert!(matches!(gone[..], [Update::ServiceGone(_)]), "{gone:?}");
}
