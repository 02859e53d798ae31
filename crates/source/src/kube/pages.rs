// SPDX-License-Identifier: Apache-2.0

//! A page of a list, read while it arrives. Only the object that is just coming is held: a list that is asked for
//! in one piece can have hundreds of megabytes, and pages of large slices tens.

use bytes::{Buf, Bytes, BytesMut};
use prost::Message;
use serde::Deserialize;

use super::{
    protocol::Trouble,
    wire::{Format, MAX_FRAME, Unreadable},
};
use crate::{
    lower::Resource,
    split::{Piece, Splitter},
};

/// See the module.
#[derive(Debug)]
pub(crate) struct Page {
    metadata: Option<ListMetadata>,
    reader: Reader,
}

#[derive(Debug)]
enum Reader {
    Json(Splitter),
    Protobuf { buffer: BytesMut, at: At },
}

/// Where in a protobuf list we are: magic, `runtime.Unknown`, in it the List, in it metadata and items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Magic,
    Envelope,
    /// So many bytes of the list are still to come.
    List(usize),
    End,
}

/// An object of a page; those of a protobuf list have no envelope of their own.
#[derive(Debug)]
pub(crate) struct Item(Format, Bytes);

impl Item {
    pub(crate) fn object<R: Resource>(self) -> Result<R, Unreadable> {
        match self.0 {
            Format::Protobuf => R::decode(self.1.clone()).map_err(|error| Unreadable::bare(self.1, &error)),
            Format::Json => self.0.object(self.1),
        }
    }
}

impl Page {
    pub(crate) fn new(format: Format) -> Page {
        let reader = match format {
            Format::Json => Reader::Json(Splitter::new(MAX_FRAME)),
            Format::Protobuf => Reader::Protobuf { buffer: BytesMut::new(), at: At::Magic },
        };
        Page { metadata: None, reader }
    }

    pub(crate) fn push(&mut self, bytes: &Bytes) {
        match &mut self.reader {
            Reader::Json(splitter) => splitter.push(bytes),
            Reader::Protobuf { buffer, .. } => buffer.extend_from_slice(bytes),
        }
    }

    /// The next object that is there in full. After an error the page is of no more use.
    pub(crate) fn next(&mut self) -> Result<Option<Item>, Trouble> {
        match &mut self.reader {
            Reader::Json(splitter) => match splitter.next().map_err(|error| malformed(error.kind))? {
                None => Ok(None),
                Some(Piece::Item { text, .. }) => Ok(Some(Item(Format::Json, Bytes::copy_from_slice(text)))),
                Some(Piece::Object { text, .. }) => {
                    let list: JsonList = serde_json::from_slice(text).map_err(malformed)?;
                    self.metadata = list.metadata;
                    Ok(None)
                }
            },
            Reader::Protobuf { buffer, at } => protobuf(buffer, at, &mut self.metadata),
        }
    }

    /// After the last byte: the version of the list, and the token for its next page.
    pub(crate) fn finish(self) -> Result<(String, Option<String>), Trouble> {
        let is_whole = match &self.reader {
            Reader::Json(splitter) => splitter.finish().is_ok(),
            Reader::Protobuf { at, .. } => *at == At::End,
        };
        if !is_whole {
            return Err(malformed("it breaks off"));
        }
        let metadata = self.metadata.ok_or_else(|| malformed("it has no metadata"))?;
        let version = metadata.resource_version.filter(|version| !version.is_empty());
        let version = version.ok_or_else(|| malformed("it has no version"))?;
        Ok((version, metadata.token.filter(|token| !token.is_empty())))
    }
}

fn malformed(error: impl std::fmt::Display) -> Trouble {
    Trouble::Malformed(format!("a list that cannot be read: {error}"))
}

fn protobuf(
    buffer: &mut BytesMut,
    at: &mut At,
    metadata: &mut Option<ListMetadata>,
) -> Result<Option<Item>, Trouble> {
    loop {
        match *at {
            At::Magic => {
                if buffer.len() < MAGIC.len() {
                    return Ok(None);
                }
                if !buffer.starts_with(MAGIC) {
                    return Err(malformed("it does not begin with k8s and a zero"));
                }
                buffer.advance(MAGIC.len());
                *at = At::Envelope;
            }
            At::Envelope => {
                let Some(field) = Field::read(buffer)? else { return Ok(None) };
                if field.number == ENVELOPE_RAW {
                    buffer.advance(field.head);
                    *at = At::List(field.body);
                } else if buffer.len() < field.len()? {
                    return Ok(None);
                } else {
                    buffer.advance(field.len()?);
                }
            }
            At::List(0) => *at = At::End,
            At::List(left) => {
                let Some(field) = Field::read(buffer)? else { return Ok(None) };
                let len = field.len()?;
                let Some(rest) = left.checked_sub(len) else {
                    return Err(malformed("an object reaches beyond the list"));
                };
                if buffer.len() < len {
                    return Ok(None);
                }
                *at = At::List(rest);
                let mut body = buffer.split_to(len).freeze();
                body.advance(field.head);
                match field.number {
                    LIST_METADATA => *metadata = Some(ListMetadata::decode(body).map_err(malformed)?),
                    LIST_ITEMS => return Ok(Some(Item(Format::Protobuf, body))),
                    _ => {}
                }
            }
            At::End => {
                buffer.clear();
                return Ok(None);
            }
        }
    }
}

