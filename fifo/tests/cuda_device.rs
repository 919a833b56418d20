//! The feature `cuda`, and the ring between a kernel and the consumer, on a real device.
//!
//! Where there is none, each test prints `waived:` and passes; with `PORTWAY_REQUIRE_CUDA=1` it fails instead. The
//! kernels are compiled at run time, so NVRTC must be there too.
#![cfg(all(feature = "cuda", not(loom)))]

use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bytemuck::bytes_of;
use portway_fifo::cuda::nvrtc::Compiler;
use portway_fifo::cuda::{Context, Driver, Function, Kind, Module, Stream, Warning};
use portway_fifo::memory::{IpcHandle, IpcKind, Segment};
use portway_fifo::{Cause, Config, Error, Fifo, Platform, Region, Words};

/// How long a test waits for what has to happen. Everything on the device gives up sooner.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a kernel waits.
const KERNEL_TIMEOUT: Duration = Duration::from_secs(20);

/// A device for one test at a time: a kernel that stays would hold up what another test frees.
struct Device {
    context: Context,
    module: Module,
    stream: Stream,
    _alone: MutexGuard<'static, ()>,
}

/// The device, or `None` after a line that says why the test is waived.
fn device(test: &str) -> Option<Device> {
    static ALONE: Mutex<()> = Mutex::new(());
    static KERNELS: OnceLock<Vec<u8>> = OnceLock::new();
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (driver, compiler) = match Driver::load().and_then(|driver| Ok((driver, Compiler::load()?))) {
        Ok(both) => both,
        Err(lacking @ (Error::NoLibrary { .. } | Error::Driver { call: "cuInit", status: 100, .. })) => {
            assert_ne!(
                std::env::var("PORTWAY_REQUIRE_CUDA").as_deref(),
                Ok("1"),
                "PORTWAY_REQUIRE_CUDA=1, and {lacking}"
            );
            // Not through `eprintln!`, which the test harness keeps to itself.
            let _ = writeln!(std::io::stderr(), "waived: {test}: {lacking}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let context = Context::new(&driver, 0).unwrap();
    let cubin = KERNELS.get_or_init(|| {
        let source = include_str!("cuda_device/kernels.cu");
        let capability = context.attributes().compute_capability;
        compiler.compile("kernels.cu", source, capability, &[]).unwrap_or_else(|e| panic!("{e}"))
    });
    // SAFETY: the image comes from the compiler.
    let module = unsafe { Module::load(&context, cubin) }.unwrap();
    let stream = Stream::new(&context).unwrap();
    Some(Device { context, module, stream, _alone: alone })
}

/// Skips the test where there is no device.
macro_rules! device_or_return {
    ($test:literal) => {
        match device($test) {
            Some(device) => device,
            None => return,
        }
    };
}

impl Device {
    fn kernel(&self, name: &str) -> Function {
        self.module.function(name).unwrap()
    }

    /// Zeroed page-locked words.
    fn words(&self, len: u64) -> Words {
        Words::new(self.context.host_memory(len * 8).unwrap()).unwrap()
    }

    /// Waits for the stream, then frees what the test has dropped so far.
    fn end(self) {
        self.stream.wait(PATIENCE).unwrap();
        self.context.reclaim().unwrap();
    }
}

/// What the kernels count: `Tally` of `kernels.cu`, in device memory.
struct Tally(Region);

impl Tally {
    fn new(device: &Device) -> Self {
        Tally(device.context.device_memory(32).unwrap())
    }

    fn address(&self) -> u64 {
        self.0.address()
    }

    fn words(&self) -> [u64; 4] {
        let mut words = [0; 4];
        self.0.read(0, bytemuck::bytes_of_mut(&mut words)).unwrap();
        words
    }

    /// Calls that succeeded, calls that failed, and the statuses that were returned.
    fn read(&self) -> (u64, u64, Vec<u32>) {
        let [done, failed, statuses, _] = self.words();
        (done, failed, (0..64).filter(|bit| statuses >> bit & 1 != 0).collect())
    }

    fn misread(&self) -> u64 {
        self.words()[3]
    }
}

/// Waits for a condition; panics with what was awaited and what was seen if it does not come.
fn wait_until<T: std::fmt::Debug>(what: &str, mut see: impl FnMut() -> T, enough: impl Fn(&T) -> bool) -> T {
    let start = Instant::now();
    loop {
        let seen = see();
        if enough(&seen) {
            return seen;
        }
        assert!(start.elapsed() < PATIENCE, "waited {PATIENCE:?} for {what}, saw {seen:?}");
        std::thread::yield_now();
    }
}

fn fifo(device: &Device, slots: u64, timeout: Duration) -> (Fifo, portway_fifo::Consumer) {
    Fifo::new(&device.context, Config { slots, timeout, ..Config::default() }).unwrap()
}

#[test]
fn the_device_describes_itself() {
    let device = device_or_return!("the_device_describes_itself");
    let attributes = device.context.attributes();
    let mut out = std::io::stderr();
    let _ = writeln!(out, "{:?}: {attributes:?}, {:?}", device.context.driver(), device.context.warnings());
    assert!(attributes.compute_capability >= (7, 0));
    assert!(attributes.multiprocessors > 0 && attributes.uuid != [0; 16]);
    assert!(attributes.pci_bus_id.contains(':'));
    let eager = std::env::var("CUDA_MODULE_LOADING").is_ok_and(|mode| mode == "EAGER");
    assert_eq!(device.context.warnings().contains(&Warning::LazyLoading), !eager);
    device.end();
}

#[test]
fn memory_is_zeroed_and_both_sides_read_and_write_it() {
    let device = device_or_return!("memory_is_zeroed_and_both_sides_read_and_write_it");
    let kernel = device.kernel("check_and_add");
    let n = 100_000u64; // 800,000 bytes: several steps of a copy
    for kind in [Kind::Pinned, Kind::Vmm, Kind::Legacy] {
        if kind == Kind::Vmm && !device.context.attributes().vmm {
            continue;
        }
        let region = device.context.allocate(kind, n * 8).unwrap();
        assert_eq!(device.context.kind(region.address()), Ok(kind));
        let mut bytes = vec![0xff; n as usize * 8];
        region.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0), "{kind:?} is not zeroed");
        let words: Vec<u64> = (0..n).map(|i| 40 + i).collect();
        region.write(0, bytemuck::cast_slice(&words)).unwrap();
        let tally = Tally::new(&device);
        let parameters: [u64; 5] = [region.address(), n, 40, 1000, tally.address()];
        let parameters = parameters.each_ref().map(bytes_of);
        // SAFETY: the kernel takes these parameters, and its memory lives until the stream is done.
        unsafe { kernel.launch(&device.stream, [64, 1, 1], [256, 1, 1], 0, &parameters) }.unwrap();
        device.stream.wait(PATIENCE).unwrap();
        assert_eq!(tally.misread(), 0, "{kind:?}: the kernel read something else");
        region.read(0, &mut bytes).unwrap();
        let read: &[u64] = bytemuck::cast_slice(&bytes);
        assert!(read.iter().zip(&words).all(|(read, word)| *read == word + 1000), "{kind:?}");
    }
    device.end();
}

#[test]
fn device_memory_is_exported() {
    let device = device_or_return!("device_memory_is_exported");
    let attributes = device.context.attributes().clone();
    let legacy = device.context.allocate(Kind::Legacy, 1 << 20).unwrap();
    let handle = legacy.owner().ipc_handle(legacy.range(), IpcKind::Legacy).unwrap();
    assert!(matches!(handle, IpcHandle::Legacy(bytes) if bytes != [0; 64]));
    let mut regions = vec![legacy];
    if attributes.vmm {
        let vmm = device.context.allocate(Kind::Vmm, 3 << 20).unwrap();
        let [segment] = vmm.owner().segments(vmm.range()).unwrap()[..] else { panic!("several segments") };
        assert!(segment.address == vmm.address() && segment.len_bytes >= 3 << 20);
        if attributes.posix_fd {
            assert!(matches!(vmm.owner().ipc_handle(vmm.range(), IpcKind::Fd), Ok(IpcHandle::Fd(_))));
        }
        let fabric = vmm.owner().ipc_handle(vmm.range(), IpcKind::Fabric);
        let _ = writeln!(std::io::stderr(), "fabric: attribute {}, handle {fabric:?}", attributes.fabric);
        regions.push(vmm);
    }
    for region in regions {
        let dma_buf = region.slice(5000, 10_000).and_then(|part| part.owner().dma_buf(part.range()));
        if attributes.dma_buf {
            // Memory in one piece need not begin at a page.
            assert_eq!(dma_buf.unwrap().offset_bytes, (region.address() + 5000) % 4096);
        } else {
            assert!(matches!(dma_buf, Err(Error::Unsupported { .. })));
        }
    }
    device.end();
}

/// The control of a run under compute-sanitizer's memcheck, which has to find this; `ci/device-run.sh --sanitizer` asks
/// for it by name. The word behind the allocation is in the same page, so without memcheck nothing is noticed.
#[test]
#[ignore = "a store outside of an allocation, for memcheck to find"]
fn memcheck_finds_a_store_outside() {
    let device = device_or_return!("memcheck_finds_a_store_outside");
    let kernel = device.kernel("check_and_add");
    let (region, tally) = (device.context.allocate(Kind::Legacy, 64).unwrap(), Tally::new(&device));
    let parameters: [u64; 5] = [region.address(), 64 / 8 + 1, 0, 1, tally.address()];
    // SAFETY: the one word too many is in the 512 bytes at least that the driver gives out at a time, unused.
    unsafe { kernel.launch(&device.stream, [1; 3], [1; 3], 0, &parameters.each_ref().map(bytes_of)) }
        .unwrap();
    // Under memcheck the kernel is stopped, and the context is of no more use.
    let _ = device.stream.wait(PATIENCE);
}

/// Two physical pieces, mapped side by side with the driver's own functions, as other allocators do.
#[test]
fn imported_memory_of_two_pieces_has_two_segments() {
    use std::ffi::{c_int, c_void};
    type Granularity = unsafe extern "C" fn(*mut usize, *const c_void, c_int) -> c_int;
    type Reserve = unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> c_int;
    type Create = unsafe extern "C" fn(*mut u64, usize, *const c_void, u64) -> c_int;
    type Map = unsafe extern "C" fn(u64, usize, usize, u64, u64) -> c_int;
    type Access = unsafe extern "C" fn(u64, usize, *const c_void, usize) -> c_int;

    let device = device_or_return!("imported_memory_of_two_pieces_has_two_segments");
    if !device.context.attributes().vmm {
        return device.end();
    }
    // SAFETY: the library is loaded already.
    let library = unsafe { libloading::Library::new("libcuda.so.1") }.unwrap();
    // SAFETY: the driver's function of that name has this type.
    let granularity = *unsafe { library.get::<Granularity>(b"cuMemGetAllocationGranularity\0") }.unwrap();
    // SAFETY: as above.
    let reserve = *unsafe { library.get::<Reserve>(b"cuMemAddressReserve\0") }.unwrap();
    // SAFETY: as above.
    let create = *unsafe { library.get::<Create>(b"cuMemCreate\0") }.unwrap();
    // SAFETY: as above.
    let map = *unsafe { library.get::<Map>(b"cuMemMap\0") }.unwrap();
    // SAFETY: as above.
    let access = *unsafe { library.get::<Access>(b"cuMemSetAccess\0") }.unwrap();
    let address = {
        let _current = device.context.current().unwrap();
        // Page-locked, exportable as a descriptor, on device 0, for NICs if they can.
        let for_nics = u32::from(device.context.attributes().gpu_direct_rdma_with_vmm) << 8;
        let properties: [u32; 8] = [1, 1, 1, 0, 0, 0, for_nics, 0];
        let properties = properties.as_ptr().cast();
        let (mut len, mut address) = (0, 0);
        // SAFETY: all arguments outlive the call.
        assert_eq!(unsafe { granularity(&mut len, properties, 0) }, 0);
        assert_eq!(len, 2 << 20);
        // SAFETY: as above.
        assert_eq!(unsafe { reserve(&mut address, 2 * len, 0, 0, 0) }, 0);
        for piece in [0, len] {
            let mut handle = 0;
            // SAFETY: as above.
            assert_eq!(unsafe { create(&mut handle, len, properties, 0) }, 0);
            // SAFETY: the range was reserved above.
            assert_eq!(unsafe { map(address + piece as u64, len, 0, handle, 0) }, 0);
        }
        let description: [u32; 3] = [1, 0, 3]; // device 0, read and write
        // SAFETY: the range was mapped above.
        assert_eq!(unsafe { access(address, 2 * len, description.as_ptr().cast(), 1) }, 0);
        address
    };
    assert_eq!(device.context.kind(address), Ok(Kind::Vmm));
    // SAFETY: the range is never unmapped, and nothing else uses it.
    let region = unsafe { device.context.import_raw(address + 4096, 3 << 20, Arc::new(())) }.unwrap();
    let piece = |n: u64| Segment { address: address + n * (2 << 20), len_bytes: 2 << 20 };
    assert_eq!(region.owner().segments(region.range()), Ok(vec![piece(0), piece(1)]));
    let part = Segment { address: address + (2 << 20), len_bytes: 64 };
    assert!(matches!(region.owner().ipc_handle(part, IpcKind::Fd), Ok(IpcHandle::Fd(_))));
    if device.context.attributes().dma_buf {
        region.owner().dma_buf(region.range()).unwrap(); // one descriptor across both
    }
    let bytes: Vec<u8> = (0..3u32 << 20).map(|i| (i % 251) as u8).collect();
    region.write(0, &bytes).unwrap();
    let mut read = vec![0; bytes.len()];
    region.read(0, &mut read).unwrap();
    assert!(read == bytes);
    device.end();
}

#[test]
fn a_context_gives_everything_back() {
    let device = device_or_return!("a_context_gives_everything_back");
    let Device { context, module, stream, _alone } = device;
    let function = module.function("stay").unwrap();
    let region = context.device_memory(1).unwrap();
    let clone = context.clone();
    drop((module, stream, region));
    let Err(Error::Busy { shares, .. }) = clone.close() else { panic!("it closed under a function") };
    assert_eq!(shares, 2, "the function and the context");
    drop(function);
    assert_eq!(context.quarantined().modules, 1);
    context.close().unwrap();
}

#[derive(Clone, Copy, Debug)]
enum Form {
    Scalar,
    Warp,
    Batch,
    /// All of them, by lanes that part and meet again.
    Divergent,
}

#[test]
fn every_trigger_arrives_once_in_order_and_after_its_payload() {
    let device = device_or_return!("every_trigger_arrives_once_in_order_and_after_its_payload");
    let forms = [
        (Form::Scalar, "push_scalar"),
        (Form::Warp, "push_warps"),
        (Form::Batch, "push_batches"),
        (Form::Divergent, "push_divergent"),
    ];
    for (form, name) in forms {
        let kernel = device.kernel(name);
        for blocks in [1, 32, 132] {
            for threads in [1, 32, 256] {
                for slots in [64, 512, 4096] {
                    let case = format!("{form:?}, {blocks} x {threads} threads, {slots} slots");
                    push_and_consume(&device, &kernel, blocks, threads, slots, &case);
                    device.context.reclaim().unwrap();
                }
            }
        }
    }
    device.end();
}

/// A FIFO whose empty slots hold what no producer pushes: a slot taken too early, or half of one, is seen.
fn poisoned_fifo(device: &Device, slots: u64) -> (Fifo, portway_fifo::Consumer) {
    const POISON: u64 = 0x7bad_7bad_7bad_7bad; // bit 63 is clear, as it is in an empty slot of the first lap
    let host = device.context.host_memory(Fifo::host_len_bytes(slots)).unwrap();
    let words = Words::new(host.clone()).unwrap();
    let memory = device.context.device_memory(Fifo::DEVICE_LEN_BYTES).unwrap();
    let config = Config { slots, timeout: KERNEL_TIMEOUT, ..Config::default() };
    let (fifo, consumer) = Fifo::in_memory(host, memory, config).unwrap();
    let first = (fifo.handle().slots - words.region().address()) / 8;
    words[first as usize..].iter().for_each(|word| word.store(POISON, Ordering::Relaxed));
    assert_eq!(consumer.peek(), None);
    (fifo, consumer)
}

fn push_and_consume(device: &Device, kernel: &Function, blocks: u32, threads: u32, slots: u64, case: &str) {
    let producers = u64::from(blocks) * u64::from(threads);
    // Three laps or more, so that positions wrap around the ring and producers wait.
    let each = (3 * slots).div_ceil(producers).max(3);
    let total = producers * each;
    let (fifo, mut consumer) = poisoned_fifo(device, slots);
    let payload = device.words(total);
    let tally = Tally::new(device);
    let (handle, payload_at, tally_at) = (fifo.handle(), payload.region().address(), tally.address());
    let parameters = [bytes_of(&handle), bytes_of(&each), bytes_of(&payload_at), bytes_of(&tally_at)];
    // SAFETY: the kernel takes these parameters, and its memory lives until the stream is done.
    unsafe { kernel.launch(&device.stream, [blocks, 1, 1], [threads, 1, 1], 0, &parameters) }.unwrap();

    let mut next = vec![0u64; producers as usize];
    let mut wrong: HashMap<&str, u64> = HashMap::new();
    let (mut taken, start) = (0, Instant::now());
    while taken < total && start.elapsed() < PATIENCE && consumer.closed().is_none() {
        taken += consumer.drain(256, |_, trigger| {
            let [producer, number] = trigger.words();
            let expected = next.get_mut(producer as usize).filter(|next| **next == number);
            match expected {
                Some(next) => *next += 1,
                None => *wrong.entry("order").or_default() += 1,
            }
            let index = producer.wrapping_mul(each).wrapping_add(number);
            let word = payload.get(index as usize).map(|word| word.load(Ordering::Relaxed));
            if word != Some(index.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1)) {
                *wrong.entry("payload").or_default() += 1;
            }
        }) as u64;
    }
    if taken < total {
        fifo.abort();
    }
    device.stream.wait(PATIENCE).unwrap();
    let calls = total + producers; // each producer syncs once
    assert_eq!((taken, tally.read()), (total, (calls, 0, vec![0])), "{case}: {:?}", consumer.closed());
    assert!(wrong.is_empty(), "{case}: {wrong:?}");
    assert!(consumer.peek().is_none(), "{case}: one too many");
}

