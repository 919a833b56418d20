//! Whole cliques of NCCL on two GPUs: by threads of one process, and by two processes. Everything has a deadline; what the
//! machine lacks is waived.
#![cfg(feature = "cuda")]

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use portway_clique::backend::{Backend, CommConfig, DataType, LocalRank, RawComm, ReduceOp, Status};
use portway_clique::nccl::Nccl;
use portway_clique::rendezvous::{Hub, InProcess, JobToken, Membership, Tcp, TcpConfig};
use portway_clique::{Clique, CliqueBuilder, CliqueError, FirstUse, Member};
use portway_fifo::cuda::Driver;

/// For what has to succeed.
const PATIENT: Duration = Duration::from_secs(60);

fn setup() -> Option<Arc<Nccl>> {
    let lacks = match (Driver::load().and_then(|driver| driver.device_count()), Nccl::load()) {
        (Err(error), _) => error.to_string(),
        (Ok(count), _) if count < 2 => format!("two devices: {count} here"),
        (_, Err(error)) => error.to_string(),
        (Ok(_), Ok(nccl)) => return Some(nccl),
    };
    println!("waived: {lacks}");
    assert!(std::env::var_os("PORTWAY_REQUIRE_CUDA").is_none(), "{lacks}");
    None
}

fn first_use() -> FirstUse {
    FirstUse::default().all_reduce(DataType::F32, ReduceOp::Sum).all_gather().ring(2)
}

fn pair(attempt: u64) -> CliqueBuilder {
    let builder = Clique::builder("device", 2).attempt(attempt).first_use(first_use());
    builder.heartbeat(Duration::from_millis(50)).call_within(Duration::from_secs(20))
}

fn alone() -> Arc<InProcess> {
    Arc::new(Hub::new(1).unwrap().join(0).unwrap())
}

/// Both ranks in this process.
fn up(nccl: &Arc<Nccl>, attempt: u64) -> Clique {
    pair(attempt).local(0, 0).local(1, 1).bring_up(nccl.clone(), alone(), PATIENT).unwrap()
}

/// Runs a body for each item, each on a thread of its own.
fn each<T: Send + 'static, R: Send + 'static>(
    items: Vec<T>,
    body: impl Fn(T) -> R + Clone + Send + 'static,
) -> Vec<R> {
    let mut threads = Vec::new();
    for item in items {
        let (done, is_done) = sync_channel(1);
        let body = body.clone();
        threads.push((std::thread::spawn(move || drop(done.send(body(item)))), is_done));
    }
    let wait = |(thread, is_done): (std::thread::JoinHandle<()>, std::sync::mpsc::Receiver<R>)| match is_done
        .recv_timeout(PATIENT * 2)
    {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => panic!("a thread is not done after {:?}", PATIENT * 2),
        Err(RecvTimeoutError::Disconnected) => std::panic::resume_unwind(thread.join().unwrap_err()),
    };
    threads.into_iter().map(wait).collect()
}

/// All-reduces, small and large, and an exchange, with checked results.
fn work(member: &mut Member) -> Result<(), CliqueError> {
    let mut buffers = member.buffers(8 << 20)?;
    for count in [1usize, 1000, 2 << 20] {
        let own = member.rank() as f32 + 1.0;
        buffers.write(&own.to_le_bytes().repeat(count))?;
        member.all_reduce(&mut buffers, count, DataType::F32, ReduceOp::Sum)?;
        member.wait(&mut buffers, PATIENT)?;
        let mut seen = vec![0; count * 4];
        buffers.read(&mut seen)?;
        assert!(seen.chunks(4).all(|word| word == 3.0f32.to_le_bytes()), "{count}: {:?}", &seen[..4]);
    }
    let other = 1 - member.rank();
    let mut receives = member.buffers(64)?;
    buffers.write(&[member.rank() as u8; 64])?;
    member.send(&mut buffers, 64, DataType::U8, other)?;
    member.recv(&mut receives, 64, DataType::U8, other)?;
    member.wait(&mut receives, PATIENT)?;
    member.wait(&mut buffers, PATIENT)?;
    let mut seen = [9; 64];
    receives.read(&mut seen)?;
    assert_eq!(seen, [other as u8; 64]);
    Ok(())
}

#[test]
fn threads_of_one_process() {
    let Some(nccl) = setup() else { return };
    let mut clique = up(&nccl, 0);
    println!("recorded: {}: {:?}", nccl.name(), clique.durations());
    let members = each(clique.members(), |mut member: Member| {
        work(&mut member).unwrap();
        // What was not declared passes the barrier.
        let mut buffers = member.buffers(4096).unwrap();
        member.all_reduce(&mut buffers, 64, DataType::I64, ReduceOp::Max).unwrap();
        member.wait(&mut buffers, PATIENT).unwrap();
        member.barrier().unwrap();
        assert!(member.with_raw(|comm, device| comm != RawComm::NULL && device < 2).unwrap());
        member
    });
    let members = each(members, |mut member: Member| {
        let mut child = member.split(Some(0), -(member.rank() as i32)).unwrap().unwrap();
        assert_eq!((child.rank(), child.size()), (1 - member.rank(), 2));
        work(&mut child).unwrap();
        assert!(child.close(PATIENT).unwrap().everybody);
        member
    });
    drop(members);
    println!("recorded: {:?}", clique.close(PATIENT).unwrap());
    assert_eq!(nccl.live_communicators(), 0);
}

