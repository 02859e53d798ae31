// SPDX-License-Identifier: Apache-2.0

//! The messages of IPVS, a protocol of generic netlink: a header of four bytes, then attributes.

use std::net::IpAddr;

use super::{
    Change, Counters, Dest, DestKey, Forward, HeldDest, HeldService, Service, ServiceKey, Timeouts, family_of,
};
use crate::{
    Family,
    attr::Writer,
    codec::{Attr, Message, Reader, each_attr},
    error::Error,
};

/// The protocol that tells the numbers of all others.
pub(super) const GENL_ID_CTRL: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;

const NEW_SERVICE: u8 = 1;
const SET_SERVICE: u8 = 2;
const DEL_SERVICE: u8 = 3;
pub(super) const GET_SERVICE: u8 = 4;
const NEW_DEST: u8 = 5;
const SET_DEST: u8 = 6;
const DEL_DEST: u8 = 7;
pub(super) const GET_DEST: u8 = 8;
const SET_CONFIG: u8 = 12;
pub(super) const GET_CONFIG: u8 = 13;

const CMD_SERVICE: u16 = 1;
const CMD_DEST: u16 = 2;
const CMD_TIMEOUT_TCP: u16 = 4;
const CMD_TIMEOUT_TCP_FIN: u16 = 5;
const CMD_TIMEOUT_UDP: u16 = 6;

const SVC_AF: u16 = 1;
const SVC_PROTOCOL: u16 = 2;
const SVC_ADDR: u16 = 3;
const SVC_PORT: u16 = 4;
const SVC_FWMARK: u16 = 5;
const SVC_SCHED_NAME: u16 = 6;
const SVC_FLAGS: u16 = 7;
const SVC_TIMEOUT: u16 = 8;
const SVC_NETMASK: u16 = 9;
const SVC_STATS64: u16 = 12;

const DEST_ADDR: u16 = 1;
const DEST_PORT: u16 = 2;
const DEST_FWD_METHOD: u16 = 3;
const DEST_WEIGHT: u16 = 4;
const DEST_U_THRESH: u16 = 5;
const DEST_L_THRESH: u16 = 6;
const DEST_ACTIVE: u16 = 7;
const DEST_INACTIVE: u16 = 8;
const DEST_PERSISTENT: u16 = 9;
const DEST_ADDR_FAMILY: u16 = 11;
const DEST_STATS64: u16 = 12;

const STATS_CONNS: u16 = 1;
const STATS_INPKTS: u16 = 2;
const STATS_OUTPKTS: u16 = 3;
const STATS_INBYTES: u16 = 4;
const STATS_OUTBYTES: u16 = 5;

/// The bits of the forwarding method; the others say how a connection was made.
const FORWARD_MASK: u32 = 7;
const FORWARD_NAT: u32 = 0;
/// Which client addresses persistence takes for one: each for itself. IPv6 counts the bits.
const EACH_V4: u32 = u32::MAX;
const EACH_V6: u32 = 128;

pub(super) fn header(w: &mut Writer, command: u8) {
    w.raw(&[command, 1, 0, 0]);
}

pub(super) fn ask_for_family(w: &mut Writer) {
    header(w, CTRL_CMD_GETFAMILY);
    w.str(CTRL_ATTR_FAMILY_NAME, "IPVS");
}

pub(super) fn read_family(message: &Message<'_>) -> Result<Option<u16>, Error> {
    let mut number = None;
    attributes(message.body, |attr| {
        if attr.kind == CTRL_ATTR_FAMILY_ID {
            number = Some(ne16(&attr)?);
        }
        Ok(())
    })?;
    Ok(number)
}

pub(super) fn write_change(w: &mut Writer, change: &Change) {
    match change {
        Change::AddService(service) => write_service(w, NEW_SERVICE, service),
        Change::SetService(service) => write_service(w, SET_SERVICE, service),
        Change::RemoveService(key) => {
            header(w, DEL_SERVICE);
            write_key(w, *key);
        }
        Change::AddDest(key, dest) => write_dest(w, NEW_DEST, *key, dest),
        Change::SetDest(key, dest) => write_dest(w, SET_DEST, *key, dest),
        Change::RemoveDest(key, dest) => {
            header(w, DEL_DEST);
            write_key(w, *key);
            w.nest(CMD_DEST, |w| write_dest_key(w, *dest));
        }
    }
}

