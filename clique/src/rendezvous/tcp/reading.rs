//! Frames over a socket that blocks, with an end to every wait and a limit to every length.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use crate::rendezvous::wire::{HEADER_BYTES, Wrong, body_len};

/// How much is read at once: what a peer has only announced takes no memory.
const CHUNK_BYTES: usize = 64 << 10;

#[derive(Debug)]
pub(super) enum Error {
    Io(io::Error),
    Wrong(Wrong),
}

fn left(end: Instant) -> io::Result<core::time::Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

pub(super) fn write_all(stream: &mut TcpStream, mut bytes: &[u8], end: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(left(end)?))?;
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads a frame, header and all.
pub(super) fn read_frame(stream: &mut TcpStream, end: Instant, most: usize) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    fill(stream, &mut bytes, HEADER_BYTES, end).map_err(Error::Io)?;
    let len = HEADER_BYTES + body_len(&bytes, most).map_err(Error::Wrong)?;
    fill(stream, &mut bytes, len, end).map_err(Error::Io)?;
    Ok(bytes)
}

/// Reads until there are `len` bytes.
fn fill(stream: &mut TcpStream, bytes: &mut Vec<u8>, len: usize, end: Instant) -> io::Result<()> {
    let mut at = bytes.len();
    while at < len {
        bytes.resize(len.min(at + CHUNK_BYTES), 0);
        stream.set_read_timeout(Some(left(end)?))?;
        match stream.read(&mut bytes[at..]) {
            Ok(0) => {
                return Err(io::Error::new(
                    ErrorKind::UnexpectedEof,
                    "the connection was closed by the other end",
                ));
            }
            Ok(count) => at += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(at);
    Ok(())
}
