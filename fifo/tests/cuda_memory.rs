//! The feature `cuda` against a stand-in for the driver: memory of a context.
#![cfg(all(feature = "cuda", not(loom)))]

mod libcuda;

use std::sync::Arc;

use libcuda::Standin;
use portway_fifo::cuda::{Context, Driver, Kind};
use portway_fifo::memory::{IpcHandle, IpcKind, Segment};
use portway_fifo::{Config, Error, Fifo, Place, Platform, Trigger};

fn context(standin: &Standin) -> Context {
    Context::new(&Driver::open(standin.path()).unwrap(), 0).unwrap()
}

#[test]
fn every_kind_of_memory_is_zeroed_read_and_written() {
    let standin = Standin::new();
    let context = context(&standin);
    for (kind, place) in
        [(Kind::Pinned, Place::Pinned), (Kind::Vmm, Place::Device(0)), (Kind::Legacy, Place::Device(0))]
    {
        // Longer than one step of a copy, and no multiple of anything.
        let len = 300_003;
        let region = context.allocate(kind, len).unwrap();
        assert_eq!((region.len_bytes(), region.place()), (len, place));
        assert_eq!(region.address() % 128, 0);
        assert_eq!(context.kind(region.address()), Ok(kind));
        let mut bytes = vec![0xff; len as usize];
        region.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0), "{kind:?} is not zeroed");
        let pattern: Vec<u8> = (0..len - 3).map(|i| (i * 7 % 251) as u8).collect();
        region.write(3, &pattern).unwrap();
        region.read(3, &mut bytes[3..]).unwrap();
        assert_eq!(&bytes[3..], &pattern);
        assert!(matches!(region.read(len - 1, &mut [0; 2]), Err(Error::Range { .. })));
    }
}

#[test]
fn a_fifo_lives_in_a_contexts_memory() {
    let standin = Standin::new();
    let context = context(&standin);
    let (fifo, mut consumer) = Fifo::new(&context, Config { slots: 64, ..Config::default() }).unwrap();
    assert!(matches!(fifo.producer(), Err(Error::NotHostMemory { place: Place::Device(0), .. })));
    // What a kernel would store for its first push.
    let slot = fifo.handle().slots as *mut u64;
    for (word, value) in [7 | 1 << 63, 8 | 1 << 63].into_iter().enumerate() {
        // SAFETY: the slot is mapped and aligned, and accessed atomically only.
        let word = unsafe { std::sync::atomic::AtomicU64::from_ptr(slot.wrapping_add(word)) };
        word.store(value, std::sync::atomic::Ordering::Release);
    }
    let before = standin.all_calls();
    let mut taken = Vec::new();
    consumer.drain(8, |_, trigger| taken.push(trigger));
    fifo.abort();
    assert_eq!(taken, [Trigger::new([7, 8]).unwrap()]);
    assert_eq!(standin.all_calls(), before, "the consumer called the driver");
    consumer.reset().unwrap();
    assert_eq!(consumer.position().0, 0, "the head in device memory did not move");
}

#[test]
fn memory_gives_segments_descriptors_and_handles() {
    let standin = Standin::new();
    let context = context(&standin);
    let vmm = context.allocate(Kind::Vmm, 3 << 20).unwrap();
    let part = vmm.slice(5000, 100).unwrap();
    let whole = Segment { address: vmm.address(), len_bytes: 4 << 20 };
    assert_eq!(part.owner().segments(part.range()), Ok(vec![whole]));
    let dma_buf = part.owner().dma_buf(part.range()).unwrap();
    assert_eq!(dma_buf.offset_bytes, 5000 % 4096);
    assert!(matches!(part.owner().ipc_handle(part.range(), IpcKind::Fd), Ok(IpcHandle::Fd(_))));
    // The process may have no fabric handles, so the memory was made without.
    for kind in [IpcKind::Legacy, IpcKind::Fabric] {
        assert!(matches!(part.owner().ipc_handle(part.range(), kind), Err(Error::Unsupported { .. })));
    }
    standin.set("fabric allowed", 1);
    let shared = context.allocate(Kind::Vmm, 1).unwrap();
    assert!(matches!(
        shared.owner().ipc_handle(shared.range(), IpcKind::Fabric),
        Ok(IpcHandle::Fabric(bytes)) if bytes[..4] == std::process::id().to_ne_bytes()
    ));

    let legacy = context.allocate(Kind::Legacy, 10_000).unwrap();
    let part = legacy.slice(4096, 1).unwrap();
    match part.owner().ipc_handle(part.range(), IpcKind::Legacy).unwrap() {
        // The stand-in's handle says the length of the allocation, not of the part.
        IpcHandle::Legacy(bytes) => assert_eq!(bytes[8..16], 10_000u64.to_ne_bytes(), "not of the base"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(part.owner().ipc_handle(part.range(), IpcKind::Fd), Err(Error::Unsupported { .. })));

    let pinned = context.host_memory(64).unwrap();
    assert!(matches!(pinned.owner().dma_buf(pinned.range()), Err(Error::Unsupported { .. })));
    for kind in [IpcKind::Legacy, IpcKind::Fd, IpcKind::Fabric] {
        assert!(matches!(pinned.owner().ipc_handle(pinned.range(), kind), Err(Error::Unsupported { .. })));
    }
    let outside = Segment { address: pinned.address() - 1, len_bytes: 2 };
    assert!(matches!(pinned.owner().segments(outside), Err(Error::Range { .. })));
}

#[test]
fn exported_descriptors_are_closed_in_programs_that_are_started() {
    use std::os::fd::AsRawFd;
    let standin = Standin::new();
    let region = context(&standin).allocate(Kind::Vmm, 1).unwrap();
    let dma_buf = region.owner().dma_buf(region.range()).unwrap().fd;
    let Ok(IpcHandle::Fd(ipc)) = region.owner().ipc_handle(region.range(), IpcKind::Fd) else { panic!() };
    for fd in [dma_buf, ipc] {
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).unwrap();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
        let flags = u32::from_str_radix(flags, 8).unwrap();
        assert_ne!(flags & 0o2_000_000, 0, "close-on-exec is not set: {flags:o}");
    }
}

