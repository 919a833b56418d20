#![doc = include_str!("../README.md")]

mod channel;
#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(feature = "cuda")]
mod cuda;
mod engine;
mod error;
mod flusher;
pub mod header;
pub mod loopback;
mod producer;
mod report;
mod request;
mod runner;
mod stats;
mod thread;
mod trace;
pub mod transport;
mod window;

pub use channel::{CHANNEL_VERSION, PortChannel, PortChannelHandle};
#[cfg(feature = "cuda")]
pub use cuda::CudaFlushStream;
pub use engine::{ChannelConfig, Config, Engine, FifoId, PortId, Step};
pub use error::{ChannelError, Error, TransportError};
pub use flusher::FlushStream;
pub use loopback::Loopback;
pub use producer::{ChannelProducer, MAX_PUT_BYTES};
pub use report::{ChannelSnapshot, FifoSnapshot, REPORT_WAIT, Snapshot, UnderWay};
pub use request::{MAX_CHANNELS, MAX_REGION_BYTES, MAX_SIZE, OpSet, Request, RequestFault};
pub use runner::{Proxy, Report, RunConfig, STOP_GRACE, Stop};
pub use stats::{FlusherStats, Stats};
pub use thread::Idle;
pub use transport::{Endpoint, Port, Transport};
