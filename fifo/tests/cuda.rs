//! The feature `cuda` against a stand-in for the driver: contexts, streams, kernels, and what is dropped.
#![cfg(all(feature = "cuda", not(loom)))]

mod libcuda;

use std::sync::Arc;
use std::time::{Duration, Instant};

use libcuda::{PATIENCE, Standin};
use portway_fifo::cuda::{Context, Driver, Kind, Module, Quarantined, Stream, Warning, WriteOrdering};
use portway_fifo::{Error, Platform};

fn context(standin: &Standin) -> Context {
    Context::new(&Driver::open(standin.path()).unwrap(), 0).unwrap()
}

#[test]
fn a_context_says_what_its_device_can_do() {
    let standin = Standin::new();
    standin.set_attribute(110, -1); // an attribute that this driver does not know
    let context = Context::new(&Driver::open(standin.path()).unwrap(), 1).unwrap();
    assert_eq!(context.driver().version(), 13000);
    assert_eq!(context.driver().device_count(), Ok(2));
    assert_eq!(context.ordinal(), 1);
    let attributes = context.attributes();
    assert_eq!(attributes.name, "Stand-in 1");
    assert_eq!(attributes.uuid, [0x11; 16]);
    assert_eq!(attributes.pci_bus_id, "0000:3c:00.0");
    assert_eq!(attributes.compute_capability, (9, 0));
    assert_eq!(attributes.multiprocessors, 132);
    assert_eq!(attributes.write_ordering, WriteOrdering::Owner);
    assert!(attributes.vmm && attributes.posix_fd && attributes.dma_buf && attributes.stream_write_value);
    assert!(!attributes.gpu_direct_rdma_with_vmm);
}

#[test]
fn lazy_loading_is_warned_of() {
    let standin = Standin::new();
    assert!(!context(&standin).warnings().contains(&Warning::LazyLoading));
    standin.set("loading mode", 2);
    let context = context(&standin);
    assert!(context.warnings().contains(&Warning::LazyLoading));
    assert!(context.warnings()[0].remedy().contains("CUDA_MODULE_LOADING=EAGER"));
}

#[test]
fn streams_write_values_and_are_primed() {
    let standin = Standin::new();
    let context = context(&standin);
    let stream = Stream::new(&context).unwrap();
    let word = context.device_memory(8).unwrap();
    stream.prime().unwrap();
    // SAFETY: the word lives, and is accessed atomically only.
    unsafe { stream.write_value(word.address(), 0x1234_5678_9abc_def0) }.unwrap();
    let mut bytes = [0; 8];
    word.read(0, &mut bytes).unwrap();
    assert_eq!(u64::from_ne_bytes(bytes), 0x1234_5678_9abc_def0);
    // SAFETY: refused before anything is written.
    let misaligned = unsafe { stream.write_value(word.address() + 4, 1) };
    assert!(matches!(misaligned, Err(Error::Alignment { align_bytes: 8, .. })));
    assert_eq!(stream.is_idle(), Ok(true));
    stream.wait(Duration::ZERO).unwrap();
    assert!(matches!(stream.wait(Duration::from_secs(3601)), Err(Error::TimeoutRange { .. })));

    for old in [Standin::without(&["cuStreamWriteValue64_v2"]), Standin::new()] {
        old.set_attribute(122, 0);
        let context = self::context(&old);
        let stream = Stream::new(&context).unwrap();
        let word = context.device_memory(8).unwrap();
        // SAFETY: as above.
        let refused = unsafe { stream.write_value(word.address(), 1) };
        assert!(matches!(refused, Err(Error::Unsupported { .. })));
    }
}

