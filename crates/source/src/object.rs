// SPDX-License-Identifier: Apache-2.0

//! The Kubernetes objects, cut down to the fields in use. One set of types is filled from protobuf (API), from
//! JSON (API, files) and from YAML by way of JSON (files); unknown fields are skipped without being kept.
//!
//! Tags are those of the `generated.proto` of each API group. Everything is optional, because anything may be
//! missing; what a missing field means is decided in [`crate::lower`].

use bytes::Bytes;
use prost::Message;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser::SerializeMap};

use crate::lower::time;

/// metadata of any object.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Metadata {
    #[prost(string, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[prost(string, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    #[prost(string, optional, tag = "6")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_version: Option<String>,
    #[prost(message, optional, tag = "8")]
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "lenient_time")]
    pub creation_timestamp: Option<Time>,
    #[prost(message, optional, tag = "9")]
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "lenient_time")]
    pub deletion_timestamp: Option<Time>,
    #[prost(message, repeated, tag = "11")]
    #[serde(skip_serializing_if = "Vec::is_empty", with = "pairs")]
    pub labels: Vec<Pair>,
    #[prost(message, repeated, tag = "12")]
    #[serde(skip_serializing_if = "Vec::is_empty", with = "pairs")]
    pub annotations: Vec<Pair>,
}

impl Metadata {
    /// The value of a label, if it is text.
    pub fn label(&self, key: &str) -> Option<&str> {
        find(&self.labels, key)
    }

    /// The value of an annotation, if it is text.
    pub fn annotation(&self, key: &str) -> Option<&str> {
        find(&self.annotations, key)
    }
}

fn find<'a>(pairs: &'a [Pair], key: &str) -> Option<&'a str> {
    let pair = pairs.iter().find(|pair| pair.key == key.as_bytes())?;
    std::str::from_utf8(&pair.value).ok()
}

/// An entry of a map of strings. Bytes, not text: they are slices of the message they came in, and an
/// annotation that nobody reads must not spoil its object by not being UTF-8.
#[derive(Clone, PartialEq, Message)]
pub struct Pair {
    #[prost(bytes = "bytes", tag = "1")]
    pub key: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub value: Bytes,
}

impl Pair {
    pub fn new(key: &str, value: &str) -> Pair {
        Pair { key: Bytes::copy_from_slice(key.as_bytes()), value: Bytes::copy_from_slice(value.as_bytes()) }
    }
}

/// A point in time; RFC 3339 in JSON.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Time {
    #[prost(int64, optional, tag = "1")]
    pub seconds: Option<i64>,
    #[prost(int32, optional, tag = "2")]
    pub nanos: Option<i32>,
}

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&time::format(self.seconds.unwrap_or_default()))
    }
}

/// A time that cannot be read counts as missing: nothing of weight depends on one.
fn lenient_time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Time>, D::Error> {
    let text = Option::<TextOrOther>::deserialize(deserializer)?;
    Ok(text.and_then(|text| text.0).and_then(|text| time::parse_nanos(&text)).map(|nanos| Time {
        seconds: Some(nanos.div_euclid(1_000_000_000)),
        nanos: Some(nanos.rem_euclid(1_000_000_000) as i32),
    }))
}

