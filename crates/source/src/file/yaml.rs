// SPDX-License-Identifier: Apache-2.0

//! YAML as JSON, line for line: what stands on a line of the YAML stands on the same line of the JSON, so that
//! one reader serves both, and an error found in the JSON names the right line of the YAML.
//!
//! Plain scalars are read as YAML 1.2 has it: `yes`, `off` and `010` are text. Aliases are followed, within
//! bounds; merge keys are not.

use std::{
    borrow::Cow,
    io::{self, BufRead},
};

use granit_parser::{Event, Options, Parser, ScalarStyle, Tag};
use hashbrown::HashMap;

/// What is wrong with a document, and on which of its lines (from 1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct YamlError {
    pub line: usize,
    pub reason: Cow<'static, str>,
}

/// The documents of a file, one after the other. Document markers stand at the beginning of a line and nowhere
/// else, so they can be found without parsing, and a document that is not valid spoils only itself.
pub(super) struct Documents<R> {
    reader: R,
    /// The document being read; what belongs to the one after it is kept apart.
    text: Vec<u8>,
    next: Vec<u8>,
    /// Lines read so far.
    line: usize,
}

impl<R: BufRead> Documents<R> {
    pub(super) fn new(reader: R) -> Documents<R> {
        Documents { reader, text: Vec::new(), next: Vec::new(), line: 0 }
    }

    /// The next document that has content, and the line (from 1) its text begins on.
    pub(super) fn next(&mut self) -> io::Result<Option<(usize, &[u8])>> {
        self.text.clear();
        self.text.append(&mut self.next);
        let mut first = self.line + usize::from(self.text.is_empty());
        // Blank lines, comments and directives may precede the marker of their document.
        let mut prologue = self.text.is_empty();
        let mut content = false;
        loop {
            let start = self.text.len();
            if self.reader.read_until(b'\n', &mut self.text)? == 0 {
                return Ok(content.then_some((first, &self.text)));
            }
            self.line += 1;
            if self.line == 1 && self.text.starts_with(BYTE_ORDER_MARK) {
                self.text.drain(..BYTE_ORDER_MARK.len());
            }
            let line = self.text[start..].trim_ascii_end();
            let begins = is_marker(line, b"---");
            if !begins && !is_marker(line, b"...") {
                let empty = matches!(line.trim_ascii_start().first(), None | Some(b'#'));
                let directive = prologue && line.starts_with(b"%");
                prologue &= empty || directive;
                content |= !empty && !directive;
                continue;
            }
            let more_than_marker = line.len() > 3;
            if begins && prologue {
                (prologue, content) = (false, more_than_marker);
                continue;
            }
            if begins {
                self.next.extend(self.text.drain(start..));
            } else {
                self.text.truncate(start);
            }
            if content {
                return Ok(Some((first, &self.text)));
            }
            self.text.clear();
            self.text.append(&mut self.next);
            (first, prologue, content) =
                (self.line + usize::from(!begins), !begins, begins && more_than_marker);
        }
    }
}

fn is_marker(line: &[u8], marker: &[u8; 3]) -> bool {
    line.strip_prefix(marker).is_some_and(|rest| matches!(rest.first(), None | Some(b' ' | b'\t')))
}

/// Appends the document to `json`. A document without content gives nothing.
pub(super) fn to_json(text: &str, json: &mut String) -> Result<(), YamlError> {
    let mut options = Options::default();
    options.emit_comments = false;
    let mut writer = Writer::new(json, text.len());
    for event in Parser::new_from_str_with_options(text, options) {
        let (event, span) = event.map_err(|error| YamlError {
            line: error.marker().line().max(1),
            reason: error.info().to_string().into(),
        })?;
        writer.event(event, span.start.line().max(1))?;
    }
    Ok(())
}

struct Writer<'a> {
    json: &'a mut String,
    /// The line the JSON is on.
    line: usize,
    open: Vec<Open>,
    /// The text of each anchored node, on one line.
    anchors: HashMap<usize, String>,
    /// Where the JSON may not grow beyond: a few lines of aliases can mean terabytes.
    limit: usize,
}

