//! The bytes that peers exchange: magic, version and kind, object, offset, length; 8 bytes each.

use portway_proxy::TransportError;

const MAGIC: u64 = u64::from_le_bytes(*b"shm-exam");
pub(crate) const MEMORY: u64 = 1 << 8 | 1;
pub(crate) const ENDPOINT: u64 = 1 << 8 | 2;

/// Part of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) object: u64,
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u64,
}

pub(crate) fn encode(version_and_kind: u64, part: Part) -> Vec<u8> {
    let words = [MAGIC, version_and_kind, part.object, part.offset_bytes, part.len_bytes];
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn decode(what: &'static str, kind: u64, bytes: &[u8]) -> Result<Part, TransportError> {
    let refuse = |expected: String, seen: String| Err(TransportError::Malformed { what, expected, seen });
    let Ok(bytes) = <&[u8; 40]>::try_from(bytes) else {
        return refuse("40 bytes".into(), format!("{} bytes", bytes.len()));
    };
    let word = |at: usize| u64::from_le_bytes(core::array::from_fn(|byte| bytes[8 * at + byte]));
    for (at, name, expected) in [(0, "magic", MAGIC), (1, "version and kind", kind)] {
        if word(at) != expected {
            return refuse(format!("{name} {expected:#x}"), format!("{:#x}", word(at)));
        }
    }
    let part = Part { object: word(2), offset_bytes: word(3), len_bytes: word(4) };
    match part.offset_bytes.checked_add(part.len_bytes) {
        Some(_) if part.len_bytes > 0 => Ok(part),
        _ => refuse("1 byte or more, inside an object".into(), format!("{part:?}")),
    }
}