macro_rules! object {
    ($(#[$doc:meta])* $name:ident { $($(#[$attribute:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        pub struct $name { $($(#[$attribute])* pub $field: $type,)* }
    };
}

object! {
    /// core/v1 Service.
    Service {
        #[prost(message, optional, tag = "1")]
        metadata: Option<Metadata>,
        #[prost(message, optional, tag = "2")]
        #[serde(skip_serializing_if = "Option::is_none")]
        spec: Option<ServiceSpec>,
        #[prost(message, optional, tag = "3")]
        #[serde(skip_serializing_if = "Option::is_none")]
        status: Option<ServiceStatus>,
    }
}

object! {
    ServiceSpec {
        #[prost(message, repeated, tag = "1")]
        #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
        ports: Vec<ServicePort>,
        #[prost(string, optional, tag = "3")]
        #[serde(rename = "clusterIP", skip_serializing_if = "Option::is_none")]
        cluster_ip: Option<String>,
        #[prost(string, optional, tag = "4")]
        #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
        kind: Option<String>,
        #[prost(string, repeated, tag = "5")]
        #[serde(rename = "externalIPs", skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
        external_ips: Vec<String>,
        #[prost(string, optional, tag = "7")]
        #[serde(skip_serializing_if = "Option::is_none")]
        session_affinity: Option<String>,
        #[prost(string, repeated, tag = "9")]
        #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
        load_balancer_source_ranges: Vec<String>,
        #[prost(string, optional, tag = "11")]
        #[serde(skip_serializing_if = "Option::is_none")]
        external_traffic_policy: Option<String>,
        #[prost(int32, optional, tag = "12")]
        #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "saturating")]
        health_check_node_port: Option<i32>,
        #[prost(message, optional, tag = "14")]
        #[serde(skip_serializing_if = "Option::is_none")]
        session_affinity_config: Option<SessionAffinityConfig>,
        #[prost(string, repeated, tag = "18")]
        #[serde(rename = "clusterIPs", skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
        cluster_ips: Vec<String>,
        #[prost(string, repeated, tag = "19")]
        #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
        ip_families: Vec<String>,
        #[prost(string, optional, tag = "22")]
        #[serde(skip_serializing_if = "Option::is_none")]
        internal_traffic_policy: Option<String>,
    }
}

object! {
    ServicePort {
        #[prost(string, optional, tag = "1")]
        #[serde(skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        #[prost(string, optional, tag = "2")]
        #[serde(skip_serializing_if = "Option::is_none")]
        protocol: Option<String>,
        #[prost(int32, optional, tag = "3")]
        #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "saturating")]
        port: Option<i32>,
        #[prost(int32, optional, tag = "5")]
        #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "saturating")]
        node_port: Option<i32>,
    }
}

object! {
    SessionAffinityConfig {
        #[prost(message, optional, tag = "1")]
        #[serde(rename = "clientIP", skip_serializing_if = "Option::is_none")]
        client_ip: Option<ClientIpConfig>,
    }
}

object! {
    ClientIpConfig {
        #[prost(int32, optional, tag = "1")]
        #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "saturating")]
        timeout_seconds: Option<i32>,
    }
}

object! {
    ServiceStatus {
        #[prost(message, optional, tag = "1")]
        #[serde(skip_serializing_if = "Option::is_none")]
        load_balancer: Option<LoadBalancerStatus>,
    }
}

object! {
    LoadBalancerStatus {
        #[prost(message, repeated, tag = "1")]
        #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
        ingress: Vec<LoadBalancerIngress>,
    }
}

object! {
    LoadBalancerIngress {
        #[prost(string, optional, tag = "1")]
        #[serde(skip_serializing_if = "Option::is_none")]
        ip: Option<String>,
        #[prost(string, optional, tag = "3")]
        #[serde(skip_serializing_if = "Option::is_none")]
        ip_mode: Option<String>,
    }
}

object! {
    /// discovery.k8s.io/v1 EndpointSlice.
    EndpointSlice {
        #[prost(message, optional, tag = "1")]
        metadata: Option<Metadata>,
        #[prost(message, repeated, tag = "2")]
        #[serde(deserialize_with = "null_as_empty")]
        endpoints: Vec<Endpoint>,
        #[prost(message, repeated, tag = "3")]
        #[serde(deserialize_with = "null_as_empty")]
        ports: Vec<EndpointPort>,
        #[prost(string, optional, tag = "4")]
        #[serde(skip_serializing_if = "Option::is_none")]
        address_type: Option<String>,
    }
}

object! {
    Endpoint {
        #[prost(string, repeated, tag = "1")]
        #[serde(deserialize_with = "null_as_empty")]
        addresses: Vec<String>,
        #[prost(message, optional, tag = "2")]
        #[serde(skip_serializing_if = "Option::is_none")]
        conditions: Option<EndpointConditions>,
        #[prost(string, optional, tag = "6")]
        #[serde(skip_serializing_if = "Option::is_none")]
        node_name: Option<String>,
        #[prost(string, optional, tag = "7")]
        #[serde(skip_serializing_if = "Option::is_none")]
        zone: Option<String>,
        #[prost(message, optional, tag = "8")]
        #[serde(skip_serializing_if = "Option::is_none")]
        hints: Option<EndpointHints>,
    }
}

object! {
    #[derive(Copy)]
    EndpointConditions {
        #[prost(bool, optional, tag = "1")]
        #[serde(skip_serializing_if = "Option::is_none")]
        ready: Option<bool>,
        #[prost(bool, optional, tag = "2")]
        #[serde(skip_serializing_if = "Option::is_none")]
        serving: Option<bool>,
        #[prost(bool, optional, tag = "3")]
        #[serde(skip_serializing_if = "Option::is_none")]
        terminating: Option<bool>,
    }
}

object! {
    EndpointHints {
        #[prost(message, repeated, tag = "1")]
        #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
        for_zones: Vec<Named>,
        #[prost(message, repeated, tag = "2")]
        #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
        for_nodes: Vec<Named>,
    }
}

object! {
    /// ForZone and ForNode.
    Named {
        #[prost(string, optional, tag = "1")]
        #[serde(skip_serializing_if = "Option::is_none")]
        name: Option<String>,
    }
}

object! {
    EndpointPort {
        #[prost(string, optional, tag = "1")]
        #[serde(skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        #[prost(string, optional, tag = "2")]
        #[serde(skip_serializing_if = "Option::is_none")]
        protocol: Option<String>,
        #[prost(int32, optional, tag = "3")]
        #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "saturating")]
        port: Option<i32>,
    }
}

object! {
    /// core/v1 Node.
    Node {
        #[prost(message, optional, tag = "1")]
        metadata: Option<Metadata>,
        #[prost(message, optional, tag = "2")]
        #[serde(skip_serializing_if = "Option::is_none")]
        spec: Option<NodeSpec>,
        #[prost(message, optional, tag = "3")]
        #[serde(skip_serializing_if = "Option::is_none")]
        status: Option<NodeStatus>,
    }
}

object! {
    NodeSpec {
        #[prost(message, repeated, tag = "5")]
        #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
        taints: Vec<Taint>,
        #[prost(string, repeated, tag = "7")]
        #[serde(rename = "podCIDRs", skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
        pod_cidrs: Vec<String>,
    }
}

object! {
    Taint {
        #[prost(string, optional, tag = "1")]
        #[serde(skip_serializing_if = "Option::is_none")]
        key: Option<String>,
    }
}

object! {
    NodeStatus {
        #[prost(message, repeated, tag = "5")]
        #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
        addresses: Vec<NodeAddress>,
    }
}

object! {
    NodeAddress {
        #[prost(string, optional, tag = "1")]
        #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
        kind: Option<String>,
        #[prost(string, optional, tag = "2")]
        #[serde(skip_serializing_if = "Option::is_none")]
        address: Option<String>,
    }
}

object! {
    /// networking.k8s.io ServiceCIDR, v1 and v1beta1 alike.
    ServiceCidr {
        #[prost(message, optional, tag = "1")]
        metadata: Option<Metadata>,
        #[prost(message, optional, tag = "2")]
        #[serde(skip_serializing_if = "Option::is_none")]
        spec: Option<ServiceCidrSpec>,
    }
}

object! {
    ServiceCidrSpec {
        #[prost(string, repeated, tag = "1")]
        #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
        cidrs: Vec<String>,
    }
}

/// `null` where a list is expected is an empty list: Go writes nil slices so.
fn null_as_empty<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Ok(Option::<Vec<T>>::deserialize(deserializer)?.unwrap_or_default())
}

