//! A proxy whose FIFOs and channels lie in memory of CUDA, against a stand-in for the driver: the engine's thread calls
//! it never, and a driver that does not come back holds up nobody.
//!
//! Software cannot push into device memory. So the triggers are written into the pinned ring by hand, as a device does.

#[path = "../../fifo/tests/libcuda/mod.rs"]
mod libcuda;
mod support;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use libcuda::Standin;
use portway_fifo::cuda::{Context, Driver};
use portway_fifo::{Error as FifoError, Fifo, FifoHandle, Place, Platform, Region};
use portway_proxy::transport::{LocalMemory, Transport};
use portway_proxy::{
    ChannelConfig, ChannelError, Config, CudaFlushStream, Engine, FifoId, FlushStream, FlusherStats, Idle,
    Loopback, OpSet, PortChannel, PortId, Proxy, Request, RunConfig, STOP_GRACE, Stop, TransportError,
    loopback,
};
use support::deadline::{threads_named, until, within};
use support::{LIMIT, connect, import};

/// These tests find threads by name, so they take turns.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A word of the stand-in's memory, which is memory of this process.
///
/// # Safety
/// - `address` is an aligned word of memory that outlives its use, and that is accessed atomically only.
unsafe fn word(address: u64) -> &'static AtomicU64 {
    // SAFETY: the caller's promise.
    unsafe { AtomicU64::from_ptr(address as *mut u64) }
}

/// Plays a kernel that pushes.
struct Kernel {
    fifo: FifoHandle,
    next: u64,
}

impl Kernel {
    fn new(fifo: &Fifo) -> Self {
        Kernel { fifo: fifo.handle(), next: fifo.tail().0 }
    }

    /// Writes a trigger into the next slot and returns its position. There has to be room.
    fn push(&mut self, request: Request) -> u64 {
        let position = self.next;
        let slots = 1 << self.fifo.shift;
        let parity = !(position >> self.fifo.shift) << 63;
        let slot = self.fifo.slots + 16 * (position % slots);
        let words = request.encode().unwrap().words();
        for (at, value) in [(slot, words[0]), (slot + 8, words[1])] {
            // SAFETY: a word of the ring, which the test's FIFO keeps alive.
            unsafe { word(at) }.store(value | parity, Ordering::Release);
        }
        // A reset takes the head from here.
        // SAFETY: the head in the stand-in's device memory, which the test's FIFO keeps alive.
        unsafe { word(self.fifo.head) }.store(position + 1, Ordering::Release);
        self.next += 1;
        position
    }
}

/// One way: a FIFO, a channel on it, and where its puts go.
struct Way {
    id: FifoId,
    fifo: Fifo,
    channel: PortChannel,
    kernel: Kernel,
    source: Region,
    destination: Region,
    signal: Region,
    puts: u64,
}

const LEN_BYTES: u64 = 4096;

impl Way {
    /// Puts with signal and flush, waits for them as a kernel does, and looks at what arrived.
    fn put(&mut self) {
        self.puts += 1;
        let bytes: Vec<u8> = (0..LEN_BYTES).map(|i| (i * 31 + self.puts) as u8).collect();
        self.source.write(0, &bytes).unwrap();
        let position = self.kernel.push(Request {
            op: OpSet::PUT.and(OpSet::SIGNAL).and(OpSet::FLUSH),
            channel: self.channel.number(),
            size: LEN_BYTES as u32,
            source_offset_bytes: 0,
            destination_offset_bytes: 0,
        });
        let frontier = || self.channel.frontier().0;
        until(LIMIT, "the frontier", || frontier() == position + 1, || (position, frontier()));
        until(LIMIT, "the tail", || self.fifo.tail().0 == position + 1, || self.fifo.tail());
        let mut seen = vec![0; bytes.len()];
        self.destination.read(0, &mut seen).unwrap();
        assert_eq!(seen, bytes);
        let mut signal = [0; 8];
        self.signal.read(0, &mut signal).unwrap();
        assert_eq!(u64::from_ne_bytes(signal), self.puts);
    }
}

