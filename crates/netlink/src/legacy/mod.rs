// SPDX-License-Identifier: Apache-2.0

//! Tables of ip_tables: their shape, which costs a system call, and all of their rules, which costs a copy.
//!
//! ip_tables tells nobody when a table changes. But to ask for its shape, how many entries there are and where the
//! built-in chains begin, costs the same whatever its size, and hardly a change leaves it as it was. What leaves it shows
//! in a digest of the rules, see [`Entries`].

mod entries;

use std::{
    mem,
    os::fd::{AsRawFd as _, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{self, AddressFamily, SocketFlags, SocketType, ipproto},
};

pub(crate) use self::entries::fuzz;
pub use self::entries::{Entries, Policy};
use crate::{Family, error::Error};

/// Compare it with an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rules and chain heads.
    pub entries: u32,
    /// Of all of it, in bytes.
    pub size: u32,
    /// Which built-in chains there are, by the number of their hook.
    valid_hooks: u32,
    /// Where they begin, and where their policies are.
    hooks: [[u32; 5]; 2],
}

/// Reads tables, in the network namespace in which it was opened. Needs CAP_NET_RAW and CAP_NET_ADMIN.
#[derive(Debug)]
pub struct Tables {
    socket: OwnedFd,
    family: Family,
}

/// `struct ipt_getinfo`, which `struct ip6t_getinfo` equals.
#[repr(C)]
#[derive(Clone, Copy)]
struct GetInfo {
    name: [u8; 32],
    valid_hooks: u32,
    hook_entry: [u32; 5],
    underflow: [u32; 5],
    num_entries: u32,
    size: u32,
}

/// `IPT_SO_GET_INFO`, which `IP6T_SO_GET_INFO` equals.
const GET_INFO: libc::c_int = 64;
/// `IPT_SO_GET_ENTRIES`, which `IP6T_SO_GET_ENTRIES` equals.
const GET_ENTRIES: libc::c_int = 65;
/// What stands before the entries in `struct ipt_get_entries`: the table's name, and how many bytes are to come.
const HEAD: usize = 40;
/// So often a table may change its size between the question for it and the reading.
const ATTEMPTS: usize = 10;

impl Tables {
    pub fn open(family: Family) -> Result<Tables, Error> {
        let domain = match family {
            Family::V4 => AddressFamily::INET,
            Family::V6 => AddressFamily::INET6,
        };
        let flags = SocketFlags::CLOEXEC;
        let socket = net::socket_with(domain, SocketType::RAW, flags, Some(ipproto::RAW))
            .map_err(|errno| Error::io("socket", errno))?;
        Ok(Tables { socket, family })
    }

    /// The shape of a table. A table that is not there comes to be by this.
    pub fn shape(&self, table: &str) -> Result<Shape, Error> {
        let mut asked = GetInfo {
            name: padded(table)?,
            valid_hooks: 0,
            hook_entry: [0; 5],
            underflow: [0; 5],
            num_entries: 0,
            size: 0,
        };
        let mut len = mem::size_of::<GetInfo>() as libc::socklen_t;
        // SAFETY: the descriptor is ours. The pointers are to `asked`, whose size `len` says and which any bytes are
        // valid for, and to `len`; both outlive the call, and the kernel keeps neither.
        let result = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                self.level(),
                GET_INFO,
                (&raw mut asked).cast(),
                &raw mut len,
            )
        };
        outcome(result)?;
        let hooks = [asked.hook_entry, asked.underflow];
        let GetInfo { valid_hooks, num_entries, size, .. } = asked;
        Ok(Shape { entries: num_entries, size, valid_hooks, hooks })
    }

    /// All rules of a table. They are copied whole: some hundred bytes each.
    pub fn read(&self, table: &str) -> Result<Entries, Error> {
        for _ in 1..ATTEMPTS {
            match self.read_once(table) {
                // It has another size by now.
                Err(Error::Io { errno: Errno::AGAIN, .. }) => {}
                outcome => return outcome,
            }
        }
        self.read_once(table)
    }

    fn read_once(&self, table: &str) -> Result<Entries, Error> {
        let shape = self.shape(table)?;
        // Zeroed, since the kernel leaves out what follows the end of a name.
        let mut bytes = vec![0; HEAD + shape.size as usize];
        bytes[..32].copy_from_slice(&padded(table)?);
        bytes[32..36].copy_from_slice(&shape.size.to_ne_bytes());
        let mut len =
            libc::socklen_t::try_from(bytes.len()).map_err(|_| Error::io("getsockopt", Errno::TOOBIG))?;
        // SAFETY: the descriptor is ours. The pointers are to `bytes`, whose length `len` says, and to `len`; both
        // outlive the call, and the kernel keeps neither.
        let result = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                self.level(),
                GET_ENTRIES,
                bytes.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        outcome(result)?;
        Ok(Entries::new(self.family, shape, bytes, HEAD))
    }

    fn level(&self) -> libc::c_int {
        match self.family {
            Family::V4 => libc::IPPROTO_IP,
            Family::V6 => libc::IPPROTO_IPV6,
        }
    }
}

/// A name as the kernel takes it.
fn padded(table: &str) -> Result<[u8; 32], Error> {
    let mut name = [0; 32];
    let place = name.get_mut(..table.len()).filter(|place| place.len() < 32);
    place.ok_or(Error::io("getsockopt", Errno::INVAL))?.copy_from_slice(table.as_bytes());
    Ok(name)
}

fn outcome(result: libc::c_int) -> Result<(), Error> {
    if result == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    Err(Error::io("getsockopt", Errno::from_io_error(&error).unwrap_or(Errno::INVAL)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Netns;

    #[test]
    fn an_empty_table_has_its_built_in_chains() {
        let Ok(netns) = Netns::new() else {
            assert!(std::env::var_os("CI").is_none(), "no namespace");
            eprintln!("skipped: no namespace");
            return;
        };
        netns
            .run(|| {
                for family in [Family::V4, Family::V6] {
                    let tables = Tables::open(family).unwrap();
                    let shape = match tables.shape("filter") {
                        Ok(shape) => shape,
                        // A kernel without ip_tables.
                        Err(Error::Io { errno: Errno::NOPROTOOPT, .. }) => return,
                        Err(error) => panic!("{error}"),
                    };
                    // Three policies, and an end.
                    assert_eq!(shape.entries, 4);
                    let entries = tables.read("filter").unwrap();
                    assert_eq!(entries.policy("FORWARD"), Some(Policy::Accept));
                    assert_eq!(entries.policy("PREROUTING"), None);
                    assert_eq!(entries.chains().count(), 0);
                    assert_eq!(tables.shape("filter").unwrap(), shape);
                    assert!(tables.shape("nosuchtable").is_err());
                    assert!(tables.shape(&"x".repeat(40)).is_err());
                }
            })
            .unwrap();
    }
}
