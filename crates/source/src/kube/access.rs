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

const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
const EXPIRES_SOON: Duration = Duration::from_secs(60);
/// Until a plugin that failed is asked again for what is still good.
const AGAIN: Duration = Duration::from_secs(20);
/// A plugin that asks a cloud for a token takes a second or two. Tests have no time to wait for one that hangs.
const PLUGIN_PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 30 });

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
                "plugin /does/not/exist",
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

    /// A kubeconfig whose plugin is this shell script, in a folder of its own.
    fn with_plugin(script: &str) -> (tempfile::TempDir, Settings) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        let exec = serde_json::json!({
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "sh",
            "args": ["-c", script.replace("FOLDER", &folder.path().display().to_string())],
            "interactiveMode": "Never",
        });
        std::fs::write(&path, kubeconfig(&format!("exec: {exec}"))).unwrap();
        (folder, Settings { kubeconfig: Some(path), ..Settings::default() })
    }

    #[test]
    fn a_plugin_that_hangs_is_told_by_its_name() {
        let begun = std::time::Instant::now();
        let (_folder, settings) = with_plugin("sleep 15 & wait");
        let sentence = open(settings).err().expect("it is refused").to_string();
        assert!(sentence.contains("plugin sh") && sentence.contains("answer"), "{sentence}");
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    }

    #[test]
    fn of_several_who_need_a_plugin_one_runs_it() {
        let answer = r#"{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "x"}}"#;
        for end in ["true", "test ! -e FOLDER/fails"] {
            let (folder, settings) =
                with_plugin(&format!("echo run >> FOLDER/runs; sleep 0.2; echo '{answer}'; {end}"));
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let access = Access::open(settings).await.unwrap();
                std::fs::write(folder.path().join("fails"), "").unwrap();
                tokio::join!(access.renew(0), access.renew(0), access.renew(0), access.renew(0));
            });
            let runs = std::fs::read_to_string(folder.path().join("runs")).unwrap().lines().count();
            assert_eq!(runs, 2, "at the start, and once more");
        }
    }

    /// What is sent for this user: the header we add, or that a token is left to the client.
    fn authorization(user: &str) -> Result<Option<String>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        std::fs::write(&path, kubeconfig(user)).unwrap();
        std::fs::write(folder.path().join("token"), "from-file\n").unwrap();
        let settings = Settings { kubeconfig: Some(path), ..Settings::default() };
        let access = open(settings).map_err(|error| error.to_string())?;
        let held = access.held();
        Ok(held.token.map(|token| token.to_str().unwrap().to_owned()))
    }

    #[test]
    fn a_token_file_comes_before_a_token() {
        let sent = |text: &str| Ok(Some(format!("Bearer {text}")));
        assert_eq!(authorization("token: own, tokenFile: token"), sent("from-file"));
        assert_eq!(authorization("token: own, tokenFile: missing"), sent("own"));
        assert_eq!(authorization("token: \"\", tokenFile: token"), sent("from-file"));
    }

    #[test]
    fn an_empty_text_is_nothing() {
        for user in [
            "token: \"\"",
            "tokenFile: \"\"",
            "username: \"\", password: \"\"",
            "client-certificate: \"\", client-key: \"\"",
            "client-certificate-data: \"\", client-key-data: \"\"",
        ] {
            assert_eq!(authorization(user), Ok(None), "{user}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        let text = "current-context: a\ncontexts: [{name: a, context: {cluster: c, user: u}}]\n\
             clusters: [{name: c, cluster: {server: \"https://10.0.0.1\", certificate-authority: \"\",\n\
             certificate-authority-data: \"\", tls-server-name: \"\", proxy-url: \"\"}}]\n\
             users: [{name: u, user: {token: \"\", username: \"\", password: \"\"}}]\n";
        std::fs::write(&path, text).unwrap();
        let settings = Settings { kubeconfig: Some(path), ..Settings::default() };
        let (config, files) = configure(&settings).unwrap();
        assert_eq!((config.root_cert, config.tls_server_name, files.len()), (None, None, 1));
        let user = config.auth_info;
        assert!(user.token.is_none() && user.username.is_none() && user.password.is_none());
    }

    #[test]
    fn a_server_without_scheme_or_sense_panics_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        let open = |server: &str| {
            std::fs::write(&path, kubeconfig("").replace("http://127.0.0.1:1", server)).unwrap();
            open(Settings { kubeconfig: Some(path.clone()), ..Settings::default() })
        };
        assert_eq!(&*open("127.0.0.1:8001").unwrap().held().host, "127.0.0.1:8001");
        for server in ["", "/path", "ftp://x", "https://", "http://a b"] {
            let sentence = open(server).err().expect("it is refused").to_string();
            assert!(sentence.contains("server") && sentence.contains("kubeconfig"), "{sentence}");
        }
    }
}
