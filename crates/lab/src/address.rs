// SPDX-License-Identifier: Apache-2.0

//! The address plan, the same in every lab.
//!
//! | who | IPv4 |
//! |---|---|
//! | node-a (the node under test) | 192.168.0.1, and 192.168.1.1 as a second address |
//! | node-b | 192.168.0.2 |
//! | node-c | 192.168.0.3 |
//! | pod aN, bN | 10.244.1.N, 10.244.2.N |
//! | pod cN, up to 1023 | 10.244.4.0 + N |
//! | client, client2 | 203.0.113.1, 203.0.113.2 |
//! | clients (64 sources of one host) | 203.0.113.64/26 |
//! | outside: the rest of the world | 198.18.0.1 |
//!
//! What nobody in the lab owns, and a proxy may serve: cluster IPs in 10.96.0.0/16, load balancer addresses in
//! 198.51.100.0/24, external addresses in 192.0.2.0/24. Packets to them that no proxy takes up leave for the
//! outside, which answers for all of them, so that "not touched" can be told from "dropped".
//!
//! The IPv6 address of everything is its IPv4 address under `fd00::/96` ([`image`]), so that a text with IPv4
//! addresses can be turned into its IPv6 counterpart mechanically.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// The IPv6 counterpart of an address of the plan.
pub fn image(v4: Ipv4Addr) -> Ipv6Addr {
    let [a, b, c, d] = v4.octets().map(u16::from);
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, a << 8 | b, c << 8 | d)
}

/// How many bits [`image`] puts in front: a prefix of n bits becomes one of n + 96.
pub const IMAGE_BITS: u8 = 96;

/// IPv4 or IPv6; the lab always has both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Version {
    V4,
    V6,
}

impl Version {
    pub const BOTH: [Version; 2] = [Version::V4, Version::V6];

    pub fn of(address: IpAddr) -> Version {
        match address {
            IpAddr::V4(_) => Version::V4,
            IpAddr::V6(_) => Version::V6,
        }
    }

    /// An address of the plan in this version.
    pub fn address(self, v4: Ipv4Addr) -> IpAddr {
        match self {
            Version::V4 => IpAddr::V4(v4),
            Version::V6 => IpAddr::V6(image(v4)),
        }
    }

    /// The length in this version of a prefix that has `bits` in IPv4.
    pub fn prefix(self, bits: u8) -> u8 {
        match self {
            Version::V4 => bits,
            Version::V6 => bits + IMAGE_BITS,
        }
    }
}

/// An IPv4 range of the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub base: Ipv4Addr,
    pub bits: u8,
}

impl Range {
    pub const fn new(base: [u8; 4], bits: u8) -> Range {
        let [a, b, c, d] = base;
        Range { base: Ipv4Addr::new(a, b, c, d), bits }
    }

    /// Its n-th address.
    pub fn nth(self, n: u32) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.base) + n)
    }

    /// Does it hold this address, or, for IPv6, the image of it?
    pub fn contains(self, address: IpAddr) -> bool {
        let offset = match address {
            IpAddr::V4(v4) => u32::from(v4).checked_sub(u32::from(self.base)),
            IpAddr::V6(v6) => u128::from(v6)
                .checked_sub(u128::from(image(self.base)))
                .and_then(|offset| u32::try_from(offset).ok()),
        };
        offset.is_some_and(|offset| u64::from(offset) < 1 << (32 - self.bits))
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base, self.bits)
    }
}

pub const NODE_A: Ipv4Addr = Ipv4Addr::new(192, 168, 0, 1);
/// A second address of node-a, for what is served on chosen addresses only.
pub const NODE_A_SECOND: Ipv4Addr = Ipv4Addr::new(192, 168, 1, 1);
pub const NODE_B: Ipv4Addr = Ipv4Addr::new(192, 168, 0, 2);
pub const NODE_C: Ipv4Addr = Ipv4Addr::new(192, 168, 0, 3);
pub const CLIENT: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
pub const CLIENT2: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 2);
pub const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);

pub const CLIENTS: Range = Range::new([203, 0, 113, 64], 26);
pub const CLUSTER_CIDR: Range = Range::new([10, 244, 0, 0], 16);
pub const PODS_A: Range = Range::new([10, 244, 1, 0], 24);
pub const PODS_B: Range = Range::new([10, 244, 2, 0], 24);
pub const PODS_C: Range = Range::new([10, 244, 4, 0], 22);

