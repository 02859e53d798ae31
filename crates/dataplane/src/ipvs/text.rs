// SPDX-License-Identifier: Apache-2.0

//! A [`Program`] as `ipvsadm -ln` and `ipset list` show it, so that what is meant and what is there can be compared by
//! eye and by tests. Counters and sizes in memory aside.

use std::{
    fmt::{self, Write as _},
    net::{IpAddr, SocketAddr},
};

use model::Protocol;
use netlink::{
    Family,
    ipset::Element,
    ipvs::{ServiceKey, flags},
};

use super::program::Program;

/// The virtual servers, without the header and the counts of connections.
pub fn ipvsadm(program: &Program) -> String {
    let mut text = String::new();
    for (key, server) in &program.servers {
        let _ = write!(text, "{} {}", Key(key), server.service.scheduler);
        let flags = server.service.flags;
        let _ = match flags & flags::PERSISTENT {
            0 => Ok(()),
            _ => write!(text, " persistent {}", server.service.timeout),
        };
        let hashing = match server.service.scheduler.as_str() {
            "sh" => Some(["sh-fallback", "sh-port", "flag-3"]),
            "mh" => Some(["mh-fallback", "mh-port", "flag-3"]),
            _ => None,
        };
        let names = hashing.unwrap_or(["flag-1", "flag-2", "flag-3"]);
        let bits = [flags::SCHEDULER_1, flags::SCHEDULER_2, flags::SCHEDULER_3];
        let set: Vec<&str> =
            bits.iter().zip(names).filter(|(bit, _)| flags & **bit != 0).map(|(_, name)| name).collect();
        if !set.is_empty() {
            let _ = write!(text, " ({})", set.join(","));
        }
        let _ = match flags & flags::ONE_PACKET {
            0 => writeln!(text),
            _ => writeln!(text, " ops"),
        };
        for (dest, weight) in &server.dests {
            let at = SocketAddr::new(dest.address, dest.port);
            let _ = writeln!(text, "  -> {at} Masq {weight}");
        }
    }
    text
}

struct Key<'a>(&'a ServiceKey);

impl fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ServiceKey::Mark { family: Family::V4, mark } => write!(f, "FWM {mark}"),
            ServiceKey::Mark { family: Family::V6, mark } => write!(f, "FWM {mark} IPv6"),
            ServiceKey::At { protocol, address, port } => {
                let name = Protocol::from_number(*protocol).map_or("", |protocol| match protocol {
                    Protocol::Tcp => "TCP",
                    Protocol::Udp => "UDP",
                    Protocol::Sctp => "SCTP",
                });
                write!(f, "{name} {}", SocketAddr::new(*address, *port))
            }
        }
    }
}

/// The sets that have elements, with them.
pub fn ipset(program: &Program) -> String {
    let mut text = String::new();
    for (set, elements) in program.sets.iter().filter(|(_, elements)| !elements.is_empty()) {
        let _ = writeln!(text, "{} {}", set.name(program.tables.family), set.kind().name());
        for element in elements {
            let _ = writeln!(text, "  {}", Member(element));
        }
    }
    text
}

struct Member<'a>(&'a Element);

impl fmt::Display for Member<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = |f: &mut fmt::Formatter<'_>, ip: &IpAddr, protocol: &u8, port: &u16| {
            let name = Protocol::from_number(*protocol).map(|protocol| protocol.to_string());
            write!(f, "{ip},{}:{port}", name.unwrap_or_else(|| protocol.to_string()))
        };
        match self.0 {
            Element::Port(port) => write!(f, "{port}"),
            Element::Ip(ip) => write!(f, "{ip}"),
            Element::Address { address, protocol, port } => place(f, address, protocol, port),
            Element::Marked { address, protocol, port, mark } => {
                place(f, address, protocol, port)?;
                write!(f, " skbmark {mark:#x}")
            }
            Element::Pair { address, protocol, port, other, prefix } => {
                place(f, address, protocol, port)?;
                let is_whole = *prefix == if other.is_ipv4() { 32 } else { 128 };
                if is_whole { write!(f, ",{other}") } else { write!(f, ",{other}/{prefix}") }
            }
        }
    }
}
