// SPDX-License-Identifier: Apache-2.0

//! The specification, executable: what must happen to a given new connection.

use std::{net::IpAddr, sync::Arc};

use crate::{family::Protocol, plan::Backend};

/// The first packet of a connection, as it meets this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    pub origin: Origin,
    pub source: IpAddr,
    pub destination: IpAddr,
    /// The destination is an address of this node.
    pub destination_is_local: bool,
    pub protocol: Protocol,
    pub port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A process on this node (the source is one of its addresses).
    Node,
    /// Received on this interface.
    Interface(Arc<str>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// To one of these, each as likely as the other; with the node's address as source if `masquerade`, and
    /// also if the chosen one is the source itself.
    Forward {
        backends: Box<[Backend]>,
        masquerade: bool,
    },
    Reject,
    Drop,
    /// Not ours: the node treats it as if there were no proxy.
    Pass,
}
