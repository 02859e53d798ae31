// SPDX-License-Identifier: Apache-2.0

//! Cuts a stream of JSON objects into pieces small enough to be held: each object, and before it each element of
//! its top-level `items`, so that a list of any length is never in memory as a whole.
//!
//! Nothing is parsed or checked beyond what finding the edges takes; the pieces are parsed by their readers.

use std::fmt;

/// A piece of the stream, and the line (from 1) it begins on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Piece<'a> {
    /// An element of the `items` of the object whose [`Piece::Object`] is still to come.
    Item { line: usize, text: &'a [u8] },
    /// An object, its `items` emptied.
    Object { line: usize, text: &'a [u8] },
}

/// Why the stream cannot be followed any further. Nothing after it can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SplitError {
    pub line: usize,
    pub kind: SplitErrorKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SplitErrorKind {
    /// Something else where an object should begin.
    NotAnObject,
    TooLarge,
    /// The stream ended inside of an object that began on this line.
    Truncated,
}

impl fmt::Display for SplitErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SplitErrorKind::NotAnObject => "expected an object",
            SplitErrorKind::TooLarge => "the object is too large",
            SplitErrorKind::Truncated => "the object does not end",
        })
    }
}

#[derive(Debug)]
pub(crate) struct Splitter {
    /// No piece may be longer.
    limit: usize,
    buffer: Vec<u8>,
    /// Before it, everything has been handed out.
    start: usize,
    /// Before it, everything has been looked at.
    scan: usize,
    /// The line `scan` is on, and that the current object and the current item began on.
    line: usize,
    object_line: usize,
    item_line: usize,
    depth: usize,
    inside: Inside,
    /// Whether a string at depth 1 is a key, and whether the latest key was `items`.
    expect_key: bool,
    at_items: bool,
    /// The opening quote of the string `scan` is in, and whether the byte before `scan` was a backslash.
    string_start: Option<usize>,
    escaped: bool,
    /// What stands before the items of the current object; it goes out with the rest of it.
    head: Vec<u8>,
    head_is_out: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Inside {
    Object,
    /// In `items`, between two of them.
    Items,
    /// In one of the items.
    Item,
}

impl Splitter {
    pub(crate) fn new(limit: usize) -> Splitter {
        Splitter {
            limit,
            buffer: Vec::new(),
            start: 0,
            scan: 0,
            line: 1,
            object_line: 1,
            item_line: 1,
            depth: 0,
            inside: Inside::Object,
            expect_key: true,
            at_items: false,
            string_start: None,
            escaped: false,
            head: Vec::new(),
            head_is_out: false,
        }
    }

    /// Appends to the stream.
    pub(crate) fn push(&mut self, chunk: &[u8]) {
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.scan -= self.start;
            if let Some(quote) = &mut self.string_start {
                *quote -= self.start;
            }
            self.start = 0;
        }
        self.buffer.extend_from_slice(chunk);
    }

