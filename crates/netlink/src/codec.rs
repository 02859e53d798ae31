// SPDX-License-Identifier: Apache-2.0

//! Reading netlink messages. A [`Reader`] only moves forward, and refuses what does not fit.

use std::net::IpAddr;

use crate::{attr::HEADER_LEN, error::Error};

/// Bytes not read yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { rest: bytes }
    }

    pub(crate) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], Error> {
        let (head, tail) = self.rest.split_at_checked(len).ok_or(Error::Malformed("truncated"))?;
        self.rest = tail;
        Ok(head)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let (head, tail) = self.rest.split_first_chunk::<N>().ok_or(Error::Malformed("truncated"))?;
        self.rest = tail;
        Ok(*head)
    }

    /// The next attribute; `None` at the end. Trailing bytes too short for a header are padding.
    pub(crate) fn attr(&mut self) -> Result<Option<Attr<'a>>, Error> {
        if self.rest.len() < 4 {
            self.rest = &[];
            return Ok(None);
        }
        let [len0, len1, kind0, kind1] = self.array::<4>()?;
        let len = usize::from(u16::from_ne_bytes([len0, len1]));
        let len = len.checked_sub(4).ok_or(Error::Malformed("attribute shorter than its header"))?;
        let payload = self.take(len).map_err(|_| Error::Malformed("attribute longer than its message"))?;
        // The last attribute may come without padding.
        let padding = (len.next_multiple_of(4) - len).min(self.rest.len());
        self.take(padding)?;
        // The two top bits say "nested" and "network byte order"; who reads knows both from the type.
        Ok(Some(Attr { kind: u16::from_ne_bytes([kind0, kind1]) & 0x3fff, payload }))
    }
}

/// One attribute.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attr<'a> {
    pub(crate) kind: u16,
    pub(crate) payload: &'a [u8],
}

impl<'a> Attr<'a> {
    /// Visits each attribute inside.
    pub(crate) fn each(&self, visit: impl FnMut(Attr<'a>) -> Result<(), Error>) -> Result<(), Error> {
        each_attr(self.payload, visit)
    }

    pub(crate) fn u8(&self) -> Result<u8, Error> {
        Ok(u8::from_ne_bytes(self.exact()?))
    }

    pub(crate) fn be16(&self) -> Result<u16, Error> {
        Ok(u16::from_be_bytes(self.exact()?))
    }

    pub(crate) fn be32(&self) -> Result<u32, Error> {
        Ok(u32::from_be_bytes(self.exact()?))
    }

    pub(crate) fn be64(&self) -> Result<u64, Error> {
        Ok(u64::from_be_bytes(self.exact()?))
    }

    pub(crate) fn ne32(&self) -> Result<u32, Error> {
        Ok(u32::from_ne_bytes(self.exact()?))
    }

    /// An address, by its length.
    pub(crate) fn address(&self) -> Result<IpAddr, Error> {
        if let Ok(octets) = <[u8; 4]>::try_from(self.payload) {
            return Ok(octets.into());
        }
        Ok(self.exact::<16>()?.into())
    }

    /// The text up to the first zero byte.
    pub(crate) fn str(&self) -> Result<&'a str, Error> {
        text(self.payload)
    }

    fn exact<const N: usize>(&self) -> Result<[u8; N], Error> {
        self.payload.try_into().map_err(|_| Error::Malformed("attribute of the wrong size"))
    }
}

/// The text up to the first zero byte, or the end.
pub(crate) fn text(bytes: &[u8]) -> Result<&str, Error> {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    std::str::from_utf8(&bytes[..end]).map_err(|_| Error::Malformed("a name that is not UTF-8"))
}

/// Visits each attribute in `bytes`.
pub(crate) fn each_attr<'a>(
    bytes: &'a [u8],
    mut visit: impl FnMut(Attr<'a>) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut reader = Reader::new(bytes);
    while let Some(attr) = reader.attr()? {
        visit(attr)?;
    }
    Ok(())
}

