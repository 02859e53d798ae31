// SPDX-License-Identifier: Apache-2.0

use std::io;

/// Why a lab could not be built or used. All of it is the machine's doing: privileges, or a kernel without a
/// feature.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{call}: {error}")]
    Os { call: &'static str, error: io::Error },
    #[error("{path}: {error}")]
    Sysctl { path: String, error: io::Error },
    #[error(transparent)]
    Netlink(#[from] netlink::Error),
    #[error("nobody in the lab is called {0}")]
    Unknown(String),
}

impl Error {
    pub(crate) fn io(call: &'static str, error: io::Error) -> Error {
        Error::Os { call, error }
    }

    pub(crate) fn os(call: &'static str, errno: rustix::io::Errno) -> Error {
        Error::Os { call, error: errno.into() }
    }
}
