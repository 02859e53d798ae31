// SPDX-License-Identifier: Apache-2.0

//! What the metrics server answers, for operators and Prometheus: `/metrics`, `/proxyMode`, `/configz`, and a
//! `/healthz` that only says that the server is there (the health server's tells how the node is).

use std::{sync::Arc, time::SystemTime};

use hyper::{Request, Response, StatusCode, body::Incoming};
use model::Kind;
use serde_json::json;
use source::{Problems, kube};

use crate::{
    clock,
    http::{Answer, body, plain, typed},
    live::Current,
    metrics::Metrics,
};

/// What the answers are made of.
pub struct Endpoints {
    pub metrics: Arc<Metrics>,
    pub problems: Arc<Problems>,
    /// How the connections to the API server fare, if there are any.
    pub api: Option<Arc<kube::Status>>,
    pub config: Current,
    pub started: SystemTime,
}

impl Endpoints {
    /// `None` is 404.
    pub fn route(&self, request: &Request<Incoming>) -> Option<Answer> {
        self.answer(request.uri().path(), request.uri().query().unwrap_or_default())
    }

    fn answer(&self, path: &str, query: &str) -> Option<Answer> {
        Some(match path {
            "/metrics" => self.metrics(),
            "/healthz" | "/healthz/ping" if query.split('&').any(|word| word.starts_with("verbose")) => {
                plain(StatusCode::OK, "[+]ping ok\nhealthz check passed\n")
            }
            "/healthz" | "/healthz/ping" => plain(StatusCode::OK, "ok"),
            "/proxyMode" => plain(StatusCode::OK, self.config.config().mode.clone()),
            "/configz" => {
                let config = json!({ "kubeproxy.config.k8s.io": &*self.config.config() });
                typed(StatusCode::OK, "application/json", config.to_string())
            }
            _ => return None,
        })
    }

    fn metrics(&self) -> Answer {
        let mut text = self.metrics.render();
        let problems = self.problems.counts().filter(|(_, count)| *count > 0);
        let problems: Vec<_> = problems.map(|(reason, count)| (reason.label(), count)).collect();
        let help = "Objects, or parts of them, that could not be used.";
        series(&mut text, ("portolan_bad_objects_total", "counter", help), "reason", &problems);
        self.api(&mut text);
        let response = Response::builder()
            .header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            .header("Process-Start-Time-Unix", clock::unix_secs(self.started).trunc() as u64);
        response.body(body(text)).expect("constant headers are valid")
    }

    fn api(&self, text: &mut String) {
        let Some(api) = &self.api else { return };
        let kinds = Kind::ALL.map(|kind| (label(kind), api.of(kind)));
        let mut write = |name, kind, help, value: fn(&kube::KindStatus) -> u64| {
            let samples: Vec<_> = kinds.iter().map(|(kind, status)| (*kind, value(status))).collect();
            series(text, (name, kind, help), "kind", &samples);
        };
        write("portolan_api_connected", "gauge", "A list or watch is open now.", |status| {
            status.connected.into()
        });
        write("portolan_api_lists_total", "counter", "Lists begun.", |status| status.lists);
        write("portolan_api_watches_total", "counter", "Watches opened.", |status| status.watches);
        let help = "Lists and watches that ended otherwise than in good order.";
        write("portolan_api_failures_total", "counter", help, |status| status.failures);
    }
}

fn label(kind: Kind) -> &'static str {
    match kind {
        Kind::Service => "Service",
        Kind::EndpointSlice => "EndpointSlice",
        Kind::Node => "Node",
        Kind::ServiceCidr => "ServiceCIDR",
    }
}

/// Series that others count, written out. Without samples there is nothing.
fn series(text: &mut String, (name, kind, help): (&str, &str, &str), label: &str, samples: &[(&str, u64)]) {
    if samples.is_empty() {
        return;
    }
    text.push_str(&format!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
    for (value, count) in samples {
        text.push_str(&format!("{name}{{{label}=\"{value}\"}} {count}\n"));
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use source::{Problem, Reason};

    use super::*;
    use crate::config::Config;

    fn endpoints() -> Endpoints {
        let mut config = Config::with_defaults();
        config.settle();
        Endpoints {
            metrics: Arc::new(Metrics::new(SystemTime::UNIX_EPOCH)),
            problems: Arc::default(),
            api: Some(Arc::default()),
            config: Current::new(config),
            started: SystemTime::UNIX_EPOCH + std::time::Duration::from_millis(1_700_000_000_500),
        }
    }

    async fn text(answer: Answer) -> String {
        let bytes = answer.into_body().collect().await.expect("a whole body").to_bytes();
        String::from_utf8(bytes.into()).expect("text")
    }

    #[tokio::test]
    async fn each_path_has_its_answer() {
        let endpoints = endpoints();
        let ask = |path: &str| endpoints.answer(path, "").expect(path);
        assert_eq!(text(ask("/proxyMode")).await, "nftables");
        assert_eq!(text(ask("/healthz")).await, "ok");
        assert!(text(endpoints.answer("/healthz", "verbose").expect("known")).await.contains("[+]ping ok"));
        let config: serde_json::Value = serde_json::from_str(&text(ask("/configz")).await).expect("JSON");
        let config = &config["kubeproxy.config.k8s.io"];
        assert_eq!(
            (config["kind"].as_str(), config["mode"].as_str()),
            (Some("KubeProxyConfiguration"), Some("nftables"))
        );
        assert_eq!(config["nodePortAddresses"][0], "primary");
        for path in ["/", "/livez", "/readyz", "/metricsx"] {
            assert!(endpoints.answer(path, "").is_none(), "{path}");
        }
    }

    #[tokio::test]
    async fn metrics_have_the_problems_and_the_start_time() {
        let endpoints = endpoints();
        endpoints.problems.report(Problem::new("Service a/b", "spec.ports[0].port", Reason::BadPort, 70000));
        let answer = endpoints.answer("/metrics", "").expect("known");
        assert_eq!(answer.headers()["Process-Start-Time-Unix"], "1700000000");
        let text = text(answer).await;
        assert!(
            text.lines().any(|line| line == "portolan_bad_objects_total{reason=\"bad_port\"} 1"),
            "{text}"
        );
    }
}
