// SPDX-License-Identifier: Apache-2.0

//! `/statusz` and `/flagz`: what runs, and how it was started, for people as text and for programs in
//! Kubernetes' structured form, whichever the Accept header asks for.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    time::{Duration, SystemTime},
};

use hyper::{Response, StatusCode, header::HeaderMap};
use serde_json::{Map, Value, json};

use crate::{
    clock,
    http::{Answer, body},
};

/// The component in whose place we are; programs look for this name.
const COMPONENT: &str = "kube-proxy";
/// The Kubernetes version whose flags, fields and gates are understood.
const EMULATED: &str = "1.37";
/// The paths that `/statusz` names.
const PATHS: [&str; 5] = ["/configz", "/flagz", "/healthz", "/metrics", "/proxyMode"];
const WARNING: &str = "Warning: for people who debug; the layout of this text may change at any time.";

/// How an answer is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Text,
    Json(&'static str),
    Yaml(&'static str),
}

/// What runs, and since when.
pub(super) fn statusz(headers: &HeaderMap, started: SystemTime, now: SystemTime) -> Answer {
    let up = now.duration_since(started).unwrap_or(Duration::ZERO).as_secs();
    let version = env!("CARGO_PKG_VERSION");
    let text = || {
        format!(
            "\n{COMPONENT} statusz\n{WARNING}\n\nProgram:  Portolan\nStarted:  {}\nUp:  {} hr {:02} min {:02} sec\n\
             Binary version:  {version}\nEmulation version:  {EMULATED}\nPaths:  {}\n",
            clock::unix_date(started),
            up / 3600,
            up / 60 % 60,
            up % 60,
            PATHS.join(" "),
        )
    };
    let fields = || {
        Map::from_iter([
            ("startTime".to_owned(), json!(clock::rfc3339(whole_secs(started)))),
            ("uptimeSeconds".to_owned(), json!(up)),
            // The schema demands it; no Go is in here.
            ("goVersion".to_owned(), json!("none")),
            ("binaryVersion".to_owned(), json!(version)),
            ("emulationVersion".to_owned(), json!(EMULATED)),
            ("paths".to_owned(), json!(PATHS)),
        ])
    };
    answer(headers, "Statusz", text, fields)
}

/// Every flag with its value.
pub(super) fn flagz(headers: &HeaderMap, flags: &BTreeMap<&'static str, String>) -> Answer {
    let text = || {
        let mut text = format!("\n{COMPONENT} flagz\n{WARNING}\n");
        for (name, value) in flags {
            // A String takes all that is written to it.
            let _ = writeln!(text, "{name}: {value}");
        }
        text
    };
    let fields = || Map::from_iter([("flags".to_owned(), json!(flags))]);
    answer(headers, "Flagz", text, fields)
}

fn answer(
    headers: &HeaderMap,
    kind: &str,
    text: impl FnOnce() -> String,
    fields: impl FnOnce() -> Map<String, Value>,
) -> Answer {
    let Some(form) = negotiate(headers, kind) else { return not_acceptable() };
    let structured = |version: &str| {
        let mut object = Map::new();
        object.insert("kind".to_owned(), kind.into());
        object.insert("apiVersion".to_owned(), format!("config.k8s.io/{version}").into());
        object.insert("metadata".to_owned(), json!({"name": COMPONENT}));
        object.extend(fields());
        Value::Object(object)
    };
    let (content_type, text) = match form {
        Form::Text => ("text/plain; charset=utf-8".to_owned(), text()),
        Form::Json(version) => (
            format!("application/json;g=config.k8s.io;v={version};as={kind}"),
            serde_json::to_string_pretty(&structured(version))
                .expect("an object with string keys has a JSON form"),
        ),
        Form::Yaml(version) => (
            format!("application/yaml;g=config.k8s.io;v={version};as={kind}"),
            serde_saphyr::to_string(&structured(version)).expect("what is JSON is YAML"),
        ),
    };
    let response = Response::builder().header("Content-Type", content_type);
    response.body(body(text)).expect("constant headers are valid")
}

/// The first of the client's wishes that can be met; `None` if none can.
fn negotiate(headers: &HeaderMap, kind: &str) -> Option<Form> {
    let accept = headers.get("Accept").and_then(|value| value.to_str().ok()).unwrap_or_default();
    if accept.trim().is_empty() {
        return Some(Form::Text);
    }
    accept.split(',').find_map(|wish| {
        let mut words = wish.split(';').map(str::trim);
        let media = words.next().unwrap_or_default();
        if matches!(media, "text/plain" | "text/*" | "*/*") {
            return Some(Form::Text);
        }
        let parameters: BTreeMap<&str, &str> = words.filter_map(|word| word.split_once('=')).collect();
        let is_ours =
            parameters.get("g") == Some(&"config.k8s.io") && parameters.get("as").copied() == Some(kind);
        let version = match parameters.get("v") {
            Some(&"v1beta1") => "v1beta1",
            Some(&"v1alpha1") => "v1alpha1",
            _ => return None,
        };
        match media {
            "application/json" if is_ours => Some(Form::Json(version)),
            "application/yaml" if is_ours => Some(Form::Yaml(version)),
            _ => None,
        }
    })
}

fn not_acceptable() -> Answer {
    let status = json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": "ask for text/plain, or for application/json or application/yaml with v=v1beta1;g=config.k8s.io and as=Statusz or as=Flagz",
        "reason": "NotAcceptable",
        "code": 406,
    });
    let response =
        Response::builder().status(StatusCode::NOT_ACCEPTABLE).header("Content-Type", "application/json");
    response.body(body(status.to_string())).expect("constant headers are valid")
}

