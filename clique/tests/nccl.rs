//! NCCL as a backend, over a stand-in for the library and one for the driver.
#![cfg(feature = "cuda")]

#[path = "../../fifo/tests/libcuda/mod.rs"]
mod libcuda;
mod libnccl;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libcuda::PATIENCE;
use portway_clique::backend::{
    Backend, BackendError, CommConfig, DataType, Enqueue, LocalRank, Operation, RawComm, RawStream, ReduceOp,
    Shape, SplitCall, Status,
};
use portway_clique::nccl::Nccl;
use portway_clique::rendezvous::{Hub, Rendezvous};
use portway_clique::{Clique, FirstUse};
use portway_fifo::cuda::Driver;

struct Setup {
    backend: Arc<Nccl>,
    nccl: libnccl::Nccl,
    cuda: libcuda::Standin,
}

fn setup(missing: &[&str]) -> Setup {
    setup_version(missing, 2_27_07).unwrap()
}

fn setup_version(missing: &[&str], version: i64) -> Result<Setup, BackendError> {
    let cuda = libcuda::Standin::new();
    let nccl = libnccl::Nccl::new(missing, cuda.path());
    nccl.set("version", version);
    let backend = Nccl::open(nccl.path(), Some(Driver::open(cuda.path()).unwrap()))?;
    Ok(Setup { backend, nccl, cuda })
}

const LOCALS: [LocalRank; 2] = [LocalRank { rank: 0, device: 0 }, LocalRank { rank: 1, device: 1 }];

impl Setup {
    /// Initialises these ranks of a communicator.
    fn init(&self, size: u32, locals: &[LocalRank]) -> (Status, Vec<RawComm>) {
        let id = self.backend.unique_id().unwrap();
        self.init_with(size, &[id], &CommConfig::default(), locals)
    }

    fn init_with(
        &self,
        size: u32,
        ids: &[[u8; 128]],
        config: &CommConfig,
        locals: &[LocalRank],
    ) -> (Status, Vec<RawComm>) {
        let mut comms = vec![RawComm::NULL; locals.len()];
        // SAFETY: the lengths are equal, and each id is used once.
        let status = unsafe { self.backend.init(size, ids, config, locals, &mut comms) };
        (status, comms)
    }

    fn pair(&self) -> Vec<RawComm> {
        let (status, comms) = self.init(2, &LOCALS);
        assert_eq!(status, Status::IN_PROGRESS);
        assert!(comms.iter().all(|comm| self.state(*comm) == Status::SUCCESS));
        comms
    }

    fn state(&self, comm: RawComm) -> Status {
        // SAFETY: the tests ask for communicators that are alive; others are not found.
        unsafe { self.backend.state(comm) }
    }

    fn split(&self, parent: RawComm, color: Option<u32>) -> (Status, RawComm) {
        let mut child = [RawComm::NULL];
        // SAFETY: the parent is alive and not in progress.
        let status = unsafe { self.backend.split(&[SplitCall { parent, color, key: 0 }], &mut child) };
        (status, child[0])
    }

    fn abort(&self, comm: RawComm) -> Status {
        // SAFETY: nobody uses the communicator any more.
        unsafe { self.backend.abort(comm) }
    }

    fn explain(&self, status: Status) -> String {
        // SAFETY: names no communicator.
        unsafe { self.backend.explain(status, None) }
    }
}

#[test]
fn a_library_that_cannot_be_used_is_named() {
    let error = Nccl::open(Path::new("/nowhere/libnccl.so.2"), None).unwrap_err();
    assert!(
        matches!(&error, BackendError::Unavailable { library, .. } if library == "/nowhere/libnccl.so.2"),
        "{error}"
    );
    let error = setup_version(&["ncclCommSplit"], 2_27_07).err().unwrap();
    assert!(matches!(error, BackendError::NotInLibrary { call: "ncclCommSplit", .. }), "{error}");
    let error = setup_version(&[], 2_17_01).err().unwrap().to_string();
    assert!(error.contains("version 2.17.1, must be at least 2.18.1"), "{error}");
}

