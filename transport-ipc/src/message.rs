//! What two ends send each other, as bytes: versioned, checked, and without anything that is believed unseen.
//!
//! Both messages begin alike, all numbers are little-endian:
//!
//! ```text
//! 0   8  "portway\0"
//! 8   2  version, 1
//! 10  2  kind: 0x4345 an endpoint, 0x434d a memory
//! 12  4  length of the whole message
//! 16  8  number of the transport that wrote it
//! 24  8  number of its hub, which names the socket that answers questions
//! 32 36  the process: boot id (16), PID namespace (8), process id (4), start (8)
//! 68 16  UUID of the device
//! ```

use portway_proxy::TransportError;

use crate::identity::Process;

const MAGIC: u64 = u64::from_le_bytes(*b"portway\0");
const VERSION: u64 = 1;
const KIND_ENDPOINT: u64 = 0x4345;
const KIND_MEMORY: u64 = 0x434d;

/// The most pieces of one memory: 1 TiB in pieces of 2 MiB.
const MAX_PIECES: u64 = 1 << 19;

/// Who wrote a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Author {
    pub(crate) transport: u64,
    pub(crate) hub: u64,
    pub(crate) process: Process,
    pub(crate) device: [u8; 16],
}

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) author: Author,
    /// A random number.
    pub(crate) nonce: u64,
}

/// Where a memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Device,
    /// Page-locked host memory that every process maps for itself.
    Shared,
    /// Page-locked host memory of one process.
    Private,
}

const PLACES: [Place; 3] = [Place::Device, Place::Shared, Place::Private];

/// A physical piece of an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) len_bytes: u64,
    pub(crate) fabric: Option<[u8; 64]>,
}

/// A memory, as its peers have to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) author: Author,
    /// Its number over there.
    pub(crate) index: u32,
    /// Random, so that another memory with this number is not taken for this one.
    pub(crate) nonce: u64,
    /// The allocation's number in the hub, which is never given twice: its generation.
    pub(crate) allocation: u64,
    /// Where the allocation begins over there. Compared, never followed.
    pub(crate) base: u64,
    pub(crate) place: Place,
    /// Where in the allocation the memory begins.
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u64,
    /// Whether each piece has a descriptor, to be asked for.
    pub(crate) descriptors: bool,
    /// In order; their sum is the length of the allocation.
    pub(crate) pieces: Vec<Piece>,
    pub(crate) legacy: Option<[u8; 64]>,
}

impl Memory {
    pub(crate) fn allocation_len_bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len_bytes).sum()
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn new(kind: u64, author: &Author) -> Self {
        let mut writer = Writer(Vec::new());
        writer.u64(MAGIC);
        writer.u16(VERSION as u16);
        writer.u16(kind as u16);
        writer.u32(0);
        writer.u64(author.transport);
        writer.u64(author.hub);
        writer.bytes(&author.process.boot);
        writer.u64(author.process.namespace);
        writer.u32(author.process.pid);
        writer.u64(author.process.started);
        writer.bytes(&author.device);
        writer
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    fn finish(mut self) -> Vec<u8> {
        let len = self.0.len() as u32;
        self.0[12..16].copy_from_slice(&len.to_le_bytes());
        self.0
    }
}

struct Reader<'a> {
    what: &'static str,
    rest: &'a [u8],
    len: usize,
}

type Read<T> = Result<T, TransportError>;

impl<'a> Reader<'a> {
    fn new(what: &'static str, kind: u64, bytes: &'a [u8]) -> Read<(Self, Author)> {
        let mut reader = Reader { what, rest: bytes, len: bytes.len() };
        for (name, expected, len) in [
            ("magic", MAGIC, 8),
            ("version", VERSION, 2),
            ("kind", kind, 2),
            ("length", bytes.len() as u64, 4),
        ] {
            let seen = reader.number(len)?;
            if seen != expected {
                return Err(reader.refuse(format!("{name} {expected:#x}"), format!("{seen:#x}")));
            }
        }
        let author = Author {
            transport: reader.u64()?,
            hub: reader.u64()?,
            process: Process {
                boot: reader.array()?,
                namespace: reader.u64()?,
                pid: reader.u32()?,
                started: reader.u64()?,
            },
            device: reader.array()?,
        };
        Ok((reader, author))
    }

