// SPDX-License-Identifier: Apache-2.0

//! Kubernetes objects to the model's words, for all sources alike. Beyond this line no Kubernetes type exists.
//!
//! A part that makes no sense is left out, an object that makes no sense is refused as a whole; each time a
//! [`Problem`] says which and why, and everything else goes on. Nothing here can fail or panic.

mod address;
mod annotations;
mod node;
mod service;
mod service_cidr;
mod slice;
#[cfg(test)]
mod tests;
pub(crate) mod time;

use std::{borrow::Cow, fmt::Display, sync::Arc};

use model::{Kind, Protocol, Update};
use prost::Message;
use serde::de::DeserializeOwned;

pub use self::address::{parse_cidr, parse_ip};
use crate::{
    intern::Interner,
    object::Metadata,
    problem::{Problem, Reason},
};

/// A kind of object that can be lowered.
pub trait Resource: Message + Default + DeserializeOwned + Send + 'static {
    const KIND: Kind;
    /// As people write it.
    const NAME: &'static str;

    fn metadata(&self) -> Option<&Metadata>;

    /// The object in the model's words.
    fn lower(&self, scope: &mut Scope<'_>) -> Lowered;

    /// What to say when the object of that name has gone; nothing if it could never have been there.
    fn gone(metadata: &Metadata, scope: &mut Scope<'_>) -> Option<Update>;
}

/// What became of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lowered {
    Object(Update),
    /// By rule nothing for us (headless, another proxy's, external name): as if it did not exist.
    Ignored,
    /// Malformed: as if it did not exist. The problem has been reported.
    Refused,
}

/// What lowering needs besides the object.
pub struct Scope<'a> {
    pub interner: &'a mut Interner,
    /// The Node of any other name is ignored.
    pub node_name: &'a str,
    /// Takes each problem found.
    pub report: &'a mut dyn FnMut(Problem),
}

/// One object while it is being lowered: knows its name, so that problems can carry it.
struct Subject<'a, 'b> {
    kind: &'static str,
    metadata: &'a Metadata,
    scope: &'a mut Scope<'b>,
}

impl Subject<'_, '_> {
    fn problem(&mut self, field: impl Into<Cow<'static, str>>, reason: Reason, value: impl Display) {
        let object = describe(self.kind, self.metadata);
        (self.scope.report)(Problem::new(object, field, reason, value));
    }

    fn string(&mut self, text: &str) -> Arc<str> {
        self.scope.interner.string(text)
    }

    /// Absent and empty mean TCP, as the API server has it.
    fn protocol(
        &mut self,
        text: Option<&str>,
        field: impl FnOnce() -> Cow<'static, str>,
    ) -> Option<Protocol> {
        match text.unwrap_or_default() {
            "" | "TCP" => Some(Protocol::Tcp),
            "UDP" => Some(Protocol::Udp),
            "SCTP" => Some(Protocol::Sctp),
            other => {
                self.problem(field(), Reason::BadProtocol, other);
                None
            }
        }
    }
}

/// `Service shop/cart`, `Node worker-1`.
pub(crate) fn describe(kind: &str, metadata: &Metadata) -> String {
    match (metadata.namespace(), metadata.name()) {
        ("", "") => kind.to_owned(),
        ("", name) => format!("{kind} {name}"),
        (namespace, name) => format!("{kind} {namespace}/{name}"),
    }
}

/// Namespace and name, or a problem.
fn namespaced<'a>(subject: &mut Subject<'a, '_>) -> Option<(&'a str, &'a str)> {
    let metadata = subject.metadata;
    if metadata.name().is_empty() {
        subject.problem("", Reason::NoName, "");
        return None;
    }
    if metadata.namespace().is_empty() {
        subject.problem("", Reason::NoNamespace, "");
        return None;
    }
    Some((metadata.namespace(), metadata.name()))
}

/// A number from 1 to 65535.
fn port(number: i32) -> Option<u16> {
    u16::try_from(number).ok().filter(|port| *port != 0)
}

/// A Service with this label belongs to another proxy.
pub(crate) const SERVICE_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// On Services and EndpointSlices without cluster IP.
pub(crate) const HEADLESS: &str = "service.kubernetes.io/headless";
/// On an EndpointSlice: the Service it belongs to.
pub(crate) const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// On an EndpointSlice: when the change happened that led to its present version.
pub(crate) const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";
/// On a Node.
pub(crate) const ZONE: &str = "topology.kubernetes.io/zone";
/// A taint of a Node about to go.
pub(crate) const TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";
