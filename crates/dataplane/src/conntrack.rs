// SPDX-License-Identifier: Apache-2.0

//! Flows that became stale.