    fn refuse(&self, expected: String, seen: String) -> TransportError {
        TransportError::Malformed { what: self.what, expected, seen }
    }

    fn array<const N: usize>(&mut self) -> Read<[u8; N]> {
        let Some((array, rest)) = self.rest.split_first_chunk() else {
            let least = self.len - self.rest.len() + N;
            return Err(self.refuse(format!("{least} bytes or more"), format!("{} bytes", self.len)));
        };
        self.rest = rest;
        Ok(*array)
    }

    fn number(&mut self, len: usize) -> Read<u64> {
        match len {
            2 => self.array().map(u16::from_le_bytes).map(u64::from),
            4 => self.array().map(u32::from_le_bytes).map(u64::from),
            _ => self.array().map(u64::from_le_bytes),
        }
    }

    fn u8(&mut self) -> Read<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Read<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Read<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn flag(&mut self, name: &str) -> Read<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            seen => Err(self.refuse(format!("{name} of 0 or 1"), seen.to_string())),
        }
    }

    fn end(self) -> Read<()> {
        if self.rest.is_empty() {
            return Ok(());
        }
        let expected = format!("{} bytes", self.len - self.rest.len());
        Err(self.refuse(expected, format!("{} bytes", self.len)))
    }
}

impl Endpoint {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::new(KIND_ENDPOINT, &self.author);
        writer.u64(self.nonce);
        writer.finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Read<Self> {
        let (mut reader, author) = Reader::new("endpoint", KIND_ENDPOINT, bytes)?;
        let nonce = reader.u64()?;
        reader.end()?;
        Ok(Endpoint { author, nonce })
    }
}

