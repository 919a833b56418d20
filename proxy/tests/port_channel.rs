//! The port channel's device header, compiled by the host's C++ compiler: threads play the kernels, over loopback.
//!
//! Without a C++ compiler the tests print `waived:`; `PORTWAY_REQUIRE_CXX=1` makes that a failure.

mod support;

use std::io::{ErrorKind, Write};
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use libloading::Library;
use portway_fifo::Position;
use portway_proxy::{
    CHANNEL_VERSION, Error, Idle, MAX_PUT_BYTES, MAX_SIZE, OpSet, PortChannel, PortChannelHandle, Proxy,
    Request, RunConfig, Stop,
};
use support::script::{Scripted, add_fifo, scripted_channel};
use support::{LIMIT, Pair};

const OK: u64 = 0;
const TIMEOUT: u64 = 1;
const INVALID: u64 = 5;
const FAILED: u64 = 6;

/// What a push returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct Outcome {
    status: u64,
    position: u64,
}

type Handle = *const PortChannelHandle;

/// The calls of `device/channel.cpp`. The library that they lie in is never unloaded.
struct Device {
    put: unsafe extern "C" fn(Handle, u64, u64, u64) -> Outcome,
    put_signal: unsafe extern "C" fn(Handle, u64, u64, u64) -> Outcome,
    put_signal_flush: unsafe extern "C" fn(Handle, u64, u64, u64) -> u64,
    signal: unsafe extern "C" fn(Handle, u64) -> Outcome,
    flush: unsafe extern "C" fn(Handle, u64) -> u64,
    wait: unsafe extern "C" fn(Handle, u64) -> u64,
    poll: unsafe extern "C" fn(Handle) -> u64,
    error: unsafe extern "C" fn(Handle) -> u64,
    request: unsafe extern "C" fn(u32, u32, u64, u64, u64, *mut u64),
    facts: unsafe extern "C" fn(*mut u64),
}

/// A channel as the header sees it. The channel itself is kept, so that the handle stays valid.
struct Kernel {
    device: &'static Device,
    handle: PortChannelHandle,
    _channel: PortChannel,
}

impl Kernel {
    fn new(device: &'static Device, channel: &PortChannel) -> Self {
        Kernel { device, handle: channel.handle(), _channel: channel.clone() }
    }

    fn put(&self, source: u64, destination: u64, len_bytes: u64) -> Outcome {
        // SAFETY: the handle is valid while `self._channel` lives; the header touches it atomically only.
        unsafe { (self.device.put)(&self.handle, source, destination, len_bytes) }
    }

    fn put_signal(&self, source: u64, destination: u64, len_bytes: u64) -> Outcome {
        // SAFETY: as in `put`.
        unsafe { (self.device.put_signal)(&self.handle, source, destination, len_bytes) }
    }

    fn put_signal_flush(&self, source: u64, destination: u64, len_bytes: u64) -> u64 {
        // SAFETY: as in `put`.
        unsafe { (self.device.put_signal_flush)(&self.handle, source, destination, len_bytes) }
    }

    fn signal(&self, n: u64) -> Outcome {
        // SAFETY: as in `put`.
        unsafe { (self.device.signal)(&self.handle, n) }
    }

    fn flush(&self, timeout: Duration) -> u64 {
        // SAFETY: as in `put`.
        unsafe { (self.device.flush)(&self.handle, timeout.as_nanos() as u64) }
    }

    fn wait(&self, timeout: Duration) -> u64 {
        // SAFETY: as in `put`.
        unsafe { (self.device.wait)(&self.handle, timeout.as_nanos() as u64) }
    }

    fn poll(&self) -> u64 {
        // SAFETY: as in `put`.
        unsafe { (self.device.poll)(&self.handle) }
    }

    fn error(&self) -> u64 {
        // SAFETY: as in `put`.
        unsafe { (self.device.error)(&self.handle) }
    }
}

/// The compiled header, or `None` after a `waived:` line.
fn device() -> Option<&'static Device> {
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    DEVICE.get_or_init(build).as_ref()
}

