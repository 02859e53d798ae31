// SPDX-License-Identifier: Apache-2.0

//! Transports for tests.