/// Lanes of a warp that wait for room in FIFOs of their own: each goes on when its own consumer does, whatever the
/// others wait for.
#[test]
fn lanes_in_different_fifos_do_not_wait_for_each_other() {
    let device = device_or_return!("lanes_in_different_fifos_do_not_wait_for_each_other");
    const LANES: u64 = 32;
    const SLOTS: u64 = 64;
    let (fifos, mut consumers): (Vec<_>, Vec<_>) =
        (0..LANES).map(|_| fifo(&device, SLOTS, KERNEL_TIMEOUT)).unzip();
    let handles: Vec<_> = fifos.iter().map(Fifo::handle).collect();
    let handles_len = size_of_val(handles.as_slice()) as u64;
    let (memory, left) = (device.context.device_memory(handles_len).unwrap(), device.words(LANES));
    memory.write(0, bytemuck::cast_slice(&handles)).unwrap();
    let tally = Tally::new(&device);
    let parameters: [u64; 4] = [memory.address(), SLOTS + 1, left.region().address(), tally.address()];
    let kernel = device.kernel("push_apart");
    // SAFETY: the kernel takes these parameters, and its memory lives until the stream is done.
    unsafe {
        kernel.launch(&device.stream, [1; 3], [LANES as u32, 1, 1], 0, &parameters.each_ref().map(bytes_of))
    }
    .unwrap();
    wait_until("full rings", || tally.read().0, |&done| done == LANES * SLOTS);
    // From the last lane on, so that a lane which needs an earlier one's end would have to wait for a timeout.
    for (lane, consumer) in consumers.iter_mut().enumerate().rev() {
        let start = Instant::now();
        assert_eq!(consumer.drain(SLOTS as usize, |_, _| {}), SLOTS as usize, "lane {lane}");
        wait_until("the trigger that had no room", || consumer.drain(1, |_, _| {}), |&n| n == 1);
        let stored = start.elapsed();
        wait_until("the end of the call", || left[lane].load(Ordering::Acquire), |&word| word == 1);
        let took = start.elapsed();
        let limit = Duration::from_secs(1);
        assert!(took < limit, "lane {lane} had stored after {stored:?} and was back after {took:?}");
    }
    device.stream.wait(PATIENCE).unwrap();
    assert_eq!(tally.read(), (LANES * (SLOTS + 1), 0, vec![0]));
    device.end();
}

