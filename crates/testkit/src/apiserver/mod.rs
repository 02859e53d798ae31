// SPDX-License-Identifier: Apache-2.0

//! A Kubernetes API server for tests: the real protocol over TLS on loopback, four kinds of object in memory,
//! and every sort of misbehaviour on command.
//!
//! It lists in pages, watches from a version, streams lists, selects by label and field, and speaks JSON and
//! protobuf; it has its own encoder, so that it can judge the product's decoder. It has threads of its own:
//! plain tests and asynchronous ones use it alike, and dropping it ends everything.
//!
//! ```no_run
//! # use testkit::apiserver::{ApiServer, Fault, Login, Mischief, When};
//! # let dir = std::path::Path::new("/nowhere");
//! let server = ApiServer::start();
//! server.misbehave(When::STREAM.of(model::Kind::EndpointSlice), 3, Mischief::Break { after: 2, with: Fault::Cut });
//! let kubeconfig = server.kubeconfig(dir, Login::Token);
//! ```

mod answer;
mod door;
mod event;
mod log;
mod mischief;
mod pump;
mod refusal;
mod resource;
mod schema;
mod selector;
mod shared;
mod store;
#[cfg(test)]
mod tests;
mod tls;
mod watch;
mod wire;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use bytes::Bytes;
use model::Kind;
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};
use tokio_rustls::TlsAcceptor;

use self::{
    door::{Door, Port},
    resource::Resource,
    selector::Selector,
    shared::Shared,
    tls::{Authority, Identity},
    wire::Encoding,
};
pub use self::{
    log::{Credential, Request},
    mischief::{Fault, Mischief, Verb, When},
    refusal::Refusal,
};

/// The content type of an object in that encoding.
pub const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

/// An object as clients of an API server write it that speak protobuf, controllers of Kubernetes among them. Nothing if objects
/// of its kind are not served here.
pub fn protobuf(object: &Value) -> Option<Bytes> {
    let resource = Resource::named(object["kind"].as_str()?)?;
    Some(Encoding::Protobuf.object(resource, object))
}

/// See the module.
pub struct ApiServer {
    shared: Arc<Shared>,
    port: Port,
    door: Mutex<Option<Door>>,
    authority: Mutex<Authority>,
    identity: Mutex<Identity>,
    tokens: AtomicU32,
    tls: TlsAcceptor,
    /// Nothing only while being dropped.
    runtime: Option<Runtime>,
}

/// How a kubeconfig logs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Login {
    /// The token stands in the kubeconfig.
    Token,
    /// The token stands in a file beside it; see [`ApiServer::write_token`].
    TokenFile,
    /// A client certificate in files beside it; see [`ApiServer::write_certificate`].
    Certificate,
    /// A program prints the token: `cat` of a file beside it, also written by [`ApiServer::write_token`].
    Exec,
}

/// Times for [`ApiServer::misbehave`]: until told otherwise.
pub const ALWAYS: usize = usize::MAX;

impl ApiServer {
    /// A server on a free port, empty and well-behaved. Panics when loopback cannot be had.
    pub fn start() -> ApiServer {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("apiserver")
            .enable_all()
            .build()
            .expect("a thread can be started");
        let mut authority = Authority::new();
        let identity = authority.issue_client();
        let server = ApiServer {
            shared: Arc::new(Shared::new()),
            port: Port::reserve().expect("loopback has a free port"),
            door: Mutex::new(None),
            tls: TlsAcceptor::from(Arc::new(authority.server_config())),
            authority: Mutex::new(authority),
            identity: Mutex::new(identity),
            tokens: AtomicU32::new(0),
            runtime: Some(runtime),
        };
        server.rotate_token();
        server.admit_identity();
        server.come_up();
        server
    }

    /// Where it is, or would be.
    pub fn url(&self) -> String {
        format!("https://{}", self.port.address())
    }

