// SPDX-License-Identifier: Apache-2.0

//! The mechanical IPv6 counterpart of a text written in IPv4.
//!
//! Every address literal becomes its image in the lab's address plan, a prefix length grows by 96, loopback
//! and the zero prefix become their IPv6 selves, and the words by which Kubernetes names a family change.

use std::net::{Ipv4Addr, Ipv6Addr};

use lab::address::{IMAGE_BITS, image};

/// Kubernetes objects: addresses are quoted, since a bare one may end in a colon.
pub fn of_yaml(text: &str) -> String {
    translate(text, Quoting::Yaml).replace("IPv4", "IPv6")
}

/// Packet tables: an address with a port is put in brackets.
pub fn of_packets(text: &str) -> String {
    translate(text, Quoting::Brackets)
}

/// Everything else: configuration, deletions.
pub fn of_plain(text: &str) -> String {
    translate(text, Quoting::None)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Quoting {
    None,
    Yaml,
    Brackets,
}

fn translate(text: &str, quoting: Quoting) -> String {
    let mut out = String::with_capacity(text.len() * 2);
    let mut rest = text;
    let mut before = None;
    let mut in_quotes = false;
    while let Some(first) = rest.chars().next() {
        let inside_word =
            before.is_some_and(|c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-' || c == ':');
        let literal = if inside_word { None } else { Literal::at(rest) };
        let Some(literal) = literal else {
            out.push(first);
            in_quotes = first != '\n' && in_quotes != (first == '"');
            before = Some(first);
            rest = &rest[first.len_utf8()..];
            continue;
        };
        let after = &rest[literal.length..];
        let text = literal.image();
        match quoting {
            Quoting::Yaml if !in_quotes => out.push_str(&format!("\"{text}\"")),
            Quoting::Brackets if after.starts_with(':') => out.push_str(&format!("[{text}]")),
            _ => out.push_str(&text),
        }
        before = rest[..literal.length].chars().next_back();
        rest = after;
    }
    out
}

/// An IPv4 address or range at the start of a text.
struct Literal {
    address: Ipv4Addr,
    /// As written, also if it is too large: that must be too large in the image, too.
    bits: Option<u16>,
    length: usize,
}

impl Literal {
    fn at(text: &str) -> Option<Literal> {
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let address = text[..end].parse().ok()?;
        let bits = text[end..].strip_prefix('/').and_then(|rest| {
            let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            Some((rest[..digits].parse().ok()?, 1 + digits))
        });
        Some(Literal {
            address,
            bits: bits.map(|(bits, _)| bits),
            length: end + bits.map_or(0, |(_, length)| length),
        })
    }

    fn image(&self) -> String {
        let (address, bits) = match (self.address, self.bits) {
            (Ipv4Addr::UNSPECIFIED, Some(0)) => (Ipv6Addr::UNSPECIFIED, Some(0)),
            (address, bits) if address.is_loopback() => (Ipv6Addr::LOCALHOST, bits.map(|_| 128)),
            (address, bits) => (image(address), bits.map(|bits| bits.saturating_add(u16::from(IMAGE_BITS)))),
        };
        match bits {
            Some(bits) => format!("{address}/{bits}"),
            None => address.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects() {
        assert_eq!(of_yaml("clusterIP: 10.96.0.10\n"), "clusterIP: \"fd00::a60:a\"\n");
        assert_eq!(of_yaml("[\"10.0.0.0/8\", 0.0.0.0/0]"), "[\"fd00::a00:0/104\", \"::/0\"]");
        assert_eq!(of_yaml("[\" 10.0.0.1\", 10.0.0.1/33]"), "[\" fd00::a00:1\", \"fd00::a00:1/129\"]");
        assert_eq!(of_yaml("addressType: IPv4"), "addressType: IPv6");
        assert_eq!(of_yaml("version: v1.2.3.4, 1.2.3, 300.1.1.1"), "version: v1.2.3.4, 1.2.3, 300.1.1.1");
    }

    #[test]
    fn packets() {
        assert_eq!(of_packets("a1 tcp 10.96.0.10:80 -> a1"), "a1 tcp [fd00::a60:a]:80 -> a1");
        assert_eq!(of_packets("node-a@127.0.0.1 tcp 127.0.0.1:80"), "node-a@::1 tcp [::1]:80");
    }

    #[test]
    fn settings() {
        assert_eq!(of_plain("clusterCIDR: 10.244.0.0/16"), "clusterCIDR: fd00::af4:0/112");
        assert_eq!(of_plain("nodePortAddresses: 127.0.0.0/8"), "nodePortAddresses: ::1/128");
    }
}