/// One netlink message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Message<'a> {
    pub(crate) kind: u16,
    pub(crate) flags: u16,
    pub(crate) seq: u32,
    /// The port of the socket to which the message goes, or for notifications, the one that caused it.
    pub(crate) port: u32,
    pub(crate) body: &'a [u8],
}

impl<'a> Message<'a> {
    /// The next message of a datagram; `None` at its end.
    pub(crate) fn next(datagram: &mut Reader<'a>) -> Result<Option<Message<'a>>, Error> {
        if datagram.rest().is_empty() {
            return Ok(None);
        }
        let len = u32::from_ne_bytes(datagram.array()?) as usize;
        let kind = u16::from_ne_bytes(datagram.array()?);
        let flags = u16::from_ne_bytes(datagram.array()?);
        let seq = u32::from_ne_bytes(datagram.array()?);
        let port = u32::from_ne_bytes(datagram.array()?);
        let len = len.checked_sub(HEADER_LEN).ok_or(Error::Malformed("message shorter than its header"))?;
        let body = datagram.take(len)?;
        let padding = (len.next_multiple_of(4) - len).min(datagram.rest().len());
        datagram.take(padding)?;
        Ok(Some(Message { kind, flags, seq, port, body }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attrs(bytes: &[u8]) -> Result<Vec<(u16, Vec<u8>)>, Error> {
        let mut found = Vec::new();
        each_attr(bytes, |attr| {
            found.push((attr.kind, attr.payload.to_vec()));
            Ok(())
        })?;
        Ok(found)
    }

    #[test]
    fn attributes_are_read_with_and_without_padding() {
        let mut writer = crate::attr::Writer::new();
        writer.u8(1, 7);
        writer.nest(2, |w| w.be16(3, 0x1234));
        let bytes = writer.bytes();
        let nested = [6u16.to_ne_bytes(), 3u16.to_ne_bytes(), [0x12, 0x34], [0, 0]].concat();
        assert_eq!(attrs(bytes), Ok(vec![(1, vec![7]), (2, nested)]));
        let unpadded = [5u16.to_ne_bytes(), 9u16.to_ne_bytes()].concat();
        assert_eq!(attrs(&[&unpadded[..], &[1]].concat()), Ok(vec![(9, vec![1])]));
        // Less than a header at the end is padding.
        assert_eq!(attrs(&[0, 0, 0]), Ok(vec![]));
    }

    #[test]
    fn attributes_of_impossible_length_are_refused() {
        for len in [0u16, 3, 9, u16::MAX] {
            let bytes = [&len.to_ne_bytes()[..], &1u16.to_ne_bytes(), &[1, 2, 3, 4]].concat();
            assert!(matches!(attrs(&bytes), Err(Error::Malformed(_))), "{len}");
        }
    }

    #[test]
    fn messages_of_impossible_length_are_refused() {
        for len in [0u32, 15, 21, u32::MAX] {
            let bytes = [&len.to_ne_bytes()[..], &[0; 16]].concat();
            assert!(matches!(Message::next(&mut Reader::new(&bytes)), Err(Error::Malformed(_))), "{len}");
        }
        assert!(matches!(Message::next(&mut Reader::new(&[0; 7])), Err(Error::Malformed(_))));
        assert!(matches!(Message::next(&mut Reader::new(&[])), Ok(None)));
    }

    #[test]
    fn values_of_the_wrong_size_are_refused() {
        let attr = Attr { kind: 1, payload: &[1, 2, 3] };
        assert!(attr.u8().is_err() && attr.be16().is_err() && attr.be32().is_err() && attr.be64().is_err());
        assert!(attr.address().is_err());
        assert!(Attr { kind: 1, payload: &[0xff, 0] }.str().is_err());
        assert_eq!(Attr { kind: 1, payload: b"name\0rest" }.str(), Ok("name"));
    }
}