#[test]
fn what_the_library_lacks_is_said() {
    let setup = setup(&["ncclCommShrink", "ncclCommRevoke", "ncclCommInitRankScalable"]);
    assert_eq!(setup.backend.capabilities(), Default::default());
    let comms = setup.pair();
    // SAFETY: the communicator is alive.
    let error = unsafe { setup.backend.revoke(comms[0]) }.unwrap_err();
    assert_eq!(error.to_string(), "ncclCommRevoke is not in this NCCL 2.27.7");
    // SAFETY: as above; the lengths are equal.
    let error = unsafe { setup.backend.shrink(&comms[..1], &[1], &mut [RawComm::NULL]) }.unwrap_err();
    assert_eq!(error.to_string(), "ncclCommShrink is not in this NCCL 2.27.7");
    let ids = [setup.backend.unique_id().unwrap(), setup.backend.unique_id().unwrap()];
    let (status, comms) = setup.init_with(2, &ids, &CommConfig::default(), &LOCALS);
    assert_eq!((status, comms), (Status::INVALID_ARGUMENT, vec![RawComm::NULL; 2]));
    assert!(setup.explain(status).contains("ncclCommInitRankScalable is not in this NCCL"));
    // The control: the complete library can do all of it.
    let setup = self::setup(&[]);
    let comms = setup.pair();
    let mut child = [RawComm::NULL];
    // SAFETY: as above.
    let status = unsafe { setup.backend.shrink(&comms[..1], &[1], &mut child) }.unwrap();
    assert_eq!((status, setup.nccl.seen("excluded"), setup.nccl.seen("flags")), (Status::IN_PROGRESS, 1, 1));
    // SAFETY: as above.
    assert_eq!(unsafe { setup.backend.revoke(comms[1]) }, Ok(Status::SUCCESS));
    let ids = [setup.backend.unique_id().unwrap(), setup.backend.unique_id().unwrap()];
    setup.init_with(2, &ids, &CommConfig::default(), &LOCALS);
    assert_eq!((setup.nccl.calls("ncclCommInitRankScalable"), setup.nccl.seen("ids")), (2, 2));
}

#[test]
fn local_ranks_are_one_group_each_with_its_device_and_not_blocking() {
    let setup = setup(&[]);
    let config = CommConfig { min_ctas: Some(4), split_share: Some(true), ..CommConfig::default() };
    let id = setup.backend.unique_id().unwrap();
    let (status, comms) = setup.init_with(2, &[id], &config, &LOCALS);
    assert_eq!(status, Status::IN_PROGRESS);
    assert_eq!((setup.nccl.calls("ncclGroupStart"), setup.nccl.calls("ncclGroupEnd")), (1, 1));
    for (what, value) in [
        ("size", 72),
        ("magic", 0xcafe_beef),
        ("version", 22707),
        ("blocking", 0),
        ("min ctas", 4),
        ("split share", 1),
    ] {
        assert_eq!(setup.nccl.seen(what), value, "{what}");
    }
    for (comm, local) in comms.iter().zip(LOCALS) {
        assert_eq!(setup.state(*comm), Status::SUCCESS);
        // SAFETY: the communicator is alive.
        let shape = unsafe { setup.backend.shape(*comm) }.unwrap();
        assert_eq!(shape, Shape { size: 2, rank: local.rank, device: local.device });
        assert_eq!(setup.backend.handle(*comm), *comm);
    }
    assert_eq!(setup.cuda.thread_state().0, 0, "no context is left current");
    // SAFETY: the communicators are alive and not used otherwise.
    unsafe {
        assert_eq!(setup.backend.finalize(&comms), Status::IN_PROGRESS);
    }
    for comm in comms {
        // SAFETY: as above.
        assert_eq!(unsafe { setup.backend.destroy(comm) }, Status::SUCCESS);
        assert_eq!(setup.state(comm), Status::INVALID_ARGUMENT);
    }
    assert_eq!((setup.nccl.live(), setup.backend.live_communicators()), (0, 0));
}