/// The part of a request that says which service is meant.
pub(super) fn write_key(w: &mut Writer, key: ServiceKey) {
    w.nest(CMD_SERVICE, |w| key_attributes(w, key));
}

fn key_attributes(w: &mut Writer, key: ServiceKey) {
    w.attr(SVC_AF, &u16::from(key.family().number()).to_ne_bytes());
    match key {
        ServiceKey::At { protocol, address, port } => {
            w.attr(SVC_PROTOCOL, &u16::from(protocol).to_ne_bytes());
            w.attr(SVC_ADDR, &wide(address));
            w.be16(SVC_PORT, port);
        }
        ServiceKey::Mark { mark, .. } => w.ne32(SVC_FWMARK, mark),
    }
}

fn write_service(w: &mut Writer, command: u8, service: &Service) {
    header(w, command);
    w.nest(CMD_SERVICE, |w| {
        key_attributes(w, service.key);
        w.str(SVC_SCHED_NAME, &service.scheduler);
        // The flags, and which of them are meant: all.
        let mut flags = [0xff; 8];
        flags[..4].copy_from_slice(&service.flags.to_ne_bytes());
        w.attr(SVC_FLAGS, &flags);
        w.ne32(SVC_TIMEOUT, service.timeout);
        w.ne32(SVC_NETMASK, if service.key.family() == Family::V4 { EACH_V4 } else { EACH_V6 });
    });
}

fn write_dest_key(w: &mut Writer, key: DestKey) {
    w.attr(DEST_ADDR, &wide(key.address));
    w.be16(DEST_PORT, key.port);
    w.attr(DEST_ADDR_FAMILY, &u16::from(family_of(key.address).number()).to_ne_bytes());
}

fn write_dest(w: &mut Writer, command: u8, key: ServiceKey, dest: &Dest) {
    header(w, command);
    write_key(w, key);
    w.nest(CMD_DEST, |w| {
        write_dest_key(w, dest.key);
        w.ne32(DEST_FWD_METHOD, dest.forward.number());
        w.ne32(DEST_WEIGHT, dest.weight);
        // No bounds on the number of connections.
        w.ne32(DEST_U_THRESH, 0);
        w.ne32(DEST_L_THRESH, 0);
    });
}

pub(super) fn write_timeouts(w: &mut Writer, timeouts: Timeouts) {
    header(w, SET_CONFIG);
    w.ne32(CMD_TIMEOUT_TCP, timeouts.tcp);
    w.ne32(CMD_TIMEOUT_TCP_FIN, timeouts.tcp_fin);
    w.ne32(CMD_TIMEOUT_UDP, timeouts.udp);
}

pub(super) fn read_timeouts(body: &[u8]) -> Result<Timeouts, Error> {
    let mut timeouts = Timeouts::default();
    attributes(body, |attr| {
        match attr.kind {
            CMD_TIMEOUT_TCP => timeouts.tcp = attr.ne32()?,
            CMD_TIMEOUT_TCP_FIN => timeouts.tcp_fin = attr.ne32()?,
            CMD_TIMEOUT_UDP => timeouts.udp = attr.ne32()?,
            _ => {}
        }
        Ok(())
    })?;
    Ok(timeouts)
}

/// `None` if the message is of no service.
pub(crate) fn read_service(body: &[u8]) -> Result<Option<HeldService>, Error> {
    let Some(nest) = part(body, CMD_SERVICE)? else { return Ok(None) };
    let (mut family, mut protocol, mut address, mut port, mut mark) = (None, None, None, None, None);
    let (mut scheduler, mut flags, mut timeout) = (String::new(), 0, 0);
    let mut counters = Counters::default();
    nest.each(|attr| {
        match attr.kind {
            SVC_AF => family = u8::try_from(ne16(&attr)?).ok().and_then(Family::from_number),
            SVC_PROTOCOL => protocol = u8::try_from(ne16(&attr)?).ok(),
            SVC_ADDR => address = Some(attr.payload),
            SVC_PORT => port = Some(attr.be16()?),
            SVC_FWMARK => mark = Some(attr.ne32()?),
            SVC_SCHED_NAME => attr.str()?.clone_into(&mut scheduler),
            SVC_FLAGS => flags = u32::from_ne_bytes(Reader::new(attr.payload).array()?),
            SVC_TIMEOUT => timeout = attr.ne32()?,
            SVC_STATS64 => counters = read_counters(&attr)?,
            _ => {}
        }
        Ok(())
    })?;
    let family = family.ok_or(Error::Malformed("a virtual service of no known family"))?;
    let key = match (mark, protocol, address, port) {
        (Some(mark), ..) => ServiceKey::Mark { family, mark },
        (None, Some(protocol), Some(address), Some(port)) => {
            ServiceKey::At { protocol, address: narrow(address, family)?, port }
        }
        _ => return Err(Error::Malformed("a virtual service without a place")),
    };
    Ok(Some(HeldService { service: Service { key, scheduler, flags, timeout }, counters }))
}

