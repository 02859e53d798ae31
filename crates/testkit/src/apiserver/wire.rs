// SPDX-License-Identifier: Apache-2.0

//! JSON objects in the two encodings an API server speaks.

use bytes::{BufMut, Bytes, BytesMut};
use serde_json::{Value, json};

use super::{
    PROTOBUF,
    resource::Resource,
    schema::{Field, Form, LIST_META, Presence, STATUS},
};

/// What a client asked to be answered in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    Json,
    Protobuf,
}

impl Encoding {
    /// The first type the client names that we speak. Nothing if there is none: 406.
    pub(super) fn negotiate(accept: &str, speak_protobuf: bool) -> Option<Encoding> {
        if accept.trim().is_empty() {
            return Some(Encoding::Json);
        }
        accept.split(',').find_map(|range| match range.split(';').next().unwrap_or_default().trim() {
            PROTOBUF if speak_protobuf => Some(Encoding::Protobuf),
            "application/json" | "application/*" | "*/*" => Some(Encoding::Json),
            _ => None,
        })
    }

    pub(super) fn content_type(self) -> &'static str {
        match self {
            Encoding::Json => "application/json",
            Encoding::Protobuf => PROTOBUF,
        }
    }

    pub(super) fn watch_content_type(self) -> &'static str {
        match self {
            Encoding::Json => "application/json",
            Encoding::Protobuf => "application/vnd.kubernetes.protobuf;stream=watch",
        }
    }

    /// The body of a list.
    pub(super) fn list(self, resource: &Resource, metadata: &Value, items: &[&Value]) -> Bytes {
        match self {
            Encoding::Json => json!({
                "kind": format!("{}List", resource.name),
                "apiVersion": resource.api_version,
                "metadata": metadata,
                "items": items.iter().map(|item| untyped(item)).collect::<Vec<_>>(),
            })
            .to_string()
            .into(),
            Encoding::Protobuf => {
                let mut raw = BytesMut::new();
                put_bytes(&mut raw, 1, &message(metadata, LIST_META));
                for item in items {
                    put_bytes(&mut raw, 2, &message(item, resource.schema));
                }
                envelope(resource.api_version, &format!("{}List", resource.name), &raw)
            }
        }
    }

    /// The body of one object.
    pub(super) fn object(self, resource: &Resource, object: &Value) -> Bytes {
        match self {
            Encoding::Json => object.to_string().into(),
            Encoding::Protobuf => {
                envelope(resource.api_version, resource.name, &message(object, resource.schema))
            }
        }
    }

    /// The body of a failure.
    pub(super) fn status(self, status: &Value) -> Bytes {
        match self {
            Encoding::Json => status.to_string().into(),
            Encoding::Protobuf => envelope("v1", "Status", &message(status, STATUS)),
        }
    }

    /// One event of a watch, in its frame. `object` is already encoded.
    pub(super) fn event(self, kind: &str, object: &Bytes) -> Bytes {
        match self {
            Encoding::Json => {
                let mut line = BytesMut::new();
                line.put_slice(format!("{{\"type\":\"{kind}\",\"object\":").as_bytes());
                line.put_slice(object);
                line.put_slice(b"}\n");
                line.freeze()
            }
            Encoding::Protobuf => {
                let mut extension = BytesMut::new();
                put_bytes(&mut extension, 1, object);
                let mut event = BytesMut::new();
                put_bytes(&mut event, 1, kind.as_bytes());
                put_bytes(&mut event, 2, &extension);
                self.frame(&event)
            }
        }
    }

    /// What tells one event from the next.
    pub(super) fn frame(self, content: &[u8]) -> Bytes {
        let mut frame = BytesMut::with_capacity(content.len() + 4);
        match self {
            Encoding::Json => {
                frame.put_slice(content);
                frame.put_u8(b'\n');
            }
            Encoding::Protobuf => {
                frame.put_u32(u32::try_from(content.len()).expect("an event is smaller than 4 GiB"));
                frame.put_slice(content);
            }
        }
        frame.freeze()
    }
}

