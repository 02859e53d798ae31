// SPDX-License-Identifier: Apache-2.0

//! What is sent comes back the same: through our own decoder, and through the kernel.

mod batch;
mod gallery;
mod kernel;
mod listing;
mod monitor;
mod printed;
mod property;
