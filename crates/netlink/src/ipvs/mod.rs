// SPDX-License-Identifier: Apache-2.0

//! The kernel's IP virtual server: virtual services, their real servers, the timeouts of its connections.
//!
//! Each request stands alone: the kernel has no transactions here. [`Ipvs::apply`] sends many at once and says of each
//! one that was refused why.

mod wire;

use std::net::IpAddr;

use rustix::io::Errno;

use crate::{
    Family,
    attr::{NLM_F_ACK, NLM_F_DUMP, Writer},
    channel::Channel,
    error::{Error, Op},
    netns::Netns,
    socket::{Protocol, Socket, Transport},
};
pub(crate) use wire::{read_dest, read_service};

/// Requests are put together into datagrams of about this size.
const DATAGRAM: usize = 16 << 10;

/// Which virtual service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ServiceKey {
    /// Packets to this place.
    At {
        /// The number of the transport protocol.
        protocol: u8,
        /// Also tells the family.
        address: IpAddr,
        /// 0 for all ports, with persistence only.
        port: u16,
    },
    /// Packets with this firewall mark, whatever their protocol. It is looked for first, and must be all of the mark.
    Mark {
        /// IPv4 or IPv6.
        family: Family,
        /// The mark; not 0.
        mark: u32,
    },
}

impl ServiceKey {
    /// IPv4 or IPv6.
    pub fn family(&self) -> Family {
        match self {
            ServiceKey::At { address, .. } => family_of(*address),
            ServiceKey::Mark { family, .. } => *family,
        }
    }
}

/// A virtual service: how its connections are spread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Which one.
    pub key: ServiceKey,
    /// The scheduler's name, such as `rr`.
    pub scheduler: String,
    /// See [`flags`].
    pub flags: u32,
    /// Seconds a client is remembered, if it is; see [`flags::PERSISTENT`].
    pub timeout: u32,
}

/// The bits of [`Service::flags`].
pub mod flags {
    /// A client keeps its real server for [`super::Service::timeout`].
    pub const PERSISTENT: u32 = 1;
    /// Set by the kernel.
    pub const HASHED: u32 = 2;
    /// Each packet is scheduled by itself.
    pub const ONE_PACKET: u32 = 4;
    /// Three bits of which each scheduler has its own idea; for `sh` and `mh`: another real server instead of one with
    /// weight 0.
    pub const SCHEDULER_1: u32 = 8;
    /// For `sh` and `mh`: the port counts as well.
    pub const SCHEDULER_2: u32 = 16;
    /// Not used by the schedulers of the kernel.
    pub const SCHEDULER_3: u32 = 32;
}

/// Which real server of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DestKey {
    /// May be of the other family only for tunnels.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
}

/// A real server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dest {
    /// Which one.
    pub key: DestKey,
    /// 0: no new connections, but those it has go on.
    pub weight: u32,
    /// How packets get there.
    pub forward: Forward,
}

/// How packets get to a real server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forward {
    /// Address and port are rewritten.
    Nat,
    /// A method that is none of ours.
    Other(u32),
}

/// What has gone through a service or a real server since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Connections scheduled.
    pub connections: u64,
    /// Packets towards the real server.
    pub packets_in: u64,
    /// Packets from it.
    pub packets_out: u64,
    /// Bytes towards the real server.
    pub bytes_in: u64,
    /// Bytes from it.
    pub bytes_out: u64,
}

/// A virtual service as the kernel holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldService {
    /// What was asked for.
    pub service: Service,
    /// What has gone through it.
    pub counters: Counters,
}

/// A real server as the kernel holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldDest {
    /// What was asked for.
    pub dest: Dest,
    /// What has gone through it.
    pub counters: Counters,
    /// Connections that are open.
    pub active: u32,
    /// Connections that are remembered but over, and all of UDP.
    pub inactive: u32,
    /// Clients that are remembered.
    pub persistent: u32,
}

/// How long idle connections are remembered, in seconds. 0 leaves what is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeouts {
    /// Established TCP.
    pub tcp: u32,
    /// TCP after a FIN.
    pub tcp_fin: u32,
    /// UDP.
    pub udp: u32,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Must not exist yet.
    AddService(Service),
    /// Must exist; its real servers and counters stay.
    SetService(Service),
    /// With all its real servers. Connections that are open end with their next packet, unless the kernel is told
    /// otherwise.
    RemoveService(ServiceKey),
    /// Must not exist yet.
    AddDest(ServiceKey, Dest),
    /// Must exist; its connections stay.
    SetDest(ServiceKey, Dest),
    /// Its connections are cut off, unless the kernel is told otherwise.
    RemoveDest(ServiceKey, DestKey),
}

/// A request the kernel did not carry out. All others were.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Which of the changes, counted from 0.
    pub index: usize,
    /// Why.
    pub error: Error,
}

/// A connection to IPVS.
#[derive(Debug)]
pub struct Ipvs<T = Socket> {
    channel: Channel<T>,
    /// The number under which the kernel knows the protocol; given anew at each boot.
    family: u16,
    seq: u32,
}

impl Ipvs<Socket> {
    /// Connects in the network namespace of this thread. The kernel loads its module if it has it; if not, the error
    /// [is "not found"](Error::is_not_found).
    pub fn open() -> Result<Ipvs<Socket>, Error> {
        Ipvs::over(Socket::open(Protocol::Generic)?)
    }