/// The beginning of a field: its number, and how long head and body are. Numbers are all head; since nothing of
/// what is wanted is one, they have no number here.
struct Field {
    number: Option<u64>,
    head: usize,
    body: usize,
}

impl Field {
    /// None if the head has not arrived in full.
    fn read(bytes: &[u8]) -> Result<Option<Field>, Trouble> {
        let Some((key, mut head)) = varint(bytes)? else { return Ok(None) };
        let mut field = Field { number: None, head: 0, body: 0 };
        match key & 7 {
            0 => {
                let Some((_, length)) = varint(&bytes[head..])? else { return Ok(None) };
                head += length;
            }
            1 => head += 8,
            2 => {
                let Some((value, length)) = varint(&bytes[head..])? else { return Ok(None) };
                head += length;
                (field.number, field.body) = (Some(key >> 3), usize::try_from(value).map_err(malformed)?);
            }
            5 => head += 4,
            kind => return Err(malformed(format!("a field of kind {kind}"))),
        }
        field.head = head;
        Ok(Some(field))
    }

    /// Of a field that is to be held as a whole.
    fn len(&self) -> Result<usize, Trouble> {
        if self.body > MAX_FRAME {
            return Err(malformed(format!("an object of {} bytes", self.body)));
        }
        Ok(self.head + self.body)
    }
}

/// A number, and how many bytes it takes. None if it has not arrived in full.
fn varint(bytes: &[u8]) -> Result<Option<(u64, usize)>, Trouble> {
    let mut number = 0;
    for (at, byte) in bytes.iter().take(LONGEST_VARINT).enumerate() {
        number |= u64::from(byte & 0x7f) << (7 * at);
        if byte & 0x80 == 0 {
            return Ok(Some((number, at + 1)));
        }
    }
    if bytes.len() >= LONGEST_VARINT { Err(malformed("a number without end")) } else { Ok(None) }
}

#[derive(Clone, PartialEq, Message, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ListMetadata {
    #[prost(string, optional, tag = "2")]
    resource_version: Option<String>,
    #[prost(string, optional, tag = "3")]
    #[serde(rename = "continue")]
    token: Option<String>,
}

#[derive(Deserialize)]
struct JsonList {
    metadata: Option<ListMetadata>,
}

