//! [`Keeper`]: a thread for each open device, which does what may block so that no engine has to: it waits for
//! asynchronous events, puts failed queue pairs into the state ERR, and destroys those of closed ports.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use core::time::Duration;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::device::Device;
use crate::error::Error;
use crate::memory::Bound;
use crate::queues::Queues;
use crate::sys;

/// How long the thread sleeps at most, in case a wake-up is lost.
const SLEEP: Duration = Duration::from_secs(1);

/// From here on, a [`Stage`] is an error number.
const STUCK: u32 = 3;

/// Where the queues of a port stand. The port reads it, the keeper moves it.
#[derive(Debug, Default)]
pub(crate) struct Stage(AtomicU32);

/// The values of a [`Stage`], in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    /// In use.
    Open,
    /// In the state ERR.
    Error,
    /// Destroyed.
    Destroyed,
    /// The device refused to destroy them, with this number; 0: they are still in use, and it was not asked.
    Stuck { errno: u16 },
}

impl Stage {
    pub(crate) fn at(&self) -> At {
        match self.0.load(Ordering::Acquire) {
            0 => At::Open,
            1 => At::Error,
            2 => At::Destroyed,
            stuck => At::Stuck { errno: (stuck - STUCK) as u16 },
        }
    }

    fn set(&self, at: At) {
        let value = match at {
            At::Open => 0,
            At::Error => 1,
            At::Destroyed => 2,
            At::Stuck { errno } => STUCK + u32::from(errno),
        };
        self.0.store(value, Ordering::Release);
    }
}

/// What befell the queue pairs of a port: 0, or 1 + the number of the event.
#[derive(Debug, Default)]
pub(crate) struct Ailment(AtomicU32);

impl Ailment {
    /// The number of the event, if there was one.
    #[inline]
    pub(crate) fn event(&self) -> Option<sys::ibv_event_type> {
        self.0.load(Ordering::Relaxed).checked_sub(1).map(sys::ibv_event_type)
    }

    fn set(&self, event: sys::ibv_event_type) {
        self.0.store(event.0 + 1, Ordering::Relaxed);
    }
}

/// What a port hands to the keeper.
pub(crate) enum Job {
    /// Into the state ERR with these.
    Fail(Arc<Queues>, Arc<Stage>),
    /// Destroy these, then let go of the memory.
    Destroy(Arc<Queues>, Arc<Stage>, Vec<Bound>),
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Keeper {
    device: Device,
    jobs: Mutex<VecDeque<Job>>,
    /// The queue pairs in use, by address.
    watched: Mutex<HashMap<usize, Arc<Ailment>>>,
    wake: OwnedFd,
    stopping: AtomicBool,
    link_down: AtomicBool,
    events: AtomicU64,
}

impl core::fmt::Debug for Job {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Job::Fail(..) => "Fail",
            Job::Destroy(..) => "Destroy",
        })
    }
}

/// The users' share in a keeper: when the last is gone, the thread finishes what it was given and ends.
#[derive(Debug)]
pub(crate) struct Share {
    keeper: Arc<Keeper>,
}

impl core::ops::Deref for Share {
    type Target = Arc<Keeper>;

    fn deref(&self) -> &Arc<Keeper> {
        &self.keeper
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.keeper.stopping.store(true, Ordering::Release);
        self.keeper.ring();
    }
}

impl Keeper {
    /// Starts the thread.
    pub(crate) fn start(device: Device) -> Result<Share, Error> {
        let refused = |operation| {
            move |errno: rustix::io::Errno| Error::Device { operation, errno: errno.raw_os_error() }
        };
        // SAFETY: the context is open.
        let events = unsafe { (*device.context()).async_fd };
        // SAFETY: the descriptor belongs to the context, which the keeper owns.
        let events = unsafe { BorrowedFd::borrow_raw(events) };
        let flags =
            rustix::fs::fcntl_getfl(events).map_err(refused("reading the flags of the event descriptor"))?;
        rustix::fs::fcntl_setfl(events, flags | rustix::fs::OFlags::NONBLOCK)
            .map_err(refused("making the event descriptor non-blocking"))?;
        let pipe_flags = rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK;
        let (woken, wake) = rustix::pipe::pipe_with(pipe_flags).map_err(refused("making a pipe"))?;
        let keeper = Arc::new(Keeper {
            device,
            jobs: Mutex::default(),
            watched: Mutex::default(),
            wake,
            stopping: AtomicBool::new(false),
            link_down: AtomicBool::new(false),
            events: AtomicU64::new(0),
        });
        let thread = keeper.clone();
        std::thread::Builder::new().name("portway-ib".into()).spawn(move || thread.run(&woken)).map_err(
            |error| Error::Device {
                operation: "starting a thread",
                errno: error.raw_os_error().unwrap_or(0),
            },
        )?;
        Ok(Share { keeper })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Whether the port is up, as far as events said.
    pub(crate) fn link_is_up(&self) -> bool {
        !self.link_down.load(Ordering::Relaxed)
    }

    /// How many events came.
    pub(crate) fn events(&self) -> u64 {
        self.events.load(Ordering::Relaxed)
    }

    /// Hands over a job. Waits for nothing but other handing over.
    pub(crate) fn give(&self, job: Job) {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).push_back(job);
        self.ring();
    }

