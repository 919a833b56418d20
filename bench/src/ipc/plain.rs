//! The references: the driver's own calls, by threads of the host, without the transport.

mod copies;
mod floor;

pub use copies::{Plain, Way};
pub use floor::floor;
