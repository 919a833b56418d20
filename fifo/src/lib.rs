#![doc = include_str!("../README.md")]

mod consumer;
#[cfg(all(feature = "cuda", not(loom)))]
pub mod cuda;
mod error;
mod fifo;
#[cfg(not(loom))]
pub mod header;
pub mod layout;
pub mod memory;
#[cfg(all(loom, test))]
mod model;
mod producer;
mod sync;
mod trigger;
mod watch;

pub use consumer::Consumer;
pub use error::{Cause, Error};
pub use fifo::{Config, Fifo, MAX_SLOTS, MAX_TIMEOUT, MIN_SLOTS};
pub use layout::{FifoHandle, HANDLE_VERSION, WatchHandle};
pub use memory::{Heap, Memory, Place, Platform, Region, Words};
pub use producer::Producer;
pub use trigger::{Position, Trigger};
pub use watch::Watch;
