// SPDX-License-Identifier: Apache-2.0

//! The field numbers of the objects served, from the `generated.proto` of each API group. Only for encoding:
//! the product has its own, and the two must agree without having met.

use Form::{Bool, Int, IntOrString, Json, Map, Message, Text, Time};
use Presence::{Always, Each, Given};

/// One field of a message.
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) tag: u32,
    pub(super) form: Form,
    pub(super) presence: Presence,
}

/// How a value is written.
#[derive(Clone, Copy)]
pub(super) enum Form {
    Text,
    Int,
    Bool,
    Message(&'static [Field]),
    /// From text to text.
    Map,
    /// RFC 3339 in JSON, seconds in protobuf.
    Time,
    IntOrString,
    /// JSON text within a message of its own, as managedFields have it.
    Json,
}

/// When a field is written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    /// A plain field of the Go struct: written even when it was not given, with its zero.
    Always,
    /// A pointer: written when given.
    Given,
    /// A list: each element is written.
    Each,
}

const fn field(name: &'static str, tag: u32, form: Form, presence: Presence) -> Field {
    Field { name, tag, form, presence }
}

pub(super) const SERVICE: &[Field] = &[
    field("metadata", 1, Message(OBJECT_META), Always),
    field("spec", 2, Message(SERVICE_SPEC), Always),
    field("status", 3, Message(SERVICE_STATUS), Always),
];

pub(super) const ENDPOINT_SLICE: &[Field] = &[
    field("metadata", 1, Message(OBJECT_META), Always),
    field("endpoints", 2, Message(ENDPOINT), Each),
    field("ports", 3, Message(ENDPOINT_PORT), Each),
    field("addressType", 4, Text, Always),
];

pub(super) const NODE: &[Field] = &[
    field("metadata", 1, Message(OBJECT_META), Always),
    field("spec", 2, Message(NODE_SPEC), Always),
    field("status", 3, Message(NODE_STATUS), Always),
];

pub(super) const SERVICE_CIDR: &[Field] = &[
    field("metadata", 1, Message(OBJECT_META), Always),
    field("spec", 2, Message(SERVICE_CIDR_SPEC), Always),
    field("status", 3, Message(&[]), Always),
];

pub(super) const STATUS: &[Field] = &[
    field("metadata", 1, Message(LIST_META), Always),
    field("status", 2, Text, Always),
    field("message", 3, Text, Always),
    field("reason", 4, Text, Always),
    field("details", 5, Message(STATUS_DETAILS), Given),
    field("code", 6, Int, Always),
];

pub(super) const LIST_META: &[Field] = &[
    field("selfLink", 1, Text, Always),
    field("resourceVersion", 2, Text, Always),
    field("continue", 3, Text, Always),
    field("remainingItemCount", 4, Int, Given),
];

const STATUS_DETAILS: &[Field] = &[
    field("name", 1, Text, Always),
    field("group", 2, Text, Always),
    field("kind", 3, Text, Always),
    field("retryAfterSeconds", 5, Int, Always),
    field("uid", 6, Text, Always),
];

const OBJECT_META: &[Field] = &[
    field("name", 1, Text, Always),
    field("generateName", 2, Text, Always),
    field("namespace", 3, Text, Always),
    field("selfLink", 4, Text, Always),
    field("uid", 5, Text, Always),
    field("resourceVersion", 6, Text, Always),
    field("generation", 7, Int, Always),
    field("creationTimestamp", 8, Time, Always),
    field("deletionTimestamp", 9, Time, Given),
    field("deletionGracePeriodSeconds", 10, Int, Given),
    field("labels", 11, Map, Each),
    field("annotations", 12, Map, Each),
    field("ownerReferences", 13, Message(OWNER_REFERENCE), Each),
    field("finalizers", 14, Text, Each),
    field("managedFields", 17, Message(MANAGED_FIELDS), Each),
];

const OWNER_REFERENCE: &[Field] = &[
    field("kind", 1, Text, Always),
    field("name", 3, Text, Always),
    field("uid", 4, Text, Always),
    field("apiVersion", 5, Text, Always),
    field("controller", 6, Bool, Given),
    field("blockOwnerDeletion", 7, Bool, Given),
];

const MANAGED_FIELDS: &[Field] = &[
    field("manager", 1, Text, Always),
    field("operation", 2, Text, Always),
    field("apiVersion", 3, Text, Always),
    field("time", 4, Time, Given),
    field("fieldsType", 6, Text, Always),
    field("fieldsV1", 7, Json, Given),
    field("subresource", 8, Text, Always),
];