#[test]
fn an_older_library_gets_the_configuration_that_it_knows() {
    let setup = setup_version(&[], 2_19_03).unwrap();
    setup.pair();
    assert_eq!((setup.nccl.seen("size"), setup.nccl.seen("version")), (48, 21903));
}

#[test]
fn a_library_that_makes_communicators_blocking_is_found_out() {
    let setup = setup(&[]);
    setup.nccl.set("makes blocking", 1);
    let (status, comms) = setup.init(2, &LOCALS);
    assert_eq!(status, Status::INVALID_USAGE);
    assert!(setup.explain(status).contains("changed the communicators to blocking ones"));
    assert!(comms.iter().all(|comm| setup.abort(*comm) == Status::SUCCESS));
    assert_eq!(setup.nccl.live(), 0);
}

#[test]
fn a_missing_rank_leaves_it_in_progress_and_abort_ends_it() {
    let setup = setup(&[]);
    let (status, comms) = setup.init(3, &LOCALS);
    assert_eq!(status, Status::IN_PROGRESS);
    for comm in &comms {
        assert_eq!(setup.state(*comm), Status::IN_PROGRESS);
    }
    for comm in comms {
        assert_eq!(setup.abort(comm), Status::SUCCESS);
    }
    assert_eq!((setup.nccl.live(), setup.backend.live_communicators()), (0, 0));
}

#[test]
fn a_rank_that_fails_within_the_group_leaves_the_others_to_abort() {
    let setup = setup(&[]);
    setup.nccl.fail("ncclCommInitRankConfig", 2, 4242);
    let (status, comms) = setup.init(2, &LOCALS);
    assert_eq!(status, Status(4242));
    assert_eq!(status.to_string(), "unknown status (4242)");
    assert_eq!(setup.nccl.calls("ncclGroupEnd"), 1, "the group is closed all the same");
    assert!(comms[0] != RawComm::NULL && comms[1] == RawComm::NULL);
    assert_eq!(setup.abort(comms[0]), Status::SUCCESS);
    assert_eq!(setup.nccl.live(), 0);
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let setup = setup(&[]);
    let (status, comms) = setup.init(1, &[LocalRank { rank: 0, device: 7 }]);
    assert_eq!((status, comms), (Status::UNHANDLED_CUDA_ERROR, vec![RawComm::NULL]));
    assert!(setup.explain(status).contains("on device 7"), "{}", setup.explain(status));
    let error = setup.backend.device_uuid(7).unwrap_err();
    assert!(matches!(error, BackendError::Device { device: 7, .. }), "{error}");
    assert_eq!(setup.backend.device_uuid(1).unwrap(), "GPU-11111111-1111-1111-1111-111111111111");
}

#[test]
fn operations_are_one_group_each_on_its_device() {
    let setup = setup(&[]);
    let comms = setup.pair();
    let (from, mut to) = ([1u8; 64], [0u8; 128]);
    let (send, recv, count, data_type) = (from.as_ptr() as u64, to.as_mut_ptr() as u64, 8, DataType::F32);
    let operations = [
        Operation::AllReduce { send, recv, count, data_type, op: ReduceOp::Sum },
        Operation::AllGather { send, recv, count, data_type },
        Operation::Send { send, count, data_type, peer: 1 },
        Operation::Recv { recv, count, data_type, peer: 0 },
    ];
    let calls: Vec<_> = operations
        .iter()
        .flat_map(|operation| {
            comms.iter().map(|comm| Enqueue { comm: *comm, operation: *operation, stream: RawStream(0) })
        })
        .collect();
    // SAFETY: the memory is long enough, and the stand-in is done with it when it returns.
    assert_eq!(unsafe { setup.backend.enqueue(&calls) }, Status::IN_PROGRESS);
    for function in ["ncclAllReduce", "ncclAllGather", "ncclSend", "ncclRecv"] {
        assert_eq!(setup.nccl.calls(function), 2, "{function}");
    }
    assert_eq!(setup.nccl.calls("ncclGroupEnd"), 2, "one for the initialisation, one for these");
    // One that fails is told, and the group is closed.
    setup.nccl.fail("ncclAllGather", 1, 3);
    // SAFETY: as above.
    assert_eq!(unsafe { setup.backend.enqueue(&calls) }, Status::INTERNAL_ERROR);
    assert_eq!(setup.nccl.calls("ncclGroupEnd"), 3);
    // SAFETY: a name that is none is found out.
    let unknown = unsafe { setup.backend.enqueue(&[Enqueue { comm: RawComm(99), ..calls[0] }]) };
    assert_eq!(unknown, Status::INVALID_ARGUMENT);
}