fn whole_secs(time: SystemTime) -> SystemTime {
    let secs = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    SystemTime::UNIX_EPOCH + Duration::from_secs(secs)
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    fn accepting(accept: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if !accept.is_empty() {
            headers.insert("Accept", accept.parse().expect("a header"));
        }
        headers
    }

    async fn text(answer: Answer) -> (u16, String, String) {
        let code = answer.status().as_u16();
        let kind = answer.headers()["Content-Type"].to_str().expect("ASCII").to_owned();
        let bytes = answer.into_body().collect().await.expect("a whole body").to_bytes();
        (code, kind, String::from_utf8(bytes.into()).expect("text"))
    }

    #[test]
    fn forms() {
        for (accept, form) in [
            ("", Some(Form::Text)),
            ("*/*", Some(Form::Text)),
            ("text/html, text/plain;q=0.5", Some(Form::Text)),
            ("application/json;v=v1beta1;g=config.k8s.io;as=Flagz", Some(Form::Json("v1beta1"))),
            ("application/yaml; as=Flagz; g=config.k8s.io; v=v1alpha1", Some(Form::Yaml("v1alpha1"))),
            ("application/json;v=v2;g=config.k8s.io;as=Flagz, */*", Some(Form::Text)),
            ("application/json", None),
            ("application/json;v=v1beta1;g=config.k8s.io;as=Statusz", None),
            ("application/json;v=v1;g=config.k8s.io;as=Flagz", None),
        ] {
            assert_eq!(negotiate(&accepting(accept), "Flagz"), form, "{accept:?}");
        }
    }

    #[tokio::test]
    async fn status_as_text_json_and_yaml() {
        let started = SystemTime::UNIX_EPOCH + Duration::from_millis(1_767_225_600_700);
        let ask = |accept: &str| statusz(&accepting(accept), started, started + Duration::from_secs(3725));
        let (code, kind, plain) = text(ask("")).await;
        assert_eq!((code, kind.as_str()), (200, "text/plain; charset=utf-8"));
        assert!(plain.starts_with("\nkube-proxy statusz\n"), "{plain}");
        assert!(
            plain.contains("\nStarted:  Thu Jan  1 00:00:00 UTC 2026\nUp:  1 hr 02 min 05 sec\n"),
            "{plain}"
        );
        assert!(plain.ends_with("Paths:  /configz /flagz /healthz /metrics /proxyMode\n"), "{plain}");
        let (_, kind, json) = text(ask("application/json;v=v1beta1;g=config.k8s.io;as=Statusz")).await;
        assert_eq!(kind, "application/json;g=config.k8s.io;v=v1beta1;as=Statusz");
        let json: Value = serde_json::from_str(&json).expect("JSON");
        assert_eq!(json["startTime"], "2026-01-01T00:00:00Z");
        assert_eq!((json["uptimeSeconds"].as_u64(), json["kind"].as_str()), (Some(3725), Some("Statusz")));
        let (_, _, yaml) = text(ask("application/yaml;v=v1beta1;g=config.k8s.io;as=Statusz")).await;
        assert!(yaml.contains("uptimeSeconds: 3725\n") && yaml.contains("- /proxyMode"), "{yaml}");
        let (code, _, refusal) = text(ask("application/json")).await;
        assert!(code == 406 && refusal.contains("\"reason\":\"NotAcceptable\""), "{refusal}");
    }

    #[tokio::test]
    async fn flags_are_listed_by_name() {
        let flags = BTreeMap::from([("v", "2".to_owned()), ("cleanup", "false".to_owned())]);
        let (_, _, plain) = text(flagz(&accepting(""), &flags)).await;
        assert!(plain.ends_with("\ncleanup: false\nv: 2\n"), "{plain}");
        let (_, _, json) =
            text(flagz(&accepting("application/json;v=v1beta1;g=config.k8s.io;as=Flagz"), &flags)).await;
        let json: Value = serde_json::from_str(&json).expect("JSON");
        assert_eq!(json["flags"], json!({"v": "2", "cleanup": "false"}));
    }
}