    /// Creates or replaces an object; gives its resource version. Panics when it is not an object of ours, or a
    /// field has a wrong type: a real server could not hold it. What a value says is not looked at.
    pub fn put(&self, object: Value) -> u64 {
        let version = self.shared.store().put(object);
        self.shared.wake_watches();
        version
    }

    /// Deletes an object; whether it was there. `namespace` is empty for kinds without.
    pub fn delete(&self, kind: Kind, namespace: &str, name: &str) -> bool {
        let was_there = self.shared.store().delete(kind, namespace, name);
        self.shared.wake_watches();
        was_there
    }

    /// All objects of a kind, by namespace and name.
    pub fn objects(&self, kind: Kind) -> Vec<Arc<Value>> {
        self.shared.store().select(kind, &Selector::default())
    }

    /// Forgets history: whatever resource version a client holds is now too old to watch from, and lists under
    /// way cannot be continued. Open watches go on.
    pub fn compact(&self) {
        self.shared.store().compact();
    }

    /// The resource version of now.
    pub fn version(&self) -> u64 {
        self.shared.store().version()
    }

    /// Goes back to what was at a version, as with an etcd restored from a backup. Connections are cut. Watches from later
    /// versions are granted, as real servers do, and are told nothing until their version has come again.
    pub fn go_back(&self, version: u64) {
        self.go_down();
        self.shared.store().go_back(version);
        self.come_up();
    }

    /// Sends a bookmark to each watch that allows them.
    pub fn send_bookmarks(&self) {
        self.shared.pulse.send_modify(|pulse| pulse.bookmarks += 1);
    }

    /// Orders a mischief for the next `times` requests that fit ([`ALWAYS`]: for all from now on). What was
    /// ordered first happens first.
    pub fn misbehave(&self, when: When, times: usize, mischief: Mischief) {
        self.shared.script().add(when, times, mischief);
    }

    /// Takes back every mischief not yet happened. Streams under way go on as they were meant to.
    pub fn behave(&self) {
        self.shared.script().clear();
    }

    /// How many mischiefs have not happened yet, not counting those ordered for always.
    pub fn mischief_left(&self) -> usize {
        self.shared.script().left()
    }

    /// Says from now on that it is Kubernetes 1.`minor`. Before, it does not say: `/version` is not found.
    pub fn be_release(&self, minor: u32) {
        self.shared.set_minor(minor);
    }

    /// Whether protobuf is spoken; without it a client that accepts nothing else gets 406.
    pub fn speak_protobuf(&self, speak: bool) {
        self.shared.set_speaks_protobuf(speak);
    }

    /// Refuses connections and cuts those there are.
    pub fn go_down(&self) {
        drop(self.door().take());
        self.cut_connections();
    }

    /// Listens again, on the same port.
    pub fn come_up(&self) {
        let mut door = self.door();
        if door.is_none() {
            let handle = self.runtime.as_ref().expect("there until dropped").handle();
            let opened = self.port.open(handle, self.shared.clone(), self.tls.clone());
            *door = Some(opened.expect("the port is reserved for us"));
        }
    }

    /// Takes connections and says nothing on them, not even TLS, until told otherwise.
    pub fn mute(&self, mute: bool) {
        self.shared.set_mute(mute);
        if !mute {
            self.cut_connections();
        }
    }

    /// Ends every open connection, as a crash would. What changes afterwards is not sent on them.
    pub fn cut_connections(&self) {
        self.shared.order(|orders| orders.cuts += 1);
    }

    /// Not one byte more on any connection open now, and none of them ends: so it looks when the network in
    /// between has lost them. New connections are served.
    pub fn freeze_connections(&self) {
        self.shared.order(|orders| orders.freezes += 1);
    }

    /// Every request since the start or [`ApiServer::forget_requests`], in order.
    pub fn requests(&self) -> Vec<Request> {
        self.shared.log().clone()
    }

    pub fn forget_requests(&self) {
        self.shared.log().clear();
    }

