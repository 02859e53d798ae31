// SPDX-License-Identifier: Apache-2.0

//! The messages of IP sets.

use std::net::IpAddr;

use super::{Element, Held, SetKind, Spec};
use crate::{
    Family,
    attr::Writer,
    codec::{Attr, Message, Reader, each_attr},
    error::Error,
};

const SUBSYS_IPSET: u16 = 6 << 8;
pub(super) const CMD_CREATE: u16 = 2;
pub(super) const CMD_DESTROY: u16 = 3;
pub(super) const CMD_SWAP: u16 = 6;
pub(super) const CMD_LIST: u16 = 7;
pub(super) const CMD_ADD: u16 = 9;
pub(super) const CMD_DEL: u16 = 10;
pub(super) const CMD_TYPE: u16 = 13;

/// Version 6 is understood by every kernel that is still looked after; 7 has nothing we need.
const PROTOCOL_VERSION: u8 = 6;

const ATTR_PROTOCOL: u16 = 1;
const ATTR_SETNAME: u16 = 2;
const ATTR_TYPENAME: u16 = 3;
/// The second set, where a request is about two.
pub(super) const ATTR_SETNAME2: u16 = 3;
const ATTR_REVISION: u16 = 4;
const ATTR_FAMILY: u16 = 5;
pub(super) const ATTR_FLAGS: u16 = 6;
const ATTR_DATA: u16 = 7;
pub(super) const ATTR_ADT: u16 = 8;
pub(super) const ATTR_LINENO: u16 = 9;
/// Heads of sets without their elements.
pub(super) const FLAG_LIST_HEADER: u32 = 1 << 2;

/// Inside `DATA`, of a set or of an element.
const DATA_IP: u16 = 1;
const DATA_PORT: u16 = 4;
const DATA_PORT_TO: u16 = 5;
const DATA_PROTO: u16 = 7;
const DATA_FLAGS: u16 = 8;
const DATA_MAXELEM: u16 = 19;
const DATA_IP2: u16 = 20;
const DATA_CIDR2: u16 = 21;
/// Mark and mask, in one number of 64 bits.
const DATA_MARK: u16 = 27;
/// Of a set: its elements have marks.
const FLAG_WITH_MARKS: u32 = 1 << 6;
const DATA_REFERENCES: u16 = 25;
const IPADDR_V4: u16 = 1;
const IPADDR_V6: u16 = 2;
/// Set on attributes in network byte order; here the kernel insists.
const NET_BYTEORDER: u16 = 0x4000;

pub(super) fn subsystem(command: u16) -> u16 {
    SUBSYS_IPSET | command
}

/// What each request begins with.
pub(super) fn write_head(w: &mut Writer, family: Family, set: Option<&str>) {
    w.raw(&[family.number(), 0, 0, 0]);
    w.u8(ATTR_PROTOCOL, PROTOCOL_VERSION);
    if let Some(set) = set {
        w.str(ATTR_SETNAME, set);
    }
}

pub(super) fn write_spec(w: &mut Writer, spec: &Spec, revision: u8) {
    write_head(w, spec.family, Some(&spec.name));
    w.str(ATTR_TYPENAME, spec.kind.name());
    w.u8(ATTR_REVISION, revision);
    w.u8(ATTR_FAMILY, set_family(spec.kind, spec.family));
    w.nest(ATTR_DATA, |w| match spec.kind {
        SetKind::BitmapPort => {
            w.be16(DATA_PORT | NET_BYTEORDER, 0);
            w.be16(DATA_PORT_TO | NET_BYTEORDER, u16::MAX);
        }
        kind => {
            w.be32(DATA_MAXELEM | NET_BYTEORDER, spec.max_elements);
            if kind == SetKind::HashIpPortMark {
                w.be32(DATA_FLAGS | NET_BYTEORDER, FLAG_WITH_MARKS);
            }
        }
    });
}

/// Sets of ports are of no family.
fn set_family(kind: SetKind, family: Family) -> u8 {
    if kind == SetKind::BitmapPort { 0 } else { family.number() }
}

pub(super) fn ask_for_kind(w: &mut Writer, kind: SetKind, family: Family) {
    write_head(w, family, None);
    w.str(ATTR_TYPENAME, kind.name());
    w.u8(ATTR_FAMILY, set_family(kind, family));
}

pub(super) fn read_revision(message: &Message<'_>) -> Result<Option<u8>, Error> {
    let mut revision = None;
    attributes(message, |attr| {
        if attr.kind == ATTR_REVISION {
            revision = Some(attr.u8()?);
        }
        Ok(())
    })?;
    Ok(revision)
}

pub(super) fn write_element(w: &mut Writer, element: &Element) {
    w.nest(ATTR_DATA, |w| match *element {
        Element::Port(port) => w.be16(DATA_PORT | NET_BYTEORDER, port),
        Element::Ip(address) => write_ip(w, DATA_IP, address),
        Element::Marked { address, protocol, port, mark } => {
            write_address(w, address, protocol, port);
            let whole = u64::from(mark) << 32 | u64::from(u32::MAX);
            w.attr(DATA_MARK | NET_BYTEORDER, &whole.to_be_bytes());
        }
        Element::Address { address, protocol, port } => write_address(w, address, protocol, port),
        Element::Pair { address, protocol, port, other, prefix } => {
            write_address(w, address, protocol, port);
            write_ip(w, DATA_IP2, other);
            if prefix != full(other) {
                w.u8(DATA_CIDR2, prefix);
            }
        }
    });
}

