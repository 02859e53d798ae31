// SPDX-License-Identifier: Apache-2.0

//! The kinds of object the server holds.

use model::Kind;

use super::schema::{self, Field};

/// Where a kind lives and how it is written.
pub(super) struct Resource {
    pub(super) kind: Kind,
    /// As in the `kind` field.
    pub(super) name: &'static str,
    pub(super) api_version: &'static str,
    pub(super) plural: &'static str,
    pub(super) namespaced: bool,
    pub(super) schema: &'static [Field],
}

static RESOURCES: [Resource; 4] = [
    Resource {
        kind: Kind::Service,
        name: "Service",
        api_version: "v1",
        plural: "services",
        namespaced: true,
        schema: schema::SERVICE,
    },
    Resource {
        kind: Kind::EndpointSlice,
        name: "EndpointSlice",
        api_version: "discovery.k8s.io/v1",
        plural: "endpointslices",
        namespaced: true,
        schema: schema::ENDPOINT_SLICE,
    },
    Resource {
        kind: Kind::Node,
        name: "Node",
        api_version: "v1",
        plural: "nodes",
        namespaced: false,
        schema: schema::NODE,
    },
    Resource {
        kind: Kind::ServiceCidr,
        name: "ServiceCIDR",
        api_version: "networking.k8s.io/v1",
        plural: "servicecidrs",
        namespaced: false,
        schema: schema::SERVICE_CIDR,
    },
];

impl Resource {
    /// By the `kind` field of an object.
    pub(super) fn named(name: &str) -> Option<&'static Resource> {
        RESOURCES.iter().find(|resource| resource.name == name)
    }
}

/// What a path points to.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) resource: &'static Resource,
    /// Empty for all.
    pub(super) namespace: &'a str,
    /// Empty for all.
    pub(super) name: &'a str,
}

impl Target<'_> {
    pub(super) fn parse(path: &str) -> Option<Target<'_>> {
        let (resource, rest) = RESOURCES.iter().find_map(|resource| {
            let root = if resource.api_version.contains('/') { "/apis/" } else { "/api/" };
            let rest = path.strip_prefix(root)?.strip_prefix(resource.api_version)?.strip_prefix('/')?;
            rest.split('/').any(|part| part == resource.plural).then_some((resource, rest))
        })?;
        let parts: Vec<&str> = rest.split('/').collect();
        let (namespace, name) = match parts[..] {
            [plural] if plural == resource.plural => ("", ""),
            [plural, name] if plural == resource.plural && !resource.namespaced => ("", name),
            ["namespaces", namespace, plural] if plural == resource.plural => (namespace, ""),
            ["namespaces", namespace, plural, name] if plural == resource.plural => (namespace, name),
            _ => return None,
        };
        Some(Target { resource, namespace, name })
    }
}
