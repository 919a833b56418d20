//! The table of the driver's functions: what is missing and what fails becomes a typed error that names it.
#![cfg(all(feature = "cuda", not(loom)))]

mod libcuda;

use std::io::Write;
use std::process::Command;
use std::sync::Arc;

use libcuda::{PATIENCE, Standin};
use portway_fifo::cuda::{Context, Driver, Kind, Module, Stream};
use portway_fifo::memory::{IpcHandle, IpcKind};
use portway_fifo::{Error, Heap};

/// Uses everything that there is, so that every function of the driver is called.
fn everything(standin: &Standin) -> Result<(), Error> {
    let driver = Driver::open(standin.path())?;
    driver.device_count()?;
    standin.set("opens its own", 1);
    let context = Context::new(&driver, 0)?;
    // SAFETY: the context lives, and the share keeps it.
    let theirs = unsafe { Context::from_raw(&driver, context.raw(), Arc::new(context.clone())) };
    let result = theirs.and_then(|theirs| {
        let used = use_context(&theirs).and_then(|()| use_neighbour(&theirs));
        used.and(theirs.close())
    });
    result.and(context.close())
}

/// What goes beyond one device and one process, although there is only one here.
fn use_neighbour(context: &Context) -> Result<(), Error> {
    let other = Context::new(context.driver(), 1)?;
    let used = (|| {
        assert_eq!(context.driver().ordinal_of(&other.attributes().uuid)?, Some(1));
        assert!(context.can_reach(1)?);
        let legacy = other.allocate(Kind::Legacy, 4096)?;
        context.reach(&other, &legacy)?;
        if let IpcHandle::Legacy(handle) = legacy.owner().ipc_handle(legacy.range(), IpcKind::Legacy)? {
            context.open_legacy(&handle, 4096)?;
        }
        if context.attributes().vmm {
            let vmm = other.allocate(Kind::Vmm, 1)?;
            context.reach(&other, &vmm)?;
            let whole = vmm.owner().segments(vmm.range())?[0];
            let handle = vmm.owner().ipc_handle(vmm.range(), IpcKind::Fd)?;
            context.open_pieces(&[(handle, whole.len_bytes)])?;
        }
        let host = Heap.allocate(4096)?;
        // SAFETY: the region keeps the range mapped, and is accessed atomically only.
        let pinned = unsafe { context.register_host(host.address(), 4096, Arc::new(host.clone())) }?;
        let stream = Stream::new(context)?;
        // SAFETY: both regions live, and are accessed atomically only.
        unsafe { stream.enter()?.copy(pinned.address(), legacy.address(), 4096) }?;
        stream.wait(PATIENCE)
    })();
    used.and(other.close())
}

fn use_context(context: &Context) -> Result<(), Error> {
    for kind in [Kind::Pinned, Kind::Legacy, Kind::Vmm] {
        if kind == Kind::Vmm && !context.attributes().vmm {
            continue;
        }
        let region = context.allocate(kind, 8)?;
        let mut bytes = [1; 8];
        region.read(0, &mut bytes)?;
        region.write(0, &bytes)?;
        // SAFETY: the region keeps the range mapped, and is accessed atomically only.
        let imported = unsafe { context.import_raw(region.address(), 8, Arc::new(region.clone())) }?;
        for region in [region, imported] {
            match kind {
                Kind::Legacy => drop(region.owner().ipc_handle(region.range(), IpcKind::Legacy)?),
                Kind::Vmm => drop(region.owner().ipc_handle(region.range(), IpcKind::Fd)?),
                _ => continue,
            }
            drop(region.owner().dma_buf(region.range())?);
        }
    }
    let stream = Stream::new(context)?;
    stream.prime()?;
    let word = context.allocate(Kind::Legacy, 8)?;
    // SAFETY: the word lives, and is accessed atomically only.
    unsafe { stream.write_value(word.address(), 1) }?;
    stream.wait(PATIENCE)?;
    // SAFETY: the stand-in looks at the first byte only.
    let function = unsafe { Module::load(context, b"x") }?.function("kernel")?;
    // SAFETY: the stand-in runs nothing.
    unsafe { function.launch(&stream, [1; 3], [1; 3], 0, &[&[0; 8]]) }?;
    Ok(())
}

