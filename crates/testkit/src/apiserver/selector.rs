// SPDX-License-Identifier: Apache-2.0

//! Label and field selectors, as far as a proxy uses them.

use model::Kind;
use serde_json::Value;

use super::resource::Target;

/// Which objects of a kind a client asked for.
#[derive(Clone, Debug, Default)]
pub(super) struct Selector {
    namespace: String,
    labels: Vec<Requirement>,
    fields: Vec<Requirement>,
}

#[derive(Clone, Debug)]
enum Requirement {
    Exists(String),
    Absent(String),
    Equals(String, String),
    Differs(String, String),
}

impl Selector {
    /// From the path and the two query parameters; else why not.
    pub(super) fn parse(target: Target<'_>, labels: &str, fields: &str) -> Result<Selector, String> {
        let labels = requirements(labels)?;
        let fields = requirements(fields)?;
        for field in &fields {
            let (Requirement::Equals(key, _) | Requirement::Differs(key, _)) = field else {
                return Err(format!("invalid field selector: {field:?}"));
            };
            let known = match key.as_str() {
                "metadata.name" | "metadata.namespace" => true,
                "spec.clusterIP" | "spec.type" => target.resource.kind == Kind::Service,
                "spec.unschedulable" => target.resource.kind == Kind::Node,
                _ => false,
            };
            if !known {
                return Err(format!("field label not supported: {key}"));
            }
        }
        Ok(Selector { namespace: target.namespace.to_owned(), labels, fields })
    }

    pub(super) fn matches(&self, object: &Value) -> bool {
        let metadata = &object["metadata"];
        (self.namespace.is_empty() || metadata["namespace"] == self.namespace.as_str())
            && self.labels.iter().all(|requirement| requirement.holds(|key| metadata["labels"][key].as_str()))
            && self.fields.iter().all(|requirement| {
                // A field that is not there counts as empty.
                requirement.holds(|path| {
                    let value = path.split('.').fold(object, |value, part| &value[part]);
                    Some(value.as_str().unwrap_or_default())
                })
            })
    }
}

impl Requirement {
    fn holds<'a>(&self, value: impl Fn(&str) -> Option<&'a str>) -> bool {
        match self {
            Requirement::Exists(key) => value(key).is_some(),
            Requirement::Absent(key) => value(key).is_none(),
            Requirement::Equals(key, wanted) => value(key) == Some(wanted),
            Requirement::Differs(key, unwanted) => value(key) != Some(unwanted),
        }
    }
}

fn requirements(text: &str) -> Result<Vec<Requirement>, String> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(requirement).collect()
}

fn requirement(text: &str) -> Result<Requirement, String> {
    if text.contains([' ', '(']) {
        return Err(format!("selector {text:?} is not understood by this server"));
    }
    let owned = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
    if let Some((key, value)) = text.split_once("!=").map(owned) {
        return Ok(Requirement::Differs(key, value));
    }
    if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')).map(owned) {
        return Ok(Requirement::Equals(key, value));
    }
    Ok(match text.strip_prefix('!') {
        Some(key) => Requirement::Absent(key.to_owned()),
        None => Requirement::Exists(text.to_owned()),
    })
}
