//! Models of what the threads of a clique rest on, for [loom](https://docs.rs/loom): every interleaving of a few threads.
//!
//! Each model is headed by the sentence that it checks. `ci/loom.sh` runs them, and then breaks the rules in `sync.rs`
//! one after the other: some model must notice each. A model has no clock, so a wait that only the time would end is a
//! deadlock, which loom reports.

use core::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use loom::thread;

use crate::CliqueError;
use crate::backend::RawComm;
use crate::barrier::Barrier;
use crate::custody::Custody;
use crate::life::First;
use crate::owner::{Next, Queue};
use crate::sync::Deadline;
use crate::watcher::StopSignal;

/// A wait that ends only by what other threads do.
const PATIENT: Duration = Duration::from_secs(1);

/// Runs a model. Two forced switches an execution unless `LOOM_MAX_PREEMPTIONS` says otherwise.
fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut explorer = loom::model::Builder::new();
    explorer.preemption_bound = explorer.preemption_bound.or(Some(2));
    explorer.check(model);
}

/// Something that two threads must not touch at the same time. loom fails a model in which they do.
struct Cell(UnsafeCell<u32>);

// SAFETY: loom runs one thread at a time, and reports the accesses that would race.
unsafe impl Sync for Cell {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Cell {}

impl Cell {
    fn new() -> Self {
        Cell(UnsafeCell::new(0))
    }

    fn set(&self, value: u32) {
        // SAFETY: loom hands out a pointer to a live cell and runs one thread at a time.
        self.0.with_mut(|cell| unsafe { *cell = value });
    }

