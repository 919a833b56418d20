//! The errors: [`Error`] of a call, [`ChannelError`] of a channel that has ended, [`TransportError`] of a transport.

use core::time::Duration;
use std::sync::Arc;

use portway_fifo::Position;

use crate::request::{Request, RequestFault};
use crate::transport::{Lane, Op, Put};

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
    #[error("{what} {index} belongs to another engine: name one that this engine's own calls have returned")]
    Foreign {
        /// FIFO or port.
        what: &'static str,
        /// Its index in the engine that it belongs to.
        index: usize,
    },
    /// What only one may have at a time.
    #[error("{what} {index} is in use by {by}: {remedy}")]
    InUse {
        /// What it is.
        what: &'static str,
        /// Its index in the engine, or, for a memory, in its transport.
        index: usize,
        /// Who has it.
        by: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The engine has no room for more.
    #[error("the engine has {limit} {what}, as many as it can: {remedy}")]
    Limit {
        /// Of what.
        what: &'static str,
        /// How many it was made for.
        limit: usize,
        /// What to do.
        remedy: &'static str,
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
    #[error(
        "the engine's thread did not answer within {after:?}: it is inside a call of a port, as `Proxy::report` shows; \
         `Proxy::stop` ends every wait and names it"
    )]
    Unresponsive {
        /// How long the call waited.
        after: Duration,
    },
}

/// Why a channel has ended. Every device wait of the channel returns its [`code`](Self::code). It has ended for good:
/// work goes on over a new channel.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The oldest op did not complete in time. Puts of the channel have unknown outcome and may still land until the
    /// transport is quiesced.
    #[error(
        "channel {channel} of FIFO {fifo}: the op at position {position} is not complete after {after:?} (sent to the \
         port: {sent}); close the port: until it is quiesced, later puts may still land and memory stays bound"
    )]
    Deadline {
        /// The index of its FIFO in the engine.
        fifo: usize,
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
    #[error("channel {channel} of FIFO {fifo}: {source}")]
    Fifo {
        /// The index of its FIFO in the engine.
        fifo: usize,
        /// The channel.
        channel: u16,
        /// The FIFO's own error.
        source: portway_fifo::Error,
    },
    /// The port failed, and all its channels with it.
    #[error("channel {channel} of FIFO {fifo}: {source}")]
    Port {
        /// The index of its FIFO in the engine.
        fifo: usize,
        /// The channel.
        channel: u16,
        /// The port's error.
        source: TransportError,
    },
    /// The device asked for something that makes no sense.
    #[error(
        "channel {channel} of FIFO {fifo}: the trigger at position {position} is refused, {fault}: {request:?}; compare \
         it with the memories that the channel is bound to"
    )]
    Request {
        /// The index of its FIFO in the engine.
        fifo: usize,
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
    #[error("channel {channel} of FIFO {fifo}: the proxy has stopped")]
    Stopped {
        /// The index of its FIFO in the engine.
        fifo: usize,
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
/// - **the caller**: `Busy`, `Closed`, `Lane`, `Memory`, `Outside`, `Overlap`, `Unknown`;
/// - **the peer**: `Malformed`, `Timeout`, `Remote`;
/// - **the device or the system**: `Device`;
/// - **the transport itself**: `Contract`, `Overreported`, `Panicked`.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// Memory that a port which is not quiesced has bound.
    #[error(
        "the memory at {address:#x} is bound by {ports} ports that are not quiesced: close them, and try again"
    )]
    Busy {
        /// Where it begins.
        address: u64,
        /// How many ports.
        ports: usize,
    },
    /// The port is closed.
    #[error("the port is closed: connect another")]
    Closed,
    /// The port broke the port contract.
    #[error(
        "the port broke its contract: {what} (lane {lane}, op {sequence}): hold its transport to the conformance suite"
    )]
    Contract {
        /// How.
        what: &'static str,
        /// On which lane.
        lane: u32,
        /// With which op.
        sequence: u64,
    },
    /// The device or the system refused.
    #[error("{operation} failed{}{}", numbers(*.status, *.vendor), because(.source))]
    Device {
        /// What was tried.
        operation: &'static str,
        /// The status or errno, 0 if there is none.
        status: i32,
        /// The vendor's code, 0 if there is none.
        vendor: u32,
        /// What it said beyond that.
        source: Option<Arc<dyn core::error::Error + Send + Sync>>,
    },
    /// An op of a lane that the port has not bound.
    #[error(
        "op {sequence} is of lane {lane}, and the port has bound {lanes}: a lane's number comes from `Port::bind`"
    )]
    Lane {
        /// The lane.
        lane: u32,
        /// The op's number.
        sequence: u64,
        /// How many there are.
        lanes: usize,
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
    /// A put of no bytes, or one that leaves the memory that the port knows.
    #[error(
        "op {sequence} of lane {lane}: {len_bytes} bytes at offset {offset_bytes} of the {what}: must be 1 byte or more \
         and end within its {limit_bytes} bytes"
    )]
    Outside {
        /// The lane.
        lane: u32,
        /// The op's number.
        sequence: u64,
        /// Source or destination.
        what: &'static str,
        /// Where the put begins in it.
        offset_bytes: u64,
        /// How much it moves.
        len_bytes: u64,
        /// How long the memory is.
        limit_bytes: u64,
    },
    /// A binding whose source and destination share bytes.
    #[error(
        "the source at {source_address:#x} and the destination at {destination_address:#x} share bytes: bind memories that do not"
    )]
    Overlap {
        /// Where the source begins.
        source_address: u64,
        /// Where the destination begins.
        destination_address: u64,
    },
    /// The port reported more completions than it was given room for.
    #[error(
        "the port reported {count} completions into room for {room}: hold its transport to the conformance suite"
    )]
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
    #[error(
        "{operation} to {peer} failed{}: see what the peer says, and the way to it; go on over a new port",
        numbers(*.status, *.vendor)
    )]
    Remote {
        /// Who.
        peer: String,
        /// What was tried.
        operation: &'static str,
        /// The status, 0 if there is none.
        status: i32,
        /// The vendor's code, 0 if there is none.
        vendor: u32,
    },
    /// A wait's time was over.
    #[error(
        "waited {after:?} for {what} of {peer}: see whether it still runs and can be reached; wait longer if it is slow"
    )]
    Timeout {
        /// For what.
        what: &'static str,
        /// Of whom.
        peer: String,
        /// How long.
        after: Duration,
    },
    /// A memory that this transport does not know: another transport's, or released.
    #[error("{what} {index} is not known to this transport: it is another's, was released, or was forgotten")]
    Unknown {
        /// What it was to be.
        what: &'static str,
        /// Its index.
        index: u32,
    },
}