/// A whole number that may be larger than the wire allows: it saturates, and is then out of range for a port,
/// so that the port is refused and not the whole object.
fn saturating<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<i32>, D::Error> {
    struct Visitor;

    impl<'de> de::Visitor<'de> for Visitor {
        type Value = Option<i32>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a whole number")
        }

        fn visit_i64<E>(self, number: i64) -> Result<Option<i32>, E> {
            Ok(Some(number.clamp(i32::MIN.into(), i32::MAX.into()) as i32))
        }

        fn visit_u64<E>(self, number: u64) -> Result<Option<i32>, E> {
            Ok(Some(number.min(i32::MAX as u64) as i32))
        }

        fn visit_unit<E>(self) -> Result<Option<i32>, E> {
            Ok(None)
        }
    }

    deserializer.deserialize_any(Visitor)
}

/// Text, or something else that is skipped.
struct TextOrOther(Option<String>);

impl<'de> Deserialize<'de> for TextOrOther {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<TextOrOther, D::Error> {
        struct Visitor;

        impl<'de> de::Visitor<'de> for Visitor {
            type Value = TextOrOther;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("text")
            }

            fn visit_str<E>(self, text: &str) -> Result<TextOrOther, E> {
                Ok(TextOrOther(Some(text.to_owned())))
            }

            fn visit_bool<E>(self, _: bool) -> Result<TextOrOther, E> {
                Ok(TextOrOther(None))
            }

            fn visit_i64<E>(self, _: i64) -> Result<TextOrOther, E> {
                Ok(TextOrOther(None))
            }

            fn visit_u64<E>(self, _: u64) -> Result<TextOrOther, E> {
                Ok(TextOrOther(None))
            }

            fn visit_f64<E>(self, _: f64) -> Result<TextOrOther, E> {
                Ok(TextOrOther(None))
            }

            fn visit_unit<E>(self) -> Result<TextOrOther, E> {
                Ok(TextOrOther(None))
            }

            fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<TextOrOther, A::Error> {
                while seq.next_element::<de::IgnoredAny>()?.is_some() {}
                Ok(TextOrOther(None))
            }

            fn visit_map<A: de::MapAccess<'de>>(self, mut map: A) -> Result<TextOrOther, A::Error> {
                while map.next_entry::<de::IgnoredAny, de::IgnoredAny>()?.is_some() {}
                Ok(TextOrOther(None))
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}

/// Labels and annotations as a JSON map.
mod pairs {
    use super::{Bytes, Deserializer, Pair, SerializeMap, Serializer, TextOrOther, de};

    pub(super) fn serialize<S: Serializer>(pairs: &[Pair], serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(pairs.len()))?;
        for pair in pairs {
            map.serialize_entry(&String::from_utf8_lossy(&pair.key), &String::from_utf8_lossy(&pair.value))?;
        }
        map.end()
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Pair>, D::Error> {
        struct Visitor;

        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Vec<Pair>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a map of strings")
            }

            fn visit_unit<E>(self) -> Result<Vec<Pair>, E> {
                Ok(Vec::new())
            }

            fn visit_map<A: de::MapAccess<'de>>(self, mut map: A) -> Result<Vec<Pair>, A::Error> {
                let mut pairs = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, TextOrOther>()? {
                    if let Some(value) = value.0 {
                        pairs.push(Pair { key: Bytes::from(key), value: Bytes::from(value) });
                    }
                }
                Ok(pairs)
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}