    /// The next whole piece, if it has arrived.
    pub(crate) fn next(&mut self) -> Result<Option<Piece<'_>>, SplitError> {
        if self.head_is_out {
            self.head.clear();
            self.head_is_out = false;
        }
        while self.scan < self.buffer.len() {
            match self.step()? {
                None => {}
                Some(Edge::Item(end)) => {
                    let text = self.start..end;
                    self.start = end;
                    return Ok(Some(Piece::Item { line: self.item_line, text: &self.buffer[text] }));
                }
                Some(Edge::Object(end)) => {
                    let text = self.start..end;
                    self.start = end;
                    let line = self.object_line;
                    if self.head.is_empty() {
                        return Ok(Some(Piece::Object { line, text: &self.buffer[text] }));
                    }
                    self.head.extend_from_slice(&self.buffer[text]);
                    self.head_is_out = true;
                    return Ok(Some(Piece::Object { line, text: &self.head }));
                }
            }
        }
        if self.depth == 0 || self.inside == Inside::Items {
            self.start = self.scan;
        }
        if self.buffer.len() - self.start > self.limit || self.head.len() > self.limit {
            return Err(self.error(SplitErrorKind::TooLarge));
        }
        Ok(None)
    }

    /// Says whether the stream may end here.
    pub(crate) fn finish(&self) -> Result<(), SplitError> {
        match self.depth {
            0 => Ok(()),
            _ => Err(SplitError { line: self.object_line, kind: SplitErrorKind::Truncated }),
        }
    }

    fn error(&self, kind: SplitErrorKind) -> SplitError {
        SplitError { line: self.line, kind }
    }

    /// Looks at one byte, or at the rest of a string.
    fn step(&mut self) -> Result<Option<Edge>, SplitError> {
        if let Some(quote) = self.string_start {
            self.skip_string(quote);
            return Ok(None);
        }
        let at = self.scan;
        let byte = self.buffer[at];
        match byte {
            b'\n' => self.line += 1,
            b' ' | b'\t' | b'\r' => {}
            b'}' | b']' if self.depth > 0 => return Ok(self.close(at)),
            b',' if self.inside == Inside::Item && self.depth == 2 => {
                // The end of an item that is a bare number or word.
                self.inside = Inside::Items;
                return Ok(Some(Edge::Item(at)));
            }
            b',' if self.inside == Inside::Items => {}
            _ => self.open(at, byte)?,
        }
        self.scan += 1;
        Ok(None)
    }

    /// A byte that belongs to some value.
    fn open(&mut self, at: usize, byte: u8) -> Result<(), SplitError> {
        if self.depth == 0 {
            if byte != b'{' {
                return Err(self.error(SplitErrorKind::NotAnObject));
            }
            (self.start, self.object_line) = (at, self.line);
            (self.depth, self.expect_key) = (1, true);
            return Ok(());
        }
        if self.inside == Inside::Items {
            self.inside = Inside::Item;
            (self.start, self.item_line) = (at, self.line);
        }
        match byte {
            b'"' => self.string_start = Some(at),
            b':' if self.depth == 1 => self.expect_key = false,
            b',' if self.depth == 1 => self.expect_key = true,
            b'[' if self.depth == 1 && self.at_items && !self.expect_key => {
                self.inside = Inside::Items;
                self.head.extend_from_slice(&self.buffer[self.start..=at]);
                self.start = at + 1;
                self.depth = 2;
            }
            b'{' | b'[' => self.depth += 1,
            _ => {}
        }
        Ok(())
    }

    /// A closing bracket of something that is open.
    fn close(&mut self, at: usize) -> Option<Edge> {
        match self.inside {
            Inside::Item if self.depth == 2 => {
                // As for a comma: the bracket is looked at again, now between the items.
                self.inside = Inside::Items;
                return Some(Edge::Item(at));
            }
            Inside::Item => {
                self.scan += 1;
                self.depth -= 1;
                if self.depth == 2 {
                    self.inside = Inside::Items;
                    return Some(Edge::Item(at + 1));
                }
            }
            Inside::Items => {
                self.scan += 1;
                self.depth = 1;
                self.inside = Inside::Object;
                self.start = at;
            }
            Inside::Object => {
                self.scan += 1;
                self.depth -= 1;
                if self.depth == 0 {
                    return Some(Edge::Object(at + 1));
                }
            }
        }
        None
    }

    /// Goes to the end of the string, or of what there is of it.
    fn skip_string(&mut self, quote: usize) {
        while let Some(byte) = self.buffer.get(self.scan) {
            self.scan += 1;
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => {
                    if self.depth == 1 && self.expect_key {
                        self.at_items = &self.buffer[quote..self.scan] == b"\"items\"";
                    }
                    self.string_start = None;
                    return;
                }
                b'\n' => self.line += 1,
                _ => {}
            }
        }
    }
}

/// The end of a piece.
enum Edge {
    Item(usize),
    Object(usize),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    /// Whether item or object, the line, the text.
    type Found = (char, usize, String);

    /// Feeds the text in chunks of `step` bytes.
    fn split(text: &str, step: usize) -> (Vec<Found>, Result<(), SplitError>) {
        let mut splitter = Splitter::new(1 << 20);
        let mut pieces = Vec::new();
        for chunk in text.as_bytes().chunks(step) {
            splitter.push(chunk);
            loop {
                match splitter.next() {
                    Ok(None) => break,
                    Ok(Some(Piece::Item { line, text })) => {
                        pieces.push(('i', line, String::from_utf8_lossy(text).into_owned()));
                    }
                    Ok(Some(Piece::Object { line, text })) => {
                        pieces.push(('o', line, String::from_utf8_lossy(text).into_owned()));
                    }
                    Err(error) => return (pieces, Err(error)),
                }
            }
        }
        (pieces, splitter.finish())
    }

