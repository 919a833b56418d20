//! [`Owner`]: the thread that alone calls the library for a local group, and what it does there ([`Desk`]).

use core::time::Duration;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use crate::CliqueError;
use crate::backend::{Backend, RawComm, Status};
use crate::custody::{Custody, Ticket};
use crate::error::panic_message;
use crate::failure::Fault;
use crate::sync::{Condvar, Deadline, Mutex, POST_TO_NOBODY, Pause, lock, sleep_on};

/// Why a command has no answer.
pub(crate) const LOST_COMMAND: &str = "the owner's thread lost what it was to do";

/// Something for the owner's thread to do.
pub(crate) type Command<D> = Box<dyn FnOnce(&mut D) + Send>;

/// Commands on their way to a thread. Everything that is put in is either run or dropped; whoever waits for its answer
/// learns of both.
pub(crate) struct Queue<D> {
    state: Mutex<QueueState<D>>,
    wake: Condvar,
}

struct QueueState<D> {
    commands: VecDeque<Command<D>>,
    /// The thread is to end; nothing is put in any more.
    is_closed: bool,
    /// Dropped by the thread when it ends.
    keep: Vec<Ticket>,
}

/// What [`Queue::next`] found.
pub(crate) enum Next<D> {
    Command(Command<D>),
    Nothing,
    End,
}

impl<D> Queue<D> {
    pub(crate) fn new() -> Self {
        let state = QueueState { commands: VecDeque::new(), is_closed: false, keep: Vec::new() };
        Queue { state: Mutex::new(state), wake: Condvar::new() }
    }

    /// Puts a command in; false if the thread ends or has ended.
    pub(crate) fn post(&self, command: Command<D>) -> bool {
        let mut state = lock(&self.state);
        if state.is_closed && !POST_TO_NOBODY {
            return false;
        }
        state.commands.push_back(command);
        self.wake.notify_one();
        true
    }

    /// Lets the thread end, after what it does just now. What waits is dropped.
    pub(crate) fn close(&self) {
        let dropped = {
            let mut state = lock(&self.state);
            state.is_closed = true;
            self.wake.notify_one();
            core::mem::take(&mut state.commands)
        };
        drop(dropped);
    }

    /// Keeps a ticket until the thread ends; drops it at once if it has.
    pub(crate) fn keep(&self, ticket: Ticket, has_ended: impl FnOnce() -> bool) {
        let mut state = lock(&self.state);
        if !has_ended() {
            state.keep.push(ticket);
        }
    }

    /// What to do next. Waits for it, unless there is something to poll meanwhile.
    pub(crate) fn next(&self, polls: bool) -> Next<D> {
        let mut state = lock(&self.state);
        loop {
            if state.is_closed {
                return Next::End;
            }
            if let Some(command) = state.commands.pop_front() {
                return Next::Command(command);
            }
            if polls {
                return Next::Nothing;
            }
            // Ended by a command or by the end, which `Owner` brings about when it is dropped.
            state = sleep_on(&self.wake, state, Deadline::after(Duration::from_secs(60)));
        }
    }

    pub(crate) fn end(&self) {
        let kept = {
            let mut state = lock(&self.state);
            state.is_closed = true;
            (core::mem::take(&mut state.commands), core::mem::take(&mut state.keep))
        };
        drop(kept);
    }
}

/// The thread, from outside. Dropping it lets the thread end and does not wait for it.
pub(crate) struct Owner {
    pub(crate) custody: Arc<Custody>,
    queue: Arc<Queue<Desk>>,
    /// Disconnected once the thread has ended.
    ended: std::sync::Mutex<Receiver<()>>,
}

impl core::fmt::Debug for Owner {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "an owner, {:?}", self.custody)
    }
}

/// What the owner's thread works with.
pub(crate) struct Desk {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) custody: Arc<Custody>,
    /// Calls that go on in the background.
    pending: Vec<Pending>,
    /// Some communicator is destroyed: nothing is called on any of them any more.
    pub(crate) is_over: bool,
}

struct Pending {
    rank: u32,
    comm: RawComm,
    call: &'static str,
    answer: SyncSender<Result<(), Fault>>,
}

struct Gone(Arc<Queue<Desk>>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Owner {
    pub(crate) fn start(backend: Arc<dyn Backend>) -> Result<Self, CliqueError> {
        let (custody, queue) = (Arc::new(Custody::new()), Arc::new(Queue::new()));
        let (alive, ended) = sync_channel(0);
        let desk = Desk { backend, custody: custody.clone(), pending: Vec::new(), is_over: false };
        let gone = Gone(queue.clone());
        spawn("clique-owner", move || {
            let _alive = alive;
            run(desk, &gone.0);
        })?;
        Ok(Owner { custody, queue, ended: std::sync::Mutex::new(ended) })
    }

    /// Runs `body` on the owner's thread; where its answer will come. Disconnected if it will not.
    pub(crate) fn post<R: Send + 'static>(
        &self,
        body: impl FnOnce(&mut Desk) -> R + Send + 'static,
    ) -> Receiver<R> {
        let (answer, receiver) = sync_channel(1);
        self.queue.post(Box::new(move |desk| {
            // Whoever asked may have given up.
            let _ = answer.send(body(desk));
        }));
        receiver
    }

    /// Runs a call on one communicator; the answer comes when it is not in progress any more.
    pub(crate) fn begin(
        &self,
        rank: u32,
        comm: RawComm,
        call: &'static str,
        body: impl FnOnce(&Desk) -> Result<Status, Fault> + Send + 'static,
    ) -> Receiver<Result<(), Fault>> {
        let (answer, receiver) = sync_channel(1);
        self.queue.post(Box::new(move |desk| {
            let result = match body(desk) {
                Ok(Status::SUCCESS) => Ok(()),
                Ok(Status::IN_PROGRESS) => {
                    desk.pending.push(Pending { rank, comm, call, answer });
                    return;
                }
                Ok(status) => Err(desk.explained(rank, call, status, None)),
                Err(fault) => Err(fault),
            };
            let _ = answer.send(result);
        }));
        receiver
    }

    pub(crate) fn close(&self) {
        self.queue.close();
    }

    /// Counts the thread until it ends.
    pub(crate) fn quarantine(&self, ticket: Ticket) {
        self.queue.keep(ticket, || self.has_ended(Deadline::after(Duration::ZERO)));
    }

    /// Waits until the thread has ended.
    pub(crate) fn has_ended(&self, until: Deadline) -> bool {
        let ended = self.ended.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        matches!(ended.recv_timeout(until.left()), Err(std::sync::mpsc::RecvTimeoutError::Disconnected))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.queue.close();
    }
}

