// SPDX-License-Identifier: Apache-2.0

//! Events that clients create, and what a real server would say of them.

use serde_json::Value;

use super::{refusal::Refusal, shared::Shared};

/// The namespace of a path that Events are created at.
pub(super) fn namespace(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("/apis/events.k8s.io/v1/namespaces/")?;
    rest.strip_suffix("/events").filter(|namespace| !namespace.is_empty() && !namespace.contains('/'))
}

/// Takes an Event, or says why not.
pub(super) fn take(shared: &Shared, namespace: &str, body: &[u8]) -> Result<Value, Refusal> {
    let mut events = shared.events();
    if let Some(code) = events.refusal {
        return Err(Refusal::new(code));
    }
    let event: Value =
        serde_json::from_slice(body).map_err(|error| Refusal::bad_request(&error.to_string()))?;
    check(namespace, &event).map_err(|why| Refusal { message: why.to_owned(), ..Refusal::new(422) })?;
    events.taken.push(event.clone());
    Ok(event)
}

fn check(namespace: &str, event: &Value) -> Result<(), &'static str> {
    let text = |path: &str| event.pointer(path).and_then(Value::as_str).unwrap_or_default();
    if text("/apiVersion") != "events.k8s.io/v1" || text("/kind") != "Event" {
        return Err("not an Event of events.k8s.io/v1");
    }
    let regarding = text("/regarding/namespace");
    let of_regarding = if regarding.is_empty() { "default" } else { regarding };
    if text("/metadata/namespace") != namespace || of_regarding != namespace {
        return Err("the namespaces do not match");
    }
    let time = text("/eventTime");
    if time.len() != "2006-01-02T15:04:05.000000Z".len() || !time.ends_with('Z') {
        return Err("eventTime must have six digits of the second");
    }
    if !["Normal", "Warning"].contains(&text("/type")) {
        return Err("type must be Normal or Warning");
    }
    let required = ["/metadata/name", "/reason", "/action", "/reportingController", "/reportingInstance"];
    if required.iter().any(|path| text(path).is_empty()) {
        return Err("a required field is missing");
    }
    if text("/note").len() > 1024 || text("/reportingInstance").len() > 128 {
        return Err("too long");
    }
    Ok(())
}
