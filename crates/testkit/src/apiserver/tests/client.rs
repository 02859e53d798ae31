// SPDX-License-Identifier: Apache-2.0

//! A client just good enough: one request for each connection, HTTP/1.1 read by hand, blocking.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::TcpStream,
    sync::Arc,
    time::Duration,
};

use serde_json::Value;
use tokio_rustls::rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};

use crate::apiserver::ApiServer;

pub(super) const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
pub(super) const JSON: &str = "application/json";

/// An answer, its head read.
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, String)>,
    chunked: bool,
    stream: BufReader<StreamOwned<ClientConnection, TcpStream>>,
    /// Of the body, read and not yet taken.
    pending: Vec<u8>,
}

/// With the token that is good now.
pub(super) fn get(server: &ApiServer, path: &str, accept: &str) -> Reply {
    let token = server.shared.access().token.clone();
    ask(server, path, &[("Accept", accept), ("Authorization", &format!("Bearer {token}"))], false).unwrap()
}

pub(super) fn ask(
    server: &ApiServer,
    path: &str,
    headers: &[(&str, &str)],
    certified: bool,
) -> io::Result<Reply> {
    let tcp = TcpStream::connect(server.port.address())?;
    tcp.set_read_timeout(Some(Duration::from_secs(10)))?;
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let tls = ClientConnection::new(config(server, certified), name).unwrap();
    let mut stream = BufReader::new(StreamOwned::new(tls, tcp));
    let mut head = format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n");
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream.get_mut().write_all((head + "\r\n").as_bytes())?;
    let status = line(&mut stream)?.split(' ').nth(1).unwrap().parse().unwrap();
    let mut headers = Vec::new();
    loop {
        let line = line(&mut stream)?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let chunked = headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
    Ok(Reply { status, headers, chunked, stream, pending: Vec::new() })
}

fn config(server: &ApiServer, certified: bool) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    let authority = server.authority.lock().unwrap().pem();
    roots.add(CertificateDer::from_pem_slice(authority.as_bytes()).unwrap()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    Arc::new(if certified {
        let identity = server.identity.lock().unwrap();
        let key = PrivateKeyDer::from_pem_slice(identity.key_pem.as_bytes()).unwrap();
        builder.with_client_auth_cert(vec![identity.certificate.clone()], key).unwrap()
    } else {
        builder.with_no_client_auth()
    })
}

impl Reply {
    pub(super) fn header(&self, name: &str) -> &str {
        self.headers.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value)
    }

    /// A patience for each further read.
    pub(super) fn set_patience(&self, patience: Duration) {
        self.stream.get_ref().sock.set_read_timeout(Some(patience)).unwrap();
    }

    /// The rest of the body.
    pub(super) fn body(mut self) -> io::Result<Vec<u8>> {
        if self.chunked {
            while self.read_chunk()? {}
        } else {
            let length: usize = self.header("content-length").parse().unwrap();
            self.pending.resize(length, 0);
            self.stream.read_exact(&mut self.pending)?;
        }
        Ok(self.pending)
    }

    pub(super) fn json(self) -> Value {
        serde_json::from_slice(&self.body().unwrap()).unwrap()
    }

    /// The next event of a JSON watch; nothing at the end of the stream.
    pub(super) fn json_event(&mut self) -> io::Result<Option<Value>> {
        loop {
            if let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=end).collect();
                return Ok(Some(serde_json::from_slice(&line)?));
            }
            if !self.read_chunk()? {
                assert!(self.pending.is_empty(), "half an event");
                return Ok(None);
            }
        }
    }

    /// The next event of a protobuf watch: its type and its object.
    pub(super) fn protobuf_event(&mut self) -> (String, Vec<u8>) {
        let take = |reply: &mut Reply, length: usize| -> Vec<u8> {
            while reply.pending.len() < length {
                assert!(reply.read_chunk().unwrap(), "the stream ends in an event");
            }
            reply.pending.drain(..length).collect()
        };
        let length = take(self, 4).try_into().unwrap();
        let event = take(self, u32::from_be_bytes(length) as usize);
        let kind = String::from_utf8(first(&event, 1)).unwrap();
        (kind, unwrap_envelope(&first(&first(&event, 2), 1)).1)
    }

    fn read_chunk(&mut self) -> io::Result<bool> {
        let size = line(&mut self.stream)?;
        let size = usize::from_str_radix(&size, 16).map_err(io::Error::other)?;
        let begin = self.pending.len();
        self.pending.resize(begin + size, 0);
        self.stream.read_exact(&mut self.pending[begin..])?;
        line(&mut self.stream)?;
        Ok(size > 0)
    }
}

fn line(stream: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    if stream.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(line.trim_end().to_owned())
}

/// Kind and object inside of `k8s\0`.
pub(super) fn unwrap_envelope(bytes: &[u8]) -> (String, Vec<u8>) {
    let unknown = bytes.strip_prefix(b"k8s\0").expect("the magic number");
    (String::from_utf8(first(&first(unknown, 1), 2)).unwrap(), first(unknown, 2))
}

/// Every field with this tag, which must be of the length-delimited sort.
pub(super) fn each(mut message: &[u8], tag: u64) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    while !message.is_empty() {
        let key = varint(&mut message);
        match key & 7 {
            0 => {
                varint(&mut message);
            }
            2 => {
                let length = varint(&mut message) as usize;
                let (value, rest) = message.split_at(length);
                message = rest;
                if key >> 3 == tag {
                    found.push(value.to_owned());
                }
            }
            other => panic!("wire type {other}"),
        }
    }
    found
}

pub(super) fn first(message: &[u8], tag: u64) -> Vec<u8> {
    each(message, tag).into_iter().next().unwrap_or_else(|| panic!("field {tag} is missing"))
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first().expect("a number ends");
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
    }
    value
}
