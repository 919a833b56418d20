//! A transport between two processes of one user over POSIX shared memory.
//!
//! The memory of each end is a shared memory object, and the other end maps it. So a put is a copy by the processor that
//! polls the port, and a signal behind it is a store with release: what keeps signals behind data in this fabric is the
//! coherence of the processor's memory.
//!
//! A peer is trusted as far as the system trusts a process of the same user. One that shrinks an object while it is
//! mapped ends the other process with a bus error; descriptors with seals would prevent that.

mod memory;
mod message;
mod port;
mod transport;

pub use transport::Shm;
