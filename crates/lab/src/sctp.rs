// SPDX-License-Identifier: Apache-2.0

//! As much SCTP as a firewall sees of a new association: INIT, INIT ACK, ABORT (RFC 9260, section 3).
//!
//! Written by hand because a kernel without SCTP sockets still tracks and translates SCTP packets. The
//! answering side puts its text into a parameter of the INIT ACK that a real peer would hand back as a cookie.

/// One SCTP packet with one chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) source_port: u16,
    pub(crate) destination_port: u16,
    pub(crate) tag: u32,
    pub(crate) chunk: Chunk,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Chunk {
    Init { tag: u32 },
    InitAck { tag: u32, cookie: Vec<u8> },
    Abort,
}

const INIT: u8 = 1;
const INIT_ACK: u8 = 2;
const ABORT: u8 = 6;
const STATE_COOKIE: u16 = 7;
const HEADER: usize = 12;
/// Type, flags, length, tag, window, two stream counts, first sequence number.
const INIT_CHUNK: usize = 20;

impl Segment {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(128);
        out.extend_from_slice(&self.source_port.to_be_bytes());
        out.extend_from_slice(&self.destination_port.to_be_bytes());
        out.extend_from_slice(&self.tag.to_be_bytes());
        out.extend_from_slice(&[0; 4]);
        match &self.chunk {
            Chunk::Init { tag } => encode_init(&mut out, INIT, *tag, None),
            Chunk::InitAck { tag, cookie } => encode_init(&mut out, INIT_ACK, *tag, Some(cookie)),
            Chunk::Abort => out.extend_from_slice(&[ABORT, 0, 0, 4]),
        }
        // The checksum goes out least significant byte first, unlike every other field (RFC 9260, appendix A).
        let sum = crc32c(&out).to_le_bytes();
        out[8..HEADER].copy_from_slice(&sum);
        out
    }

    /// `None` for anything that is not one of ours, checksum included.
    pub(crate) fn decode(packet: &[u8]) -> Option<Segment> {
        let mut zeroed = packet.to_vec();
        let sum = u32::from_le_bytes(zeroed.get(8..HEADER)?.try_into().ok()?);
        zeroed[8..HEADER].fill(0);
        if crc32c(&zeroed) != sum {
            return None;
        }
        let chunk = packet.get(HEADER..)?;
        let chunk = match *chunk.first()? {
            INIT => Chunk::Init { tag: be32(chunk, 4)? },
            INIT_ACK => Chunk::InitAck { tag: be32(chunk, 4)?, cookie: cookie(chunk)?.to_vec() },
            ABORT => Chunk::Abort,
            _ => return None,
        };
        Some(Segment {
            source_port: be16(packet, 0)?,
            destination_port: be16(packet, 2)?,
            tag: be32(packet, 4)?,
            chunk,
        })
    }
}

fn encode_init(out: &mut Vec<u8>, kind: u8, tag: u32, cookie: Option<&Vec<u8>>) {
    let parameter = cookie.map_or(0, |cookie| 4 + cookie.len());
    let length = u16::try_from(INIT_CHUNK + parameter).expect("a cookie is one short line");
    out.extend_from_slice(&[kind, 0]);
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(&tag.to_be_bytes());
    out.extend_from_slice(&65_536u32.to_be_bytes());
    out.extend_from_slice(&1u16.to_be_bytes());
    out.extend_from_slice(&1u16.to_be_bytes());
    out.extend_from_slice(&tag.to_be_bytes());
    if let Some(cookie) = cookie {
        out.extend_from_slice(&STATE_COOKIE.to_be_bytes());
        out.extend_from_slice(&u16::try_from(parameter).expect("shorter than the chunk").to_be_bytes());
        out.extend_from_slice(cookie);
        out.resize(out.len().next_multiple_of(4), 0);
    }
}

fn cookie(chunk: &[u8]) -> Option<&[u8]> {
    let parameter = chunk.get(INIT_CHUNK..)?;
    let length = usize::from(be16(parameter, 2)?);
    if be16(parameter, 0)? != STATE_COOKIE { None } else { parameter.get(4..length) }
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// CRC-32C, bit by bit: packets are a hundred bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(
            crc ^ u32::from(*byte),
            |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 },
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_castagnoli() {
        // RFC 3720, appendix B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        for chunk in [
            Chunk::Init { tag: 7 },
            Chunk::InitAck { tag: 8, cookie: b"a1 10.244.1.1".to_vec() },
            Chunk::Abort,
        ] {
            let segment = Segment { source_port: 40_000, destination_port: 80, tag: 9, chunk };
            let bytes = segment.encode();
            assert_eq!(Segment::decode(&bytes), Some(segment));
            for cut in 0..bytes.len() {
                assert_eq!(Segment::decode(&bytes[..cut]), None);
            }
            let mut broken = bytes;
            broken[0] ^= 1;
            assert_eq!(Segment::decode(&broken), None);
        }
    }
}
