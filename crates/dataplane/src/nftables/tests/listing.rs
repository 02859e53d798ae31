// SPDX-License-Identifier: Apache-2.0

//! What `nft list` says about our tables.