    /// Every Event that clients have created, in order.
    pub fn events(&self) -> Vec<Value> {
        self.shared.events().taken.clone()
    }

    /// Refuses Events with this code from now on, or takes them again.
    pub fn refuse_events(&self, code: Option<u16>) {
        self.shared.events().refusal = code;
    }

    /// Makes a new token; from now on it is the only one that is good. Streams under way go on.
    pub fn rotate_token(&self) -> String {
        let token = format!("token-{}", self.tokens.fetch_add(1, Ordering::Relaxed));
        self.shared.access().token.clone_from(&token);
        token
    }

    /// Issues a new client certificate; from now on it is the only one that is good. Connections made with
    /// another stay, and their requests are refused.
    pub fn rotate_certificate(&self) {
        let identity = self.authority.lock().unwrap_or_else(PoisonError::into_inner).issue_client();
        *self.identity.lock().unwrap_or_else(PoisonError::into_inner) = identity;
        self.admit_identity();
    }

    fn admit_identity(&self) {
        let certificate = self.identity.lock().unwrap_or_else(PoisonError::into_inner).certificate.clone();
        self.shared.access().certificate = Some(certificate);
    }

    /// Writes a kubeconfig, and what it refers to, into a folder.
    pub fn kubeconfig(&self, dir: &Path, login: Login) -> PathBuf {
        let path = |name: &str| dir.join(name).to_string_lossy().into_owned();
        let authority = self.authority.lock().unwrap_or_else(PoisonError::into_inner).pem();
        write(dir, "ca.crt", &authority);
        let user = match login {
            Login::Token => json!({"token": self.shared.access().token}),
            Login::TokenFile => json!({"tokenFile": path("token")}),
            Login::Certificate => {
                json!({"client-certificate": path("client.crt"), "client-key": path("client.key")})
            }
            Login::Exec => json!({"exec": {
                "apiVersion": "client.authentication.k8s.io/v1",
                "command": "cat",
                "args": [path("credential.json")],
                "interactiveMode": "Never",
            }}),
        };
        self.write_token(dir);
        self.write_certificate(dir);
        // JSON is YAML, and needs no thought about quoting.
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{
                "name": "here",
                "cluster": {"server": self.url(), "certificate-authority": path("ca.crt")},
            }],
            "users": [{"name": "proxy", "user": user}],
            "contexts": [{"name": "proxy", "context": {"cluster": "here", "user": "proxy"}}],
            "current-context": "proxy",
        });
        write(dir, "kubeconfig", &config.to_string());
        dir.join("kubeconfig")
    }

    /// Replaces the token file, and what the exec plugin prints, by the token that is good now.
    pub fn write_token(&self, dir: &Path) {
        let token = self.shared.access().token.clone();
        let credential = json!({
            "apiVersion": "client.authentication.k8s.io/v1",
            "kind": "ExecCredential",
            "status": {"token": token},
        });
        write(dir, "token", &token);
        write(dir, "credential.json", &credential.to_string());
    }

    /// Replaces the client certificate and key by those that are good now.
    pub fn write_certificate(&self, dir: &Path) {
        let identity = self.identity.lock().unwrap_or_else(PoisonError::into_inner);
        write(dir, "client.crt", &identity.certificate_pem);
        write(dir, "client.key", &identity.key_pem);
    }

    fn door(&self) -> std::sync::MutexGuard<'_, Option<Door>> {
        self.door.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.go_down();
        // A runtime may not wait for its own end inside another one, and an asynchronous test drops us there.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// In one step, as kubelet replaces what it mounts: a reader never sees half a file.
fn write(dir: &Path, name: &str, content: &str) {
    let part = dir.join(format!(".{name}.new"));
    let written = fs::write(&part, content).and_then(|()| fs::rename(&part, dir.join(name)));
    written.unwrap_or_else(|error| panic!("{name} cannot be written: {error}"));
}
