//! [`Pair`]: a queue pair as a port uses it. Turns ops into requests: books them, writes them down, knows what rests.

use portway_proxy::transport::{Op, Put};

use crate::chain::Chain;
use crate::ledger::Ledger;
use crate::message::Span;
use crate::pieces::{Piece, first_piece};
use crate::sys;

/// A request's id is its number in the ledger, and those of each queue pair begin at its index shifted by this. At 100
/// million requests a second they last for 22 years.
pub(crate) const NUMBER_BITS: u32 = 56;

/// A binding, with everything looked up.
#[derive(Debug)]
pub(crate) struct Bindings {
    pub(crate) pair: u32,
    pub(crate) signal_key: u32,
    pub(crate) signal_address: u64,
    pub(crate) source_len_bytes: u64,
    pub(crate) destination_len_bytes: u64,
    /// The longest put that is sure to be one request: 0 if a memory has several spans.
    pub(crate) direct_bytes: u64,
    /// The first span of each memory.
    pub(crate) from: Span,
    pub(crate) to: Span,
    pub(crate) source: Box<[Span]>,
    pub(crate) destination: Box<[Span]>,
}

impl Bindings {
    /// Whether a put lies in its memories and is one request.
    #[inline]
    pub(crate) fn is_direct(&self, put: &Put) -> bool {
        // Of no bytes: not direct. A length up to `direct_bytes` is one up to both memories' lengths.
        put.len_bytes.wrapping_sub(1) < self.direct_bytes
            && put.source_offset_bytes <= self.source_len_bytes - put.len_bytes
            && put.destination_offset_bytes <= self.destination_len_bytes - put.len_bytes
    }

    /// The one request of a direct put.
    #[inline]
    fn direct(&self, put: &Put) -> Piece {
        Piece {
            source_address: self.from.address + put.source_offset_bytes,
            local_key: self.from.key,
            destination_address: self.to.address + put.destination_offset_bytes,
            remote_key: self.to.key,
            len_bytes: put.len_bytes as u32,
        }
    }

    /// How long source and destination are.
    pub(crate) fn lens_bytes(&self) -> [u64; 2] {
        [self.source_len_bytes, self.destination_len_bytes]
    }
}

/// An op whose requests did not all fit. It goes on before any later op of its queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Begun {
    pub(crate) op: Op,
    pub(crate) moved_bytes: u64,
}

/// A queue pair, as the port uses it.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) pair: *mut sys::ibv_qp,
    pub(crate) ledger: Ledger,
    pub(crate) chain: Chain,
    pub(crate) begun: Option<Begun>,
}

impl Pair {
    /// Writes down an op whose put, if it has one, is direct. There is room for all of it.
    #[inline]
    pub(crate) fn build(&mut self, lane: &Bindings, op: &Op, requests: u64) {
        let first = self.ledger.requests(requests);
        if let Some(put) = &op.put {
            self.chain.write(first, &lane.direct(put));
        }
        if let Some(value) = op.signal {
            let last = first + requests - 1;
            self.chain.signal(last, value, lane.signal_address, lane.signal_key);
        }
        self.end(op);
    }

    /// Writes down any op from where it stands, as far as there is room. What does not fit rests.
    #[cold]
    pub(crate) fn build_on(&mut self, lane: &Bindings, begun: Begun, longest_bytes: u32) {
        let Begun { op, mut moved_bytes } = begun;
        if let Some(put) = &op.put {
            while moved_bytes < put.len_bytes {
                if !self.ledger.has_room() {
                    return self.rest(Begun { op, moved_bytes });
                }
                let piece = first_piece(
                    &lane.source,
                    &lane.destination,
                    put.source_offset_bytes + moved_bytes,
                    put.destination_offset_bytes + moved_bytes,
                    put.len_bytes - moved_bytes,
                    longest_bytes,
                );
                self.chain.write(self.ledger.requests(1), &piece);
                moved_bytes += u64::from(piece.len_bytes);
            }
        }
        if let Some(value) = op.signal {
            if !self.ledger.has_room() {
                return self.rest(Begun { op, moved_bytes });
            }
            let id = self.ledger.requests(1);
            self.chain.signal(id, value, lane.signal_address, lane.signal_key);
        }
        self.end(&op);
    }

    #[inline]
    fn end(&mut self, op: &Op) {
        if self.ledger.end_op(op.lane, op.sequence, op.flush) {
            self.chain.ask_for_last();
        }
    }

    /// Nothing else is built before it: it takes all room that there is, until it is done.
    fn rest(&mut self, begun: Begun) {
        self.ask_for_last();
        self.begun = Some(begun);
    }

    /// Makes the last request ask for a completion. If it is not here any more it has asked: each post sees to that.
    #[inline]
    pub(crate) fn ask_for_last(&mut self) {
        if self.ledger.ask_for_last() {
            self.chain.ask_for_last();
        }
    }
}
