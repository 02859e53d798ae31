// SPDX-License-Identifier: Apache-2.0

//! `/healthz`, `/livez` and `/readyz` of the health server, as load balancers and the kubelet ask for them.
//!
//! `/healthz` tells whether traffic may be sent here: 200 only when all that is known is in force and the node
//! is not about to go. It is 503 before the first programming and while programming fails. `/livez` tells
//! whether a restart could help: 503 only when work has waited or failed for twice the sync period. A process
//! that waits for the API server is alive, and restarting it would change nothing. `/readyz`, which kube-proxy does
//! not have, is for rolling updates: 200 from the first complete programming on.

use std::{collections::BTreeMap, sync::Arc, time::SystemTime};

use hyper::{Response, StatusCode};
use serde::Serialize;

use crate::{
    clock,
    http::{Answer, body},
    metrics::{Metrics, ip_family},
    status::{Report, Status},
};

/// The body, in kube-proxy's field order.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Health {
    last_updated: String,
    current_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    status: BTreeMap<&'static str, FamilyHealth>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct FamilyHealth {
    last_updated: String,
    healthy: bool,
}

/// Which of the questions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Question {
    Health,
    Life,
    Readiness,
}

/// What the health server answers.
pub fn route(status: &Arc<Status>, metrics: &Arc<Metrics>, path: &str) -> Option<Answer> {
    let report = status.report(SystemTime::now());
    let (question, counter) = match path {
        "/healthz" => (Question::Health, Some(&metrics.healthz)),
        "/livez" => (Question::Life, Some(&metrics.livez)),
        "/readyz" => (Question::Readiness, None),
        _ => return None,
    };
    let (code, text) = answer(&report, question);
    if let Some(counter) = counter {
        counter.with(&[code.as_str()]).add(1);
    }
    let response = Response::builder()
        .status(code)
        .header("Content-Type", "application/json")
        .header("X-Content-Type-Options", "nosniff");
    Some(response.body(body(text)).expect("constant headers are valid"))
}

