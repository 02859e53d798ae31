// SPDX-License-Identifier: Apache-2.0

//! The kernel's table of flows: list them by a filter, delete exactly one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rustix::io::Errno;

use crate::{
    Family,
    attr::{NLM_F_ACK, NLM_F_DUMP, Writer},
    channel::Channel,
    codec::{Attr, Message, Reader, each_attr},
    error::Error,
    netns::Netns,
    socket::{Protocol, Socket, Transport},
};

const SUBSYS_CTNETLINK: u16 = 1 << 8;
const CT_NEW: u16 = SUBSYS_CTNETLINK;
const CT_GET: u16 = SUBSYS_CTNETLINK | 1;
const CT_DELETE: u16 = SUBSYS_CTNETLINK | 2;

const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_STATUS: u16 = 3;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_FILTER: u16 = 25;
const CTA_STATUS_MASK: u16 = 26;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_TUPLE_ZONE: u16 = 3;
const CTA_IP_V4_SRC: u16 = 1;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_SRC: u16 = 3;
const CTA_IP_V6_DST: u16 = 4;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_SRC_PORT: u16 = 2;
const CTA_PROTO_DST_PORT: u16 = 3;
const CTA_FILTER_ORIG_FLAGS: u16 = 1;
const CTA_FILTER_REPLY_FLAGS: u16 = 2;

/// Which parts of a tuple the kernel compares.
const FILTER_IP_SRC: u32 = 1;
const FILTER_IP_DST: u32 = 1 << 1;
const FILTER_PROTO_NUM: u32 = 1 << 3;
const FILTER_SRC_PORT: u32 = 1 << 4;
const FILTER_DST_PORT: u32 = 1 << 5;

/// Source and destination of the packets of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuple {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Source port; 0 if the protocol has none.
    pub sport: u16,
    /// Destination port; 0 if the protocol has none.
    pub dport: u16,
}

/// A flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// IPv4 or IPv6.
    pub family: Family,
    /// The number of the transport protocol.
    pub protocol: u8,
    /// The packets of who began it, before any rewriting.
    pub original: Tuple,
    /// The packets that answer: from where the first packet was sent on to.
    pub reply: Tuple,
    /// The kernel's number. A later flow between the same two ends has another.
    pub id: u32,
    /// A bit mask, see [`ct_status`](crate::nft::expr::ct_status).
    pub status: u32,
    /// The zone in which it is looked up.
    pub zone: Zone,
}

/// The conntrack zone of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Zone {
    /// The default zone, at least for the original direction.
    Default,
    /// This zone, for both directions.
    Both(u16),
    /// This zone, for the original direction only.
    Original(u16),
}

/// Which flows to list. All conditions must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filter {
    /// IPv4 or IPv6.
    pub family: Family,
    /// The number of the transport protocol.
    pub protocol: Option<u8>,
    /// Conditions on the packets of who began it.
    pub original: Ends,
    /// Conditions on the packets that answer.
    pub reply: Ends,
    /// None of these bits is set, see [`ct_status`](crate::nft::expr::ct_status).
    pub lacks: u32,
}

/// Conditions on one direction of a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    /// Source address.
    pub src: Option<IpAddr>,
    /// Destination address.
    pub dst: Option<IpAddr>,
    /// Source port.
    pub sport: Option<u16>,
    /// Destination port.
    pub dport: Option<u16>,
}

impl Filter {
    /// All flows of a family.
    pub fn all(family: Family) -> Filter {
        Filter { family, protocol: None, original: Ends::default(), reply: Ends::default(), lacks: 0 }
    }

    /// All flows of a family and transport protocol.
    pub fn protocol(family: Family, protocol: u8) -> Filter {
        Filter { protocol: Some(protocol), ..Filter::all(family) }
    }

    /// Whether a flow is meant.
    pub fn matches(&self, flow: &Flow) -> bool {
        self.family == flow.family
            && self.protocol.is_none_or(|protocol| protocol == flow.protocol)
            && self.original.matches(&flow.original)
            && self.reply.matches(&flow.reply)
            && flow.status & self.lacks == 0
    }
}

impl Ends {
    fn matches(&self, tuple: &Tuple) -> bool {
        self.src.is_none_or(|src| src == tuple.src)
            && self.dst.is_none_or(|dst| dst == tuple.dst)
            && self.sport.is_none_or(|sport| sport == tuple.sport)
            && self.dport.is_none_or(|dport| dport == tuple.dport)
    }

