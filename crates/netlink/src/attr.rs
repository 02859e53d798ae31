// SPDX-License-Identifier: Apache-2.0

//! Writing netlink messages: headers, attributes, nests whose length is filled in when they end.

/// `nlmsghdr` is 16 bytes, an attribute's header 4; both are padded to 4.
pub(crate) const HEADER_LEN: usize = 16;
const ALIGN: usize = 4;
/// Set on the type of an attribute that holds attributes.
const NLA_F_NESTED: u16 = 0x8000;

pub(crate) const NLM_F_REQUEST: u16 = 0x1;
pub(crate) const NLM_F_ACK: u16 = 0x4;
pub(crate) const NLM_F_REPLACE: u16 = 0x100;
pub(crate) const NLM_F_EXCL: u16 = 0x200;
pub(crate) const NLM_F_CREATE: u16 = 0x400;
pub(crate) const NLM_F_APPEND: u16 = 0x800;
/// `NLM_F_ROOT | NLM_F_MATCH`
pub(crate) const NLM_F_DUMP: u16 = 0x300;

/// Appends messages and attributes to one growing buffer.
///
/// A length that does not fit its field, or a name with a zero byte in it, makes it `spoiled`, and the bytes are not
/// to be sent: a builder never returns a `Result`, the one who sends asks once.
#[derive(Debug, Clone, Default)]
pub(crate) struct Writer {
    buf: Vec<u8>,
    spoiled: bool,
}

impl Writer {
    pub(crate) fn new() -> Writer {
        Writer::default()
    }

    pub(crate) fn with_capacity(bytes: usize) -> Writer {
        Writer { buf: Vec::with_capacity(bytes), ..Writer::default() }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buf
    }

    pub(crate) fn len(&self) -> usize {
        self.buf.len()
    }

    pub(crate) fn spoiled(&self) -> bool {
        self.spoiled
    }

    pub(crate) fn clear(&mut self) {
        self.buf.clear();
        self.spoiled = false;
    }

    /// Cuts off everything after `len`, to take back what was just written.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.buf.truncate(len);
    }

    /// Begins a message; [`Writer::end_message`] with the returned position ends it.
    pub(crate) fn begin_message(&mut self, kind: u16, flags: u16, seq: u32) -> usize {
        let start = self.buf.len();
        self.buf.extend_from_slice(&[0; 4]);
        self.buf.extend_from_slice(&kind.to_ne_bytes());
        self.buf.extend_from_slice(&(flags | NLM_F_REQUEST).to_ne_bytes());
        self.buf.extend_from_slice(&seq.to_ne_bytes());
        self.buf.extend_from_slice(&[0; 4]);
        start
    }

    pub(crate) fn end_message(&mut self, start: usize) {
        let len = self.buf.len() - start;
        match u32::try_from(len) {
            Ok(len) => self.buf[start..start + 4].copy_from_slice(&len.to_ne_bytes()),
            Err(_) => self.spoiled = true,
        }
    }

    /// Changes the flags of the message that begins at `start`.
    pub(crate) fn set_flags(&mut self, start: usize, change: impl FnOnce(u16) -> u16) {
        let field = &mut self.buf[start + 6..start + 8];
        let flags = u16::from_ne_bytes([field[0], field[1]]);
        field.copy_from_slice(&change(flags).to_ne_bytes());
    }

    /// For what cannot be written and has no length of its own to tell.
    pub(crate) fn spoil(&mut self) {
        self.spoiled = true;
    }

    /// Fixed part after the header, or any raw bytes the caller keeps aligned.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.buf.extend_from_slice(bytes);
    }

    pub(crate) fn attr(&mut self, kind: u16, payload: &[u8]) {
        let start = self.begin_attr(kind);
        self.buf.extend_from_slice(payload);
        self.end_attr(start);
    }

    /// A string attribute, with the terminating zero.
    pub(crate) fn str(&mut self, kind: u16, text: &str) {
        // The kernel would take the part before it for the name.
        self.spoiled |= text.as_bytes().contains(&0);
        let start = self.begin_attr(kind);
        self.buf.extend_from_slice(text.as_bytes());
        self.buf.push(0);
        self.end_attr(start);
    }

    pub(crate) fn u8(&mut self, kind: u16, value: u8) {
        self.attr(kind, &[value]);
    }

    pub(crate) fn be16(&mut self, kind: u16, value: u16) {
        self.attr(kind, &value.to_be_bytes());
    }

    pub(crate) fn be32(&mut self, kind: u16, value: u32) {
        self.attr(kind, &value.to_be_bytes());
    }

    pub(crate) fn be64(&mut self, kind: u16, value: u64) {
        self.attr(kind, &value.to_be_bytes());
    }

    pub(crate) fn ne32(&mut self, kind: u16, value: u32) {
        self.attr(kind, &value.to_ne_bytes());
    }

    /// An attribute that holds what `fill` writes.
    pub(crate) fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut Writer)) {
        let start = self.begin_attr(kind | NLA_F_NESTED);
        fill(self);
        self.end_attr(start);
    }

    /// Begins a nest that does not fit into one closure; [`Writer::end_attr`] ends it.
    pub(crate) fn begin_nest(&mut self, kind: u16) -> usize {
        self.begin_attr(kind | NLA_F_NESTED)
    }

    pub(crate) fn end_attr(&mut self, start: usize) {
        let len = self.buf.len() - start;
        match u16::try_from(len) {
            Ok(len) => self.buf[start..start + 2].copy_from_slice(&len.to_ne_bytes()),
            Err(_) => self.spoiled = true,
        }
        const ZEROS: [u8; ALIGN] = [0; ALIGN];
        self.buf.extend_from_slice(&ZEROS[..len.next_multiple_of(ALIGN) - len]);
    }

    fn begin_attr(&mut self, kind: u16) -> usize {
        let start = self.buf.len();
        let kind = kind.to_ne_bytes();
        self.buf.extend_from_slice(&[0, 0, kind[0], kind[1]]);
        start
    }
}