/// The other participant comes to the verification and never to the initialisation.
#[test]
fn a_rank_that_is_left_out_is_named_in_time() {
    let Some(nccl) = setup() else { return };
    let within = Duration::from_secs(3);
    let hub = Hub::new(2).unwrap();
    let start = Instant::now();
    let place = Arc::new(hub.join(0).unwrap());
    let error = pair(0).local(0, 0).bring_up(nccl.clone(), place, within).map(drop).unwrap_err();
    let late = start.elapsed().saturating_sub(within);
    println!("recorded: {late:?} after the deadline: {error}");
    assert!(late < Duration::from_millis(100), "{late:?}");
    assert!(error.to_string().contains("participant 1"), "{error}");
    drop(up(&nccl, 1));
}

/// NCCL waits for a rank that the wrong size promises; the verdict comes before it.
#[test]
fn wrong_sizes_and_the_same_device_twice_are_verdicts() {
    let Some(nccl) = setup() else { return };
    let result = pair(0).local(0, 0).local(1, 0).bring_up(nccl.clone(), alone(), PATIENT);
    let error = result.map(drop).unwrap_err();
    println!("recorded: {error}");
    assert!(matches!(error, CliqueError::Disagreement(_)), "{error}");
    let builder = Clique::builder("device", 3).local(0, 0).local(1, 1);
    let error = builder.bring_up(nccl.clone(), alone(), PATIENT).map(drop).unwrap_err();
    assert!(matches!(error, CliqueError::Disagreement(_)), "{error}");
    assert_eq!(nccl.live_communicators(), 0);
}

fn abort_one(nccl: &Arc<Nccl>, attempt: u64, after: Duration) {
    let mut clique = up(nccl, attempt);
    let members = clique.members();
    let clique = Arc::new(clique);
    let aborter = clique.clone();
    let thread = std::thread::spawn(move || {
        std::thread::sleep(after);
        let start = Instant::now();
        (aborter.abort().count(), start.elapsed())
    });
    each(members, |mut member: Member| {
        let mut buffers = member.buffers(1 << 20);
        let start = Instant::now();
        loop {
            let result = buffers.as_mut().map_err(|error| error.clone()).and_then(|buffers| {
                member.all_reduce(buffers, 1 << 18, DataType::F32, ReduceOp::Sum)?;
                member.wait(buffers, PATIENT)
            });
            if result.is_err() {
                return;
            }
            assert!(start.elapsed() < PATIENT, "the abort was not noticed");
        }
    });
    let (left, took) = thread.join().unwrap();
    println!("recorded: abort after {after:?} under traffic: {took:?}, {left} in quarantine");
    assert_eq!(left, 0);
}

#[test]
fn aborts_at_random_moments_under_traffic() {
    let Some(nccl) = setup() else { return };
    for round in 0..10u64 {
        abort_one(&nccl, round, Duration::from_micros(round * 7919 % 20_000));
    }
    assert_eq!(nccl.live_communicators(), 0);
    let mut clique = up(&nccl, 100);
    each(clique.members(), |mut member: Member| work(&mut member).unwrap());
    clique.close(PATIENT).unwrap();
}