    #[test]
    fn objects_and_items() {
        let text = concat!(
            "\n{\"a\": \"}{\\\"\", \"b\": [{}]}\n",
            "{\"kind\":\"List\",\"items\":[{\"x\":[1,{}]},\n {\"items\":[2]}, 7 ,\"s]\", [3], null],\"z\":{\"items\":[9]}}\n",
            "{\"items\": {\"q\": [1]}} {\"items\":[]}",
        );
        let expected = [
            ('o', 2, "{\"a\": \"}{\\\"\", \"b\": [{}]}"),
            ('i', 3, "{\"x\":[1,{}]}"),
            ('i', 4, "{\"items\":[2]}"),
            ('i', 4, "7 "),
            ('i', 4, "\"s]\""),
            ('i', 4, "[3]"),
            ('i', 4, "null"),
            ('o', 3, "{\"kind\":\"List\",\"items\":[],\"z\":{\"items\":[9]}}"),
            ('o', 5, "{\"items\": {\"q\": [1]}}"),
            ('o', 5, "{\"items\":[]}"),
        ];
        let expected: Vec<_> = expected.iter().map(|(c, line, text)| (*c, *line, text.to_string())).collect();
        for step in 1..text.len() {
            assert_eq!(split(text, step), (expected.clone(), Ok(())), "in chunks of {step}");
        }
    }

    #[test]
    fn what_cannot_be_followed() {
        for (text, line, kind) in [
            ("{}\ngarbage", 2, SplitErrorKind::NotAnObject),
            ("[{}]", 1, SplitErrorKind::NotAnObject),
            ("}", 1, SplitErrorKind::NotAnObject),
            ("{}}", 1, SplitErrorKind::NotAnObject),
            ("\n{\"a\":\n", 2, SplitErrorKind::Truncated),
            ("{\"a\":\"b", 1, SplitErrorKind::Truncated),
            ("{\"items\":[{},", 1, SplitErrorKind::Truncated),
        ] {
            assert_eq!(split(text, 3).1, Err(SplitError { line, kind }), "{text:?}");
        }
    }

    #[test]
    fn memory_is_bounded_by_the_piece_and_not_by_the_list() {
        let mut splitter = Splitter::new(100);
        splitter.push(b"{\"items\":[");
        for _ in 0..10_000 {
            splitter.push(b"{\"a\":\"0123456789\"},");
            assert!(matches!(splitter.next(), Ok(Some(Piece::Item { .. }))));
            assert_eq!(splitter.next(), Ok(None));
        }
        assert!(splitter.buffer.capacity() < 4096, "{}", splitter.buffer.capacity());
        splitter.push(b"{\"a\":\"");
        let error = (0..200).find_map(|_| {
            splitter.push(b"0123456789");
            splitter.next().err()
        });
        assert_eq!(error.map(|error| error.kind), Some(SplitErrorKind::TooLarge));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(chunks in prop::collection::vec("[\\[\\]{},:\" \\\\a0\n]{0,20}|\"items\":\\[", 0..20)) {
            let mut splitter = Splitter::new(64);
            for chunk in chunks {
                splitter.push(chunk.as_bytes());
                while let Ok(Some(_)) = splitter.next() {}
            }
        }

        #[test]
        fn whatever_is_written_is_found_again(
            names in prop::collection::vec(".{0,8}", 0..8), list in any::<bool>(), step in 1_usize..64,
        ) {
            let items: Vec<Value> = names.iter().map(|name| serde_json::json!({"n": name, "items": [name]})).collect();
            let text = if list {
                serde_json::json!({"a": names.clone(), "items": items, "b": {"items": [1]}}).to_string()
            } else {
                items.iter().map(Value::to_string).collect::<Vec<_>>().join("\n")
            };
            let (pieces, end) = split(&text, step);
            prop_assert_eq!(end, Ok(()));
            let wanted = if list { 'i' } else { 'o' };
            let found: Vec<Value> = pieces.iter().filter(|piece| piece.0 == wanted)
                .map(|piece| serde_json::from_str(&piece.2).unwrap()).collect();
            if list {
                prop_assert_eq!(found, items);
            } else {
                prop_assert_eq!(found.len(), items.len());
            }
        }
    }
}
