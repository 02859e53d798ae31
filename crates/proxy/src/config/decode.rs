// SPDX-License-Identifier: Apache-2.0

//! A configuration file's text into [`Config`].
//!
//! kube-proxy decodes strictly, and if that fails because of an unknown or doubled field, once more leniently
//! with a notice. So do we, and the notice names each such field and its line. A value of the wrong type, a
//! foreign kind or version, and an empty file are errors. `null` is the same as nothing.

use serde::{Deserialize, Deserializer, Serializer, de};
use serde_json::Value;

pub use super::tree::{Notice, Reason};
use super::{API_VERSION, Config, KIND, VModule, tree::Document};
use crate::syntax::GoDuration;

/// A configuration with its defaults, and what was odd about the text.
#[derive(Debug)]
pub struct Decoded {
    pub config: Config,
    pub notices: Vec<Notice>,
}

/// Reads YAML or JSON. The error is one line, with each place in the text that it speaks of.
pub fn decode(text: &str) -> Result<Decoded, String> {
    let document = Document::parse(text, KIND)?;
    let config = document.fit::<Config>().map_err(|misfits| sentence(&misfits))?;
    typed(("kind", &config.kind, KIND))?;
    typed(("apiVersion", &config.api_version, API_VERSION))?;
    Ok(finish(config, &document))
}

/// Fills in the defaults of what was read, and finds what nobody knows.
pub(super) fn finish(mut config: Config, document: &Document) -> Decoded {
    config.fill();
    Decoded { config, notices: document.strays(&template(), "featureGates") }
}

/// The kind and version of a document have to be what we read.
pub(super) fn typed((field, is, must): (&str, &str, &str)) -> Result<(), String> {
    match is {
        _ if is == must => Ok(()),
        "" => Err(format!("{field} is missing, it must be {must:?}")),
        other => Err(format!("{field} is {other:?}, it must be {must:?}")),
    }
}

/// All of them in one line.
pub(super) fn sentence(list: &[impl ToString]) -> String {
    list.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// A configuration in which every field is written out: the names it has are the names we know.
fn template() -> Value {
    let mut config = Config::with_defaults();
    config.feature_gates = Some(Default::default());
    config.windows_run_as_service = true;
    config.udp_idle_timeout = Some(GoDuration(0));
    config.logging.vmodule = vec![VModule::default()];
    config.logging.options.json.split_stream = true;
    config.logging.options.text.split_stream = true;
    serde_json::to_value(config).expect("plain fields and string keys always have a JSON form")
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

/// A whole number without a point, as Go writes it.
pub(super) fn plain_float<S: Serializer>(value: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    match value.fract() == 0.0 && value.abs() < 1e9 {
        true => serializer.serialize_i64(*value as i64),
        false => serializer.serialize_f32(*value),
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
