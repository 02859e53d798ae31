// SPDX-License-Identifier: Apache-2.0

//! The source that was asked for, kept running.

use std::{path::PathBuf, sync::Arc, time::Duration};

use model::Update;
use source::{Problems, file, kube};
use tokio::{runtime::Runtime, sync::mpsc::Sender};

use crate::{config::Config, flags::Source};

/// The wait before a source that ended is started again.
const AGAIN: Duration = Duration::from_secs(1);

/// A source that can be started.
#[derive(Clone)]
pub enum Feed {
    /// The API server.
    Kube { access: Arc<kube::Access>, node_name: Arc<str>, status: Arc<kube::Status> },
    /// A file or a folder.
    File { path: PathBuf, node_name: Arc<str> },
}

impl Feed {
    /// Reads credentials, or looks whether there are files; connects to nobody. The error is one sentence.
    pub fn open(
        runtime: &Runtime,
        source: Source,
        (config, master): (&Config, &str),
        node_name: &Arc<str>,
    ) -> Result<Feed, String> {
        let node_name = Arc::clone(node_name);
        match source {
            Source::File(path) => {
                let unreadable = |error| format!("cannot read {}: {error}", path.display());
                std::fs::metadata(&path).map_err(unreadable)?;
                Ok(Feed::File { path, node_name })
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
                };
                let access =
                    runtime.block_on(kube::Access::open(settings)).map_err(|error| error.to_string())?;
                Ok(Feed::Kube { access: Arc::new(access), node_name, status: Arc::default() })
            }
        }
    }

    /// How the connections to the API server fare, if there are any.
    pub fn api(&self) -> Option<Arc<kube::Status>> {
        match self {
            Feed::Kube { status, .. } => Some(Arc::clone(status)),
            Feed::File { .. } => None,
        }
    }

    /// How to write to the API server, if there is one.
    pub fn access(&self) -> Option<Arc<kube::Access>> {
        match self {
            Feed::Kube { access, .. } => Some(Arc::clone(access)),
            Feed::File { .. } => None,
        }
    }

    /// Runs it until nobody receives any more. A source that panics is started again: it lists everything
    /// anew, so nothing is lost.
    pub fn start(self, runtime: &Runtime, updates: Sender<Update>, problems: Arc<Problems>) {
        runtime.spawn(async move {
            while !updates.is_closed() {
                let run = tokio::spawn(self.clone().run(updates.clone(), Arc::clone(&problems)));
                let ended = run.await.err().map_or("it returned".to_owned(), |error| error.to_string());
                if !updates.is_closed() {
                    tracing::error!(
                        ended,
                        "the source ended; this is a bug, please report it; starting it again"
                    );
                }
                tokio::time::sleep(AGAIN).await;
            }
        });
    }

    async fn run(self, updates: Sender<Update>, problems: Arc<Problems>) {
        match self {
            Feed::Kube { access, node_name, status } => {
                kube::run(access, node_name, problems, status, updates).await
            }
            Feed::File { path, node_name } => file::run(path, node_name, problems, updates).await,
        }
    }
}
