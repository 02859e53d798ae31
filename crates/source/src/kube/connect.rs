// SPDX-License-Identifier: Apache-2.0

//! The client's way to the server. `kube` offers one, which reports each failed attempt in a log line of its own
//! beside ours, and does not probe a connection: if the server's machine dies without a word, a watch on it
//! looks like a quiet one.

use std::time::Duration;

use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::TokioExecutor,
};
use kube::{
    Client, Config, Error,
    client::{Body, ClientBuilder, ConfigExt as _},
};
use tower::{BoxError, ServiceBuilder};

/// A connection on which nothing came for so long is probed.
const PROBE_AFTER: Duration = Duration::from_secs(15);
const PROBE_EVERY: Duration = Duration::from_secs(5);
/// Unanswered probes until the connection is given up: half a minute after the last word, in all.
const PROBES: u32 = 3;
/// Data of ours that nobody acknowledges ends a connection as well.
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);

/// Makes the client; does not connect.
pub(super) fn client(config: Config) -> Result<Client, Error> {
    // The way through a proxy is `kube`'s own.
    if config.proxy_url.is_some() {
        return Client::try_from(config);
    }
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(config.connect_timeout);
    tcp.set_keepalive(Some(PROBE_AFTER));
    tcp.set_keepalive_interval(Some(PROBE_EVERY));
    tcp.set_keepalive_retries(Some(PROBES));
    tcp.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
    let tls = config.rustls_https_connector_with_connector(tcp)?;
    let http: legacy::Client<_, Body> = legacy::Builder::new(TokioExecutor::new()).build(tls);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(http);
    Ok(ClientBuilder::new(service, config.default_namespace.as_str()).build())
}

#[cfg(test)]
mod tests {
    use std::{fs, net::TcpListener, thread};

    use super::*;

    /// The kernel shows of each connection which timer runs; `02` is the one that probes.
    fn is_probed(port: u16) -> bool {
        let table = fs::read_to_string("/proc/thread-self/net/tcp").expect("the kernel shows its sockets");
        let remote = format!("0100007F:{port:04X}");
        table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).any(|fields| {
            fields.get(2) == Some(&remote.as_str())
                && fields.get(5).is_some_and(|timer| timer.starts_with("02:"))
        })
    }

    #[test]
    fn a_quiet_connection_is_probed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let client = runtime.block_on(async {
            client(Config::new(format!("http://127.0.0.1:{port}").parse().unwrap())).unwrap()
        });
        let request = http::Request::get("/api").body(Body::empty()).unwrap();
        runtime.spawn(async move { drop(client.send(request).await) });
        let (connection, _) = listener.accept().unwrap();
        // Until the request is acknowledged another timer runs.
        let probed = (0..500).any(|_| {
            thread::sleep(Duration::from_millis(10));
            is_probed(port)
        });
        assert!(probed, "a server that dies without a word would go unnoticed");
        drop(connection);
    }
}