    /// What the kernel is to compare. It looks at ports only for a given protocol.
    fn flags(&self, protocol: Option<u8>) -> u32 {
        let mut flags = 0;
        // Not for IPv6: the kernel (6.18 at least) compares those addresses the wrong way round, and sends all flows
        // but the ones that are meant.
        if self.src.is_some_and(|src| src.is_ipv4()) {
            flags |= FILTER_IP_SRC;
        }
        if self.dst.is_some_and(|dst| dst.is_ipv4()) {
            flags |= FILTER_IP_DST;
        }
        if protocol.is_some_and(has_ports) {
            if self.sport.is_some() {
                flags |= FILTER_SRC_PORT;
            }
            if self.dport.is_some() {
                flags |= FILTER_DST_PORT;
            }
        }
        flags
    }
}

/// A connection to the kernel's table of flows.
#[derive(Debug)]
pub struct Conntrack<T = Socket> {
    channel: Channel<T>,
    /// Whether the kernel can filter (Linux 5.8). Until it says no, assume so.
    kernel_filters: bool,
}

impl Conntrack<Socket> {
    /// Connects in the network namespace of this thread.
    pub fn open() -> Result<Conntrack<Socket>, Error> {
        Ok(Conntrack::over(Socket::open(Protocol::Netfilter)?))
    }

    /// Connects in another network namespace.
    pub fn open_in(netns: &Netns) -> Result<Conntrack<Socket>, Error> {
        Ok(Conntrack::over(Socket::open_in(netns, Protocol::Netfilter)?))
    }
}

impl<T: Transport> Conntrack<T> {
    /// A connection over any transport.
    pub fn over(transport: T) -> Conntrack<T> {
        Conntrack { channel: Channel::new(transport), kernel_filters: true }
    }

    /// Visits the flows that match, without keeping them. How many the kernel sent comes back.
    ///
    /// The kernel filters as far as it can; the rest is done here. Flows that come and go meanwhile may be missing.
    pub fn flows(&mut self, filter: &Filter, mut visit: impl FnMut(&Flow)) -> Result<usize, Error> {
        if self.kernel_filters {
            match self.dump(filter, true, &mut visit) {
                // It says so before it lists anything, so that nothing is visited twice.
                Err(Error::Kernel { errno: Errno::INVAL | Errno::OPNOTSUPP, .. }) => {
                    self.kernel_filters = false
                }
                outcome => return outcome,
            }
        }
        self.dump(filter, false, &mut visit)
    }

    fn dump(
        &mut self,
        filter: &Filter,
        restrict: bool,
        visit: &mut impl FnMut(&Flow),
    ) -> Result<usize, Error> {
        let fill = |w: &mut Writer| {
            w.raw(&[filter.family.number(), 0, 0, 0]);
            if restrict {
                write_filter(w, filter);
            }
            // Since Linux 5.16; older ones pass over it.
            if filter.lacks != 0 {
                w.be32(CTA_STATUS, 0);
                w.be32(CTA_STATUS_MASK, filter.lacks);
            }
        };
        let mut seen = 0;
        self.channel.exchange("list flows", (CT_GET, NLM_F_DUMP), fill, |message| {
            let Some(flow) = Flow::read(message)? else { return Ok(()) };
            seen += 1;
            if filter.matches(&flow) {
                visit(&flow);
            }
            Ok(())
        })?;
        Ok(seen)
    }

