// SPDX-License-Identifier: Apache-2.0

//! What clients asked for.

use std::time::Instant;

use model::Kind;

use super::mischief::Verb;

/// One request, as it came.
#[derive(Clone, Debug)]
pub struct Request {
    pub at: Instant,
    /// Of what; nothing if the path is none of ours.
    pub kind: Option<Kind>,
    pub verb: Verb,
    pub path: String,
    /// Decoded, in order.
    pub query: Vec<(String, String)>,
    pub accept: String,
    pub user_agent: String,
    pub credential: Credential,
    /// What it was answered with; 0 if it was not answered.
    pub status: u16,
}

impl Request {
    /// The first value of a query parameter; empty if it was not given.
    pub fn param(&self, name: &str) -> &str {
        self.query.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value)
    }
}

/// What a client showed of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    Nothing,
    Token(String),
    /// A certificate of our authority; TLS let in no other.
    Certificate,
}

/// The parameters of a query, percent-decoded.
pub(super) fn parse_query(query: &str) -> Vec<(String, String)> {
    query
        .split('&')
        .filter(|part| !part.is_empty())
        .map(|part| part.split_once('=').unwrap_or((part, "")))
        .map(|(key, value)| (decode(key), decode(value)))
        .collect()
}

fn decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        let hex = |digit: u8| char::from(digit).to_digit(16);
        match (first, tail) {
            (b'+', _) => bytes.push(b' '),
            (b'%', [high, low, after @ ..]) if hex(*high).is_some() && hex(*low).is_some() => {
                let value = hex(*high).unwrap_or_default() * 16 + hex(*low).unwrap_or_default();
                bytes.push(value as u8);
                rest = after;
            }
            _ => bytes.push(*first),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries() {
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(
            parse_query("fieldSelector=spec.clusterIP%21%3DNone&watch&x=a+b%&y=%2C"),
            [
                pair("fieldSelector", "spec.clusterIP!=None"),
                pair("watch", ""),
                pair("x", "a b%"),
                pair("y", ",")
            ]
        );
    }
}