/// What this crate adds to the library's own initialisation, side by side, and 200 cliques in a row that leave nothing.
#[test]
fn many_in_a_row_are_flat_and_cost_little_more_than_the_library() {
    let Some(nccl) = setup() else { return };
    let count = |of: &str| std::fs::read_dir(of).unwrap().count();
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap()
    };
    let locals = [LocalRank { rank: 0, device: 0 }, LocalRank { rank: 1, device: 1 }];
    let bare = || {
        let start = Instant::now();
        let id = nccl.unique_id().unwrap();
        let mut comms = [RawComm::NULL; 2];
        // SAFETY: two places for two ranks; the id is used by this group alone.
        let status = unsafe { nccl.init(2, &[id], &CommConfig::default(), &locals, &mut comms) };
        assert!(!status.is_error(), "{status}");
        for comm in comms {
            // SAFETY: made above, and not ended.
            while unsafe { nccl.state(comm) } == Status::IN_PROGRESS {
                assert!(start.elapsed() < PATIENT);
                std::hint::spin_loop();
            }
        }
        let took = start.elapsed();
        // SAFETY: made above, up, and not used again.
        let status = unsafe { nccl.finalize(&comms) };
        assert!(!status.is_error(), "{status}");
        for comm in comms {
            // SAFETY: as above.
            while unsafe { nccl.state(comm) } == Status::IN_PROGRESS {
                assert!(start.elapsed() < PATIENT);
            }
            // SAFETY: finalized, and not used again.
            unsafe { nccl.destroy(comm) };
        }
        took
    };
    let ours = |attempt: u64| {
        let builder = pair(attempt).first_use(FirstUse::default()).local(0, 0).local(1, 1);
        let start = Instant::now();
        let clique = builder.bring_up(nccl.clone(), alone(), PATIENT).unwrap();
        let took = start.elapsed();
        clique.close(PATIENT).unwrap();
        took
    };
    let (mut bares, mut all) = (Vec::new(), Vec::new());
    for attempt in 0..10 {
        bare();
        ours(attempt);
    }
    let before = (count("/proc/self/task"), count("/proc/self/fd"), resident());
    for attempt in 10..210 {
        if attempt % 10 == 0 {
            bares.push(bare());
        }
        all.push(ours(attempt));
    }
    let after = (count("/proc/self/task"), count("/proc/self/fd"), resident());
    bares.sort_unstable();
    all.sort_unstable();
    let (bare, ours) = (bares[bares.len() / 2], all[all.len() / 2]);
    println!("recorded: initialisation of two, medians: {bare:?} of the library, {ours:?} of a clique");
    println!("recorded: threads, descriptors, KiB: {before:?} before, {after:?} after 200");
    assert!(ours.saturating_sub(bare) <= Duration::from_millis(5), "{bare:?} {ours:?}");
    assert!(after.0 <= before.0 + 2 && after.1 <= before.1 + 4, "{before:?} {after:?}");
    assert!(after.2 <= before.2 + 65_536, "{before:?} {after:?}");
    assert_eq!(nccl.live_communicators(), 0);
}

/// What a child process is told: its participant and where the store is.
const CHILD: &str = "PORTWAY_CLIQUE_CHILD";

/// The other end of the tests below; without the variable it has nothing to do.
#[test]
fn child_process() {
    let Ok(told) = std::env::var(CHILD) else { return };
    let mut words = told.split(' ');
    let (what, address) = (words.next().unwrap(), words.next().unwrap());
    let nccl = Nccl::load().unwrap();
    let place = join(1, address);
    let mut clique = pair(0).local(1, 1).bring_up(nccl, Arc::new(place), PATIENT).unwrap();
    let mut member = clique.members().remove(0);
    work(&mut member).unwrap();
    if what == "dies" {
        std::process::abort();
    }
    drop(member);
    assert!(clique.close(PATIENT).unwrap().everybody);
}

fn join(participant: u32, address: &str) -> Tcp {
    let token = JobToken::new(*b"clique_device").unwrap();
    let member = Membership { token, participant, participants: 2 };
    Tcp::start(TcpConfig { member, address: address.parse().unwrap(), within: PATIENT }).unwrap()
}

fn start_child(what: &str, address: &str) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "child_process", "--nocapture"]).env(CHILD, format!("{what} {address}"));
    child.stdin(Stdio::null()).spawn().unwrap()
}

fn wait_for(mut child: Child) -> bool {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.success();
        }
        if start.elapsed() > PATIENT {
            child.kill().unwrap();
            panic!("the child is not done after {PATIENT:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn two_processes() {
    let Some(nccl) = setup() else { return };
    let place = join(0, "127.0.0.1:0");
    let child = start_child("works", &place.address().to_string());
    let mut clique = pair(0).local(0, 0).bring_up(nccl, Arc::new(place), PATIENT).unwrap();
    println!("recorded: two processes: {:?}", clique.durations());
    let mut member = clique.members().remove(0);
    work(&mut member).unwrap();
    drop(member);
    assert!(clique.close(PATIENT).unwrap().everybody);
    assert!(wait_for(child));
}

/// The other process dies while this one waits for it in an operation: the wait ends by its deadline, the abort in time.
#[test]
fn a_process_that_dies_is_survived() {
    let Some(nccl) = setup() else { return };
    let place = join(0, "127.0.0.1:0");
    let child = start_child("dies", &place.address().to_string());
    let mut clique = pair(0).local(0, 0).bring_up(nccl.clone(), Arc::new(place), PATIENT).unwrap();
    let mut member = clique.members().remove(0);
    work(&mut member).unwrap();
    assert!(!wait_for(child));
    let mut buffers = member.buffers(64).unwrap();
    let start = Instant::now();
    let result = member
        .all_reduce(&mut buffers, 16, DataType::F32, ReduceOp::Sum)
        .and_then(|()| member.wait(&mut buffers, Duration::from_secs(5)));
    println!(
        "recorded: {:?} after {:?}",
        result.as_ref().map_err(|error| error.to_string()),
        start.elapsed()
    );
    assert!(result.is_err());
    let start = Instant::now();
    assert_eq!(clique.abort().count(), 0);
    println!("recorded: abort with the peer dead: {:?}", start.elapsed());
    drop((member, clique));
    assert_eq!(nccl.live_communicators(), 0);
    let mut clique = up(&nccl, 1);
    each(clique.members(), |mut member: Member| work(&mut member).unwrap());
    clique.close(PATIENT).unwrap();
}