/// `None` if the message is of no real server. `family` is the service's: old kernels do not tell another.
pub(crate) fn read_dest(body: &[u8], mut family: Family) -> Result<Option<HeldDest>, Error> {
    let Some(nest) = part(body, CMD_DEST)? else { return Ok(None) };
    let (mut address, mut port) = (None, None);
    let mut dest = HeldDest {
        dest: Dest { key: DestKey { address: [0; 4].into(), port: 0 }, weight: 0, forward: Forward::Nat },
        counters: Counters::default(),
        active: 0,
        inactive: 0,
        persistent: 0,
    };
    nest.each(|attr| {
        match attr.kind {
            DEST_ADDR => address = Some(attr.payload),
            DEST_PORT => port = Some(attr.be16()?),
            DEST_ADDR_FAMILY => {
                let told = u8::try_from(ne16(&attr)?).ok().and_then(Family::from_number);
                family = told.ok_or(Error::Malformed("a real server of no known family"))?;
            }
            DEST_FWD_METHOD => dest.dest.forward = Forward::from_number(attr.ne32()?),
            DEST_WEIGHT => dest.dest.weight = attr.ne32()?,
            DEST_ACTIVE => dest.active = attr.ne32()?,
            DEST_INACTIVE => dest.inactive = attr.ne32()?,
            DEST_PERSISTENT => dest.persistent = attr.ne32()?,
            DEST_STATS64 => dest.counters = read_counters(&attr)?,
            _ => {}
        }
        Ok(())
    })?;
    let (Some(address), Some(port)) = (address, port) else {
        return Err(Error::Malformed("a real server without an address"));
    };
    dest.dest.key = DestKey { address: narrow(address, family)?, port };
    Ok(Some(dest))
}

fn read_counters(nest: &Attr<'_>) -> Result<Counters, Error> {
    let mut counters = Counters::default();
    nest.each(|attr| {
        let field = match attr.kind {
            STATS_CONNS => &mut counters.connections,
            STATS_INPKTS => &mut counters.packets_in,
            STATS_OUTPKTS => &mut counters.packets_out,
            STATS_INBYTES => &mut counters.bytes_in,
            STATS_OUTBYTES => &mut counters.bytes_out,
            _ => return Ok(()),
        };
        *field = u64::from_ne_bytes(Reader::new(attr.payload).array()?);
        Ok(())
    })?;
    Ok(counters)
}

impl Forward {
    fn number(self) -> u32 {
        match self {
            Forward::Nat => FORWARD_NAT,
            Forward::Other(number) => number,
        }
    }

    fn from_number(number: u32) -> Forward {
        match number & FORWARD_MASK {
            FORWARD_NAT => Forward::Nat,
            other => Forward::Other(other),
        }
    }
}

/// The nest of this kind inside a message.
fn part(body: &[u8], kind: u16) -> Result<Option<Attr<'_>>, Error> {
    let mut found = None;
    attributes(body, |attr| {
        if attr.kind == kind {
            found = Some(attr);
        }
        Ok(())
    })?;
    Ok(found)
}

fn attributes<'a>(body: &'a [u8], visit: impl FnMut(Attr<'a>) -> Result<(), Error>) -> Result<(), Error> {
    let mut reader = Reader::new(body);
    reader.take(4)?;
    each_attr(reader.rest(), visit)
}

fn ne16(attr: &Attr<'_>) -> Result<u16, Error> {
    Ok(u16::from_ne_bytes(Reader::new(attr.payload).array()?))
}

/// An address in the sixteen bytes it always takes here.
fn wide(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&address.octets());
            bytes
        }
        IpAddr::V6(address) => address.octets(),
    }
}

fn narrow(bytes: &[u8], family: Family) -> Result<IpAddr, Error> {
    let mut reader = Reader::new(bytes);
    Ok(match family {
        Family::V4 => reader.array::<4>()?.into(),
        Family::V6 => reader.array::<16>()?.into(),
    })
}
