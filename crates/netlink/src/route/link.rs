// SPDX-License-Identifier: Apache-2.0

//! Links.

use std::os::fd::{AsFd, AsRawFd};

use super::Route;
use crate::{
    attr::{NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, Writer},
    codec::{Message, Reader, each_attr},
    error::Error,
    netns::Netns,
    socket::Transport,
};

const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;

const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;
const LINKINFO_KIND: u16 = 1;
const LINKINFO_ARGUMENTS: u16 = 2;
const VETH_PEER: u16 = 1;

const IFF_UP: u32 = 1;

/// A link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The kernel's number for it, within its namespace.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Switched on.
    pub up: bool,
    /// The index of the bridge it belongs to.
    pub master: Option<u32>,
    /// The largest packet.
    pub mtu: u32,
    /// It is a bridge itself.
    pub bridge: bool,
}

impl Link {
    /// `None` if the message is about something else.
    pub(crate) fn read(message: &Message<'_>) -> Result<Option<Link>, Error> {
        if message.kind != RTM_NEWLINK {
            return Ok(None);
        }
        let mut body = Reader::new(message.body);
        body.take(4)?;
        let index = u32::from_ne_bytes(body.array()?);
        let flags = u32::from_ne_bytes(body.array()?);
        body.take(4)?;
        let up = flags & IFF_UP != 0;
        let mut link = Link { index, name: String::new(), up, master: None, mtu: 0, bridge: false };
        each_attr(body.rest(), |attr| {
            match attr.kind {
                IFLA_IFNAME => link.name = attr.str()?.to_owned(),
                IFLA_MASTER => link.master = Some(attr.ne32()?),
                IFLA_MTU => link.mtu = attr.ne32()?,
                IFLA_LINKINFO => attr.each(|attr| {
                    link.bridge |= attr.kind == LINKINFO_KIND && attr.str()? == "bridge";
                    Ok(())
                })?,
                _ => {}
            }
            Ok(())
        })?;
        Ok(Some(link))
    }
}

/// What a new link is.
#[derive(Clone, Copy, Debug)]
pub enum LinkKind<'a> {
    /// A switch.
    Bridge,
    /// A link to nowhere, for addresses. Not every kernel has it.
    Dummy,
    /// One end of a cable.
    Veth {
        /// The name of the other end.
        peer: &'a str,
        /// Where the other end is; `None`: here.
        netns: Option<&'a Netns>,
    },
}

impl<T: Transport> Route<T> {
    /// All links.
    pub fn links(&mut self) -> Result<Vec<Link>, Error> {
        let mut found = Vec::new();
        let any = |w: &mut Writer| w.raw(&[0; 16]);
        self.channel.exchange("list links", (RTM_GETLINK, NLM_F_DUMP), any, |message| {
            found.extend(Link::read(message)?);
            Ok(())
        })?;
        Ok(found)
    }

    /// The link with this name.
    pub fn link(&mut self, name: &str) -> Result<Link, Error> {
        let mut found = None;
        let ask = |w: &mut Writer| {
            write_message(w, 0, 0, 0);
            w.str(IFLA_IFNAME, name);
        };
        self.channel.exchange("find a link", (RTM_GETLINK, NLM_F_ACK), ask, |message| {
            found = Link::read(message)?;
            Ok(())
        })?;
        found.ok_or(Error::Malformed("an answer without a link"))
    }

    /// The index of the link with this name.
    pub fn link_index(&mut self, name: &str) -> Result<u32, Error> {
        Ok(self.link(name)?.index)
    }

    /// Makes a link.
    pub fn add_link(&mut self, name: &str, kind: LinkKind<'_>) -> Result<(), Error> {
        self.change("add a link", RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, |w| {
            write_message(w, 0, 0, 0);
            w.str(IFLA_IFNAME, name);
            w.nest(IFLA_LINKINFO, |w| match kind {
                LinkKind::Bridge => w.str(LINKINFO_KIND, "bridge"),
                LinkKind::Dummy => w.str(LINKINFO_KIND, "dummy"),
                LinkKind::Veth { peer, netns } => {
                    w.str(LINKINFO_KIND, "veth");
                    w.nest(LINKINFO_ARGUMENTS, |w| {
                        w.nest(VETH_PEER, |w| {
                            write_message(w, 0, 0, 0);
                            w.str(IFLA_IFNAME, peer);
                            if let Some(netns) = netns {
                                write_netns(w, netns);
                            }
                        });
                    });
                }
            });
        })
    }

    /// Deletes a link; for a cable, both ends.
    pub fn delete_link(&mut self, index: u32) -> Result<(), Error> {
        self.change("delete a link", RTM_DELLINK, 0, |w| write_message(w, index, 0, 0))
    }

    /// Switches a link on or off.
    pub fn set_up(&mut self, index: u32, up: bool) -> Result<(), Error> {
        let flags = if up { IFF_UP } else { 0 };
        self.change("switch a link", RTM_NEWLINK, 0, |w| write_message(w, index, flags, IFF_UP))
    }

    /// Gives a link another name. It must be switched off.
    pub fn set_name(&mut self, index: u32, name: &str) -> Result<(), Error> {
        self.change("rename a link", RTM_NEWLINK, 0, |w| {
            write_message(w, index, 0, 0);
            w.str(IFLA_IFNAME, name);
        })
    }

    /// Plugs a link into a bridge, or with `None` out of it.
    pub fn set_master(&mut self, index: u32, bridge: Option<u32>) -> Result<(), Error> {
        self.change("plug a link into a bridge", RTM_NEWLINK, 0, |w| {
            write_message(w, index, 0, 0);
            w.ne32(IFLA_MASTER, bridge.unwrap_or(0));
        })
    }

    /// Moves a link into another network namespace. It may get another index there, and is switched off.
    pub fn set_netns(&mut self, index: u32, netns: &Netns) -> Result<(), Error> {
        self.change("move a link", RTM_NEWLINK, 0, |w| {
            write_message(w, index, 0, 0);
            write_netns(w, netns);
        })
    }

    /// Sets the largest packet.
    pub fn set_mtu(&mut self, index: u32, mtu: u32) -> Result<(), Error> {
        self.change("set a link's MTU", RTM_NEWLINK, 0, |w| {
            write_message(w, index, 0, 0);
            w.ne32(IFLA_MTU, mtu);
        })
    }
}

fn write_message(w: &mut Writer, index: u32, flags: u32, change: u32) {
    w.raw(&[0; 4]);
    w.raw(&index.to_ne_bytes());
    w.raw(&flags.to_ne_bytes());
    w.raw(&change.to_ne_bytes());
}

fn write_netns(w: &mut Writer, netns: &Netns) {
    w.ne32(IFLA_NET_NS_FD, netns.as_fd().as_raw_fd().cast_unsigned());
}
