// SPDX-License-Identifier: Apache-2.0

//! The set: a lab with pods that answer, a folder of manifests, and a proxy that serves it, as it would anywhere.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::Path,
    time::{Duration, Instant},
};

use lab::{Lab, Layout, Transport, address};

use crate::{
    app::{Proxy, Setup},
    config::check,
    flags::Options,
    status::Status,
};

/// The sample manifests, as they are in the repository.
const MANIFESTS: [(&str, &str); 3] = [
    ("services.yaml", include_str!("../../../../../examples/services.yaml")),
    ("endpoints.yaml", include_str!("../../../../../examples/endpoints.yaml")),
    ("dns.yaml", include_str!("../../../../../examples/dns.yaml")),
];
/// How long a first commit may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// A change is in force when no further commit follows for so long.
const QUIET: Duration = Duration::from_millis(150);

/// See the module. Everything goes when it is dropped.
pub(super) struct Stage {
    /// Before the lab, so that it is gone when the namespaces go.
    pub(super) proxy: Proxy,
    pub(super) lab: Lab,
    folder: tempfile::TempDir,
}

/// A change that is in the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    /// From the save of the file to the commit, the longest if there were several.
    pub(super) took: Duration,
    /// When it was in force.
    pub(super) at: Instant,
}

impl Stage {
    /// Builds all of it. The error is one sentence.
    pub(super) fn build() -> Result<Stage, String> {
        let mut lab = Lab::build(Layout::default()).map_err(|error| privileges(&error))?;
        for pod in super::PODS {
            let ip = address::address_of(pod).ok_or_else(|| format!("the lab has no pod {pod}"))?;
            for (transport, port) in [(Transport::Tcp, 8080), (Transport::Udp, 5353)] {
                let at = SocketAddr::new(IpAddr::V4(ip), port);
                lab.respond(pod, transport, at).map_err(|error| error.to_string())?;
            }
        }
        let folder = tempfile::Builder::new().prefix("portolan-demo-").tempdir();
        let folder = folder.map_err(|error| format!("cannot make a temporary folder: {error}"))?;
        for (name, text) in MANIFESTS {
            save(&folder.path().join(name), text)?;
        }
        let netns = lab
            .netns("node-a")
            .and_then(|netns| Ok(netns.try_clone()?))
            .map_err(|error| error.to_string())?;
        let proxy = Proxy::start(setup(folder.path(), netns)?)?;
        Ok(Stage { proxy, lab, folder })
    }

    /// Waits until the services are in force.
    pub(super) fn first_commit(&self) -> Result<(), String> {
        match self.proxy.status.commit_after(0, PATIENCE) {
            Some(_) => Ok(()),
            None => Err(match self.proxy.status.report(std::time::SystemTime::now()).failure {
                Some(failure) => format!("the services could not be programmed: {failure}"),
                None => "the services were not in force in time".to_owned(),
            }),
        }
    }

    /// Saves the manifests without a pod's address, or with it again, one after the other; returns when the
    /// change is in the kernel.
    pub(super) fn save(&self, without: Option<&str>) -> Result<Change, String> {
        let mut change: Option<Change> = None;
        for (name, text) in MANIFESTS.iter().filter(|(name, _)| *name != "services.yaml") {
            let text = match without.and_then(address::address_of) {
                Some(address) => remove(text, &address.to_string()),
                None => (*text).to_owned(),
            };
            let seen = self.proxy.status.commits();
            let saved = Instant::now();
            save(&self.folder.path().join(name), &text)?;
            let at = settled(&self.proxy.status, seen)
                .ok_or_else(|| format!("{name} was saved, but nothing followed"))?;
            let took =
                at.saturating_duration_since(saved).max(change.map_or(Duration::ZERO, |change| change.took));
            change = Some(Change { took, at });
        }
        change.ok_or_else(|| "there is nothing to change".to_owned())
    }
}

/// When the last of the commits was done that follow the first `seen`.
fn settled(status: &Status, seen: u64) -> Option<Instant> {
    let (mut seen, mut at) = status.commit_after(seen, PATIENCE)?;
    while let Some((now, later)) = status.commit_after(seen, QUIET) {
        (seen, at) = (now, later);
    }
    Some(at)
}

/// The same command line as anywhere, but for the servers: their ports are in the outer namespace.
fn setup(folder: &Path, netns: netlink::Netns) -> Result<Setup, String> {
    let source = format!("--source=file:{}", folder.display());
    let args = [
        source.as_str(),
        "--hostname-override=node-a",
        "--cluster-cidr=10.244.0.0/16",
        "--healthz-port=0",
        "--metrics-port=0",
    ];
    let (mut options, _) = Options::parse(&args.map(str::to_owned))?;
    options.complete()?;
    let checked = check::check(&options.config).map_err(|wrong| format!("{wrong:?}"))?;
    let flags = options.listing();
    let Options { config, source, master, .. } = options;
    Ok(Setup { config, checked, source, master, flags, netns: Some(netns) })
}

/// As editors save: beside, then over it.
fn save(path: &Path, text: &str) -> Result<(), String> {
    let beside = path.with_extension("saving");
    let saved = fs::write(&beside, text).and_then(|()| fs::rename(&beside, path));
    saved.map_err(|error| format!("cannot write {}: {error}", path.display()))
}

/// Takes an endpoint out of a manifest: its line in an EndpointSlice, or its entry in our annotation.
fn remove(text: &str, address: &str) -> String {
    let in_slice = format!("[{address}]");
    let in_annotation = format!("{address}:");
    let mut out = String::new();
    for line in text.lines().filter(|line| !line.contains(&in_slice)) {
        match line.split_once('"') {
            Some((head, list)) if line.contains(&in_annotation) => {
                let kept: Vec<&str> = list
                    .trim_end_matches('"')
                    .split(", ")
                    .filter(|entry| !entry.starts_with(&in_annotation))
                    .collect();
                out.push_str(&format!("{head}\"{}\"", kept.join(", ")));
            }
            _ => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

fn privileges(error: &lab::Error) -> String {
    match error {
        lab::Error::Netlink(error) if error.is_permission() => {
            "the demo builds network namespaces and needs root: run `sudo portolan demo`".to_owned()
        }
        error => format!("cannot build the cluster of namespaces: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_taken_out_of_every_manifest() {
        for (name, text) in MANIFESTS {
            let without = remove(text, "10.244.2.1");
            assert!(!without.contains("10.244.2.1:") && !without.contains("10.244.2.1]"), "{name}");
            assert_eq!(text.contains("10.244.2.1"), name != "services.yaml", "{name}");
            assert_eq!(without.matches("10.244.2.2").count(), text.matches("10.244.2.2").count(), "{name}");
            assert_eq!(remove(text, "10.244.9.9"), text, "{name}");
        }
    }
}