#[test]
fn a_stream_that_is_not_ready_times_out() {
    let standin = Standin::new();
    let context = context(&standin);
    let stream = Stream::new(&context).unwrap();
    standin.fail_always("cuStreamQuery", 600);
    assert_eq!(stream.is_idle(), Ok(false));
    let after = Duration::from_millis(20);
    let timeout = |what| Error::Timeout { what, expected: 0, seen: 600, after };
    assert_eq!(stream.wait(after), Err(timeout("the status of a stream")));

    // A read that timed out may still be writing to the staging bytes: the next one first waits for it.
    context.set_copy_timeout(after).unwrap();
    standin.fail_no_more("cuStreamQuery");
    let word = context.device_memory(8).unwrap();
    standin.fail_always("cuStreamQuery", 600);
    let copies = standin.calls("cuMemcpyDtoHAsync_v2");
    for _ in 0..3 {
        assert_eq!(word.read(0, &mut [0; 8]), Err(timeout("the status of a stream")));
    }
    assert_eq!(standin.calls("cuMemcpyDtoHAsync_v2"), copies + 1);
    standin.fail_no_more("cuStreamQuery");
    word.read(0, &mut [0; 8]).unwrap();
    assert_eq!(standin.calls("cuMemcpyDtoHAsync_v2"), copies + 2);

    // Memory that could not be zeroed in time stays mapped.
    standin.fail_always("cuStreamQuery", 600);
    let before = context.quarantined().allocations;
    assert_eq!(context.device_memory(8).unwrap_err(), timeout("the status of a stream"));
    assert_eq!(context.quarantined().allocations, before + 1);
    assert!(matches!(context.set_copy_timeout(Duration::MAX), Err(Error::TimeoutRange { .. })));
}

#[test]
fn a_thread_stuck_in_a_copy_makes_the_others_time_out() {
    let standin = Standin::new();
    let context = context(&standin);
    context.set_copy_timeout(Duration::from_millis(20)).unwrap();
    let word = context.device_memory(8).unwrap();
    standin.hold("cuMemcpyDtoHAsync_v2");
    std::thread::scope(|scope| {
        let stuck = scope.spawn(|| word.read(0, &mut [0; 8]));
        standin.wait_until_held("cuMemcpyDtoHAsync_v2", 1);
        let error = word.write(0, &[0; 8]).unwrap_err();
        standin.release("cuMemcpyDtoHAsync_v2");
        assert!(matches!(error, Error::Timeout { expected: 0, seen: 1, .. }), "{error}");
        stuck.join().unwrap().unwrap();
    });
    word.write(0, &[0; 8]).unwrap();
}

#[test]
fn modules_load_and_functions_launch() {
    let standin = Standin::new();
    let context = context(&standin);
    let stream = Stream::new(&context).unwrap();
    for len in [1, 7, 8, 9] {
        // SAFETY: the stand-in looks at the first byte only.
        unsafe { Module::load(&context, &vec![b'x'; len]) }.unwrap();
    }
    // SAFETY: as above.
    let module = unsafe { Module::load(&context, b".version 9.0") }.unwrap();
    let function = module.function("push").unwrap();
    assert_eq!(standin.calls("cuFuncLoad"), 1, "its first launch would load it");
    assert!(matches!(module.function("missing"), Err(Error::Driver { status: 500, .. })));
    assert!(matches!(module.function("a\0b"), Err(Error::Unsupported { .. })));
    drop(module);
    // SAFETY: the stand-in runs nothing.
    unsafe { function.launch(&stream, [1; 3], [32, 1, 1], 0, &[&[0; 8], &[0; 4]]) }.unwrap();
    // SAFETY: as above.
    let refused = unsafe { function.launch(&stream, [1; 3], [0; 3], 0, &[]) };
    assert!(matches!(refused, Err(Error::Driver { status: 1, .. })));
    let other = Context::new(context.driver(), 1).unwrap();
    let foreign = Stream::new(&other).unwrap();
    // SAFETY: as above.
    let refused = unsafe { function.launch(&foreign, [1; 3], [1; 3], 0, &[]) };
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
    assert_eq!(context.quarantined().modules, 4, "a function keeps its module");
}