fn build() -> Option<Device> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let shared = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("channel-{}.so", std::process::id()));
    let mut compile = Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".into()));
    compile
        .args(["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-fPIC", "-shared", "-I"])
        .arg(root.join("device"))
        .arg("-I")
        .arg(root.join("../fifo/device"))
        .arg(root.join("tests/device/channel.cpp"))
        .arg("-o")
        .arg(&shared);
    match compile.output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            assert!(std::env::var_os("PORTWAY_REQUIRE_CXX").is_none_or(|it| it != "1"), "no C++ compiler");
            // Not `println!`, which the test harness would swallow.
            let _ = writeln!(std::io::stderr(), "waived: no C++ compiler, so the header is not tested");
            return None;
        }
        Err(error) => panic!("{compile:?}: {error}"),
    }
    // SAFETY: the library was just built from our source; it has no constructors but those of the C++ library.
    let library = Box::leak(Box::new(unsafe { Library::new(&shared) }.unwrap()));
    let _ = std::fs::remove_file(shared);
    macro_rules! call {
        ($name:literal) => {
            // SAFETY: `channel.cpp` defines the symbol with the signature of the field that it goes to.
            *unsafe { library.get(concat!("portway_test_", $name, "\0").as_bytes()) }.unwrap()
        };
    }
    Some(Device {
        put: call!("put"),
        put_signal: call!("put_signal"),
        put_signal_flush: call!("put_signal_flush"),
        signal: call!("signal"),
        flush: call!("flush"),
        wait: call!("wait"),
        poll: call!("poll"),
        error: call!("error"),
        request: call!("request"),
        facts: call!("facts"),
    })
}

/// A pair whose proxy runs, and both ends as kernels.
fn running(device: &'static Device) -> (Proxy, Pair, Kernel, Kernel) {
    let mut pair = Pair::new(portway_proxy::Config::default(), 1 << 16);
    let engine = std::mem::replace(&mut pair.engine, support::empty_engine());
    let proxy = Proxy::start(engine, RunConfig { idle: Idle::Yield, ..RunConfig::default() }).unwrap();
    let (a, b) = (Kernel::new(device, &pair.a), Kernel::new(device, &pair.b));
    (proxy, pair, a, b)
}

#[test]
fn the_handle_is_the_same_struct_on_both_sides() {
    let Some(device) = device() else { return };
    let mut facts = [0u64; 12];
    // SAFETY: `channel.cpp` writes twelve facts.
    unsafe { (device.facts)(facts.as_mut_ptr()) };
    let offsets = [
        offset_of!(PortChannelHandle, version),
        offset_of!(PortChannelHandle, channel),
        offset_of!(PortChannelHandle, fifo),
        offset_of!(PortChannelHandle, source_len_bytes),
        offset_of!(PortChannelHandle, destination_len_bytes),
        offset_of!(PortChannelHandle, frontier),
        offset_of!(PortChannelHandle, signal),
        offset_of!(PortChannelHandle, expected),
        size_of::<PortChannelHandle>(),
    ];
    assert_eq!(facts[..9], offsets.map(|offset| offset as u64));
    assert_eq!(facts[9..], [u64::from(CHANNEL_VERSION), u64::from(MAX_SIZE), MAX_PUT_BYTES]);
}

#[test]
fn both_sides_write_the_same_trigger() {
    let Some(device) = device() else { return };
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for _ in 0..10_000 {
        let (bits, op) = (next() % 7 + 1, [OpSet::PUT, OpSet::SIGNAL, OpSet::FLUSH]);
        let mut set: Option<OpSet> = None;
        for (i, op) in op.into_iter().enumerate() {
            if bits >> i & 1 == 1 {
                set = Some(set.map_or(op, |set| set.and(op)));
            }
        }
        let request = Request {
            op: set.unwrap(),
            channel: (next() >> 49) as u16,
            size: (next() >> 36) as u32,
            source_offset_bytes: next() >> 24,
            destination_offset_bytes: next() >> 24,
        };
        let mut words = [0u64; 2];
        let Request { channel, size, source_offset_bytes: source, destination_offset_bytes: to, .. } =
            request;
        // SAFETY: `channel.cpp` writes two words.
        unsafe { (device.request)(bits as u32, channel.into(), size.into(), source, to, words.as_mut_ptr()) };
        let trigger = request.encode().unwrap();
        assert_eq!(words, trigger.words(), "{request:?}");
        assert_eq!(Request::decode(trigger), request);
    }
}

#[test]
fn puts_from_the_header_arrive_with_their_signals() {
    let Some(device) = device() else { return };
    let (proxy, pair, a, b) = running(device);
    for round in 0..200u64 {
        let len = 1 + round * 300;
        let bytes: Vec<u8> = (0..len).map(|i| (i * 11 + round) as u8).collect();
        pair.a_source.write(1, &bytes).unwrap();
        assert_eq!(a.put_signal(1, 2, len).status, OK);
        assert_eq!(b.wait(LIMIT), OK);
        let mut seen = vec![0; len as usize];
        pair.b_destination.read(2, &mut seen).unwrap();
        assert_eq!(seen, bytes);
        assert_eq!(a.flush(LIMIT), OK);
    }
    assert_eq!(b.poll(), TIMEOUT, "no signal is left");
    assert_eq!(b.signal(3).status, OK);
    for _ in 0..3 {
        assert_eq!(a.wait(LIMIT), OK);
    }
    assert_eq!(a.poll(), TIMEOUT);
    assert_eq!(a.put(0, 0, 8).status, OK);
    assert_eq!(a.put_signal_flush(0, 8, 8), OK);
    assert_eq!(b.poll(), OK, "flushed, so it has arrived");
    let report = proxy.stop(Stop::Drain { within: LIMIT });
    assert!(report.drained, "{report:?}");
    assert_eq!(pair.a.frontier(), Position(402));
}

