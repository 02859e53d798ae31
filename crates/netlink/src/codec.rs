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
