// SPDX-License-Identifier: Apache-2.0

//! Kubernetes Events: what somebody who looks at the cluster, and not at this node's log, should know.
//!
//! Best effort. Noting one never waits; what cannot be sent is dropped and counted. Of events that say the same of
//! the same object one is sent, and the next one tells how many were not. Without an API server there are only the
//! log lines that go with them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use model::ServiceKey;
use serde_json::{Value, json};
use source::kube::{Access, NotCreated};
use tokio::{
    runtime::Handle,
    sync::mpsc::{self, Receiver, Sender},
};

use crate::{clock, metrics::Metrics};

/// So many may wait to be sent.
const QUEUE: usize = 64;
/// How long an object is not spoken of again for the same reason.
const SILENCE: Duration = Duration::from_secs(60);
/// How many are remembered for that.
const REMEMBERED: usize = 512;
/// The waits between attempts to send one; then it is dropped.
const RETRIES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(5), Duration::from_secs(30)];
/// The longest text and name of a sender that the API takes, in bytes.
const MAX_NOTE: usize = 1024;
const MAX_INSTANCE: usize = 128;
/// As kube-proxy calls itself there: who looks for its events finds ours.
const CONTROLLER: &str = "kube-proxy";

/// What an event is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Regarding {
    /// This node.
    Node,
    Service(ServiceKey),
}

/// One event to be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    kind: &'static str,
    reason: &'static str,
    action: &'static str,
    regarding: Regarding,
    text: String,
}

impl Note {
    /// Something is wrong.
    pub fn warning(reason: &'static str, action: &'static str, regarding: Regarding, text: String) -> Note {
        Note { kind: "Warning", reason, action, regarding, text }
    }

    /// Something happened.
    pub fn normal(reason: &'static str, action: &'static str, regarding: Regarding, text: String) -> Note {
        Note { kind: "Normal", reason, action, regarding, text }
    }
}

/// Takes notes. The default one takes them nowhere.
#[derive(Clone, Default)]
pub struct Recorder(Option<Arc<Desk>>);

struct Desk {
    queue: Sender<Note>,
    node: Arc<str>,
    metrics: Arc<Metrics>,
    recent: Mutex<HashMap<(&'static str, Regarding), Recent>>,
}

struct Recent {
    told: Instant,
    suppressed: u32,
}

impl Recorder {
    /// Sends what is noted to the API server, as long as somebody can note something.
    pub fn start(runtime: &Handle, access: Arc<Access>, node: &Arc<str>, metrics: &Arc<Metrics>) -> Recorder {
        let (queue, notes) = mpsc::channel(QUEUE);
        runtime.spawn(send(notes, access, Arc::clone(node), Arc::clone(metrics)));
        Recorder(Some(Arc::new(Desk {
            queue,
            node: Arc::clone(node),
            metrics: Arc::clone(metrics),
            recent: Mutex::default(),
        })))
    }

    /// This node's name, for the text of a note; empty where notes go nowhere.
    pub fn node(&self) -> &str {
        self.0.as_ref().map_or("", |desk| &desk.node)
    }