pub const SERVICE_CIDR: Range = Range::new([10, 96, 0, 0], 16);
pub const LOAD_BALANCERS: Range = Range::new([198, 51, 100, 0], 24);
pub const EXTERNAL: Range = Range::new([192, 0, 2, 0], 24);

/// The ranges that nobody in the lab owns and the outside answers for.
pub const UNOWNED: [Range; 3] = [SERVICE_CIDR, LOAD_BALANCERS, EXTERNAL];

/// The address of a pod, node or client by name: `a1`, `node-b`, `client2`.
pub fn address_of(name: &str) -> Option<Ipv4Addr> {
    let single = SINGLE.iter().find(|(known, _)| *known == name).map(|(_, address)| *address);
    single.or_else(|| {
        let (range, number) =
            PODS.iter().find_map(|(letter, range)| Some((range, name.strip_prefix(*letter)?)))?;
        let number = number.parse().ok().filter(|n| *n > 0 && !number.starts_with(['0', '+']))?;
        (number < 1 << (32 - range.bits)).then(|| range.nth(number))
    })
}

/// The reverse of [`address_of`], in either version. One of [`CLIENTS`] is `clients`.
pub fn name_of(address: IpAddr) -> Option<String> {
    let v4 = match address {
        IpAddr::V4(v4) => v4,
        IpAddr::V6(v6) => {
            let v4 = Ipv4Addr::from((u128::from(v6) & u128::from(u32::MAX)) as u32);
            (image(v4) == v6).then_some(v4)?
        }
    };
    if let Some((name, _)) = SINGLE.iter().find(|(_, known)| *known == v4) {
        return Some((*name).to_owned());
    }
    if CLIENTS.contains(IpAddr::V4(v4)) {
        return Some("clients".to_owned());
    }
    let (letter, range) = PODS.iter().find(|(_, range)| range.contains(IpAddr::V4(v4)))?;
    Some(format!("{letter}{}", u32::from(v4) - u32::from(range.base)))
}

const SINGLE: [(&str, Ipv4Addr); 7] = [
    ("node-a", NODE_A),
    ("node-b", NODE_B),
    ("node-c", NODE_C),
    ("client", CLIENT),
    ("client2", CLIENT2),
    ("outside", OUTSIDE),
    ("node-a2", NODE_A_SECOND),
];

const PODS: [(char, Range); 3] = [('a', PODS_A), ('b', PODS_B), ('c', PODS_C)];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses() {
        for name in ["node-a", "node-a2", "client", "client2", "outside", "a1", "b2", "c1", "c300"] {
            let address = address_of(name).unwrap();
            for version in Version::BOTH {
                assert_eq!(name_of(version.address(address)).as_deref(), Some(name));
            }
        }
        assert_eq!(name_of(IpAddr::V4(CLIENTS.nth(5))).as_deref(), Some("clients"));
        for name in ["", "a", "a0", "a01", "a+1", "a256", "d1", "c1024", "clients"] {
            assert_eq!(address_of(name), None, "{name}");
        }
        assert_eq!(name_of("10.96.0.10".parse().unwrap()), None);
        assert_eq!(name_of("fe80::192.168.0.1".parse().unwrap()), None);
    }

    #[test]
    fn an_image_keeps_the_bits() {
        assert_eq!(image(Ipv4Addr::new(10, 96, 0, 10)), "fd00::a60:a".parse::<Ipv6Addr>().unwrap());
        assert_eq!(image(NODE_A), "fd00::192.168.0.1".parse::<Ipv6Addr>().unwrap());
    }

    #[test]
    fn a_range_ends() {
        for version in Version::BOTH {
            assert!(CLIENTS.contains(version.address(CLIENTS.nth(0))));
            assert!(CLIENTS.contains(version.address(CLIENTS.nth(63))));
            assert!(!CLIENTS.contains(version.address(CLIENTS.nth(64))));
            assert!(!CLIENTS.contains(version.address(CLIENT)));
        }
    }

    #[test]
    fn nobody_owns_what_is_unowned() {
        let owned = [NODE_A, NODE_A_SECOND, NODE_B, NODE_C, CLIENT, CLIENT2, OUTSIDE, CLIENTS.base];
        let pods = [PODS_A.base, PODS_B.base, PODS_C.base];
        for address in owned.into_iter().chain(pods) {
            assert!(!UNOWNED.iter().any(|range| range.contains(IpAddr::V4(address))), "{address}");
        }
    }
}
