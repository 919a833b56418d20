//! Models of the protocol, for loom.
