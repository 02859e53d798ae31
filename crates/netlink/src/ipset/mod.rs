// SPDX-License-Identifier: Apache-2.0

//! IP sets: what iptables rules with `-m set` look into. Create, list, change and destroy them without the `ipset`
//! binary.

mod wire;

use std::net::IpAddr;

use crate::{
    Family,
    attr::{NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, Writer},
    channel::Channel,
    codec::Message,
    error::Error,
    netns::Netns,
    socket::{Protocol, Socket, Transport},
};
use wire::{subsystem, write_element, write_head};

/// Elements of one message; an attribute with all of them must not exceed 64 KiB.
const ELEMENTS_PER_MESSAGE: usize = 500;

/// What a set holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SetKind {
    /// `hash:ip`: addresses.
    HashIp,
    /// `hash:ip,port`: address, protocol and port.
    HashIpPort,
    /// The same, each with a mark that rules can give to packets (`--map-set`).
    HashIpPortMark,
    /// `hash:ip,port,ip`: the same, and a second address.
    HashIpPortIp,
    /// `hash:ip,port,net`: the same, and a range of addresses.
    HashIpPortNet,
    /// `bitmap:port`: ports from 0 to 65535, of no protocol.
    BitmapPort,
}

impl SetKind {
    /// The kernel's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            SetKind::HashIp => "hash:ip",
            SetKind::HashIpPort | SetKind::HashIpPortMark => "hash:ip,port",
            SetKind::HashIpPortIp => "hash:ip,port,ip",
            SetKind::HashIpPortNet => "hash:ip,port,net",
            SetKind::BitmapPort => "bitmap:port",
        }
    }

    fn from_name(name: &str) -> Option<SetKind> {
        [
            SetKind::HashIp,
            SetKind::HashIpPort,
            SetKind::HashIpPortIp,
            SetKind::HashIpPortNet,
            SetKind::BitmapPort,
        ]
        .into_iter()
        .find(|kind| kind.name() == name)
    }
}

/// A set to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// At most 31 bytes.
    pub name: String,
    /// What it holds.
    pub kind: SetKind,
    /// Of its addresses; not looked at for ports.
    pub family: Family,
    /// How many elements it may hold; not looked at for ports.
    pub max_elements: u32,
}

/// An element of a set of one of our kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Element {
    /// Of [`SetKind::BitmapPort`].
    Port(u16),
    /// Of [`SetKind::HashIp`].
    Ip(IpAddr),
    /// Of [`SetKind::HashIpPort`].
    Address {
        /// The address.
        address: IpAddr,
        /// The number of the transport protocol.
        protocol: u8,
        /// The port.
        port: u16,
    },
    /// Of [`SetKind::HashIpPortMark`]. To add it again with another mark changes the mark; to remove it, the mark does
    /// not count.
    Marked {
        /// The address.
        address: IpAddr,
        /// The number of the transport protocol.
        protocol: u8,
        /// The port.
        port: u16,
        /// What packets get as their mark, all of it.
        mark: u32,
    },
    /// Of [`SetKind::HashIpPortIp`] and [`SetKind::HashIpPortNet`].
    Pair {
        /// The address.
        address: IpAddr,
        /// The number of the transport protocol.
        protocol: u8,
        /// The port.
        port: u16,
        /// The second address, or where the range begins.
        other: IpAddr,
        /// The bits of the range; all of them for a single address. The kernel refuses 0: two halves do instead.
        prefix: u8,
    },
}

/// A set as the kernel holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Its name.
    pub name: String,
    /// `None` for a kind that is none of ours.
    pub kind: Option<SetKind>,
    /// `None` for sets without addresses.
    pub family: Option<Family>,
    /// How many elements it may hold; 0 for sets without a bound.
    pub max_elements: u32,
    /// How many rules and sets use it.
    pub references: u32,
    /// Empty for kinds that are none of ours, and if only heads were asked for.
    pub elements: Vec<Element>,
}

/// A connection to the kernel's IP sets.
#[derive(Debug)]
pub struct Ipset<T = Socket> {
    channel: Channel<T>,
}

impl Ipset<Socket> {
    /// Connects in the network namespace of this thread.
    pub fn open() -> Result<Ipset<Socket>, Error> {
        Ok(Ipset::over(Socket::open(Protocol::Netfilter)?))
    }

    /// Connects in another network namespace.
    pub fn open_in(netns: &Netns) -> Result<Ipset<Socket>, Error> {
        Ok(Ipset::over(Socket::open_in(netns, Protocol::Netfilter)?))
    }
}

impl<T: Transport> Ipset<T> {
    /// A connection over any transport.
    pub fn over(transport: T) -> Ipset<T> {
        Ipset { channel: Channel::new(transport) }
    }

