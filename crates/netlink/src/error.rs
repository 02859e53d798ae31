// SPDX-License-Identifier: Apache-2.0

//! What can go wrong, by what the caller does about it.

use std::{fmt, time::Duration};

use rustix::io::Errno;

/// Why an exchange with the kernel failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The kernel said no. Nothing of a refused batch is in force.
    #[error("{op}: {errno}{}", Detail { extack, element })]
    Kernel {
        /// Which request or which operation of a batch.
        op: Op,
        /// The kernel's reason, as a number.
        errno: Errno,
        /// The kernel's reason, as a sentence, where it gave one.
        extack: Option<String>,
        /// Where in the refused message the offending attribute begins, where the kernel said so.
        offset: Option<u32>,
        /// Which element of the operation, counted from 0, where the kernel pointed at one.
        element: Option<u32>,
    },
    /// What was being listed changed meanwhile, so the answer may be incomplete. List again.
    #[error("the tables changed while they were listed")]
    Interrupted,
    /// The kernel had more to say than the socket holds, and dropped some of it. Read the whole state again.
    #[error("the kernel dropped messages: the socket's receive buffer was full")]
    Overrun,
    /// No answer came. Whether the kernel did what was asked is unknown. Read the whole state again.
    #[error("no answer from the kernel within {0:?}")]
    Timeout(Duration),
    /// One batch is more than a socket of this process may send at once: split it, or run with CAP_NET_ADMIN.
    #[error("a message of {0} bytes is larger than this socket may send")]
    TooLarge(usize),
    /// An operation cannot be put on the wire, for example a name of more than 64 KiB. Sending it again is useless.
    #[error("{0}: too long for a netlink attribute")]
    Unencodable(Op),
    /// The kernel sent something that makes no sense. Nothing of it was used.
    #[error("malformed message from the kernel: {0}")]
    Malformed(&'static str),
    /// A system call failed.
    #[error("{call}: {errno}")]
    Io {
        /// The system call.
        call: &'static str,
        /// Its error.
        errno: Errno,
    },
}

impl Error {
    /// The error number behind it, if there is one.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Error::Kernel { errno, .. } | Error::Io { errno, .. } => Some(*errno),
            _ => None,
        }
    }

    /// The tag of the batch operation that was refused.
    pub fn tag(&self) -> Option<u32> {
        match self {
            Error::Kernel { op: Op::Tag(tag), .. } | Error::Unencodable(Op::Tag(tag)) => Some(*tag),
            _ => None,
        }
    }

    /// The object does not exist. (For a rule it can also mean: the kernel lacks the expression's module.)
    pub fn is_not_found(&self) -> bool {
        matches!(self.errno(), Some(Errno::NOENT | Errno::NODEV | Errno::SRCH | Errno::ADDRNOTAVAIL))
    }

    /// The object exists already, where it must not, or as something else.
    pub fn already_exists(&self) -> bool {
        self.errno() == Some(Errno::EXIST)
    }

    /// CAP_NET_ADMIN is missing, or a security module objects.
    pub fn is_permission(&self) -> bool {
        matches!(self.errno(), Some(Errno::PERM | Errno::ACCESS))
    }

    /// The kernel does not know this protocol, object or option at all.
    pub fn is_unsupported(&self) -> bool {
        matches!(
            self.errno(),
            Some(Errno::OPNOTSUPP | Errno::PROTONOSUPPORT | Errno::AFNOSUPPORT | Errno::NOPROTOOPT)
        )
    }

    /// The rules changed since the generation the batch was made for. Read them again.
    pub fn is_stale(&self) -> bool {
        // ERESTART, 85. rustix has no name for it, since no system call returns it.
        self.errno().is_some_and(|errno| errno.raw_os_error() == 85)
    }

    pub(crate) fn io(call: &'static str, errno: Errno) -> Error {
        Error::Io { call, errno }
    }
}

/// What the kernel refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// The operation to which the caller gave this tag.
    Tag(u32),
    /// The batch as a whole: no permission, a stale generation, or the commit itself.
    Batch,
    /// A single request, in words.
    Request(&'static str),
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Tag(tag) => write!(f, "operation {tag} of the batch"),
            Op::Batch => f.write_str("the batch"),
            Op::Request(words) => f.write_str(words),
        }
    }
}

struct Detail<'a> {
    extack: &'a Option<String>,
    element: &'a Option<u32>,
}

impl fmt::Display for Detail<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(extack) = self.extack {
            write!(f, ": {extack}")?;
        }
        if let Some(element) = self.element {
            write!(f, " (element {element})")?;
        }
        Ok(())
    }
}
