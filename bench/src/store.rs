// SPDX-License-Identifier: Apache-2.0

//! Where the objects are written: the real API server, or a folder of manifests.

use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::mpsc,
    time::Instant,
};

use anyhow::{Context, Result, bail};
use futures_util::{StreamExt, TryStreamExt, stream};
use http::{Method, Request, StatusCode};
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::TokioExecutor,
};
use kube::{
    Client, Config,
    client::{Body, ClientBuilder, ConfigExt as _},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};
use testkit::apiserver;
use tokio::runtime::Runtime;
use tower::{BoxError, ServiceBuilder};

use crate::{
    ground::Namespace,
    objects::{self, Entry, NAMESPACE, Objects},
};

/// Writes that are under way at once while a cluster is filled: enough to keep etcd and the server busy.
const PARALLEL: usize = 64;

/// A place a subject reads objects from.
pub enum Store<'a> {
    Api(&'a Api),
    Files(Files),
}

impl Store<'_> {
    /// Writes the endpoints of `entry` and returns at once; the answer comes when the store has taken it.
    pub fn begin_write(&self, entry: &Entry) -> Result<Pending> {
        match self {
            Store::Api(api) => api.begin_write(entry),
            Store::Files(files) => files.write(entry).map(|()| Pending::done()),
        }
    }

    /// Writes the endpoints of `entry` and waits until the store has taken it.
    pub fn write(&self, entry: &Entry) -> Result<()> {
        self.begin_write(entry)?.wait().map(|_| ())
    }
}

/// A write that may still be on its way.
pub struct Pending(mpsc::Receiver<Result<Instant>>);

impl Pending {
    fn done() -> Pending {
        let (done, pending) = mpsc::channel();
        // Cannot fail: the receiver is in this very hand.
        let _ = done.send(Ok(Instant::now()));
        Pending(pending)
    }

    /// When the store had taken the write.
    pub fn wait(self) -> Result<Instant> {
        self.0.recv().context("the writer ended before it had an answer")?
    }
}

/// The real API server. The runtime's threads live in the network namespace that reaches it, which is why
/// every request is spawned on it: a future polled on the caller's thread would open its socket elsewhere.
pub struct Api {
    runtime: Runtime,
    client: Client,
}

impl Api {
    /// Connects with `kubeconfig` from inside `namespace`.
    pub fn open(namespace: &Namespace, kubeconfig: &Path) -> Result<Api> {
        let kubeconfig = Kubeconfig::read_from(kubeconfig).context("reading the API server's kubeconfig")?;
        namespace.run(|| {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
            let client = runtime.block_on(async {
                let config =
                    Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
                connect(config)
            })?;
            Ok(Api { runtime, client })
        })?
    }

    /// Creates the namespace, the Node and all objects, as fast as the server takes them.
    pub fn fill(&self, objects: &Objects, node: Ipv4Addr) -> Result<()> {
        self.prepare(node)?;
        // The server makes default/kubernetes by itself.
        let services = objects.all().filter(|entry| entry.namespace == NAMESPACE);
        self.create_all(services.map(|entry| create(&services_path(entry), &entry.service())).collect())?;
        self.create_all(objects.all().map(|entry| create(&slices_path(entry), &entry.slice())).collect())
    }

    /// What is left to create when the services of the bench's own namespace are there with their slices.
    pub fn fill_around(&self, objects: &Objects, node: Ipv4Addr) -> Result<()> {
        self.prepare(node)?;
        let slices = objects.all().filter(|entry| entry.namespace != NAMESPACE);
        self.create_all(slices.map(|entry| create(&slices_path(entry), &entry.slice())).collect())
    }

    fn prepare(&self, node: Ipv4Addr) -> Result<()> {
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
        self.wait(create("/api/v1/namespaces", &namespace)?)?;
        self.wait(create("/api/v1/nodes", &objects::node(node))?)
    }

    fn create_all(&self, requests: Vec<Result<Request<Vec<u8>>>>) -> Result<()> {
        let client = self.client.clone();
        self.on_runtime(async move {
            stream::iter(requests)
                .map(|request| send(client.clone(), request))
                .buffer_unordered(PARALLEL)
                .try_for_each(|()| async { Ok(()) })
                .await
        })
    }