/// The control of the tests above: without a consumer a push times out, and says so on both sides.
#[test]
fn without_a_consumer_a_push_times_out() {
    let device = device_or_return!("without_a_consumer_a_push_times_out");
    let (fifo, mut consumer) = fifo(&device, 64, Duration::from_millis(50));
    let (tally, handle) = (Tally::new(&device), fifo.handle());
    let (n, tally_at) = (1000u64, tally.address());
    let kernel = device.kernel("push_until_it_fails");
    let parameters = [bytes_of(&handle), bytes_of(&n), bytes_of(&tally_at)];
    // SAFETY: the kernel takes these parameters, and its memory lives until the stream is done.
    unsafe { kernel.launch(&device.stream, [1; 3], [1; 3], 0, &parameters) }.unwrap();
    device.stream.wait(PATIENCE).unwrap();
    assert_eq!(tally.read(), (64, 1, vec![0, 1]));
    let broken = Error::Broken { cause: Cause::Timeout, position: portway_fifo::Position(64) };
    assert_eq!(consumer.closed(), Some(broken));
    assert_eq!(consumer.drain(1000, |_, _| {}), 64);
    consumer.reset().unwrap();
    assert_eq!((consumer.closed(), consumer.position().0), (None, 65));
    // SAFETY: as above.
    unsafe { kernel.launch(&device.stream, [1; 3], [1; 3], 0, &parameters) }.unwrap();
    let taken = wait_until("the first push after a reset", || consumer.drain(1, |_, _| {}), |&n| n == 1);
    assert_eq!(taken, 1);
    fifo.abort();
    device.end();
}

