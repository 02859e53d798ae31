// SPDX-License-Identifier: Apache-2.0

use http_body_util::BodyExt as _;
use source::{Problem, Problems, Reason};

use super::*;
use crate::config::Config;

fn endpoints(profiling: bool) -> Endpoints {
    let mut config = Config::with_defaults();
    config.enable_profiling = profiling;
    config.settle();
    Endpoints {
        metrics: Arc::new(Metrics::new(SystemTime::UNIX_EPOCH)),
        outside: Outside {
            problems: Arc::new(Problems::new()),
            api: Some(Arc::default()),
            connections: Arc::default(),
            accounted: None,
            carried: None,
        },
        config: Current::new(config),
        flags: BTreeMap::from([("v", "0".to_owned())]),
        started: SystemTime::UNIX_EPOCH + std::time::Duration::from_millis(1_700_000_000_500),
        pings: AtomicU64::new(0),
    }
}

fn ask(endpoints: &Endpoints, method: &str, path: &str, text: &'static str) -> Option<Answer> {
    let request = Request::builder().method(method).uri(path).body(Bytes::from_static(text.as_bytes()));
    endpoints.route(&request.expect("a valid request"))
}

async fn text(answer: Option<Answer>) -> String {
    let bytes = answer.expect("a path of ours").into_body().collect().await.expect("a whole body").to_bytes();
    String::from_utf8(bytes.into()).expect("text")
}

#[tokio::test]
async fn each_path_has_its_answer() {
    let endpoints = endpoints(false);
    let get = |path: &str| ask(&endpoints, "GET", path, "");
    assert_eq!(text(get("/proxyMode")).await, "nftables");
    assert_eq!(text(get("/healthz")).await, "ok");
    assert_eq!(text(get("/healthz?verbose")).await, "[+]ping ok\nhealthz check passed\n");
    let config: serde_json::Value = serde_json::from_str(&text(get("/configz")).await).expect("JSON");
    let config = &config["kubeproxy.config.k8s.io"];
    assert_eq!(
        (config["kind"].as_str(), config["mode"].as_str()),
        (Some("KubeProxyConfiguration"), Some("nftables"))
    );
    assert_eq!(config["nodePortAddresses"][0], "primary");
    assert!(text(get("/flagz")).await.ends_with("\nv: 0\n"));
    assert!(text(get("/statusz")).await.contains("Portolan"));
    for path in ["/", "/livez", "/readyz", "/metricsx", "/debug/pprof/", "/debug/flags/v"] {
        assert!(get(path).is_none(), "{path}");
    }
}

#[tokio::test]
async fn gates_close_the_pages() {
    let mut config = Config::with_defaults();
    let gates = [("ComponentFlagz", false), ("ComponentStatusz", false)];
    config.feature_gates = Some(gates.map(|(name, on)| (name.to_owned(), on)).into());
    let endpoints = Endpoints { config: Current::new(config), ..endpoints(false) };
    for path in ["/flagz", "/statusz"] {
        assert!(ask(&endpoints, "GET", path, "").is_none(), "{path}");
    }
}

#[tokio::test]
async fn profiling_opens_what_there_is_of_it() {
    let endpoints = endpoints(true);
    let code = |answer: Option<Answer>| answer.map(|answer| answer.status().as_u16());
    assert_eq!(code(ask(&endpoints, "GET", "/debug/pprof/heap", "")), Some(501));
    assert_eq!(code(ask(&endpoints, "GET", "/debug/flags/v", "")), Some(406));
    assert_eq!(code(ask(&endpoints, "PUT", "/debug/flags/v", "loud")), Some(400));
    assert_eq!(
        text(ask(&endpoints, "PUT", "/debug/flags/v", "3\n")).await,
        "successfully set klog.logging.verbosity to 3\n"
    );
    assert_eq!(code(ask(&endpoints, "GET", "/debug", "")), None);
}

#[tokio::test]
async fn metrics_have_the_problems_and_the_start_time() {
    let endpoints = endpoints(false);
    let problem = Problem::new("Service a/b", "spec.ports[0].port", Reason::BadPort, 70000);
    endpoints.outside.problems.report(problem);
    let answer = ask(&endpoints, "GET", "/metrics", "").expect("known");
    assert_eq!(answer.headers()["Process-Start-Time-Unix"], "1700000000");
    let text = text(Some(answer)).await;
    for line in [
        "portolan_bad_objects_total{reason=\"bad_port\"} 1",
        "# TYPE portolan_api_watches_total counter",
        "portolan_api_watches_total{kind=\"EndpointSlice\"} 0",
    ] {
        assert!(text.lines().any(|have| have == line), "{line} is missing in\n{text}");
    }
}

#[tokio::test]
async fn service_levels_count_pings_and_forget_them() {
    let endpoints = endpoints(false);
    let slis = |method| ask(&endpoints, method, "/metrics/slis", "");
    assert_eq!(text(slis("GET")).await, "", "nobody has asked yet");
    ask(&endpoints, "GET", "/healthz", "");
    let counted = text(slis("GET")).await;
    assert!(
        counted
            .contains("kubernetes_healthchecks_total{name=\"ping\",status=\"success\",type=\"healthz\"} 1\n"),
        "{counted}"
    );
    slis("DELETE");
    assert_eq!(text(slis("GET")).await, "");
}
