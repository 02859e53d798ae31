// SPDX-License-Identifier: Apache-2.0

//! The YAML that tools and people mostly write, as JSON, without a parser: block mappings and sequences of values
//! that each fit on a line. It is some ten times faster than the parser, which reads everything else.
//!
//! Whatever is not certain to mean the same to the parser is left to it: anchors, tags, text over several lines,
//! escapes, comments behind values, tabs, anything but ASCII. What is accepted gives, byte for byte, what
//! [`super::yaml::to_json`] gives; a test holds the two against each other.

use super::yaml::{plain, push_quoted};

/// What became of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Conversion {
    /// Nothing was written: ask the parser.
    NotPlain,
    /// An object; whether it has `items`, and so may be a list.
    Object { has_items: bool },
}

/// Appends the document to `json`, if it is plain enough.
pub(super) fn to_json(text: &str, json: &mut String) -> Conversion {
    let start = json.len();
    let mut writer =
        Writer { json, line: 1, levels: Vec::new(), pending: false, blank: true, has_items: false };
    let written = writer.document(text);
    let has_items = writer.has_items;
    if written.is_none() {
        json.truncate(start);
        return Conversion::NotPlain;
    }
    Conversion::Object { has_items }
}

struct Writer<'a> {
    json: &'a mut String,
    /// The line the JSON is on.
    line: usize,
    levels: Vec<Level>,
    /// The latest key has no value yet: it is on the lines below.
    pending: bool,
    /// The innermost mapping or sequence has nothing in it yet.
    blank: bool,
    has_items: bool,
}

#[derive(Clone, Copy)]
struct Level {
    kind: Kind,
    indent: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Mapping,
    Sequence,
}

/// `None`, here and below: not plain enough.
impl Writer<'_> {
    fn document(&mut self, text: &str) -> Option<()> {
        for (at, line) in text.split_terminator('\n').enumerate() {
            let content = line.trim_start_matches(' ');
            if content.is_empty() || content.starts_with('#') {
                continue;
            }
            if self.levels.is_empty() && line == "---" && self.json_is_untouched() {
                continue;
            }
            if line.len() > LONGEST_LINE || !is_printable(line) {
                return None;
            }
            self.entry(line.len() - content.len(), content.trim_end_matches(' '), at + 1)?;
        }
        if self.pending || self.levels.is_empty() {
            return None;
        }
        while self.levels.pop().map(|level| self.json.push(level.kind.close())).is_some() {}
        Some(())
    }

    fn json_is_untouched(&self) -> bool {
        self.line == 1 && self.blank
    }

    /// One line: `key: value`, `key:`, `- value`, or `- ` and any of them.
    fn entry(&mut self, mut indent: usize, mut content: &str, line: usize) -> Option<()> {
        self.place(indent, if is_item(content) { Kind::Sequence } else { Kind::Mapping }, line)?;
        while is_item(content) {
            self.separate(line);
            self.blank = false;
            let rest = content[1..].trim_start_matches(' ');
            if rest.is_empty() {
                return None;
            }
            indent += content.len() - rest.len();
            content = rest;
            if is_item(content) {
                self.open(Kind::Sequence, indent)?;
            } else if key(content).is_some() {
                self.open(Kind::Mapping, indent)?;
            } else {
                return self.value(content);
            }
        }
        let (name, rest) = key(content)?;
        self.separate(line);
        self.blank = false;
        self.has_items |= self.levels.len() == 1 && name == "items";
        push_quoted(self.json, name);
        if rest.is_empty() {
            self.pending = true;
            return Some(());
        }
        self.json.push(':');
        self.value(rest)
    }

    /// Finds the mapping or sequence a line belongs to, ending those it is no longer in, or begins it.
    fn place(&mut self, indent: usize, kind: Kind, line: usize) -> Option<()> {
        if std::mem::take(&mut self.pending) {
            // Items may stand right below their key, not indented.
            let parent = self.levels.last()?.indent;
            if indent < parent || (indent == parent && kind == Kind::Mapping) {
                return None;
            }
            self.json.push(':');
            self.advance(line);
            return self.open(kind, indent);
        }
        if self.levels.is_empty() {
            if kind == Kind::Sequence {
                return None;
            }
            self.advance(line);
            return self.open(kind, indent);
        }
        while let Some(level) = self.levels.last() {
            if level.indent == indent && level.kind == kind {
                return Some(());
            }
            // A key ends the items that stand as far left as it does.
            let is_over = level.indent > indent || (level.indent == indent && level.kind == Kind::Sequence);
            if !is_over {
                return None;
            }
            self.json.push(level.kind.close());
            self.levels.pop();
        }
        None
    }

    fn open(&mut self, kind: Kind, indent: usize) -> Option<()> {
        if self.levels.len() >= DEEPEST {
            return None;
        }
        self.json.push(kind.open());
        self.levels.push(Level { kind, indent });
        self.blank = true;
        Some(())
    }

    /// What goes before a key or an item.
    fn separate(&mut self, line: usize) {
        if !self.blank {
            self.json.push(',');
        }
        self.advance(line);
    }

    fn advance(&mut self, line: usize) {
        while self.line < line {
            self.json.push('\n');
            self.line += 1;
        }
    }

    fn value(&mut self, text: &str) -> Option<()> {
        let bytes = text.as_bytes();
        if matches!(bytes[0], b'[' | b'{') {
            let mut flow = Flow { json: self.json, rest: text };
            flow.value(0)?;
            return flow.rest.is_empty().then_some(());
        }
        if let Some(inner) = quoted(text) {
            push_quoted(self.json, inner?);
            return Some(());
        }
        let has_more = bytes.windows(2).any(|pair| pair == b": " || pair == b" #");
        if !begins_text(bytes) || text.ends_with(':') || has_more {
            return None;
        }
        push_plain(self.json, text);
        Some(())
    }
}

