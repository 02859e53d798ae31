// SPDX-License-Identifier: Apache-2.0

//! Where in a document a field stands. Looked for only when there is something to be said of it.

/// A field in JSON that has been read before, so it is well formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The line of the field (from 0), or of the innermost one around it that is there.
    pub line: usize,
    pub is_there: bool,
}

/// Finds a field by its path, written as in [`crate::Problem::field`]: `spec.ports[2].port`, `metadata.annotations[a.b/c]`.
pub(super) fn find(json: &[u8], path: &str) -> Place {
    let mut cursor = Cursor { json, at: 0 };
    let (mut found, mut rest) = (0, path);
    while !rest.is_empty() {
        let (name, after) = match rest.strip_prefix('[') {
            Some(inside) => inside.split_once(']').unwrap_or((inside, "")),
            None => rest.split_at(rest.find(['.', '[']).unwrap_or(rest.len())),
        };
        let Some(at) = cursor.enter(name) else {
            break;
        };
        (found, rest) = (at, after.strip_prefix('.').unwrap_or(after));
    }
    let line = json[..found].iter().filter(|byte| **byte == b'\n').count();
    Place { line, is_there: rest.is_empty() }
}

struct Cursor<'j> {
    json: &'j [u8],
    at: usize,
}

impl<'j> Cursor<'j> {
    /// From the beginning of an object or a list to the value of one of its members. Where that member begins.
    fn enter(&mut self, name: &str) -> Option<usize> {
        let is_object = self.peek()? == b'{';
        if !is_object && self.peek()? != b'[' {
            return None;
        }
        self.at += 1;
        for number in 0_usize.. {
            if matches!(self.peek()?, b'}' | b']') {
                return None;
            }
            let begin = self.at;
            let is_it = match is_object {
                true => {
                    let key = self.string();
                    self.peek().filter(|byte| *byte == b':')?;
                    self.at += 1;
                    key == name.as_bytes()
                }
                false => name.parse() == Ok(number),
            };
            if is_it {
                return Some(begin);
            }
            self.skip();
            if self.peek()? == b',' {
                self.at += 1;
            }
        }
        None
    }

    /// The next byte that is not blank.
    fn peek(&mut self) -> Option<u8> {
        self.at += self.json.get(self.at..)?.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        self.json.get(self.at).copied()
    }

    /// The inside of the string that begins here, as it is written.
    fn string(&mut self) -> &'j [u8] {
        self.at += 1;
        let begin = self.at;
        while let Some(byte) = self.json.get(self.at) {
            match byte {
                b'"' => break,
                b'\\' => self.at += 2,
                _ => self.at += 1,
            }
        }
        let text = self.json.get(begin..self.at).unwrap_or_default();
        self.at += 1;
        text
    }

    /// Goes past a value.
    fn skip(&mut self) {
        let mut depth = 0_usize;
        while let Some(byte) = self.peek() {
            match byte {
                b'"' => drop(self.string()),
                b'{' | b'[' => (depth, self.at) = (depth + 1, self.at + 1),
                b'}' | b']' if depth > 0 => (depth, self.at) = (depth - 1, self.at + 1),
                b'}' | b']' => return,
                b',' if depth == 0 => return,
                _ => self.at += 1,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const JSON: &str = "{\"metadata\":\n{\"name\": \"a\\\"\",\n\"annotations\": {\"a.b/c\":\n1}},
\"spec\": {\"other\": [1, {\"x\": [\"]\"]}, null], \"ports\": [\n{\"port\": 1, \"name\": \"}\"},\n{\"port\":2,\n\"name\": \"x\"}]}}";

    #[test]
    fn fields_are_found() {
        for (path, line, is_there) in [
            ("", 0, true),
            ("metadata", 0, true),
            ("metadata.name", 1, true),
            ("metadata.annotations[a.b/c]", 2, true),
            ("metadata.annotations[c]", 2, false),
            ("spec.ports", 4, true),
            ("spec.ports[0].port", 5, true),
            ("spec.ports[1]", 6, true),
            ("spec.ports[1].name", 7, true),
            ("spec.ports[1].protocol", 6, false),
            ("spec.ports[2].port", 4, false),
            ("spec.ports[x", 4, false),
            ("status.loadBalancer", 0, false),
        ] {
            assert_eq!(find(JSON.as_bytes(), path), Place { line, is_there }, "{path}");
        }
    }

    proptest! {
        #[test]
        fn nothing_panics(json in "[\\[\\]{},:\" \\\\a0\n]{0,30}", path in "[a0.\\[\\]]{0,8}") {
            find(json.as_bytes(), &path);
        }
    }
}
