#![doc = include_str!("../README.md")]

mod chain;
mod config;
mod device;
mod endpoint;
mod error;
mod gid;
mod keeper;
mod ledger;
mod memory;
mod message;
mod pair;
mod pieces;
mod port;
mod queues;
#[doc(hidden)]
pub mod sys;
mod topology;
mod transport;
mod verbs;

pub use config::{Config, Gpu};
pub use error::Error;
pub use transport::Ib;
pub use verbs::{Table, Verbs};
