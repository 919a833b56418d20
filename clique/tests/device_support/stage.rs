//! [`run_watched`]: threads that say what they are at, so that one that hangs is named with its place.

use std::fmt::Write;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What a thread is at.
#[derive(Clone, Default)]
pub struct Stage(Arc<Mutex<String>>);

impl Stage {
    pub fn is(&self, at: impl Into<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = at.into();
    }

    fn get(&self) -> String {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Runs a body for each item, each on a thread of its own, all together within a limit; what they return, in order.
///
/// # Errors
/// What each thread was at when the limit was over, if one was not done.
pub fn run_watched<T: Send + 'static, R: Send + 'static>(
    limit: Duration,
    items: Vec<T>,
    body: impl Fn(T, &Stage) -> R + Clone + Send + 'static,
) -> Result<Vec<R>, String> {
    let mut threads = Vec::new();
    for item in items {
        let (done, is_done) = sync_channel(1);
        let (body, stage) = (body.clone(), Stage::default());
        let own = stage.clone();
        let thread = std::thread::spawn(move || {
            own.is("its start");
            let result = body(item, &own);
            own.is("its end");
            drop(done.send(result));
        });
        threads.push((thread, is_done, stage));
    }
    let end = Instant::now() + limit;
    let stages: Vec<Stage> = threads.iter().map(|(_, _, stage)| stage.clone()).collect();
    let mut results = Vec::new();
    for (thread, is_done, _) in threads {
        match is_done.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(result) => results.push(result),
            Err(RecvTimeoutError::Timeout) => {
                let mut seen = format!("not all are done after {limit:?}: ");
                for (number, stage) in stages.iter().enumerate() {
                    let _ = write!(seen, "thread {number} is at {}; ", stage.get());
                }
                return Err(seen);
            }
            Err(RecvTimeoutError::Disconnected) => match thread.join() {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(()) => unreachable!("it sends before it returns"),
            },
        }
    }
    Ok(results)
}