const SERVICE_SPEC: &[Field] = &[
    field("ports", 1, Message(SERVICE_PORT), Each),
    field("selector", 2, Map, Each),
    field("clusterIP", 3, Text, Always),
    field("type", 4, Text, Always),
    field("externalIPs", 5, Text, Each),
    field("sessionAffinity", 7, Text, Always),
    field("loadBalancerIP", 8, Text, Always),
    field("loadBalancerSourceRanges", 9, Text, Each),
    field("externalName", 10, Text, Always),
    field("externalTrafficPolicy", 11, Text, Always),
    field("healthCheckNodePort", 12, Int, Always),
    field("publishNotReadyAddresses", 13, Bool, Always),
    field("sessionAffinityConfig", 14, Message(SESSION_AFFINITY_CONFIG), Given),
    field("ipFamilyPolicy", 17, Text, Given),
    field("clusterIPs", 18, Text, Each),
    field("ipFamilies", 19, Text, Each),
    field("allocateLoadBalancerNodePorts", 20, Bool, Given),
    field("loadBalancerClass", 21, Text, Given),
    field("internalTrafficPolicy", 22, Text, Given),
    field("trafficDistribution", 23, Text, Given),
];

const SERVICE_PORT: &[Field] = &[
    field("name", 1, Text, Always),
    field("protocol", 2, Text, Always),
    field("port", 3, Int, Always),
    field("targetPort", 4, IntOrString, Always),
    field("nodePort", 5, Int, Always),
    field("appProtocol", 6, Text, Given),
];

const SESSION_AFFINITY_CONFIG: &[Field] = &[field("clientIP", 1, Message(CLIENT_IP_CONFIG), Given)];

const CLIENT_IP_CONFIG: &[Field] = &[field("timeoutSeconds", 1, Int, Given)];

const SERVICE_STATUS: &[Field] = &[field("loadBalancer", 1, Message(LOAD_BALANCER_STATUS), Always)];

const LOAD_BALANCER_STATUS: &[Field] = &[field("ingress", 1, Message(LOAD_BALANCER_INGRESS), Each)];

const LOAD_BALANCER_INGRESS: &[Field] = &[
    field("ip", 1, Text, Always),
    field("hostname", 2, Text, Always),
    field("ipMode", 3, Text, Given),
    field("ports", 4, Message(PORT_STATUS), Each),
];

const PORT_STATUS: &[Field] =
    &[field("port", 1, Int, Always), field("protocol", 2, Text, Always), field("error", 3, Text, Given)];

const ENDPOINT: &[Field] = &[
    field("addresses", 1, Text, Each),
    field("conditions", 2, Message(ENDPOINT_CONDITIONS), Always),
    field("hostname", 3, Text, Given),
    field("targetRef", 4, Message(OBJECT_REFERENCE), Given),
    field("deprecatedTopology", 5, Map, Each),
    field("nodeName", 6, Text, Given),
    field("zone", 7, Text, Given),
    field("hints", 8, Message(ENDPOINT_HINTS), Given),
];

const ENDPOINT_CONDITIONS: &[Field] =
    &[field("ready", 1, Bool, Given), field("serving", 2, Bool, Given), field("terminating", 3, Bool, Given)];

const ENDPOINT_HINTS: &[Field] =
    &[field("forZones", 1, Message(NAMED), Each), field("forNodes", 2, Message(NAMED), Each)];

const NAMED: &[Field] = &[field("name", 1, Text, Always)];

const OBJECT_REFERENCE: &[Field] = &[
    field("kind", 1, Text, Always),
    field("namespace", 2, Text, Always),
    field("name", 3, Text, Always),
    field("uid", 4, Text, Always),
    field("apiVersion", 5, Text, Always),
    field("resourceVersion", 6, Text, Always),
    field("fieldPath", 7, Text, Always),
];

const ENDPOINT_PORT: &[Field] = &[
    field("name", 1, Text, Given),
    field("protocol", 2, Text, Given),
    field("port", 3, Int, Given),
    field("appProtocol", 4, Text, Given),
];

const NODE_SPEC: &[Field] = &[
    field("podCIDR", 1, Text, Always),
    field("externalID", 2, Text, Always),
    field("providerID", 3, Text, Always),
    field("unschedulable", 4, Bool, Always),
    field("taints", 5, Message(TAINT), Each),
    field("podCIDRs", 7, Text, Each),
];

const TAINT: &[Field] = &[
    field("key", 1, Text, Always),
    field("value", 2, Text, Always),
    field("effect", 3, Text, Always),
    field("timeAdded", 4, Time, Given),
];

const NODE_STATUS: &[Field] = &[
    field("phase", 3, Text, Always),
    field("conditions", 4, Message(NODE_CONDITION), Each),
    field("addresses", 5, Message(NODE_ADDRESS), Each),
];

const NODE_CONDITION: &[Field] = &[
    field("type", 1, Text, Always),
    field("status", 2, Text, Always),
    field("lastHeartbeatTime", 3, Time, Always),
    field("lastTransitionTime", 4, Time, Always),
    field("reason", 5, Text, Always),
    field("message", 6, Text, Always),
];

const NODE_ADDRESS: &[Field] = &[field("type", 1, Text, Always), field("address", 2, Text, Always)];

const SERVICE_CIDR_SPEC: &[Field] = &[field("cidrs", 1, Text, Each)];
