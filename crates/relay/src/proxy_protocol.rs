// SPDX-License-Identifier: Apache-2.0

//! The header of the PROXY protocol, version 2: <https://www.haproxy.org/download/1.8/doc/proxy-protocol.txt>.

use std::net::SocketAddr;

const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// Version 2, command PROXY.
const PROXY: u8 = 0x21;
const TCP4: u8 = 0x11;
const TCP6: u8 = 0x21;

/// What goes before a connection of our own, which carries no client's bytes: version 2, command LOCAL, no addresses.
pub(crate) const LOCAL: [u8; 16] = *b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0";

/// What goes before the first byte of a client's connection.
pub(crate) fn header(client: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    let mut header = SIGNATURE.to_vec();
    header.push(PROXY);
    match (client, destination) {
        (SocketAddr::V4(client), SocketAddr::V4(destination)) => {
            header.extend([TCP4, 0, 12]);
            header.extend(client.ip().octets());
            header.extend(destination.ip().octets());
        }
        _ => {
            let octets = |address: SocketAddr| match address {
                SocketAddr::V4(address) => address.ip().to_ipv6_mapped().octets(),
                SocketAddr::V6(address) => address.ip().octets(),
            };
            header.extend([TCP6, 0, 36]);
            header.extend(octets(client));
            header.extend(octets(destination));
        }
    }
    header.extend(client.port().to_be_bytes());
    header.extend(destination.port().to_be_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_the_length_it_says() {
        for (client, destination, len) in
            [("192.0.2.1:1000", "10.96.0.1:80", 28), ("[2001:db8::1]:1000", "[fd00::1]:80", 52)]
        {
            let header = header(client.parse().expect("client"), destination.parse().expect("destination"));
            assert_eq!(header.len(), len);
            assert_eq!(usize::from(header[15]) + 16, len);
            assert_eq!(header[len - 4..], [3, 232, 0, 80]);
        }
        let four = header("192.0.2.1:1000".parse().expect("client"), "10.96.0.1:80".parse().expect("there"));
        assert_eq!(four[..24], *b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xc0\0\x02\x01\x0a\x60\0\x01");
    }
}