#[test]
fn calls_need_no_current_context_and_disturb_no_capture() {
    let standin = Standin::new();
    standin.set("strict", 1); // as while some thread captures a stream in global mode
    let context = context(&standin);
    for kind in [Kind::Pinned, Kind::Vmm, Kind::Legacy] {
        let region = context.allocate(kind, 64).unwrap();
        region.write(0, &[1; 64]).unwrap();
        region.read(0, &mut [0; 64]).unwrap();
        context.kind(region.address()).unwrap();
    }
    let stream = Stream::new(&context).unwrap();
    stream.prime().unwrap();
    stream.wait(PATIENCE).unwrap();
    // SAFETY: the stand-in looks at the first byte only.
    unsafe { Module::load(&context, b"x") }.unwrap().function("f").unwrap();
    context.reclaim().unwrap();
    assert_eq!(standin.thread_state(), (0, 0), "the thread's context or mode was not restored");
    standin.set_mode(1);
    {
        let _outer = context.current().unwrap();
        let _inner = context.current().unwrap();
        assert_eq!(standin.thread_state(), (2, 2));
    }
    assert_eq!(standin.thread_state(), (0, 1));
}

#[test]
fn a_callers_context_is_used_and_not_released() {
    let standin = Standin::new();
    let primary = Context::new(&Driver::open(standin.path()).unwrap(), 1).unwrap();
    let keep = Arc::new(primary.clone());
    // SAFETY: the primary context lives, and `keep` keeps it.
    let theirs = unsafe { Context::from_raw(primary.driver(), primary.raw(), keep.clone()) }.unwrap();
    assert_eq!((theirs.ordinal(), theirs.raw()), (1, primary.raw()));
    theirs.device_memory(8).unwrap();
    // SAFETY: the default stream is one of the context.
    let default = unsafe { Stream::from_raw(&theirs, std::ptr::null_mut(), keep.clone()) };
    default.wait(PATIENCE).unwrap();
    drop(default);
    assert_eq!(theirs.quarantined().streams, 1);
    theirs.close().unwrap();
    assert_eq!(Arc::strong_count(&keep), 1);
    assert_eq!(standin.calls("cuDevicePrimaryCtxRelease_v2"), 0);
    drop(keep);
    primary.close().unwrap();
    assert_eq!(standin.calls("cuDevicePrimaryCtxRelease_v2"), 1);
    assert_eq!(standin.live(), 0);
}

#[test]
fn close_gives_everything_back_and_only_when_nobody_else_uses_it() {
    let standin = Standin::new();
    let context = context(&standin);
    let region = context.allocate(Kind::Vmm, 8).unwrap();
    let clone = context.clone();
    assert!(matches!(clone.close(), Err(Error::Busy { shares: 2, .. })));
    // SAFETY: `keep` keeps the range mapped, and it is accessed atomically only.
    drop(unsafe { context.import_raw(region.address(), 8, Arc::new(region.clone())) }.unwrap());
    drop(context.allocate(Kind::Pinned, 8).unwrap());
    drop(context.allocate(Kind::Legacy, 8).unwrap());
    drop(Stream::new(&context).unwrap());
    // SAFETY: the stand-in looks at the first byte only.
    drop(unsafe { Module::load(&context, b"x") }.unwrap());
    drop(region);
    let all = context.quarantined();
    // Of the region, the import; the memory itself follows when that is freed.
    assert_eq!((all.allocations, all.bytes, all.streams, all.modules), (3, 8 + 16, 1, 1));
    context.close().unwrap();
    assert_eq!(standin.live(), 0);
}

