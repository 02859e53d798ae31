// SPDX-License-Identifier: Apache-2.0

//! Every decoder on arbitrary bytes: nothing may panic, read too far or run forever.

use crate::{
    Family, accounts,
    channel::Ack,
    codec::{Message, Reader, each_attr},
    conntrack::Flow,
    ipset, ipvs, legacy, nft,
    route::{AddressChange, Link, ListedRoute, read_address_change},
};

/// Runs every decoder on `bytes`: as a datagram, as the body of each kind of message, and as attributes.
pub fn fuzz_decode(bytes: &[u8]) {
    let mut datagram = Reader::new(bytes);
    while let Ok(Some(message)) = Message::next(&mut datagram) {
        decode_message(&message);
    }
    for kind in KINDS {
        decode_message(&Message { kind, flags: 0, seq: 0, port: 0, body: bytes });
        decode_message(&Message { kind, flags: ACK_TLVS, seq: 0, port: 0, body: bytes });
    }
    nft::fuzzing::decode_attrs(Family::V4, bytes);
    nft::fuzzing::decode_attrs(Family::V6, bytes);
    each_attr(bytes, |_| Ok(())).ok();
    legacy::fuzz(bytes);
}

fn decode_message(message: &Message<'_>) {
    Ack::read(message).ok();
    Flow::read(message).ok();
    Link::read(message).ok();
    ListedRoute::read(message).ok();
    accounts::read(message).ok();
    ipset::read_set(message, None).ok();
    // Its messages have no kind of their own.
    ipvs::read_service(message.body).ok();
    ipvs::read_dest(message.body, Family::V6).ok();
    if let Ok(Some(AddressChange::Set(address))) = read_address_change(message) {
        address.is_usable();
    }
    nft::fuzzing::decode_message(message);
}

const ACK_TLVS: u16 = 0x200;

/// Ends and errors, links, addresses and routes, flows, IP sets, and everything of nf_tables.
const KINDS: [u16; 27] = [
    2, 3, 16, 20, 21, 24, 0x100, 0x607, 0xa00, 0xa02, 0xa03, 0xa05, 0xa06, 0xa08, 0xa09, 0xa0b, 0xa0c, 0xa0e,
    0xa0f, 0xa10, 0xa11, 0xa12, 0xa14, 0xa15, 0xa16, 0xa18, 0xaff,
];
