// SPDX-License-Identifier: Apache-2.0

//! Addresses as old API versions let them be stored: IPv4 with leading zeros (read as decimal), and IPv4 inside
//! of IPv6, which means the IPv4 address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Parses an address.
pub fn parse_ip(text: &str) -> Option<IpAddr> {
    parse_ip_as_written(text).map(|ip| ip.to_canonical())
}

/// Whether packets to this address can be a Service's. Those to the others are the node's own affair, or leave no link:
/// taken for a Service, a loopback address would cut off the node's own connections. IPv4 link-local addresses are in
/// use, for a DNS cache on the node say.
pub(super) fn can_be_virtual(ip: IpAddr) -> bool {
    let is_link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    !(ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() || is_link_local)
}

/// Parses a CIDR; bits beyond the prefix are cleared.
pub fn parse_cidr(text: &str) -> Option<IpNet> {
    let (address, prefix) = text.split_once('/')?;
    let prefix = parse_decimal(prefix)?;
    let net = match parse_ip_as_written(address)? {
        IpAddr::V4(v4) => IpNet::V4(Ipv4Net::new(v4, u8::try_from(prefix).ok()?).ok()?),
        IpAddr::V6(v6) => match v6.to_ipv4_mapped() {
            // A prefix that leaves the mapped range would mean all of IPv4 and more: nobody writes that on purpose.
            Some(v4) => {
                let prefix = u8::try_from(prefix).ok()?.checked_sub(96)?;
                IpNet::V4(Ipv4Net::new(v4, prefix).ok()?)
            }
            None => IpNet::V6(Ipv6Net::new(v6, u8::try_from(prefix).ok()?).ok()?),
        },
    };
    Some(net.trunc())
}

fn parse_ip_as_written(text: &str) -> Option<IpAddr> {
    // The common case first: the parser of the standard library takes all that is written canonically.
    if let Ok(ip) = text.parse() {
        return Some(ip);
    }
    let Some((head, tail)) = text.rsplit_once(':') else {
        return parse_ipv4(text).map(IpAddr::V4);
    };
    let [a, b, c, d] = parse_ipv4(tail)?.octets();
    let (high, low) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
    format!("{head}:{high:x}:{low:x}").parse::<Ipv6Addr>().ok().map(IpAddr::V6)
}

fn parse_ipv4(text: &str) -> Option<Ipv4Addr> {
    let mut octets = [0; 4];
    let mut parts = text.split('.');
    for octet in &mut octets {
        *octet = u8::try_from(parse_decimal(parts.next()?)?).ok()?;
    }
    parts.next().is_none().then(|| octets.into())
}

/// Digits only: no sign, no blank; leading zeros allowed.
fn parse_decimal(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        for (text, expected) in [
            ("10.96.0.1", Some("10.96.0.1")),
            ("010.096.000.001", Some("10.96.0.1")),
            ("0010.1.1.1", Some("10.1.1.1")),
            ("fd00::1", Some("fd00::1")),
            ("FD00:0:0:0:0:0:0:1", Some("fd00::1")),
            ("::ffff:10.0.0.1", Some("10.0.0.1")),
            ("::ffff:010.0.0.01", Some("10.0.0.1")),
            ("::ffff:a00:1", Some("10.0.0.1")),
            ("64:ff9b::10.0.0.1", Some("64:ff9b::a00:1")),
            ("", None),
            ("10.0.0", None),
            ("10.0.0.256", None),
            ("10.0.0.1.2", None),
            ("10.0.0.+1", None),
            (" 10.0.0.1", None),
            ("fe80::1%eth0", None),
            ("example.com", None),
            ("10.0.0.1:80", None),
            ("99999999999.0.0.1", None),
        ] {
            assert_eq!(parse_ip(text), expected.map(|ip| ip.parse().unwrap()), "{text:?}");
        }
    }

    #[test]
    fn addresses_of_services() {
        for (text, expected) in [
            ("10.96.0.1", true),
            ("203.0.113.1", true),
            ("169.254.20.10", true),
            ("fd00::1", true),
            ("2001:db8::1", true),
            ("127.0.0.1", false),
            ("127.1.2.3", false),
            ("::ffff:127.0.0.1", false),
            ("0.0.0.0", false),
            ("224.0.0.251", false),
            ("::1", false),
            ("::", false),
            ("fe80::1", false),
            ("ff02::1", false),
        ] {
            assert_eq!(parse_ip(text).map(can_be_virtual), Some(expected), "{text}");
        }
    }

    #[test]
    fn cidrs() {
        for (text, expected) in [
            ("10.0.0.0/8", Some("10.0.0.0/8")),
            ("10.1.2.3/8", Some("10.0.0.0/8")),
            ("010.1.2.3/08", Some("10.0.0.0/8")),
            ("0.0.0.0/0", Some("0.0.0.0/0")),
            ("fd00:1::2/64", Some("fd00:1::/64")),
            ("::ffff:10.1.2.3/104", Some("10.0.0.0/8")),
            ("::ffff:10.1.2.3/64", None),
            ("10.0.0.0/33", None),
            ("10.0.0.0/", None),
            ("10.0.0.0", None),
            ("10.0.0.0/-1", None),
            ("10.0.0.0/8/8", None),
            ("fd00::/129", None),
            ("10.0.0.0/264", None),
        ] {
            assert_eq!(parse_cidr(text), expected.map(|net| net.parse().unwrap()), "{text:?}");
        }
    }
}