    /// Makes a set that does not exist yet.
    pub fn create(&mut self, spec: &Spec) -> Result<(), Error> {
        let revision = self.revision(spec.kind, spec.family)?;
        let kind = (subsystem(wire::CMD_CREATE), NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL);
        let fill = |w: &mut Writer| wire::write_spec(w, spec, revision);
        self.channel.exchange("create an IP set", kind, fill, |_| Ok(()))
    }

    /// The newest revision of a kind that the kernel has. It changes nothing for what we use of it, but must be named.
    fn revision(&mut self, kind: SetKind, family: Family) -> Result<u8, Error> {
        let mut revision = 0;
        let fill = |w: &mut Writer| wire::ask_for_kind(w, kind, family);
        let request = (subsystem(wire::CMD_TYPE), NLM_F_ACK);
        self.channel.exchange("look for a kind of IP set", request, fill, |message| {
            revision = wire::read_revision(message)?.unwrap_or(revision);
            Ok(())
        })?;
        Ok(revision)
    }

    /// Removes a set. The kernel refuses (`EBUSY`) while a rule uses it. `false` if there was none.
    pub fn destroy(&mut self, name: &str) -> Result<bool, Error> {
        let fill = |w: &mut Writer| write_head(w, Family::V4, Some(name));
        // Without this flag the kernel says yes to a set that is not there.
        let request = (subsystem(wire::CMD_DESTROY), NLM_F_ACK | NLM_F_EXCL);
        match self.channel.exchange("destroy an IP set", request, fill, |_| Ok(())) {
            Ok(()) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Exchanges two sets of one kind and family: each gets the other's name, and rules that use one use the other.
    pub fn swap(&mut self, one: &str, other: &str) -> Result<(), Error> {
        let fill = |w: &mut Writer| {
            write_head(w, Family::V4, Some(one));
            w.str(wire::ATTR_SETNAME2, other);
        };
        self.channel.exchange("swap IP sets", (subsystem(wire::CMD_SWAP), NLM_F_ACK), fill, |_| Ok(()))
    }

    /// Adds elements; those that are there already are no error.
    pub fn add(&mut self, set: &str, family: Family, elements: &[Element]) -> Result<(), Error> {
        self.change("add to an IP set", wire::CMD_ADD, (set, family), elements)
    }

    /// Removes elements; those that are not there are no error.
    pub fn remove(&mut self, set: &str, family: Family, elements: &[Element]) -> Result<(), Error> {
        self.change("remove from an IP set", wire::CMD_DEL, (set, family), elements)
    }

    fn change(
        &mut self,
        what: &'static str,
        command: u16,
        (set, family): (&str, Family),
        elements: &[Element],
    ) -> Result<(), Error> {
        for part in elements.chunks(ELEMENTS_PER_MESSAGE) {
            let fill = |w: &mut Writer| {
                write_head(w, family, Some(set));
                // Without a line number the kernel takes one element only.
                w.be32(wire::ATTR_LINENO, 1);
                w.nest(wire::ATTR_ADT, |w| part.iter().for_each(|element| write_element(w, element)));
            };
            self.channel.exchange(what, (subsystem(command), NLM_F_ACK), fill, |_| Ok(()))?;
        }
        Ok(())
    }

    /// All sets, with their elements.
    pub fn list(&mut self) -> Result<Vec<Held>, Error> {
        self.dump(None, false)
    }

    /// All sets, without their elements.
    pub fn heads(&mut self) -> Result<Vec<Held>, Error> {
        self.dump(None, true)
    }

    /// One set, with its elements; `None` if there is no such set.
    pub fn read(&mut self, name: &str) -> Result<Option<Held>, Error> {
        match self.dump(Some(name), false) {
            Ok(sets) => Ok(sets.into_iter().next()),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn dump(&mut self, name: Option<&str>, heads_only: bool) -> Result<Vec<Held>, Error> {
        let mut sets: Vec<Held> = Vec::new();
        let fill = |w: &mut Writer| {
            write_head(w, Family::V4, name);
            if heads_only {
                w.be32(wire::ATTR_FLAGS, wire::FLAG_LIST_HEADER);
            }
        };
        let request = (subsystem(wire::CMD_LIST), NLM_F_DUMP | NLM_F_ACK);
        self.channel.exchange("list IP sets", request, fill, |message| collect(&mut sets, message))?;
        Ok(sets)
    }
}

/// A large set comes in many messages, each with its name.
fn collect(sets: &mut Vec<Held>, message: &Message<'_>) -> Result<(), Error> {
    let Some(part) = wire::read_set(message, sets.last())? else { return Ok(()) };
    match sets.last_mut() {
        Some(last) if last.name == part.name => last.elements.extend(part.elements),
        _ => sets.push(part),
    }
    Ok(())
}

pub(crate) use wire::read_set;

#[cfg(test)]
mod tests;