/// The library tells a child's handle when the last rank has split, by writing to where the first one said.
#[test]
fn a_child_is_in_progress_until_every_rank_has_split() {
    let setup = setup(&[]);
    let parents = setup.pair();
    let (status, first) = setup.split(parents[0], Some(5));
    assert_eq!((status, setup.state(first)), (Status::IN_PROGRESS, Status::IN_PROGRESS));
    assert_eq!(setup.backend.handle(first), RawComm::NULL);
    // SAFETY: the child is alive.
    assert!(unsafe { setup.backend.shape(first) }.is_err());
    let (_, second) = setup.split(parents[1], Some(5));
    for (child, rank) in [(first, 0), (second, 1)] {
        assert_eq!(setup.state(child), Status::SUCCESS);
        // SAFETY: as above.
        assert_eq!(unsafe { setup.backend.shape(child) }.unwrap(), Shape { size: 2, rank, device: rank });
        assert!(![RawComm::NULL, child].contains(&setup.backend.handle(child)));
    }
    // A child outlives its parents.
    for comm in parents.into_iter().chain([first, second]) {
        // SAFETY: nobody uses it any more.
        assert_eq!(unsafe { setup.backend.destroy(comm) }, Status::SUCCESS);
    }
    assert_eq!((setup.nccl.live(), setup.backend.live_communicators()), (0, 0));
}

/// Once the parent has said that it is done, a child is asked without it: somebody may be aborting it just then.
#[test]
fn a_child_that_is_made_does_not_need_its_parent() {
    let setup = setup(&[]);
    let parents = setup.pair();
    let children = [0, 1].map(|rank| setup.split(parents[rank], Some(5)).1);
    assert!(parents.iter().all(|parent| setup.state(*parent) == Status::SUCCESS));
    for parent in parents {
        assert_eq!(setup.abort(parent), Status::SUCCESS);
    }
    for child in children {
        assert_eq!(setup.state(child), Status::SUCCESS);
        assert_eq!(setup.abort(child), Status::SUCCESS);
    }
    assert_eq!((setup.nccl.live(), setup.backend.live_communicators()), (0, 0));
}

#[test]
fn a_rank_without_a_colour_gets_no_child() {
    let setup = setup(&[]);
    let parents = setup.pair();
    let (_, none) = setup.split(parents[0], None);
    let (_, child) = setup.split(parents[1], Some(0));
    assert_eq!((none, setup.state(child)), (RawComm::NULL, Status::SUCCESS));
}

#[test]
fn a_child_that_is_aborted_before_it_is_made_goes_with_its_parent() {
    for parent_first in [false, true] {
        let setup = setup(&[]);
        let parents = setup.pair();
        let (_, child) = setup.split(parents[0], Some(5));
        let order = if parent_first { [parents[0], child] } else { [child, parents[0]] };
        for comm in order.into_iter().chain([parents[1]]) {
            assert_eq!(setup.abort(comm), Status::SUCCESS);
        }
        assert_eq!((setup.nccl.live(), setup.backend.live_communicators()), (0, 0), "{parent_first}");
    }
}

/// The last rank splits after the first has given its child up: the library has made it by the time the parent ends.
#[test]
fn a_child_that_is_aborted_and_made_all_the_same_goes_when_its_parent_is_destroyed() {
    let setup = setup(&[]);
    let parents = setup.pair();
    let (_, given_up) = setup.split(parents[0], Some(5));
    assert_eq!(setup.abort(given_up), Status::SUCCESS);
    let (_, child) = setup.split(parents[1], Some(5));
    assert_eq!(setup.state(child), Status::SUCCESS);
    for comm in parents.into_iter().chain([child]) {
        // SAFETY: nobody uses it any more.
        assert_eq!(unsafe { setup.backend.destroy(comm) }, Status::SUCCESS);
    }
    assert_eq!((setup.nccl.live(), setup.backend.live_communicators()), (0, 0));
}

