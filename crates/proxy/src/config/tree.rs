// SPDX-License-Identifier: Apache-2.0

//! A YAML or JSON document that remembers on which line each field stands, so that whatever is wrong with it can
//! be told with its place.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{self, DeserializeOwned, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Value};
use serde_saphyr::{DuplicateKeyPolicy, Spanned};

/// See the module. Always an object; fields may stand in it twice.
pub struct Document(Entries);

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

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Unknown => "unknown field",
            Reason::Duplicate => "is set twice, the last one counts",
        })
    }
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

/// A field whose value is of the wrong type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misfit {
    pub line: u64,
    pub field: String,
    pub says: String,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}: {}", self.line, self.field, self.says)
    }
}

impl Document {
    /// Reads YAML or JSON (which is YAML too). The error is one line and has the place in the text.
    pub fn parse(text: &str, kind: &str) -> Result<Document, String> {
        let mut options = serde_saphyr::Options::default();
        options.duplicate_keys = DuplicateKeyPolicy::LastWins;
        let tree: Tree = serde_saphyr::from_str_with_options(text, options)
            .map_err(|error| unreadable(error.without_snippet()))?;
        match tree {
            Tree::Map(entries) => Ok(Document(entries)),
            Tree::Leaf(_) => Err(format!("the file is empty or not an object; it must be a {kind}")),
        }
    }

    /// The document as a `T` in which every field is optional, or all fields that do not fit.
    pub fn fit<T: DeserializeOwned>(&self) -> Result<T, Vec<Misfit>> {
        serde_json::from_value(Value::Object(self.0.to_json())).map_err(|error| {
            let mut found = Vec::new();
            self.0.misfits(&|value| serde_json::from_value(value).map(|_: T| ()), "", &mut found);
            if found.is_empty() {
                found.push(Misfit { line: 1, field: String::new(), says: error.to_string() });
            }
            found
        })
    }

    /// The document as a `T` without the fields that do not fit, and those; so that the rest can be looked at.
    pub fn fit_most<T: DeserializeOwned + Default>(&self) -> (T, Vec<Misfit>) {
        let misfits = match self.fit() {
            Ok(whole) => return (whole, Vec::new()),
            Err(misfits) => misfits,
        };
        let mut rest = Value::Object(self.0.to_json());
        for misfit in &misfits {
            let (path, name) = misfit.field.rsplit_once('.').unwrap_or(("", &misfit.field));
            let place =
                path.split('.').filter(|key| !key.is_empty()).try_fold(&mut rest, |at, key| at.get_mut(key));
            if let Some(object) = place.and_then(Value::as_object_mut) {
                object.remove(name);
            }
        }
        (serde_json::from_value(rest).unwrap_or_default(), misfits)
    }

    /// The fields that `known`, an object with every field written out, does not have, and those that stand
    /// there twice. The keys below `open` are names, not fields.
    pub fn strays(&self, known: &Value, open: &str) -> Vec<Notice> {
        let mut notices = Vec::new();
        self.0.compare(known, ("", open), &mut notices);
        notices
    }

    /// On which line a field is set: the line of `a` if `a.b` is asked for and `a` is no object. `None` if
    /// nothing is said of it, or `null`.
    pub fn line(&self, field: &str) -> Option<u64> {
        self.0.line(field)
    }
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

    /// Finds the fields that do not fit. Every field is optional, so each can be tried alone.
    fn misfits(&self, fits: &dyn Fn(Value) -> serde_json::Result<()>, path: &str, found: &mut Vec<Misfit>) {
        for (key, tree) in &self.0 {
            let field = join(path, &key.value);
            let alone = |value| fits(Value::Object(Map::from_iter([(key.value.clone(), value)])));
            let before = found.len();
            let whole = match tree {
                Tree::Leaf(Value::Null) => continue,
                Tree::Leaf(value) => value.clone(),
                Tree::Map(entries) => {
                    entries.misfits(&alone, &field, found);
                    Value::Object(entries.to_json())
                }
            };
            if found.len() > before {
                continue;
            }
            if let Err(error) = alone(whole) {
                found.push(Misfit { line: key.referenced.line(), field, says: error.to_string() });
            }
        }
    }

    fn line(&self, field: &str) -> Option<u64> {
        let (name, rest) = field.split_once('.').unwrap_or((field, ""));
        let (key, tree) = self.0.iter().rev().find(|(key, _)| key.value == name)?;
        match tree {
            Tree::Leaf(Value::Null) => None,
            Tree::Map(entries) if !rest.is_empty() => entries.line(rest),
            _ => Some(key.referenced.line()),
        }
    }

    fn compare(&self, known: &Value, (path, open): (&str, &str), notices: &mut Vec<Notice>) {
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
                (Some(_), _) if field == open => {}
                (Some(known), Tree::Map(entries)) => entries.compare(known, (&field, open), notices),
                (Some(_), Tree::Leaf(_)) => {}
            }
        }
    }
}

/// One line, with the place in the text, in words for those who wrote it.
fn unreadable(error: &serde_saphyr::Error) -> String {
    if let (serde_saphyr::Error::MultipleDocuments { .. }, Some(at)) = (error, error.location()) {
        return format!("line {}: there is more than one document in it; a configuration is one", at.line());
    }
    let message = error.to_string();
    message.lines().next().unwrap_or("cannot be read").to_owned()
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
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