/// A sequence or mapping that has not ended.
struct Open {
    kind: Container,
    /// How many nodes it has; in a mapping keys count too.
    nodes: usize,
    anchor: usize,
    start: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Container {
    Sequence,
    Mapping,
}

impl Writer<'_> {
    fn new(json: &mut String, length: usize) -> Writer<'_> {
        let limit = json.len() + SMALL + 8 * length;
        Writer { json, line: 1, open: Vec::new(), anchors: HashMap::new(), limit }
    }

    fn event(&mut self, event: Event<'_>, line: usize) -> Result<(), YamlError> {
        let wrong = |reason: &'static str| Err(YamlError { line, reason: reason.into() });
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let is_key = self.separate(line);
                if is_key && text == "<<" && style == ScalarStyle::Plain {
                    return wrong("merge keys (<<) are not supported");
                }
                let start = self.json.len();
                let is_text = is_key || style != ScalarStyle::Plain || is_tagged_text(tag.as_deref());
                match (is_text, plain(&text)) {
                    (false, Some(literal)) => self.json.push_str(&literal),
                    _ => push_quoted(self.json, &text),
                }
                self.remember(anchor, start);
            }
            Event::SequenceStart(..) | Event::MappingStart(..) | Event::Alias(_) if self.separate(line) => {
                return wrong("a key must be text");
            }
            Event::SequenceStart(_, anchor, _) => self.begin(Container::Sequence, anchor),
            Event::MappingStart(_, anchor, _) => self.begin(Container::Mapping, anchor),
            Event::Alias(anchor) => match self.anchors.get(&anchor) {
                Some(text) => self.json.push_str(text),
                None => return wrong("an alias inside of what it stands for"),
            },
            Event::SequenceEnd | Event::MappingEnd => self.end(),
            _ => {}
        }
        if self.json.len() > self.limit {
            return wrong("its aliases make the document too large");
        }
        Ok(())
    }

    /// What goes before a node: the line it is on, and a comma or colon. True if the node is a key.
    fn separate(&mut self, line: usize) -> bool {
        let mut is_key = false;
        if let Some(parent) = self.open.last_mut() {
            is_key = parent.kind == Container::Mapping && parent.nodes % 2 == 0;
            if parent.kind == Container::Mapping && !is_key {
                self.json.push(':');
            } else if parent.nodes > 0 {
                self.json.push(',');
            }
            parent.nodes += 1;
        }
        while self.line < line {
            self.json.push('\n');
            self.line += 1;
        }
        is_key
    }

    fn begin(&mut self, kind: Container, anchor: usize) {
        let start = self.json.len();
        self.json.push(if kind == Container::Mapping { '{' } else { '[' });
        self.open.push(Open { kind, nodes: 0, anchor, start });
    }

    fn end(&mut self) {
        if let Some(open) = self.open.pop() {
            self.json.push(if open.kind == Container::Mapping { '}' } else { ']' });
            self.remember(open.anchor, open.start);
        }
    }

    fn remember(&mut self, anchor: usize, start: usize) {
        if anchor != 0 {
            // Newlines stand between tokens only: those in text are escaped.
            self.anchors.insert(anchor, self.json[start..].replace('\n', " "));
        }
    }
}

fn is_tagged_text(tag: Option<&Tag>) -> bool {
    tag.is_some_and(|tag| tag.is_yaml_core_schema_tag("str"))
}

/// A plain scalar as a JSON literal; none if it is text.
pub(super) fn plain(text: &str) -> Option<Cow<'_, str>> {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Some("null".into()),
        "true" | "True" | "TRUE" => return Some("true".into()),
        "false" | "False" | "FALSE" => return Some("false".into()),
        _ => {}
    }
    let radix = match text.get(..2) {
        Some("0x") => Some(16),
        Some("0o") => Some(8),
        _ => None,
    };
    if let Some(radix) = radix {
        let digits = text[2..].bytes().all(|byte| byte.is_ascii_alphanumeric());
        return digits
            .then(|| u64::from_str_radix(&text[2..], radix).ok())
            .flatten()
            .map(|n| n.to_string().into());
    }
    is_json_number(text).then_some(text.into())
}