#[test]
fn signals_are_shared_out_among_waiting_threads() {
    let Some(device) = device() else { return };
    let (proxy, _pair, a, b) = running(device);
    std::thread::scope(|scope| {
        let waiters: Vec<_> =
            (0..8).map(|_| scope.spawn(|| (0..50).filter(|_| b.wait(LIMIT) == OK).count())).collect();
        for _ in 0..4 {
            assert_eq!(a.signal(100).status, OK);
        }
        let woken: usize = waiters.into_iter().map(|waiter| waiter.join().unwrap()).sum();
        assert_eq!(woken, 400);
    });
    assert_eq!(b.poll(), TIMEOUT);
    drop(proxy);
}

#[test]
fn what_leaves_the_regions_is_refused() {
    let Some(device) = device() else { return };
    let (proxy, pair, a, _b) = running(device);
    let len = 1u64 << 16;
    for (source, destination, len_bytes) in [
        (0, 0, 0),
        (0, 0, len + 1),
        (1, 0, len),
        (0, 1, len),
        (len, 0, 1),
        (u64::MAX, 0, 2),
        (0, u64::MAX, 2),
        (0, 0, u64::MAX),
        (2, 2, u64::MAX),
    ] {
        assert_eq!(
            a.put(source, destination, len_bytes).status,
            INVALID,
            "{source} {destination} {len_bytes}"
        );
    }
    for n in [0, u64::from(MAX_SIZE) + 1, u64::MAX] {
        assert_eq!(a.signal(n).status, INVALID, "{n}");
    }
    assert_eq!(a.flush(Duration::from_secs(3601)), INVALID);
    assert_eq!(a.wait(Duration::from_secs(3601)), INVALID);
    let mut newer = Kernel::new(device, &pair.a);
    newer.handle.version += 1;
    assert_eq!(newer.put(0, 0, 1).status, INVALID);
    assert_eq!(newer.flush(LIMIT), INVALID);
    assert_eq!(newer.wait(LIMIT), INVALID);
    assert_eq!(proxy.stop(Stop::Cancel).stats.triggers, 0, "nothing was pushed");
}

#[test]
fn a_wait_ends_with_its_time_and_with_its_channel() {
    let Some(device) = device() else { return };
    let (proxy, _pair, a, b) = running(device);
    assert_eq!(b.wait(Duration::from_millis(5)), TIMEOUT);
    assert_eq!(b.error(), 0);
    std::thread::scope(|scope| {
        let waiters: Vec<_> = (0..4).map(|_| scope.spawn(|| b.wait(LIMIT))).collect();
        drop(proxy);
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), FAILED);
        }
    });
    assert_eq!(b.error(), 5, "stopped");
    assert_eq!(b.wait(LIMIT), FAILED);
    assert_eq!(a.flush(LIMIT), FAILED);
}

/// A flush is a push and a wait, and both together have its time: here the push takes three quarters of it.
#[test]
fn a_flush_whose_push_had_to_wait_ends_in_its_time() {
    const TIME: Duration = Duration::from_millis(800);
    for by_header in [false, true] {
        let mut engine = support::empty_engine();
        let (fifo, _ring) = add_fifo(&mut engine, 64);
        let scripted = Scripted::new();
        scripted.script().holds = true;
        let port = engine.add_port(scripted.port()).unwrap();
        let channel = engine.add_channel(scripted_channel(fifo, port, 4096)).unwrap();
        let producer = channel.producer().unwrap().with_timeout(TIME).unwrap();
        for _ in 0..64 {
            producer.signal(1).unwrap();
        }
        let kernel = match device() {
            Some(device) if by_header => Some(Kernel::new(device, &channel)),
            None if by_header => return,
            _ => None,
        };
        let timed_out = move || match kernel {
            Some(kernel) => kernel.flush(TIME) == TIMEOUT,
            None => matches!(producer.flush(), Err(Error::Fifo(portway_fifo::Error::Timeout { .. }))),
        };
        let flushing = std::thread::spawn(move || {
            let begun = Instant::now();
            (timed_out(), begun.elapsed())
        });
        // So long does the push wait. If the machine makes it more or less, the flush has to end in its time all the same.
        std::thread::sleep(TIME * 3 / 4);
        // Takes what is in the ring, so that there is room; nothing of it completes.
        for step in 0..64 {
            engine.step(Duration::from_millis(step));
        }
        let (timed_out, took) = flushing.join().unwrap();
        assert!(timed_out, "by the header: {by_header}: the flush did not time out");
        assert!(took < TIME * 5 / 4, "by the header: {by_header}: a flush of {TIME:?} took {took:?}");
    }
}