#[test]
fn an_abort_ends_a_push_that_waits() {
    let device = device_or_return!("an_abort_ends_a_push_that_waits");
    let (fifo, consumer) = fifo(&device, 64, KERNEL_TIMEOUT);
    let (tally, handle) = (Tally::new(&device), fifo.handle());
    let (n, tally_at) = (1000u64, tally.address());
    let kernel = device.kernel("push_until_it_fails");
    let parameters = [bytes_of(&handle), bytes_of(&n), bytes_of(&tally_at)];
    // SAFETY: the kernel takes these parameters, and its memory lives until the stream is done.
    unsafe { kernel.launch(&device.stream, [1; 3], [1; 3], 0, &parameters) }.unwrap();
    wait_until("a full ring", || tally.read().0, |&done| done == 64);
    assert_eq!(device.stream.is_idle(), Ok(false), "the push did not wait");
    let start = Instant::now();
    fifo.abort();
    device.stream.wait(PATIENCE).unwrap();
    assert!(start.elapsed() < KERNEL_TIMEOUT, "the abort did not end it, its timeout did");
    let (done, failed, statuses) = tally.read();
    // The push had taken its position, or the abort came before it did.
    assert_eq!((done, failed), (64, 1));
    assert!(statuses == [0, 4] || statuses == [0, 2], "{statuses:?}");
    assert!(matches!(consumer.closed(), Some(Error::Aborted | Error::Broken { cause: Cause::Abort, .. })));
    device.end();
}

