//! Memory of a GPU: dma-buf, peer memory, segments, ordering. No GPU is needed to see what the device is asked for.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use portway_fifo::memory::{DmaBuf, IpcHandle, IpcKind, Memory, Segment};
use portway_fifo::{Heap, Place, Region};
use portway_proxy::TransportError;
use portway_proxy::transport::{Binding, Transport};
use portway_transport_ib::{Config, Error, Gpu as GpuConfig, Ib, sys};
use support::fabric::{Make, UNSUPPORTED, World};
use support::gpu::{Gpu, GpuPlatform};
use support::link::{Link, connect};

const RELAXED: u32 = sys::IBV_ACCESS_RELAXED_ORDERING.0;
/// `EPROTONOSUPPORT`.
const UNKNOWN_CALL: i32 = 93;
const WRITES: u32 = sys::IBV_ACCESS_LOCAL_WRITE.0 | sys::IBV_ACCESS_REMOTE_WRITE.0;

fn config() -> Config {
    let gpu = GpuConfig {
        ordinal: 0,
        pci_address: "0000:3b:00.0".into(),
        write_ordering: 100,
        platform: Arc::new(GpuPlatform),
    };
    Config { gpu: Some(gpu), ..Config::default() }
}

fn open(make: Make) -> (World, Ib) {
    let world = World::new(&[make]);
    let ib = Ib::open_with(&world.verbs(), config()).unwrap();
    (world, ib)
}

/// A device on which the addresses of `gpu` count as device memory.
fn beside(gpu: &Gpu) -> Make {
    let begin = gpu.base.address();
    Make { device_memory: (begin, begin + gpu.base.len_bytes()), ..Make::default() }
}

#[test]
fn host_memory_is_registered_relaxed_and_signal_words_are_not() {
    let world = World::new(&[Make::default()]);
    let ib = Ib::open_with(&world.verbs(), Config::default()).unwrap();
    let region = Heap.allocate(10_000).unwrap();
    ib.register(&region).unwrap();
    let word = ib.signal_word().unwrap();
    assert_eq!(
        world.log().pages,
        [(region.address(), 10_000, WRITES | RELAXED), (word.region.address(), 8, WRITES)]
    );
}

/// Host memory that notes, when it is freed, how many registrations there are.
#[derive(Debug)]
struct Noting(Region, World, Arc<AtomicUsize>);

impl Drop for Noting {
    fn drop(&mut self) {
        self.2.store(self.1.left().3, Ordering::Release);
    }
}

impl Memory for Noting {
    fn segments(&self, range: Segment) -> Result<Vec<Segment>, portway_fifo::Error> {
        self.0.owner().segments(range)
    }
    fn dma_buf(&self, segment: Segment) -> Result<DmaBuf, portway_fifo::Error> {
        self.0.owner().dma_buf(segment)
    }
    fn ipc_handle(&self, segment: Segment, kind: IpcKind) -> Result<IpcHandle, portway_fifo::Error> {
        self.0.owner().ipc_handle(segment, kind)
    }
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), portway_fifo::Error> {
        self.0.owner().read(address, into)
    }
    fn write(&self, address: u64, from: &[u8]) -> Result<(), portway_fifo::Error> {
        self.0.owner().write(address, from)
    }
}

#[test]
fn memory_is_freed_after_its_registration_has_ended() {
    const NOT_YET: usize = usize::MAX;
    let world = World::new(&[Make::default()]);
    for refuses in [false, true] {
        let ib = Ib::open_with(&world.verbs(), Config::default()).unwrap();
        let heap = Heap.allocate(4096).unwrap();
        let (address, place) = (heap.address(), heap.place());
        let left = Arc::new(AtomicUsize::new(NOT_YET));
        let noting = Arc::new(Noting(heap, world.clone(), left.clone()));
        // SAFETY: the heap allocation that the memory holds; nobody makes references to it.
        let region = unsafe { Region::new(address, 4096, place, noting) }.unwrap();
        drop(ib.register(&region).unwrap());
        drop(region);
        world.refuse_deregistration(refuses);
        drop(ib);
        // In the case of a refusal it stays for good.
        let expected = if refuses { NOT_YET } else { 0 };
        assert_eq!(left.load(Ordering::Acquire), expected, "refuses: {refuses}");
    }
}

