// SPDX-License-Identifier: Apache-2.0

//! Reads an object and sees the keys that nobody reads: one that is nearly a key that is read is a slip of the pen, and
//! the API server, which would have said so, is not there.
//!
//! It stands between the JSON and the type. The type says which keys it reads and which value it does not want, so
//! nothing has to be known of the types here, nothing is read twice, and a document without a strange key costs nothing.

use std::{cell::RefCell, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, MapAccess, SeqAccess, Visitor},
    forward_to_deserialize_any,
};

use super::spelling;

/// A key that is none.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Slip {
    /// Where, as in [`crate::Problem::field`].
    pub path: String,
    /// The key that was meant.
    pub meant: &'static str,
}

/// Reads an object, and its slips.
pub(super) fn read<'de, T: Deserialize<'de>>(json: &'de [u8]) -> serde_json::Result<(T, Vec<Slip>)> {
    let mut reader = serde_json::Deserializer::from_slice(json);
    let slips = RefCell::default();
    let way = Way { path: &Path::Root, slips: &slips };
    let object = T::deserialize(Watched { inner: &mut reader, way, fields: &[] })?;
    reader.end()?;
    Ok((object, slips.into_inner()))
}

/// Fields of Kubernetes that are not read, and look like one that is.
const OTHERS: &[&str] = &["podCIDR"];

/// How a value was come to. On the stack, and made into text only for a slip.
enum Path<'a> {
    Root,
    Key(&'a Path<'a>, &'a str),
    Item(&'a Path<'a>, usize),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Path::Root => Ok(()),
            Path::Key(Path::Root, key) => f.write_str(key),
            Path::Key(parent, key) => write!(f, "{parent}.{key}"),
            Path::Item(parent, at) => write!(f, "{parent}[{at}]"),
        }
    }
}

#[derive(Clone, Copy)]
struct Way<'a> {
    path: &'a Path<'a>,
    slips: &'a RefCell<Vec<Slip>>,
}

/// A value, and the keys that could stand in the place of its own.
struct Watched<'a, D> {
    inner: D,
    way: Way<'a>,
    fields: &'static [&'static str],
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Watched<'_, D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let Watched { inner, way, .. } = self;
        inner.deserialize_option(Watching { inner: visitor, way, fields: &[] })
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let Watched { inner, way, .. } = self;
        inner.deserialize_seq(Watching { inner: visitor, way, fields: &[] })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let Watched { inner, way, .. } = self;
        inner.deserialize_struct(name, fields, Watching { inner: visitor, way, fields })
    }

    /// Nobody reads this value.
    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        if let Path::Key(_, key) = self.way.path
            && !OTHERS.contains(key)
            && let Some(meant) = spelling::closest(key, self.fields)
        {
            self.way.slips.borrow_mut().push(Slip { path: self.way.path.to_string(), meant });
        }
        self.inner.deserialize_ignored_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct tuple tuple_struct map enum identifier
    }
}

/// Looks on while a value is taken apart; in turn what takes it apart, its members, and the seed of one of them.
struct Watching<'a, T> {
    inner: T,
    way: Way<'a>,
    fields: &'static [&'static str],
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Watching<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, value: D) -> Result<V::Value, D::Error> {
        self.inner.visit_some(Watched { inner: value, way: self.way, fields: &[] })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<V::Value, A::Error> {
        self.inner.visit_seq(Items { inner: items, way: self.way, at: 0 })
    }

    fn visit_map<A: MapAccess<'de>>(self, entries: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(Entries { inner: entries, way: self.way, fields: self.fields, key: "" })
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Watching<'_, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<S::Value, D::Error> {
        self.inner.deserialize(Watched { inner: value, way: self.way, fields: self.fields })
    }
}

struct Items<'a, A> {
    inner: A,
    way: Way<'a>,
    at: usize,
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Items<'_, A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        let path = Path::Item(self.way.path, self.at);
        self.at += 1;
        let way = Way { path: &path, slips: self.way.slips };
        self.inner.next_element_seed(Watching { inner: seed, way, fields: &[] })
    }
}

struct Entries<'a, 'de, A> {
    inner: A,
    way: Way<'a>,
    fields: &'static [&'static str],
    /// The key whose value is next.
    key: &'de str,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Entries<'_, 'de, A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.inner.next_key_seed(Key { inner: seed, key: &mut self.key })
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        let path = Path::Key(self.way.path, self.key);
        let way = Way { path: &path, slips: self.way.slips };
        self.inner.next_value_seed(Watching { inner: seed, way, fields: self.fields })
    }
}

