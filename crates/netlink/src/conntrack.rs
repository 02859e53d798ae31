// SPDX-License-Identifier: Apache-2.0

//! The kernel's table of flows.