/// A kernel that stays until `go` is written, after it has begun to run.
fn staying(device: &Device, go: &Region, tally: &Tally) {
    let running = device.words(1);
    let timeout_ns = KERNEL_TIMEOUT.as_nanos() as u64;
    let parameters: [u64; 5] = [running.region().address(), go.address(), 1, timeout_ns, tally.address()];
    let kernel = device.kernel("stay");
    // SAFETY: the kernel takes these parameters; its memory lives until the stream is done, `running` in quarantine.
    unsafe { kernel.launch(&device.stream, [1; 3], [1; 3], 0, &parameters.each_ref().map(bytes_of)) }
        .unwrap();
    wait_until("the kernel", || running[0].load(Ordering::Acquire), |&word| word == 1);
}

#[test]
fn a_value_written_by_a_primed_stream_reaches_a_running_kernel() {
    let device = device_or_return!("a_value_written_by_a_primed_stream_reaches_a_running_kernel");
    let flusher = Stream::new(&device.context).unwrap();
    flusher.prime().unwrap();
    flusher.wait(PATIENCE).unwrap();
    let (word, tally) = (device.context.device_memory(8).unwrap(), Tally::new(&device));
    staying(&device, &word, &tally);
    // SAFETY: the word lives, and is accessed atomically only.
    unsafe { flusher.write_value(word.address(), 1) }.unwrap();
    device.stream.wait(PATIENCE).unwrap();
    assert_eq!(tally.read(), (1, 0, vec![0]));
    device.end();
}

