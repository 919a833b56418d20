//! The port channel's device header as text, for NVRTC; it includes those of [`portway_fifo::header`]. For nvcc, add this
//! crate's `device` folder and the fifo crate's to the include path.

/// `portway/port_channel.cuh`.
pub const PORT_CHANNEL: &str = include_str!("../device/portway/port_channel.cuh");

/// The header with the name by which `#include` asks for it.
pub const ALL: [(&str, &str); 1] = [("portway/port_channel.cuh", PORT_CHANNEL)];
