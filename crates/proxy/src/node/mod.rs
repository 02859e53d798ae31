// SPDX-License-Identifier: Apache-2.0

//! The machine we run on, as far as it is not addresses: its kernel settings, and what on it will get in the way.
//!
//! - [`sysctl`]: kernel settings as files
//! - [`settle`]: what the configuration asks of them
//! - [`facts`]: what there is that others decide; [`judge`] says what of it will get in the way
//! - [`report`]: the same as log lines, table or JSON

pub mod facts;
pub mod judge;
pub mod report;
pub mod settle;
pub mod sysctl;
