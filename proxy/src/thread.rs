//! Threads that are never waited for without a bound.

use core::convert::Infallible;
use core::time::Duration;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Instant;

use crate::error::Error;

/// What a thread does between two looks that found nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Idle {
    /// Looks again at once: the lowest latency, for a processor of its own.
    #[default]
    Spin,
    /// Lets other threads run first.
    Yield,
    /// Sleeps. Adds up to this long, at most 100 milliseconds, to every latency but that of a stop or a call.
    Sleep(Duration),
}

impl Idle {
    const MAX_SLEEP: Duration = Duration::from_millis(100);

    pub(crate) fn check(self) -> Result<(), Error> {
        match self {
            Idle::Sleep(time) if time > Idle::MAX_SLEEP => Err(Error::Config {
                what: "idle sleep in milliseconds",
                value: u64::try_from(time.as_millis()).unwrap_or(u64::MAX),
                must_be: "at most 100",
            }),
            _ => Ok(()),
        }
    }

    pub(crate) fn wait(self) {
        match self {
            Idle::Spin => core::hint::spin_loop(),
            Idle::Yield => std::thread::yield_now(),
            Idle::Sleep(time) => std::thread::park_timeout(time),
        }
    }
}

/// A thread and a way to see it end.
#[derive(Debug)]
pub(crate) struct Worker {
    handle: std::thread::JoinHandle<()>,
    /// Disconnected once the thread has dropped all that it owned.
    ended: Mutex<Receiver<Infallible>>,
}

impl Worker {
    pub(crate) fn spawn(name: &'static str, body: impl FnOnce() + Send + 'static) -> Result<Self, Error> {
        let (alive, ended) = sync_channel(0);
        let handle = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                // Dropped after `body` and everything in it, by a panic too.
                let _alive = alive;
                body();
            })
            .map_err(|error| Error::Thread { what: "starting a thread", message: error.to_string() })?;
        Ok(Worker { handle, ended: Mutex::new(ended) })
    }

    /// Ends its sleep between two looks.
    pub(crate) fn wake(&self) {
        self.handle.thread().unpark();
    }

    /// Joins the thread if it ends by `deadline`. Otherwise leaves it to itself, with everything it owns; then this is
    /// false.
    pub(crate) fn join_by(self, deadline: Instant) -> bool {
        let ended = self.ended.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        let left = deadline.saturating_duration_since(Instant::now());
        match ended.recv_timeout(left) {
            Ok(never) => match never {},
            Err(RecvTimeoutError::Timeout) => false,
            Err(RecvTimeoutError::Disconnected) => {
                // It is about to return, or to finish its panic, which its owner learns of in another way.
                let _ = self.handle.join();
                true
            }
        }
    }
}

/// Binds the calling thread to these processors; to none in particular if there are none.
pub(crate) fn bind_to(cpus: &[usize]) -> Result<(), Error> {
    if cpus.is_empty() {
        return Ok(());
    }
    let refuse = |message: String| Error::Thread { what: "binding a thread to processors", message };
    let mut set = rustix::thread::CpuSet::new();
    for &cpu in cpus {
        if cpu >= rustix::thread::CpuSet::MAX_CPU {
            return Err(refuse(format!("there is no processor {cpu}")));
        }
        set.set(cpu);
    }
    rustix::thread::sched_setaffinity(None, &set).map_err(|error| refuse(format!("{cpus:?}: {error}")))
}
