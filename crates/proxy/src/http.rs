// SPDX-License-Identifier: Apache-2.0

//! Small HTTP servers: bind, and keep trying; answer, and never wait for a slow client.

use std::{
    convert::Infallible,
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Request, Response, StatusCode,
    body::{Bytes, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpSocket},
    sync::Semaphore,
    task::JoinSet,
    time::timeout,
};

/// A whole answer.
pub type Answer = Response<Full<Bytes>>;
/// What a server does with a request and its body; `None` is 404.
pub type Route = dyn Fn(&Request<Bytes>) -> Option<Answer> + Send + Sync;

/// A client that has not sent its request by then is cut off.
const PATIENCE: Duration = Duration::from_secs(10);
/// More clients than this wait in the kernel.
const CLIENTS: usize = 128;
/// The largest body that is read.
const BODY: usize = 4096;
/// The wait between two attempts to bind.
const REBIND: Duration = Duration::from_secs(5);

/// The body of an answer.
pub fn body(text: impl Into<Bytes>) -> Full<Bytes> {
    Full::new(text.into())
}

/// An answer in plain text.
pub fn plain(code: StatusCode, text: impl Into<Bytes>) -> Answer {
    typed(code, "text/plain; charset=utf-8", text)
}

/// An answer of a given type.
pub fn typed(code: StatusCode, kind: &'static str, text: impl Into<Bytes>) -> Answer {
    let response = Response::builder()
        .status(code)
        .header("Content-Type", kind)
        .header("X-Content-Type-Options", "nosniff");
    response.body(body(text)).expect("constant headers are valid")
}

/// Binds and serves for ever. A bind that fails is tried again every five seconds, or returned if `hard_fail`.
pub async fn serve(
    name: &'static str,
    address: SocketAddr,
    hard_fail: bool,
    route: Arc<Route>,
) -> io::Result<()> {
    let mut was_refused = false;
    let listener = loop {
        match bind(address) {
            Ok(listener) => break listener,
            Err(error) if hard_fail => return Err(error),
            Err(error) => {
                tracing::error!(server = name, %address, %error, "cannot bind, trying again");
                was_refused = true;
                tokio::time::sleep(REBIND).await;
            }
        }
    };
    // Whoever has read that it fails wants to read that it no longer does.
    match was_refused {
        true => tracing::info!(server = name, %address, "listening, after it could not be bound at first"),
        false => tracing::debug!(server = name, %address, "listening"),
    }
    accept(listener, route).await
}

/// A wildcard address listens on both families, also when it is written 0.0.0.0; any other on itself.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    if address.ip().is_unspecified() {
        let both = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), address.port());
        // A kernel without IPv6 refuses the socket, one with IPv6 disabled the address.
        if let Ok(listener) = listen(both, false) {
            return Ok(listener);
        }
    }
    bind_family(address)
}

/// Listens in the family of the address and in no other, also on a wildcard.
pub fn bind_family(address: SocketAddr) -> io::Result<TcpListener> {
    listen(address, true)
}

fn listen(address: SocketAddr, only_family: bool) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    if address.is_ipv6() {
        rustix::net::sockopt::set_ipv6_v6only(&socket, only_family)?;
    }
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(1024)
}

/// Answers clients for ever. Dropped, it closes the listener and every connection.
pub async fn accept(listener: TcpListener, route: Arc<Route>) -> io::Result<()> {
    let clients = Arc::new(Semaphore::new(CLIENTS));
    let mut connections = JoinSet::new();
    loop {
        let place = Arc::clone(&clients).acquire_owned().await.map_err(io::Error::other)?;
        while connections.try_join_next().is_some() {}
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, most likely: it passes, or it does not; either way do not spin.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let route = Arc::clone(&route);
        connections.spawn(async move {
            let service = service_fn(|request| async {
                Ok::<_, Infallible>(match whole(request).await {
                    Ok(request) => route(&request)
                        .unwrap_or_else(|| plain(StatusCode::NOT_FOUND, "404 page not found\n")),
                    Err(refusal) => refusal,
                })
            });
            let mut server = http1::Builder::new();
            server.timer(TokioTimer::new()).header_read_timeout(PATIENCE);
            // Clients go away as they please; that is nobody's error.
            let _ = server.serve_connection(TokioIo::new(stream), service).await;
            drop(place);
        });
    }
}

