//! Port channels between kernels on a real device, through the proxy over loopback in pinned memory: everything
//! arrives, every wait ends, and a full launch queue stops nobody.
//!
//! Without a device each test prints `waived:`; see `cuda_support`.

mod cuda_support;

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytemuck::bytes_of;
use cuda_support::{
    Device, End, FINISHED, GO, LEAVE, PATIENCE, Pair, PairConfig, ROUNDS, RUNNING, Report, STATUS, Tally,
    channel_config, connect, device_word, wait_until,
};
use portway_fifo::cuda::{Context, Function, Stream};
use portway_fifo::{Fifo, Platform};
use portway_proxy::loopback::Faults;
use portway_proxy::{CudaFlushStream, FlushStream, Stop, TransportError, loopback};

/// How long a kernel's calls wait where nothing is to time out.
const KERNEL_TIMEOUT: Duration = Duration::from_secs(20);

/// One test at a time: a kernel that stays would hold up what another test frees.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fifo_config(slots: u64, timeout: Duration) -> portway_fifo::Config {
    portway_fifo::Config { slots, timeout, ..Default::default() }
}

#[test]
fn everything_that_kernels_put_arrives_before_its_signal() {
    let _alone = alone();
    let Some(device) = Device::open("everything_that_kernels_put_arrives_before_its_signal") else { return };
    let kernel = device.kernel("exchange");
    const LEN_BYTES: u64 = 4 << 20;
    let config =
        PairConfig { fifo: fifo_config(64, KERNEL_TIMEOUT), len_bytes: LEN_BYTES, ..PairConfig::default() };
    let pair = Pair::new(&device.context, config);
    let [source, destination] = pair.addresses();
    let (a, b) = (pair.a.handle(), pair.b.handle());
    let mut tallies = Vec::new();
    for len_bytes in [1u64, 7, 8, 9, 64, 1000, 4096, 65_536, 1 << 20, LEN_BYTES - 4096] {
        for (source_at, destination_at) in [(0u64, 0u64), (3, 1024), (4095, 1)] {
            let rounds = if len_bytes < 65_536 { 64u64 } else { 8 };
            let tally = Tally::new(&device);
            let tally_at = tally.address();
            let numbers = [source, destination, source_at, destination_at, len_bytes, rounds, tally_at];
            let mut parameters = vec![bytes_of(&a), bytes_of(&b)];
            parameters.extend(numbers.iter().map(bytes_of));
            // SAFETY: the kernel takes these parameters, and its memory lives until the stream is done.
            unsafe { kernel.launch(&device.stream, [2, 1, 1], [256, 1, 1], 0, &parameters) }.unwrap();
            device.stream.wait(PATIENCE).unwrap();
            let case = format!("{len_bytes} bytes from {source_at} to {destination_at}");
            // A round of four makes 1 + 2 + 1 + 3 calls that put (2 if there is no half), and 4 × 3 others.
            let puts = if len_bytes == 1 { 6 } else { 7 };
            assert_eq!(tally.read(), (rounds / 4 * (puts + 12), 0, vec![0], 0), "{case}");
            let (last, mut seen) = (rounds - 1, vec![0u8; len_bytes as usize]);
            pair.ends[1].destination.region.read(destination_at, &mut seen).unwrap();
            let wrong =
                (0..len_bytes).filter(|&i| seen[i as usize] != (i * 31 + (i >> 8) + last * 7 + 1) as u8);
            assert_eq!(wrong.count(), 0, "{case}: the host sees other bytes");
            tallies.push(tally);
        }
    }
    let report = pair.proxy.stop(Stop::Drain { within: PATIENCE });
    assert!(report.drained && report.quiesced && report.quarantined.is_empty(), "{report:?}");
    drop(tallies);
    device.context.reclaim().unwrap();
}

