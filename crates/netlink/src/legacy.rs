// SPDX-License-Identifier: Apache-2.0

//! The shape of a table of ip_tables: how many entries, and where its built-in chains are.
//!
//! ip_tables tells nobody when a table changes. But to ask for its shape costs as much as one system call, whatever
//! its size, and hardly a change leaves it as it was.

use std::{
    mem,
    os::fd::{AsRawFd as _, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{self, AddressFamily, SocketFlags, SocketType, ipproto},
};

use crate::{Family, error::Error};

/// Compare it with an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rules and chain heads.
    pub entries: u32,
    /// Of all of it, in bytes.
    pub size: u32,
    /// Where the built-in chains begin and end.
    hooks: [[u32; 5]; 2],
}

/// Asks for shapes, in the network namespace in which it was opened. Needs CAP_NET_RAW and CAP_NET_ADMIN.
#[derive(Debug)]
pub struct Shapes {
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

impl Shapes {
    pub fn open(family: Family) -> Result<Shapes, Error> {
        let domain = match family {
            Family::V4 => AddressFamily::INET,
            Family::V6 => AddressFamily::INET6,
        };
        let flags = SocketFlags::CLOEXEC;
        let socket = net::socket_with(domain, SocketType::RAW, flags, Some(ipproto::RAW))
            .map_err(|errno| Error::io("socket", errno))?;
        Ok(Shapes { socket, family })
    }

    /// The shape of a table. A table that is not there comes to be by this.
    pub fn of(&self, table: &str) -> Result<Shape, Error> {
        let mut asked = GetInfo {
            name: [0; 32],
            valid_hooks: 0,
            hook_entry: [0; 5],
            underflow: [0; 5],
            num_entries: 0,
            size: 0,
        };
        let name = asked.name.get_mut(..table.len()).filter(|name| name.len() < 32);
        name.ok_or(Error::io("getsockopt", Errno::INVAL))?.copy_from_slice(table.as_bytes());
        let mut len = mem::size_of::<GetInfo>() as libc::socklen_t;
        let level = match self.family {
            Family::V4 => libc::IPPROTO_IP,
            Family::V6 => libc::IPPROTO_IPV6,
        };
        // SAFETY: the descriptor is ours. The pointers are to `asked`, whose size `len` says and which any bytes are
        // valid for, and to `len`; both outlive the call, and the kernel keeps neither.
        let result = unsafe {
            libc::getsockopt(self.socket.as_raw_fd(), level, GET_INFO, (&raw mut asked).cast(), &raw mut len)
        };
        if result != 0 {
            let error = std::io::Error::last_os_error();
            return Err(Error::io("getsockopt", Errno::from_io_error(&error).unwrap_or(Errno::INVAL)));
        }
        let hooks = [asked.hook_entry, asked.underflow];
        Ok(Shape { entries: asked.num_entries, size: asked.size, hooks })
    }
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
                    let shapes = Shapes::open(family).unwrap();
                    let shape = match shapes.of("filter") {
                        Ok(shape) => shape,
                        // A kernel without ip_tables.
                        Err(Error::Io { errno: Errno::NOPROTOOPT, .. }) => return,
                        Err(error) => panic!("{error}"),
                    };
                    // Three policies, and an end.
                    assert_eq!(shape.entries, 4);
                    assert_eq!(shapes.of("filter").unwrap(), shape);
                    assert!(shapes.of("nosuchtable").is_err());
                    assert!(shapes.of(&"x".repeat(40)).is_err());
                }
            })
            .unwrap();
    }
}
