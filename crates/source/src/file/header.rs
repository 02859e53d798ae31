// SPDX-License-Identifier: Apache-2.0

//! Which object a document is about.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, Visitor},
};

/// What is looked at before the rest.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Header {
    pub(super) kind: Option<String>,
    pub(super) api_version: Option<String>,
    pub(super) metadata: Option<HeaderMetadata>,
}

#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct HeaderMetadata {
    pub(super) name: Option<String>,
    pub(super) namespace: Option<String>,
}

impl Header {
    /// Reads the whole text, and finds what is no JSON in it wherever that is.
    pub(super) fn read(text: &[u8]) -> serde_json::Result<Header> {
        serde_json::from_slice(text)
    }

    /// Reads a text that is known to be JSON, no further than it has to: in most documents the rest is nine tenths.
    pub(super) fn begin(text: &[u8]) -> serde_json::Result<Header> {
        let mut header = Header::default();
        let read = Beginning(&mut header).deserialize(&mut serde_json::Deserializer::from_slice(text));
        match read {
            Err(error) if !header.is_whole() => Err(error),
            _ => Ok(header),
        }
    }

    pub(super) fn is_list(&self) -> bool {
        self.kind.as_deref().is_some_and(|kind| kind.ends_with("List"))
    }

    fn is_whole(&self) -> bool {
        self.kind.is_some() && self.api_version.is_some() && self.metadata.is_some()
    }
}

/// Fills a header, and ends with an error as soon as it is whole: there is no other way to leave an object half read.
struct Beginning<'h>(&'h mut Header);

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "camelCase")]
enum Field {
    Kind,
    ApiVersion,
    Metadata,
    #[serde(other)]
    Other,
}

impl<'de> DeserializeSeed<'de> for Beginning<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Beginning<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        let Beginning(header) = self;
        while let Some(field) = fields.next_key()? {
            match field {
                Field::Kind => header.kind = fields.next_value()?,
                Field::ApiVersion => header.api_version = fields.next_value()?,
                Field::Metadata => header.metadata = fields.next_value()?,
                Field::Other => drop(fields.next_value::<IgnoredAny>()?),
            }
            if header.is_whole() {
                return Err(A::Error::custom("enough"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_beginning_says_the_same_as_the_whole() {
        for text in [
            r#"{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a", "namespace": "b", "labels": {}}, "spec": {}}"#,
            r#"{"spec": {"ports": []}, "metadata": {"name": "a"}, "kind": "Service", "apiVersion": "v1", "status": {}}"#,
            r#"{"kind": "Service", "spec": {}}"#,
            r#"{"kind": null, "metadata": null}"#,
            "{}",
        ] {
            assert_eq!(Header::begin(text.as_bytes()).ok(), Header::read(text.as_bytes()).ok(), "{text}");
        }
        for text in [r#"{"kind": 5}"#, r#"{"metadata": 5}"#, r#""kind""#] {
            let (begun, read) = (Header::begin(text.as_bytes()), Header::read(text.as_bytes()));
            assert_eq!((begun.is_err(), read.is_err()), (true, true), "{text}");
        }
    }

    #[test]
    fn the_rest_is_not_read() {
        let text = br#"{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": no JSON"#;
        assert_eq!(Header::begin(text).unwrap().kind.as_deref(), Some("Service"));
        assert!(Header::read(text).is_err());
    }
}