#[test]
fn gpu_memory_goes_by_whole_pages_and_the_real_offset() {
    let mut gpu = Gpu::new(64 << 10, 1 << 30);
    gpu.offset_bytes = 2 << 20;
    let gpu = Arc::new(gpu);
    let (world, ib) = open(beside(&gpu));
    ib.register(&gpu.region(5000, 3000)).unwrap();
    let base = gpu.base.address();
    // 5,000 to 8,000 lies in the pages from 4,096 to 8,192.
    assert_eq!(world.log().dma_bufs, [((2 << 20) + 4096, 4096, base + 4096, WRITES | RELAXED)]);
    let asked = gpu.asked.lock().unwrap().clone();
    assert_eq!((asked[0].address, asked[0].len_bytes), (base + 5000, 3000));
    assert!(world.log().pages.is_empty());
}

#[test]
fn gpu_memory_that_ends_within_a_page_is_not_asked_for_more() {
    let gpu = Arc::new(Gpu::new(5000, 1 << 30));
    let (world, ib) = open(beside(&gpu));
    ib.register(&gpu.region(0, 5000)).unwrap();
    assert_eq!(world.log().dma_bufs, [(0, 8192, gpu.base.address(), WRITES | RELAXED)]);
}

#[test]
fn a_part_of_gpu_memory_is_exported_as_that_part() {
    let gpu = Arc::new(Gpu::new(64 << 10, 16 << 10));
    let (_world, ib) = open(beside(&gpu));
    for (offset_bytes, len_bytes) in [(0, 8), (100, 20_000), (16 << 10, 16 << 10), (60_000, 5_536)] {
        let memory = ib.register(&gpu.region(offset_bytes, len_bytes)).unwrap();
        let there = ib.import(&ib.export(&memory).unwrap()).unwrap();
        assert_eq!(there.len_bytes, len_bytes, "at {offset_bytes}");
    }
}

#[test]
fn every_segment_is_registered_and_puts_cross_them() {
    let gpu = Arc::new(Gpu::new(64 << 10, 16 << 10));
    let there = Arc::new(Gpu::new(64 << 10, 24 << 10));
    let (world, ib) = open(Make::default());
    let (source, destination) = (gpu.region(1000, 60_000), there.region(3000, 60_000));
    let bytes: Vec<u8> = (0..60_000u32).map(|at| (at % 241) as u8).collect();
    source.write(0, &bytes).unwrap();
    let mut link = Link::with(&ib, &ib, &source, &destination);
    // Four segments of 16 KiB, three of 24 KiB, and one of the signal word.
    assert_eq!(world.log().dma_bufs.len(), 8);
    assert_eq!(link.signal.region.place(), Place::Device(0), "where the data is");
    link.offer(Some((10, 20, 59_900)), Some(1), true).unwrap();
    link.until_complete(1).unwrap();
    let posts = world.log().posts;
    let total: u32 = posts[0][..posts[0].len() - 1].iter().map(|(_, len)| len).sum();
    assert_eq!((posts.len(), posts[0].len() - 1, total), (1, 6, 59_900));
    let mut seen = vec![0; 59_900];
    destination.read(20, &mut seen).unwrap();
    assert!(seen == bytes[10..59_910]);
    assert_eq!(link.word(), 1);
}

#[test]
fn segments_that_do_not_cover_the_region_are_refused() {
    let mut gpu = Gpu::new(64 << 10, 16 << 10);
    gpu.truncated = true;
    let gpu = Arc::new(gpu);
    let (world, ib) = open(beside(&gpu));
    let error = ib.register(&gpu.region(0, 64 << 10)).unwrap_err();
    assert!(error.to_string().contains("segments of a GPU memory"), "{error}");
    assert_eq!(world.left().3, 0, "nothing is half registered");
}