impl Kind {
    fn open(self) -> char {
        if self == Kind::Mapping { '{' } else { '[' }
    }

    fn close(self) -> char {
        if self == Kind::Mapping { '}' } else { ']' }
    }
}

/// `[a, b]` and `{a: b}` on one line.
struct Flow<'a, 'b> {
    json: &'a mut String,
    rest: &'b str,
}

impl<'b> Flow<'_, 'b> {
    fn value(&mut self, depth: usize) -> Option<()> {
        match self.rest.as_bytes().first()? {
            _ if depth > DEEPEST => None,
            b'[' => self.members(Kind::Sequence, depth),
            b'{' => self.members(Kind::Mapping, depth),
            quote @ (b'"' | b'\'') => {
                let length = 2 + self.rest[1..].find(char::from(*quote))?;
                let text = self.take(length);
                push_quoted(self.json, quoted(text)??);
                // Two quotes stand for one: leave it to the parser.
                (!self.rest.starts_with(['"', '\''])).then_some(())
            }
            _ => {
                let text = self.scalar()?;
                push_plain(self.json, text);
                Some(())
            }
        }
    }

    fn members(&mut self, kind: Kind, depth: usize) -> Option<()> {
        self.take(1);
        self.json.push(kind.open());
        self.skip_blanks();
        if self.rest.starts_with(kind.close()) {
            self.take(1);
            self.json.push(kind.close());
            return Some(());
        }
        loop {
            if kind == Kind::Mapping {
                let name = self.scalar()?;
                push_quoted(self.json, name);
                self.rest = self.rest.strip_prefix(": ")?;
                self.json.push(':');
                self.skip_blanks();
            }
            self.value(depth + 1)?;
            self.skip_blanks();
            let next = self.take_char()?;
            if next == kind.close() {
                self.json.push(next);
                return Some(());
            }
            if next != ',' {
                return None;
            }
            self.json.push(',');
            self.skip_blanks();
        }
    }

    /// Text without quotes; a narrow choice of characters, because here more of them mean something.
    fn scalar(&mut self) -> Option<&'b str> {
        let bytes = self.rest.as_bytes();
        let is_inside = |at: usize| match bytes[at] {
            b'.' | b'_' | b'-' | b'/' | b'+' | b'@' => true,
            // Within an IPv6 address, say.
            b':' => bytes.get(at + 1).is_some_and(|next| *next == b':' || next.is_ascii_alphanumeric()),
            byte => byte.is_ascii_alphanumeric(),
        };
        let length = (0..bytes.len()).find(|at| !is_inside(*at)).unwrap_or(bytes.len());
        let first = *bytes.first()?;
        let begins = first.is_ascii_alphanumeric() || matches!(first, b'_' | b'/');
        (length > 0 && begins).then(|| self.take(length))
    }

    fn take(&mut self, length: usize) -> &'b str {
        let (text, rest) = self.rest.split_at(length);
        self.rest = rest;
        text
    }

    fn take_char(&mut self) -> Option<char> {
        let next = self.rest.chars().next()?;
        self.rest = &self.rest[next.len_utf8()..];
        Some(next)
    }

    fn skip_blanks(&mut self) {
        self.rest = self.rest.trim_start_matches(' ');
    }
}

/// Without a way out in the middle, which would keep the processor from looking at many bytes at once.
fn is_printable(line: &str) -> bool {
    line.bytes().fold(true, |so_far, byte| so_far & matches!(byte, b' '..=b'~'))
}

fn is_item(content: &str) -> bool {
    content == "-" || content.starts_with("- ")
}

/// The key and what follows it on the line.
fn key(content: &str) -> Option<(&str, &str)> {
    let is_inside =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'/' | b':');
    let bytes = content.as_bytes();
    let first = *bytes.first()?;
    if !(first.is_ascii_alphanumeric() || matches!(first, b'_' | b'.' | b'/')) {
        return None;
    }
    let ends = |at: &usize| bytes[*at] == b':' && matches!(bytes.get(at + 1), None | Some(b' '));
    let length = (1..bytes.len()).take_while(|at| is_inside(bytes[*at])).find(ends)?;
    Some((&content[..length], content[length + 1..].trim_start_matches(' ')))
}

/// The inside of text in quotes; the inner `None` if it has more in it than text.
fn quoted(text: &str) -> Option<Option<&str>> {
    let quote = text.chars().next().filter(|first| matches!(first, '"' | '\''))?;
    let inner = text[1..].strip_suffix(quote);
    Some(inner.filter(|inner| !inner.contains(quote) && (quote == '\'' || !inner.contains('\\'))))
}

