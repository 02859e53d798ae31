// SPDX-License-Identifier: Apache-2.0

//! The Kubernetes source against a server that misbehaves: whatever happens, it ends up with what the server
//! holds, and on the way nothing is removed that is still there.

mod chance;
mod credentials;
mod follow;
mod lists;
mod mirror;
mod objects;
mod pace;
mod trouble;