    fn begin_write(&self, entry: &Entry) -> Result<Pending> {
        let path = format!("{}/{}", slices_path(entry), entry.slice_name());
        // As the controller does that writes EndpointSlices in a cluster.
        let body = apiserver::protobuf(&entry.slice()).context("an EndpointSlice has no encoding")?;
        let request = Request::builder()
            .method(Method::PUT)
            .uri(path)
            .header(http::header::CONTENT_TYPE, apiserver::PROTOBUF)
            .header(http::header::ACCEPT, apiserver::PROTOBUF)
            .body(body.to_vec())?;
        let (done, pending) = mpsc::channel();
        let sending = send(self.client.clone(), Ok(request));
        self.runtime.spawn(async move {
            let answer = sending.await.map(|()| Instant::now());
            // Nobody waits for it any more: nobody misses it.
            let _ = done.send(answer);
        });
        Ok(Pending(pending))
    }

    fn wait(&self, request: Request<Vec<u8>>) -> Result<()> {
        self.on_runtime(send(self.client.clone(), Ok(request)))
    }

    fn on_runtime<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let (done, result) = mpsc::channel();
        self.runtime.spawn(async move {
            let _ = done.send(work.await);
        });
        result.recv().context("the API client ended early")?
    }
}

/// A client whose writes leave at once, as those of Kubernetes' own controllers do. `kube`'s waits for the server to
/// acknowledge the head of a request before it sends the body, and an acknowledgement may take its time: 40 ms.
fn connect(config: Config) -> Result<Client> {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    let tls = config.rustls_https_connector_with_connector(tcp)?;
    let http: legacy::Client<_, Body> = legacy::Builder::new(TokioExecutor::new()).build(tls);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .map_err(BoxError::from)
        .service(http);
    Ok(ClientBuilder::new(service, config.default_namespace.as_str()).build())
}

async fn send(client: Client, request: Result<Request<Vec<u8>>>) -> Result<()> {
    let request = request?;
    let what = format!("{} {}", request.method(), request.uri());
    let creating = request.method() == Method::POST;
    let (parts, body) = request.into_parts();
    let answer = client.send(Request::from_parts(parts, body.into())).await.with_context(|| what.clone())?;
    let status = answer.status();
    let body = answer.into_body().collect_bytes().await?;
    match status {
        _ if status.is_success() => Ok(()),
        // Filling twice is no error; each object is a function of its number.
        StatusCode::CONFLICT if creating => Ok(()),
        _ => bail!("{what}: {status}: {}", String::from_utf8_lossy(&body)),
    }
}

fn create(path: &str, object: &Value) -> Result<Request<Vec<u8>>> {
    Ok(Request::builder()
        .method(Method::POST)
        .uri(path)
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(serde_json::to_vec(object)?)?)
}

fn services_path(entry: &Entry) -> String {
    format!("/api/v1/namespaces/{}/services", entry.namespace)
}

fn slices_path(entry: &Entry) -> String {
    format!("/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices", entry.namespace)
}

/// A folder with one manifest for each service, as an operator would keep it.
pub struct Files {
    folder: PathBuf,
    /// Beside the folder, on the same file system: a save is written here, and then renamed.
    drafts: PathBuf,
}

impl Files {
    pub fn new(root: &Path) -> Result<Files> {
        let files = Files { folder: root.join("manifests"), drafts: root.join("drafts") };
        fs::create_dir_all(&files.folder)?;
        fs::create_dir_all(&files.drafts)?;
        Ok(files)
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes all objects.
    pub fn fill(&self, objects: &Objects) -> Result<()> {
        for entry in objects.all() {
            fs::write(self.folder.join(file_name(entry)), entry.yaml())?;
        }
        Ok(())
    }

    /// Saves one service's file the way editors do: a new file takes the old one's name.
    fn write(&self, entry: &Entry) -> Result<()> {
        let draft = self.drafts.join(file_name(entry));
        fs::write(&draft, entry.yaml())?;
        fs::rename(&draft, self.folder.join(file_name(entry)))?;
        Ok(())
    }
}

fn file_name(entry: &Entry) -> String {
    format!("{}.{}.yaml", entry.namespace, entry.name)
}
