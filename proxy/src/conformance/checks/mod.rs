//! The checks, each a function: `#[test] fn no_call_blocks() { checks::no_call_blocks(&fixture).assert() }`.

mod calls;
mod completion;
mod memory;
mod ordering;

pub use calls::{
    a_closed_port_stays_closed, a_port_can_be_dropped, an_error_stays, full_leaves_no_trace, no_call_blocks,
    no_call_waits_for_the_peer,
};
pub use completion::{
    a_completed_flush_means_delivered, a_completed_put_has_left_its_source, every_op_completes_once,
    polls_alone_finish,
};
pub use memory::{
    bindings_are_counted_and_checked, bytes_from_a_peer_are_checked, imports_are_held_until_quiesced,
    memory_is_held_until_quiesced, nothing_is_written_once_quiesced,
};
pub use ordering::{
    nothing_else_is_written, random_ops, signals_arrive_as_written, signals_stay_behind_data,
    signals_stay_behind_long_puts,
};

use super::Check;

macro_rules! checks {
    ($($sentence:literal $name:ident: $claim:literal;)*) => {
        /// Every check, in the order of the contract's sentences; 0 is all of them together.
        pub const CHECKS: &[Check] =
            &[$(Check { name: stringify!($name), sentence: $sentence, claim: $claim, run: $name }),*];
    };
}

checks! {
    1 no_call_blocks: "no call blocks, whether the port is idle or full";
    1 no_call_waits_for_the_peer: "no call blocks for a peer that has gone";
    1 a_port_can_be_dropped: "dropping a port does not block, whatever is under way";
    2 full_leaves_no_trace: "nothing happens of a refused op, and offered again it is accepted in the end";
    3 signals_stay_behind_data: "whoever sees a signal sees the data of every earlier put of the lane";
    3 signals_stay_behind_long_puts: "the same for puts of 1 byte to 3 MiB at odd offsets";
    4 signals_arrive_as_written: "a signal word takes the values of the ops in order, all 64 bits of them";
    5 every_op_completes_once: "every accepted op completes once, however little room a poll has";
    6 a_completed_put_has_left_its_source: "a put's source may be reused when it completes";
    7 a_completed_flush_means_delivered: "nobody who sees a signal submitted after a flush completed misses the data";
    8 nothing_else_is_written: "not a byte changes but those of the puts and the signal words";
    8 nothing_is_written_once_quiesced: "not a byte changes after the port is quiesced";
    9 an_error_stays: "after an error every call returns it, on all lanes, and the port can be closed";
    9 a_closed_port_stays_closed: "a closed port answers every call with an error, and close with Quiesced";
    10 polls_alone_finish: "after a kick, polls are enough";
    11 bindings_are_counted_and_checked: "lanes count from 0, at any time; a refused binding changes nothing";
    12 memory_is_held_until_quiesced: "what a port has bound cannot be released before it is quiesced, and can then";
    12 imports_are_held_until_quiesced: "an import that a port has bound cannot be forgotten before it is quiesced, and can then";
    13 bytes_from_a_peer_are_checked: "cut or foreign bytes are refused as Malformed";
    0 random_ops: "all of it at once, both ways, in random order";
}
