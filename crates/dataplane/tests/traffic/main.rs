// SPDX-License-Identifier: Apache-2.0

//! Real packets through real tables, in a cluster of namespaces: node-a has pods a1 to a3 and our tables, node-b
//! has pods b1 and b2, and there is a client outside.

#![expect(clippy::unwrap_used, reason = "a test that fails may panic")]

mod affinity;
mod counts;
mod flows;
mod stage;
mod verdicts;
