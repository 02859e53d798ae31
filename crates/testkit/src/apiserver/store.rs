// SPDX-License-Identifier: Apache-2.0

//! The objects, and everything that ever happened to them.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Bound,
    sync::Arc,
};

use model::Kind;
use serde_json::{Value, json};

use super::{refusal::Refusal, resource::Resource, selector::Selector, wire};

/// See the module. One resource version for all kinds, raised by each change, as etcd has it.
pub(super) struct Store {
    objects: BTreeMap<Key, Arc<Value>>,
    /// Every change since the beginning, by resource version.
    history: Vec<Change>,
    version: u64,
    /// What is older than this is forgotten: 410.
    compacted: u64,
    /// Lists under way, by continue token.
    pages: HashMap<String, Page>,
    tokens: u64,
}

type Key = (Kind, String, String);

struct Change {
    version: u64,
    kind: Kind,
    before: Option<Arc<Value>>,
    after: Option<Arc<Value>>,
}

/// What is left of a list: it goes on as it was when it began.
struct Page {
    version: u64,
    rest: Vec<Arc<Value>>,
}

/// One answer to a list request.
pub(super) struct List {
    pub(super) metadata: Value,
    pub(super) items: Vec<Arc<Value>>,
}

/// What a list request asks for.
#[derive(Clone, Copy, Default)]
pub(super) struct ListOptions<'a> {
    pub(super) version: &'a str,
    pub(super) exact: bool,
    pub(super) limit: usize,
    pub(super) token: &'a str,
}

/// One event for one watcher.
#[derive(Clone)]
pub(super) struct Event {
    pub(super) kind: &'static str,
    pub(super) object: Arc<Value>,
}

