// SPDX-License-Identifier: Apache-2.0

//! A configuration file's text into [`Config`].
//!
//! kube-proxy decodes strictly, and if that fails because of an unknown or doubled field, once more leniently
//! with a notice. So do we, and the notice names each such field and its line. A value of the wrong type, a
//! foreign kind or version, and an empty file are errors. `null` is the same as nothing.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Value};
use serde_saphyr::{DuplicateKeyPolicy, Spanned};

use super::{API_VERSION, Config, KIND, VModule};
use crate::syntax::GoDuration;

/// A configuration with its defaults, and what was odd about the text.
#[derive(Debug)]
pub struct Decoded {
    pub config: Config,
    pub notices: Vec<Notice>,
}

/// A field that was ignored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    pub line: u64,
    /// As written: `iptables.masqueradBit`.
    pub field: String,
    pub reason: Reason,
}

/// Why a field was ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Nobody knows it.
    Unknown,
    /// It stands there twice; the last one counts.
    Duplicate,
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Notice { line, field, reason } = self;
        match reason {
            Reason::Unknown => write!(f, "line {line}: unknown field {field:?}, ignored"),
            Reason::Duplicate => write!(f, "line {line}: field {field:?} is set twice, the last one counts"),
        }
    }
}

/// Reads YAML or JSON (which is YAML too). The error is one line and has the place in the text.
pub fn decode(text: &str) -> Result<Decoded, String> {
    let mut options = serde_saphyr::Options::default();
    options.duplicate_keys = DuplicateKeyPolicy::LastWins;
    let tree: Tree = serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let message = error.without_snippet().to_string();
        message.lines().next().unwrap_or("cannot be read").to_owned()
    })?;
    let Tree::Map(top) = tree else {
        return Err(format!("the file is empty or not an object; it must be a {KIND}"));
    };
    let mut config: Config =
        serde_json::from_value(Value::Object(top.to_json())).map_err(|error| top.culprit(&error))?;
    for (field, is, must) in [("kind", &config.kind, KIND), ("apiVersion", &config.api_version, API_VERSION)]
    {
        if is != must {
            let is = if is.is_empty() { "is missing".into() } else { format!("is {is:?}") };
            return Err(format!("{field} {is}, it must be {must:?}"));
        }
    }
    let mut notices = Vec::new();
    top.compare(&template(), "", &mut notices);
    config.fill();
    Ok(Decoded { config, notices })
}

/// A document with the lines of its keys, and with keys that occur twice.
enum Tree {
    Map(Entries),
    Leaf(Value),
}

struct Entries(Vec<(Spanned<String>, Tree)>);

impl Entries {
    /// The last of two entries with the same key counts, and `null` counts as nothing.
    fn to_json(&self) -> Map<String, Value> {
        let mut object = Map::new();
        for (key, tree) in &self.0 {
            match tree {
                Tree::Leaf(Value::Null) => object.remove(&key.value),
                Tree::Leaf(value) => object.insert(key.value.clone(), value.clone()),
                Tree::Map(entries) => object.insert(key.value.clone(), Value::Object(entries.to_json())),
            };
        }
        object
    }

    /// Names the field that does not fit. Every field is optional, so each can be tried alone.
    fn culprit(&self, error: &serde_json::Error) -> String {
        self.first_bad(&|value| serde_json::from_value(value).map(|_: Config| ()), "")
            .unwrap_or_else(|| error.to_string())
    }

    fn first_bad(&self, fits: &dyn Fn(Value) -> serde_json::Result<()>, path: &str) -> Option<String> {
        self.0.iter().find_map(|(key, tree)| {
            let field = join(path, &key.value);
            let alone = |value| fits(Value::Object(Map::from_iter([(key.value.clone(), value)])));
            match tree {
                Tree::Leaf(Value::Null) => None,
                Tree::Leaf(value) => {
                    let error = alone(value.clone()).err()?;
                    Some(format!("line {}: {field}: {error}", key.referenced.line()))
                }
                Tree::Map(entries) => entries.first_bad(&alone, &field).or_else(|| {
                    let error = alone(Value::Object(entries.to_json())).err()?;
                    Some(format!("line {}: {field}: {error}", key.referenced.line()))
                }),
            }
        })
    }

    fn compare(&self, known: &Value, path: &str, notices: &mut Vec<Notice>) {
        for (index, (key, tree)) in self.0.iter().enumerate() {
            let field = join(path, &key.value);
            let mut note = |reason| {
                notices.push(Notice { line: key.referenced.line(), field: field.clone(), reason });
            };
            if self.0[..index].iter().any(|(earlier, _)| earlier.value == key.value) {
                note(Reason::Duplicate);
            }
            match (known.get(&key.value), tree) {
                (None, _) => note(Reason::Unknown),
                // The keys below are names of gates, not fields.
                (Some(_), _) if field == "featureGates" => {}
                (Some(known), Tree::Map(entries)) => entries.compare(known, &field, notices),
                (Some(_), Tree::Leaf(_)) => {}
            }
        }
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// A configuration in which every field is written out: the names it has are the names we know.
fn template() -> Value {
    let mut config = Config::with_defaults();
    config.feature_gates = Some(Default::default());
    config.windows_run_as_service = true;
    config.logging.vmodule = vec![VModule::default()];
    config.logging.options.json.split_stream = true;
    config.logging.options.text.split_stream = true;
    serde_json::to_value(config).expect("plain fields and string keys always have a JSON form")
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Tree, D::Error> {
        deserializer.deserialize_any(TreeVisitor)
    }
}

struct TreeVisitor;

/// The scalars have nothing to add to what a JSON value has.
macro_rules! leaves {
    ($($visit:ident: $type:ty),*) => {
        $(fn $visit<E: de::Error>(self, value: $type) -> Result<Tree, E> { Ok(Tree::Leaf(value.into())) })*
    };
}

impl<'de> Visitor<'de> for TreeVisitor {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML or JSON value")
    }

    leaves!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str, visit_string: String);

    fn visit_unit<E: de::Error>(self) -> Result<Tree, E> {
        Ok(Tree::Leaf(Value::Null))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Tree, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = sequence.next_element::<Tree>()? {
            items.push(match item {
                Tree::Leaf(value) => value,
                Tree::Map(entries) => Value::Object(entries.to_json()),
            });
        }
        Ok(Tree::Leaf(Value::Array(items)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tree, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Tree::Map(Entries(entries)))
    }
}

/// `logging.flushFrequency` is older than the rule that durations are strings: a number counts nanoseconds.
pub(super) fn duration_or_nanos<'de, D: Deserializer<'de>>(deserializer: D) -> Result<GoDuration, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::String(text) => GoDuration::parse(&text).map_err(de::Error::custom),
        other => other
            .as_i64()
            .map(GoDuration)
            .ok_or_else(|| de::Error::custom("expected a duration or a number of nanoseconds")),
    }
}

/// A Kubernetes quantity may be written as a number or a string; it is kept as text.
pub(super) fn quantity<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::String(text) => Ok(text),
        Value::Number(number) => Ok(number.to_string()),
        _ => Err(de::Error::custom("expected a quantity such as 64Ki")),
    }
}
