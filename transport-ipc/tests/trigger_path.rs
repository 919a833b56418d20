//! What the engine calls for each trigger allocates nothing, calls no driver and makes no system call. A process of its own,
//! since it has its own allocator; and once more under strace, where that is installed.

#[path = "../../fifo/tests/libcuda/mod.rs"]
mod libcuda;
#[path = "support/wire.rs"]
mod wire;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write;
use std::process::Command;

use portway_proxy::transport::{Completion, Lane, Op, Port, Put, Submit};
use portway_transport_ipc::Config;
use wire::Machine;

/// Counts the allocations of a thread while it is told to.
struct Counting;

thread_local! {
    static COUNTED: Cell<Option<u64>> = const { Cell::new(None) };
}

// SAFETY: every call goes to the system's allocator with the arguments it came with.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNTED.with(|counted| counted.set(counted.get().map(|count| count + 1)));
        // SAFETY: the caller vouches for what the system's allocator asks of it.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        COUNTED.with(|counted| counted.set(counted.get().map(|count| count + 1)));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How often `body` allocates or frees.
fn allocations(body: impl FnOnce()) -> u64 {
    COUNTED.set(Some(0));
    body();
    COUNTED.replace(None).unwrap()
}

const OPS: u64 = 20_000;

/// Puts with signals, bare signals and flushes, as fast as the port takes them, until all are complete.
fn drive(port: &mut dyn Port, lane: Lane, first: u64, ops: u64) {
    let none = Completion { lane, sequence: u64::MAX };
    let (mut completions, mut sequence, mut complete) = ([none; 16], first, first);
    while complete < first + ops {
        for _ in 0..8 {
            let put = Put { source_offset_bytes: 0, destination_offset_bytes: 0, len_bytes: 64 };
            let put = (sequence % 3 == 0).then_some(put);
            let op = Op { lane, sequence, put, signal: Some(sequence + 1), flush: sequence % 7 == 0 };
            if sequence < first + ops && port.submit(&op).unwrap() == Submit::Accepted {
                sequence += 1;
            }
        }
        port.kick().unwrap();
        complete += port.poll(&mut completions).unwrap() as u64;
        std::hint::spin_loop();
    }
}

#[test]
fn the_trigger_path_allocates_nothing_and_calls_no_driver() {
    let machine = Machine::new();
    let transports = machine.transports(Config::default());
    let mut wire = machine.wire(&transports);
    let (lane, thread) = (wire.lane, libcuda::thread_id());
    drive(&mut *wire.a, lane, 0, 100);
    let calls = machine.standin.calls_by(thread);
    let others = machine.standin.all_calls();
    let allocated = allocations(|| drive(&mut *wire.a, lane, 100, OPS));
    assert_eq!((allocated, machine.standin.calls_by(thread) - calls), (0, 0));
    // Control: the copies were made, by another thread, and both counts count.
    assert!(machine.standin.all_calls() > others);
    assert!(allocations(|| drop(std::hint::black_box(Box::new(1)))) > 0);
    wire.source.region.write(0, &[1]).unwrap();
    assert!(machine.standin.calls_by(thread) > calls);
}

const BEGIN: &str = "the steady state begins";
const END: &str = "the steady state ends";

/// Tells the program that strace runs what it is to do.
const TRACED: &str = "PORTWAY_IPC_TRACED";

/// As a system call that can be found in the trace.
fn mark(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

fn traced(control: bool) {
    let machine = Machine::new();
    let transports = machine.transports(Config::default());
    let mut wire = machine.wire(&transports);
    let lane = wire.lane;
    drive(&mut *wire.a, lane, 0, 100);
    mark(BEGIN);
    drive(&mut *wire.a, lane, 100, 2_000);
    if control {
        std::thread::yield_now();
    }
    mark(END);
}

/// The system calls that the marking thread makes between its marks.
fn between_marks(control: bool) -> Option<Vec<String>> {
    let trace = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("trace-{}-{control}", std::process::id()));
    let status = Command::new("strace")
        .args(["-f", "-o"])
        .arg(&trace)
        .arg(std::env::current_exe().ok()?)
        .args(["--exact", "the_trigger_path_makes_no_system_call", "--nocapture"])
        .env(TRACED, u8::from(control).to_string())
        .output()
        .ok()?;
    let text = std::fs::read_to_string(&trace).ok()?;
    let _ = std::fs::remove_file(&trace);
    assert!(status.status.success(), "{status:?}");
    let marker = text.lines().find(|line| line.contains(BEGIN))?.split_whitespace().next()?.to_owned();
    let own = text.lines().filter(|line| line.split_whitespace().next() == Some(&marker));
    let after = own.skip_while(|line| !line.contains(BEGIN)).skip(1);
    // The rest of the mark's own line, where another thread's came between.
    let after = after.filter(|line| !line.contains("<... write resumed>"));
    Some(after.take_while(|line| !line.contains(END)).map(str::to_owned).collect())
}

#[test]
fn the_trigger_path_makes_no_system_call() {
    if let Ok(control) = std::env::var(TRACED) {
        return traced(control == "1");
    }
    let (Some(calls), Some(control)) = (between_marks(false), between_marks(true)) else {
        let lacking = "strace is not installed, or may not trace here";
        let _ = writeln!(std::io::stderr(), "waived: the_trigger_path_makes_no_system_call: {lacking}");
        return;
    };
    assert!(calls.is_empty(), "{calls:#?}");
    assert!(control.iter().any(|call| call.contains("sched_yield")), "{control:#?}");
}
