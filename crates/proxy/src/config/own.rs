// SPDX-License-Identifier: Apache-2.0

//! Settings that kube-proxy knows nothing of: `PortolanConfiguration` of `portolan.dev/v1alpha1`.
//!
//! They stand in a file of their own, `portolan.conf` beside kube-proxy's configuration (a second key of the same
//! ConfigMap), which kube-proxy never opens: so that the ConfigMap that runs us still runs kube-proxy, should one
//! have to go back. The file is ours alone, so that nobody is served by leniency: an unknown field is an error.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::Value;

use super::{
    decode::{sentence, typed},
    tree::{Document, Misfit, Reason},
};
use crate::syntax::GoDuration;

/// The group and version of the type.
pub const API_VERSION: &str = "portolan.dev/v1alpha1";
/// Its kind.
pub const KIND: &str = "PortolanConfiguration";
/// The name it has beside kube-proxy's configuration.
pub const FILE_NAME: &str = "portolan.conf";

/// Each counted endpoint costs the kernel some 5 us when it is loaded and 16 bytes on each processor.
pub const COUNTED_ENDPOINTS: u32 = 10_000;

/// See the module. What is left out is as if there were no file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Own {
    pub api_version: String,
    pub kind: String,
    /// Beats the mode of kube-proxy's configuration.
    pub mode: Option<String>,
    /// Connections are counted for metrics as long as frontends have no more endpoints than this; 0: not at all.
    pub counted_endpoints: Option<u32>,
    /// The API server's `--service-node-port-range`, to tell whether this node gives its ports away.
    pub node_port_range: Option<PortRange>,
    /// Where Services come from: `kubernetes`, or `file:PATH`.
    pub source: Option<Source>,
    /// What to do instead where the kernel cannot do ipvs: `iptables`, `nftables`, or `none`.
    pub ipvs_fallback: Option<Fallback>,
    /// In userspace mode: a UDP flow without datagrams for so long is forgotten.
    pub udp_timeout: Option<GoDuration>,
    /// In userspace mode: open connections may go on for so long after SIGTERM.
    pub userspace_drain: Option<GoDuration>,
    /// In userspace mode: listen on the service addresses themselves, without a packet filter.
    pub userspace_bind: Option<bool>,
}

/// The mode to take where the kernel cannot do ipvs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fallback {
    /// As kube-proxy did of old; nftables where iptables is not to be had.
    #[default]
    Iptables,
    Nftables,
    /// None: the process ends.
    None,
}

/// Where Services and EndpointSlices come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// The API server.
    #[default]
    Kubernetes,
    /// A file or a folder of manifests.
    File(PathBuf),
}

/// From the first port to the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    pub first: u16,
    pub last: u16,
}

impl Default for PortRange {
    /// That of the API server.
    fn default() -> PortRange {
        PortRange { first: 30_000, last: 32_767 }
    }
}

impl Own {
    /// Reads YAML or JSON. The error is one line, with each place in the text that it speaks of.
    pub fn decode(text: &str) -> Result<Own, String> {
        let document = Document::parse(text, KIND)?;
        let own = Own::fit(&document).map_err(|misfits| sentence(&misfits))?;
        typed(("kind", &own.kind, KIND))?;
        typed(("apiVersion", &own.api_version, API_VERSION))?;
        Ok(own)
    }

    /// The same without a look at the kind; every field that is wrong is told.
    pub(super) fn fit(document: &Document) -> Result<Own, Vec<Misfit>> {
        let known = Own { mode: Some(String::new()), ..Own::default() };
        let known = serde_json::to_value(known).expect("plain fields have a JSON form");
        let strays = document.strays(&known, "").into_iter().map(|stray| Misfit {
            says: match stray.reason {
                Reason::Unknown => "unknown field".to_owned(),
                Reason::Duplicate => "is set twice".to_owned(),
            },
            line: stray.line,
            field: stray.field,
        });
        let mut wrong: Vec<Misfit> = strays.collect();
        match document.fit::<Own>() {
            Ok(own) if wrong.is_empty() => return Ok(own),
            Ok(_) => {}
            Err(misfits) => wrong.extend(misfits),
        }
        wrong.sort_by_key(|misfit| misfit.line);
        Err(wrong)
    }

    /// The file beside this configuration of kube-proxy, if there is one.
    pub fn beside(config: &Path) -> Option<PathBuf> {
        let path = config.with_file_name(FILE_NAME);
        path.exists().then_some(path)
    }
}

