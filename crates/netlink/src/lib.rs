// SPDX-License-Identifier: Apache-2.0

//! Netlink: wire formats and sockets. It knows tables, flows, links and addresses, but no Service.
//!
//! # Layout
//!
//! | module | what it is for |
//! |---|---|
//! | [`nft`] | nf_tables: objects, expressions, [`nft::Batch`], the connection [`nft::Nft`], [`nft::Monitor`] |
//! | [`conntrack`] | list flows by a filter, delete exactly one |
//! | [`ipvs`] | virtual services and their real servers |
//! | [`ipset`] | sets of addresses and ports that iptables rules look into |
//! | [`route`] | addresses and their changes; links and routes as far as a test network needs them |
//! | [`legacy`] | tables of ip_tables: their shape, and a digest of their rules, to see that they changed |
//! | [`accounts`] | counters that rules of iptables share and outlive |
//! | [`netns`] | network namespaces held by a file descriptor |
//! | [`Peer`] | who is at the other end of a Unix socket |
//! | [`socket`] | [`Transport`] (send and receive datagrams) and the real [`Socket`] |
//! | [`fake`] | transports for tests: one remembers, one fails on schedule |
//! | [`error`] | [`Error`], shaped by what a caller decides |
//!
//! Everything is synchronous. Nothing read from a socket can panic: the decoders only move forward and check
//! every length, and `fuzzing` runs all of them on arbitrary bytes.

pub mod accounts;
mod attr;
mod channel;
mod codec;
pub mod conntrack;
pub mod error;
pub mod fake;
#[doc(hidden)]
pub mod fuzzing;
pub mod ipset;
pub mod ipvs;
pub mod legacy;
pub mod netns;
pub mod nft;
mod peer;
pub mod route;
pub mod socket;
#[cfg(test)]
mod testing;

pub use error::{Error, Op};
pub use netns::Netns;
pub use peer::Peer;
pub use rustix::io::Errno;
pub use socket::{Protocol, Socket, Transport};

use std::fmt;

/// IPv4 or IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// The number the kernel uses, the same one for `AF_INET*` and `NFPROTO_IPV*`.
    pub const fn number(self) -> u8 {
        match self {
            Family::V4 => 2,
            Family::V6 => 10,
        }
    }

    /// The family with this number, if it is one of ours.
    pub const fn from_number(number: u8) -> Option<Family> {
        match number {
            2 => Some(Family::V4),
            10 => Some(Family::V6),
            _ => None,
        }
    }

    /// Bytes of an address.
    pub const fn address_len(self) -> usize {
        match self {
            Family::V4 => 4,
            Family::V6 => 16,
        }
    }
}

impl fmt::Display for Family {
    /// As `nft` writes it: `ip` or `ip6`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Family::V4 => "ip",
            Family::V6 => "ip6",
        })
    }
}
