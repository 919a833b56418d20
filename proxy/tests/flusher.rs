//! The tail flusher against a simulated driver: a launch queue of 1,024 that blocks its caller when it is full. An
//! application fills it behind a kernel that waits for the proxy; whoever flushes the tail on that queue then stands
//! still until the kernel ends. The proxy must not be among them.

mod support;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use portway_fifo::{Fifo, Heap, Position};
use portway_proxy::{
    ChannelProducer, Config, Engine, Error, FlushStream, Idle, Proxy, RunConfig, STOP_GRACE, Stop,
    TransportError,
};
use support::LIMIT;
use support::deadline::{Gate, threads_named, until, within};
use support::script::{Scripted, scripted_channel};

/// These tests count threads by name, so they take turns.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

type Work = Box<dyn FnOnce() + Send>;

/// What a driver's launch queue holds: as many launches as a real one, the running one among them.
const QUEUE: usize = 1_024;

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    /// Callers that wait for room.
    blocked: usize,
    /// Since this, calls no longer wait: the end of a test.
    is_released: bool,
    is_over: bool,
}

/// A driver with one launch queue, and the device that works it off in order.
#[derive(Clone, Default)]
struct Driver(Arc<(Mutex<Queue>, Condvar)>);

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let queue = self.queue();
        write!(f, "a driver with {} launches and {} blocked callers", queue.work.len(), queue.blocked)
    }
}

