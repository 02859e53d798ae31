// SPDX-License-Identifier: Apache-2.0

//! The life of the daemon on a node, under load: it stops, dies, is replaced, loses its source, is told of changes, and
//! others meddle. Traffic must not notice. Each test prints its counts (`--nocapture` shows them). Needs root.

#![forbid(unsafe_code)]

mod bed;
mod claim;
mod drift;
mod flood;
mod ipvs;
mod ipvs_kube_proxy;
mod localnet;
mod loopback;
mod node;
mod pods;
mod restart;
mod restricted;
mod userspace;
mod wishes;