impl FromStr for Source {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Source, &'static str> {
        match text.strip_prefix("file:") {
            Some(path) if !path.is_empty() => Ok(Source::File(path.into())),
            None if text == "kubernetes" => Ok(Source::Kubernetes),
            _ => Err("must be kubernetes, or file:PATH"),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Kubernetes => f.write_str("kubernetes"),
            Source::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

impl FromStr for Fallback {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Fallback, &'static str> {
        match text {
            "iptables" => Ok(Fallback::Iptables),
            "nftables" => Ok(Fallback::Nftables),
            "none" => Ok(Fallback::None),
            _ => Err("must be iptables, nftables or none"),
        }
    }
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fallback::Iptables => "iptables",
            Fallback::Nftables => "nftables",
            Fallback::None => "none",
        })
    }
}

impl FromStr for PortRange {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<PortRange, &'static str> {
        let (first, last) = text.split_once('-').ok_or(PORT_RANGE)?;
        match (first.parse(), last.parse()) {
            (Ok(first), Ok(last)) if 0 < first && first <= last => Ok(PortRange { first, last }),
            _ => Err(PORT_RANGE),
        }
    }
}

const PORT_RANGE: &str = "must be two ports from 1 to 65535, as in 30000-32767";

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

/// All are written as text.
macro_rules! as_text {
    ($($type:ty),*) => {$(
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$type, D::Error> {
                match Value::deserialize(deserializer)? {
                    Value::String(text) => text.parse().map_err(de::Error::custom),
                    _ => Err(de::Error::custom("must be a string")),
                }
            }
        }
    )*};
}

as_text!(Source, PortRange, Fallback);

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "apiVersion: portolan.dev/v1alpha1\nkind: PortolanConfiguration\n";

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(Own::decode(HEAD).expect("nothing is needed").source, None);
        let text = format!(
            "{HEAD}mode: nftables\nsource: file:/etc/services.d\nnodePortRange: 30000-30999\ncountedEndpoints: 5\n"
        );
        let own = Own::decode(&text).expect("valid");
        assert_eq!(own.mode.as_deref(), Some("nftables"));
        assert_eq!(own.counted_endpoints, Some(5));
        assert_eq!(own.source, Some(Source::File("/etc/services.d".into())));
        assert_eq!(own.node_port_range, Some(PortRange { first: 30_000, last: 30_999 }));
        let again = serde_saphyr::to_string(&own).expect("plain");
        assert_eq!(Own::decode(&again).expect("what we write we read"), own);
    }

    #[test]
    fn everything_wrong_is_told_with_its_line() {
        for (body, says) in [
            ("mod: nftables\n", "line 3: mod: unknown field"),
            ("mode: a\nmode: b\n", "line 4: mode: is set twice"),
            ("source: files\n", "line 3: source: must be kubernetes, or file:PATH"),
            ("nodePortRange: 30000\n", "line 3: nodePortRange: must be a string"),
            ("nodePortRange: 0-5\n", "line 3: nodePortRange: must be two ports"),
            ("nodePortRange: 9-5\n", "line 3: nodePortRange: must be two ports"),
            ("ipvsFallback: ipvs\n", "line 3: ipvsFallback: must be iptables, nftables or none"),
            ("userspaceDrain: 25\n", "line 3: userspaceDrain: "),
            ("userspaceBind: perhaps\n", "line 3: userspaceBind: "),
            ("x: 1\nsource: 5\n", "line 3: x: unknown field; line 4: source: must be a string"),
        ] {
            let error = Own::decode(&format!("{HEAD}{body}")).expect_err(body);
            assert!(error.contains(says) && !error.contains('\n'), "{body:?} -> {error}");
        }
        for text in ["", "[]", "kind: PortolanConfiguration\n", "apiVersion: portolan.dev/v1alpha1\n"] {
            Own::decode(text).expect_err(text);
        }
        let kube_proxys = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
        assert!(Own::decode(kube_proxys).expect_err("another kind").contains("PortolanConfiguration"));
    }

    #[test]
    fn it_stands_beside_the_configuration() {
        let folder = tempfile::tempdir().expect("a folder");
        let config = folder.path().join("config.conf");
        assert_eq!(Own::beside(&config), None);
        std::fs::write(folder.path().join(FILE_NAME), HEAD).expect("written");
        assert_eq!(Own::beside(&config), Some(folder.path().join(FILE_NAME)));
    }
}
