//! The seam between the engine and what moves the bytes: [`Transport`], [`Endpoint`], [`Port`].
//!
//! # The port contract
//!
//! Everything that the engine relies on. [`conformance`](crate::conformance) tests each sentence.
//!
//! 1. **No call blocks**, nor does dropping a port. Not for a peer, not for a device, not for a lock that another
//!    thread holds for long.
//! 2. **An op is accepted whole or not at all.** After [`Submit::Full`] nothing of it happens; offered again while
//!    ops complete, it is accepted in the end.
//! 3. **A signal never overtakes data.** Whoever sees a signal of a lane sees the data of every earlier put of that
//!    lane. Nothing is promised between lanes, nor about which of two puts lands first.
//! 4. **Signals arrive as written**: the peer's word takes the values of the ops in order, and never goes back. All
//!    64 bits count; values in between may go unseen.
//! 5. **Every accepted op completes once**, or the port fails. Completions come in any order. A poll reports as many
//!    as it has room for, and the rest later.
//! 6. **A put's completion** means that its source may be reused.
//! 7. **A flush's completion** means that every earlier put of the lane has been delivered: nobody can miss it who sees
//!    a signal, of any lane of the port, that was submitted after the completion was polled.
//! 8. **Nothing else is written**: not a byte but those of the puts and the bound signal words, none after the port is
//!    quiesced. Memory need not be aligned, nor a whole allocation. The engine offers only ops that are inside what is
//!    bound, but it goes by lengths that anybody can write down: a port checks each op against the memory that it knows.
//! 9. **After an error every call returns it**, but for [`close`](Port::close), which works on. The port is the unit of
//!    failure: all its lanes fail together. Completions not yet polled are lost. A closed port returns an error too.
//! 10. **Progress needs only [`kick`](Port::kick) and [`poll`](Port::poll)**, and after a kick polls alone. An op may
//!     rest until the next of them. The engine polls an idle port too, about every millisecond, so an end may rely on
//!     its peer's polls.
//! 11. **Lanes count from 0**, and can be bound while ops are under way. A refused binding changes nothing.
//! 12. **What is bound stays bound** until the port is quiesced, and is free then: memory can be released, and imports can
//!     be forgotten. A port that is closed again and again is quiesced in the end, after an error too.
//! 13. **Bytes from a peer are checked**: truncated or foreign ones are [`Malformed`](TransportError::Malformed).
//!
//! # When an application may close
//!
//! A close ends what is under way on both sides: an op that a port has accepted may be dropped, and a flush whose data has
//! been delivered may still fail, since its completion, too, needs the peer. That is by design: nobody can tell it from one
//! that was lost. So nobody closes while a peer has anything left to complete. The order that always works, on each side:
//!
//! 1. Flush the own channels, and wait for the flushes.
//! 2. Tell the peer so, and wait until it has told the same: by bytes that the application carries, or any barrier. A
//!    signal of the port does not do: it is itself an op that has to complete.
//! 3. Close the port until it is [`Quiesced`](Close::Quiesced); then forget imports and release memory. Free memory when
//!    those who imported it have forgotten it.

use core::fmt::Debug;
use core::time::Duration;

use portway_fifo::Region;

use crate::TransportError;

/// Names a memory of one transport: made by [`Transport::register`] and [`Transport::import`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryId {
    /// Which transport made it, so that a foreign one is refused by name. A random number a transport.
    pub transport: u64,
    /// Which of its memories.
    pub index: u32,
}

/// Memory of this side that a transport may read from and that its peers may write to.
#[derive(Clone, Debug)]
pub struct LocalMemory {
    /// The transport's name for it.
    pub id: MemoryId,
    /// The memory.
    pub region: Region,
}

/// Memory of a peer, imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteMemory {
    /// The transport's name for it.
    pub id: MemoryId,
    /// Its length.
    pub len_bytes: u64,
}

/// What a channel is bound to on its port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Where puts read.
    pub source: MemoryId,
    /// Where they write.
    pub destination: MemoryId,
    /// The peer's signal word, 8 bytes.
    pub signal: MemoryId,
}

/// A binding's number on its port, counting from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lane(pub u32);

/// The put of an [`Op`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Put {
    /// Where in the source region it begins.
    pub source_offset_bytes: u64,
    /// Where in the destination region it begins.
    pub destination_offset_bytes: u64,
    /// How much it moves: 1 to [`MAX_SIZE`](crate::MAX_SIZE).
    pub len_bytes: u64,
}

