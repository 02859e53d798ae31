// SPDX-License-Identifier: Apache-2.0

//! Which release of Kubernetes a server is.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, header};
use kube::client::Body;
use serde::Deserialize;
use tokio::time::timeout;

use super::{
    access::{Access, Pass},
    exchange::Silence,
    follow::collect,
};

/// A release of Kubernetes, without the patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Release {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

impl Release {
    /// What `/version` says. Some providers add a sign to the number: `33+`.
    fn read(answer: &[u8]) -> Option<Release> {
        #[derive(Deserialize)]
        struct Version {
            major: String,
            minor: String,
        }
        let number = |text: &str| text.trim_end_matches('+').parse().ok();
        let version: Version = serde_json::from_slice(answer).ok()?;
        Some(Release { major: number(&version.major)?, minor: number(&version.minor)? })
    }
}

impl Access {
    /// Asks the server which release it is. `None` if it does not say so; the error is that it could not be reached.
    pub(super) async fn release(&self, pass: &Pass) -> Result<Option<Release>, String> {
        let request = Request::get("/version")
            .header(header::ACCEPT, "application/json")
            .header(header::USER_AGENT, &self.settings().user_agent)
            .body(Body::empty())
            .expect("the user agent was checked when the settings were made");
        let response = match self.send(pass, request, PATIENCE).await {
            Ok(response) => response,
            Err(Silence::Patience) => return Ok(None),
            Err(Silence::Transport(reason)) => return Err(reason),
        };
        let (head, body) = response.into_parts();
        let body = match timeout(PATIENCE, collect(body, MAX_ANSWER)).await {
            Ok(Ok(body)) => body,
            _ => Bytes::new(),
        };
        Ok(Some(body).filter(|_| head.status == StatusCode::OK).and_then(|body| Release::read(&body)))
    }
}

/// Nothing depends on the answer but how much a list costs.
const PATIENCE: Duration = Duration::from_secs(5);
const MAX_ANSWER: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read_as_servers_write_them() {
        for (answer, expected) in [
            (r#"{"major": "1", "minor": "33", "gitVersion": "v1.33.2"}"#, Some((1, 33))),
            (r#"{"major": "1", "minor": "32+", "gitVersion": "v1.32.9-gke.7"}"#, Some((1, 32))),
            (r#"{"major": "", "minor": ""}"#, None),
            (r#"{"major": 1, "minor": 33}"#, None),
            ("<html>", None),
            ("", None),
        ] {
            let expected = expected.map(|(major, minor)| Release { major, minor });
            assert_eq!(Release::read(answer.as_bytes()), expected, "{answer}");
        }
        assert!(Release { major: 2, minor: 0 } > Release { major: 1, minor: 33 });
    }
}
