#![doc = include_str!("../README.md")]

pub mod backend;
mod error;
pub mod rendezvous;

pub use error::CliqueError;
