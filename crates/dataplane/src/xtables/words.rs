// SPDX-License-Identifier: Apache-2.0

//! A line of `iptables-save`, word by word.

use std::borrow::Cow;

/// The words of a line. Quotes hold words with spaces together, and a backslash in them keeps the next character.
pub fn words(line: &str) -> Vec<Cow<'_, str>> {
    let mut words = Vec::with_capacity(24);
    let mut rest = line.trim_start();
    while !rest.is_empty() {
        let (word, after) = match rest.strip_prefix('"') {
            Some(quoted) => unquote(quoted),
            None => {
                let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
                (Cow::Borrowed(&rest[..end]), &rest[end..])
            }
        };
        words.push(word);
        rest = after.trim_start();
    }
    words
}

/// The text up to the closing quote, and what follows it.
fn unquote(quoted: &str) -> (Cow<'_, str>, &str) {
    let mut text = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' if !quoted[..at].contains('\\') => return (Cow::Borrowed(&quoted[..at]), &quoted[at + 1..]),
            '"' => return (Cow::Owned(text), &quoted[at + 1..]),
            '\\' => text.extend(chars.next().map(|(_, kept)| kept)),
            _ => text.push(c),
        }
    }
    (Cow::Owned(text), "")
}

/// Where a rule sends packets: the word after `-j` or `-g`.
pub fn target(line: &str) -> Option<Cow<'_, str>> {
    let mut words = words(line).into_iter();
    words.find(|word| word == "-j" || word == "-g")?;
    words.next()
}

/// Chain and rest of a rule: `-A CHAIN REST`.
pub fn rule(line: &str) -> Option<(&str, &str)> {
    let rest = line.strip_prefix("-A ")?;
    Some(rest.split_once(' ').unwrap_or((rest, "")))
}

/// Chains that the kernel has by itself.
pub fn is_built_in(name: &str) -> bool {
    matches!(name, "PREROUTING" | "INPUT" | "FORWARD" | "OUTPUT" | "POSTROUTING")
}

/// The chain that a line such as `:CHAIN - [0:0]` declares.
pub fn chain(line: &str) -> Option<&str> {
    line.strip_prefix(':')?.split(' ').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_hold_together() {
        let line =
            r#"-A KUBE-SERVICES -m comment --comment "a \"b\" -j c" -m comment --comment "d e" -j KUBE-X"#;
        let expected = [
            "-A",
            "KUBE-SERVICES",
            "-m",
            "comment",
            "--comment",
            "a \"b\" -j c",
            "-m",
            "comment",
            "--comment",
            "d e",
            "-j",
            "KUBE-X",
        ];
        assert_eq!(words(line), expected);
        assert_eq!(target(line).as_deref(), Some("KUBE-X"));
        assert_eq!(words(r#""never closed"#), ["never closed"]);
        assert_eq!(words(r#""ends with \"#), ["ends with "]);
        assert_eq!(target("-A X -g KUBE-Y"), Some("KUBE-Y".into()));
        assert_eq!(target("-A X -m comment --comment x"), None);
    }

    #[test]
    fn chains_and_rules_are_told_apart() {
        assert_eq!(chain(":KUBE-X - [0:0]"), Some("KUBE-X"));
        assert_eq!(chain("-A KUBE-X -j Y"), None);
        assert_eq!(rule("-A KUBE-X -j Y"), Some(("KUBE-X", "-j Y")));
        assert_eq!(rule("-A KUBE-X"), Some(("KUBE-X", "")));
        assert_eq!(rule("COMMIT"), None);
    }
}
