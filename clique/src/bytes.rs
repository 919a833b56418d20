//! What is sent, as bytes: little-endian numbers, texts and lists with their lengths in front, all within limits.
//!
//! Frames between a process and the store, and the messages inside them, are put together and taken apart by the same hands.

use crate::CliqueError;
use crate::text::printable;

/// What is wrong with some bytes; who sent them is added where that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wrong {
    pub(crate) what: &'static str,
    pub(crate) expected: String,
    pub(crate) seen: String,
}

impl Wrong {
    pub(crate) fn new(what: &'static str, expected: impl ToString, seen: impl ToString) -> Self {
        Wrong { what, expected: expected.to_string(), seen: seen.to_string() }
    }

    pub(crate) fn from(self, peer: &str) -> CliqueError {
        let Wrong { what, expected, seen } = self;
        CliqueError::Foreign { peer: peer.to_owned(), what, expected, seen }
    }
}

/// Puts bytes together.
#[derive(Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.raw(&value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.raw(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.raw(&value.to_le_bytes());
    }

    /// Bytes whose number the reader knows.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// Bytes with their length. Whoever made them has checked it; the reader checks it again.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.u32(bytes.len() as u32);
        self.raw(bytes);
    }

    /// A text with its length, cut at a character if it is longer than `most` bytes.
    pub(crate) fn text(&mut self, text: &str, most: usize) {
        let mut end = text.len().min(most);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.bytes(&text.as_bytes()[..end]);
    }

    pub(crate) fn list<T>(&mut self, items: &[T], mut each: impl FnMut(&mut Self, &T)) {
        self.u32(items.len() as u32);
        for item in items {
            each(self, item);
        }
    }

    pub(crate) fn option<T>(&mut self, item: &Option<T>, each: impl FnOnce(&mut Self, &T)) {
        self.u8(u8::from(item.is_some()));
        if let Some(item) = item {
            each(self, item);
        }
    }
}

/// Takes bytes of a peer apart. Every byte that does not belong is an error, and no length is trusted.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn raw(&mut self, what: &'static str, len: usize) -> Result<&'a [u8], Wrong> {
        match self.0.split_at_checked(len) {
            Some((taken, rest)) => {
                self.0 = rest;
                Ok(taken)
            }
            None => Err(Wrong::new(what, format!("{len} bytes"), format!("{} bytes", self.0.len()))),
        }
    }

    pub(crate) fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Wrong> {
        let taken = self.raw(what, N)?;
        // There are as many as were asked for.
        Ok(core::array::from_fn(|index| taken[index]))
    }

    pub(crate) fn u8(&mut self, what: &'static str) -> Result<u8, Wrong> {
        self.array(what).map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self, what: &'static str) -> Result<u16, Wrong> {
        self.array(what).map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32, Wrong> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64, Wrong> {
        self.array(what).map(u64::from_le_bytes)
    }

    pub(crate) fn flag(&mut self, what: &'static str) -> Result<bool, Wrong> {
        match self.u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            seen => Err(Wrong::new(what, "0 or 1", seen)),
        }
    }

    /// Bytes with their length in front.
    pub(crate) fn bytes(&mut self, what: &'static str, most: usize) -> Result<&'a [u8], Wrong> {
        let len = self.u32(what)? as usize;
        if len > most {
            return Err(Wrong::new(what, format!("at most {most} bytes"), format!("{len} bytes")));
        }
        self.raw(what, len)
    }

    /// A text, as it is: to be compared.
    pub(crate) fn text(&mut self, what: &'static str, most: usize) -> Result<String, Wrong> {
        match core::str::from_utf8(self.bytes(what, most)?) {
            Ok(text) => Ok(text.to_owned()),
            Err(error) => Err(Wrong::new(what, "UTF-8", error)),
        }
    }

    /// A text that is only shown to people, and so that it can be.
    pub(crate) fn shown(&mut self, what: &'static str, most: usize) -> Result<String, Wrong> {
        self.text(what, most).map(|text| printable(&text))
    }

    pub(crate) fn list<T>(
        &mut self,
        what: &'static str,
        mut each: impl FnMut(&mut Self) -> Result<T, Wrong>,
    ) -> Result<Vec<T>, Wrong> {
        let count = self.u32(what)? as usize;
        // An item has a byte at least, so a count that lies ends here and reserves nothing.
        if count > self.0.len() {
            return Err(Wrong::new(what, format!("at most {} items", self.0.len()), count));
        }
        (0..count).map(|_| each(self)).collect()
    }

    pub(crate) fn option<T>(
        &mut self,
        what: &'static str,
        each: impl FnOnce(&mut Self) -> Result<T, Wrong>,
    ) -> Result<Option<T>, Wrong> {
        if self.flag(what)? { each(self).map(Some) } else { Ok(None) }
    }

    /// Nothing is left.
    pub(crate) fn end(&self, what: &'static str) -> Result<(), Wrong> {
        match self.0.len() {
            0 => Ok(()),
            left => Err(Wrong::new(what, "no more bytes", format!("{left} bytes"))),
        }
    }
}