/// The numbers that there are: 0 is none.
fn numbers(status: i32, vendor: u32) -> String {
    match (status, vendor) {
        (0, 0) => String::new(),
        (_, 0) => format!(" with status {status}"),
        (0, _) => format!(" with vendor code {vendor}"),
        _ => format!(" with status {status} (vendor code {vendor})"),
    }
}

fn because(source: &Option<Arc<dyn core::error::Error + Send + Sync>>) -> String {
    source.as_ref().map(|source| format!(": {source}")).unwrap_or_default()
}

impl TransportError {
    /// The error of an op that a port of so many lanes must not carry out; `lens_bytes` are the lengths of the source and
    /// the destination of a lane. For ports: the engine goes by lengths that anybody can write down.
    #[inline]
    pub fn of_op(op: &Op, lanes: usize, lens_bytes: impl Fn(Lane) -> [u64; 2]) -> Option<TransportError> {
        let is_bound = (op.lane.0 as usize) < lanes;
        let holds = |put: Put| leaves(put, lens_bytes(op.lane)).is_none();
        if is_bound && op.put.is_none_or(holds) {
            return None;
        }
        let lens_bytes = if is_bound { lens_bytes(op.lane) } else { [0; 2] };
        Some(Self::refused(op, (is_bound, lanes), lens_bytes))
    }

    #[cold]
    fn refused(op: &Op, (is_bound, lanes): (bool, usize), lens_bytes: [u64; 2]) -> TransportError {
        let (lane, sequence) = (op.lane.0, op.sequence);
        match op.put.and_then(|put| Some((put, leaves(put, lens_bytes)?))) {
            Some((Put { len_bytes, .. }, (what, offset_bytes, limit_bytes))) if is_bound => {
                TransportError::Outside { lane, sequence, what, offset_bytes, len_bytes, limit_bytes }
            }
            _ => TransportError::Lane { lane, sequence, lanes },
        }
    }
}

/// The memory that a put leaves, its offset there, and that memory's length.
#[inline]
fn leaves(put: Put, lens_bytes: [u64; 2]) -> Option<(&'static str, u64, u64)> {
    let outside = |offset_bytes: u64, limit_bytes: u64| {
        put.len_bytes == 0 || put.len_bytes > limit_bytes || offset_bytes > limit_bytes - put.len_bytes
    };
    let [source, destination] = lens_bytes;
    if outside(put.source_offset_bytes, source) {
        Some(("source", put.source_offset_bytes, source))
    } else if outside(put.destination_offset_bytes, destination) {
        Some(("destination", put.destination_offset_bytes, destination))
    } else {
        None
    }
}