fn write_address(w: &mut Writer, address: IpAddr, protocol: u8, port: u16) {
    write_ip(w, DATA_IP, address);
    w.be16(DATA_PORT | NET_BYTEORDER, port);
    w.u8(DATA_PROTO, protocol);
}

fn write_ip(w: &mut Writer, kind: u16, address: IpAddr) {
    w.nest(kind, |w| match address {
        IpAddr::V4(address) => w.attr(IPADDR_V4 | NET_BYTEORDER, &address.octets()),
        IpAddr::V6(address) => w.attr(IPADDR_V6 | NET_BYTEORDER, &address.octets()),
    });
}

fn full(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

/// A set, or a part of one. Only the first message of a set says all about it; `last` is what came before.
pub(crate) fn read_set(message: &Message<'_>, last: Option<&Held>) -> Result<Option<Held>, Error> {
    if message.kind != subsystem(CMD_LIST) {
        return Ok(None);
    }
    let mut held = Held {
        name: String::new(),
        kind: None,
        family: None,
        max_elements: 0,
        references: 0,
        elements: Vec::new(),
    };
    let (mut elements, mut marks) = (None, false);
    attributes(message, |attr| {
        match attr.kind {
            ATTR_SETNAME => attr.str()?.clone_into(&mut held.name),
            ATTR_TYPENAME => held.kind = SetKind::from_name(attr.str()?),
            ATTR_FAMILY => held.family = Family::from_number(attr.u8()?),
            ATTR_DATA => attr.each(|inner| {
                match inner.kind {
                    DATA_MAXELEM => held.max_elements = inner.be32()?,
                    DATA_REFERENCES => held.references = inner.be32()?,
                    DATA_FLAGS if inner.be32()? & FLAG_WITH_MARKS != 0 => marks = true,
                    _ => {}
                }
                Ok(())
            })?,
            ATTR_ADT => elements = Some(attr),
            _ => {}
        }
        Ok(())
    })?;
    if marks && held.kind == Some(SetKind::HashIpPort) {
        held.kind = Some(SetKind::HashIpPortMark);
    }
    let kind = held.kind.or_else(|| last.filter(|last| last.name == held.name).and_then(|last| last.kind));
    if let (Some(kind), Some(elements)) = (kind, elements) {
        elements.each(|element| {
            if element.kind == ATTR_DATA {
                held.elements.push(read_element(kind, &element)?);
            }
            Ok(())
        })?;
    }
    Ok(Some(held))
}

fn read_element(kind: SetKind, nest: &Attr<'_>) -> Result<Element, Error> {
    let (mut address, mut other, mut port, mut protocol, mut prefix) = (None, None, None, 0, None);
    let mut mark = 0;
    nest.each(|attr| {
        match attr.kind {
            DATA_IP => address = read_ip(&attr)?,
            DATA_IP2 => other = read_ip(&attr)?,
            DATA_PORT => port = Some(attr.be16()?),
            DATA_PROTO => protocol = attr.u8()?,
            DATA_CIDR2 => prefix = Some(attr.u8()?),
            DATA_MARK => mark = u32::from_be_bytes(Reader::new(attr.payload).array()?),
            _ => {}
        }
        Ok(())
    })?;
    let incomplete = Error::Malformed("an element of a set that lacks a part");
    let whole = address.zip(port);
    Ok(match kind {
        SetKind::BitmapPort => Element::Port(port.ok_or(incomplete)?),
        SetKind::HashIp => Element::Ip(address.ok_or(incomplete)?),
        SetKind::HashIpPort => {
            let (address, port) = whole.ok_or(incomplete)?;
            Element::Address { address, protocol, port }
        }
        SetKind::HashIpPortMark => {
            let (address, port) = whole.ok_or(incomplete)?;
            Element::Marked { address, protocol, port, mark }
        }
        SetKind::HashIpPortIp | SetKind::HashIpPortNet => {
            let ((address, port), other) = whole.zip(other).ok_or(incomplete)?;
            let prefix = prefix.unwrap_or(full(other));
            Element::Pair { address, protocol, port, other, prefix }
        }
    })
}

fn read_ip(nest: &Attr<'_>) -> Result<Option<IpAddr>, Error> {
    let mut address = None;
    nest.each(|attr| {
        if matches!(attr.kind, IPADDR_V4 | IPADDR_V6) {
            address = Some(attr.address()?);
        }
        Ok(())
    })?;
    Ok(address)
}

fn attributes<'a>(
    message: &Message<'a>,
    visit: impl FnMut(Attr<'a>) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut reader = Reader::new(message.body);
    reader.take(4)?;
    each_attr(reader.rest(), visit)
}
