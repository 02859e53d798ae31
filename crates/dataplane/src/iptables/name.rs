// SPDX-License-Identifier: Apache-2.0

//! Names of chains, kube-proxy's own, hash for hash.

use std::{borrow::Borrow, fmt, fmt::Write as _};

use data_encoding::BASE32;
use model::{Backend, Reach, ServicePortName};
use sha2::{Digest as _, Sha256};

use crate::names::xt;

/// The name of a chain: 28 characters at most, the kernel's limit for jumps to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name {
    bytes: [u8; Name::LONGEST],
    len: u8,
}

impl Name {
    pub const LONGEST: usize = 28;

    /// `None` for what cannot be the name of a chain.
    pub fn new(text: &str) -> Option<Name> {
        let is_fit = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
        let mut bytes = [0; Name::LONGEST];
        bytes.get_mut(..text.len()).filter(|_| is_fit)?.copy_from_slice(text.as_bytes());
        Some(Name { bytes, len: u8::try_from(text.len()).ok()? })
    }

    /// One of our own.
    pub(crate) fn known(text: &str) -> Name {
        Name::new(text).expect("our own names are short and plain")
    }

    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }
}

impl Borrow<str> for Name {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The chain of a service port's pool: the one that has the endpoints of the cluster, or the one that has this node's.
/// A second one of the same kind it never has; it would get a name of its own.
pub(super) fn pool(service: &ServicePortName, reach: Reach, index: usize) -> Name {
    let prefix = match reach {
        Reach::Cluster => xt::SVC,
        Reach::Node => xt::SVL,
    };
    match index {
        0 => of(prefix, service, ""),
        more => of(prefix, service, &more.to_string()),
    }
}

/// The chain for external addresses.
pub(super) fn external(service: &ServicePortName) -> Name {
    of(xt::EXT, service, "")
}

/// The chain with the source ranges.
pub(super) fn firewall(service: &ServicePortName) -> Name {
    of(xt::FW, service, "")
}

/// The chain of an endpoint of a service port.
pub(super) fn endpoint(service: &ServicePortName, backend: &Backend) -> Name {
    of(xt::SEP, service, &backend.to_string())
}

fn of(prefix: &str, service: &ServicePortName, suffix: &str) -> Name {
    let mut text = service.to_string();
    let _ = write!(text, "{}{suffix}", service.protocol);
    hashed(prefix, &text)
}

/// A prefix and the first 16 characters of a SHA-256 in base 32.
fn hashed(prefix: &str, text: &str) -> Name {
    let hash = BASE32.encode(&Sha256::digest(text.as_bytes())[..10]);
    Name::known(&format!("{prefix}{hash}"))
}

#[cfg(test)]
mod tests {
    use model::{Protocol, ServiceKey};

    use super::*;

    fn port(name: &str) -> ServicePortName {
        let service = ServiceKey { namespace: "ns1".into(), name: "svc1".into() };
        ServicePortName { service, port: name.into(), protocol: Protocol::Tcp }
    }

    fn backend(at: &str) -> Backend {
        let at: std::net::SocketAddr = at.parse().unwrap();
        Backend { address: at.ip(), port: at.port(), local: false, weight: 1 }
    }

    #[test]
    fn hashes_are_kube_proxys() {
        let named = port("p80");
        assert_eq!(pool(&named, Reach::Cluster, 0).as_str(), "KUBE-SVC-XPGD46QRK7WJZT7O");
        assert_eq!(pool(&named, Reach::Node, 0).as_str(), "KUBE-SVL-XPGD46QRK7WJZT7O");
        assert_eq!(external(&named).as_str(), "KUBE-EXT-XPGD46QRK7WJZT7O");
        assert_eq!(firewall(&named).as_str(), "KUBE-FW-XPGD46QRK7WJZT7O");
        assert_eq!(endpoint(&named, &backend("10.180.0.1:80")).as_str(), "KUBE-SEP-SXIVWICOYRO3J4NJ");
        assert_eq!(endpoint(&named, &backend("[fd00::1]:80")).as_str(), "KUBE-SEP-T5UNFIPVCZXM3U7X");
        assert_eq!(pool(&port(""), Reach::Cluster, 0).as_str(), "KUBE-SVC-AQI2S6QIMU7PVVRP");
        assert_ne!(pool(&named, Reach::Node, 1), pool(&named, Reach::Node, 2));
    }

    /// Write-ups that people learn from show an unnamed port with the colon that kube-proxy wrote then.
    #[test]
    fn the_hashes_of_well_known_write_ups_come_out() {
        for (prefix, text, expected) in [
            (xt::SVC, "default/nginx:tcp", "KUBE-SVC-4N57TFCL4MD7ZTDA"),
            (xt::SEP, "default/nginx:tcp10.244.3.4:80", "KUBE-SEP-6QCC2MHJZP35QQAR"),
            (xt::SEP, "default/nginx:tcp10.244.2.4:80", "KUBE-SEP-TOYRWPNILILHH3OR"),
            (xt::SEP, "default/nginx:tcp10.244.1.2:80", "KUBE-SEP-UXHBWR5XIMVGXW3H"),
        ] {
            assert_eq!(hashed(prefix, text).as_str(), expected, "{text}");
        }
        let service = ServiceKey { namespace: "default".into(), name: "nginx".into() };
        let today = ServicePortName { service, port: "".into(), protocol: Protocol::Tcp };
        assert_eq!(pool(&today, Reach::Cluster, 0), hashed(xt::SVC, "default/nginxtcp"));
    }

    #[test]
    fn a_name_has_a_limit() {
        assert_eq!(Name::new("KUBE-PROXY-FIREWALL").unwrap().as_str(), "KUBE-PROXY-FIREWALL");
        assert!(Name::new(&"x".repeat(28)).is_some());
        assert!(Name::new(&"x".repeat(29)).is_none());
        assert!(Name::new("").is_none());
        assert!(Name::new("a b").is_none());
    }
}