/// Two ways through an engine, all of it in memory of the stand-in's.
struct Rig {
    standin: Standin,
    context: Context,
    transport: Loopback,
    engine: Engine,
    ways: Vec<Way>,
}

fn rig() -> Rig {
    let standin = Standin::new();
    let context = Context::new(&Driver::open(standin.path()).unwrap(), 0).unwrap();
    let transport = Loopback::new(loopback::Config::default()).unwrap();
    let mut engine = Engine::new(&context, Config::default()).unwrap();
    let mut ways = Vec::new();
    for _ in 0..2 {
        let config = portway_fifo::Config { slots: 64, replica: true, ..Default::default() };
        let (fifo, consumer) = Fifo::new(&context, config).unwrap();
        let port = engine.add_port(connect(&transport, &transport).0).unwrap();
        let id = engine.add_fifo(fifo.clone(), consumer).unwrap();
        let (config, source, destination, signal) = ends(&context, &transport, id, port);
        let channel = engine.add_channel(config).unwrap();
        let kernel = Kernel::new(&fifo);
        ways.push(Way { id, fifo, channel, kernel, source, destination, signal, puts: 0 });
    }
    Rig { standin, context, transport, engine, ways }
}

/// What a channel is bound to, in pinned memory: source, destination, and the signal word at the far end.
fn ends(
    context: &Context,
    transport: &Loopback,
    fifo: FifoId,
    port: PortId,
) -> (ChannelConfig, Region, Region, Region) {
    let pinned = |len| -> LocalMemory { transport.register(&context.host_memory(len).unwrap()).unwrap() };
    let (source, destination, outbound) = (pinned(LEN_BYTES), pinned(LEN_BYTES), pinned(8));
    assert_eq!(source.region.place(), Place::Pinned);
    let config = ChannelConfig {
        fifo,
        port,
        source: source.clone(),
        destination: import(transport, &destination),
        outbound: import(transport, &outbound),
        inbound: pinned(8),
    };
    (config, source.region, destination.region, outbound.region)
}

fn start(engine: Engine, flush_stream: Option<Box<dyn FlushStream>>) -> Proxy {
    Proxy::start(engine, RunConfig { idle: Idle::Yield, flush_stream, ..RunConfig::default() }).unwrap()
}

/// The system's id of the one thread of this name.
fn thread_named(name: &str) -> i64 {
    until(LIMIT, name, || threads_named(name) == 1, || threads_named(name));
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let mut ids = tasks.filter_map(|task| {
        let path = task.ok()?.path();
        let comm = std::fs::read_to_string(path.join("comm")).ok()?;
        (comm.trim_end() == name).then(|| path.file_name()?.to_str()?.parse().ok())?
    });
    ids.next().unwrap()
}

/// The value of a FIFO's replica.
fn replica(fifo: &Fifo) -> u64 {
    // SAFETY: the replica in the stand-in's device memory, which the FIFO keeps alive.
    unsafe { word(fifo.handle().flushed) }.load(Ordering::Acquire)
}