impl Memory {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::new(KIND_MEMORY, &self.author);
        writer.u32(self.index);
        for number in [self.nonce, self.allocation, self.base, self.offset_bytes, self.len_bytes] {
            writer.u64(number);
        }
        let fabric = self.pieces.iter().any(|piece| piece.fabric.is_some());
        writer.u8(self.place as u8);
        for flag in [self.descriptors, fabric, self.legacy.is_some()] {
            writer.u8(flag.into());
        }
        if let Some(legacy) = &self.legacy {
            writer.bytes(legacy);
        }
        writer.u32(self.pieces.len() as u32);
        for piece in &self.pieces {
            writer.u64(piece.len_bytes);
            if fabric {
                writer.bytes(&piece.fabric.unwrap_or([0; 64]));
            }
        }
        writer.finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Read<Self> {
        let (mut reader, author) = Reader::new("memory export", KIND_MEMORY, bytes)?;
        let index = reader.u32()?;
        let [nonce, allocation, base] = [reader.u64()?, reader.u64()?, reader.u64()?];
        let [offset_bytes, len_bytes] = [reader.u64()?, reader.u64()?];
        let place = usize::from(reader.u8()?);
        let Some(&place) = PLACES.get(place) else {
            return Err(reader.refuse("a place of 0 to 2".into(), place.to_string()));
        };
        let descriptors = reader.flag("descriptors")?;
        let fabric = reader.flag("fabric handles")?;
        let legacy = if reader.flag("legacy handle")? { Some(reader.array()?) } else { None };
        let count = u64::from(reader.u32()?);
        let piece_bytes = if fabric { 72 } else { 8 };
        if count == 0 || count > MAX_PIECES || reader.rest.len() as u64 != count * piece_bytes {
            let expected = format!("1 to {MAX_PIECES} pieces of {piece_bytes} bytes each");
            let seen = format!("{count} pieces in {} bytes", reader.rest.len());
            return Err(reader.refuse(expected, seen));
        }
        let mut pieces = Vec::new();
        let mut sum = Some(0u64);
        for _ in 0..count {
            let len_bytes = reader.u64()?;
            sum = sum.filter(|_| len_bytes > 0).and_then(|sum| sum.checked_add(len_bytes));
            let fabric = if fabric { Some(reader.array()?) } else { None };
            pieces.push(Piece { len_bytes, fabric });
        }
        // An allocation ends within the address space, and the memory within the allocation.
        let whole = sum.filter(|&sum| base.checked_add(sum).is_some());
        let end = offset_bytes.checked_add(len_bytes).filter(|_| len_bytes > 0);
        if !matches!((whole, end), (Some(whole), Some(end)) if end <= whole) {
            let expected = "a memory within its allocation".into();
            let seen = format!("{len_bytes} bytes at {offset_bytes} of {sum:?} bytes at {base:#x}");
            return Err(reader.refuse(expected, seen));
        }
        reader.end()?;
        Ok(Memory {
            author,
            index,
            nonce,
            allocation,
            base,
            place,
            offset_bytes,
            len_bytes,
            descriptors,
            pieces,
            legacy,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn author() -> Author {
        let process = Process { boot: [1; 16], namespace: 2, pid: 3, started: 4 };
        Author { transport: 7, hub: 8, process, device: [9; 16] }
    }

    fn endpoint() -> Endpoint {
        Endpoint { author: author(), nonce: 99 }
    }

    fn memory(fabric: bool, legacy: bool) -> Memory {
        let piece = |len_bytes| Piece { len_bytes, fabric: fabric.then_some([5; 64]) };
        Memory {
            author: author(),
            index: 4,
            nonce: 5,
            allocation: 6,
            base: 0x7000_0000,
            place: Place::Device,
            offset_bytes: 100,
            len_bytes: 4000,
            descriptors: true,
            pieces: vec![piece(4096), piece(8192)],
            legacy: legacy.then_some([6; 64]),
        }
    }

    fn all_memories() -> [Memory; 4] {
        [(false, false), (false, true), (true, false), (true, true)].map(|(f, l)| memory(f, l))
    }

    #[test]
    fn messages_come_back_as_they_were() {
        assert_eq!(Endpoint::decode(&endpoint().encode()).unwrap(), endpoint());
        for memory in all_memories() {
            assert_eq!(Memory::decode(&memory.encode()).unwrap(), memory);
        }
    }

    #[test]
    fn every_truncation_and_a_byte_too_many_is_refused() {
        let memories = all_memories().map(|memory| memory.encode());
        for whole in memories.into_iter().chain([endpoint().encode()]) {
            let mut longer = whole.clone();
            longer.push(0);
            for bytes in (0..whole.len()).map(|len| &whole[..len]).chain([&longer[..]]) {
                assert!(matches!(Endpoint::decode(bytes), Err(TransportError::Malformed { .. })));
                assert!(matches!(Memory::decode(bytes), Err(TransportError::Malformed { .. })));
            }
        }
    }

    #[test]
    fn the_error_names_what_is_wrong() {
        let changed = |at: usize, byte: u8| {
            let mut bytes = endpoint().encode();
            bytes[at] = byte;
            Endpoint::decode(&bytes).unwrap_err().to_string()
        };
        assert!(changed(0, b'q').contains("magic"));
        assert_eq!(changed(8, 2), "endpoint: expected version 0x1, seen 0x2");
        assert!(changed(12, 1).contains("length"));
        assert!(Memory::decode(&endpoint().encode()).unwrap_err().to_string().contains("kind"));
        let beyond = Memory { len_bytes: 12_289 - 100, ..memory(false, false) };
        let error = Memory::decode(&beyond.encode()).unwrap_err().to_string();
        assert!(error.contains("within its allocation"), "{error}");
        for bad in [
            Memory { len_bytes: 0, ..memory(false, false) },
            Memory { offset_bytes: u64::MAX, ..memory(false, false) },
            Memory { base: u64::MAX - 5, ..memory(false, false) },
            Memory { pieces: vec![], ..memory(false, false) },
        ] {
            assert!(Memory::decode(&bad.encode()).is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Endpoint::decode(&bytes);
            let _ = Memory::decode(&bytes);
        }

        /// Random bytes die at the magic; these get past it.
        #[test]
        fn no_changed_message_makes_it_panic_or_passes_unchecked(
            which in 0usize..4,
            changes in proptest::collection::vec((16usize..600, any::<u8>()), 1..6),
        ) {
            let mut bytes = all_memories()[which].encode();
            let len = bytes.len();
            for (at, byte) in changes {
                bytes[16 + (at - 16) % (len - 16)] = byte;
            }
            if let Ok(seen) = Memory::decode(&bytes) {
                let whole = seen.allocation_len_bytes();
                prop_assert!(seen.len_bytes > 0 && seen.offset_bytes + seen.len_bytes <= whole);
                prop_assert!(seen.pieces.iter().all(|piece| piece.len_bytes > 0));
                prop_assert_eq!(seen.encode(), bytes);
            }
        }
    }
}
