// SPDX-License-Identifier: Apache-2.0

//! What a configuration is compared with: another file, what a running proxy tells of itself, or the defaults.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{Request, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::{net::TcpStream, time::timeout};

use crate::{
    config::{Config, decode::decode, own::Own},
    syntax::parse_socket,
};

/// A proxy on this node answers at once or not at all.
const PATIENCE: Duration = Duration::from_secs(2);
/// No configuration is larger than this.
const LARGEST: usize = 1 << 20;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Baseline {
    Defaults,
    File(PathBuf),
    Running(SocketAddr),
}

impl fmt::Display for Baseline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Baseline::Defaults => f.write_str("the defaults"),
            Baseline::File(path) => write!(f, "{}", path.display()),
            Baseline::Running(address) => write!(f, "the proxy that runs now (at {address})"),
        }
    }
}

/// Those of the mode, so that what hangs on the mode is not told as a change; but the mode itself is.
pub(super) fn defaults(mode: &str) -> (Baseline, Config) {
    let [mut config, mut plain] = [Config::with_defaults(), Config::with_defaults()];
    mode.clone_into(&mut config.mode);
    config.settle();
    plain.settle();
    (Baseline::Defaults, Config { mode: plain.mode, ..config })
}

/// Another file, with our own settings beside it. Whether those are right is not the question here.
pub(super) fn file(path: &Path) -> Result<(Baseline, Config), String> {
    let failed = |reason: String| format!("cannot read {}: {reason}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let mut config = decode(&text).map_err(failed)?.config;
    let own = Own::beside(path).and_then(|own| Own::decode(&std::fs::read_to_string(own).ok()?).ok());
    if let Some(mode) = own.and_then(|own| own.mode) {
        config.mode = mode;
    }
    config.settle();
    Ok((Baseline::File(path.to_owned()), config))
}

/// What the proxy whose metrics are at this address says of itself; kube-proxy says the same in the same place.
pub(super) fn running(address: &str) -> Result<(Baseline, Config), String> {
    let address = parse_socket(address).ok_or_else(|| format!("{address:?} is not IP:port"))?;
    let address = here(address);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot start threads: {error}"))?;
    let answer = runtime.block_on(async { timeout(PATIENCE, ask(address)).await });
    let failed = |reason: &str| format!("cannot ask the proxy at {address} for its configuration: {reason}");
    let bytes = answer.map_err(|_| failed("no answer"))?.map_err(|error| failed(&error.to_string()))?;
    let value: Value = serde_json::from_slice(&bytes).map_err(|_| failed("the answer is no JSON"))?;
    let config = decode(&value["kubeproxy.config.k8s.io"].to_string()).map_err(|reason| failed(&reason))?;
    let mut config = config.config;
    config.settle();
    Ok((Baseline::Running(address), config))
}

/// Where a server that listens everywhere is to be found.
fn here(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

async fn ask(address: SocketAddr) -> Result<Bytes, Box<dyn std::error::Error + Send + Sync>> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = Request::get("/configz").header("Host", address.to_string()).body(Empty::<Bytes>::new())?;
    let response = sender.send_request(request).await?;
    if !response.status().is_success() {
        return Err(format!("it answers {}", response.status()).into());
    }
    Ok(Limited::new(response.into_body(), LARGEST).collect().await?.to_bytes())
}
