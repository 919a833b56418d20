//! The types of the verbs interface, as bindgen made them from `infiniband/verbs.h`.
//!
//! `ci/ib-bindings.sh` makes them again and compares. Layouts are asserted at compile time, in the file itself.

#[allow(
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    non_snake_case,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::missing_safety_doc,
    clippy::multiple_unsafe_ops_per_block,
    unsafe_op_in_unsafe_fn,
    reason = "generated"
)]
#[rustfmt::skip]
mod bindings;

pub use bindings::*;
