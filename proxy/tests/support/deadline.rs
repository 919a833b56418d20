//! How the tests wait: never without a deadline.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Runs a test on a thread of its own. If it has not returned after `limit`, the test fails with what it waited for,
/// and the thread is left to itself.
pub fn within<R: Send + 'static>(
    limit: Duration,
    what: &str,
    body: impl FnOnce() -> R + Send + 'static,
) -> R {
    let (done, is_done) = sync_channel(1);
    let thread = std::thread::spawn(move || {
        // The receiver is gone only after the deadline.
        let _ = done.send(body());
    });
    match is_done.recv_timeout(limit) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => panic!("{what}: not done after {limit:?}"),
        Err(RecvTimeoutError::Disconnected) => match thread.join() {
            Ok(()) => unreachable!("it sends before it returns"),
            Err(panic) => std::panic::resume_unwind(panic),
        },
    }
}

/// Waits until `is_true`. Panics with `what` and what `seen` says if that takes longer than `limit`.
pub fn until<S: std::fmt::Debug>(
    limit: Duration,
    what: &str,
    mut is_true: impl FnMut() -> bool,
    seen: impl FnOnce() -> S,
) {
    let start = Instant::now();
    while !is_true() {
        assert!(start.elapsed() < limit, "waited {limit:?} for {what}; seen: {:?}", seen());
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Keeps whoever comes to it, until it is opened.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<(Mutex<GateState>, Condvar)>);

#[derive(Debug, Default)]
struct GateState {
    is_open: bool,
    inside: usize,
}

impl Gate {
    /// How long a gate keeps anyone at most, so that a test that fails leaves nothing behind for ever.
    const LIMIT: Duration = Duration::from_secs(120);

    /// Stays here until the gate is open.
    pub fn pass(&self) {
        let (state, changed) = &*self.0;
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        state.inside += 1;
        let (mut state, _) = changed
            .wait_timeout_while(state, Gate::LIMIT, |state| !state.is_open)
            .unwrap_or_else(PoisonError::into_inner);
        state.inside -= 1;
    }

    pub fn open(&self) {
        let (state, changed) = &*self.0;
        state.lock().unwrap_or_else(PoisonError::into_inner).is_open = true;
        changed.notify_all();
    }

    /// How many it keeps.
    pub fn inside(&self) -> usize {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).inside
    }
}

/// The threads of this process that have this name.
pub fn threads_named(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads of this process");
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|comm| comm.trim_end() == name)
        .count()
}
