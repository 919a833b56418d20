//! [`Server`]: the thread of the store, seen from its owner.

use std::collections::VecDeque;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::CliqueError;
use crate::rendezvous::identity::{Membership, system};
use crate::rendezvous::tcp::lock;
use crate::rendezvous::tcp::store::Store;
use crate::rendezvous::{StayFor, end_of};

/// How many of those turned away are remembered.
const MAX_TURNED_AWAY: usize = 64;
/// How long the thread may take to see that its time is over.
const LAST_LOOK: Duration = Duration::from_millis(500);

/// What the thread and its owner share.
#[derive(Debug)]
pub(super) struct Shared {
    /// Written to by the owner: look at `closing`.
    pub(super) wake: OwnedFd,
    closing: Mutex<Option<(Instant, StayFor)>>,
    turned_away: Mutex<VecDeque<CliqueError>>,
}

impl Shared {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Shared {
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            closing: Mutex::new(None),
            turned_away: Mutex::new(VecDeque::new()),
        })
    }

    /// Until when the thread stays and for whom, once it has to end.
    pub(super) fn closing(&self) -> Option<(Instant, StayFor)> {
        *lock(&self.closing)
    }

    pub(super) fn turn_away(&self, why: CliqueError) {
        let mut turned_away = lock(&self.turned_away);
        if turned_away.len() == MAX_TURNED_AWAY {
            turned_away.pop_front();
        }
        turned_away.push_back(why);
    }
}

/// A running store. Ends when closed, or, without waiting for anybody, when dropped.
#[derive(Debug)]
pub(super) struct Server {
    shared: Arc<Shared>,
    ended: Mutex<Receiver<Result<(), CliqueError>>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(super) fn start(listener: TcpListener, member: &Membership) -> Result<Self, CliqueError> {
        let doing = |error| system("starting the store", error);
        let shared = Arc::new(Shared::new().map_err(doing)?);
        let store = Store::new(listener, member, shared.clone()).map_err(doing)?;
        let (end, ended) = sync_channel(1);
        let thread = std::thread::Builder::new().name("portway-store".to_owned());
        let thread = thread.spawn(move || {
            let _ = end.send(store.run());
        });
        Ok(Server { shared, ended: Mutex::new(ended), thread: Some(thread.map_err(doing)?) })
    }

    pub(super) fn turned_away(&self) -> Vec<CliqueError> {
        lock(&self.shared.turned_away).iter().cloned().collect()
    }

    /// Waits until nobody is there for whom it has to stay, then ends.
    pub(super) fn close(mut self, within: Duration, stay_for: StayFor) -> Result<(), CliqueError> {
        self.end(within, stay_for)
    }

    fn end(&mut self, within: Duration, stay_for: StayFor) -> Result<(), CliqueError> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let end = end_of(within);
        *lock(&self.shared.closing) = Some((end, stay_for));
        // A counter that is full, the only failure, has woken the thread too.
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        let wait = end.saturating_duration_since(Instant::now()) + LAST_LOOK;
        match lock(&self.ended).recv_timeout(wait) {
            Ok(result) => {
                let _ = thread.join(); // it has said its last word
                result
            }
            Err(RecvTimeoutError::Disconnected) => Err(CliqueError::System {
                what: "the store's thread".to_owned(),
                errno: None,
                message: "it panicked".to_owned(),
            }),
            Err(RecvTimeoutError::Timeout) => Err(CliqueError::Timeout {
                what: "ending the store".to_owned(),
                expected: "its thread's end".to_owned(),
                seen: "nothing; the thread is left behind".to_owned(),
                waited: wait,
            }),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.end(Duration::ZERO, StayFor::Rounds);
    }
}
