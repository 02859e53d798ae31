// SPDX-License-Identifier: Apache-2.0

//! Who is at the other end of a Unix socket.

use std::{
    mem,
    os::fd::{AsFd, AsRawFd},
};

use rustix::io::Errno;

use crate::error::Error;

/// A process, as seen from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// `None` for a process of another container, which has no number here.
    pub pid: Option<u32>,
    /// Its user.
    pub uid: u32,
}

impl Peer {
    /// Who listened, or connected, at the other end.
    ///
    /// Not `rustix`: it takes for granted that every process has a number here.
    pub fn of(socket: &impl AsFd) -> Result<Peer, Error> {
        let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        let mut len = mem::size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the descriptor is borrowed for the call. The pointers are to `found`, whose size `len` says and which
        // any bytes are valid for, and to `len`; both outlive the call, and the kernel keeps neither.
        let result = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut len,
            )
        };
        if result != 0 {
            let error = std::io::Error::last_os_error();
            return Err(Error::io("getsockopt", Errno::from_io_error(&error).unwrap_or(Errno::INVAL)));
        }
        Ok(Peer { pid: u32::try_from(found.pid).ok().filter(|pid| *pid > 0), uid: found.uid })
    }

    /// Root, or our own user: nobody else is believed when he has taken a name that anybody can take.
    pub fn is_believed(&self) -> bool {
        self.uid == 0 || self.uid == rustix::process::geteuid().as_raw()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn we_are_our_own_peer() {
        let (here, _there) = UnixStream::pair().expect("a pair of sockets");
        let uid = rustix::process::geteuid().as_raw();
        let peer = Peer::of(&here).expect("it has a peer");
        assert_eq!(peer, Peer { pid: Some(std::process::id()), uid });
        assert!(peer.is_believed());
        assert!(!Peer { uid: uid.wrapping_sub(2), ..peer }.is_believed());
    }
}
