//! What the crate `cudarc` makes is handed over as raw handles: its context, its streams, its memory.
#![cfg(all(feature = "cuda", not(loom)))]

mod libcuda;

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, DevicePtr};
use libcuda::Standin;
use portway_fifo::cuda::{Context, Driver, Kind, Stream};
use portway_fifo::{Error, Platform};

/// Run by the test below in a process that finds the stand-in under the driver's names.
#[test]
#[ignore = "run by `contexts_streams_and_memory_of_cudarc_are_handed_over`"]
fn child_hands_over() {
    let theirs = CudaContext::new(1).unwrap();
    let their_stream = theirs.new_stream().unwrap();
    let slice = their_stream.clone_htod(&[7u32; 1000]).unwrap();
    let address = slice.device_ptr(&their_stream).0;

    let driver = Driver::load().unwrap();
    // SAFETY: both use the one driver of the process, and the share keeps the context alive.
    let context = unsafe { Context::from_raw(&driver, theirs.cu_ctx().cast(), theirs.clone()) }.unwrap();
    assert_eq!(context.ordinal(), 1);
    // SAFETY: the stream is one of that context, and the share keeps it alive.
    let stream = unsafe { Stream::from_raw(&context, their_stream.cu_stream().cast(), their_stream.clone()) };
    stream.wait(Duration::from_secs(10)).unwrap();
    // SAFETY: the slice moves into the region, which thereby owns it alone.
    let region = unsafe { context.import_raw(address, 4000, Arc::new(slice)) }.unwrap();
    assert_eq!(context.kind(address), Ok(Kind::Pool));
    let mut bytes = [0; 8];
    region.read(3992, &mut bytes).unwrap();
    assert_eq!(bytes, [7, 0, 0, 0, 7, 0, 0, 0]);
    // Their memory beside ours in one context.
    context.device_memory(64).unwrap().write(0, &bytes).unwrap();
    drop((region, stream));
    assert_eq!(Arc::strong_count(&their_stream), 3, "the slice and the stream are in quarantine");
    assert!(matches!(context.clone().close(), Err(Error::Busy { .. })));
    assert_eq!(Arc::strong_count(&their_stream), 1, "they were not given back");
    context.close().unwrap();
    drop(their_stream);
    assert_eq!(Arc::strong_count(&theirs), 1);
    println!("child: handed over");
}

#[test]
fn contexts_streams_and_memory_of_cudarc_are_handed_over() {
    let standin = Standin::new();
    std::os::unix::fs::symlink(standin.path(), standin.folder().join("libcuda.so")).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_hands_over", "--ignored", "--nocapture"])
        .env("LD_LIBRARY_PATH", standin.folder())
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && printed.contains("child: handed over"), "{output:?}");
}