/// The control of the test above: where the proxy loses a put, the kernel says so, and says it in time.
#[test]
fn a_lost_put_is_noticed_by_the_kernel() {
    let _alone = alone();
    let Some(device) = Device::open("a_lost_put_is_noticed_by_the_kernel") else { return };
    let kernel = device.kernel("exchange");
    let faults = Faults { lose_at: Some(5), ..Faults::default() };
    let config = PairConfig {
        fifo: fifo_config(64, Duration::from_millis(300)),
        a_port: loopback::Config { faults, ..loopback::Config::default() },
        ..PairConfig::default()
    };
    let pair = Pair::new(&device.context, config);
    let ([source, destination], tally) = (pair.addresses(), Tally::new(&device));
    let (a, b) = (pair.a.handle(), pair.b.handle());
    let numbers = [source, destination, 0, 0, 64, 8, tally.address()];
    let mut parameters = vec![bytes_of(&a), bytes_of(&b)];
    parameters.extend(numbers.iter().map(bytes_of));
    let start = Instant::now();
    // SAFETY: the kernel takes these parameters, and its memory lives until the stream is done.
    unsafe { kernel.launch(&device.stream, [2, 1, 1], [256, 1, 1], 0, &parameters) }.unwrap();
    device.stream.wait(PATIENCE).unwrap();
    let (_, failed, statuses, misread) = tally.read();
    assert!(failed > 0 || misread > 0, "nothing was noticed");
    assert!(statuses.iter().all(|status| [0, 1].contains(status)), "{statuses:?}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    pair.proxy.stop(Stop::Cancel);
    device.context.reclaim().unwrap();
}

/// What so many threads wait in.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    Push,
    Sync,
    Wait,
    Flush,
}

/// What ends their wait.
#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    Abort,
    Timeout,
}

const BLOCKS: u32 = 132;
const THREADS: u32 = 256;
const ALL: u64 = BLOCKS as u64 * THREADS as u64;

/// What is left of a second for the host to notice.
const WITHIN: Duration = Duration::from_secs(1);

/// The timeout of those who are to time out. Longer than it takes all of them to begin.
const SHORT: Duration = Duration::from_millis(1500);

impl By {
    fn timeout(self) -> Duration {
        if self == By::Abort { KERNEL_TIMEOUT } else { SHORT }
    }

    /// The statuses that a wait may return.
    fn statuses(self, call: Call) -> &'static [u32] {
        match (call, self) {
            // A push has taken its position, so it breaks the FIFO; who is late sees it broken.
            (Call::Push, By::Abort) => &[0, 4],
            (Call::Push, By::Timeout) => &[0, 1, 3],
            (Call::Sync, By::Abort) => &[2],
            (Call::Wait | Call::Flush, By::Abort) => &[6],
            (_, By::Timeout) => &[1],
        }
    }
}

/// Launches a kernel whose threads all wait, with these first parameters, waits until each is in its call, ends that, and
/// checks what they returned. `calls` is how many calls there will have been by then.
fn all_wait(
    device: &Device,
    (call, end, calls): (Call, By, u64),
    first: &[&[u8]],
    mut are_in: impl FnMut() -> bool,
    abort: impl FnOnce(),
) {
    let case = format!("{ALL} threads in {call:?}, ended by {end:?}");
    let kernel = device.kernel(match call {
        Call::Push => "wait_in_push",
        Call::Sync => "wait_in_sync",
        Call::Wait => "wait_in_wait",
        Call::Flush => "wait_in_flush",
    });
    let (entered, tally) = (device.context.device_memory(8).unwrap(), Tally::new(device));
    let at = [entered.address(), tally.address()];
    let mut parameters = first.to_vec();
    parameters.extend(at.iter().map(bytes_of));
    // SAFETY: the kernel takes these parameters, and its memory lives until the stream is done, or longer.
    unsafe { kernel.launch(&device.stream, [BLOCKS, 1, 1], [THREADS, 1, 1], 0, &parameters) }.unwrap();
    wait_until(&format!("{case}: their calls"), || device_word(&entered), |&n| n == calls);
    wait_until(&format!("{case}: the proxy"), &mut are_in, |&in_| in_);
    // The control: nobody has returned from the wait. What is seen below comes from the end.
    assert_eq!(device.stream.is_idle(), Ok(false), "{case}: the kernel did not wait");
    assert_eq!(tally.read().1, 0, "{case}: some returned before the end");
    let start = Instant::now();
    let limit = match end {
        By::Abort => {
            abort();
            WITHIN
        }
        By::Timeout => SHORT + WITHIN,
    };
    device.stream.wait(PATIENCE).unwrap();
    let took = start.elapsed();
    let (done, failed, statuses, _) = tally.read();
    let _ = writeln!(std::io::stderr(), "{case}: took {took:?}, statuses {statuses:?}");
    assert!(took < limit, "{case}: took {took:?}");
    assert_eq!((done, failed), (calls - ALL, ALL), "{case}");
    let expected = end.statuses(call);
    assert!(
        statuses.iter().all(|status| expected.contains(status)),
        "{case}: {statuses:?}, not of {expected:?}"
    );
    assert!(statuses.iter().any(|status| *status != 0), "{case}");
}