fn run(mut desk: Desk, queue: &Queue<Desk>) {
    let mut pause = Pause::default();
    loop {
        match queue.next(!desk.pending.is_empty()) {
            Next::End => return,
            Next::Command(command) => {
                pause = Pause::default();
                // What panics drops its answer, which tells whoever asked.
                let _ = catch_unwind(AssertUnwindSafe(|| command(&mut desk)));
            }
            Next::Nothing => pause.wait(),
        }
        desk.poll();
    }
}

impl Desk {
    /// Calls the library, unless the communicators were taken away or destroyed.
    pub(crate) fn call<R>(
        &self,
        rank: Option<u32>,
        call: &str,
        body: impl FnOnce(&dyn Backend) -> R,
    ) -> Result<R, Fault> {
        if self.is_over {
            return Err(Fault::taken());
        }
        let _inside = self.custody.enter().ok_or_else(Fault::taken)?;
        let result = catch_unwind(AssertUnwindSafe(|| body(&*self.backend)));
        result.map_err(|panic| Fault::new(rank, format!("{call} panicked: {}", panic_message(&*panic))))
    }

    /// The state of a communicator of this group.
    pub(crate) fn state(&self, rank: u32, comm: RawComm, call: &str) -> Result<Status, Fault> {
        // SAFETY: the communicator was made by this library for this group, and it is neither destroyed nor aborted:
        // the command that destroys sets `is_over` before another one runs, and whoever aborts takes it first; after
        // either `call` does not run the body.
        self.call(Some(rank), call, |backend| unsafe { backend.state(comm) })
    }

    /// A status with the library's words.
    pub(crate) fn explained(&self, rank: u32, call: &str, status: Status, comm: Option<RawComm>) -> Fault {
        // SAFETY: as in `state`.
        let words = self.call(Some(rank), call, |backend| unsafe { backend.explain(status, comm) });
        match words {
            Ok(words) => Fault::status(rank, call, status, &words),
            Err(fault) if fault.is_taken => fault,
            Err(_) => Fault::status(rank, call, status, "no words for it"),
        }
    }

    /// The error of a call for several communicators: of the rank whose communicator says that it failed, or is not there.
    pub(crate) fn blamed(&self, comms: &[(u32, RawComm)], call: &str, status: Status) -> Fault {
        let failed = |(rank, comm): &&(u32, RawComm)| {
            *comm == RawComm::NULL || self.state(*rank, *comm, call).is_ok_and(Status::is_error)
        };
        let words = |rank: Option<u32>, comm| match self.explained(rank.unwrap_or(0), call, status, comm) {
            fault if fault.is_taken => fault,
            fault => Fault { rank, ..fault },
        };
        match (comms.iter().find(failed), comms) {
            (Some((rank, RawComm::NULL)), _) => words(Some(*rank), None),
            (Some((rank, comm)), _) | (None, [(rank, comm)]) => words(Some(*rank), Some(*comm)),
            (None, _) => words(None, None),
        }
    }

    /// Waits until none of the communicators is in progress.
    pub(crate) fn settle(&self, comms: &[(u32, RawComm)], call: &str, until: Deadline) -> Result<(), Fault> {
        let mut pause = Pause::default();
        loop {
            let mut in_progress = Vec::new();
            for (rank, comm) in comms.iter().copied().filter(|(_, comm)| *comm != RawComm::NULL) {
                match self.state(rank, comm, call)? {
                    Status::SUCCESS => {}
                    Status::IN_PROGRESS => in_progress.push(rank),
                    status => return Err(self.explained(rank, call, status, Some(comm))),
                }
            }
            if in_progress.is_empty() {
                return Ok(());
            }
            if until.is_over() {
                let cause =
                    format!("{call} is still in progress for the ranks {in_progress:?} of this process");
                return Err(Fault::new(None, cause));
            }
            pause.wait();
        }
    }

    /// Looks after the calls that go on in the background.
    pub(crate) fn poll(&mut self) {
        let pending = core::mem::take(&mut self.pending);
        for one in pending {
            let result = match self.state(one.rank, one.comm, one.call) {
                Ok(Status::IN_PROGRESS) => {
                    self.pending.push(one);
                    continue;
                }
                Ok(Status::SUCCESS) => Ok(()),
                Ok(status) => Err(self.explained(one.rank, one.call, status, Some(one.comm))),
                Err(fault) => Err(fault),
            };
            // Whoever asked may have given up.
            let _ = one.answer.send(result);
        }
    }
}

/// Starts a thread that nobody has to join.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), CliqueError> {
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(body);
    spawned.map(drop).map_err(|error| CliqueError::System {
        what: format!("starting the thread {name}"),
        errno: error.raw_os_error(),
        message: error.to_string(),
    })
}
