//! The errors: [`Error`] of a call, [`ChannelError`] of a channel that has ended, [`TransportError`] of a transport.

use core::time::Duration;
use std::sync::Arc;

use portway_fifo::Position;

use crate::request::{Request, RequestFault};

/// What a call on the host returns.
///
/// By who is at fault:
/// - **the caller**: `Config`, `Foreign`, `InUse`, `Limit`, `Region`, `Request`, some of `Fifo`;
/// - **the peer, the device or the system**: `Channel`, `Fifo`, `Transport`, `Thread`;
/// - **us**, or whoever blocks the engine's thread: `Unresponsive`.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The channel has ended.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// A number in a configuration is out of range.
    #[error("{what} is {value}: must be {must_be}")]
    Config {
        /// Which one.
        what: &'static str,
        /// What it is.
        value: u64,
        /// What it may be.
        must_be: &'static str,
    },
    /// The FIFO's error.
    #[error(transparent)]
    Fifo(#[from] portway_fifo::Error),
    /// A FIFO or port of another engine.
    #[error("{what} {index} belongs to another engine")]
    Foreign {
        /// FIFO or port.
        what: &'static str,
        /// Its index in the engine that it belongs to.
        index: usize,
    },
    /// What only one may have at a time.
    #[error("{what} {index} is in use by {by}")]
    InUse {
        /// What it is.
        what: &'static str,
        /// Its index in the engine, or, for a memory, in its transport.
        index: usize,
        /// Who has it.
        by: String,
    },
    /// The engine has no room for more.
    #[error("the engine already has its {limit} {what}")]
    Limit {
        /// Of what.
        what: &'static str,
        /// How many it was made for.
        limit: usize,
    },
    /// A region that a channel cannot be bound to.
    #[error("{what} of {len_bytes} bytes: must be {must_be}")]
    Region {
        /// Which region.
        what: &'static str,
        /// Its length.
        len_bytes: u64,
        /// What it may be.
        must_be: &'static str,
    },
    /// A request that does not fit a trigger, or the channel's regions.
    #[error("{fault}: {request:?}")]
    Request {
        /// The request.
        request: Request,
        /// What is wrong with it.
        fault: RequestFault,
    },
    /// A thread could not be made or placed, or it has ended.
    #[error("{what}: {message}")]
    Thread {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        message: String,
    },
    /// The transport's error.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The engine's thread did not answer: it is stuck in a port. A call that it had not begun is withdrawn; one that it
    /// had may still take effect.
    #[error("the engine's thread did not answer within {after:?}")]
    Unresponsive {
        /// How long the call waited.
        after: Duration,
    },
}

/// Why a channel has ended. Every device wait of the channel returns its [`code`](Self::code).
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The oldest op did not complete in time. Puts of the channel have unknown outcome and may still land until the
    /// transport is quiesced.
    #[error(
        "channel {channel}: the op at position {position} is not complete after {after:?} (sent to the port: {sent}); \
         later puts may still land until the port is closed"
    )]
    Deadline {
        /// The channel.
        channel: u16,
        /// Where the oldest op stands in its FIFO.
        position: Position,
        /// Since when the engine has it.
        after: Duration,
        /// Whether the port had accepted it.
        sent: bool,
    },
    /// The FIFO was aborted, or broke.
    #[error("channel {channel}: {source}")]
    Fifo {
        /// The channel.
        channel: u16,
        /// The FIFO's own error.
        source: portway_fifo::Error,
    },
    /// The port failed, and all its channels with it.
    #[error("channel {channel}: {source}")]
    Port {
        /// The channel.
        channel: u16,
        /// The port's error.
        source: TransportError,
    },
    /// The device asked for something that makes no sense.
    #[error("channel {channel}: the trigger at position {position} is refused, {fault}: {request:?}")]
    Request {
        /// The channel, or the number that no channel has.
        channel: u16,
        /// Where the trigger stands.
        position: Position,
        /// What is wrong with it.
        fault: RequestFault,
        /// What it says.
        request: Request,
    },
    /// The proxy was stopped or dropped.
    #[error("channel {channel}: the proxy has stopped")]
    Stopped {
        /// The channel.
        channel: u16,
    },
}