#[test]
fn every_thread_leaves_a_push_or_a_sync_in_time() {
    let _alone = alone();
    let Some(device) = Device::open("every_thread_leaves_a_push_or_a_sync_in_time") else { return };
    let after = device.kernel("push_and_sync");
    for call in [Call::Push, Call::Sync] {
        for end in [By::Abort, By::Timeout] {
            let config = fifo_config(512, end.timeout());
            let (fifo, mut consumer) = Fifo::new(&device.context, config).unwrap();
            let (handle, position) = (fifo.handle(), 0u64);
            let (first, calls) = match call {
                Call::Push => (vec![bytes_of(&handle)], 512 + ALL),
                _ => (vec![bytes_of(&handle), bytes_of(&position)], ALL),
            };
            // With nobody to drain it, the ring is full after 512.
            all_wait(&device, (call, end, calls), &first, || true, || fifo.abort());
            let closed = consumer.closed();
            let is_closed = call == Call::Push || end == By::Abort;
            assert_eq!(closed.is_some(), is_closed, "{call:?}, {end:?}: {closed:?}");

            // The context is healthy, and after a reset the same FIFO works.
            fifo.abort();
            consumer.reset().unwrap();
            let tally = Tally::new(&device);
            let tally_at = tally.address();
            let parameters = [bytes_of(&handle), bytes_of(&tally_at)];
            // SAFETY: the kernel takes these parameters, and its memory lives until the stream is done.
            unsafe { after.launch(&device.stream, [1; 3], [1; 3], 0, &parameters) }.unwrap();
            let mut words = None;
            wait_until(
                "a push after a reset",
                || consumer.drain(1, |_, trigger| words = Some(trigger.words())),
                |&n| n == 1,
            );
            device.stream.wait(PATIENCE).unwrap();
            assert_eq!((words, tally.read()), (Some([1, 2]), (2, 0, vec![0], 0)), "{call:?}, {end:?}");
            drop((fifo, consumer, tally));
            device.context.reclaim().unwrap();
        }
    }
}

