//! What two ends send each other, as bytes: small, versioned, checked.
//!
//! Both messages begin alike, all numbers are little-endian:
//!
//! ```text
//! 0   8  "portway\0"
//! 8   2  version, 1
//! 10  2  kind: 0x4945 an endpoint, 0x494d a memory
//! 12  4  length of the whole message
//! 16  8  number of the transport that wrote it
//! ```

use portway_proxy::TransportError;

use crate::gid::{Gid, MAX_OFFERED};

const MAGIC: u64 = u64::from_le_bytes(*b"portway\0");
const VERSION: u16 = 1;
const KIND_ENDPOINT: u16 = 0x4945;
const KIND_MEMORY: u16 = 0x494d;
const HEADER_BYTES: usize = 24;

/// The most queue pairs of a connection.
pub(crate) const MAX_QUEUE_PAIRS: usize = 64;
/// The most spans that one memory is exported as: 1 TiB in pieces of 2 MiB, and a little over 12 MiB of message.
pub(crate) const MAX_SPANS: usize = 1 << 19;

/// An end of a connection, as its peer has to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) transport: u64,
    /// A random number; the smaller one of a pair goes first.
    pub(crate) nonce: u64,
    pub(crate) roce: bool,
    /// The port's active MTU as the verbs enumerate it: 1 for 256 bytes to 5 for 4,096.
    pub(crate) mtu: u8,
    pub(crate) lid: u16,
    /// The first packet sequence number of every queue pair, 24 bits.
    pub(crate) first_psn: u32,
    /// The longest message that the device takes or sends.
    pub(crate) max_message_bytes: u32,
    pub(crate) queue_pairs: Vec<u32>,
    pub(crate) gids: Vec<Gid>,
}

/// A contiguous part of an exported memory under one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Where in the memory it begins.
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u64,
    pub(crate) address: u64,
    pub(crate) key: u32,
}

/// A memory, as its peers have to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) transport: u64,
    pub(crate) index: u32,
    /// 0 for host memory, otherwise 1 + the device's ordinal on the exporter's side.
    pub(crate) place: u32,
    /// A signal word, which writes reach in the order in which they were sent.
    pub(crate) is_word: bool,
    /// In order of offset, without gaps, from 0 to the memory's length.
    pub(crate) spans: Vec<Span>,
}

