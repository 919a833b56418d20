//! [`Connection`]: a socket of the store that never blocks, a frame in and frames out.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use crate::rendezvous::board::Key;
use crate::rendezvous::wire::{Frame, HEADER_BYTES, MAX_HELLO_BYTES, MAX_REQUEST_BYTES, Wrong, body_len};

/// What a look at a socket brought.
pub(super) enum Read1 {
    /// Not a whole frame yet.
    Nothing,
    Frame(Frame),
    /// The other end has closed it.
    End,
    Wrong(Wrong),
}

#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    pub(super) from: SocketAddr,
    /// Whose it is, once that is known.
    pub(super) participant: Option<u32>,
    /// The part of a frame that has come.
    inbox: Vec<u8>,
    outbox: VecDeque<Arc<Vec<u8>>>,
    /// How much of the first of the outbox is gone.
    sent: usize,
    /// The round that it waits to gather, and since when.
    pub(super) gathering: Option<(Key, Instant)>,
    /// When something has to have happened; kept in step with the store's list.
    pub(super) due: Option<Instant>,
    /// Ends when the outbox is empty.
    pub(super) last_words: bool,
}

impl Connection {
    pub(super) fn new(stream: TcpStream, from: SocketAddr) -> Self {
        Connection {
            stream,
            from,
            participant: None,
            inbox: Vec::new(),
            outbox: VecDeque::new(),
            sent: 0,
            gathering: None,
            due: None,
            last_words: false,
        }
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    pub(super) fn has_part_of_a_frame(&self) -> bool {
        !self.inbox.is_empty()
    }

    pub(super) fn has_to_write(&self) -> bool {
        !self.outbox.is_empty()
    }

    pub(super) fn push(&mut self, bytes: Arc<Vec<u8>>) {
        self.outbox.push_back(bytes);
    }

    /// For messages: what of a frame has come.
    pub(super) fn seen(&self) -> String {
        format!("{} bytes of it", self.inbox.len())
    }

    /// Reads on, to the end of a frame and no further.
    pub(super) fn read(&mut self) -> io::Result<Read1> {
        if self.gathering.is_some() {
            // It waits for an answer: all that may come is its end.
            let mut byte = [0];
            return match self.stream.read(&mut byte) {
                Ok(0) => Ok(Read1::End),
                Ok(_) => Ok(Read1::Wrong(Wrong::new("request", "none before the answer", "another one"))),
                Err(error) if would_block(&error) => Ok(Read1::Nothing),
                Err(error) => Err(error),
            };
        }
        let most = if self.participant.is_some() { MAX_REQUEST_BYTES } else { MAX_HELLO_BYTES };
        loop {
            let at = self.inbox.len();
            let mut len = HEADER_BYTES;
            if at >= HEADER_BYTES {
                match body_len(&self.inbox, most) {
                    Ok(body) => len += body,
                    Err(wrong) => return Ok(Read1::Wrong(wrong)),
                }
                if at == len {
                    let frame = Frame::decode(&self.inbox, most);
                    self.inbox = Vec::new(); // idle connections hold no memory
                    return Ok(frame.map_or_else(Read1::Wrong, Read1::Frame));
                }
            }
            self.inbox.resize(len, 0);
            let read = self.stream.read(&mut self.inbox[at..]);
            self.inbox.truncate(at + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) if at == 0 => return Ok(Read1::End),
                Ok(0) => {
                    return Ok(Read1::Wrong(Wrong::new(
                        "frame",
                        format!("{len} bytes"),
                        format!("{at} bytes"),
                    )));
                }
                Ok(_) => {}
                Err(error) if would_block(&error) => return Ok(Read1::Nothing),
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes what the socket takes. Returns whether it took anything.
    pub(super) fn write(&mut self) -> io::Result<bool> {
        let mut any = false;
        while let Some(first) = self.outbox.front() {
            match self.stream.write(&first[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => {
                    any = true;
                    self.sent += count;
                    if self.sent == first.len() {
                        self.outbox.pop_front();
                        self.sent = 0;
                    }
                }
                Err(error) if would_block(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(any)
    }
}

fn would_block(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