#[test]
fn close_waits_for_copies_that_may_be_under_way() {
    let standin = Standin::new();
    let context = context(&standin);
    Stream::new(&context).unwrap().prime().unwrap();
    context.reclaim().unwrap();
    let before = standin.calls("cuCtxSynchronize");
    standin.hold("cuCtxSynchronize");
    std::thread::scope(|scope| {
        let close = scope.spawn(|| context.close());
        standin.wait_until_held("cuCtxSynchronize", 1);
        assert_eq!(standin.calls("cuMemFreeHost"), 0, "freed while a copy may use it");
        standin.release("cuCtxSynchronize");
        close.join().unwrap().unwrap();
    });
    assert_eq!((standin.calls("cuCtxSynchronize"), standin.live()), (before + 1, 0));
}

#[test]
fn dropping_never_calls_the_driver() {
    let standin = Standin::new();
    let context = context(&standin);
    let regions = [Kind::Pinned, Kind::Vmm, Kind::Legacy].map(|kind| context.allocate(kind, 8).unwrap());
    let stream = Stream::new(&context).unwrap();
    // SAFETY: the stand-in looks at the first byte only.
    let module = unsafe { Module::load(&context, b"x") }.unwrap();
    let before = standin.all_calls();
    drop((regions, stream, module));
    assert_eq!(standin.all_calls(), before);
    let live = standin.live();
    drop(context);
    assert_eq!((standin.all_calls(), standin.live()), (before, live));
}

#[test]
fn while_a_free_blocks_drops_go_on() {
    for function in ["cuCtxSynchronize", "cuMemFree_v2", "cuMemFreeHost", "cuMemUnmap", "cuStreamDestroy_v2"]
    {
        let standin = Standin::new();
        let context = context(&standin);
        let everything = || {
            let regions =
                [Kind::Pinned, Kind::Vmm, Kind::Legacy].map(|kind| context.allocate(kind, 8).unwrap());
            (regions, Stream::new(&context).unwrap())
        };
        let later = everything();
        drop(everything());
        let first = context.quarantined();
        standin.hold(function);
        std::thread::scope(|scope| {
            let reclaim = scope.spawn(|| context.reclaim());
            // The control: this one does block.
            standin.wait_until_held(function, 1);
            let start = Instant::now();
            drop(later);
            let took = start.elapsed();
            assert!(!reclaim.is_finished());
            let counted = context.quarantined();
            standin.release(function);
            assert!(took < PATIENCE, "a drop took {took:?} while {function} was held");
            assert!(counted.allocations >= 3 && counted.streams >= 1, "{counted:?}");
            assert_eq!(reclaim.join().unwrap(), Ok(first));
        });
        assert_eq!(context.quarantined(), first, "the later ones were lost");
        context.close().unwrap();
        assert_eq!(standin.live(), 0);
    }
}

#[test]
fn what_cannot_be_freed_stays_in_quarantine() {
    let standin = Standin::new();
    let context = context(&standin);
    let functions = [
        "cuCtxSynchronize",
        "cuMemFreeHost",
        "cuMemUnmap",
        "cuMemRelease",
        "cuMemAddressFree",
        "cuMemFree_v2",
        "cuStreamDestroy_v2",
        "cuModuleUnload",
    ];
    for function in functions {
        for kind in [Kind::Pinned, Kind::Vmm, Kind::Legacy] {
            drop(context.allocate(kind, 8).unwrap());
        }
        drop(Stream::new(&context).unwrap());
        // SAFETY: the stand-in looks at the first byte only.
        drop(unsafe { Module::load(&context, b"x") }.unwrap());
        standin.fail(function, 1, 9999);
        let error = context.reclaim().unwrap_err();
        assert!(matches!(error, Error::Driver { call, status: 9999, .. } if call == function), "{error}");
        let left = context.quarantined();
        let count = left.allocations + left.streams + left.modules;
        assert_eq!(count, if function == "cuCtxSynchronize" { 5 } else { 1 }, "{function}: {left:?}");
        context.reclaim().unwrap();
        assert_eq!(context.quarantined(), Quarantined::default());
    }
    context.close().unwrap();
    assert_eq!(standin.live(), 0);
}
