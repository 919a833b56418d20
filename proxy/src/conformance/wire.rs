//! Commands and answers as bytes, for an end in another process.

use core::time::Duration;
use std::io::{self, Read, Write};

use crate::transport::{Completion, Lane, Op, Put};

/// What has a form as bytes. All numbers are little-endian and as wide as they are.
pub(super) trait Wire: Sized {
    fn put(&self, into: &mut Vec<u8>);
    /// Takes the value off the front; nothing if the bytes are too few or make no sense.
    fn take(from: &mut &[u8]) -> Option<Self>;
}

macro_rules! number {
    ($($number:ty),*) => { $(
        impl Wire for $number {
            fn put(&self, into: &mut Vec<u8>) {
                into.extend_from_slice(&self.to_le_bytes());
            }
            fn take(from: &mut &[u8]) -> Option<Self> {
                let (first, rest) = from.split_first_chunk()?;
                *from = rest;
                Some(<$number>::from_le_bytes(*first))
            }
        }
    )* };
}

number!(u8, u32, u64);

impl Wire for bool {
    fn put(&self, into: &mut Vec<u8>) {
        u8::from(*self).put(into);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        match u8::take(from)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

impl Wire for Duration {
    fn put(&self, into: &mut Vec<u8>) {
        u64::try_from(self.as_nanos()).unwrap_or(u64::MAX).put(into);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        u64::take(from).map(Duration::from_nanos)
    }
}

impl<T: Wire> Wire for Vec<T> {
    fn put(&self, into: &mut Vec<u8>) {
        (self.len() as u64).put(into);
        self.iter().for_each(|item| item.put(into));
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        let len = u64::take(from)?;
        // No room is made in advance: the bytes that are there bound the length.
        (0..len).map(|_| T::take(from)).collect()
    }
}

impl Wire for String {
    fn put(&self, into: &mut Vec<u8>) {
        self.as_bytes().to_vec().put(into);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        String::from_utf8(Vec::take(from)?).ok()
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, into: &mut Vec<u8>) {
        self.is_some().put(into);
        if let Some(value) = self {
            value.put(into);
        }
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        Some(if bool::take(from)? { Some(T::take(from)?) } else { None })
    }
}

impl Wire for Lane {
    fn put(&self, into: &mut Vec<u8>) {
        self.0.put(into);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        u32::take(from).map(Lane)
    }
}

/// A struct's fields, one after the other.
macro_rules! wire_struct {
    ($name:ident { $($field:ident),* $(,)? }) => {
        impl $crate::conformance::wire::Wire for $name {
            fn put(&self, into: &mut Vec<u8>) {
                $( $crate::conformance::wire::Wire::put(&self.$field, into); )*
            }
            fn take(from: &mut &[u8]) -> Option<Self> {
                Some($name { $( $field: $crate::conformance::wire::Wire::take(from)? ),* })
            }
        }
    };
}

/// An enum's tag and then the fields of the variant.
macro_rules! wire_enum {
    ($name:ident { $( $tag:literal => $variant:ident { $($field:ident),* $(,)? } ),* $(,)? }) => {
        impl $crate::conformance::wire::Wire for $name {
            fn put(&self, into: &mut Vec<u8>) {
                match self { $(
                    $name::$variant { $($field),* } => {
                        into.push($tag);
                        $( $crate::conformance::wire::Wire::put($field, into); )*
                    }
                )* }
            }
            fn take(from: &mut &[u8]) -> Option<Self> {
                let tag: u8 = $crate::conformance::wire::Wire::take(from)?;
                match tag {
                    $( $tag => Some($name::$variant {
                        $( $field: $crate::conformance::wire::Wire::take(from)? ),*
                    }), )*
                    _ => None,
                }
            }
        }
    };
}

pub(super) use {wire_enum, wire_struct};

wire_struct!(Op { lane, sequence, put, signal, flush });
wire_struct!(Put { source_offset_bytes, destination_offset_bytes, len_bytes });
wire_struct!(Completion { lane, sequence });

/// The longest frame. What is larger was not written by this suite.
const MAX_FRAME_BYTES: u32 = 64 << 20;

/// Writes a value with its length before it.
pub(super) fn send(value: &impl Wire, into: &mut dyn Write) -> io::Result<()> {
    let mut bytes = vec![0; 4];
    value.put(&mut bytes);
    let len_bytes = u32::try_from(bytes.len() - 4).ok().filter(|&len| len <= MAX_FRAME_BYTES);
    let Some(len_bytes) = len_bytes else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a frame longer than 64 MiB"));
    };
    bytes[..4].copy_from_slice(&len_bytes.to_le_bytes());
    into.write_all(&bytes)?;
    into.flush()
}

/// Reads a value; nothing if the stream ends before it.
pub(super) fn receive<T: Wire>(from: &mut dyn Read) -> io::Result<Option<T>> {
    let mut len_bytes = [0; 4];
    let mut got = 0;
    while got < 4 {
        match from.read(&mut len_bytes[got..]) {
            Ok(0) if got == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => got += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let len_bytes = u32::from_le_bytes(len_bytes);
    let malformed = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    if len_bytes > MAX_FRAME_BYTES {
        return Err(malformed("a frame longer than 64 MiB"));
    }
    let mut bytes = vec![0; len_bytes as usize];
    from.read_exact(&mut bytes)?;
    let mut rest = bytes.as_slice();
    match T::take(&mut rest) {
        Some(value) if rest.is_empty() => Ok(Some(value)),
        _ => Err(malformed("a frame that is not of this version of the suite")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_and_cut_ones_do_not() {
        let put = Some(Put { source_offset_bytes: 1, destination_offset_bytes: 2, len_bytes: 3 });
        let ops = vec![Op { lane: Lane(9), sequence: u64::MAX, put, signal: None, flush: true }];
        let mut frame = Vec::new();
        send(&ops, &mut frame).unwrap();
        assert_eq!(receive::<Vec<Op>>(&mut frame.as_slice()).unwrap(), Some(ops));
        assert_eq!(receive::<Vec<Op>>(&mut [].as_slice()).unwrap(), None);
        for len in 1..frame.len() {
            assert!(receive::<Vec<Op>>(&mut &frame[..len]).is_err(), "cut to {len} bytes");
        }
        // One more byte than the value, counted by the frame.
        frame.push(0);
        frame[0] += 1;
        assert!(receive::<Vec<Op>>(&mut frame.as_slice()).is_err());
    }

    #[test]
    fn a_length_that_nothing_stands_behind_is_refused() {
        let mut bytes = Vec::new();
        u64::MAX.put(&mut bytes);
        assert_eq!(Vec::<u64>::take(&mut bytes.as_slice()), None);
        let frame = u32::MAX.to_le_bytes();
        assert!(receive::<u64>(&mut frame.as_slice()).is_err());
    }
}