fn answer(report: &Report, question: Question) -> (StatusCode, String) {
    let (healthy, good) = match question {
        Question::Health => (report.healthy, report.healthy && report.eligible),
        Question::Life => (report.alive, report.alive),
        Question::Readiness => (report.healthy, report.programmed.is_some()),
    };
    // Go's zero time stands for never.
    let time = |time: Option<SystemTime>| time.map_or("0001-01-01T00:00:00Z".to_owned(), clock::rfc3339);
    let status = match report.programmed {
        None => BTreeMap::new(),
        Some(programmed) => report
            .served()
            .map(|family| {
                (ip_family(family), FamilyHealth { last_updated: clock::rfc3339(programmed), healthy })
            })
            .collect(),
    };
    let health = Health {
        last_updated: if good { clock::rfc3339(report.now) } else { time(report.programmed) },
        current_time: clock::rfc3339(report.now),
        node_eligible: (question == Question::Health).then_some(report.eligible),
        healthy,
        status,
    };
    let code = if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, serde_json::to_string(&health).expect("plain fields and string keys always have a JSON form"))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use model::PerFamily;

    use super::*;

    const BOTH: PerFamily<bool> = PerFamily { v4: true, v6: true };

    fn at(secs: u64) -> SystemTime {
        UNIX_EPOCH + Duration::new(1_767_225_600 + secs, 500_000_000)
    }

    fn ask(status: &Status, question: Question, secs: u64) -> (u16, String) {
        let (code, text) = answer(&status.report(at(secs)), question);
        (code.as_u16(), text)
    }

    #[test]
    fn the_exact_bodies() {
        let status = Status::new(BOTH, Duration::from_secs(30), true);
        status.node(Some(true));
        status.programmed(at(1));
        assert_eq!(
            ask(&status, Question::Health, 2),
            (
                200,
                r#"{"lastUpdated":"2026-01-01T00:00:02.5Z","currentTime":"2026-01-01T00:00:02.5Z","nodeEligible":true,"healthy":true,"status":{"IPv4":{"lastUpdated":"2026-01-01T00:00:01.5Z","healthy":true},"IPv6":{"lastUpdated":"2026-01-01T00:00:01.5Z","healthy":true}}}"#
                    .to_owned()
            )
        );
        status.node(Some(false));
        assert_eq!(
            ask(&status, Question::Health, 3),
            (
                503,
                r#"{"lastUpdated":"2026-01-01T00:00:01.5Z","currentTime":"2026-01-01T00:00:03.5Z","nodeEligible":false,"healthy":true,"status":{"IPv4":{"lastUpdated":"2026-01-01T00:00:01.5Z","healthy":true},"IPv6":{"lastUpdated":"2026-01-01T00:00:01.5Z","healthy":true}}}"#
                    .to_owned()
            )
        );
        let life = Status::new(PerFamily { v4: true, v6: false }, Duration::from_secs(30), true);
        life.programmed(at(1));
        assert_eq!(
            ask(&life, Question::Life, 2),
            (
                200,
                r#"{"lastUpdated":"2026-01-01T00:00:02.5Z","currentTime":"2026-01-01T00:00:02.5Z","healthy":true,"status":{"IPv4":{"lastUpdated":"2026-01-01T00:00:01.5Z","healthy":true}}}"#
                    .to_owned()
            )
        );
    }

    #[test]
    fn before_the_first_programming_it_is_alive_but_not_healthy() {
        let status = Status::new(BOTH, Duration::from_secs(30), false);
        let (code, text) = ask(&status, Question::Health, 0);
        assert_eq!(code, 503);
        assert!(
            text.contains(r#""lastUpdated":"0001-01-01T00:00:00Z""#) && text.contains(r#""status":{}"#),
            "{text}"
        );
        assert!(text.contains(r#""nodeEligible":true"#), "a source without nodes cannot miss one: {text}");
        assert_eq!(ask(&status, Question::Life, 0).0, 200);
        assert_eq!(ask(&status, Question::Readiness, 0).0, 503);
        status.programmed(at(1));
        status.failed(at(2), "no".into());
        assert_eq!(ask(&status, Question::Readiness, 2).0, 200, "what is in force goes on serving");
    }

    #[test]
    fn a_failure_shows_at_once_and_kills_only_later() {
        let status = Status::new(BOTH, Duration::from_secs(30), false);
        status.programmed(at(0));
        status.queued(at(10));
        assert_eq!(ask(&status, Question::Health, 11).0, 200, "work that waits a moment is no failure");
        status.failed(at(11), "no".into());
        assert_eq!((ask(&status, Question::Health, 11).0, ask(&status, Question::Life, 11).0), (503, 200));
        assert_eq!((ask(&status, Question::Health, 69).0, ask(&status, Question::Life, 69).0), (503, 200));
        assert_eq!(ask(&status, Question::Life, 70).0, 503, "sixty seconds after it was queued");
        status.programmed(at(71));
        assert_eq!((ask(&status, Question::Health, 71).0, ask(&status, Question::Life, 71).0), (200, 200));
        status.queued(at(80));
        assert_eq!(ask(&status, Question::Health, 140).0, 503, "a stuck loop is not healthy");
    }

    #[test]
    fn a_missing_node_is_not_eligible() {
        let status = Status::new(BOTH, Duration::from_secs(30), true);
        status.programmed(at(0));
        assert_eq!(ask(&status, Question::Health, 1).0, 503);
        assert_eq!(ask(&status, Question::Life, 1).0, 200);
    }

    #[test]
    fn other_paths_are_not_found_and_answers_are_counted() {
        let status = Arc::new(Status::new(BOTH, Duration::from_secs(30), false));
        let metrics = Arc::new(Metrics::new(UNIX_EPOCH));
        assert!(route(&status, &metrics, "/").is_none());
        let response = route(&status, &metrics, "/healthz").expect("a path of ours");
        assert_eq!(response.headers()["Content-Type"], "application/json");
        assert_eq!(response.headers()["X-Content-Type-Options"], "nosniff");
        assert_eq!(metrics.healthz.with(&["503"]).value(), 1);
    }
}