    /// Connects in another network namespace.
    pub fn open_in(netns: &Netns) -> Result<Ipvs<Socket>, Error> {
        Ipvs::over(Socket::open_in(netns, Protocol::Generic)?)
    }
}

impl<T: Transport> Ipvs<T> {
    /// A connection over any transport; asks for the protocol's number.
    pub fn over(transport: T) -> Result<Ipvs<T>, Error> {
        let mut channel = Channel::new(transport);
        let mut family = None;
        channel.exchange(
            "look for IPVS",
            (wire::GENL_ID_CTRL, NLM_F_ACK),
            wire::ask_for_family,
            |message| {
                family = wire::read_family(message)?.or(family);
                Ok(())
            },
        )?;
        let family = family.ok_or(Error::Malformed("a protocol without a number"))?;
        Ok(Ipvs { channel, family, seq: 0 })
    }

    /// All virtual services.
    pub fn services(&mut self) -> Result<Vec<HeldService>, Error> {
        let mut services = Vec::new();
        let kind = (self.family, NLM_F_DUMP);
        let fill = |w: &mut Writer| wire::header(w, wire::GET_SERVICE);
        self.channel.exchange("list virtual services", kind, fill, |message| {
            services.extend(read_service(message.body)?);
            Ok(())
        })?;
        Ok(services)
    }

    /// The real servers of a service; none if there is no such service.
    pub fn dests(&mut self, key: ServiceKey) -> Result<Vec<HeldDest>, Error> {
        let mut dests = Vec::new();
        let kind = (self.family, NLM_F_DUMP);
        let fill = |w: &mut Writer| {
            wire::header(w, wire::GET_DEST);
            wire::write_key(w, key);
        };
        self.channel.exchange("list real servers", kind, fill, |message| {
            dests.extend(read_dest(message.body, key.family())?);
            Ok(())
        })?;
        Ok(dests)
    }

    /// Carries the changes out, in this order. What was refused comes back; an error means that no one knows.
    pub fn apply(&mut self, changes: &[Change]) -> Result<Vec<Refusal>, Error> {
        let mut refusals = Vec::new();
        let mut writer = Writer::new();
        let mut first = 0;
        for (index, change) in changes.iter().enumerate() {
            let start = writer.begin_message(self.family, NLM_F_ACK, self.seq.wrapping_add(index as u32));
            wire::write_change(&mut writer, change);
            writer.end_message(start);
            if writer.spoiled() {
                return Err(Error::Unencodable(Op::Request("change a virtual service")));
            }
            if writer.len() >= DATAGRAM || index + 1 == changes.len() {
                self.send(&mut writer, first..index + 1, changes, &mut refusals)?;
                first = index + 1;
            }
        }
        self.seq = self.seq.wrapping_add(changes.len() as u32);
        Ok(refusals)
    }

    fn send(
        &mut self,
        writer: &mut Writer,
        sent: std::ops::Range<usize>,
        changes: &[Change],
        refusals: &mut Vec<Refusal>,
    ) -> Result<(), Error> {
        let (base, mut answered) = (self.seq, 0);
        self.channel.batch(writer.bytes(), |ack| {
            let index = ack.seq.wrapping_sub(base) as usize;
            if !sent.contains(&index) {
                return;
            }
            answered += 1;
            if let Some(errno) = ack.errno {
                let error = ack.into_error(Op::Request(changes[index].words()), errno);
                refusals.push(Refusal { index, error });
            }
        })?;
        writer.clear();
        // A kernel that stops in the middle of a datagram has not done the rest of it.
        if answered == sent.len() { Ok(()) } else { Err(Error::Malformed("fewer answers than requests")) }
    }

    /// Sets how long idle connections are remembered.
    pub fn set_timeouts(&mut self, timeouts: Timeouts) -> Result<(), Error> {
        let fill = |w: &mut Writer| wire::write_timeouts(w, timeouts);
        self.channel.exchange("set the timeouts of IPVS", (self.family, NLM_F_ACK), fill, |_| Ok(()))
    }

    /// How long idle connections are remembered.
    pub fn timeouts(&mut self) -> Result<Timeouts, Error> {
        let mut timeouts = Timeouts::default();
        let fill = |w: &mut Writer| wire::header(w, wire::GET_CONFIG);
        self.channel.exchange("ask for the timeouts of IPVS", (self.family, NLM_F_ACK), fill, |message| {
            timeouts = wire::read_timeouts(message.body)?;
            Ok(())
        })?;
        Ok(timeouts)
    }
}

impl Change {
    fn words(&self) -> &'static str {
        match self {
            Change::AddService(_) => "add a virtual service",
            Change::SetService(_) => "change a virtual service",
            Change::RemoveService(_) => "remove a virtual service",
            Change::AddDest(..) => "add a real server",
            Change::SetDest(..) => "change a real server",
            Change::RemoveDest(..) => "remove a real server",
        }
    }
}

impl Refusal {
    /// What was to be removed was not there, or what was to be added was.
    pub fn is_harmless(&self, change: &Change) -> bool {
        match change {
            Change::RemoveService(_) | Change::RemoveDest(..) => {
                matches!(self.error.errno(), Some(Errno::SRCH | Errno::NOENT))
            }
            Change::AddService(_) | Change::AddDest(..) => self.error.already_exists(),
            Change::SetService(_) | Change::SetDest(..) => false,
        }
    }
}

fn family_of(address: IpAddr) -> Family {
    match address {
        IpAddr::V4(_) => Family::V4,
        IpAddr::V6(_) => Family::V6,
    }
}

#[cfg(test)]
mod tests;