/// What a port is asked to do: a put, then a signal, then a flush, each if it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// For which binding.
    pub lane: Lane,
    /// The how-manieth op of this lane, counting from 0; its completion repeats the number.
    pub sequence: u64,
    /// The bytes to move.
    pub put: Option<Put>,
    /// The value that the peer's signal word takes. It starts at 0 and advances by 1 to
    /// [`MAX_SIZE`](crate::MAX_SIZE) a signal, wrapping around.
    pub signal: Option<u64>,
    /// Whether the completion has to wait for delivery.
    pub flush: bool,
}

/// A port's answer to an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submit {
    /// The op is the port's now.
    Accepted,
    /// No room; the port knows nothing of the op. It will be offered again.
    Full,
}

/// An op that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Its lane.
    pub lane: Lane,
    /// Its number in the lane.
    pub sequence: u64,
}

/// How far a closing port is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// Accepted ops may still touch memory; call again.
    Pending,
    /// Nothing that the port was asked to do touches memory any more; what it had bound is free.
    Quiesced,
}

/// A way to reach peers: makes memory known, and connections.
///
/// Calls may take their time (they allocate, register, talk to the driver) and come from any thread, but never from
/// the engine. Bytes between the peers are carried by the application.
///
/// There are no default methods on purpose: an implementation decides about each.
pub trait Transport: Debug + Send + Sync {
    /// Makes a region known: ports may read from it, and peers that import its export may write to it.
    fn register(&self, region: &Region) -> Result<LocalMemory, TransportError>;

    /// Allocates and registers a signal word of 8 bytes, zeroed, in the place where this transport can keep it behind
    /// the data. It has one writer: the peer's one channel that is bound to it.
    fn signal_word(&self) -> Result<LocalMemory, TransportError>;

    /// Takes a registration back. That no peer writes to the memory any more is for the caller to see to: a peer's port
    /// that has it bound may be in another process.
    ///
    /// # Errors
    /// [`TransportError::Busy`] while a port that is not quiesced has the memory bound.
    fn release(&self, memory: &LocalMemory) -> Result<(), TransportError>;

    /// What a peer needs to import the memory.
    fn export(&self, memory: &LocalMemory) -> Result<Vec<u8>, TransportError>;

    /// Makes a peer's memory known from its export.
    ///
    /// # Errors
    /// [`TransportError::Malformed`] for bytes that are truncated, foreign or of another version.
    fn import(&self, bytes: &[u8]) -> Result<RemoteMemory, TransportError>;

    /// Takes an import back, so that what was opened for it can go: an import that is never forgotten stays as long as the
    /// transport. What was imported several times is forgotten as often.
    ///
    /// # Errors
    /// [`TransportError::Busy`] while a port that is not quiesced has it bound; [`TransportError::Unknown`] when it was
    /// forgotten, or, where the transport can tell, when its owner has released it.
    fn forget(&self, memory: &RemoteMemory) -> Result<(), TransportError>;

    /// One end of a connection, and the bytes that the peer's end needs.
    fn endpoint(&self) -> Result<(Box<dyn Endpoint>, Vec<u8>), TransportError>;
}

/// One end of a connection that waits for the peer's bytes.
pub trait Endpoint: Debug + Send {
    /// Connects to the end that `peer` describes.
    ///
    /// # Errors
    /// [`TransportError::Malformed`] for bytes that are truncated, foreign or of another version,
    /// [`TransportError::Timeout`] when the time is over.
    fn connect(self: Box<Self>, peer: &[u8], timeout: Duration) -> Result<Box<dyn Port>, TransportError>;
}

/// A connection, driven by one engine. The [module page](self) holds the contract.
pub trait Port: Debug + Send {
    /// Binds a channel's memories and returns its lane: 0, 1, 2, …
    ///
    /// # Errors
    /// [`TransportError::Unknown`] for a memory that the transport does not know; whatever else keeps the three memories
    /// from being used together.
    fn bind(&mut self, binding: &Binding) -> Result<Lane, TransportError>;

    /// Offers an op. Called in order within a lane.
    fn submit(&mut self, op: &Op) -> Result<Submit, TransportError>;

    /// Rings the doorbell for what was submitted since the last kick. The engine kicks every port it touched before
    /// its step ends.
    fn kick(&mut self) -> Result<(), TransportError>;

    /// Fills in completions and returns how many. Also drives what has to be driven.
    fn poll(&mut self, completions: &mut [Completion]) -> Result<usize, TransportError>;

    /// Begins or goes on to close the port. Ops that are not done may be dropped. The one call that works after an
    /// error.
    ///
    /// # Errors
    /// It cannot be quiesced: what it had bound stays bound for good. It is not called again.
    fn close(&mut self) -> Result<Close, TransportError>;
}