const MAGIC: &[u8] = b"k8s\0";
const ENVELOPE_RAW: Option<u64> = Some(2);
const LIST_METADATA: Option<u64> = Some(1);
const LIST_ITEMS: Option<u64> = Some(2);
const LONGEST_VARINT: usize = 10;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::object::{EndpointSlice, Metadata};

    #[derive(Clone, PartialEq, Message)]
    struct List {
        #[prost(message, optional, tag = "1")]
        metadata: Option<ListMetadata>,
        #[prost(bytes = "bytes", repeated, tag = "2")]
        items: Vec<Bytes>,
    }

    #[derive(Clone, PartialEq, Message)]
    struct Envelope {
        #[prost(bytes = "bytes", tag = "1")]
        kind: Bytes,
        #[prost(bytes = "bytes", tag = "2")]
        raw: Bytes,
        #[prost(string, tag = "4")]
        content_type: String,
    }

    fn enveloped(list: &List) -> Vec<u8> {
        let envelope = Envelope {
            kind: Bytes::from_static(b"\n\x02v1"),
            raw: list.encode_to_vec().into(),
            content_type: "x".into(),
        };
        [MAGIC, &envelope.encode_to_vec()].concat()
    }

    fn slice(name: &str) -> EndpointSlice {
        let metadata = Metadata { name: Some(name.into()), ..Metadata::default() };
        EndpointSlice { metadata: Some(metadata), ..EndpointSlice::default() }
    }

    fn list(names: &[&str], token: Option<&str>) -> List {
        let metadata = ListMetadata { resource_version: Some("8".into()), token: token.map(str::to_owned) };
        let items = names.iter().map(|name| slice(name).encode_to_vec().into()).collect();
        List { metadata: Some(metadata), items }
    }

    /// What was found (names, or `!` for an object that cannot be read), then version and token.
    fn read(
        format: Format,
        bytes: &[u8],
        chunk: usize,
    ) -> Result<(Vec<String>, String, Option<String>), Trouble> {
        let mut page = Page::new(format);
        let mut found = Vec::new();
        for part in bytes.chunks(chunk) {
            page.push(&Bytes::copy_from_slice(part));
            while let Some(item) = page.next()? {
                let object = item.object::<EndpointSlice>();
                found.push(
                    object.map_or("!".into(), |slice| slice.metadata.unwrap_or_default().name().into()),
                );
            }
        }
        page.finish().map(|(version, token)| (found, version, token))
    }

    fn expected(names: &[&str], token: Option<&str>) -> (Vec<String>, String, Option<String>) {
        (names.iter().map(|name| (*name).to_owned()).collect(), "8".into(), token.map(str::to_owned))
    }

    #[test]
    fn objects_come_out_wherever_the_chunks_end() {
        let protobuf = enveloped(&list(&["a", "b", "c"], Some("more")));
        let json =
            br#"{"kind":"EndpointSliceList","metadata":{"resourceVersion":"8","continue":"more"},"items":[
            {"metadata":{"name":"a"}},{"metadata":{"name":"b"}},{"metadata":{"name":"c"}}]}"#;
        for (format, bytes) in [(Format::Protobuf, &protobuf[..]), (Format::Json, json)] {
            for chunk in 1..=bytes.len() {
                assert_eq!(read(format, bytes, chunk).unwrap(), expected(&["a", "b", "c"], Some("more")));
            }
        }
    }

    #[test]
    fn empty_lists_and_empty_tokens() {
        assert_eq!(read(Format::Protobuf, &enveloped(&list(&[], Some(""))), 7).unwrap(), expected(&[], None));
        for items in ["null", "[]"] {
            let json = format!("{{\"metadata\":{{\"resourceVersion\":\"8\"}},\"items\":{items}}}\n");
            assert_eq!(read(Format::Json, json.as_bytes(), 7).unwrap(), expected(&[], None));
        }
    }

    /// With it a watch would begin anywhere, and a page of nothing would remove everything.
    #[test]
    fn a_list_without_version_is_no_list() {
        let mut protobuf = list(&[], None);
        protobuf.metadata = Some(ListMetadata::default());
        assert!(read(Format::Protobuf, &enveloped(&protobuf), 7).is_err());
        for metadata in ["{}", "{\"resourceVersion\":\"\"}", "null"] {
            let json = format!("{{\"metadata\":{metadata},\"items\":[]}}");
            assert!(read(Format::Json, json.as_bytes(), 7).is_err(), "{json}");
        }
    }

    #[test]
    fn a_bad_object_spoils_only_itself() {
        let mut protobuf = list(&["a", "b"], None);
        protobuf.items.insert(1, Bytes::from_static(b"\xff\xff"));
        assert_eq!(
            read(Format::Protobuf, &enveloped(&protobuf), 9).unwrap(),
            expected(&["a", "!", "b"], None)
        );
        let json =
            br#"{"metadata":{"resourceVersion":"8"},"items":[{"metadata":{"name":"a"}},{"endpoints":7},3]}"#;
        assert_eq!(read(Format::Json, json, 9).unwrap(), expected(&["a", "!", "!"], None));
    }

    #[test]
    fn a_list_that_breaks_off_is_no_list() {
        let protobuf = enveloped(&list(&["a", "b"], None));
        // The envelope's last field stands after the list: nothing is lost with it.
        let list_end = protobuf.len() - b"\x22\x01x".len();
        for cut in 0..list_end {
            assert!(read(Format::Protobuf, &protobuf[..cut], 5).is_err(), "cut at {cut}");
        }
        let json = br#"{"metadata":{"resourceVersion":"8"},"items":[{"metadata":{"name":"a"}}]}"#;
        for cut in 0..json.len() {
            assert!(read(Format::Json, &json[..cut], 5).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn what_cannot_be_believed_is_refused_before_it_is_held() {
        let huge = [MAGIC, b"\x12\xff\xff\xff\xff\x0f\x12\xff\xff\xff\x7f".as_slice()].concat();
        let beyond = [MAGIC, b"\x12\x04\x12\x7faa".as_slice()].concat();
        let endless = [MAGIC, [0xff; 11].as_slice()].concat();
        let group = [MAGIC, b"\x12\x04\x13\x7faa".as_slice()].concat();
        for bytes in [b"nonsense".to_vec(), huge, beyond, endless, group] {
            assert!(matches!(read(Format::Protobuf, &bytes, 3), Err(Trouble::Malformed(_))), "{bytes:?}");
        }
    }

    #[test]
    fn only_the_coming_object_is_held() {
        let mut page = Page::new(Format::Protobuf);
        let bytes = enveloped(&list(&["a-slice-with-a-name"; 10_000], None));
        let mut found = 0;
        for part in bytes.chunks(1000) {
            page.push(&Bytes::copy_from_slice(part));
            while page.next().unwrap().is_some() {
                found += 1;
            }
            let Reader::Protobuf { buffer, .. } = &page.reader else { unreachable!() };
            assert!(buffer.len() < 100);
        }
        assert_eq!(found, 10_000);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), chunk in 1_usize..50) {
            let _ = read(Format::Protobuf, &bytes, chunk);
            let _ = read(Format::Protobuf, &[MAGIC, &bytes].concat(), chunk);
            let _ = read(Format::Protobuf, &[MAGIC, b"\x12\x50", &bytes].concat(), chunk);
            let _ = read(Format::Json, &bytes, chunk);
        }
    }
}
