//! What a clique needs of a communicator library: [`Backend`], with [`Workspace`] for the device's side.
//!
//! NCCL's shape, with NCCL's numbers: communicators are non-blocking, so calls may return [`Status::IN_PROGRESS`], and
//! then only [`state`](Backend::state) and [`abort`](Backend::abort) may be called on them until that is over.
//!
//! # For those who implement it
//! - No call waits for another rank; what has to wait answers [`Status::IN_PROGRESS`]. If a library breaks this, a clique
//!   still ends at its deadline, but the thread that called is lost.
//! - All calls on a communicator come from one thread, the owner, but [`abort`](Backend::abort), which comes from another
//!   thread, at times while the owner is inside a call on it.
//! - Calls may come from any thread: who needs a current device or context sets it in each call.

use core::fmt::{self, Debug, Display};

/// How many bytes a unique id has.
pub const ID_BYTES: usize = 128;

/// A status of the library, as the integer that it returned: no status is unknown to this type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Status(pub i32);

impl Status {
    /// It is done.
    pub const SUCCESS: Status = Status(0);
    /// The device's runtime failed.
    pub const UNHANDLED_CUDA_ERROR: Status = Status(1);
    /// The operating system failed.
    pub const SYSTEM_ERROR: Status = Status(2);
    /// The library failed.
    pub const INTERNAL_ERROR: Status = Status(3);
    /// An argument makes no sense.
    pub const INVALID_ARGUMENT: Status = Status(4);
    /// The call makes no sense now.
    pub const INVALID_USAGE: Status = Status(5);
    /// A peer failed, or the way to it.
    pub const REMOTE_ERROR: Status = Status(6);
    /// It goes on in the background.
    pub const IN_PROGRESS: Status = Status(7);
    /// The library's own time was over.
    pub const TIMEOUT: Status = Status(8);

    /// Neither done nor in progress.
    pub fn is_error(self) -> bool {
        self != Status::SUCCESS && self != Status::IN_PROGRESS
    }
}

impl Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match *self {
            Status::SUCCESS => "success",
            Status::UNHANDLED_CUDA_ERROR => "unhandled CUDA error",
            Status::SYSTEM_ERROR => "system error",
            Status::INTERNAL_ERROR => "internal error",
            Status::INVALID_ARGUMENT => "invalid argument",
            Status::INVALID_USAGE => "invalid usage",
            Status::REMOTE_ERROR => "remote error",
            Status::IN_PROGRESS => "in progress",
            Status::TIMEOUT => "timeout",
            Status(_) => "unknown status",
        };
        write!(f, "{name} ({})", self.0)
    }
}

/// Why a call of the library did not do what it should.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// The library has no such function: it is older than the function, or younger.
    #[error("{call} is not in this {library}")]
    NotInLibrary {
        /// The function.
        call: &'static str,
        /// The library, with its version: "NCCL 2.27.7".
        library: String,
    },
    /// The library refused.
    #[error("{call}: {status}: {message}")]
    Status {
        /// The function.
        call: &'static str,
        /// What it returned.
        status: Status,
        /// What the library says about it.
        message: String,
    },
    /// The device, its driver, or its memory refused.
    #[error("{call} on device {device}: {message}")]
    Device {
        /// What was tried.
        call: &'static str,
        /// On which device.
        device: u32,
        /// What was said.
        message: String,
    },
    /// The library cannot be used at all.
    #[error("{library} cannot be used: {message}")]
    Unavailable {
        /// Its name.
        library: String,
        /// Why.
        message: String,
    },
}

/// A communicator of the library: `ncclComm_t`, as an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawComm(pub usize);

impl RawComm {
    /// No communicator.
    pub const NULL: RawComm = RawComm(0);
}

/// A stream of a device: `CUstream`, as an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawStream(pub usize);

/// What a library that is loaded can do beyond the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Initialisation takes several unique ids.
    pub several_ids: bool,
    /// [`Backend::shrink`].
    pub shrink: bool,
    /// [`Backend::revoke`].
    pub revoke: bool,
}

/// What an environment variable means to a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variable {
    /// Nothing, or it may differ between participants.
    Ignored,
    /// Every participant must have the same value.
    Compared,
    /// It names what this host has, such as an interface, so hosts differ in it. It is not compared; failures tell who has
    /// which value.
    Hardware,
    /// With this value no clique can come up in time; the words say what it has to be.
    Refused(&'static str),
}

/// How communicators are made; each participant must say the same. `None` leaves a choice to the library.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommConfig {
    /// The least number of thread blocks that a kernel takes.
    pub min_ctas: Option<u32>,
    /// The largest.
    pub max_ctas: Option<u32>,
    /// The size of a thread block cluster.
    pub cga_cluster_size: Option<u32>,
    /// The network plugin's name.
    pub net_name: Option<String>,
    /// Children of a split share resources with their parent.
    pub split_share: Option<bool>,
}

/// One rank of a group that is initialised together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalRank {
    /// Its rank.
    pub rank: u32,
    /// The device, as this process counts them.
    pub device: u32,
}