    fn get(&self) -> u32 {
        // SAFETY: loom hands out a pointer to a live cell and runs one thread at a time.
        self.0.with(|cell| unsafe { *cell })
    }
}

fn arrive(barrier: &Barrier<u32>, seat: u32) -> Result<u32, CliqueError> {
    barrier.arrive(seat, "a model", Ok(()), PATIENT, |word| word.map(|()| 7))
}

fn mistake() -> CliqueError {
    CliqueError::System { what: "a model".to_owned(), errno: None, message: "a mistake".to_owned() }
}

/// "Nobody leaves before all seats have come", all leave, and what each did before is visible to all after.
#[test]
fn all_leave_after_all_have_come() {
    explore(|| {
        let barrier = Arc::new(Barrier::new(3));
        let cells = Arc::new([Cell::new(), Cell::new(), Cell::new()]);
        let pass = |barrier: &Barrier<u32>, cells: &[Cell; 3], seat: u32| {
            cells[seat as usize].set(1);
            assert_eq!(arrive(barrier, seat).unwrap(), 7);
            assert!(cells.iter().all(|cell| cell.get() == 1));
        };
        let threads = [0, 1].map(|seat| {
            let (barrier, cells) = (barrier.clone(), cells.clone());
            thread::spawn(move || pass(&barrier, &cells, seat))
        });
        pass(&barrier, &cells, 2);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// "A barrier ... to be passed any number of times": the word of one pass is not taken for that of the next.
#[test]
fn two_passes_do_not_mix() {
    explore(|| {
        let barrier = Arc::new(Barrier::new(2));
        let passes = |barrier: &Barrier<u32>, seat: u32, passed: &AtomicU32| {
            for pass in 0..2 {
                let lead =
                    |word: Result<(), CliqueError>| word.map(|()| passed.fetch_add(1, Ordering::Relaxed));
                assert_eq!(barrier.arrive(seat, "a model", Ok(()), PATIENT, lead).unwrap(), pass);
            }
        };
        let passed = Arc::new(AtomicU32::new(0));
        let other = {
            let (barrier, passed) = (barrier.clone(), passed.clone());
            thread::spawn(move || passes(&barrier, 0, &passed))
        };
        passes(&barrier, 1, &passed);
        other.join().unwrap();
    });
}

/// "Nobody leaves ... not even with an error; errors are joined, the first one reaches all".
#[test]
fn an_error_waits_for_all_and_reaches_all() {
    explore(|| {
        let barrier = Arc::new(Barrier::new(2));
        let came = Arc::new(AtomicBool::new(false));
        let other = {
            let (barrier, came) = (barrier.clone(), came.clone());
            thread::spawn(move || {
                came.store(true, Ordering::Release);
                arrive(&barrier, 0).unwrap_err().to_string()
            })
        };
        let own = barrier.arrive(1, "a model", Err(mistake()), PATIENT, |word| word.map(|()| 7));
        assert!(came.load(Ordering::Acquire), "left before the other had come");
        assert_eq!(own.unwrap_err().to_string(), other.join().unwrap());
    });
}

/// "A seat that is left breaks it: it will not come any more", and nobody waits for it.
#[test]
fn a_seat_that_is_left_is_not_waited_for() {
    explore(|| {
        let barrier = Arc::new(Barrier::<u32>::new(2));
        let leaver = {
            let barrier = barrier.clone();
            thread::spawn(move || barrier.leave(1))
        };
        assert!(matches!(arrive(&barrier, 0), Err(CliqueError::Left { seat: 1 })));
        leaver.join().unwrap();
    });
}

/// "It alone runs what the clique has to do with others, without a lock": others can end the barrier meanwhile.
#[test]
fn the_leader_holds_no_lock() {
    explore(|| {
        let barrier = Arc::new(Barrier::new(1));
        let ended = barrier.arrive(0, "a model", Ok(()), PATIENT, |word| {
            let other = {
                let barrier = barrier.clone();
                thread::spawn(move || barrier.fail(&mistake()))
            };
            other.join().unwrap();
            word.map(|()| 7)
        });
        assert_eq!(ended.unwrap_err().to_string(), mistake().to_string(), "all get the same");
    });
}

/// "From then on the owner cannot enter, so no call begins on a communicator that is being aborted."
#[test]
fn the_owner_and_an_abort_never_meet() {
    explore(|| {
        let (custody, library) = (Arc::new(Custody::new()), Arc::new(Cell::new()));
        let owner = {
            let (custody, library) = (custody.clone(), library.clone());
            thread::spawn(move || {
                for call in 1..=2 {
                    let Some(inside) = custody.enter() else { return };
                    library.set(call);
                    drop(inside);
                }
            })
        };
        let taken = custody.take(Deadline::after(PATIENT)).unwrap();
        assert!(!taken.owner_is_stuck);
        library.set(9);
        assert!(custody.take(Deadline::after(PATIENT)).is_none(), "taken once");
        owner.join().unwrap();
        assert_eq!(library.get(), 9);
    });
}

/// Each communicator is ended by exactly one: whoever took them, or, if it was made too late, the owner.
#[test]
fn a_communicator_that_is_made_late_is_not_lost() {
    explore(|| {
        let custody = Arc::new(Custody::new());
        let owner = {
            let custody = custody.clone();
            thread::spawn(move || {
                let inside = custody.enter()?;
                let left = custody.register(&[RawComm(1)]);
                drop(inside);
                Some(left.len())
            })
        };
        // Whoever takes gives up on the owner at once.
        let taken = custody.take(Deadline::after(Duration::ZERO)).unwrap();
        match owner.join().unwrap() {
            Some(left) => assert_eq!(taken.comms.len() + left, 1),
            None => assert!(taken.comms.is_empty()),
        }
    });
}

/// "Everything that is put in is either run or dropped; whoever waits for its answer learns of both."
#[test]
fn no_command_is_left_behind() {
    struct Fate(Arc<AtomicU32>);
    impl Drop for Fate {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::AcqRel);
        }
    }
    explore(|| {
        let queue = Arc::new(Queue::<()>::new());
        let fates = Arc::new(AtomicU32::new(0));
        let owner = {
            let queue = queue.clone();
            thread::spawn(move || {
                while let Next::Command(command) = queue.next(false) {
                    command(&mut ());
                }
                queue.end();
            })
        };
        let closer = {
            let queue = queue.clone();
            thread::spawn(move || queue.close())
        };
        let fate = Fate(fates.clone());
        queue.post(Box::new(move |()| drop(fate)));
        closer.join().unwrap();
        owner.join().unwrap();
        assert_eq!(fates.load(Ordering::Acquire), 1, "neither run nor dropped");
    });
}

/// "A stop that a sleeper hears of at once": the watcher ends, whenever it is told.
#[test]
fn a_watcher_hears_of_its_stop() {
    explore(|| {
        let signal = Arc::new(StopSignal::new());
        let watcher = {
            let signal = signal.clone();
            thread::spawn(move || signal.sleep(Deadline::after(PATIENT)))
        };
        signal.stop();
        assert!(watcher.join().unwrap());
    });
}

/// A watcher and a member find different failures at the same time: one of them ends the clique, and all get that one.
#[test]
fn the_first_failure_stays() {
    explore(|| {
        let (end, custody) = (Arc::new(First::new()), Arc::new(Custody::new()));
        let find = |end: &First<u32>, custody: &Custody, failure: u32| {
            let (first, is_this) = end.set(failure);
            let took = is_this && custody.take(Deadline::after(PATIENT)).is_some();
            assert_eq!(took, is_this, "who ends it takes the communicators");
            first
        };
        let watcher = {
            let (end, custody) = (end.clone(), custody.clone());
            thread::spawn(move || find(&end, &custody, 1))
        };
        let member = find(&end, &custody, 2);
        assert_eq!(watcher.join().unwrap(), member);
        assert_eq!(end.get(), Some(member));
    });
}