    fn ring(&self) {
        // A full pipe wakes the thread as well.
        let _ = rustix::io::write(&self.wake, &[0]);
    }

    /// Events of this queue pair are of interest from now on.
    pub(crate) fn watch(&self, pair: *mut sys::ibv_qp) {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.insert(pair as usize, Arc::default());
    }

    pub(crate) fn forget(&self, pair: *mut sys::ibv_qp) {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner).remove(&(pair as usize));
    }

    /// Lets the events of several queue pairs meet in one place.
    pub(crate) fn join_ailments(&self, pairs: &[*mut sys::ibv_qp]) -> Arc<Ailment> {
        let joined = Arc::<Ailment>::default();
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        for &pair in pairs {
            let before = watched.insert(pair as usize, joined.clone());
            if let Some(event) = before.and_then(|ailment| ailment.event()) {
                joined.set(event);
            }
        }
        joined
    }

    fn run(self: Arc<Self>, woken: &OwnedFd) {
        // SAFETY: the context is open while `self` lives.
        let events = unsafe { (*self.device.context()).async_fd };
        // SAFETY: as above.
        let events = unsafe { BorrowedFd::borrow_raw(events) };
        let sleep = Timespec { tv_sec: SLEEP.as_secs() as i64, tv_nsec: 0 };
        let mut dead = false;
        loop {
            let mut wait = [PollFd::new(woken, PollFlags::IN), PollFd::new(&events, PollFlags::IN)];
            // Of a removed device the descriptor is ready for ever and gives nothing; do not spin on it.
            let count = if dead { 1 } else { 2 };
            let _ = rustix::event::poll(&mut wait[..count], Some(&sleep));
            if wait[1].revents().intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
                dead = true;
            }
            let mut bytes = [0; 64];
            while rustix::io::read(woken, &mut bytes).is_ok_and(|count| count == bytes.len()) {}
            while self.take_event() {}
            while let Some(job) = self.next_job() {
                self.carry_out(job);
                while self.take_event() {}
            }
            if self.stopping.load(Ordering::Acquire)
                && self.jobs.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
            {
                return;
            }
        }
    }

    fn next_job(&self) -> Option<Job> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    fn carry_out(&self, job: Job) {
        match job {
            Job::Fail(queues, stage) => {
                queues.to_error();
                stage.set(At::Error);
            }
            Job::Destroy(queues, stage, bound) => {
                queues.to_error();
                // The port gave its share away with this job, and jobs are carried out in order.
                let end = match Arc::into_inner(queues).map(Queues::destroy) {
                    Some(Ok(())) => At::Destroyed,
                    Some(Err(Error::Device { errno, .. })) => {
                        At::Stuck { errno: errno.try_into().unwrap_or_default() }
                    }
                    Some(Err(_)) | None => At::Stuck { errno: 0 },
                };
                match end {
                    At::Destroyed => drop(bound),
                    // The device may still reach this memory: it stays bound, and mapped, for good.
                    _ => core::mem::forget(bound),
                }
                stage.set(end);
            }
        }
    }

    /// Fetches one event, takes note of it, acknowledges it. False if there is none.
    fn take_event(&self) -> bool {
        let table = self.device.verbs().table();
        let mut event = core::mem::MaybeUninit::<sys::ibv_async_event>::zeroed();
        // SAFETY: the context is open; the call fills in the event or fails. It does not block.
        let status = unsafe { (table.get_async_event)(self.device.context(), event.as_mut_ptr()) };
        if status != 0 {
            return false;
        }
        // SAFETY: the call succeeded, and zeros were an event before it.
        let mut event = unsafe { event.assume_init() };
        self.note(&event);
        // Only now, since the queue pair that it names stays until then.
        // SAFETY: the event was fetched above, and is acknowledged once.
        unsafe { (table.ack_async_event)(&mut event) };
        true
    }

    fn note(&self, event: &sys::ibv_async_event) {
        self.events.fetch_add(1, Ordering::Relaxed);
        let watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        match event.event_type {
            sys::IBV_EVENT_QP_FATAL | sys::IBV_EVENT_QP_REQ_ERR | sys::IBV_EVENT_QP_ACCESS_ERR => {
                // SAFETY: an event of these types names a queue pair. Its address is compared and not followed.
                let pair = unsafe { event.element.qp } as usize;
                if let Some(ailment) = watched.get(&pair) {
                    ailment.set(event.event_type);
                }
            }
            // A completion queue of ours that overflows breaks a budget: nothing on the device can be relied on.
            sys::IBV_EVENT_DEVICE_FATAL | sys::IBV_EVENT_CQ_ERR => {
                watched.values().for_each(|ailment| ailment.set(event.event_type));
            }
            // Requests are retried over a link that comes back in time, and fail by themselves if it does not.
            sys::IBV_EVENT_PORT_ERR | sys::IBV_EVENT_PORT_ACTIVE => {
                // SAFETY: an event of these types names a port.
                let port = unsafe { event.element.port_num };
                if port == self.device.port.number.into() {
                    self.link_down.store(event.event_type == sys::IBV_EVENT_PORT_ERR, Ordering::Relaxed);
                }
            }
            _ => {}
        }
    }
}
