// SPDX-License-Identifier: Apache-2.0

//! The port, and the connections that come in by it.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, mpsc},
    time::Duration,
};

use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    runtime::Handle,
    sync::oneshot,
};
use tokio_rustls::TlsAcceptor;

use super::{answer, shared::Shared};

/// A port of loopback that stays ours whether somebody listens on it or not: a port that is free could be
/// taken by another test, or a client could connect to itself.
pub(super) struct Port {
    address: SocketAddr,
    _bound: TcpSocket,
}

/// Listening. When dropped, connections are refused.
pub(super) struct Door {
    close: Option<oneshot::Sender<()>>,
    closed: mpsc::Receiver<()>,
}

impl Port {
    pub(super) fn reserve() -> io::Result<Port> {
        let bound = socket(SocketAddr::from(([127, 0, 0, 1], 0)))?;
        Ok(Port { address: bound.local_addr()?, _bound: bound })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn open(&self, handle: &Handle, shared: Arc<Shared>, tls: TlsAcceptor) -> io::Result<Door> {
        let _inside = handle.enter();
        let listener = socket(self.address)?.listen(128)?;
        let (close, asked_to_close) = oneshot::channel();
        let (tell_closed, closed) = mpsc::channel();
        handle.spawn(async move {
            tokio::select! {
                () = accept(listener, &shared, &tls) => {}
                _ = asked_to_close => {}
            }
            // Nobody waits if the door goes together with the server.
            let _ = tell_closed.send(());
        });
        Ok(Door { close: Some(close), closed })
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        if let Some(close) = self.close.take() {
            let _ = close.send(());
        }
        // The server has a thread of its own, so this also ends when a test calls it from a runtime.
        let _ = self.closed.recv_timeout(Duration::from_secs(5));
    }
}

fn socket(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

async fn accept(listener: TcpListener, shared: &Arc<Shared>, tls: &TlsAcceptor) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(connection(shared.clone(), stream, tls.clone()));
            }
            // Out of file descriptors, or a client gone already: neither is for ever.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// Serves a connection until it ends or is cut.
async fn connection(shared: Arc<Shared>, stream: TcpStream, tls: TlsAcceptor) {
    let mut orders = shared.orders.subscribe();
    let begun = *orders.borrow_and_update();
    let guard = shared.serving(begun);
    let mut serving = Box::pin(serve(&shared, stream, &tls));
    tokio::select! {
        () = &mut serving => return,
        // Errors mean that the server itself goes, here and below.
        _ = orders.wait_for(|now| *now != begun) => {}
    }
    if orders.borrow().cuts == begun.cuts {
        // Frozen: it is held, but no longer driven, and nothing more is sent.
        drop(guard);
        let _ = orders.wait_for(|now| now.cuts != begun.cuts).await;
    } else {
        drop(serving);
        drop(guard);
    }
}

async fn serve(shared: &Arc<Shared>, stream: TcpStream, tls: &TlsAcceptor) {
    if shared.is_mute() {
        let _held = stream;
        return std::future::pending().await;
    }
    // Errors are the client's to see: it went away, or does not trust us.
    let Ok(stream) = tls.accept(stream).await else { return };
    let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first).cloned();
    let service = service_fn(|request| answer::answer(shared.clone(), request, certificate.as_ref()));
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}
