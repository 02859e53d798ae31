// SPDX-License-Identifier: Apache-2.0

//! What tests share.
//!
//! # Layout
//!
//! - [`txtar`], [`scenario`], [`image`]: the scenario format, in IPv4 and as its IPv6 image
//! - [`objects`], [`world`]: a World and a Plan that follow a scenario's steps, driven as the product does it
//! - [`judge`]: who says what becomes of a packet: the plan, the rendered program, the kernel
//! - [`run`]: a scenario before its judges; [`pace`]: how long is long on this machine
//! - [`apiserver`]: a Kubernetes API server that misbehaves on command

#![forbid(unsafe_code)]

pub mod apiserver;
pub mod image;
pub mod judge;
pub mod objects;
pub mod pace;
pub mod run;
pub mod scenario;
pub mod txtar;
pub mod world;
