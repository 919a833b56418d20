//! What the tests share: an RDMA network in software, behind a verbs table filled with our own functions.
#![allow(dead_code, reason = "each test uses its part")]

pub mod fabric;
pub mod gpu;
pub mod link;
mod queues;
mod table;
