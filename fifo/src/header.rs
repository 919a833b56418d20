//! The device headers as text, for NVRTC. For nvcc, add the crate's `device` folder to the include path; a build
//! script of a dependant finds it in the variable `DEP_PORTWAY_INCLUDE`.

/// `portway/platform.cuh`: atomics, clock and lanes of the three compilers.
pub const PLATFORM: &str = include_str!("../device/portway/platform.cuh");

/// `portway/fifo.cuh`: push, sync and the elected wait.
pub const FIFO: &str = include_str!("../device/portway/fifo.cuh");

/// The headers with the names by which `#include` asks for them.
pub const ALL: [(&str, &str); 2] = [("portway/platform.cuh", PLATFORM), ("portway/fifo.cuh", FIFO)];
