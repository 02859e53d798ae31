// SPDX-License-Identifier: Apache-2.0

//! Fills etcd past the API server, which takes long for tens of thousands of services: on a busy machine 26,000 of
//! 45,000 were there after twelve minutes. It sees what is written, as it watches etcd.

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
};

use anyhow::{Context, Result, bail};
use data_encoding::BASE64;
use serde_json::{Value, json};

use crate::objects::{Entry, Objects};

/// etcd takes 128 operations in one transaction.
const AT_ONCE: usize = 120;

/// Writes Services with their addresses, and EndpointSlices. `folder` is where etcd's socket is.
pub fn fill(folder: &Path, objects: &Objects, namespace: &str) -> Result<()> {
    let socket = folder.join("client:0");
    let stream = UnixStream::connect(&socket)
        .with_context(|| format!("connecting to etcd at {}", socket.display()))?;
    let mut etcd = Etcd { reader: BufReader::new(stream.try_clone()?), stream, operations: Vec::new() };
    let ours: Vec<&Entry> = objects.all().filter(|entry| entry.namespace == namespace).collect();
    // Addresses first: a service without one would be mended by the API server.
    for (number, entry) in ours.iter().enumerate() {
        etcd.put(&format!("/registry/ipaddresses/{}", entry.frontend.ip()), stored(address(entry), number))?;
    }
    for (number, entry) in ours.iter().enumerate() {
        let mut service = entry.service();
        service["spec"]["sessionAffinity"] = json!("None");
        service["spec"]["internalTrafficPolicy"] = json!("Cluster");
        service["status"] = json!({"loadBalancer": {}});
        etcd.put(&format!("/registry/services/specs/{namespace}/{}", entry.name), stored(service, number))?;
        let key = format!("/registry/endpointslices/{namespace}/{}", entry.slice_name());
        etcd.put(&key, stored(entry.slice(), number))?;
    }
    etcd.commit()
}

fn address(entry: &Entry) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "IPAddress",
        "metadata": {
            "name": entry.frontend.ip(),
            "labels": {
                "ipaddress.kubernetes.io/ip-family": "IPv4",
                "ipaddress.kubernetes.io/managed-by": "ipallocator.k8s.io",
            },
        },
        "spec": {"parentRef": {"group": "", "resource": "services", "namespace": entry.namespace, "name": entry.name}},
    })
}

/// With what the API server adds to an object before it stores it.
fn stored(mut object: Value, number: usize) -> Value {
    object["metadata"]["uid"] = json!(format!("00000000-0000-4000-8000-{number:012x}"));
    object["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
    object["metadata"]["generation"] = json!(1);
    object
}

struct Etcd {
    stream: UnixStream,
    reader: BufReader<UnixStream>,
    operations: Vec<Value>,
}

impl Etcd {
    fn put(&mut self, key: &str, object: Value) -> Result<()> {
        let (key, value) = (BASE64.encode(key.as_bytes()), BASE64.encode(&serde_json::to_vec(&object)?));
        self.operations.push(json!({"requestPut": {"key": key, "value": value}}));
        if self.operations.len() == AT_ONCE { self.commit() } else { Ok(()) }
    }

    /// Its gateway speaks HTTP; one request at a time on one connection.
    fn commit(&mut self) -> Result<()> {
        let body = serde_json::to_vec(&json!({"success": std::mem::take(&mut self.operations)}))?;
        write!(
            self.stream,
            "POST /v3/kv/txn HTTP/1.1\r\nHost: etcd\r\nContent-Length: {}\r\n\r\n",
            body.len()
        )?;
        self.stream.write_all(&body)?;
        let status = self.line()?;
        let (mut length, mut chunked) = (0, false);
        loop {
            let line = self.line()?.to_ascii_lowercase();
            match line.split_once(':') {
                None => break,
                Some(("content-length", value)) => length = value.trim().parse()?,
                Some(("transfer-encoding", value)) => chunked = value.trim() == "chunked",
                Some(_) => {}
            }
        }
        let answer = if chunked { self.chunks()? } else { self.bytes(length)? };
        if !status.contains(" 200 ") {
            bail!("etcd: {} {}", status.trim(), String::from_utf8_lossy(&answer));
        }
        Ok(())
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.reader.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    fn bytes(&mut self, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.reader.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Parts, each after its length; one of length 0 is the last.
    fn chunks(&mut self) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        loop {
            let length = usize::from_str_radix(&self.line()?, 16)?;
            all.extend(self.bytes(length)?);
            self.line()?;
            if length == 0 {
                return Ok(all);
            }
        }
    }
}
