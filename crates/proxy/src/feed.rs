// SPDX-License-Identifier: Apache-2.0

//! The source that was asked for, kept running.

use std::{path::PathBuf, sync::Arc, time::Duration};

use model::Update;
use source::{Problems, file, kube};
use tokio::{
    runtime::{Builder, Runtime},
    sync::mpsc::Sender,
};

use crate::{app, config::Config, flags::Source};

/// The wait before a source that ended is started again.
const AGAIN: Duration = Duration::from_secs(1);

/// A source that can be started.
pub struct Feed {
    origin: Origin,
    /// Has one thread and nothing else to do: whoever asks for health or metrics neither waits for the reading of a large
    /// file nor delays it, and a runtime of one thread has less to look after with each change.
    runtime: Runtime,
}

#[derive(Clone)]
enum Origin {
    /// The API server.
    Kube { access: Arc<kube::Access>, node_name: Arc<str>, status: Arc<kube::Status> },
    /// A file or a folder.
    File { path: PathBuf, node_name: Arc<str> },
}

impl Feed {
    /// Reads credentials, or looks whether there are files; connects to nobody. The error is one sentence.
    pub fn open(
        source: Source,
        (config, master): (&Config, &str),
        node_name: &Arc<str>,
    ) -> Result<Feed, String> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| format!("cannot start the source: {error}"))?;
        let node_name = Arc::clone(node_name);
        let origin = match source {
            Source::File(path) => {
                let unreadable = |error| format!("cannot read {}: {error}", path.display());
                std::fs::metadata(&path).map_err(unreadable)?;
                Origin::File { path, node_name }
            }
            Source::Kubernetes => {
                let client = &config.client_connection;
                let settings = kube::Settings {
                    kubeconfig: (!client.kubeconfig.is_empty()).then(|| client.kubeconfig.clone().into()),
                    master: (!master.is_empty()).then(|| master.to_owned()),
                    json: !client.content_type.contains("protobuf"),
                    user_agent: format!(
                        "portolan/{} (linux/{})",
                        env!("CARGO_PKG_VERSION"),
                        std::env::consts::ARCH
                    ),
                    environment: kube::Environment::read(|name| std::env::var(name).ok()),
                };
                let access = runtime.block_on(kube::Access::open(settings));
                let access = Arc::new(access.map_err(|error| error.to_string())?);
                Origin::Kube { access, node_name, status: Arc::default() }
            }
        };
        Ok(Feed { origin, runtime })
    }

    /// How the connections to the API server fare, if there are any.
    pub fn api(&self) -> Option<Arc<kube::Status>> {
        match &self.origin {
            Origin::Kube { status, .. } => Some(Arc::clone(status)),
            Origin::File { .. } => None,
        }
    }

    /// How to write to the API server, if there is one.
    pub fn access(&self) -> Option<Arc<kube::Access>> {
        match &self.origin {
            Origin::Kube { access, .. } => Some(Arc::clone(access)),
            Origin::File { .. } => None,
        }
    }

    /// Runs it in a thread of its own until nobody receives any more. The error is one sentence.
    pub fn start(self, updates: Sender<Update>, problems: Arc<Problems>) -> Result<(), String> {
        let Feed { origin, runtime } = self;
        let work = move || {
            runtime.block_on(async {
                tokio::select! {
                    () = origin.keep_running(&updates, &problems) => {}
                    () = updates.closed() => {}
                }
            });
            // Without waiting for files that are just being read.
            runtime.shutdown_background();
        };
        app::spawn("source", None, work).map(drop)
    }
}

impl Origin {
    /// A source that panics is started again: it lists everything anew, so nothing is lost.
    async fn keep_running(&self, updates: &Sender<Update>, problems: &Arc<Problems>) {
        loop {
            let run = tokio::spawn(self.clone().run(updates.clone(), Arc::clone(problems)));
            let ended = run.await.err().map_or("it returned".to_owned(), |error| error.to_string());
            if !updates.is_closed() {
                tracing::error!(
                    ended,
                    "the source ended; this is a bug, please report it; starting it again"
                );
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    async fn run(self, updates: Sender<Update>, problems: Arc<Problems>) {
        match self {
            Origin::Kube { access, node_name, status } => {
                kube::run(access, node_name, problems, status, updates).await
            }
            Origin::File { path, node_name } => file::run(path, node_name, problems, updates).await,
        }
    }
}