/// The items of a list do not say what they are: the list does.
fn untyped(item: &Value) -> Value {
    let mut item = item.clone();
    if let Some(fields) = item.as_object_mut() {
        fields.remove("kind");
        fields.remove("apiVersion");
    }
    item
}

/// Panics when a field of `object` has another type than its schema says: a real server could not hold it.
pub(super) fn check(object: &Value, schema: &[Field]) {
    message(object, schema);
}

/// `k8s\0`, then runtime.Unknown with the type beside the object.
fn envelope(api_version: &str, kind: &str, raw: &[u8]) -> Bytes {
    let mut type_meta = BytesMut::new();
    put_bytes(&mut type_meta, 1, api_version.as_bytes());
    put_bytes(&mut type_meta, 2, kind.as_bytes());
    let mut body = BytesMut::with_capacity(raw.len() + 64);
    body.put_slice(b"k8s\0");
    put_bytes(&mut body, 1, &type_meta);
    put_bytes(&mut body, 2, raw);
    put_bytes(&mut body, 3, b"");
    put_bytes(&mut body, 4, b"");
    body.freeze()
}

/// A JSON object by its schema; fields the schema does not know are left out.
fn message(object: &Value, schema: &[Field]) -> BytesMut {
    assert!(object.is_object() || object.is_null(), "an object was expected, not {object}");
    let mut out = BytesMut::new();
    for field in schema {
        let value = &object[field.name];
        match (field.presence, value) {
            (Presence::Given | Presence::Each, Value::Null) => {}
            (Presence::Given | Presence::Always, value) => put_field(&mut out, field, value),
            (Presence::Each, Value::Array(values)) => {
                values.iter().for_each(|value| put_field(&mut out, field, value));
            }
            (Presence::Each, Value::Object(entries)) if matches!(field.form, Form::Map) => {
                for (key, value) in entries {
                    let mut entry = BytesMut::new();
                    put_bytes(&mut entry, 1, key.as_bytes());
                    put_bytes(&mut entry, 2, text(field, value).as_bytes());
                    put_bytes(&mut out, field.tag, &entry);
                }
            }
            (Presence::Each, other) => panic!("{}: a list was expected, not {other}", field.name),
        }
    }
    out
}

/// One value; null stands for the zero of its form.
fn put_field(out: &mut BytesMut, field: &Field, value: &Value) {
    match field.form {
        Form::Text | Form::Map => put_bytes(out, field.tag, text(field, value).as_bytes()),
        Form::Int => put_int(out, field.tag, int(field, value)),
        Form::Bool => match value {
            Value::Null => put_int(out, field.tag, 0),
            Value::Bool(flag) => put_int(out, field.tag, i64::from(*flag)),
            other => panic!("{}: a boolean was expected, not {other}", field.name),
        },
        Form::Message(schema) => put_bytes(out, field.tag, &message(value, schema)),
        Form::Time => put_bytes(out, field.tag, &time(text(field, value))),
        Form::IntOrString => put_bytes(out, field.tag, &int_or_string(field, value)),
        Form::Json => {
            let mut raw = BytesMut::new();
            put_bytes(&mut raw, 1, value.to_string().as_bytes());
            put_bytes(out, field.tag, &raw);
        }
    }
}

fn text<'a>(field: &Field, value: &'a Value) -> &'a str {
    match value {
        Value::Null => "",
        Value::String(text) => text,
        other => panic!("{}: text was expected, not {other}", field.name),
    }
}

fn int(field: &Field, value: &Value) -> i64 {
    match value {
        Value::Null => 0,
        other => {
            other.as_i64().unwrap_or_else(|| panic!("{}: a number was expected, not {other}", field.name))
        }
    }
}

/// type=1 (1 for text), intVal=2, strVal=3; all three always.
fn int_or_string(field: &Field, value: &Value) -> BytesMut {
    let mut out = BytesMut::new();
    put_int(&mut out, 1, i64::from(value.is_string()));
    put_int(&mut out, 2, if value.is_string() { 0 } else { int(field, value) });
    put_bytes(&mut out, 3, value.as_str().unwrap_or_default().as_bytes());
    out
}

