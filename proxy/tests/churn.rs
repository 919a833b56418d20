//! Ten thousand starts and stops leave nothing behind. The only test of its process, since it counts threads,
//! descriptors and bytes of the whole process.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use portway_fifo::{Fifo, Heap};
use portway_proxy::{Config, Engine, FlushStream, Idle, Proxy, RunConfig, Stop, TransportError};
use support::LIMIT;
use support::deadline::{until, within};
use support::script::{Scripted, scripted_channel};

/// Counts the bytes that are allocated.
struct Counting;

static ALLOCATED_BYTES: AtomicI64 = AtomicI64::new(0);

// SAFETY: every call goes to the system's allocator with the arguments it came with.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED_BYTES.fetch_add(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller vouches for what the system's allocator asks of it.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED_BYTES.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[derive(Debug)]
struct NoStream;

impl FlushStream for NoStream {
    unsafe fn write(&mut self, _: u64, _: u64) -> Result<(), TransportError> {
        Ok(())
    }
}

/// One life of a proxy: with a flusher or without, drained, cancelled or dropped.
fn cycle(n: usize) {
    let config = Config { max_channels: 4, window: 4, ..Config::default() };
    let mut engine = Engine::new(&Heap, config).unwrap();
    let config = portway_fifo::Config { slots: 64, timeout: LIMIT, replica: true, ..Default::default() };
    let (fifo, consumer) = Fifo::new(&Heap, config).unwrap();
    let id = engine.add_fifo(fifo, consumer).unwrap();
    let port = engine.add_port(Scripted::new().port()).unwrap();
    let channel = engine.add_channel(scripted_channel(id, port, 64)).unwrap();
    let flush_stream: Option<Box<dyn FlushStream>> = if n % 2 == 0 { Some(Box::new(NoStream)) } else { None };
    let idle = if n % 4 < 2 { Idle::Yield } else { Idle::Sleep(Duration::from_millis(1)) };
    let proxy = Proxy::start(engine, RunConfig { idle, flush_stream, ..RunConfig::default() }).unwrap();
    if n % 16 == 0 {
        channel.producer().unwrap().put_signal_flush(0, 0, 8).unwrap();
    }
    match n % 3 {
        0 => drop(proxy),
        1 => assert!(proxy.stop(Stop::Drain { within: LIMIT }).quarantined.is_empty()),
        _ => assert!(proxy.stop(Stop::Cancel).quarantined.is_empty()),
    }
}

/// Threads, open descriptors, and allocated bytes.
fn holdings() -> (usize, usize, i64) {
    let entries = |path| std::fs::read_dir(path).unwrap().count();
    let (threads, descriptors) = (entries("/proc/self/task"), entries("/proc/self/fd"));
    (threads, descriptors, ALLOCATED_BYTES.load(Ordering::Relaxed))
}

#[test]
fn ten_thousand_starts_and_stops_leave_nothing_behind() {
    within(6 * LIMIT, "ten thousand cycles", || {
        // What is set up once, by us or by the system, is set up now.
        (0..50).for_each(cycle);
        let before = settled();
        (0..10_000).for_each(cycle);
        let after = settled();
        assert_eq!((after.0, after.1), (before.0, before.1), "threads and descriptors");
        // A leak of one byte a cycle would show; a buffer of the test harness does not matter.
        assert!(after.2 - before.2 < 5_000, "{} bytes more than before", after.2 - before.2);

        // The control: what is left behind is seen.
        let kept = std::mem::ManuallyDrop::new(Proxy::start(
            Engine::new(&Heap, Config::default()).unwrap(),
            RunConfig { idle: Idle::Sleep(Duration::from_millis(1)), ..RunConfig::default() },
        ));
        let kept_file = std::fs::File::open("/proc/self/stat").unwrap();
        let with_kept = holdings();
        assert_eq!((with_kept.0, with_kept.1), (before.0 + 1, before.1 + 1));
        assert!(with_kept.2 - before.2 > 5_000);
        drop(kept_file);
        drop(std::mem::ManuallyDrop::into_inner(kept));
    });
}

/// [`holdings`], once the kernel no longer lists threads that were joined.
fn settled() -> (usize, usize, i64) {
    let mut last = holdings();
    until(
        LIMIT,
        "the end of joined threads",
        || {
            std::thread::sleep(Duration::from_millis(20));
            let now = holdings();
            let is_settled = now == last;
            last = now;
            is_settled
        },
        holdings,
    );
    last
}