/// A number as both YAML and JSON write it.
fn is_json_number(text: &str) -> bool {
    let unsigned = text.strip_prefix('-').unwrap_or(text);
    let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, Some(exponent.strip_prefix(['+', '-']).unwrap_or(exponent))),
        None => (unsigned, None),
    };
    let (whole, fraction) = match mantissa.split_once('.') {
        Some((whole, fraction)) => (whole, Some(fraction)),
        None => (mantissa, None),
    };
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits(whole)
        && (whole == "0" || !whole.starts_with('0'))
        && fraction.is_none_or(digits)
        && exponent.is_none_or(digits)
}

pub(super) fn push_quoted(json: &mut String, text: &str) {
    json.push('"');
    let needs_escape = |byte: u8| (byte < b' ') | (byte == b'"') | (byte == b'\\');
    if !text.bytes().fold(false, |so_far, byte| so_far | needs_escape(byte)) {
        json.push_str(text);
        json.push('"');
        return;
    }
    let mut clean = 0;
    for (at, byte) in text.bytes().enumerate() {
        let escape = match byte {
            b'"' => "\\\"",
            b'\\' => "\\\\",
            b'\n' => "\\n",
            b'\t' => "\\t",
            0..=0x1f => "",
            _ => continue,
        };
        json.push_str(&text[clean..at]);
        clean = at + 1;
        if escape.is_empty() {
            json.push_str(&format!("\\u{byte:04x}"));
        } else {
            json.push_str(escape);
        }
    }
    json.push_str(&text[clean..]);
    json.push('"');
}

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();
/// Aliases may make a document eight times as long, or this much.
const SMALL: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn convert(text: &str) -> Value {
        let mut json = String::new();
        to_json(text, &mut json).unwrap();
        serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {json}"))
    }

    fn error(text: &str) -> (usize, String) {
        let error = to_json(text, &mut String::new()).unwrap_err();
        (error.line, error.reason.into_owned())
    }

    #[test]
    fn scalars() {
        let text = "
a: [1, -2, 1.5, 1e3, 0, 0x1F, 0o17, 010, 1_000, .5, 1., +1, 0b1, 0x, 0x-1, '', ~, null, '1']
b: {x: true, y: False, z: yes, n: off, 80: http}
c: \"tab\\t quote\\\" nul\\0 é\"
d: |
  line one
  line two
e: >-
  folded
  text
f: !!str 12
g:
h: 'it''s'
i: 1.2.3.4
";
        assert_eq!(
            convert(text),
            json!({
                "a": [1, -2, 1.5, 1e3, 0, 31, 15, "010", "1_000", ".5", "1.", "+1", "0b1", "0x", "0x-1", "", null, null, "1"],
                "b": {"x": true, "y": false, "z": "yes", "n": "off", "80": "http"},
                "c": "tab\t quote\" nul\0 é",
                "d": "line one\nline two\n",
                "e": "folded text",
                "f": "12",
                "g": null,
                "h": "it's",
                "i": "1.2.3.4",
            })
        );
    }

    #[test]
    fn lines_are_kept() {
        let text = "# comment\na:\n- b: 1\n\n- |\n  x\n  y\n- {c: d,\n   e: f}\nz: last\n";
        let mut json = String::new();
        to_json(text, &mut json).unwrap();
        let line_of = |needle: &str| 1 + json[..json.find(needle).unwrap()].matches('\n').count();
        for (needle, line) in
            [("\"a\"", 2), ("\"b\"", 3), ("\"x\\n", 6), ("\"c\"", 8), ("\"e\"", 9), ("\"z\"", 10)]
        {
            assert_eq!(line_of(needle), line, "{needle} in {json}");
        }
    }

    #[test]
    fn aliases() {
        assert_eq!(
            convert("a: &x {k: [1, 2]}\nb: *x\nc: &y text\nd: [*y, *x]\n"),
            json!({"a": {"k": [1, 2]}, "b": {"k": [1, 2]}, "c": "text", "d": ["text", {"k": [1, 2]}]})
        );
        assert_eq!(error("a: 1\nb: *missing\n").0, 2);
        assert_eq!(error("a: &a [*a]\n").0, 1);
        assert_eq!(error("a: &a {b: 1}\nc:\n  <<: *a\n").0, 3);
    }

    #[test]
    fn aliases_that_explode_are_stopped() {
        let mut text = String::from("a0: &a0 [xxxxxxxxxxxxxxxx]\n");
        for n in 1..40 {
            text.push_str(&format!("a{n}: &a{n} [{}]\n", vec![format!("*a{}", n - 1); 9].join(",")));
        }
        assert!(error(&text).1.contains("too large"));
    }

    #[test]
    fn errors_name_the_line() {
        assert_eq!(error("a: 1\nb: [\n").0, 2);
        assert_eq!(error("a: 1\nb: @x\n").0, 2);
        assert_eq!(error("? [a, b]\n: c\n"), (1, "a key must be text".into()));
    }

    fn documents(text: &str) -> Vec<(usize, String)> {
        let mut documents = Documents::new(text.as_bytes());
        let mut found = Vec::new();
        while let Some((line, text)) = documents.next().unwrap() {
            found.push((line, String::from_utf8_lossy(text).into_owned()));
        }
        found
    }

    #[test]
    fn documents_are_told_apart() {
        for (text, expected) in [
            ("", vec![]),
            ("# only a comment\n\n---\n---\n# another\n", vec![]),
            ("a: 1", vec![(1, "a: 1")]),
            ("\u{feff}a: 1", vec![(1, "a: 1")]),
            ("a: 1\n---\nb: 2\n", vec![(1, "a: 1\n"), (2, "---\nb: 2\n")]),
            ("a: 1\r\n---\r\nb: 2\r\n", vec![(1, "a: 1\r\n"), (2, "---\r\nb: 2\r\n")]),
            ("---\n---\na: 1\n---\n\n---\nb: 2\n", vec![(2, "---\na: 1\n"), (6, "---\nb: 2\n")]),
            (
                "# c\n%YAML 1.2\n---\na: 1\n...\n# d\nb: 2\n",
                vec![(1, "# c\n%YAML 1.2\n---\na: 1\n"), (6, "# d\nb: 2\n")],
            ),
            ("--- {a: 1}\n--- # c\nb: |\n ---\n", vec![(1, "--- {a: 1}\n"), (2, "--- # c\nb: |\n ---\n")]),
            ("a: ---x\n----\n", vec![(1, "a: ---x\n----\n")]),
        ] {
            let expected: Vec<_> = expected.into_iter().map(|(line, text)| (line, text.to_owned())).collect();
            assert_eq!(documents(text), expected, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics_and_what_comes_out_is_json(text in "([-a{}\\[\\]:,&*#|>'\"!% \n\t0~?<.]|a: |- |\n  ){0,60}") {
            let mut json = String::new();
            if to_json(&text, &mut json).is_ok() && !json.trim().is_empty() {
                prop_assert!(serde_json::from_str::<Value>(&json).is_ok(), "{} -> {}", text, json);
            }
        }

        #[test]
        fn json_is_yaml(value in prop::collection::vec(("[a-z]{1,5}", any::<i64>(), "[ -~é]{0,10}"), 0..8)) {
            let value: Value = value.iter().map(|(key, n, text)| (key.clone(), json!([n, text, {"k": text}]))).collect();
            prop_assert_eq!(convert(&serde_json::to_string_pretty(&value).unwrap()), value);
        }
    }
}