#[test]
fn without_dma_buf_peer_memory_is_taken() {
    let gpu = Arc::new(Gpu::new(64 << 10, 16 << 10));
    // The driver cannot.
    let (world, ib) = open(Make { dma_buf: UNSUPPORTED, peer_memory: 0, ..beside(&gpu) });
    ib.register(&gpu.region(100, 20_000)).unwrap();
    let base = gpu.base.address();
    let lens: Vec<_> = world.log().pages.iter().map(|(address, len, _)| (address - base, *len)).collect();
    assert_eq!(lens, [(100, (16 << 10) - 100), (16 << 10, 20_100 - (16 << 10))]);
    // The kernel does not know the call.
    let (_, old) = open(Make { dma_buf: UNKNOWN_CALL, peer_memory: 0, ..beside(&gpu) });
    old.register(&gpu.region(100, 20_000)).unwrap();
    // The memory cannot.
    let mut plain = Gpu::new(4096, 4096);
    plain.dma_buf = false;
    let plain = Arc::new(plain);
    ib.register(&plain.region(0, 4096)).unwrap();
    // The library cannot.
    let ib = Ib::open_with(&world.old_verbs(), Config { gid_index: Some(1), ..config() }).unwrap();
    ib.register(&gpu.region(0, 4096)).unwrap();
}

#[test]
fn with_neither_the_error_says_so() {
    let gpu = Arc::new(Gpu::new(4096, 4096));
    let (world, ib) = open(Make { dma_buf: UNSUPPORTED, ..beside(&gpu) });
    let error = ib.register(&gpu.region(0, 4096)).unwrap_err();
    let TransportError::Device {
        operation: "registering GPU memory", status: 14, source: Some(source), ..
    } = &error
    else {
        panic!("{error}")
    };
    let text = source.to_string();
    assert!(text.contains("as dma-buf: the device or its driver cannot, errno 95"), "{text}");
    assert!(text.contains("as peer memory: errno 14 (is nvidia-peermem loaded?)"), "{text}");
    assert_eq!(world.left().3, 0);
    // A dma-buf that is there and fails for another reason is not hidden behind the other way.
    let (world, ib) = open(Make { dma_buf: 12, peer_memory: 0, ..beside(&gpu) });
    let TransportError::Device { operation: "ibv_reg_dmabuf_mr", status: 12, .. } =
        ib.register(&gpu.region(0, 4096)).unwrap_err()
    else {
        panic!()
    };
    assert!(world.log().pages.is_empty());
}

#[test]
fn a_gpu_that_was_not_named_is_refused() {
    let gpu = Arc::new(Gpu::new(4096, 4096));
    let world = World::new(&[Make::default()]);
    let plain = Ib::open_with(&world.verbs(), Config::default()).unwrap();
    let error = plain.register(&gpu.region(0, 4096)).unwrap_err();
    assert!(error.to_string().contains("Config::gpu"), "{error}");
    let mut other = config();
    other.gpu.as_mut().unwrap().ordinal = 1;
    let other = Ib::open_with(&world.verbs(), other).unwrap();
    assert!(other.register(&gpu.region(0, 4096)).is_err());
    let mut unordered = config();
    unordered.gpu.as_mut().unwrap().write_ordering = 0;
    let error = Ib::open_with(&world.verbs(), unordered).unwrap_err();
    assert!(matches!(error, Error::Config { what: "the GPU's write_ordering", .. }), "{error}");
}

#[test]
fn a_signal_word_away_from_the_data_is_refused() {
    let gpu = Arc::new(Gpu::new(4096, 4096));
    let (_world, ib) = open(Make::default());
    let (mut port, _other) = connect(&ib, &ib).unwrap();
    let import = |memory| ib.import(&ib.export(memory).unwrap()).unwrap().id;
    let source = ib.register(&Heap.allocate(4096).unwrap()).unwrap();
    let in_gpu = ib.register(&gpu.region(0, 4096)).unwrap();
    let in_host = ib.register(&Heap.allocate(4096).unwrap()).unwrap();
    let word = ib.signal_word().unwrap();
    let (data, host, signal) = (import(&in_gpu), import(&in_host), import(&word));
    port.bind(&Binding { source: source.id, destination: data, signal }).unwrap();
    let error = port.bind(&Binding { source: source.id, destination: host, signal }).unwrap_err();
    assert!(error.to_string().contains("does not lie in the memory of the data"), "{error}");
}
