//! The real NCCL, where a variable says that there is one: see `ci/clique-nccl.sh`. No GPU is needed; where there is
//! one, the last test shows nothing and says so.
#![cfg(feature = "cuda")]

#[path = "../../fifo/tests/libcuda/mod.rs"]
mod libcuda;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use portway_clique::backend::{Backend, CommConfig, LocalRank, RawComm, Status};
use portway_clique::nccl::{LIBRARY_VARIABLE, Nccl};
use portway_fifo::cuda::Driver;

fn library(test: &str) -> Option<PathBuf> {
    let path = std::env::var_os(LIBRARY_VARIABLE).map(PathBuf::from);
    if path.is_none() {
        println!("waived: {test}: {LIBRARY_VARIABLE} is not set");
    }
    path
}

#[test]
fn it_loads_says_its_version_and_makes_fresh_ids() {
    if library("version and ids").is_none() {
        return;
    }
    let began = Instant::now();
    let nccl = Nccl::load().unwrap();
    let ids = [(); 3].map(|()| nccl.unique_id().unwrap());
    println!("{}, {:?}, three ids, in {:?}", nccl.name(), nccl.capabilities(), began.elapsed());
    assert!((2_18_01..10_00_00).contains(&nccl.version().unwrap()));
    assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2], "ids are fresh");
    assert!(ids.iter().all(|id| *id != [0; 128]));
    assert!(began.elapsed() < Duration::from_secs(10));
}

/// The stand-in for the driver makes this crate believe in a device, so that it calls NCCL, which does not.
#[test]
fn without_a_device_initialisation_ends_in_its_own_error_in_time() {
    let Some(path) = library("the error of initialisation") else { return };
    if Driver::load().is_ok() {
        println!("waived: the error of initialisation: this machine has a device");
        return;
    }
    let cuda = libcuda::Standin::new();
    let nccl = Nccl::open(&path, Some(Driver::open(cuda.path()).unwrap())).unwrap();
    let id = nccl.unique_id().unwrap();
    let mut comms = [RawComm::NULL];
    let began = Instant::now();
    // SAFETY: the lengths are equal, and the id is used once.
    let status = unsafe {
        nccl.init(1, &[id], &CommConfig::default(), &[LocalRank { rank: 0, device: 0 }], &mut comms)
    };
    let took = began.elapsed();
    // SAFETY: names no communicator.
    println!("initialisation: {}, in {took:?}", unsafe { nccl.explain(status, None) });
    assert_eq!((status, comms), (Status::UNHANDLED_CUDA_ERROR, [RawComm::NULL]));
    assert!(took < Duration::from_secs(5), "{took:?}");
    // Not only here, where this crate's own driver would refuse: the library was asked.
    assert_eq!(cuda.calls("cuDevicePrimaryCtxRetain"), 1);
}
