// SPDX-License-Identifier: Apache-2.0

//! Who we are to the API server, and how to reach it. The `kube` crate knows kubeconfigs and does TLS; what it does
//! not do is notice that a client certificate, a CA or the kubeconfig itself was replaced on disk. So the client is
//! made anew then, before what a plugin gave expires, and when the server no longer knows us. Token files are read here for each request, since `kube` takes the newline at the
//! end of one for a part of the token.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use data_encoding::BASE64;
use http::HeaderValue;
use kube::{
    Client, Config,
    config::{AuthInfo, ExecConfig},
};
use secrecy::ExposeSecret as _;
use tokio::time::Instant;

use super::{
    connect,
    environment::Environment,
    exchange::Observer,
    exec,
    kubeconfig::{self, Seen, Stamp, server_url},
};

/// Where the API server is and who we are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// `--kubeconfig`. Without it and without `master`: the service account of the pod we run in.
    pub kubeconfig: Option<PathBuf>,
    /// `--master`: overrides the server of the kubeconfig.
    pub master: Option<String>,
    /// Ask for JSON instead of protobuf.
    pub json: bool,
    pub user_agent: String,
    pub environment: Environment,
}

/// Why there can be no client. Each is one sentence that says what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot use the kubeconfig {path}: {reason}")]
    Kubeconfig { path: PathBuf, reason: String },
    #[error("--master {url} is not a URL such as https://10.0.0.1:6443: {reason}")]
    Master { url: String, reason: String },
    #[error(
        "not running in a pod with a service account ({reason}); name a kubeconfig with --kubeconfig, or serve files with --source file:PATH"
    )]
    InCluster { reason: String },
    #[error("cannot read a token from {path}; it must hold one line of text")]
    Token { path: PathBuf },
    #[error("cannot use the credential plugin {command}: {reason}")]
    Plugin { command: String, reason: String },
    #[error("cannot make a client for the API server: {reason}")]
    Client { reason: String },
}

/// A client that follows its credentials.
pub struct Access {
    settings: Settings,
    held: Mutex<Held>,
    /// Held by who renews, and how often that was tried: one attempt is enough for all who wait for it.
    renewing: tokio::sync::Mutex<()>,
    attempts: AtomicU64,
    pub(super) observer: OnceLock<Observer>,
}

#[derive(Clone)]
struct Held {
    client: Client,
    host: Arc<str>,
    /// Counts the clients made, so that of several tasks that were refused only the first makes a new one.
    generation: u64,
    files: Vec<Seen>,
    token_file: Option<PathBuf>,
    /// As last read. Kept when the file is gone: some are removed once they have been read.
    token: Option<HeaderValue>,
    /// When what a plugin gave is no longer good.
    expires: Option<SystemTime>,
    /// When a plugin was last asked in vain.
    failed: Option<Instant>,
}

/// What the next request needs.
#[derive(Clone)]
pub(crate) struct Pass {
    pub(crate) client: Client,
    /// Where the server is: host and port.
    pub(crate) host: Arc<str>,
    /// For [`Access::renew`].
    pub(crate) generation: u64,
    /// The value of the Authorization header, unless the client adds one itself.
    pub(crate) authorization: Option<HeaderValue>,
}

