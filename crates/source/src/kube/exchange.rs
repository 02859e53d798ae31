// SPDX-License-Identifier: Apache-2.0

//! One request and the head of its answer, counted.

use std::{fmt, time::Duration};

use http::{Request, Response, header};
use kube::client::Body;
use tokio::time::{Instant, timeout};

use super::access::{Access, Pass, sentence};

/// A request that was answered, or not; for who counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange<'a> {
    /// The API server's host and port.
    pub host: &'a str,
    pub method: &'a str,
    /// `None` if there was no answer.
    pub code: Option<u16>,
    /// Until the head of the answer was there.
    pub took: Duration,
}

/// Who counts requests.
pub(super) type Observer = Box<dyn Fn(&Exchange<'_>) + Send + Sync>;

/// Why there was no answer.
#[derive(Debug)]
pub(super) enum Silence {
    /// None in time.
    Patience,
    /// In words.
    Transport(String),
}

impl fmt::Display for Silence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Silence::Patience => f.write_str("no answer in time"),
            Silence::Transport(reason) => f.write_str(reason),
        }
    }
}

impl Access {
    /// Tells `observer` of each request from now on. Only the first one is told.
    pub fn observe(&self, observer: impl Fn(&Exchange<'_>) + Send + Sync + 'static) {
        let _ = self.observer.set(Box::new(observer));
    }

    /// Sends a request with our credentials and waits for the head of the answer.
    pub(super) async fn send(
        &self,
        pass: &Pass,
        mut request: Request<Body>,
        patience: Duration,
    ) -> Result<Response<Body>, Silence> {
        if let Some(authorization) = &pass.authorization {
            request.headers_mut().insert(header::AUTHORIZATION, authorization.clone());
        }
        let (method, sent) = (request.method().clone(), Instant::now());
        let outcome = match timeout(patience, pass.client.send(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(Silence::Transport(sentence(&error))),
            Err(_) => Err(Silence::Patience),
        };
        if let Some(observer) = self.observer.get() {
            let code = outcome.as_ref().ok().map(|response| response.status().as_u16());
            let (host, took) = (&*pass.host, sent.elapsed());
            observer(&Exchange { host, method: method.as_str(), code, took });
        }
        outcome
    }
}
