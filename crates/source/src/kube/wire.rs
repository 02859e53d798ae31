// SPDX-License-Identifier: Apache-2.0

//! The API server's answers: objects and the frames of a watch, in protobuf or JSON. Objects are left as bytes until
//! they are wanted, and are decoded one by one, so that a bad one spoils only itself.

use bytes::{Buf, Bytes, BytesMut};
use prost::Message;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::protocol::{Heading, Trouble};
use crate::{lower::Resource, object::Metadata};

/// How an answer is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Protobuf,
    Json,
}

impl Format {
    /// What the server says it is; `None` is neither.
    pub(crate) fn of_content_type(content_type: &str) -> Option<Format> {
        let essence = content_type.split(';').next().unwrap_or_default().trim();
        match essence {
            "application/vnd.kubernetes.protobuf" => Some(Format::Protobuf),
            "application/json" => Some(Format::Json),
            _ => None,
        }
    }

    /// One object of a kind.
    pub(crate) fn object<R: Resource>(self, bytes: Bytes) -> Result<R, Unreadable> {
        let read = match self {
            Format::Protobuf => {
                unwrap(bytes.clone()).and_then(|raw| R::decode(raw).map_err(|error| error.to_string()))
            }
            Format::Json => serde_json::from_slice(&bytes).map_err(|error| error.to_string()),
        };
        read.map_err(|error| Unreadable { metadata: self.metadata(bytes).unwrap_or_default().into(), error })
    }

    fn metadata(self, bytes: Bytes) -> Result<Metadata, String> {
        let headed = match self {
            Format::Protobuf => Headed::decode(unwrap(bytes)?).map_err(|error| error.to_string())?,
            Format::Json => serde_json::from_slice(&bytes).map_err(|error| error.to_string())?,
        };
        Ok(headed.metadata.unwrap_or_default())
    }

    fn status(self, bytes: Bytes) -> Result<Status, String> {
        match self {
            Format::Protobuf => Status::decode(unwrap(bytes)?).map_err(|error| error.to_string()),
            Format::Json => serde_json::from_slice(&bytes).map_err(|error| error.to_string()),
        }
    }
}

/// The message of a Status body that came with an HTTP error, or the start of whatever came.
pub(crate) fn error_message(format: Option<Format>, body: &Bytes) -> String {
    let status = format.and_then(|format| format.status(body.clone()).ok());
    status.and_then(|status| status.message).unwrap_or_else(|| {
        let start = &body[..body.len().min(200)];
        String::from_utf8_lossy(start).trim().to_owned()
    })
}

/// An object that cannot be read: whose it is, if at least that can be, and why.
#[derive(Debug)]
pub(crate) struct Unreadable {
    pub(crate) metadata: Box<Metadata>,
    pub(crate) error: String,
}

impl Unreadable {
    /// Of a protobuf object without an envelope.
    pub(crate) fn bare(bytes: Bytes, error: &prost::DecodeError) -> Unreadable {
        let metadata = Headed::decode(bytes).ok().and_then(|headed| headed.metadata).unwrap_or_default();
        Unreadable { metadata: metadata.into(), error: error.to_string() }
    }
}

/// An event, its object still to be decoded.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) heading: Heading,
    pub(crate) object: Bytes,
}

/// Cuts the bytes of a watch into events.
#[derive(Debug)]
pub(crate) struct Frames {
    format: Format,
    buffer: BytesMut,
    /// Up to here the buffer holds no end of line.
    searched: usize,
}

impl Frames {
    pub(crate) fn new(format: Format) -> Frames {
        Frames { format, buffer: BytesMut::new(), searched: 0 }
    }

    pub(crate) fn push(&mut self, bytes: &Bytes) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next event that is there in full. After an error the stream is of no more use.
    pub(crate) fn next(&mut self) -> Result<Option<Event>, Trouble> {
        loop {
            let frame = match self.format {
                Format::Protobuf => self.cut_by_length()?,
                Format::Json => self.cut_line()?,
            };
            match frame {
                None => return Ok(None),
                Some(frame) if frame.is_empty() => {}
                Some(frame) => return self.event(frame).map(Some),
            }
        }
    }

