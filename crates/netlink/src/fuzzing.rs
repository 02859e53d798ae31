// SPDX-License-Identifier: Apache-2.0

//! Every decoder on arbitrary bytes.
