// SPDX-License-Identifier: Apache-2.0

//! How fast the machine is that tests run on.

/// How much slower than usual it is, by `PORTOLAN_SLOW`: an emulated one may need seconds for what takes no time at all
/// elsewhere. Waits for what must come, and times that scenarios speak of, are so many times longer.
pub fn slowness() -> u32 {
    std::env::var("PORTOLAN_SLOW").ok().and_then(|text| text.parse().ok()).unwrap_or(1).max(1)
}
