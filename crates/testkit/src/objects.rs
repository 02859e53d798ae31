// SPDX-License-Identifier: Apache-2.0

//! Kubernetes objects as YAML, lowered the way every source does it.

use model::Update;
use serde_json::Value;
use source::{
    Interner,
    lower::{Lowered, Resource, Scope},
    object::{EndpointSlice, Metadata, Node, Service, ServiceCidr},
};

use crate::scenario::Removal;

/// Lowers objects one after the other. Parts that are left out, and objects that are refused, are part of what
/// scenarios show, so problems are not reported.
#[derive(Debug)]
pub struct Objects {
    interner: Interner,
    node_name: String,
}

impl Objects {
    pub fn new(node_name: &str) -> Objects {
        Objects { interner: Interner::default(), node_name: node_name.to_owned() }
    }

    /// What a watch would say of these objects. One that is not ours, or makes no sense, is told as gone, as the
    /// API server does when an object leaves the selection.
    pub fn apply(&mut self, yaml: &str) -> Result<Vec<Update>, String> {
        let documents: Vec<Value> = serde_saphyr::from_multiple(yaml).map_err(|error| error.to_string())?;
        let mut updates = Vec::new();
        for document in documents {
            let update = match document.get("kind").and_then(Value::as_str).unwrap_or_default() {
                "Service" => self.lower::<Service>(document)?,
                "EndpointSlice" => self.lower::<EndpointSlice>(document)?,
                "Node" => self.lower::<Node>(document)?,
                "ServiceCIDR" => self.lower::<ServiceCidr>(document)?,
                kind => return Err(format!("no such kind as {kind:?}")),
            };
            updates.extend(update);
        }
        Ok(updates)
    }

    /// What a watch would say when this object has been deleted.
    pub fn remove(&mut self, removal: &Removal) -> Result<Update, String> {
        let metadata = Metadata {
            name: Some(removal.name.clone()),
            namespace: Some(removal.namespace.clone()).filter(|namespace| !namespace.is_empty()),
            ..Metadata::default()
        };
        let mut scope =
            Scope { interner: &mut self.interner, node_name: &self.node_name, report: &mut |_| {} };
        let update = match removal.kind.as_str() {
            "Service" => Service::gone(&metadata, &mut scope),
            "EndpointSlice" => EndpointSlice::gone(&metadata, &mut scope),
            "Node" => Node::gone(&metadata, &mut scope),
            "ServiceCIDR" => ServiceCidr::gone(&metadata, &mut scope),
            kind => return Err(format!("no such kind as {kind:?}")),
        };
        update.ok_or_else(|| format!("no such object as {} {}", removal.kind, removal.name))
    }

    fn lower<R: Resource>(&mut self, document: Value) -> Result<Option<Update>, String> {
        let object: R = serde_json::from_value(document).map_err(|error| error.to_string())?;
        let mut scope =
            Scope { interner: &mut self.interner, node_name: &self.node_name, report: &mut |_| {} };
        Ok(match object.lower(&mut scope) {
            Lowered::Object(update) => Some(update),
            Lowered::Ignored | Lowered::Refused => {
                object.metadata().and_then(|metadata| R::gone(metadata, &mut scope))
            }
        })
    }
}