#[test]
fn while_a_kernel_stays_copies_and_drops_go_on_and_a_reclaim_waits() {
    let device = device_or_return!("while_a_kernel_stays_copies_and_drops_go_on_and_a_reclaim_waits");
    let (go, tally) = (device.words(1), Tally::new(&device));
    let other = device.context.device_memory(1 << 20).unwrap();
    let dropped = [Kind::Pinned, Kind::Legacy].map(|kind| device.context.allocate(kind, 64).unwrap());
    staying(&device, go.region(), &tally);
    let mut bytes = [0; 8];
    other.write(8, &[7; 8]).unwrap();
    other.read(8, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 8]);
    drop(dropped);
    assert_eq!(device.stream.is_idle(), Ok(false), "the kernel was to stay meanwhile");
    std::thread::scope(|scope| {
        let reclaim = scope.spawn(|| device.context.reclaim());
        // The control: freeing does wait for the kernel. Half a second is enough to free if it did not.
        std::thread::sleep(Duration::from_millis(500));
        let waited = !reclaim.is_finished();
        go[0].store(1, Ordering::Release);
        let freed = reclaim.join().unwrap().unwrap();
        assert!(waited, "the reclaim did not wait for the kernel");
        assert!(freed.allocations >= 2);
    });
    device.stream.wait(PATIENCE).unwrap();
    assert_eq!(tally.read(), (1, 0, vec![0]), "the kernel left because its time was over");
    device.end();
}