    fn cut_by_length(&mut self) -> Result<Option<Bytes>, Trouble> {
        let Some(prefix) = self.buffer.first_chunk::<4>() else { return Ok(None) };
        let len = u32::from_be_bytes(*prefix) as usize;
        if len > MAX_FRAME {
            return Err(Trouble::Malformed(format!("an event of {len} bytes")));
        }
        if self.buffer.len() - 4 < len {
            return Ok(None);
        }
        self.buffer.advance(4);
        Ok(Some(self.buffer.split_to(len).freeze()))
    }

    fn cut_line(&mut self) -> Result<Option<Bytes>, Trouble> {
        let found = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n');
        let Some(end) = found.map(|at| self.searched + at) else {
            self.searched = self.buffer.len();
            if self.searched > MAX_FRAME {
                return Err(Trouble::Malformed(format!("a line of more than {MAX_FRAME} bytes")));
            }
            return Ok(None);
        };
        self.searched = 0;
        let line = self.buffer.split_to(end).freeze();
        self.buffer.advance(1);
        Ok(Some(line))
    }

    fn event(&self, frame: Bytes) -> Result<Event, Trouble> {
        let malformed = |error: String| Trouble::Malformed(format!("an event that cannot be read: {error}"));
        let (kind, object) = match self.format {
            Format::Protobuf => {
                let event = WatchEvent::decode(frame).map_err(|error| malformed(error.to_string()))?;
                (event.kind, event.object.unwrap_or_default().raw)
            }
            Format::Json => {
                let event: JsonEvent<'_> =
                    serde_json::from_slice(&frame).map_err(|error| malformed(error.to_string()))?;
                (event.kind.into_owned(), frame.slice_ref(event.object.get().as_bytes()))
            }
        };
        if kind == "ERROR" {
            let status = self.format.status(object).map_err(malformed)?;
            let code = u16::try_from(status.code.unwrap_or_default()).unwrap_or_default();
            let message = status.message.unwrap_or_default();
            return Err(Trouble::Status { code, message, retry_after: None, in_stream: true });
        }
        let metadata = self.format.metadata(object.clone()).map_err(malformed)?;
        let version = metadata.resource_version().to_owned();
        let heading = match kind.as_str() {
            "ADDED" | "MODIFIED" => Heading::Present { version },
            "DELETED" => Heading::Gone { version },
            "BOOKMARK" => {
                let ends_list = metadata.annotation(INITIAL_EVENTS_END) == Some("true");
                Heading::Bookmark { version, ends_list }
            }
            other => return Err(Trouble::Malformed(format!("an event of type {other:?}"))),
        };
        Ok(Event { heading, object })
    }
}

/// Takes off the envelope of a protobuf object: four bytes of magic and a `runtime.Unknown`.
fn unwrap(bytes: Bytes) -> Result<Bytes, String> {
    if !bytes.starts_with(b"k8s\0") {
        return Err("it does not begin with k8s and a zero".into());
    }
    Ok(Unknown::decode(bytes.slice(4..)).map_err(|error| error.to_string())?.raw)
}

#[derive(Clone, PartialEq, Message)]
struct Unknown {
    #[prost(bytes = "bytes", tag = "2")]
    raw: Bytes,
}

#[derive(Clone, PartialEq, Message)]
struct RawExtension {
    #[prost(bytes = "bytes", tag = "1")]
    raw: Bytes,
}

#[derive(Clone, PartialEq, Message)]
struct WatchEvent {
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(message, optional, tag = "2")]
    object: Option<RawExtension>,
}

#[derive(Deserialize)]
struct JsonEvent<'a> {
    #[serde(rename = "type", borrow)]
    kind: std::borrow::Cow<'a, str>,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Clone, PartialEq, Message, Deserialize)]
