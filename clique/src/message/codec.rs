//! Bytes of messages: little-endian integers, strings and lists with their lengths in front, all within limits.

use crate::CliqueError;
use crate::rendezvous::MAX_MESSAGE_BYTES;
use crate::text::printable;

/// How long a string may be in a message.
pub(crate) const MAX_STRING_BYTES: usize = 1024;

const MAGIC: [u8; 4] = *b"PWCQ";
const VERSION: u16 = 1;

/// Puts a message together.
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn new(kind: u8) -> Self {
        let mut writer = Writer(MAGIC.to_vec());
        writer.0.extend(VERSION.to_le_bytes());
        writer.u8(kind);
        writer
    }

    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    /// A string; what is longer than a message may hold is cut at a character.
    pub(crate) fn string(&mut self, text: &str) {
        let mut end = text.len().min(MAX_STRING_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.u32(end as u32);
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

    pub(crate) fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Takes a message of a peer apart. Every byte that does not belong is an error, and no length is trusted.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    peer: &'a str,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8], peer: &'a str, kind: u8) -> Result<Self, CliqueError> {
        let mut reader = Reader { rest: bytes, peer };
        if bytes.len() > MAX_MESSAGE_BYTES {
            return Err(reader.wrong(
                "length of a message",
                format!("at most {MAX_MESSAGE_BYTES}"),
                bytes.len(),
            ));
        }
        let magic = reader.take("message", MAGIC.len())?;
        if magic != MAGIC {
            return Err(reader.wrong("head of a message", format!("{MAGIC:02x?}"), format!("{magic:02x?}")));
        }
        let version = u16::from_le_bytes(reader.array("version of a message")?);
        if version != VERSION {
            return Err(reader.wrong("version of a message", VERSION, version));
        }
        let seen = reader.u8("kind of a message")?;
        if seen != kind {
            return Err(reader.wrong("kind of a message", kind, seen));
        }
        Ok(reader)
    }

    /// The error for something of this peer's.
    pub(crate) fn wrong(
        &self,
        what: &'static str,
        expected: impl ToString,
        seen: impl ToString,
    ) -> CliqueError {
        let (expected, seen) = (expected.to_string(), seen.to_string());
        CliqueError::Foreign { peer: self.peer.to_owned(), what, expected, seen }
    }

    pub(crate) fn take(&mut self, what: &'static str, len: usize) -> Result<&'a [u8], CliqueError> {
        match self.rest.split_at_checked(len) {
            Some((taken, rest)) => {
                self.rest = rest;
                Ok(taken)
            }
            None => Err(self.wrong(what, format!("{len} bytes"), format!("{} bytes", self.rest.len()))),
        }
    }

    pub(crate) fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], CliqueError> {
        let taken = self.take(what, N)?;
        // `take` returns as many as it was asked for.
        Ok(core::array::from_fn(|index| taken[index]))
    }

    pub(crate) fn u8(&mut self, what: &'static str) -> Result<u8, CliqueError> {
        Ok(self.array::<1>(what)?[0])
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32, CliqueError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64, CliqueError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn flag(&mut self, what: &'static str) -> Result<bool, CliqueError> {
        match self.u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            seen => Err(self.wrong(what, "0 or 1", seen)),
        }
    }

    pub(crate) fn string(&mut self, what: &'static str) -> Result<String, CliqueError> {
        let len = self.u32(what)? as usize;
        if len > MAX_STRING_BYTES {
            return Err(self.wrong(what, format!("at most {MAX_STRING_BYTES} bytes"), len));
        }
        let bytes = self.take(what, len)?;
        match core::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(error) => Err(self.wrong(what, "UTF-8", error)),
        }
    }

    /// A text that is only shown to people, and so that it can be.
    pub(crate) fn text(&mut self, what: &'static str) -> Result<String, CliqueError> {
        self.string(what).map(|text| printable(&text))
    }

    pub(crate) fn list<T>(
        &mut self,
        what: &'static str,
        mut each: impl FnMut(&mut Self) -> Result<T, CliqueError>,
    ) -> Result<Vec<T>, CliqueError> {
        let count = self.u32(what)? as usize;
        // An item has a byte at least, so a count that lies ends here and reserves nothing.
        if count > self.rest.len() {
            return Err(self.wrong(what, format!("at most {} items", self.rest.len()), count));
        }
        (0..count).map(|_| each(self)).collect()
    }

    pub(crate) fn option<T>(
        &mut self,
        what: &'static str,
        each: impl FnOnce(&mut Self) -> Result<T, CliqueError>,
    ) -> Result<Option<T>, CliqueError> {
        if self.flag(what)? { each(self).map(Some) } else { Ok(None) }
    }

    pub(crate) fn finish(self) -> Result<(), CliqueError> {
        match self.rest.len() {
            0 => Ok(()),
            left => Err(self.wrong("end of a message", "no more bytes", format!("{left} bytes"))),
        }
    }
}