/// The zero time is an empty message.
fn time(text: &str) -> BytesMut {
    let mut out = BytesMut::new();
    if !text.is_empty() {
        let seconds = seconds(text).unwrap_or_else(|| panic!("{text:?} is not like 2026-01-31T12:00:00Z"));
        put_int(&mut out, 1, seconds);
        put_int(&mut out, 2, 0);
    }
    out
}

/// Seconds since 1970 of the one form of RFC 3339 that API servers write.
fn seconds(text: &str) -> Option<i64> {
    let (date, clock) = text.strip_suffix('Z')?.split_once('T')?;
    let numbers = |text: &str, separator| -> Option<Vec<i64>> {
        text.split(separator).map(|number| number.parse().ok()).collect()
    };
    let (date, clock) = (numbers(date, '-')?, numbers(clock, ':')?);
    let ([year, month, day], [hour, minute, second]) = (&date[..], &clock[..]) else { return None };
    // Years begin in March here, so that the leap day is the last.
    let (year, month) = if *month < 3 { (year - 1, month + 9) } else { (*year, month - 3) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1 - 719_468;
    Some(days * 86_400 + hour * 3_600 + minute * 60 + second)
}

fn put_bytes(out: &mut BytesMut, tag: u32, bytes: &[u8]) {
    put_varint(out, u64::from(tag << 3 | 2));
    put_varint(out, bytes.len() as u64);
    out.put_slice(bytes);
}

fn put_int(out: &mut BytesMut, tag: u32, value: i64) {
    put_varint(out, u64::from(tag << 3));
    // Negative numbers take ten bytes, as the format has it.
    put_varint(out, value.cast_unsigned());
}

fn put_varint(out: &mut BytesMut, mut value: u64) {
    while value >= 0x80 {
        out.put_u8(value as u8 | 0x80);
        value >>= 7;
    }
    out.put_u8(value as u8);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apiserver::schema;

    /// The bytes were written by the Go types of Kubernetes 1.36 for the same objects.
    #[test]
    fn objects_are_encoded_as_go_does_it() {
        let slice = json!({
            "metadata": {"name": "a", "namespace": "b", "resourceVersion": "7", "labels": {"k": "v"}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["1.2.3.4"], "conditions": {"ready": false}}],
            "ports": [{"name": "", "port": 80}],
        });
        let service = json!({
            "metadata": {"name": "a", "namespace": "b"},
            "spec": {
                "clusterIP": "10.0.0.1",
                "type": "ClusterIP",
                "ports": [{"port": 80, "protocol": "TCP", "targetPort": "x"}],
            },
            "status": {"loadBalancer": {"ingress": [{"ip": "1.1.1.1"}]}},
        });
        for (object, schema, expected) in
            [(slice, schema::ENDPOINT_SLICE, GO_SLICE), (service, schema::SERVICE, GO_SERVICE)]
        {
            let bytes = message(&object, schema);
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, expected);
        }
    }

    const GO_SLICE: &str = "0a1b0a016112001a016222002a00320137380042005a060a016b120176\
        120d0a07312e322e332e34120208001a040a001850220449507634";
    const GO_SERVICE: &str = "0a120a016112001a016222002a0032003800420012370a140a001203544350\
        18502207080110001a017828001a0831302e302e302e312209436c757374657249503a00420052005a00600068001a0f\
        0a0d0a0b0a07312e312e312e311200";

    #[test]
    fn times() {
        for (text, expected) in [
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-29T12:00:01Z", 951_825_601),
            ("2026-11-16T00:00:00Z", 1_794_787_200),
        ] {
            assert_eq!(seconds(text), Some(expected), "{text}");
        }
        assert_eq!(seconds("yesterday"), None);
    }

    #[test]
    fn the_first_type_that_is_spoken_wins() {
        let both = "application/vnd.kubernetes.protobuf;stream=watch, application/json";
        assert_eq!(Encoding::negotiate(both, true), Some(Encoding::Protobuf));
        assert_eq!(Encoding::negotiate(both, false), Some(Encoding::Json));
        assert_eq!(Encoding::negotiate("application/vnd.kubernetes.protobuf", false), None);
        assert_eq!(Encoding::negotiate("", true), Some(Encoding::Json));
        assert_eq!(Encoding::negotiate("text/html", true), None);
    }
}