/// What a communicator says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// How many ranks it has.
    pub size: u32,
    /// Which one this is.
    pub rank: u32,
    /// The device, as this process counts them.
    pub device: u32,
}

/// The type of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(i32)]
pub enum DataType {
    /// 8 bits, signed.
    I8 = 0,
    /// 8 bits.
    U8 = 1,
    /// 32 bits, signed.
    I32 = 2,
    /// 32 bits.
    U32 = 3,
    /// 64 bits, signed.
    I64 = 4,
    /// 64 bits.
    U64 = 5,
    /// Half precision.
    F16 = 6,
    /// Single precision.
    F32 = 7,
    /// Double precision.
    F64 = 8,
    /// bfloat16.
    BF16 = 9,
}

impl DataType {
    /// All of them, by number.
    pub const ALL: [DataType; 10] = [
        DataType::I8,
        DataType::U8,
        DataType::I32,
        DataType::U32,
        DataType::I64,
        DataType::U64,
        DataType::F16,
        DataType::F32,
        DataType::F64,
        DataType::BF16,
    ];

    /// The size of an element in bytes.
    pub fn size_bytes(self) -> usize {
        match self {
            DataType::I8 | DataType::U8 => 1,
            DataType::F16 | DataType::BF16 => 2,
            DataType::I32 | DataType::U32 | DataType::F32 => 4,
            DataType::I64 | DataType::U64 | DataType::F64 => 8,
        }
    }
}

/// How an all-reduce combines elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(i32)]
pub enum ReduceOp {
    /// The sum.
    Sum = 0,
    /// The product.
    Prod = 1,
    /// The largest.
    Max = 2,
    /// The smallest.
    Min = 3,
}

impl ReduceOp {
    /// All of them, by number.
    pub const ALL: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min];
}

/// An operation of one rank. Addresses are the device's; counts are elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Every rank gets the combination of all.
    AllReduce {
        /// `count` elements to read.
        send: u64,
        /// `count` elements to write.
        recv: u64,
        /// How many.
        count: usize,
        /// Of which type.
        data_type: DataType,
        /// Combined how.
        op: ReduceOp,
    },
    /// Every rank gets what all have, in the order of the ranks.
    AllGather {
        /// `count` elements to read.
        send: u64,
        /// `count` times the communicator's size elements to write.
        recv: u64,
        /// How many a rank.
        count: usize,
        /// Of which type.
        data_type: DataType,
    },
    /// To one peer.
    Send {
        /// `count` elements to read.
        send: u64,
        /// How many.
        count: usize,
        /// Of which type.
        data_type: DataType,
        /// The peer's rank.
        peer: u32,
    },
    /// From one peer.
    Recv {
        /// `count` elements to write.
        recv: u64,
        /// How many.
        count: usize,
        /// Of which type.
        data_type: DataType,
        /// The peer's rank.
        peer: u32,
    },
}

/// An operation, for a communicator, in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Enqueue {
    /// Whose operation.
    pub comm: RawComm,
    /// What to do.
    pub operation: Operation,
    /// In which stream of the communicator's device.
    pub stream: RawStream,
}

/// What one rank says in a split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitCall {
    /// The parent.
    pub parent: RawComm,
    /// Ranks of one colour make a child together; `None` makes none.
    pub color: Option<u32>,
    /// Orders the ranks of the child.
    pub key: i32,
}