/// A request with all of its body, if it is as small and as quick as anything meant for us.
async fn whole(request: Request<Incoming>) -> Result<Request<Bytes>, Answer> {
    let (head, body) = request.into_parts();
    match timeout(PATIENCE, Limited::new(body, BODY).collect()).await {
        Ok(Ok(body)) => Ok(Request::from_parts(head, body.to_bytes())),
        Ok(Err(_)) => Err(plain(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large, or broke off\n")),
        Err(_) => Err(plain(StatusCode::REQUEST_TIMEOUT, "the body did not come in time\n")),
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
    };

    use super::*;

    async fn fetch(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.expect("connected");
        let request = format!("POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("answered");
        answer
    }

    fn hello(request: &Request<Bytes>) -> Option<Answer> {
        (request.uri().path() == "/hello").then(|| plain(StatusCode::OK, "hello"))
    }

    #[tokio::test]
    async fn a_wildcard_serves_both_families_and_any_method() {
        let listener = bind("0.0.0.0:0".parse().expect("valid")).expect("bound");
        let port = listener.local_addr().expect("bound").port();
        tokio::spawn(accept(listener, Arc::new(hello)));
        let v4 = fetch(SocketAddr::from(([127, 0, 0, 1], port)), "/hello").await;
        assert!(v4.starts_with("HTTP/1.1 200 OK") && v4.ends_with("hello"), "{v4}");
        assert!(fetch(SocketAddr::from(([127, 0, 0, 1], port)), "/").await.starts_with("HTTP/1.1 404"));
        if std::path::Path::new("/proc/net/if_inet6").exists() {
            let v6 = fetch(SocketAddr::from((Ipv6Addr::LOCALHOST, port)), "/hello").await;
            assert!(v6.ends_with("hello"), "{v6}");
        }
    }

    #[tokio::test]
    async fn a_taken_address_is_tried_again_or_is_fatal() {
        let first = bind("127.0.0.1:0".parse().expect("valid")).expect("bound");
        let address = first.local_addr().expect("bound");
        let fatal = serve("test", address, true, Arc::new(hello)).await;
        assert_eq!(fatal.expect_err("taken").kind(), io::ErrorKind::AddrInUse);
        tokio::time::pause();
        tokio::spawn(serve("test", address, false, Arc::new(hello)));
        tokio::time::sleep(REBIND * 3).await;
        drop(first);
        tokio::time::sleep(REBIND * 2).await;
        tokio::time::resume();
        assert!(fetch(address, "/hello").await.ends_with("hello"));
    }

    /// Who was told that it fails is told that it no longer does.
    #[test]
    fn an_address_that_was_taken_is_told_when_it_is_had() {
        let told = crate::log::tests::told_by(|| {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
            runtime.expect("a runtime").block_on(async {
                let first = bind("127.0.0.1:0".parse().expect("valid")).expect("bound");
                let address = first.local_addr().expect("bound");
                let free = tokio::time::sleep(REBIND / 2);
                let serving = serve("test", address, false, Arc::new(hello));
                let _ = timeout(REBIND * 2, async {
                    tokio::join!(serving, async {
                        free.await;
                        drop(first);
                    })
                })
                .await;
            });
        });
        let lines: Vec<&str> = told.lines().collect();
        assert_eq!(lines.len(), 2, "{told}");
        assert!(lines[0].starts_with('E') && lines[0].contains("cannot bind, trying again"), "{told}");
        assert!(lines[1].starts_with('I') && lines[1].contains("listening"), "{told}");
    }
}
