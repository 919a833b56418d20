#![doc = include_str!("../README.md")]

mod error;
pub mod rendezvous;

pub use error::CliqueError;
