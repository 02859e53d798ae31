// SPDX-License-Identifier: Apache-2.0

//! Time in milliseconds since the first look at it.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

/// Never 0, so that 0 can mean "never".
pub(crate) type Millis = u64;

pub(crate) fn now() -> Millis {
    static START: OnceLock<Instant> = OnceLock::new();
    1 + START.get_or_init(Instant::now).elapsed().as_millis() as Millis
}

pub(crate) fn millis(duration: Duration) -> Millis {
    Millis::try_from(duration.as_millis()).unwrap_or(Millis::MAX / 4)
}
