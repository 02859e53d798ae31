// SPDX-License-Identifier: Apache-2.0

//! Who we are to the API server, and how to reach it. The `kube` crate reads kubeconfigs, runs exec plugins and
//! does TLS; what it does not do is notice that a client certificate, a CA or the kubeconfig itself was replaced
//! on disk, or that a certificate from an exec plugin expires. So the client is made anew then, and when the
//! server no longer knows us. Token files are read here for each request, since `kube` takes the newline at the
//! end of one for a part of the token.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::{Duration, SystemTime},
};

use http::HeaderValue;
use kube::{Client, Config};

use super::{
    connect,
    environment::Environment,
    exchange::Observer,
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
    #[error("cannot make a client for the API server: {reason}")]
    Client { reason: String },
}

/// A client that follows its credentials.
pub struct Access {
    settings: Settings,
    held: Mutex<Held>,
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
        Ok(Access { settings, held: Mutex::new(held), observer: OnceLock::new() })
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
            tracing::info!("the certificate for the API server expires: asking for another");
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

    /// Makes a new client, unless that was done since `generation`. If it cannot be made (a file is just being
    /// replaced), the old one stays.
    pub(crate) async fn renew(&self, generation: u64) {
        if self.held().generation != generation {
            return;
        }
        match make(&self.settings).await {
            Ok(made) => {
                let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
                if held.generation == generation {
                    *held = Held { generation: generation + 1, ..made };
                }
            }
            Err(error) => tracing::warn!("keeping the credentials in use: {error}"),
        }
    }

    fn held(&self) -> Held {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Held {
    /// Only certificates from exec plugins have a known end; `kube` renews tokens from them itself.
    fn expires_soon(&self) -> bool {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let end =
            self.client.valid_until().map(|end| Duration::from_secs(end.as_second().max(0).unsigned_abs()));
        end.is_some_and(|end| end <= now + EXPIRES_SOON)
    }
}

async fn make(settings: &Settings) -> Result<Held, Error> {
    let (mut config, files) = configure(settings)?;
    let host = config.cluster_url.authority().map_or("", |authority| authority.as_str()).into();
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    // Retrying is this module's business: with backoff, and with the answer in the status.
    config.default_retry = false;
    // A token in the kubeconfig itself comes first.
    let token_file = config.auth_info.token_file.take().filter(|_| config.auth_info.token.is_none());
    let token_file = token_file.map(PathBuf::from);
    // Exec plugins run in there, and a token that cannot be sent makes it panic. The stamps were taken before the
    // files are read into the client, so that a change in between is seen.
    let client = tokio::task::spawn_blocking(move || connect::client(config)).await;
    let client = client
        .map_err(|_| Error::Client { reason: "its token or password is more than one line of text".into() })?
        .map_err(|error| Error::Client { reason: sentence(&error) })?;
    let token = match &token_file {
        None => None,
        Some(path) => Some(read_token(path).ok_or_else(|| Error::Token { path: path.clone() })?),
    };
    Ok(Held { client, host, generation: 0, files, token_file, token })
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
            let config =
                Config::incluster().map_err(|error| Error::InCluster { reason: sentence(&error) })?;
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
    let token = Some(text.trim()).filter(|token| !token.is_empty())?;
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

const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
const EXPIRES_SOON: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    fn open(settings: Settings) -> Result<Access, Error> {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(Access::open(settings))
    }

    fn refusal(kubeconfig: &Path) -> String {
        let settings = Settings { kubeconfig: Some(kubeconfig.to_owned()), ..Settings::default() };
        open(settings).err().expect("it is refused").to_string()
    }

    #[test]
    fn bad_kubeconfigs_are_told_in_one_sentence() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        assert!(refusal(&path).contains("No such file"), "{}", refusal(&path));
        for (text, expected) in [
            ("{", "kubeconfig"),
            ("current-context: nowhere", "nowhere"),
            (
                "current-context: a\ncontexts: [{name: a, context: {cluster: gone, user: u}}]\nusers: [{name: u, user: {}}]",
                "gone",
            ),
            (
                "current-context: a\ncontexts: [{name: a, context: {cluster: c, user: u}}]\nclusters: [{name: c, cluster: {server: \"https://127.0.0.1:1\", certificate-authority-data: bm90IGEgY2VydGlmaWNhdGU=}}]\nusers: [{name: u, user: {}}]",
                "holds no PEM certificate",
            ),
        ] {
            std::fs::write(&path, text).unwrap();
            let sentence = refusal(&path);
            assert!(sentence.contains(expected) && !sentence.contains('\n'), "{sentence}");
            assert!(sentence.contains(&path.display().to_string()), "{sentence}");
        }
    }

    fn kubeconfig(user: &str) -> String {
        format!(
            "current-context: a\ncontexts: [{{name: a, context: {{cluster: c, user: u}}}}]\n\
             clusters: [{{name: c, cluster: {{server: \"http://127.0.0.1:1\"}}}}]\n\
             users: [{{name: u, user: {{{user}}}}}]\n"
        )
    }

    #[test]
    fn credentials_that_cannot_be_sent_are_told_in_one_sentence() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        for (user, expected) in [
            ("token: \"two\\nlines\"", "one line of text"),
            ("tokenFile: missing", "missing"),
            ("client-certificate: missing, client-key: missing", "missing"),
            ("client-certificate-data: bm8=, client-key-data: bm8=", "client"),
            (
                "exec: {apiVersion: client.authentication.k8s.io/v1, command: /does/not/exist, interactiveMode: Never}",
                "exec",
            ),
        ] {
            std::fs::write(&path, kubeconfig(user)).unwrap();
            let sentence = refusal(&path);
            assert!(sentence.contains(expected) && !sentence.contains('\n'), "{user}: {sentence}");
        }
    }