impl ChannelError {
    /// The value of the channel's error word, for kernels: 1 deadline, 2 FIFO, 3 port, 4 request, 5 stopped.
    pub fn code(&self) -> u64 {
        match self {
            ChannelError::Deadline { .. } => 1,
            ChannelError::Fifo { .. } => 2,
            ChannelError::Port { .. } => 3,
            ChannelError::Request { .. } => 4,
            ChannelError::Stopped { .. } => 5,
        }
    }
}

/// What a transport's call returns.
///
/// By who is at fault:
/// - **the caller**: `Busy`, `Closed`, `Memory`, `Overlap`, `Unknown`;
/// - **the peer**: `Malformed`, `Timeout`, `Remote`;
/// - **the device or the system**: `Device`;
/// - **the transport itself**: `Contract`, `Overreported`, `Panicked`.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// Memory that a port which is not quiesced has bound.
    #[error("the memory at {address:#x} is bound by {ports} ports that are not closed")]
    Busy {
        /// Where it begins.
        address: u64,
        /// How many ports.
        ports: usize,
    },
    /// The port is closed.
    #[error("the port is closed")]
    Closed,
    /// The port broke the port contract.
    #[error("the port broke its contract: {what} (lane {lane}, op {sequence})")]
    Contract {
        /// How.
        what: &'static str,
        /// On which lane.
        lane: u32,
        /// With which op.
        sequence: u64,
    },
    /// The device or the system refused.
    #[error("{operation} failed with status {status} (vendor code {vendor})")]
    Device {
        /// What was tried.
        operation: &'static str,
        /// The status or errno.
        status: i32,
        /// The vendor's code, 0 if there is none.
        vendor: u32,
        /// What it said beyond that.
        source: Option<Arc<dyn core::error::Error + Send + Sync>>,
    },
    /// Connection data that is truncated, foreign or of another version.
    #[error("{what}: expected {expected}, seen {seen}")]
    Malformed {
        /// Which data.
        what: &'static str,
        /// What it should have been.
        expected: String,
        /// What it was.
        seen: String,
    },
    /// The memory's error.
    #[error(transparent)]
    Memory(#[from] portway_fifo::Error),
    /// A binding whose source and destination share bytes.
    #[error("the source at {source_address:#x} and the destination at {destination_address:#x} share bytes")]
    Overlap {
        /// Where the source begins.
        source_address: u64,
        /// Where the destination begins.
        destination_address: u64,
    },
    /// The port reported more completions than it was given room for.
    #[error("the port reported {count} completions into room for {room}")]
    Overreported {
        /// How many it reported.
        count: usize,
        /// How many it was given room for.
        room: usize,
    },
    /// The port panicked; it is called again only to close it.
    #[error("{what} panicked: {message}")]
    Panicked {
        /// Who: the port, or, by our mistake, the engine.
        what: &'static str,
        /// What it said.
        message: String,
    },
    /// The peer, or the way to it, failed.
    #[error("{operation} to {peer} failed with status {status} (vendor code {vendor})")]
    Remote {
        /// Who.
        peer: String,
        /// What was tried.
        operation: &'static str,
        /// The status.
        status: i32,
        /// The vendor's code, 0 if there is none.
        vendor: u32,
    },
    /// A wait's time was over.
    #[error("waited {after:?} for {what} of {peer}")]
    Timeout {
        /// For what.
        what: &'static str,
        /// Of whom.
        peer: String,
        /// How long.
        after: Duration,
    },
    /// A memory that this transport does not know: another transport's, or released.
    #[error("{what} {index} is not known to this transport")]
    Unknown {
        /// What it was to be.
        what: &'static str,
        /// Its index.
        index: u32,
    },
}