#[test]
fn where_the_driver_has_no_vmm_device_memory_is_legacy() {
    for missing in ["cuMemCreate", "cuMemSetAccess", "cuMemAddressReserve"] {
        let standin = Standin::without(&[missing]);
        let context = context(&standin);
        let region = context.device_memory(64).unwrap();
        assert_eq!(context.kind(region.address()), Ok(Kind::Legacy));
        assert!(matches!(context.allocate(Kind::Vmm, 64), Err(Error::Unsupported { .. })));
    }
}

#[test]
fn page_locked_memory_must_have_one_address() {
    let standin = Standin::new();
    let context = context(&standin);
    standin.set("pinned shift", 1 << 40);
    assert!(matches!(context.host_memory(64), Err(Error::Unsupported { .. })));
    assert_eq!(context.quarantined().allocations, 1, "the allocation was lost");
}

#[test]
fn out_of_memory_and_bad_lengths_are_named() {
    let standin = Standin::new();
    let context = context(&standin);
    for (kind, function) in
        [(Kind::Pinned, "cuMemHostAlloc"), (Kind::Legacy, "cuMemAlloc_v2"), (Kind::Vmm, "cuMemCreate")]
    {
        let before = standin.live();
        standin.fail(function, 1, 2);
        assert_eq!(context.allocate(kind, 100).unwrap_err(), Error::OutOfMemory { len_bytes: 100 });
        assert_eq!(standin.live(), before);
        for len in [0, u64::MAX, i64::MAX as u64 + 1] {
            assert!(matches!(context.allocate(kind, len), Err(Error::Range { .. })));
        }
    }
    assert!(matches!(context.allocate(Kind::Vmm, i64::MAX as u64), Err(Error::Range { .. })));
    assert!(matches!(context.allocate(Kind::Pool, 1), Err(Error::Unsupported { .. })));
    // A refusal of fabric handles is no reason to refuse the memory; being out of memory is.
    standin.fail_always("cuMemCreate", 2);
    let calls = standin.calls("cuMemCreate");
    assert!(matches!(context.allocate(Kind::Vmm, 1), Err(Error::OutOfMemory { .. })));
    assert_eq!(standin.calls("cuMemCreate"), calls + 1);
}

#[test]
fn imported_memory_is_what_it_is() {
    let standin = Standin::new();
    let context = context(&standin);
    for kind in [Kind::Pinned, Kind::Vmm, Kind::Legacy] {
        let theirs = context.allocate(kind, 4 << 20).unwrap();
        let address = theirs.address() + 4096;
        let keep = Arc::new(theirs.clone());
        // SAFETY: `keep` keeps the range mapped, and it is accessed atomically only.
        let region = unsafe { context.import_raw(address, 10_000, keep.clone()) }.unwrap();
        assert_eq!(region.place(), theirs.place());
        assert_eq!(context.kind(address), Ok(kind));
        region.write(0, &[5; 10]).unwrap();
        let mut bytes = [0; 10];
        theirs.read(4096, &mut bytes).unwrap();
        assert_eq!(bytes, [5; 10]);
        if kind != Kind::Pinned {
            let whole = Segment { address: theirs.address(), len_bytes: 4 << 20 };
            assert_eq!(region.owner().segments(region.range()), Ok(vec![whole]));
        }
        if kind == Kind::Vmm {
            let handle = |kind| region.owner().ipc_handle(region.range(), kind);
            assert!(matches!(handle(IpcKind::Fd), Ok(IpcHandle::Fd(_))));
            assert!(matches!(handle(IpcKind::Fabric), Err(Error::Unsupported { .. })));
        }
        let before = context.quarantined();
        drop(region);
        assert_eq!(Arc::strong_count(&keep), 2, "the drop let go of the caller's memory");
        assert_eq!(context.quarantined().bytes, before.bytes + 10_000);
        context.reclaim().unwrap();
        assert_eq!(Arc::strong_count(&keep), 1);
    }
}