impl Access {
    /// Reads the configuration. Does not connect.
    pub async fn open(settings: Settings) -> Result<Access, Error> {
        let held = make(&settings).await?;
        Ok(Access {
            settings,
            held: Mutex::new(held),
            renewing: tokio::sync::Mutex::default(),
            attempts: AtomicU64::new(0),
            observer: OnceLock::new(),
        })
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What to use for the next request.
    pub(crate) async fn pass(&self) -> Pass {
        let held = self.held();
        if held.files.iter().any(|(path, stamp)| Stamp::of(path) != *stamp) {
            tracing::info!("credentials for the API server have changed on disk: reading them again");
            self.renew(held.generation).await;
        } else if held.expires_soon() {
            tracing::info!("what the credential plugin gave expires: asking it again");
            self.renew(held.generation).await;
        }
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(token) = held.token_file.as_deref().and_then(read_token) {
            held.token = Some(token);
        }
        Pass {
            client: held.client.clone(),
            host: Arc::clone(&held.host),
            generation: held.generation,
            authorization: held.token.clone(),
        }
    }

    /// Makes a new client, unless that was done since `generation`, or was just tried by somebody else. If it cannot be
    /// made (a file is just being replaced), the old one stays.
    pub(crate) async fn renew(&self, generation: u64) {
        let before = self.attempts.load(Ordering::Relaxed);
        let _alone = self.renewing.lock().await;
        if self.held().generation != generation || self.attempts.load(Ordering::Relaxed) != before {
            return;
        }
        let made = make(&self.settings).await;
        self.attempts.fetch_add(1, Ordering::Relaxed);
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        match made {
            Ok(made) => *held = Held { generation: generation + 1, ..made },
            Err(error) => {
                held.failed = Some(Instant::now());
                tracing::warn!("keeping the credentials in use: {error}");
            }
        }
    }

    fn held(&self) -> Held {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Held {
    /// Whether to ask the plugin again; not at once after it failed, since what it gave is still good for a while.
    fn expires_soon(&self) -> bool {
        let is_soon = |end: SystemTime| end <= SystemTime::now() + EXPIRES_SOON;
        self.expires.is_some_and(is_soon) && self.failed.is_none_or(|failed| failed.elapsed() >= AGAIN)
    }
}

async fn make(settings: &Settings) -> Result<Held, Error> {
    let (mut config, files) = configure(settings)?;
    let (given, expires) = match plugin_of(&mut config.auth_info) {
        Some(plugin) => ask(plugin, &mut config.auth_info).await?,
        None => (None, None),
    };
    let host = config.cluster_url.authority().map_or("", |authority| authority.as_str()).into();
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    // Where no authority is given `kube` wants those of the system, and fails without them even if nobody asks them.
    let is_plain = |url: &http::Uri| url.scheme_str() == Some("http");
    let asks_nobody = is_plain(&config.cluster_url) && config.proxy_url.as_ref().is_none_or(is_plain);
    if config.root_cert.is_none() && (asks_nobody || config.accept_invalid_certs) {
        config.root_cert = Some(Vec::new());
    }
    // Retrying is this module's business: with backoff, and with the answer in the status.
    config.default_retry = false;
    let token_file = config.auth_info.token_file.take().map(PathBuf::from);
    // As in client-go, a file comes before a token, which is for when the file cannot be read.
    let own = config.auth_info.token.take_if(|_| token_file.is_some());
    let own = own.and_then(|token| bearer(token.expose_secret()));
    // Files are read in there, and a token that cannot be sent makes it panic. The stamps were taken before the files
    // are read into the client, so that a change in between is seen.
    let client = tokio::task::spawn_blocking(move || connect::client(config)).await;
    let client = client
        .map_err(|_| Error::Client { reason: "its token or password is more than one line of text".into() })?
        .map_err(|error| Error::Client { reason: sentence(&error) })?;
    let token = match &token_file {
        None => given,
        Some(path) => Some(read_token(path).or(own).ok_or_else(|| Error::Token { path: path.clone() })?),
    };
    Ok(Held { client, host, generation: 0, files, token_file, token, expires, failed: None })
}

/// The plugin to ask, if there is one: as in client-go, what stands in the kubeconfig itself comes first.
fn plugin_of(user: &mut AuthInfo) -> Option<ExecConfig> {
    let has_own = user.token.is_some() || user.token_file.is_some() || user.username.is_some();
    user.exec.take().filter(|_| !has_own)
}

/// Asks a plugin. A certificate is put where the client looks for one; the token, and the end of both, are returned.
async fn ask(
    plugin: ExecConfig,
    user: &mut AuthInfo,
) -> Result<(Option<HeaderValue>, Option<SystemTime>), Error> {
    let command = plugin.command.clone().unwrap_or_default();
    let answer = tokio::task::spawn_blocking(move || exec::run(&plugin, PLUGIN_PATIENCE)).await;
    let answer = answer.unwrap_or_else(|_| Err("asking it panicked".into()));
    let credential = answer.map_err(|reason| Error::Plugin { command, reason })?;
    if let Some((certificate, key)) = credential.certificate {
        user.client_certificate_data = Some(BASE64.encode(certificate.as_bytes()));
        user.client_key_data = Some(BASE64.encode(key.as_bytes()).into());
    }
    Ok((credential.token, credential.expires))
}

/// Where the server is, who we are, and the files that say so and are read only once.
fn configure(settings: &Settings) -> Result<(Config, Vec<Seen>), Error> {
    let (mut config, files) = match (&settings.kubeconfig, &settings.master) {
        (Some(path), master) => kubeconfig::read(path, master.as_deref())?,
        (None, Some(url)) => {
            let server = server_url(url).map_err(|reason| Error::Master { url: url.clone(), reason })?;
            (Config::new(server), Vec::new())
        }
        (None, None) => {
            let config = kubeconfig::in_cluster(&settings.environment, Path::new(SERVICE_ACCOUNT))
                .map_err(|reason| Error::InCluster { reason })?;
            (config, Vec::new())
        }
    };
    if config.proxy_url.is_none() {
        config.proxy_url = settings.environment.proxy(&config.cluster_url);
    }
    Ok((config, files))
}

/// The token in a file, without the line end most have.
fn read_token(path: &Path) -> Option<HeaderValue> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.trim()).filter(|token| !token.is_empty()).and_then(bearer)
}

/// A token as the value of the Authorization header; none if it cannot be sent.
pub(super) fn bearer(token: &str) -> Option<HeaderValue> {
    let mut header = HeaderValue::try_from(format!("Bearer {token}")).ok()?;
    header.set_sensitive(true);
    Some(header)
}

/// An error with its causes, without line breaks.
pub(crate) fn sentence(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let mut texts: Vec<String> = Vec::new();
    for cause in causes {
        let text = cause.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        // Many errors print their cause themselves.
        if !text.is_empty() && !texts.iter().any(|said| said.contains(&text)) {
            texts.push(text);
        }
    }
    texts.join(": ")
}

/// Where kubelet mounts it.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
const EXPIRES_SOON: Duration = Duration::from_secs(60);
/// Until a plugin that failed is asked again for what is still good.
const AGAIN: Duration = Duration::from_secs(20);
/// A plugin that asks a cloud for a token takes a second or two. Tests have no time to wait for one that hangs.
const PLUGIN_PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 30 });

#[cfg(test)]
mod tests;
