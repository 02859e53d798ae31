// SPDX-License-Identifier: Apache-2.0

//! Tells other processes of this network namespace what this one does: a listening socket with a name in the abstract
//! namespace, which the kernel takes back however the process ends.

use std::{
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
};

use netlink::Peer;

/// Raised while it lives.
#[derive(Debug)]
pub(crate) struct Flag {
    _listener: UnixListener,
}

impl Flag {
    /// In the network namespace of this thread. Fails while another process has it.
    pub(crate) fn raise(name: &str) -> io::Result<Flag> {
        let address = SocketAddr::from_abstract_name(name)?;
        Ok(Flag { _listener: UnixListener::bind_addr(&address)? })
    }
}

/// Whether a process has raised it that may: anybody can take a name, so only root and our own user are believed.
pub(crate) fn is_raised(name: &str) -> bool {
    let Ok(address) = SocketAddr::from_abstract_name(name) else { return false };
    let Ok(stream) = UnixStream::connect_addr(&address) else { return false };
    Peer::of(&stream).is_ok_and(|peer| peer.is_believed())
}
