//! The CUDA driver: devices, memory that they share with the processor and with peers, streams, and kernels.
//!
//! This is the only place of the whole project that calls the driver. The library is opened when [`Driver::load`] is
//! called; nothing is linked and nothing is global.
//!
//! ```no_run
//! use portway_fifo::cuda::{Context, Driver};
//! use portway_fifo::{Config, Fifo};
//!
//! let context = Context::new(&Driver::load()?, 0)?;
//! for warning in context.warnings() {
//!     eprintln!("{warning} {}", warning.remedy());
//! }
//! let (fifo, consumer) = Fifo::new(&context, Config::default())?;
//! let handle = fifo.handle(); // pass it to a kernel, by value
//! # Ok::<(), portway_fifo::Error>(())
//! ```
//!
//! # What may block
//!
//! Any call into the driver can block while a kernel runs, so none of them belongs on a path that a running kernel
//! waits for. In particular freeing memory waits for the device, and a kernel that waits for the thread that frees
//! would wait for ever. Therefore:
//!
//! - **Dropping never calls the driver.** What is dropped (memory, streams, modules) goes into the *quarantine* of its
//!   context: it stays mapped and usable by kernels, and [`Context::quarantined`] counts it.
//! - **[`Context::reclaim`] frees what is in quarantine**, after waiting for the device, for as long as that takes.
//!   Call it where nothing waits for you. [`Context::close`] does it last of all.
//! - Waits of our own, [`Stream::wait`] and reads and writes of device memory, have a deadline.
//!
//! # Threads
//!
//! Everything here may be used from any thread. A thread needs no current context: each call makes the right one
//! current and restores what was, and the thread's stream capture mode, so a capture elsewhere is not disturbed.

//!
//! # Beside other CUDA libraries
//!
//! Contexts, streams and memory of other libraries are taken as raw handles, each with a value that keeps it alive. Of
//! the crate `cudarc`, for example, that is the very `Arc` that it hands out:
//!
//! ```text
//! let context = unsafe { Context::from_raw(&driver, theirs.cu_ctx().cast(), theirs.clone()) }?;
//! let stream = unsafe { Stream::from_raw(&context, stream.cu_stream().cast(), stream.clone()) };
//! let region = unsafe { context.import_raw(address, len_bytes, Arc::new(slice)) }?;
//! ```

mod attributes;
mod context;
mod copier;
mod driver;
mod import;
mod memory;
mod module;
pub mod nvrtc;
mod peer;
mod quarantine;
mod stream;
mod table;
mod vmm;

pub use attributes::{Attributes, Warning, WriteOrdering};
pub use context::{Context, Current};
pub use driver::Driver;
pub use memory::Kind;
pub use module::{Function, Module};
pub use quarantine::Quarantined;
pub use stream::{Entered, Stream};
