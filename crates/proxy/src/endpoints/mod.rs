// SPDX-License-Identifier: Apache-2.0

//! What the metrics server answers, for operators and Prometheus: `/metrics`, `/metrics/slis`, `/proxyMode`,
//! `/configz`, `/statusz`, `/flagz`, and a `/healthz` that only says that the server is there (the health server's
//! tells how the node is). With profiling also `/debug`.

mod zpages;

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::SystemTime,
};

use hyper::{Method, Request, Response, StatusCode, body::Bytes};
use serde_json::json;

use crate::{
    clock,
    http::{Answer, body, plain, typed},
    live::Current,
    log,
    metrics::{About, Metrics, Outside},
};

/// What the answers are made of.
pub struct Endpoints {
    pub metrics: Arc<Metrics>,
    pub outside: Outside,
    pub config: Current,
    /// Every flag with its value.
    pub flags: BTreeMap<&'static str, String>,
    pub started: SystemTime,
    /// How often `/healthz` was asked.
    pub pings: AtomicU64,
}

const HEALTH_CHECK: About = About {
    name: "kubernetes_healthcheck",
    kind: "gauge",
    labels: &["name", "type"],
    help: "[STABLE] The result of a health check: 1 is good.",
};
const HEALTH_CHECKS: About = About {
    name: "kubernetes_healthchecks_total",
    kind: "counter",
    labels: &["name", "status", "type"],
    help: "[STABLE] Results of health checks.",
};

impl Endpoints {
    /// `None` is 404.
    pub fn route(&self, request: &Request<Bytes>) -> Option<Answer> {
        let config = self.config.config();
        Some(match request.uri().path() {
            "/metrics" => self.metrics(),
            "/metrics/slis" => self.slis(request.method()),
            "/healthz" | "/healthz/ping" => self.ping(request.uri().query().unwrap_or_default()),
            "/proxyMode" => plain(StatusCode::OK, config.mode.clone()),
            "/configz" => {
                let config = json!({ "kubeproxy.config.k8s.io": &*config });
                typed(StatusCode::OK, "application/json", config.to_string())
            }
            "/statusz" if config.gate("ComponentStatusz") => {
                zpages::statusz(request.headers(), self.started, SystemTime::now())
            }
            "/flagz" if config.gate("ComponentFlagz") => zpages::flagz(request.headers(), &self.flags),
            path if config.enable_profiling => return debug(path, request),
            _ => return None,
        })
    }

    fn ping(&self, query: &str) -> Answer {
        self.pings.fetch_add(1, Relaxed);
        let is_verbose = query.split('&').any(|word| word == "verbose" || word.starts_with("verbose="));
        plain(StatusCode::OK, if is_verbose { "[+]ping ok\nhealthz check passed\n" } else { "ok" })
    }

    fn metrics(&self) -> Answer {
        let mut text = self.metrics.render();
        self.outside.render(&mut text);
        self.exposition(text)
    }

    /// What Kubernetes' own service levels are measured by.
    fn slis(&self, method: &Method) -> Answer {
        if method == Method::DELETE {
            self.pings.store(0, Relaxed);
            return plain(StatusCode::OK, "metrics reset\n");
        }
        let mut text = String::new();
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let pings = self.pings.load(Relaxed);
        if pings > 0 {
            HEALTH_CHECK.write(&mut text, [(words(&["ping", "healthz"]), 1.0)]);
            HEALTH_CHECKS.write(&mut text, [(words(&["ping", "success", "healthz"]), pings as f64)]);
        }
        self.exposition(text)
    }

    fn exposition(&self, text: String) -> Answer {
        let response = Response::builder()
            .header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            .header("Process-Start-Time-Unix", clock::unix_secs(self.started).trunc() as u64);
        response.body(body(text)).expect("constant headers are valid")
    }
}

/// What there is only with profiling.
fn debug(path: &str, request: &Request<Bytes>) -> Option<Answer> {
    match path {
        "/debug/flags/v" => Some(verbosity(request)),
        _ if path == "/debug/pprof" || path.starts_with("/debug/pprof/") => Some(plain(
            StatusCode::NOT_IMPLEMENTED,
            format!(
                "There are no Go profiles of a program that is not written in Go; use `perf record -g -p {}` on this node.\n",
                std::process::id()
            ),
        )),
        _ => None,
    }
}

/// PUT a number, and the log becomes as verbose as `-v` with it.
fn verbosity(request: &Request<Bytes>) -> Answer {
    if request.method() != Method::PUT {
        return plain(StatusCode::NOT_ACCEPTABLE, "PUT a number here to set the verbosity of the log\n");
    }
    let text = String::from_utf8_lossy(request.body());
    match text.trim().parse() {
        Ok(level) => {
            log::set_verbosity(level);
            tracing::info!(level, "the verbosity of the log was changed over HTTP");
            plain(StatusCode::OK, format!("successfully set klog.logging.verbosity to {level}\n"))
        }
        Err(_) => plain(
            StatusCode::BAD_REQUEST,
            format!("{:?} is no verbosity; PUT a whole number such as 2\n", text.trim()),
        ),
    }
}

#[cfg(test)]
mod tests;