#[test]
fn every_thread_leaves_a_wait_or_a_flush_in_time() {
    let _alone = alone();
    let Some(device) = Device::open("every_thread_leaves_a_wait_or_a_flush_in_time") else { return };
    let after = device.kernel("put_signal_flush");
    for call in [Call::Wait, Call::Flush] {
        for end in [By::Abort, By::Timeout] {
            // The first op is lost, so the frontier never moves and all of the flushes wait for it at once.
            let faults = Faults { lose_at: (call == Call::Flush).then_some(0), ..Faults::default() };
            let config = PairConfig {
                engine: portway_proxy::Config {
                    batch: 1024,
                    window: 65_536,
                    deadline: Duration::from_secs(120),
                    ..Default::default()
                },
                fifo: fifo_config(65_536, end.timeout()),
                a_port: loopback::Config { depth: 65_536, faults },
                ..PairConfig::default()
            };
            let pair = Pair::new(&device.context, config);
            let handle = pair.a.handle();
            let all_in = || call == Call::Wait || pair.proxy.stats().triggers == ALL;
            let abort = || pair.rings[0].abort();
            all_wait(&device, (call, end, ALL), &[bytes_of(&handle)], all_in, abort);
            assert_eq!(pair.a.error().is_some(), end == By::Abort, "{:?}", pair.a.error());

            // The context is healthy, and after a reset a new channel on the same FIFO works.
            pair.rings[0].abort();
            wait_until("the channel's end", || pair.a.error(), Option::is_some);
            pair.proxy.reset_fifo(pair.fifos[0]).unwrap();
            let sound = pair.transport.with_faults(Faults::default());
            let [port, _other] = connect(&sound, &sound);
            let port = pair.proxy.add_port(port).unwrap();
            let ends = [0, 1].map(|_| End::new(&device.context, &sound, 4096));
            let config = channel_config(&sound, pair.fifos[0], port, &ends[0], &ends[1]);
            let channel = pair.proxy.add_channel(config).unwrap();
            ends[0].source.region.write(0, &[0xa5; 4096]).unwrap();
            let tally = Tally::new(&device);
            let (handle, len_bytes, tally_at) = (channel.handle(), 4096u64, tally.address());
            let parameters = [bytes_of(&handle), bytes_of(&len_bytes), bytes_of(&tally_at)];
            // SAFETY: the kernel takes these parameters, and its memory lives until the stream is done.
            unsafe { after.launch(&device.stream, [1; 3], [1; 3], 0, &parameters) }.unwrap();
            device.stream.wait(PATIENCE).unwrap();
            assert_eq!(tally.read(), (1, 0, vec![0], 0), "{call:?}, {end:?}");
            let mut seen = [0; 4096];
            ends[1].destination.region.read(0, &mut seen).unwrap();
            assert!(seen == [0xa5; 4096]);
            let report = pair.proxy.stop(Stop::Cancel);
            assert!(report.quarantined.is_empty(), "{report:?}");
            drop((channel, ends, tally, pair.a, pair.b, pair.rings));
            device.context.reclaim().unwrap();
        }
    }
}

// ---- a full launch queue, with one connection ----

const ONE_CONNECTION: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// How long a test that runs in a process of its own may take.
const CHILD_LIMIT: Duration = Duration::from_secs(100);