#[test]
fn the_engines_thread_makes_no_driver_call() {
    let _turn = turn();
    within(3 * LIMIT, "the proxy over the stand-in", || {
        let Rig { standin, context, transport, engine, mut ways } = rig();
        let stream = CudaFlushStream::new(&context).unwrap();
        let proxy = start(engine, Some(Box::new(stream)));
        let (engines, flushers) = (thread_named("portway-proxy"), thread_named("portway-flusher"));
        for round in 0..200 {
            ways[round % 2].put();
        }
        until(LIMIT, "the replica", || replica(&ways[0].fifo) == 100, || replica(&ways[0].fifo));
        // What needs the driver is done by whoever asks for it, also while the engine runs.
        let port = proxy.add_port(connect(&transport, &transport).0).unwrap();
        let fifo = ways[0].id;
        let calls = standin.all_calls();
        proxy.add_channel(ends(&context, &transport, fifo, port).0).unwrap();
        ways[0].fifo.abort();
        let ended = || ways[0].channel.error();
        until(LIMIT, "the channel's end", || ended().is_some(), ended);
        proxy.reset_fifo(fifo).unwrap();
        let port = proxy.add_port(connect(&transport, &transport).0).unwrap();
        let (config, source, destination, signal) = ends(&context, &transport, fifo, port);
        let channel = proxy.add_channel(config).unwrap();
        let kernel = Kernel::new(&ways[0].fifo);
        let fifo = ways[0].fifo.clone();
        ways[0] = Way { id: ways[0].id, fifo, channel, kernel, source, destination, signal, puts: 0 };
        ways[0].put();
        assert!(standin.all_calls() > calls, "a channel and a reset do call the driver");
        proxy.close_port(port).unwrap();
        let report = proxy.stop(Stop::Drain { within: LIMIT });
        assert!(report.drained && report.quiesced && report.quarantined.is_empty(), "{report:?}");
        assert_eq!(standin.calls_by(engines), 0);
        // The controls: calls are counted by thread, and there were some to count.
        assert!(standin.calls_by(flushers) >= OF_A_WRITE.len() as i64);
        assert!(standin.calls_by(libcuda::thread_id()) > 0);
        let FlusherStats { writes, failures, .. } = report.stats.flusher.unwrap();
        assert_eq!((writes as i64, failures), (standin.calls("cuStreamWriteValue64_v2"), 0));
    });
}

/// The functions that the flusher is in when it writes a value.
const OF_A_WRITE: [&str; 4] = [
    "cuCtxPushCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamWriteValue64_v2",
    "cuCtxPopCurrent_v2",
];

#[test]
fn a_driver_that_never_returns_from_one_call_leaves_everything_working() {
    let _turn = turn();
    for function in [Driver::REQUIRED_FUNCTIONS, Driver::OPTIONAL_FUNCTIONS].concat() {
        within(3 * LIMIT, function, move || one_call_never_returns(function));
    }
}

fn one_call_never_returns(function: &str) {
    let Rig { standin, context, engine, mut ways, .. } = rig();
    let stream = CudaFlushStream::new(&context).unwrap();
    let proxy = start(engine, Some(Box::new(stream)));
    ways.iter_mut().for_each(Way::put);
    let flusher = || proxy.stats().flusher.unwrap();
    until(LIMIT, "the replica", || replica(&ways[0].fifo) == 1 && replica(&ways[1].fifo) == 1, flusher);

    standin.hold(function);
    let blocks = OF_A_WRITE.contains(&function);
    for round in 0..100 {
        ways[round % 2].put();
    }
    let at_least = Duration::from_millis(5);
    if blocks {
        standin.wait_until_held(function, 1);
        until(LIMIT, "a blocked flusher", || flusher().blocked_for >= at_least, flusher);
    } else {
        // The control: the same driver in another mood blocks nobody.
        until(LIMIT, "the replica", || replica(&ways[0].fifo) == ways[0].fifo.tail().0, flusher);
        assert_eq!(flusher().failures, 0);
    }
    // An abort reaches its channel, and the others go on.
    ways[0].fifo.abort();
    let ended = || ways[0].channel.error();
    until(LIMIT, "the channel's end", || ended().is_some(), ended);
    assert!(matches!(ended(), Some(ChannelError::Fifo { source: FifoError::Aborted, .. })), "{:?}", ended());
    ways[1].put();
    let (asked, time) = (Instant::now(), Duration::from_millis(500));
    let report = proxy.stop(Stop::Drain { within: time });
    let took = asked.elapsed();
    assert!(report.drained && report.quiesced, "{function}: {report:?}");
    assert!(took < time + STOP_GRACE + Duration::from_secs(5), "{function}: {took:?}");
    let stats = report.stats.flusher.unwrap();
    if blocks {
        assert_eq!(report.quarantined, ["portway-flusher"], "{function}");
        assert!(stats.blocked_for >= at_least, "{function}: {stats:?}");
    } else {
        assert!(report.quarantined.is_empty(), "{function}: {report:?}");
    }
    // Let out, it ends, and everything can be given back.
    standin.release(function);
    until(LIMIT, "the flusher's end", || threads_named("portway-flusher") == 0, || function.to_owned());
    drop(ways);
    assert_eq!(context.quarantined().streams, 1, "{function}");
    context.close().unwrap();
    assert_eq!(standin.live(), 0, "{function}");
}