/// Whose failure changes nothing for the caller: the name of an error, and what a guard restores at its end.
const SILENT: [&str; 2] = ["cuGetErrorName", "cuCtxPopCurrent_v2"];

#[test]
fn everything_calls_every_function_and_gives_everything_back() {
    let standin = Standin::new();
    everything(&standin).unwrap();
    for function in [Driver::REQUIRED_FUNCTIONS, Driver::OPTIONAL_FUNCTIONS].concat() {
        if function != "cuGetErrorName" {
            assert!(standin.calls(function) > 0, "{function} was never called");
        }
    }
    assert_eq!(standin.live(), 0);
}

#[test]
fn every_failure_is_named() {
    for status in [9999, 917, -1, i32::MIN] {
        for function in [Driver::REQUIRED_FUNCTIONS, Driver::OPTIONAL_FUNCTIONS].concat() {
            let standin = Standin::new();
            if function == "cuCtxPopCurrent_v2" {
                standin.fail(function, 3, status); // each failure leaves a context behind on the thread's stack
            } else {
                standin.fail_always(function, status);
            }
            let result = everything(&standin);
            if SILENT.contains(&function) {
                assert_eq!(result, Ok(()), "{function}");
                continue;
            }
            let expected = Error::Driver { call: function, status, name: "unknown".to_owned() };
            assert_eq!(result, Err(expected));
        }
    }
}

/// What may fail once without a consequence: what a guard restores at its end, a share in a handle that is given back,
/// and the attempt to make memory that has fabric handles.
const RECOVERS: [&str; 4] =
    ["cuMemCreate", "cuMemGetAllocationGranularity", "cuMemRelease", "cuThreadExchangeStreamCaptureMode"];

/// After a failure of one of these there may be something left that could not be given back.
const GIVING_BACK: [&str; 13] = [
    "cuCtxPushCurrent_v2",
    "cuCtxSynchronize",
    "cuDevicePrimaryCtxRelease_v2",
    "cuIpcCloseMemHandle",
    "cuMemAddressFree",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemHostUnregister",
    "cuMemRelease",
    "cuMemUnmap",
    "cuModuleUnload",
    "cuStreamDestroy_v2",
    "cuThreadExchangeStreamCaptureMode",
];

#[test]
fn a_failure_of_any_single_call_is_named_and_nothing_is_lost() {
    let standin = Standin::new();
    everything(&standin).unwrap();
    let mut failures = 0;
    for function in [Driver::REQUIRED_FUNCTIONS, Driver::OPTIONAL_FUNCTIONS].concat() {
        let calls = standin.calls(function);
        for nth in (1..=calls).step_by(1 + calls as usize / 10) {
            let standin = Standin::new();
            standin.fail(function, nth, 9999);
            let result = everything(&standin);
            let recovers = SILENT.contains(&function) || RECOVERS.contains(&function);
            match result {
                Err(Error::Driver { call, status: 9999, .. }) if call == function => failures += 1,
                Ok(()) if recovers => {}
                other => panic!("call {nth} of {function}: {other:?}"),
            }
            if !GIVING_BACK.contains(&function) {
                assert_eq!(standin.live(), 0, "call {nth} of {function}");
            }
        }
    }
    assert!(failures > 100, "{failures}");
}

#[test]
fn a_failure_that_the_driver_knows_has_its_name() {
    let standin = Standin::new();
    standin.fail("cuDeviceGetCount", 1, 800);
    let error = Driver::open(standin.path()).unwrap().device_count().unwrap_err();
    assert!(
        error.to_string().starts_with("cuDeviceGetCount failed with status 800 (CUDA_ERROR_NOT_PERMITTED)"),
        "{error}"
    );
    standin.fail("cuDeviceGetCount", 1, 800);
    standin.fail_always("cuGetErrorName", 1);
    let error = Driver::open(standin.path()).unwrap().device_count().unwrap_err();
    assert!(error.to_string().starts_with("cuDeviceGetCount failed with status 800 (unknown)"), "{error}");
}

