//! The frames of clique's rendezvous, and what their file needs around it.

pub use portway_clique::rendezvous::{MAX_MESSAGE_BYTES, MAX_NAME_BYTES, MAX_PARTICIPANTS, Post};

/// Where the key comes from in its crate.
pub mod board {
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    pub(crate) struct Key {
        pub(crate) clique: String,
        pub(crate) attempt: u64,
        pub(crate) phase: String,
    }
}

#[path = "../../clique/src/rendezvous/wire.rs"]
#[allow(dead_code)]
pub mod wire;
