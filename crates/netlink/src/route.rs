// SPDX-License-Identifier: Apache-2.0

//! Links, addresses and routes.