    /// Never waits.
    pub fn note(&self, note: Note) {
        if let Some(desk) = &self.0
            && let Some(note) = desk.admit(note, Instant::now())
            && desk.queue.try_send(note).is_err()
        {
            desk.metrics.events.with(&["dropped"]).add(1);
        }
    }
}

impl Desk {
    fn admit(&self, mut note: Note, now: Instant) -> Option<Note> {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if recent.len() >= REMEMBERED {
            recent.retain(|_, last| now.saturating_duration_since(last.told) < SILENCE);
            if recent.len() >= REMEMBERED {
                recent.clear();
            }
        }
        let key = (note.reason, note.regarding.clone());
        let suppressed = match recent.get_mut(&key) {
            Some(last) if now.saturating_duration_since(last.told) < SILENCE => {
                last.suppressed = last.suppressed.saturating_add(1);
                self.metrics.events.with(&["suppressed"]).add(1);
                return None;
            }
            Some(last) => last.suppressed,
            None => 0,
        };
        recent.insert(key, Recent { told: now, suppressed: 0 });
        if suppressed > 0 {
            note.text.push_str(&format!(" (and {suppressed} more since the last event)"));
        }
        Some(note)
    }
}

async fn send(mut notes: Receiver<Note>, access: Arc<Access>, node: Arc<str>, metrics: Arc<Metrics>) {
    let instance = shortened(format!("{CONTROLLER}-{node}"), MAX_INSTANCE);
    while let Some(note) = notes.recv().await {
        let (path, object) = object(&note, &node, &instance, SystemTime::now());
        let outcome = match deliver(&access, &path, &object).await {
            Ok(()) => "sent",
            Err(NotCreated::Refused { code }) => {
                tracing::warn!(
                    code,
                    "the API server takes no Events from us; allow this user to create events in events.k8s.io"
                );
                "refused"
            }
            Err(error) => {
                tracing::debug!(%error, reason = note.reason, "an Event could not be sent");
                "dropped"
            }
        };
        metrics.events.with(&[outcome]).add(1);
    }
}

async fn deliver(access: &Access, path: &str, object: &Value) -> Result<(), NotCreated> {
    for wait in RETRIES {
        match access.create(path, object).await {
            Err(NotCreated::Unreachable(_)) => tokio::time::sleep(wait).await,
            done => return done,
        }
    }
    access.create(path, object).await
}

fn object(note: &Note, node: &str, instance: &str, now: SystemTime) -> (String, Value) {
    let (namespace, name, regarding) = match &note.regarding {
        Regarding::Node => ("default", node, json!({"kind": "Node", "apiVersion": "v1", "name": node})),
        Regarding::Service(ServiceKey { namespace, name }) => (
            &**namespace,
            &**name,
            json!({"kind": "Service", "apiVersion": "v1", "namespace": &**namespace, "name": &**name}),
        ),
    };
    let nanos = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let object = json!({
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": format!("{name}.{nanos:x}"), "namespace": namespace},
        "eventTime": clock::rfc3339_micro(now),
        "reportingController": CONTROLLER,
        "reportingInstance": instance,
        "type": note.kind,
        "reason": note.reason,
        "action": note.action,
        "note": shortened(note.text.clone(), MAX_NOTE),
        "regarding": regarding,
    });
    (format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events"), object)
}

fn shortened(mut text: String, max: usize) -> String {
    if text.len() > max {
        let cut = (0..=max).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(cut);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desk(queue: usize) -> (Recorder, Receiver<Note>, Arc<Metrics>) {
        let (queue, notes) = mpsc::channel(queue);
        let metrics = Arc::new(Metrics::new(UNIX_EPOCH));
        let desk = Desk { queue, node: "n".into(), metrics: Arc::clone(&metrics), recent: Mutex::default() };
        (Recorder(Some(Arc::new(desk))), notes, metrics)
    }

    fn service(name: &str) -> Regarding {
        Regarding::Service(ServiceKey { namespace: "shop".into(), name: name.into() })
    }

    fn warning(regarding: Regarding, text: &str) -> Note {
        Note::warning("Bad", "Do", regarding, text.to_owned())
    }

    #[test]
    fn the_object_and_where_it_goes() {
        let now = UNIX_EPOCH + Duration::new(1_767_225_600, 500_000_000);
        let (path, event) = object(&warning(service("cart"), &"é".repeat(600)), "n", "kube-proxy-n", now);
        assert_eq!(path, "/apis/events.k8s.io/v1/namespaces/shop/events");
        assert_eq!(event["metadata"]["name"], "cart.188672520bc76500");
        assert_eq!(event["eventTime"], "2026-01-01T00:00:00.500000Z");
        assert_eq!(event["note"].as_str().map(str::len), Some(MAX_NOTE));
        assert_eq!(event["regarding"]["namespace"], "shop");
        let (path, event) = object(&warning(Regarding::Node, ""), "n", "kube-proxy-n", now);
        assert_eq!(path, "/apis/events.k8s.io/v1/namespaces/default/events");
        assert_eq!(event["regarding"], json!({"kind": "Node", "apiVersion": "v1", "name": "n"}));
    }

    #[test]
    fn what_repeats_is_told_once_a_minute_with_a_count() {
        let (recorder, _notes, _) = desk(4);
        let desk = recorder.0.as_ref().expect("made above");
        let start = Instant::now();
        let text =
            |regarding, after| desk.admit(warning(regarding, "no"), start + after).map(|note| note.text);
        assert_eq!(text(Regarding::Node, Duration::ZERO).as_deref(), Some("no"));
        assert_eq!(text(Regarding::Node, SILENCE / 2), None);
        assert_eq!(text(service("a"), SILENCE / 2).as_deref(), Some("no"), "another object");
        assert_eq!(text(Regarding::Node, SILENCE).as_deref(), Some("no (and 1 more since the last event)"));
        for index in 0..2000 {
            text(service(&index.to_string()), SILENCE);
        }
        assert!(desk.recent.lock().expect("one thread").len() <= REMEMBERED, "memory is bounded");
    }

    #[test]
    fn a_full_queue_drops_and_counts() {
        let (recorder, mut notes, metrics) = desk(2);
        for name in ["a", "b", "c"] {
            recorder.note(warning(service(name), "no"));
        }
        assert_eq!(metrics.events.with(&["dropped"]).value(), 1);
        assert!(notes.try_recv().is_ok());
        Recorder::default().note(warning(Regarding::Node, "nobody listens"));
    }
}
