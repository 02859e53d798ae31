// SPDX-License-Identifier: Apache-2.0

//! One watch, from its first event to its end.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use tokio::time::{Instant, sleep, sleep_until};

use super::{
    log::Request,
    mischief::Verb,
    pump::{Over, Pump},
    refusal::Refusal,
    resource::Resource,
    schema::{Form, Presence},
    selector::Selector,
    shared::Shared,
    store::{Event, Store},
};

/// What a client asked to be told of.
pub(super) struct Watch {
    resource: &'static Resource,
    selector: Selector,
    begin: Begin,
    bookmarks: bool,
    deadline: Instant,
}

enum Begin {
    /// What happened after this version.
    After(u64),
    /// What there is, as if it were being added.
    Everything,
    /// The same, not older than this version and with a bookmark at its end.
    List { at_least: u64 },
}

impl Begin {
    fn check(&self, store: &Store) -> Result<(), Refusal> {
        match self {
            Begin::After(version) => store.can_watch_from(*version),
            Begin::List { at_least } if *at_least > store.version() => {
                Err(Refusal::too_large_version(*at_least, store.version()))
            }
            Begin::List { .. } | Begin::Everything => Ok(()),
        }
    }
}

impl Watch {
    pub(super) fn new(
        resource: &'static Resource,
        selector: Selector,
        asked: &Request,
    ) -> Result<Watch, Refusal> {
        let matches = asked.param("resourceVersionMatch");
        let marked = asked.verb == Verb::WatchList;
        if marked != (matches == "NotOlderThan") {
            let message = "sendInitialEvents and resourceVersionMatch=NotOlderThan go together";
            return Err(Refusal { message: message.to_owned(), ..Refusal::new(422) });
        }
        let number = |name: &str| match asked.param(name) {
            "" => Ok(0),
            text => text.parse().map_err(|_| Refusal::bad_request(&format!("{name} is not a number"))),
        };
        let begin = match number("resourceVersion")? {
            at_least if marked => Begin::List { at_least },
            0 => Begin::Everything,
            version => Begin::After(version),
        };
        // Without a wish a server takes something between half an hour and an hour.
        let secs = match number("timeoutSeconds")? {
            0 => 1800,
            secs => secs,
        };
        Ok(Watch {
            resource,
            selector,
            begin,
            bookmarks: matches!(asked.param("allowWatchBookmarks"), "1" | "true"),
            deadline: Instant::now() + Duration::from_secs(secs),
        })
    }

    pub(super) async fn run(self, shared: Arc<Shared>, mut pump: Pump) {
        // How it ended is the client's to find out.
        let _ = self.stream(&shared, &mut pump).await;
    }

    async fn stream(&self, shared: &Shared, pump: &mut Pump) -> Result<(), Over> {
        let mut pulse = shared.pulse.subscribe();
        let mut bookmarks = pulse.borrow_and_update().bookmarks;
        pump.break_if_due().await?;
        let mut version = self.begin(shared, pump).await?;
        loop {
            // First, so that a bookmark is never older than its order.
            let ordered = pulse.borrow_and_update().bookmarks;
            let (events, now) = {
                let store = shared.store();
                (store.events_after(version, self.resource.kind, &self.selector), store.version())
            };
            // Behind the watcher only after the server went back in time.
            let is_behind = now < version;
            version = version.max(now);
            for event in events {
                self.send(pump, &event).await?;
            }
            if ordered != bookmarks {
                bookmarks = ordered;
                if !is_behind {
                    self.bookmark(pump, version, false).await?;
                }
            }
            tokio::select! {
                changed = pulse.changed() => if changed.is_err() { return Ok(()) },
                () = pump.closed() => return Ok(()),
                () = sleep(HOLD), if pump.holds() => pump.flush().await?,
                () = sleep_until(self.deadline) => {
                    pump.flush().await?;
                    if is_behind {
                        return Ok(());
                    }
                    return self.bookmark(pump, version, false).await;
                }
            }
        }
    }

    /// What comes before the changes; gives the version after which they begin.
    async fn begin(&self, shared: &Shared, pump: &mut Pump) -> Result<u64, Over> {
        let (begun, objects, version) = {
            let store = shared.store();
            let begun = self.begin.check(&store);
            (begun, store.select(self.resource.kind, &self.selector), store.version())
        };
        if let Err(refusal) = begun {
            // Once a watch is granted, failures come as events.
            let status = pump.encoding.status(&refusal.status());
            pump.send(pump.encoding.event("ERROR", &status)).await?;
            return Err(Over);
        }
        if let Begin::After(version) = self.begin {
            return Ok(version);
        }
        for object in objects {
            self.send(pump, &Event { kind: "ADDED", object }).await?;
        }
        if matches!(self.begin, Begin::List { .. }) {
            self.bookmark(pump, version, true).await?;
        }
        Ok(version)
    }

    async fn send(&self, pump: &mut Pump, event: &Event) -> Result<(), Over> {
        let object = pump.encoding.object(self.resource, &event.object);
        pump.event(pump.encoding.event(event.kind, &object)).await
    }

    async fn bookmark(&self, pump: &mut Pump, version: u64, ends_list: bool) -> Result<(), Over> {
        if !self.bookmarks {
            return Ok(());
        }
        let mut metadata = json!({"resourceVersion": version.to_string(), "creationTimestamp": null});
        if ends_list {
            metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        let mut object = json!({
            "kind": self.resource.name,
            "apiVersion": self.resource.api_version,
            "metadata": metadata,
        });
        // The zeros of the Go type stand in it, too.
        for field in &self.resource.schema[1..] {
            object[field.name] = match field.form {
                _ if field.presence == Presence::Each => Value::Null,
                Form::Text => json!(""),
                _ => json!({}),
            };
        }
        let object = pump.encoding.object(self.resource, &object);
        pump.bookmark(pump.encoding.event("BOOKMARK", &object)).await
    }
}

/// How long a single event is kept back when pairs are to be swapped.
const HOLD: Duration = Duration::from_millis(100);