    /// Deletes exactly this flow: a later one between the same two ends stays. `false` if it was gone already.
    ///
    /// For protocols with ports only.
    pub fn delete(&mut self, flow: &Flow) -> Result<bool, Error> {
        let fill = |w: &mut Writer| {
            w.raw(&[flow.family.number(), 0, 0, 0]);
            w.nest(CTA_TUPLE_ORIG, |w| {
                write_addresses(w, Some(flow.original.src), Some(flow.original.dst));
                w.nest(CTA_TUPLE_PROTO, |w| {
                    w.u8(CTA_PROTO_NUM, flow.protocol);
                    w.be16(CTA_PROTO_SRC_PORT, flow.original.sport);
                    w.be16(CTA_PROTO_DST_PORT, flow.original.dport);
                });
                if let Zone::Original(zone) = flow.zone {
                    w.be16(CTA_TUPLE_ZONE, zone);
                }
            });
            if let Zone::Both(zone) = flow.zone {
                w.be16(CTA_ZONE, zone);
            }
            w.be32(CTA_ID, flow.id);
        };
        match self.channel.exchange("delete a flow", (CT_DELETE, NLM_F_ACK), fill, |_| Ok(())) {
            Ok(()) => Ok(true),
            Err(error) if error.errno() == Some(Errno::NOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Flow {
    /// `None` if the message is about something else, or a family that is none of ours.
    pub(crate) fn read(message: &Message<'_>) -> Result<Option<Flow>, Error> {
        if message.kind != CT_NEW {
            return Ok(None);
        }
        let mut body = Reader::new(message.body);
        let [family, ..] = body.array::<4>()?;
        let Some(family) = Family::from_number(family) else { return Ok(None) };
        let (mut original, mut reply) = (None, None);
        let (mut id, mut status, mut zone) = (0, 0, Zone::Default);
        each_attr(body.rest(), |attr| {
            match attr.kind {
                CTA_TUPLE_ORIG => original = Some(read_tuple(&attr, family)?),
                CTA_TUPLE_REPLY => reply = Some(read_tuple(&attr, family)?),
                CTA_STATUS => status = attr.be32()?,
                CTA_ID => id = attr.be32()?,
                CTA_ZONE => zone = Zone::Both(attr.be16()?),
                _ => {}
            }
            Ok(())
        })?;
        let (Some(original), Some(reply)) = (original, reply) else {
            return Err(Error::Malformed("a flow without its two ends"));
        };
        if let Some(number) = original.zone {
            zone = Zone::Original(number);
        }
        let protocol = original.protocol;
        Ok(Some(Flow { family, protocol, original: original.tuple, reply: reply.tuple, id, status, zone }))
    }
}

struct RawTuple {
    tuple: Tuple,
    protocol: u8,
    zone: Option<u16>,
}

fn read_tuple(attr: &Attr<'_>, family: Family) -> Result<RawTuple, Error> {
    let any: IpAddr = match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    };
    let mut raw =
        RawTuple { tuple: Tuple { src: any, dst: any, sport: 0, dport: 0 }, protocol: 0, zone: None };
    attr.each(|part| match part.kind {
        CTA_TUPLE_IP => part.each(|attr| {
            match attr.kind {
                CTA_IP_V4_SRC | CTA_IP_V6_SRC => raw.tuple.src = attr.address()?,
                CTA_IP_V4_DST | CTA_IP_V6_DST => raw.tuple.dst = attr.address()?,
                _ => {}
            }
            Ok(())
        }),
        CTA_TUPLE_PROTO => part.each(|attr| {
            match attr.kind {
                CTA_PROTO_NUM => raw.protocol = attr.u8()?,
                CTA_PROTO_SRC_PORT => raw.tuple.sport = attr.be16()?,
                CTA_PROTO_DST_PORT => raw.tuple.dport = attr.be16()?,
                _ => {}
            }
            Ok(())
        }),
        CTA_TUPLE_ZONE => {
            raw.zone = Some(part.be16()?);
            Ok(())
        }
        _ => Ok(()),
    })?;
    Ok(raw)
}

fn write_filter(w: &mut Writer, filter: &Filter) {
    let protocol_flag = if filter.protocol.is_some() { FILTER_PROTO_NUM } else { 0 };
    let original = filter.original.flags(filter.protocol) | protocol_flag;
    let reply = filter.reply.flags(filter.protocol);
    // Ports are compared along with the protocol of the same direction only.
    let reply =
        if reply & (FILTER_SRC_PORT | FILTER_DST_PORT) != 0 { reply | FILTER_PROTO_NUM } else { reply };
    if original | reply == 0 {
        return;
    }
    for (kind, flags, ends) in
        [(CTA_TUPLE_ORIG, original, &filter.original), (CTA_TUPLE_REPLY, reply, &filter.reply)]
    {
        if flags == 0 {
            continue;
        }
        w.nest(kind, |w| {
            if flags & (FILTER_IP_SRC | FILTER_IP_DST) != 0 {
                write_addresses(w, ends.src, ends.dst);
            }
            if flags & FILTER_PROTO_NUM != 0 {
                w.nest(CTA_TUPLE_PROTO, |w| {
                    w.u8(CTA_PROTO_NUM, filter.protocol.unwrap_or(0));
                    if flags & FILTER_SRC_PORT != 0 {
                        w.be16(CTA_PROTO_SRC_PORT, ends.sport.unwrap_or(0));
                    }
                    if flags & FILTER_DST_PORT != 0 {
                        w.be16(CTA_PROTO_DST_PORT, ends.dport.unwrap_or(0));
                    }
                });
            }
        });
    }
    w.nest(CTA_FILTER, |w| {
        w.ne32(CTA_FILTER_ORIG_FLAGS, original);
        w.ne32(CTA_FILTER_REPLY_FLAGS, reply);
    });
}

fn write_addresses(w: &mut Writer, src: Option<IpAddr>, dst: Option<IpAddr>) {
    w.nest(CTA_TUPLE_IP, |w| {
        for (address, v4, v6) in [(src, CTA_IP_V4_SRC, CTA_IP_V6_SRC), (dst, CTA_IP_V4_DST, CTA_IP_V6_DST)] {
            match address {
                None => {}
                Some(IpAddr::V4(address)) => w.attr(v4, &address.octets()),
                Some(IpAddr::V6(address)) => w.attr(v6, &address.octets()),
            }
        }
    });
}

/// TCP, UDP, DCCP, SCTP, UDP-Lite.
fn has_ports(protocol: u8) -> bool {
    matches!(protocol, 6 | 17 | 33 | 132 | 136)
}

#[cfg(test)]
mod tests;
