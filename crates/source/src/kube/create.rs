// SPDX-License-Identifier: Apache-2.0

//! The one thing written to the API: Events. One attempt each; who asks decides whether to try again.

use std::time::Duration;

use http::{Request, StatusCode, header};
use kube::client::Body;
use serde_json::Value;

use super::access::Access;

/// Longer than this no attempt takes.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why an object was not created.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotCreated {
    /// The server has said no; asking again will not help.
    #[error("the API server refuses it with {code}")]
    Refused { code: u16 },
    /// It could not be asked, or has trouble of its own.
    #[error("{0}")]
    Unreachable(String),
}

impl Access {
    /// Creates an object by POST to a path such as `/apis/events.k8s.io/v1/namespaces/default/events`.
    pub async fn create(&self, path: &str, object: &Value) -> Result<(), NotCreated> {
        let unreachable = |error: String| NotCreated::Unreachable(error);
        let pass = self.pass().await;
        let request = Request::post(path)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json")
            .header(header::USER_AGENT, &self.settings().user_agent)
            .body(Body::from(object.to_string().into_bytes()))
            .map_err(|error| unreachable(error.to_string()))?;
        let response =
            self.send(&pass, request, PATIENCE).await.map_err(|silence| unreachable(silence.to_string()))?;
        match response.status() {
            code if code.is_success() => Ok(()),
            // It is there already: an earlier answer was lost.
            StatusCode::CONFLICT => Ok(()),
            StatusCode::UNAUTHORIZED => {
                self.renew(pass.generation).await;
                Err(unreachable("the API server does not know us (401)".to_owned()))
            }
            code if code.is_server_error() || code == StatusCode::TOO_MANY_REQUESTS => {
                Err(unreachable(format!("the API server has trouble ({code})")))
            }
            code => Err(NotCreated::Refused { code: code.as_u16() }),
        }
    }
}