impl Driver {
    fn start() -> (Self, Device) {
        let driver = Driver::default();
        let device = driver.clone();
        let thread = std::thread::spawn(move || while device.run_one() {});
        (driver.clone(), Device { driver, thread: Some(thread) })
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues work; blocks while the queue is full, as the driver does.
    fn launch(&self, work: impl FnOnce() + Send + 'static) {
        let mut queue = self.queue();
        queue.blocked += 1;
        while queue.work.len() >= QUEUE && !queue.is_released {
            queue = self.wait(queue);
        }
        queue.blocked -= 1;
        queue.work.push_back(Box::new(work));
        self.0.1.notify_all();
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        let (queue, waited) = self.0.1.wait_timeout(queue, 6 * LIMIT).unwrap_or_else(PoisonError::into_inner);
        assert!(!waited.timed_out(), "the driver's queue stood still for {:?}", 6 * LIMIT);
        queue
    }

    /// Runs the oldest launch, which keeps its place until it is done. False at the end.
    fn run_one(&self) -> bool {
        let mut queue = self.queue();
        while queue.work.is_empty() && !queue.is_over {
            queue = self.wait(queue);
        }
        let Some(work) = queue.work.front_mut() else { return false };
        let work = std::mem::replace(work, Box::new(|| {}));
        drop(queue);
        work();
        self.queue().work.pop_front();
        self.0.1.notify_all();
        true
    }

    /// No call blocks any more.
    fn release(&self) {
        self.queue().is_released = true;
        self.0.1.notify_all();
    }

    fn is_full(&self) -> bool {
        self.queue().work.len() >= QUEUE
    }

    fn blocked(&self) -> usize {
        self.queue().blocked
    }
}

struct Device {
    driver: Driver,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Device {
    fn drop(&mut self) {
        self.driver.queue().is_over = true;
        self.driver.release();
        if let Some(thread) = self.thread.take() {
            let result = thread.join();
            assert!(std::thread::panicking() || result.is_ok(), "the device panicked");
        }
    }
}

/// Writes through the driver's queue.
#[derive(Debug)]
struct QueuedStream(Driver);

impl FlushStream for QueuedStream {
    unsafe fn write(&mut self, address: u64, value: u64) -> Result<(), TransportError> {
        self.0.launch(move || store(address, value));
        Ok(())
    }
}

/// Stores a value to a FIFO's replica of the tail.
fn store(address: u64, value: u64) {
    // SAFETY: the address is a replica's, an aligned word of heap memory that the flusher or the test keeps alive by
    // its share in the FIFO, and that is accessed atomically only.
    let word = unsafe { AtomicU64::from_ptr(address as *mut u64) };
    word.store(value, Ordering::Release);
}

fn replica(fifo: &Fifo) -> u64 {
    // SAFETY: as in `store`.
    let word = unsafe { AtomicU64::from_ptr(fifo.handle().flushed as *mut u64) };
    word.load(Ordering::Acquire)
}

/// An engine with a FIFO that has a replica of its tail, and the kernel's end of a channel.
fn engine() -> (Engine, Fifo, ChannelProducer) {
    let mut engine = Engine::new(&Heap, Config::default()).unwrap();
    let config = portway_fifo::Config { timeout: 3 * LIMIT, replica: true, ..Default::default() };
    let (fifo, consumer) = Fifo::new(&Heap, config).unwrap();
    let id = engine.add_fifo(fifo.clone(), consumer).unwrap();
    let port = engine.add_port(Scripted::new().port()).unwrap();
    let channel = engine.add_channel(scripted_channel(id, port, 4096)).unwrap();
    (engine, fifo, channel.producer().unwrap())
}

/// The application's part of one run: launches a kernel that needs the proxy three times, and launches behind it
/// until it is itself blocked in a launch. The kernel begins only then. Returns what tells that the kernel is done.
fn launch_run(driver: &Driver, channel: &ChannelProducer) -> Arc<AtomicBool> {
    let is_done = Arc::new(AtomicBool::new(false));
    let kernel = {
        let (channel, is_done, driver) = (channel.clone(), is_done.clone(), driver.clone());
        move || {
            until(LIMIT, "a full queue", || driver.is_full() && driver.blocked() > 0, || driver.clone());
            for _ in 0..3 {
                channel.put_signal_flush(0, 0, 8).unwrap();
            }
            is_done.store(true, Ordering::Release);
        }
    };
    driver.launch(kernel);
    for _ in 0..QUEUE {
        driver.launch(|| {});
    }
    is_done
}

fn config(stream: impl FlushStream + 'static) -> RunConfig {
    RunConfig { idle: Idle::Yield, flush_stream: Some(Box::new(stream)), ..RunConfig::default() }
}

/// The control: the same runs with the tail flushed from the proxy's own thread, as the failure that this design
/// answers did it. The program stands still, by nothing but that flush.
#[test]
fn flushed_by_the_proxy_thread_a_full_launch_queue_stops_the_program() {
    let _turn = turn();
    within(3 * LIMIT, "the control", || {
        let (mut engine, fifo, channel) = engine();
        let (driver, _device) = Driver::start();
        let is_over = Arc::new(AtomicBool::new(false));
        let steps = Arc::new(AtomicU64::new(0));
        let proxy = {
            let (is_over, steps, mut stream) = (is_over.clone(), steps.clone(), QueuedStream(driver.clone()));
            std::thread::spawn(move || {
                let (start, mut flushed) = (Instant::now(), fifo.tail());
                while !is_over.load(Ordering::Acquire) {
                    engine.step(start.elapsed());
                    steps.fetch_add(1, Ordering::Relaxed);
                    if fifo.tail() != flushed {
                        flushed = fifo.tail();
                        // SAFETY: the word lies in the FIFO's memory, which is held here.
                        unsafe { stream.write(fifo.handle().flushed, flushed.0) }.unwrap();
                    }
                    std::thread::yield_now();
                }
            })
        };
        let application = {
            let (driver, channel) = (driver.clone(), channel.clone());
            std::thread::spawn(move || launch_run(&driver, &channel))
        };
        // Both the application and the proxy are caught in the driver, and there they stay.
        until(LIMIT, "two blocked callers", || driver.blocked() == 2, || driver.clone());
        let before = steps.load(Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(steps.load(Ordering::Relaxed), before, "the proxy stands still");
        assert_eq!(driver.blocked(), 2);
        assert!(!application.is_finished());
        // Let out of the driver, it all goes on at once: nothing else was wrong.
        driver.release();
        let is_done = application.join().unwrap();
        until(LIMIT, "the kernel", || is_done.load(Ordering::Acquire), || driver.clone());
        is_over.store(true, Ordering::Release);
        proxy.join().unwrap();
    });
}

#[test]
fn flushed_by_the_side_thread_a_thousand_runs_end() {
    let _turn = turn();
    within(6 * LIMIT, "a thousand runs", || {
        for _ in 0..10 {
            let (engine, fifo, channel) = engine();
            let (driver, _device) = Driver::start();
            let proxy = Proxy::start(engine, config(QueuedStream(driver.clone()))).unwrap();
            for run in 0..100 {
                let is_done = launch_run(&driver, &channel);
                until(LIMIT, "the kernel", || is_done.load(Ordering::Acquire), || (run, driver.clone()));
            }
            // With room in the queue the flusher catches up with the last tail.
            until(LIMIT, "the replica", || replica(&fifo) == fifo.tail().0, || replica(&fifo));
            assert_eq!(fifo.tail(), Position(300));
            let report = proxy.stop(Stop::Drain { within: LIMIT });
            assert!(report.drained && report.quarantined.is_empty(), "{report:?}");
            let flusher = report.stats.flusher.unwrap();
            assert!((1..=301).contains(&flusher.writes), "{flusher:?}");
        }
    });
    no_threads_left();
}

/// The kernel may list a thread for a moment after it was joined.
fn no_threads_left() {
    let left = || (threads_named("portway-proxy"), threads_named("portway-flusher"));
    until(LIMIT, "the end of all threads", || left() == (0, 0), left);
}

/// Never comes back from a write, until the gate opens.
#[derive(Debug)]
struct StuckStream {
    gate: Gate,
    is_dropped: Arc<AtomicBool>,
}

impl FlushStream for StuckStream {
    unsafe fn write(&mut self, address: u64, value: u64) -> Result<(), TransportError> {
        self.gate.pass();
        store(address, value);
        Ok(())
    }
}

impl Drop for StuckStream {
    fn drop(&mut self) {
        self.is_dropped.store(true, Ordering::Release);
    }
}

#[test]
fn with_a_flusher_that_never_comes_back_a_thousand_runs_end() {
    let _turn = turn();
    within(6 * LIMIT, "a thousand runs", || {
        let (engine, fifo, channel) = engine();
        let (driver, _device) = Driver::start();
        let (gate, is_dropped) = (Gate::default(), Arc::new(AtomicBool::new(false)));
        let stream = StuckStream { gate: gate.clone(), is_dropped: is_dropped.clone() };
        let proxy = Proxy::start(engine, config(stream)).unwrap();
        until(LIMIT, "the flusher in its call", || gate.inside() == 1, || gate.inside());
        for run in 0..1_000 {
            let is_done = launch_run(&driver, &channel);
            until(LIMIT, "the kernel", || is_done.load(Ordering::Acquire), || (run, driver.clone()));
        }
        // The statistics say what is the matter, and for how long.
        let blocked_for = || proxy.stats().flusher.unwrap().blocked_for;
        let first = blocked_for();
        assert!(first >= Duration::from_millis(1), "{first:?}");
        until(LIMIT, "a longer time", || blocked_for() >= first + Duration::from_millis(20), blocked_for);
        assert_eq!(proxy.stats().flusher.unwrap().writes, 0);

        // A stop waits within its bound, and says whom it left behind.
        let asked = Instant::now();
        let report = proxy.stop(Stop::Drain { within: Duration::from_millis(100) });
        let took = asked.elapsed();
        assert!(report.drained && report.quiesced, "{report:?}");
        assert_eq!(report.quarantined, ["portway-flusher"]);
        assert!(took < STOP_GRACE + Duration::from_secs(2), "{took:?}");
        // What it may still touch is there as long as it is.
        assert!(!is_dropped.load(Ordering::Acquire));
        assert_eq!(threads_named("portway-flusher"), 1);
        drop(channel);
        gate.open();
        until(LIMIT, "the flusher's end", || threads_named("portway-flusher") == 0, || gate.inside());
        assert!(is_dropped.load(Ordering::Acquire));
        assert_eq!(replica(&fifo), 0, "what it wrote was the tail of then");
    });
}

type Answer = fn() -> Result<(), TransportError>;

/// A stream whose calls return what they are told, after a while.
#[derive(Debug)]
struct OddStream {
    calls: Arc<AtomicU64>,
    answer: Answer,
}

impl FlushStream for OddStream {
    unsafe fn write(&mut self, address: u64, value: u64) -> Result<(), TransportError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        (self.answer)()?;
        store(address, value);
        Ok(())
    }
}

#[test]
fn a_slow_a_failing_and_a_panicking_stream_are_counted_and_stop_nobody() {
    let _turn = turn();
    let slow = || {
        std::thread::sleep(Duration::from_millis(1));
        Ok(())
    };
    let failing = || {
        Err(TransportError::Device {
            operation: "cuStreamWriteValue64",
            status: 700,
            vendor: 0,
            source: None,
        })
    };
    let answers: [(&str, Answer); 3] =
        [("slow", slow), ("failing", failing), ("panicking", || panic!("the stream is gone"))];
    for (what, answer) in answers {
        within(LIMIT, what, move || {
            let (engine, fifo, channel) = engine();
            let calls = Arc::new(AtomicU64::new(0));
            let proxy = Proxy::start(engine, config(OddStream { calls: calls.clone(), answer })).unwrap();
            for _ in 0..1_000 {
                channel.flush().unwrap();
            }
            let stats = || proxy.stats().flusher.unwrap();
            match what {
                "slow" => {
                    // It skips what it missed and comes to the last one.
                    until(LIMIT, "the last tail", || replica(&fifo) == 1_000, stats);
                    assert!(stats().failures == 0 && !stats().panicked);
                }
                "failing" => {
                    until(LIMIT, "failures", || stats().failures > 1, stats);
                    assert!(stats().writes == 0 && !stats().panicked);
                }
                _ => {
                    until(LIMIT, "the panic", || stats().panicked, stats);
                    assert_eq!((calls.load(Ordering::Relaxed), stats().writes), (1, 0));
                    assert_eq!(stats().blocked_for, Duration::ZERO);
                }
            }
            let report = proxy.stop(Stop::Drain { within: LIMIT });
            assert!(report.drained && report.quarantined.is_empty(), "{report:?}");
        });
    }
}

#[test]
fn a_start_that_fails_leaves_no_flusher_behind() {
    let _turn = turn();
    let (gate, is_dropped) = (Gate::default(), Arc::new(AtomicBool::new(false)));
    gate.open();
    let stream = StuckStream { gate: gate.clone(), is_dropped: is_dropped.clone() };
    let cpus = vec![usize::MAX];
    let error = Proxy::start(engine().0, RunConfig { cpus, ..config(stream) }).unwrap_err();
    let says = "binding a thread to processors: there is no processor 18446744073709551615";
    assert_eq!(error.to_string(), says);
    no_threads_left();
    assert!(is_dropped.load(Ordering::Acquire));

    // Without a replica there is nothing to flush.
    let mut engine = Engine::new(&Heap, Config::default()).unwrap();
    support::script::add_fifo(&mut engine, 64);
    let stream = StuckStream { gate, is_dropped };
    let error = Proxy::start(engine, config(stream)).unwrap_err();
    assert!(matches!(error, Error::Config { value: 0, .. }));
    assert_eq!(error.to_string(), "number of FIFOs with a replica is 0: must be 1 or more, to flush");
}