#[test]
fn what_cannot_be_imported_is_refused() {
    let standin = Standin::new();
    let context = context(&standin);
    let other = Context::new(context.driver(), 1).unwrap();
    let import = |address, len| {
        // SAFETY: nothing is accessed, since each is refused.
        unsafe { context.import_raw(address, len, Arc::new(())) }.unwrap_err()
    };
    let foreign = other.allocate(Kind::Legacy, 64).unwrap();
    assert!(matches!(import(foreign.address(), 64), Error::Unsupported { .. }));
    let local = 0u64;
    assert!(matches!(import(&raw const local as u64, 8), Error::Driver { status: 1, .. }));
    let ours = context.allocate(Kind::Vmm, 2 << 20).unwrap();
    assert!(matches!(import(ours.address(), 0), Error::Range { .. }));
    assert!(matches!(import(ours.address(), u64::MAX), Error::Range { .. }));
    // Past the end of the mapping nothing is mapped.
    assert!(matches!(import(ours.address(), (2 << 20) + 1), Error::Driver { status: 500, .. }));
    let pinned = context.allocate(Kind::Pinned, 4096).unwrap();
    assert!(matches!(import(pinned.address(), 4097), Error::Driver { .. } | Error::Range { .. }));
}

#[test]
fn memory_of_several_pieces_has_several_segments() {
    let standin = Standin::new();
    let context = context(&standin);
    let address = two_pieces(&standin, &context);
    // SAFETY: the mapping is never taken apart, and is accessed atomically only.
    let region = unsafe { context.import_raw(address + 4096, 3 << 20, Arc::new(())) }.unwrap();
    let piece = |n: u64| Segment { address: address + n * (2 << 20), len_bytes: 2 << 20 };
    assert_eq!(region.owner().segments(region.range()), Ok(vec![piece(0), piece(1)]));
    let handle = |range| region.owner().ipc_handle(range, IpcKind::Fd);
    assert!(matches!(handle(region.range()), Err(Error::Range { .. })));
    for range in [Segment { address: address + 4096, len_bytes: 1 }, piece(1)] {
        let range = Segment { len_bytes: range.len_bytes.min(1 << 20), ..range };
        assert!(matches!(handle(range), Ok(IpcHandle::Fd(_))), "{range:?}");
    }
}

/// Two physical allocations of 2 MiB, mapped side by side with the driver's own functions.
fn two_pieces(standin: &Standin, context: &Context) -> u64 {
    use std::ffi::{c_int, c_void};
    type Reserve = unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> c_int;
    type Create = unsafe extern "C" fn(*mut u64, usize, *const c_void, u64) -> c_int;
    type Map = unsafe extern "C" fn(u64, usize, usize, u64, u64) -> c_int;
    let library = standin.library();
    // SAFETY: the driver's function of that name has this type.
    let reserve = *unsafe { library.get::<Reserve>(b"cuMemAddressReserve\0") }.unwrap();
    // SAFETY: as above.
    let create = *unsafe { library.get::<Create>(b"cuMemCreate\0") }.unwrap();
    // SAFETY: as above.
    let map = *unsafe { library.get::<Map>(b"cuMemMap\0") }.unwrap();
    let _current = context.current().unwrap();
    let mut address = 0;
    // SAFETY: the result outlives the call.
    assert_eq!(unsafe { reserve(&mut address, 4 << 20, 0, 0, 0) }, 0);
    // Page-locked, exportable as a descriptor, on device 0.
    let properties: [u32; 8] = [1, 1, 1, 0, 0, 0, 0, 0];
    for piece in [0, 2 << 20] {
        let mut handle = 0;
        // SAFETY: both arguments outlive the call.
        assert_eq!(unsafe { create(&mut handle, 2 << 20, properties.as_ptr().cast(), 0) }, 0);
        // SAFETY: the range was reserved above.
        assert_eq!(unsafe { map(address + piece, 2 << 20, 0, handle, 0) }, 0);
    }
    address
}

/// The driver still knows what was not reclaimed, so the caller's memory must not go before: the next to be mapped at its
/// address would be refused.
#[test]
fn what_a_dropped_context_leaves_in_quarantine_keeps_the_callers_memory() {
    let standin = Standin::new();
    let keeps = [(); 2].map(|()| Arc::new(()));
    {
        let context = context(&standin);
        let host = portway_fifo::Heap.allocate(4096).unwrap();
        // SAFETY: the memory is forgotten below, so it stays.
        let registered = unsafe { context.register_host(host.address(), 4096, keeps[0].clone()) }.unwrap();
        std::mem::forget(host);
        let ours = context.allocate(Kind::Legacy, 64).unwrap();
        // SAFETY: nothing is freed here.
        let imported = unsafe { context.import_raw(ours.address(), 64, keeps[1].clone()) }.unwrap();
        drop((registered, imported, ours));
        assert_eq!(context.quarantined().allocations, 3);
    }
    assert_eq!(keeps.map(|keep| Arc::strong_count(&keep)), [2, 2]);
}