/// True in a process with `CUDA_DEVICE_MAX_CONNECTIONS=1`. Elsewhere runs the test in such a process, where there is a
/// device, and takes over its outcome.
fn in_child(test: &str) -> bool {
    if std::env::var(ONE_CONNECTION).as_deref() == Ok("1") {
        return true;
    }
    if Device::open(test).is_none() {
        return false;
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads", "1"])
        .env(ONE_CONNECTION, "1")
        .env("CUDA_MODULE_LOADING", "EAGER")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{test} with {ONE_CONNECTION}=1: {status}");
            return false;
        }
        if start.elapsed() > CHILD_LIMIT {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{test} with {ONE_CONNECTION}=1 was killed after {CHILD_LIMIT:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// An application that launches until it is stuck in a launch.
struct Launches {
    count: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Launches {
    /// Launches kernels into `stream`, behind the one that stays there, until a launch does not return. That many.
    fn until_stuck(stream: &Stream, nothing: &Function) -> (Self, u64) {
        let (count, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let thread = {
            let (stream, nothing, count, over) =
                (stream.clone(), nothing.clone(), count.clone(), over.clone());
            std::thread::spawn(move || {
                while count.load(Ordering::Relaxed) < 20_000 && !over.load(Ordering::Relaxed) {
                    // SAFETY: the kernel takes nothing and touches nothing.
                    unsafe { nothing.launch(&stream, [1; 3], [1; 3], 0, &[]) }.unwrap();
                    count.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let launches = Launches { count, over, thread: Some(thread) };
        let start = Instant::now();
        let mut last = (0, start);
        while last.1.elapsed() < Duration::from_millis(50) {
            let now = launches.count.load(Ordering::Relaxed);
            if now != last.0 {
                last = (now, Instant::now());
            }
            assert!(start.elapsed() < PATIENCE, "the launch queue never filled: {now} launches");
        }
        (launches, last.0)
    }

    /// Once the kernel in front is gone. Panics if the application does not come back.
    fn end(mut self) {
        self.over.store(true, Ordering::Relaxed);
        let thread = self.thread.take().unwrap();
        wait_until("the application's last launch", || thread.is_finished(), |&is| is);
        thread.join().unwrap();
    }
}

/// A stream that writes values and was never primed.
#[derive(Debug)]
struct Unprimed(Stream);

impl FlushStream for Unprimed {
    unsafe fn write(&mut self, address: u64, value: u64) -> Result<(), TransportError> {
        // SAFETY: the tests and the flusher pass words of device memory that they keep alive, accessed atomically only.
        Ok(unsafe { self.0.write_value(address, value) }?)
    }
}

fn unprimed(context: &Context) -> Box<dyn FlushStream> {
    Box::new(Unprimed(Stream::new(context).unwrap()))
}

fn primed(context: &Context) -> Box<dyn FlushStream> {
    Box::new(CudaFlushStream::new(context).unwrap())
}

/// Behind a kernel that waits for the last of 200 written values the launch queue is full. How many writes returned
/// before the kernel ended, and whether it saw the value.
fn write_200(device: &Device, mut stream: Box<dyn FlushStream>, timeout: Duration) -> (u64, bool) {
    let (stay, nothing) = (device.kernel("stay"), device.kernel("nothing"));
    let (word, report) = (device.context.device_memory(8).unwrap(), Report::new(device));
    let numbers = [word.address(), 200, timeout.as_nanos() as u64, report.0.region().address()];
    // SAFETY: the kernel takes these parameters, and its memory lives until the stream is done.
    unsafe { stay.launch(&device.stream, [1; 3], [1; 3], 0, &numbers.each_ref().map(bytes_of)) }.unwrap();
    wait_until("the kernel", || report.get(RUNNING), |&running| running == 1);
    let (launches, pending) = Launches::until_stuck(&device.stream, &nothing);
    assert!(pending >= 400 && report.get(FINISHED) == 0, "stuck after {pending} launches: {}", report.text());
    let returned = Arc::new(AtomicU64::new(0));
    let writer = {
        let (returned, address) = (returned.clone(), word.address());
        std::thread::spawn(move || {
            for value in 1..=200 {
                // SAFETY: the word lies in memory that outlives the stream's work.
                unsafe { stream.write(address, value) }.unwrap();
                returned.fetch_add(1, Ordering::Relaxed);
            }
        })
    };
    wait_until("the kernel's end", || report.get(FINISHED), |&finished| finished == 1);
    let (before, came) = (returned.load(Ordering::Relaxed), report.get(STATUS) == 0);
    launches.end();
    wait_until("the writer's end", || writer.is_finished(), |&is| is);
    writer.join().unwrap();
    device.stream.wait(PATIENCE).unwrap();
    let _ = writeln!(std::io::stderr(), "{pending} launches pending: {before} of 200 values, seen: {came}");
    (before, came)
}

#[test]
fn a_primed_stream_writes_behind_a_full_launch_queue() {
    let _alone = alone();
    if !in_child("a_primed_stream_writes_behind_a_full_launch_queue") {
        return;
    }
    let Some(device) = Device::open("a_primed_stream_writes_behind_a_full_launch_queue") else { return };
    for _ in 0..5 {
        let (_, came) = write_200(&device, primed(&device.context), Duration::from_secs(5));
        assert!(came, "a value written by a primed stream did not arrive");
        // The control: the same without priming.
        let (before, came) = write_200(&device, unprimed(&device.context), Duration::from_millis(300));
        if came {
            let _ =
                writeln!(std::io::stderr(), "recorded: an unprimed stream does not block: {}", device.name());
        } else {
            assert!(before < 200, "all writes returned and none ran");
        }
        device.context.reclaim().unwrap();
    }
}

/// A kernel needs the proxy 100 times behind a full launch queue, with this stream for the flusher. What the flusher
/// had done, and for how long it had been blocked, while the kernel was still there.
fn need_proxy_behind_a_full_queue(
    device: &Device,
    stream: Box<dyn FlushStream>,
    with_replica: bool,
) -> portway_proxy::FlusherStats {
    const NEEDED: u64 = 100;
    let (kernel, nothing) = (device.kernel("needs_proxy"), device.kernel("nothing"));
    let fifo = portway_fifo::Config { replica: true, ..fifo_config(512, Duration::from_secs(5)) };
    let config = PairConfig { fifo, flush_stream: Some(stream), ..PairConfig::default() };
    let pair = Pair::new(&device.context, config);
    let (report, [source, destination]) = (Report::new(device), pair.addresses());
    let (a, b) = (pair.a.handle(), pair.b.handle());
    let replica = if with_replica { a.fifo.flushed } else { 0 };
    let gate_ns = KERNEL_TIMEOUT.as_nanos() as u64;
    let numbers = [source, destination, 0, replica, NEEDED, 1, gate_ns, report.0.region().address()];
    let mut parameters = vec![bytes_of(&a), bytes_of(&b)];
    parameters.extend(numbers.iter().map(bytes_of));
    // SAFETY: the kernel takes these parameters, and its memory lives until the stream is done.
    unsafe { kernel.launch(&device.stream, [1; 3], [1; 3], 0, &parameters) }.unwrap();
    wait_until("the kernel", || report.get(RUNNING), |&running| running == 1);
    let (launches, pending) = Launches::until_stuck(&device.stream, &nothing);
    assert!(pending >= 400, "stuck after {pending} launches");
    report.set(GO, 1);
    let rounds = || (report.get(ROUNDS), report.get(FINISHED), report.text());
    let seen = wait_until("its rounds", rounds, |seen| seen.0 == NEEDED || seen.1 == 1);
    assert_eq!((seen.0, seen.1), (NEEDED, 0), "{}", seen.2);
    // Longer than any write that is not blocked.
    std::thread::sleep(Duration::from_millis(50));
    let stats = pair.proxy.stats();
    assert_eq!(report.get(FINISHED), 0, "{}", report.text());
    report.set(LEAVE, 1);
    wait_until("the kernel's end", || report.get(FINISHED), |&finished| finished == 1);
    assert!(report.succeeded(NEEDED), "{}", report.text());
    launches.end();
    device.stream.wait(PATIENCE).unwrap();
    let stopped = pair.proxy.stop(Stop::Drain { within: PATIENCE });
    assert!(stopped.drained && stopped.quarantined.is_empty(), "{stopped:?}");
    assert_eq!(stats.triggers, 2 * NEEDED, "the engine did not go on");
    stats.flusher.unwrap()
}

#[test]
fn a_flusher_blocked_in_the_driver_holds_up_nobody_and_ours_is_not_blocked() {
    let _alone = alone();
    if !in_child("a_flusher_blocked_in_the_driver_holds_up_nobody_and_ours_is_not_blocked") {
        return;
    }
    let test = "a_flusher_blocked_in_the_driver_holds_up_nobody_and_ours_is_not_blocked";
    let Some(device) = Device::open(test) else { return };
    let blocked = need_proxy_behind_a_full_queue(&device, unprimed(&device.context), false);
    let _ = writeln!(std::io::stderr(), "unprimed: {blocked:?}");
    if blocked.blocked_for < Duration::from_millis(20) {
        let _ = writeln!(
            std::io::stderr(),
            "recorded: {test}: an unprimed stream does not block: {}",
            device.name()
        );
    }
    // The kernel itself has seen the last tail in the replica.
    let ours = need_proxy_behind_a_full_queue(&device, primed(&device.context), true);
    let _ = writeln!(std::io::stderr(), "primed: {ours:?}");
    assert!(
        ours.blocked_for < Duration::from_millis(20) && ours.failures == 0 && ours.writes > 1,
        "{ours:?}"
    );
    device.context.reclaim().unwrap();
}
