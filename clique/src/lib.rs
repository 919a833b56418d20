#![doc = include_str!("../README.md")]

pub mod backend;
mod barrier;
mod bring_up;
mod bytes;
mod clique;
mod closing;
mod custody;
mod environment;
mod error;
mod failure;
mod first_use;
mod group;
mod id;
mod joint;
pub mod launch;
mod life;
mod member;
mod message;
#[cfg(all(loom, test))]
mod model;
#[cfg(feature = "cuda")]
pub mod nccl;
mod owner;
pub mod rendezvous;
mod report;
mod rounds;
pub mod software;
mod split;
pub mod state;
mod sync;
mod team;
mod text;
mod uses;
mod verify;
mod watcher;

pub use barrier::Barrier;
pub use bring_up::{CliqueBuilder, MAX_NAME_BYTES};
pub use clique::Clique;
pub use custody::Quarantine;
pub use error::CliqueError;
pub use failure::Failure;
pub use member::{Buffers, Member};
pub use report::{Closed, Durations};
pub use uses::{FirstUse, Use};
pub use verify::{Difference, Disagreement};