#[serde(default)]
struct Headed {
    #[prost(message, optional, tag = "1")]
    metadata: Option<Metadata>,
}

#[derive(Clone, PartialEq, Message, Deserialize)]
#[serde(default)]
struct Status {
    #[prost(string, optional, tag = "3")]
    message: Option<String>,
    #[prost(int32, optional, tag = "6")]
    code: Option<i32>,
}

const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";
/// The store behind the API does not take objects of more than a few MiB.
pub(crate) const MAX_FRAME: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::EndpointSlice;

    fn envelope(message: &impl Message) -> Bytes {
        let unknown = Unknown { raw: message.encode_to_vec().into() };
        Bytes::from([b"k8s\0".as_slice(), &unknown.encode_to_vec()].concat())
    }

    fn slice(version: &str) -> EndpointSlice {
        let metadata = Metadata { resource_version: Some(version.into()), ..Metadata::default() };
        EndpointSlice { metadata: Some(metadata), ..EndpointSlice::default() }
    }

    fn frame(kind: &str, object: &impl Message) -> Vec<u8> {
        let object = Some(RawExtension { raw: envelope(object) });
        let event = WatchEvent { kind: kind.into(), object }.encode_to_vec();
        [&(event.len() as u32).to_be_bytes(), event.as_slice()].concat()
    }

    fn headings(frames: &mut Frames) -> Vec<Heading> {
        std::iter::from_fn(|| frames.next().unwrap()).map(|event| event.heading).collect()
    }

    #[test]
    fn protobuf_events_are_cut_wherever_the_chunks_end() {
        let bytes = [frame("ADDED", &slice("1")), frame("DELETED", &slice("2"))].concat();
        for chunk in 1..bytes.len() {
            let mut frames = Frames::new(Format::Protobuf);
            let mut seen = Vec::new();
            for part in bytes.chunks(chunk) {
                frames.push(&Bytes::copy_from_slice(part));
                seen.extend(headings(&mut frames));
            }
            assert_eq!(
                seen,
                [Heading::Present { version: "1".into() }, Heading::Gone { version: "2".into() }]
            );
        }
    }

    #[test]
    fn json_events_are_lines() {
        let mut frames = Frames::new(Format::Json);
        frames.push(&Bytes::from_static(
            b"{\"type\":\"MODIFIED\",\"object\":{\"metadata\":{\"resourceVersion\":\"4\"}}}\n\n{\"type\":\"BOOKMARK\",\"object\":{\"metadata\":{\"resourceVersion\":\"5\",\"annotations\":{\"k8s.io/initial-events-end\":\"true\"}}}}\n{\"ty",
        ));
        assert_eq!(
            headings(&mut frames),
            [
                Heading::Present { version: "4".into() },
                Heading::Bookmark { version: "5".into(), ends_list: true }
            ]
        );
    }

    #[test]
    fn an_error_event_is_its_status() {
        let status = Status { message: Some("too old".into()), code: Some(410) };
        let mut frames = Frames::new(Format::Protobuf);
        frames.push(&frame("ERROR", &status).into());
        let expected =
            Trouble::Status { code: 410, message: "too old".into(), retry_after: None, in_stream: true };
        assert_eq!(frames.next().unwrap_err(), expected);
    }

    #[test]
    fn garbage_and_giants_are_refused() {
        for bytes in [&b"\xff\xff\xff\xff...."[..], b"\0\0\0\x04\xff\xff\xff\xff", b"\0\0\0\x02\x12\0"] {
            let mut frames = Frames::new(Format::Protobuf);
            frames.push(&Bytes::copy_from_slice(bytes));
            assert!(matches!(frames.next(), Err(Trouble::Malformed(_))), "{bytes:?}");
        }
        let mut frames = Frames::new(Format::Json);
        frames.push(&Bytes::from_static(b"nonsense\n"));
        assert!(matches!(frames.next(), Err(Trouble::Malformed(_))));
    }
}