impl Memory {
    pub(crate) fn len_bytes(&self) -> u64 {
        self.spans.iter().map(|span| span.len_bytes).sum()
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn new(kind: u16, transport: u64) -> Self {
        let mut writer = Writer(Vec::new());
        writer.put(&MAGIC.to_le_bytes());
        writer.put(&VERSION.to_le_bytes());
        writer.put(&kind.to_le_bytes());
        writer.put(&[0; 4]);
        writer.put(&transport.to_le_bytes());
        writer
    }

    fn put(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn finish(mut self) -> Vec<u8> {
        let len = self.0.len() as u32;
        self.0[12..16].copy_from_slice(&len.to_le_bytes());
        self.0
    }
}

struct Reader<'a> {
    what: &'static str,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// Checks the header; returns the reader behind it, and the transport that wrote the message.
    fn new(what: &'static str, kind: u16, bytes: &'a [u8]) -> Result<(Self, u64), TransportError> {
        let mut reader = Reader { what, bytes, at: 0 };
        if bytes.len() < HEADER_BYTES {
            let expected = format!("at least {HEADER_BYTES} bytes");
            return Err(reader.refuse(expected, format!("{} bytes", bytes.len())));
        }
        reader.must_be("magic", MAGIC, |r| r.u64())?;
        reader.must_be("version", VERSION.into(), |r| r.u16().map(u64::from))?;
        reader.must_be("kind", kind.into(), |r| r.u16().map(u64::from))?;
        reader.must_be("length", bytes.len() as u64, |r| r.u32().map(u64::from))?;
        let transport = reader.u64()?;
        Ok((reader, transport))
    }

    fn refuse(&self, expected: String, seen: String) -> TransportError {
        TransportError::Malformed { what: self.what, expected, seen }
    }

    fn must_be(
        &mut self,
        name: &str,
        expected: u64,
        read: impl Fn(&mut Self) -> Result<u64, TransportError>,
    ) -> Result<(), TransportError> {
        let seen = read(self)?;
        if seen != expected {
            return Err(self.refuse(format!("{name} {expected:#x}"), format!("{seen:#x}")));
        }
        Ok(())
    }

    fn within(
        &self,
        name: &str,
        seen: u64,
        range: core::ops::RangeInclusive<u64>,
    ) -> Result<u64, TransportError> {
        if range.contains(&seen) {
            return Ok(seen);
        }
        let expected = format!("{name} from {} to {}", range.start(), range.end());
        Err(self.refuse(expected, seen.to_string()))
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], TransportError> {
        match self.bytes.get(self.at..self.at + N).and_then(|bytes| bytes.try_into().ok()) {
            Some(array) => {
                self.at += N;
                Ok(array)
            }
            None => {
                Err(self
                    .refuse(format!("{} bytes or more", self.at + N), format!("{} bytes", self.bytes.len())))
            }
        }
    }

    fn u8(&mut self) -> Result<u8, TransportError> {
        self.take::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, TransportError> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, TransportError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, TransportError> {
        self.take().map(u64::from_le_bytes)
    }

    fn end(self) -> Result<(), TransportError> {
        if self.at == self.bytes.len() {
            return Ok(());
        }
        Err(self.refuse(format!("{} bytes", self.at), format!("{} bytes", self.bytes.len())))
    }
}

impl Endpoint {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new(KIND_ENDPOINT, self.transport);
        w.put(&self.nonce.to_le_bytes());
        w.put(&[u8::from(self.roce), self.mtu]);
        w.put(&self.lid.to_le_bytes());
        w.put(&self.first_psn.to_le_bytes());
        w.put(&self.max_message_bytes.to_le_bytes());
        w.put(&[self.queue_pairs.len() as u8, self.gids.len() as u8]);
        self.queue_pairs.iter().for_each(|number| w.put(&number.to_le_bytes()));
        self.gids.iter().for_each(|gid| w.put(&gid.0));
        w.finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, TransportError> {
        const QPN_MAX: u64 = 0xff_ffff;
        let (mut r, transport) = Reader::new("endpoint", KIND_ENDPOINT, bytes)?;
        let nonce = r.u64()?;
        let link = r.u8()?;
        let roce = r.within("link layer", link.into(), 0..=1)? == 1;
        let mtu = r.u8()?;
        let mtu = r.within("MTU code", mtu.into(), 1..=5)? as u8;
        let lid = r.u16()?;
        let psn = r.u32()?;
        let first_psn = r.within("packet sequence number", psn.into(), 0..=0xff_ffff)? as u32;
        let longest = r.u32()?;
        let max_message_bytes =
            r.within("longest message", longest.into(), 4096..=u64::from(u32::MAX))? as u32;
        let (count, gids) = (r.u8()?, r.u8()?);
        let count = r.within("queue pairs", count.into(), 1..=MAX_QUEUE_PAIRS as u64)?;
        let gid_count = r.within("GIDs", gids.into(), 1..=MAX_OFFERED as u64)?;
        let mut queue_pairs = Vec::new();
        for _ in 0..count {
            let number = r.u32()?;
            queue_pairs.push(r.within("queue pair number", number.into(), 1..=QPN_MAX)? as u32);
        }
        let mut gids = Vec::new();
        for _ in 0..gid_count {
            gids.push(Gid(r.take()?));
        }
        r.end()?;
        Ok(Endpoint { transport, nonce, roce, mtu, lid, first_psn, max_message_bytes, queue_pairs, gids })
    }
}

impl Memory {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new(KIND_MEMORY, self.transport);
        w.put(&self.index.to_le_bytes());
        w.put(&self.place.to_le_bytes());
        w.put(&u32::from(self.is_word).to_le_bytes());
        w.put(&(self.spans.len() as u32).to_le_bytes());
        for span in &self.spans {
            w.put(&span.len_bytes.to_le_bytes());
            w.put(&span.address.to_le_bytes());
            w.put(&span.key.to_le_bytes());
        }
        w.finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, TransportError> {
        let (mut r, transport) = Reader::new("memory export", KIND_MEMORY, bytes)?;
        let (index, place, purpose) = (r.u32()?, r.u32()?, r.u32()?);
        let is_word = r.within("purpose of the memory", purpose.into(), 0..=1)? == 1;
        let count = r.u32()?;
        let count = r.within("spans", count.into(), 1..=MAX_SPANS as u64)?;
        let mut spans = Vec::new();
        let mut offset_bytes = 0u64;
        for _ in 0..count {
            let (len_bytes, address, key) = (r.u64()?, r.u64()?, r.u32()?);
            r.within("length of a span", len_bytes, 1..=u64::MAX - address)?;
            spans.push(Span { offset_bytes, len_bytes, address, key });
            offset_bytes = match offset_bytes.checked_add(len_bytes) {
                Some(sum) => sum,
                None => return Err(r.refuse("spans within an address space".into(), "more".into())),
            };
        }
        r.end()?;
        Ok(Memory { transport, index, place, is_word, spans })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn endpoint() -> Endpoint {
        Endpoint {
            transport: 7,
            nonce: 99,
            roce: true,
            mtu: 5,
            lid: 3,
            first_psn: 0xabcdef,
            max_message_bytes: 8 << 20,
            queue_pairs: vec![17, 18],
            gids: vec![Gid([1; 16]), Gid([2; 16]), Gid([3; 16])],
        }
    }

    fn memory() -> Memory {
        let span = |offset_bytes, len_bytes, address, key| Span { offset_bytes, len_bytes, address, key };
        let spans = vec![span(0, 4096, 0x7000_0000, 5), span(4096, 100, 0x9000_0000, 6)];
        Memory { transport: 8, index: 4, place: 2, is_word: true, spans }
    }

    #[test]
    fn messages_come_back_as_they_were() {
        assert_eq!(Endpoint::decode(&endpoint().encode()).unwrap(), endpoint());
        assert_eq!(Memory::decode(&memory().encode()).unwrap(), memory());
        assert_eq!(memory().len_bytes(), 4196);
    }

    #[test]
    fn every_truncation_and_a_byte_too_many_is_refused() {
        for whole in [endpoint().encode(), memory().encode()] {
            for len in 0..whole.len() {
                assert!(Endpoint::decode(&whole[..len]).is_err());
                assert!(Memory::decode(&whole[..len]).is_err());
            }
            let mut longer = whole.clone();
            longer.push(0);
            assert!(Endpoint::decode(&longer).is_err());
            assert!(Memory::decode(&longer).is_err());
        }
    }

    #[test]
    fn the_error_names_what_is_wrong() {
        let change = |at: usize, byte: u8| {
            let mut bytes = endpoint().encode();
            bytes[at] = byte;
            Endpoint::decode(&bytes).unwrap_err().to_string()
        };
        assert!(change(0, b'q').contains("magic"));
        assert_eq!(change(8, 2), "endpoint: expected version 0x1, seen 0x2");
        assert!(change(12, 1).contains("length"));
        assert!(change(33, 6).contains("MTU code from 1 to 5"), "{}", change(33, 6));
        assert!(change(33, 0).contains("MTU code"));
        assert!(Endpoint::decode(&memory().encode()).unwrap_err().to_string().contains("kind"));
        assert!(Memory::decode(&endpoint().encode()).unwrap_err().to_string().contains("kind"));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Endpoint::decode(&bytes);
            let _ = Memory::decode(&bytes);
        }

        /// Random bytes die at the magic; these get past it.
        #[test]
        fn no_changed_message_makes_it_panic_or_passes_unchecked(
            which in any::<bool>(),
            changes in proptest::collection::vec((24usize..120, any::<u8>()), 1..6),
        ) {
            let mut bytes = if which { endpoint().encode() } else { memory().encode() };
            for (at, byte) in changes {
                let len = bytes.len();
                bytes[24 + (at - 24) % (len - 24)] = byte;
            }
            if let Ok(seen) = Endpoint::decode(&bytes) {
                prop_assert!((1..=5).contains(&seen.mtu) && seen.first_psn < 1 << 24);
                prop_assert!((1..=MAX_QUEUE_PAIRS).contains(&seen.queue_pairs.len()));
                prop_assert_eq!(seen.encode(), bytes.clone());
            }
            if let Ok(seen) = Memory::decode(&bytes) {
                let mut at = 0;
                for span in &seen.spans {
                    prop_assert_eq!(span.offset_bytes, at);
                    prop_assert!(span.len_bytes > 0 && span.address.checked_add(span.len_bytes).is_some());
                    at += span.len_bytes;
                }
                prop_assert_eq!(seen.encode(), bytes);
            }
        }
    }
}