    #[test]
    fn a_token_file_is_read_for_each_request_and_may_go() {
        let folder = tempfile::tempdir().unwrap();
        let (path, token) = (folder.path().join("kubeconfig"), folder.path().join("token"));
        std::fs::write(&path, kubeconfig("tokenFile: token")).unwrap();
        std::fs::write(&token, "one\n").unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let settings = Settings { kubeconfig: Some(path), ..Settings::default() };
            let access = Access::open(settings).await.unwrap();
            let sent = async || access.pass().await.authorization.unwrap();
            assert_eq!(sent().await, "Bearer one");
            std::fs::write(&token, "two").unwrap();
            assert_eq!(sent().await, "Bearer two");
            std::fs::write(&token, "").unwrap();
            assert_eq!(sent().await, "Bearer two", "half-written");
            std::fs::remove_file(&token).unwrap();
            assert_eq!(sent().await, "Bearer two");
        });
    }

    #[test]
    fn a_proxy_of_the_kubeconfig_comes_before_those_of_the_environment() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        let text = |more: &str| {
            format!(
                "current-context: a\ncontexts: [{{name: a, context: {{cluster: c, user: u}}}}]\n\
                 clusters: [{{name: c, cluster: {{server: \"https://10.0.0.1:6443\"{more}}}}}]\n"
            )
        };
        let environment = Environment {
            https_proxy: Some("env:3128".into()),
            no_proxy: Some("10.0.0.2,10.0.0.3".into()),
            ..Environment::default()
        };
        for (more, master, expected) in [
            ("", None, Some("http://env:3128/")),
            ("", Some("https://10.0.0.2:6443"), None),
            (", proxy-url: \"\"", None, Some("http://env:3128/")),
            (", proxy-url: \"http://own:8080\"", None, Some("http://own:8080/")),
            (", proxy-url: \"http://own:8080\"", Some("10.0.0.2"), Some("http://own:8080/")),
        ] {
            std::fs::write(&path, text(more)).unwrap();
            let settings = Settings {
                kubeconfig: Some(path.clone()),
                master: master.map(str::to_owned),
                environment: environment.clone(),
                ..Settings::default()
            };
            let proxy = configure(&settings).unwrap().0.proxy_url.map(|uri| uri.to_string());
            assert_eq!(proxy.as_deref(), expected, "{more} {master:?}");
        }
        let settings =
            Settings { master: Some("https://10.0.0.3".into()), environment, ..Settings::default() };
        assert_eq!(configure(&settings).unwrap().0.proxy_url, None);
    }

    #[test]
    fn a_replaced_file_makes_a_new_client() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        let text = |port: u16| {
            format!(
                "current-context: a\ncontexts: [{{name: a, context: {{cluster: c, user: u}}}}]\n\
                 clusters: [{{name: c, cluster: {{server: \"http://127.0.0.1:{port}\"}}}}]\n\
                 users: [{{name: u, user: {{}}}}]\n"
            )
        };
        std::fs::write(&path, text(80)).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let settings = Settings { kubeconfig: Some(path.clone()), ..Settings::default() };
            let access = Access::open(settings).await.unwrap();
            assert_eq!(access.pass().await.generation, 0);
            std::fs::write(&path, text(8080)).unwrap();
            assert_eq!(access.pass().await.generation, 1);
            assert_eq!(access.pass().await.generation, 1);
            std::fs::write(&path, "half").unwrap();
            assert_eq!(access.pass().await.generation, 1, "a half-written file changes nothing");
        });
    }
}