/// Whether text without quotes may begin so.
fn begins_text(bytes: &[u8]) -> bool {
    match bytes[0] {
        b'-' => bytes.get(1).is_some_and(u8::is_ascii_digit),
        b'.' | b'_' | b'/' | b'+' | b'(' | b'~' | b'$' | b'^' | b';' | b'=' => true,
        byte => byte.is_ascii_alphanumeric(),
    }
}

fn push_plain(json: &mut String, text: &str) {
    match plain(text) {
        Some(literal) => json.push_str(&literal),
        None => push_quoted(json, text),
    }
}

/// The parser takes a key only if it is not longer than 1,024 bytes, and JSON is read to a depth of 128.
const LONGEST_LINE: usize = 1_000;
const DEEPEST: usize = 50;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::yaml, *};

    fn fast(text: &str) -> Option<String> {
        let mut json = String::new();
        (to_json(text, &mut json) != Conversion::NotPlain).then_some(json)
    }

    fn slow(text: &str) -> String {
        let mut json = String::new();
        yaml::to_json(text, &mut json).unwrap_or_else(|error| panic!("{error:?}: {text:?}"));
        json
    }

    #[test]
    fn what_tools_write_is_plain() {
        let text = "\
---
# from kubectl
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice

metadata:
  creationTimestamp: \"2026-01-01T00:00:00Z\"
  annotations: {}
  labels:
    kubernetes.io/service-name: 'cart'
    f:x: y
  ownerReferences: []
  generation: 3
ports:
- name: \"\"
  port: 8080
  appProtocol: null
endpoints:
- addresses:
  - 10.1.0.1
  conditions: {ready: true, serving: True}
  hints:
    forZones:
      - name: a
      - name: b
- addresses: [ fd00::1, \"10.0.0.1\" ]
  nodeName: node-1
- - 1
  - - -2
    - 0x1F
- text with blanks, and more
selector: {}
";
        assert_eq!(fast(text), Some(slow(text)));
    }

    #[test]
    fn a_list_is_told_from_other_objects() {
        let has_items = |text| to_json(text, &mut String::new()) == Conversion::Object { has_items: true };
        assert!(has_items("kind: List\nitems:\n- kind: Service\n"));
        assert!(!has_items("kind: Service\nspec:\n  items: 1\n"));
    }

    #[test]
    fn the_rest_is_left_to_the_parser() {
        for text in [
            "",
            "a",
            "- a\n",
            "a:\n",
            "a:\nb: 1\n",
            "a: &x 1\n",
            "a: *x\n",
            "a: !!str 1\n",
            "a: |\n  x\n",
            "a: b\n  c\n",
            "a: b # c\n",
            "a: \"x\\n\"\n",
            "a: 'it''s'\n",
            "a:\tb\n",
            "a: é\n",
            "<<: {}\n",
            "? a\n: b\n",
            "a: [b,\n c]\n",
            "a: {b}\n",
            "a: [b: c]\n",
            "a: [b,]\n",
            "a: b: c\n",
            "-\n",
            "a:\n-\n  b: 1\n",
            "\"a\": 1\n",
            "a: 1\n b: 2\n",
            "  a: 1\nb: 2\n",
            "a: @x\n",
            "a: - b\n",
            "%YAML 1.2\n---\na: 1\n",
            "--- {a: 1}\n",
            "a: 1\r\n",
            "a: {b:c}\n",
        ] {
            assert_eq!(fast(text), None, "{text:?}");
        }
    }

    /// Lines that are plain more often than not, at indentations that fit more often than not.
    fn line() -> impl Strategy<Value = String> {
        let value = prop_oneof![
            8 => "[a-z0-9./-]{1,4}",
            2 => "[ -~]{0,6}",
            1 => "\"[ -~]{0,3}\"|'[ -~]{0,3}'",
            2 => "\\[[a-z0-9:, '\"-]{0,6}\\]|\\{([a-z0-9]: [a-z0-9:]{1,3}(, ?)?){0,2}\\}",
        ];
        let lead = prop_oneof![3 => Just(""), 1 => Just("- "), 1 => Just("- - "), 1 => Just("-   ")];
        let body = (lead, "[a-z./:0-9-]{1,3}", value).prop_flat_map(|(lead, key, value)| {
            prop_oneof![
                4 => Just(format!("{lead}{key}: {value}")),
                3 => Just(format!("{lead}{key}:")),
                2 => Just(format!("{lead}{value}")),
                1 => Just("# note".to_owned()),
            ]
        });
        (0_usize..5, body).prop_map(|(indent, body)| format!("{}{body}\n", " ".repeat(indent)))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn what_is_accepted_means_what_the_parser_says(lines in prop::collection::vec(line(), 1..7)) {
            let text = lines.concat();
            if let Some(json) = fast(&text) {
                prop_assert_eq!(&json, &slow(&text), "{:?}", text);
                prop_assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok(), "{}", json);
            }
        }
    }
}