impl Store {
    pub(super) fn new() -> Store {
        Store {
            objects: BTreeMap::new(),
            history: Vec::new(),
            // etcd begins at 1, and 0 means something of its own.
            version: 1,
            compacted: 0,
            pages: HashMap::new(),
            tokens: 0,
        }
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Creates or replaces an object; gives its resource version.
    pub(super) fn put(&mut self, mut object: Value) -> u64 {
        let name = object["kind"].as_str().unwrap_or_default();
        let resource =
            Resource::named(name).unwrap_or_else(|| panic!("kind {name:?} is not held by this server"));
        assert_eq!(object["apiVersion"], resource.api_version, "apiVersion of a {name}");
        let key = key(resource, &object);
        self.version += 1;
        let before = self.objects.get(&key).cloned();
        let metadata = &mut object["metadata"];
        metadata["resourceVersion"] = json!(self.version.to_string());
        // What every object has, so that clients meet fields they do not read.
        let first =
            |field: &str, new: Value| before.as_ref().map_or(new, |old| old["metadata"][field].clone());
        let uid = format!("00000000-0000-4000-8000-{:012x}", self.version);
        let given = metadata["creationTimestamp"].take();
        metadata["uid"] = first("uid", json!(uid));
        metadata["creationTimestamp"] = match given {
            Value::Null => first("creationTimestamp", json!("2026-01-31T12:00:00Z")),
            given => given,
        };
        metadata["managedFields"] = json!([{
            "manager": "testkit", "operation": "Update", "apiVersion": resource.api_version,
            "fieldsType": "FieldsV1", "fieldsV1": {"f:metadata": {"f:labels": {".": {}}}},
        }]);
        wire::check(&object, resource.schema);
        let after = Arc::new(object);
        self.objects.insert(key, after.clone());
        self.history.push(Change { version: self.version, kind: resource.kind, before, after: Some(after) });
        self.version
    }

    /// Whether it was there.
    pub(super) fn delete(&mut self, kind: Kind, namespace: &str, name: &str) -> bool {
        let Some(before) = self.objects.remove(&(kind, namespace.to_owned(), name.to_owned())) else {
            return false;
        };
        self.version += 1;
        self.history.push(Change { version: self.version, kind, before: Some(before), after: None });
        true
    }

    /// Forgets all history: older resource versions and lists under way are gone.
    pub(super) fn compact(&mut self) {
        // A version of its own, so that even a client that has seen everything is behind.
        self.version += 1;
        self.compacted = self.version;
        self.pages.clear();
    }

    /// Undoes everything after a version, as a backup does that is put in place.
    pub(super) fn go_back(&mut self, version: u64) {
        while let Some(change) = self.history.pop_if(|change| change.version > version) {
            let Some(any) = change.before.as_ref().or(change.after.as_ref()) else { continue };
            let part = |field: &str| any["metadata"][field].as_str().unwrap_or_default().to_owned();
            let key = (change.kind, part("namespace"), part("name"));
            match change.before {
                Some(before) => self.objects.insert(key, before),
                None => self.objects.remove(&key),
            };
        }
        self.version = version;
        self.compacted = 0;
        self.pages.clear();
    }

    pub(super) fn object(&self, kind: Kind, namespace: &str, name: &str) -> Option<Arc<Value>> {
        self.objects.get(&(kind, namespace.to_owned(), name.to_owned())).cloned()
    }

    /// All objects of a kind that match, by namespace and name.
    pub(super) fn select(&self, kind: Kind, selector: &Selector) -> Vec<Arc<Value>> {
        let from = Bound::Included((kind, String::new(), String::new()));
        self.objects
            .range((from, Bound::Unbounded))
            .take_while(|((of, ..), _)| *of == kind)
            .map(|(_, object)| object)
            .filter(|object| selector.matches(object))
            .cloned()
            .collect()
    }

    pub(super) fn list(
        &mut self,
        kind: Kind,
        selector: &Selector,
        options: ListOptions<'_>,
    ) -> Result<List, Refusal> {
        if !options.token.is_empty() {
            if !options.version.is_empty() {
                return Err(Refusal::bad_request(
                    "specifying resource version is not allowed when using continue",
                ));
            }
            // A page is good until history is compacted, and may be asked for again.
            let page = self.pages.get(options.token).ok_or_else(Refusal::expired_continue)?;
            let (version, rest) = (page.version, page.rest.clone());
            return Ok(self.page(version, rest, options.limit));
        }
        let wanted = match options.version {
            "" => 0,
            text => text.parse().map_err(|_| Refusal::bad_request("invalid resource version"))?,
        };
        if wanted > self.version {
            return Err(Refusal::too_large_version(wanted, self.version));
        }
        // Only the newest state is kept, so an older one cannot be had exactly.
        if options.exact && wanted != self.version {
            return Err(Refusal::too_old_version(wanted, self.version));
        }
        // "0" is answered from the cache, which does not page.
        let limit = if options.version == "0" { 0 } else { options.limit };
        let items = self.select(kind, selector);
        Ok(self.page(self.version, items, limit))
    }

    fn page(&mut self, version: u64, mut items: Vec<Arc<Value>>, limit: usize) -> List {
        let mut metadata = json!({"resourceVersion": version.to_string()});
        if limit > 0 && items.len() > limit {
            let rest = items.split_off(limit);
            self.tokens += 1;
            let token = format!("v{version}.{}", self.tokens);
            metadata["continue"] = json!(token);
            metadata["remainingItemCount"] = json!(rest.len());
            self.pages.insert(token, Page { version, rest });
        }
        List { metadata, items }
    }

    /// Whether a watch can begin after this version.
    pub(super) fn can_watch_from(&self, version: u64) -> Result<(), Refusal> {
        if version < self.compacted {
            return Err(Refusal::too_old_version(version, self.compacted));
        }
        Ok(())
    }

    /// What a watcher has to be told of after `version`, whatever has been compacted since it began.
    pub(super) fn events_after(&self, version: u64, kind: Kind, selector: &Selector) -> Vec<Event> {
        let from = self.history.partition_point(|change| change.version <= version);
        self.history[from..].iter().filter_map(|change| change.event(kind, selector)).collect()
    }
}

impl Change {
    /// An object that comes to match is added for the watcher; one that no longer does is deleted.
    fn event(&self, kind: Kind, selector: &Selector) -> Option<Event> {
        if self.kind != kind {
            return None;
        }
        let before = self.before.as_ref().filter(|object| selector.matches(object));
        let after = self.after.as_ref().filter(|object| selector.matches(object));
        let (kind, object) = match (before, after) {
            (None, None) => return None,
            (None, Some(after)) => ("ADDED", after.clone()),
            (Some(_), Some(after)) => ("MODIFIED", after.clone()),
            (Some(before), None) => {
                let mut last = Value::clone(before);
                last["metadata"]["resourceVersion"] = json!(self.version.to_string());
                ("DELETED", Arc::new(last))
            }
        };
        Some(Event { kind, object })
    }
}

fn key(resource: &Resource, object: &Value) -> Key {
    let part = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    let (namespace, name) = (part("namespace"), part("name"));
    assert!(!name.is_empty(), "a {} without a name", resource.name);
    assert_eq!(!namespace.is_empty(), resource.namespaced, "namespace of {} {name}", resource.name);
    (resource.kind, namespace, name)
}