/// With a lock around calls of the library, the state could not be asked until the abort is over.
#[test]
fn an_abort_that_does_not_return_stops_nobody_else() {
    let setup = setup(&[]);
    let comms = setup.pair();
    setup.nccl.hold("ncclCommAbort", true);
    std::thread::scope(|scope| {
        let aborting = scope.spawn(|| setup.abort(comms[0]));
        setup.nccl.wait_until_held("ncclCommAbort", PATIENCE);
        let began = Instant::now();
        assert_eq!(setup.state(comms[1]), Status::SUCCESS);
        assert_eq!(setup.init(1, &LOCALS[..1]).0, Status::IN_PROGRESS);
        assert!(began.elapsed() < Duration::from_secs(5) && !aborting.is_finished());
        setup.nccl.hold("ncclCommAbort", false);
        assert_eq!(aborting.join().unwrap(), Status::SUCCESS);
    });
}

#[test]
fn workspaces_are_used_again_and_nothing_of_the_device_is_freed() {
    let setup = setup(&[]);
    let mut allocated = 0;
    for turn in 0..200 {
        let mut workspace = setup.backend.workspace(1, 4096).unwrap();
        workspace.write(&[turn as u8; 100]).unwrap();
        let mut bytes = [0; 4096];
        workspace.read(&mut bytes).unwrap();
        assert_eq!(bytes, [0xff; 4096]);
        assert!(workspace.is_idle().unwrap() && workspace.send_address() != workspace.recv_address());
        assert!(workspace.write(&[0; 4097]).is_err());
        if turn == 0 {
            allocated = setup.cuda.live();
        }
    }
    assert_eq!(setup.cuda.live(), allocated);
    assert_eq!(setup.cuda.calls("cuMemFree_v2"), 0);
    // The control: two at a time are two.
    let both = [setup.backend.workspace(1, 4096).unwrap(), setup.backend.workspace(1, 4096).unwrap()];
    assert!(setup.cuda.live() > allocated);
    assert_ne!(both[0].send_address(), both[1].send_address());
}

/// A whole clique, first use and all, over this backend.
#[test]
fn a_clique_comes_up_is_used_and_closed() {
    let setup = setup(&[]);
    let meet: Arc<dyn Rendezvous> = Arc::new(Hub::new(1).unwrap().join(0).unwrap());
    for attempt in 0..3 {
        let first = FirstUse::default()
            .all_reduce(DataType::I32, ReduceOp::Sum)
            .all_gather()
            .ring(2)
            .large_bytes(8192);
        let builder =
            Clique::builder("over NCCL", 2).attempt(attempt).local(0, 0).local(1, 1).first_use(first);
        let clique = builder.bring_up(setup.backend.clone(), meet.clone(), PATIENCE).unwrap();
        assert_eq!(setup.nccl.live(), 2);
        clique.close(PATIENCE).unwrap();
        assert_eq!((setup.nccl.live(), setup.backend.live_communicators()), (0, 0));
    }
    assert!(setup.nccl.calls("ncclAllReduce") >= 3 * 2 * 2 && setup.nccl.calls("ncclSend") >= 3 * 2);
    // A rank that fails is in the error, with the library's words, and nothing is left.
    let began = Instant::now();
    let builder = Clique::builder("over NCCL", 2).attempt(3).local(0, 0).local(1, 1);
    setup.nccl.fail("ncclCommInitRankConfig", 2, 3);
    let error = builder.bring_up(setup.backend.clone(), meet, PATIENCE).unwrap_err().to_string();
    assert!(error.contains("a failure") && error.contains("internal error"), "{error}");
    assert!(began.elapsed() < PATIENCE / 2, "{:?}", began.elapsed());
    assert_eq!((setup.nccl.live(), setup.backend.live_communicators()), (0, 0));
}
