// SPDX-License-Identifier: Apache-2.0

//! The outside world as a stream of [`model::Update`]s.
//!
//! A source tells all it knows once (`Begin`, objects, `End` for each [`model::Kind`]), then what changes. While
//! its own source is away it says nothing, so nothing is removed. It knows no dataplane.
//!
//! # Layout
//!
//! - [`object`]: the Kubernetes objects, cut down to the fields in use
//! - [`lower`]: those objects in the model's words; [`Problem`] says what was left out and why
//! - [`kube`]: the Kubernetes API, by list and watch
//! - [`file`]: files and folders with the same objects

#![forbid(unsafe_code)]

pub mod file;
#[doc(hidden)]
pub mod fuzzing;
mod intern;
pub mod kube;
pub mod lower;
#[doc(hidden)]
pub mod object;
mod problem;
mod split;

pub use intern::Interner;
pub use problem::{Outcome, Problem, Problems, Reason};