#[test]
fn a_status_that_nobody_knows_is_a_counted_failure() {
    let _turn = turn();
    for status in [4242, 700, -1, i32::MIN] {
        for function in OF_A_WRITE {
            if function == "cuCtxPopCurrent_v2" {
                continue; // its failure changes nothing for the caller
            }
            within(3 * LIMIT, function, move || one_status(function, status));
        }
    }
}

fn one_status(function: &str, status: i32) {
    let Rig { standin, context, engine, mut ways, .. } = rig();
    let mut stream = CudaFlushStream::new(&context).unwrap();
    let target = context.device_memory(8).unwrap();
    // SAFETY: the word lies in `target`.
    unsafe { stream.write(target.address(), 5) }.unwrap();
    standin.fail(function, 1, status);
    // SAFETY: as above.
    match unsafe { stream.write(target.address(), 6) } {
        Err(TransportError::Memory(FifoError::Driver { call, status: seen, name })) => {
            assert_eq!((call, seen, name.as_str()), (function, status, "unknown"));
        }
        other => panic!("{function}, {status}: {other:?}"),
    }
    let proxy = start(engine, Some(Box::new(stream)));
    let flusher = || proxy.stats().flusher.unwrap();
    until(LIMIT, "the first two writes", || flusher().writes == 2, flusher);
    standin.fail_always(function, status);
    for round in 0..100 {
        ways[round % 2].put();
    }
    until(LIMIT, "failures", || flusher().failures >= 2, flusher);
    assert_eq!(flusher().writes, 2);
    // It goes on where it was refused as soon as it is let.
    standin.fail_no_more(function);
    ways[0].put();
    until(LIMIT, "the replica", || replica(&ways[0].fifo) == ways[0].fifo.tail().0, flusher);
    let report = proxy.stop(Stop::Drain { within: LIMIT });
    assert!(report.drained && report.quarantined.is_empty(), "{report:?}");
    assert_eq!(report.stats.flusher.unwrap().blocked_for, Duration::ZERO);
}

#[test]
fn a_flush_stream_that_cannot_be_made_is_an_error() {
    let standin = Standin::new();
    let context = Context::new(&Driver::open(standin.path()).unwrap(), 0).unwrap();
    for function in ["cuStreamCreate", "cuMemcpyDtoHAsync_v2", "cuStreamQuery", "cuCtxPushCurrent_v2"] {
        standin.fail_always(function, 4242);
        let error = CudaFlushStream::new(&context).unwrap_err();
        standin.fail_no_more(function);
        let named = matches!(error, FifoError::Driver { call, status: 4242, .. } if call == function);
        assert!(named, "{function}: {error:?}");
    }
    for old in [Standin::without(&["cuStreamWriteValue64_v2"]), Standin::new()] {
        old.set_attribute(122, 0);
        let context = Context::new(&Driver::open(old.path()).unwrap(), 0).unwrap();
        assert!(matches!(CudaFlushStream::new(&context), Err(FifoError::Unsupported { .. })));
        assert_eq!(old.calls("cuStreamWriteValue64_v2"), 0);
    }
}