#[test]
fn a_required_function_that_is_missing_is_named() {
    for function in Driver::REQUIRED_FUNCTIONS.iter().copied() {
        let standin = Standin::without(&[function]);
        let error = Driver::open(standin.path()).unwrap_err();
        assert_eq!(error, Error::MissingFunction { library: standin.path().to_owned(), function });
    }
}

#[test]
fn an_optional_function_that_is_missing_is_unsupported_where_it_is_needed() {
    for function in Driver::OPTIONAL_FUNCTIONS.iter().copied() {
        let standin = Standin::without(&[function]);
        let result = everything(&standin);
        match function {
            "cuGetErrorName" | "cuModuleGetLoadingMode" | "cuFuncLoad" => {
                assert_eq!(result, Ok(()), "{function}");
            }
            // Without one of these there is no memory in pieces, and `everything` does without.
            "cuMemGetAllocationGranularity"
            | "cuMemAddressReserve"
            | "cuMemAddressFree"
            | "cuMemCreate"
            | "cuMemRelease"
            | "cuMemMap"
            | "cuMemUnmap"
            | "cuMemSetAccess" => {
                assert_eq!(result, Ok(()), "{function}");
                assert_eq!(standin.calls("cuMemAddressReserve"), 0, "{function}");
            }
            _ => assert!(matches!(result, Err(Error::Unsupported { .. })), "{function}: {result:?}"),
        }
    }
}

#[test]
fn a_driver_without_a_device_is_named() {
    let standin = Standin::new();
    standin.set("devices", 0);
    let error = Driver::open(standin.path()).unwrap_err();
    assert!(error.to_string().starts_with("cuInit failed with status 100 (CUDA_ERROR_NO_DEVICE)"), "{error}");
    standin.set("devices", 1);
    let error = Context::new(&Driver::open(standin.path()).unwrap(), 1).unwrap_err();
    assert!(matches!(error, Error::Driver { call: "cuDeviceGet", status: 101, .. }), "{error}");
    let error = Context::new(&Driver::open(standin.path()).unwrap(), u32::MAX).unwrap_err();
    assert!(matches!(error, Error::Driver { call: "cuDeviceGet", status: 101, .. }), "{error}");
}

/// Run by the test below in a process whose library path is its own.
#[test]
#[ignore = "run by `the_driver_is_found_by_its_name`"]
fn child_loads_the_driver() {
    println!("child: {:?}", Driver::load());
}

#[test]
fn the_driver_is_found_by_its_name() {
    let child = |folder: &std::path::Path| {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_loads_the_driver", "--ignored", "--nocapture"])
            .env("LD_LIBRARY_PATH", folder)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let standin = Standin::new();
    let found = child(standin.folder());
    assert!(found.contains("child: Ok(Driver(CUDA 13.0))"), "{found}");
    // A file that is no library; a new one, since the old one is mapped here.
    std::fs::remove_file(standin.path()).unwrap();
    std::fs::write(standin.path(), "").unwrap();
    let broken = child(standin.folder());
    assert!(broken.contains("child: Err(NoLibrary { library: \"libcuda.so.1\", reason: "), "{broken}");
}

#[test]
fn without_a_driver_there_is_no_library() {
    // SAFETY: loading runs the library's initialisers; a driver's are made for that.
    if unsafe { libloading::Library::new("libcuda.so.1") }.is_ok() {
        // Not through `eprintln!`, which the test harness keeps to itself.
        let _ = writeln!(
            std::io::stderr(),
            "waived: this machine has a CUDA driver, so its absence is not tested"
        );
        return;
    }
    let error = Driver::load().unwrap_err();
    assert!(matches!(&error, Error::NoLibrary { library, .. } if library == "libcuda.so.1"), "{error}");
}