/// A communicator library.
///
/// The calls on communicators return the library's [`Status`]; [`explain`](Self::explain) has its words.
pub trait Backend: Debug + Send + Sync + 'static {
    /// The library's name and version for messages: "NCCL 2.27.7".
    fn name(&self) -> String;

    /// Its version as the library counts: 22707.
    ///
    /// # Errors
    /// The library cannot be used.
    fn version(&self) -> Result<u32, BackendError>;

    /// What it can.
    fn capabilities(&self) -> Capabilities;

    /// What an environment variable of this process means to it.
    fn variable(&self, name: &str, value: &str) -> Variable;

    /// The device's UUID, of its slice if it is one: what tells that two numbers in two processes mean one device.
    ///
    /// # Errors
    /// There is no such device.
    fn device_uuid(&self, device: u32) -> Result<String, BackendError>;

    /// A fresh unique id. What it starts for its sake ends with the communicator or with the process.
    ///
    /// # Errors
    /// The library's own.
    fn unique_id(&self) -> Result<[u8; ID_BYTES], BackendError>;

    /// Begins to initialise the local ranks as one group, non-blocking. Writes a communicator for each rank, in their
    /// order, or [`RawComm::NULL`] where it made none, also when it fails: every other one has to be aborted then.
    ///
    /// # Safety
    /// - `comms` is as long as `locals`.
    /// - `ids` come from [`unique_id`](Self::unique_id) of this library in some participant, and are used in no other
    ///   group of ranks. There is one of them, unless the library can take [several](Capabilities::several_ids).
    unsafe fn init(
        &self,
        size: u32,
        ids: &[[u8; ID_BYTES]],
        config: &CommConfig,
        locals: &[LocalRank],
        comms: &mut [RawComm],
    ) -> Status;

    /// The state of a communicator: [`Status::IN_PROGRESS`], [`Status::SUCCESS`], or what has gone wrong with it.
    ///
    /// # Safety
    /// `comm` was made by this library and is neither destroyed nor aborted.
    unsafe fn state(&self, comm: RawComm) -> Status;

    /// The library's own handle, an `ncclComm_t`, of a communicator that is not in progress: for callers who bring their
    /// own calls. It may differ from `comm` where the library tells the handle only later, as NCCL does for children.
    fn handle(&self, comm: RawComm) -> RawComm {
        comm
    }

    /// What a communicator that is not in progress says of itself.
    ///
    /// # Errors
    /// The library's own.
    ///
    /// # Safety
    /// As [`state`](Self::state).
    unsafe fn shape(&self, comm: RawComm) -> Result<Shape, BackendError>;

    /// Puts operations into their streams, as one group. If the answer is that it is in progress, so is each
    /// communicator named.
    ///
    /// # Safety
    /// - As [`state`](Self::state), for each communicator, and none is in progress.
    /// - Each stream and all memory named stay usable by the device until the stream has done the operation.
    unsafe fn enqueue(&self, calls: &[Enqueue]) -> Status;

    /// Begins to split communicators, as one group. Writes a child for each, in their order, or [`RawComm::NULL`].
    ///
    /// # Safety
    /// - As [`state`](Self::state), for each parent, and none is in progress.
    /// - `children` is as long as `calls`.
    unsafe fn split(&self, calls: &[SplitCall], children: &mut [RawComm]) -> Status;

    /// Begins to make children without some ranks, as one group. Nothing of the excluded is needed for it.
    ///
    /// # Errors
    /// [`BackendError::NotInLibrary`].
    ///
    /// # Safety
    /// - As [`split`](Self::split).
    /// - Every rank that is not excluded calls it with the same `excluded`, and no excluded one does.
    unsafe fn shrink(
        &self,
        parents: &[RawComm],
        excluded: &[u32],
        children: &mut [RawComm],
    ) -> Result<Status, BackendError>;

    /// Stops what is under way in a communicator, which stays usable for [`shrink`](Self::shrink) and the ends.
    ///
    /// # Errors
    /// [`BackendError::NotInLibrary`].
    ///
    /// # Safety
    /// As [`state`](Self::state).
    unsafe fn revoke(&self, comm: RawComm) -> Result<Status, BackendError>;

    /// Begins to complete what is under way in communicators, as one group.
    ///
    /// # Safety
    /// As [`state`](Self::state), for each.
    unsafe fn finalize(&self, comms: &[RawComm]) -> Status;

    /// Frees a communicator that is finalized.
    ///
    /// # Safety
    /// As [`state`](Self::state). It is gone after that, whatever the status.
    unsafe fn destroy(&self, comm: RawComm) -> Status;

    /// Ends and frees a communicator, whatever it does. May block.
    ///
    /// # Safety
    /// - As [`state`](Self::state). It is gone after that, whatever the status.
    /// - No other call on it begins from now on. One may be under way.
    unsafe fn abort(&self, comm: RawComm) -> Status;

    /// The library's words for a status, and for the last error of a communicator.
    ///
    /// # Safety
    /// As [`state`](Self::state), if there is a `comm`.
    unsafe fn explain(&self, status: Status, comm: Option<RawComm>) -> String;

    /// Allocates a stream and two buffers, each of `len_bytes`, on a device. May block in the driver.
    ///
    /// # Errors
    /// The device's.
    fn workspace(&self, device: u32, len_bytes: usize) -> Result<Box<dyn Workspace>, BackendError>;
}

/// A stream of a device with a buffer to send from and one to receive into. No call but those that make and drop it may
/// block in the driver for work of others.
///
/// It can be dropped while its stream still uses the buffers: the memory outlives the work.
pub trait Workspace: Debug + Send {
    /// The stream.
    fn stream(&self) -> RawStream;

    /// Where the buffer to send from lies.
    fn send_address(&self) -> u64;

    /// Where the buffer to receive into lies.
    fn recv_address(&self) -> u64;

    /// How long each buffer is.
    fn len_bytes(&self) -> usize;

    /// Writes the head of the send buffer, and fills the receive buffer with 0xff. The stream is idle.
    ///
    /// # Errors
    /// The device's; more bytes than there are.
    fn write(&mut self, bytes: &[u8]) -> Result<(), BackendError>;

    /// Reads the head of the receive buffer. The stream is idle.
    ///
    /// # Errors
    /// The device's; more bytes than there are.
    fn read(&mut self, bytes: &mut [u8]) -> Result<(), BackendError>;

    /// Whether the stream has done all that was put into it. Does not wait.
    ///
    /// # Errors
    /// The device's, also those of the work itself.
    fn is_idle(&mut self) -> Result<bool, BackendError>;
}