/// Notes a key while it is read; in turn its seed, the key, and what takes it. One with escapes in it is nobody's.
struct Key<'k, 'de, T> {
    inner: T,
    key: &'k mut &'de str,
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Key<'_, 'de, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, text: D) -> Result<S::Value, D::Error> {
        self.inner.deserialize(Key { inner: text, key: self.key })
    }
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Key<'_, 'de, D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_any(Key { inner: visitor, key: self.key })
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Key<'_, 'de, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    fn visit_borrowed_str<E: serde::de::Error>(self, key: &'de str) -> Result<V::Value, E> {
        *self.key = key;
        self.inner.visit_borrowed_str(key)
    }

    fn visit_str<E: serde::de::Error>(self, key: &str) -> Result<V::Value, E> {
        *self.key = "";
        self.inner.visit_str(key)
    }
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;
    use crate::object;

    fn slips<T: DeserializeOwned>(object: &Value) -> Vec<(String, &'static str)> {
        let text = object.to_string();
        let (_, slips) = read::<T>(text.as_bytes()).unwrap();
        slips.into_iter().map(|slip| (slip.path, slip.meant)).collect()
    }

    #[test]
    fn slips_are_named_with_their_path() {
        let service = json!({
            "metdata": {},
            "metadata": {"anotations": {}, "labels": {"nam": "x"}},
            "spec": {"prots": [], "clusterIp": "x", "ports": [{"port": 1}, {"nodeport": 2, "protocl": "UDP"}]},
            "status": {"loadBalancer": {"ingress": [{"ipmode": "VIP"}]}},
        });
        let mut found = slips::<object::Service>(&service);
        found.sort_unstable();
        assert_eq!(
            found.iter().map(|(path, meant)| (path.as_str(), *meant)).collect::<Vec<_>>(),
            [
                ("metadata.anotations", "annotations"),
                ("metdata", "metadata"),
                ("spec.clusterIp", "clusterIP"),
                ("spec.ports[1].nodeport", "nodePort"),
                ("spec.ports[1].protocl", "protocol"),
                ("spec.prots", "ports"),
                ("status.loadBalancer.ingress[0].ipmode", "ipMode"),
            ]
        );
        let slice = json!({"endpoint": [], "endpoints": [{"adresses": [], "hints": {"forZone": []}}]});
        let mut found = slips::<object::EndpointSlice>(&slice);
        found.sort_unstable();
        assert_eq!(
            found.iter().map(|slip| slip.1).collect::<Vec<_>>(),
            ["endpoints", "addresses", "forZones"]
        );
    }

    /// All of them, as of Kubernetes 1.37 and before.
    #[test]
    fn no_field_of_kubernetes_is_a_slip() {
        let all =
            |keys: &[&str]| -> Value { keys.iter().map(|key| (key.to_string(), Value::Null)).collect() };
        let metadata = all(&[
            "generateName",
            "selfLink",
            "uid",
            "generation",
            "deletionGracePeriodSeconds",
            "ownerReferences",
            "finalizers",
            "managedFields",
            "clusterName",
        ]);
        let mut service = json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata});
        service["spec"] = all(&[
            "selector",
            "deprecatedPublicIPs",
            "loadBalancerIP",
            "externalName",
            "publishNotReadyAddresses",
            "ipFamily",
            "ipFamilyPolicy",
            "allocateLoadBalancerNodePorts",
            "loadBalancerClass",
            "topologyKeys",
            "trafficDistribution",
        ]);
        service["spec"]["ports"] = json!([all(&["targetPort", "appProtocol"])]);
        service["status"] =
            json!({"conditions": [], "loadBalancer": {"ingress": [all(&["hostname", "ports"])]}});
        assert_eq!(slips::<object::Service>(&service), []);
        let slice = json!({
            "apiVersion": "v1", "kind": "EndpointSlice",
            "endpoints": [all(&["hostname", "targetRef", "deprecatedTopology", "topology"])],
            "ports": [all(&["appProtocol"])],
        });
        assert_eq!(slips::<object::EndpointSlice>(&slice), []);
        let node = json!({
            "apiVersion": "v1", "kind": "Node",
            "spec": all(&["podCIDR", "providerID", "unschedulable", "configSource", "externalID"]),
            "status": all(&[
                "capacity", "allocatable", "phase", "conditions", "daemonEndpoints", "nodeInfo", "images",
                "volumesInUse", "volumesAttached", "config", "runtimeHandlers", "features", "declaredFeatures",
            ]),
        });
        assert_eq!(slips::<object::Node>(&node), []);
        let taints = json!({"spec": {"taints": [all(&["value", "effect", "timeAdded"])]}});
        assert_eq!(slips::<object::Node>(&taints), []);
        let cidr = json!({"apiVersion": "v1", "kind": "ServiceCIDR", "status": {"conditions": []}});
        assert_eq!(slips::<object::ServiceCidr>(&cidr), []);
    }

    #[test]
    fn the_object_is_what_it_is_without() {
        for text in [
            r#"{"metadata": {"name": "a", "labels": {"x": "y"}, "creationTimestamp": "2026-01-01T00:00:00Z"},
                "spec": {"ports": [{"port": 99999999999, "name": null}], "clusterIPs": null, "type": "NodePort"}}"#,
            r#"{"spec": {"p\u006frts": [{"port": 1}], "pr\u006fts": []}}"#,
            r#"{"spec": null}"#,
            r#"{"spec": 5}"#,
            r#"{"spec": {"ports": 7}}"#,
            r#"{"spec": {"clusterIP": 7}}"#,
            "{} x",
            "",
        ] {
            let watched = read::<object::Service>(text.as_bytes()).map(|(object, _)| object);
            let plain = serde_json::from_slice::<object::Service>(text.as_bytes());
            assert_eq!(
                watched.map_err(|error| error.to_string()),
                plain.map_err(|error| error.to_string()),
                "{text}"
            );
        }
    }
}
