// SPDX-License-Identifier: Apache-2.0

//! What can go wrong, by what the caller does about it.

use std::fmt;

use crate::xtables::Failure;

/// Why the kernel could not be made to match the Plan. Retry with [`crate::Scope::All`].
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused, or could not be talked to.
    #[error("{act} {object}: {source}")]
    Kernel {
        /// What was being done, for example "add elements to endpoints for".
        act: &'static str,
        /// To what: a service and its frontend, a chain, a table.
        object: String,
        /// The kernel's reason, with its words where it gave any.
        source: netlink::Error,
    },
    /// A tool could not be run, or refused.
    #[error("{act} the tables of iptables: {source}")]
    Tool {
        /// What was being done, for example "read".
        act: &'static str,
        /// The tool's reason, and what to do about it.
        source: Failure,
    },
    /// Something on this node is not as it must be, in one sentence.
    #[error("{0}")]
    Setting(String),
    /// What carries connections could not be started.
    #[error("{act} the relay: {source}")]
    Relay {
        /// What was being done, for example "start".
        act: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Several things failed, one after the other; the rest was done.
    #[error("{}", Joined(.0))]
    Several(Vec<Error>),
}

impl Error {
    pub(crate) fn kernel(act: &'static str, object: impl Into<String>, source: netlink::Error) -> Error {
        Error::Kernel { act, object: object.into(), source }
    }

    pub(crate) fn tool(act: &'static str, source: Failure) -> Error {
        Error::Tool { act, source }
    }

    /// Nothing went wrong, one thing did, or several.
    pub(crate) fn collect(mut errors: Vec<Error>) -> Result<(), Error> {
        match errors.len() {
            0 => Ok(()),
            1 => Err(errors.remove(0)),
            _ => Err(Error::Several(errors)),
        }
    }
}

/// Why this dataplane cannot work here: one sentence. Choose another.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unsupported(pub String);

struct Joined<'a>(&'a [Error]);

impl fmt::Display for Joined<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.0.iter().enumerate() {
            f.write_str(if index == 0 { "" } else { "; " })?;
            error.fmt(f)?;
        }
        Ok(())
    }
}
