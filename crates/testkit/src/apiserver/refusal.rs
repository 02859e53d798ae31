// SPDX-License-Identifier: Apache-2.0

//! Failures, as an API server states them.

use serde_json::{Value, json};

/// A Status with `status: Failure`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub code: u16,
    pub reason: &'static str,
    pub message: String,
    /// Sent as the header Retry-After and in the details.
    pub retry_after_secs: Option<u32>,
}

impl Refusal {
    /// With the reason and a message usual for the code.
    pub fn new(code: u16) -> Refusal {
        let (reason, message) = match code {
            400 => ("BadRequest", "the request is not understood"),
            401 => ("Unauthorized", "Unauthorized"),
            403 => ("Forbidden", "access is forbidden"),
            404 => ("NotFound", "the server could not find the requested resource"),
            406 => ("NotAcceptable", "only the following media types are accepted: application/json"),
            410 => ("Expired", "The resourceVersion for the provided watch is too old."),
            422 => ("Invalid", "sendInitialEvents: Forbidden: the WatchList feature gate is off"),
            429 => ("TooManyRequests", "the server has received too many requests"),
            500 => ("InternalError", "an error on the server has prevented the request from succeeding"),
            503 => ("ServiceUnavailable", "the server is currently unable to take the request"),
            504 => ("Timeout", "the request has timed out"),
            _ => ("", "something is wrong"),
        };
        Refusal { code, reason, message: message.to_owned(), retry_after_secs: None }
    }

    /// The same, with a time to wait.
    pub fn retry_after(self, secs: u32) -> Refusal {
        Refusal { retry_after_secs: Some(secs), ..self }
    }

    pub(super) fn bad_request(message: &str) -> Refusal {
        Refusal { message: message.to_owned(), ..Refusal::new(400) }
    }

    pub(super) fn too_old_version(wanted: u64, oldest: u64) -> Refusal {
        Refusal { message: format!("too old resource version: {wanted} ({oldest})"), ..Refusal::new(410) }
    }

    pub(super) fn too_large_version(wanted: u64, newest: u64) -> Refusal {
        let message = format!("Too large resource version: {wanted}, current: {newest}");
        Refusal { message, ..Refusal::new(504) }.retry_after(1)
    }

    pub(super) fn expired_continue() -> Refusal {
        let message = "The provided continue parameter is too old to display a consistent list result.";
        Refusal { message: message.to_owned(), ..Refusal::new(410) }
    }

    pub(super) fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        });
        if let Some(secs) = self.retry_after_secs {
            status["details"] = json!({"retryAfterSeconds": secs});
        }
        status
    }
}
