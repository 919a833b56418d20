#![doc = include_str!("../README.md")]

mod config;
mod endpoint;
mod error;
mod executor;
mod identity;
mod import;
mod link;
mod memory;
mod message;
mod port;
mod server;
mod socket;
mod track;
mod transport;
mod word;

pub use config::{Config, Way, WordPlace};
pub use error::{Cause, Error, StalledIn};
pub use import::Description;
pub use transport::{Ipc, Quarantined};
