//! [`World`]: RDMA devices in software. Its functions fill a verbs table, so that the transport runs as it is with no
//! library and no device, and whatever goes wrong between it and a device can be made to go wrong.
//!
//! Stricter than most devices: queue pairs take requests as INIT, RTR, RTS say, send queues and completion queues
//! overflow at the length that was asked for, slots of unasked requests come free only with a later completion, keys and
//! ranges are checked, and what is destroyed in the wrong order is refused.

use core::ffi::c_int;
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use portway_fifo::memory::copy_bytes;
use portway_transport_ib::Verbs;
use portway_transport_ib::sys;

use super::{queues, table};

const EFAULT: i32 = 14;
/// `EOPNOTSUPP`.
pub const UNSUPPORTED: i32 = 95;

/// How a device is made, and what it cannot do.
#[derive(Clone, Debug)]
pub struct Make {
    pub name: &'static str,
    pub roce: bool,
    pub state: sys::ibv_port_state,
    pub transport: sys::ibv_transport_type,
    pub mtu: u32,
    pub max_message_bytes: u32,
    pub max_requests: i32,
    pub gids: Vec<(u8, [u8; 16], sys::ibv_gid_type)>,
    /// What opening it answers: 0, or an error number.
    pub open: i32,
    /// What `ibv_reg_dmabuf_mr` answers: 0, or an error number.
    pub dma_buf: i32,
    /// What registering device memory by its address answers.
    pub peer_memory: i32,
    /// The addresses that count as device memory.
    pub device_memory: (u64, u64),
}

impl Default for Make {
    fn default() -> Self {
        Make {
            name: "soft0",
            roce: true,
            state: sys::IBV_PORT_ACTIVE,
            transport: sys::IBV_TRANSPORT_IB,
            mtu: 5,
            max_message_bytes: 8 << 20,
            max_requests: 16_384,
            gids: vec![(
                1,
                [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1],
                sys::IBV_GID_TYPE_ROCE_V2,
            )],
            open: 0,
            dma_buf: 0,
            peer_memory: EFAULT,
            device_memory: (0, 0),
        }
    }
}

/// What the transport asked of the devices.
#[derive(Clone, Default)]
pub struct Log {
    /// Requests of each post, with their opcodes, flags and lengths.
    pub posts: Vec<Vec<(u32, u32)>>,
    pub refused_posts: u64,
    pub overruns: u64,
    /// `ibv_reg_mr*`: address, length, access.
    pub pages: Vec<(u64, u64, u32)>,
    /// `ibv_reg_dmabuf_mr`: offset, length, address, access.
    pub dma_bufs: Vec<(u64, u64, u64, u32)>,
    /// The attributes with which queue pairs went to RTR and RTS.
    pub ready: Vec<sys::ibv_qp_attr>,
    /// In the order in which it happened: names of calls that make and end things, and states.
    pub calls: Vec<&'static str>,
}

#[derive(Debug)]
pub(super) struct Request {
    pub(super) id: u64,
    pub(super) local: (u64, u32),
    pub(super) len: u32,
    pub(super) inline: Option<[u8; 8]>,
    pub(super) remote: (u64, u32),
    pub(super) asks: bool,
}

#[derive(Debug)]
pub(super) struct Pair {
    pub(super) address: usize,
    pub(super) device: usize,
    pub(super) state: sys::ibv_qp_state,
    pub(super) completions: u32,
    pub(super) depth: u32,
    /// Slots in use.
    pub(super) used: u32,
    /// Slots that come free with the next completion.
    pub(super) silent: u32,
    pub(super) queue: VecDeque<Request>,
    pub(super) peer: u32,
    pub(super) unacknowledged: u32,
}

pub(super) struct Queue {
    pub(super) capacity: usize,
    pub(super) entries: VecDeque<(sys::ibv_wc, u32, u32)>,
}

impl core::fmt::Debug for Inner {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Inner({} queue pairs)", self.pairs.len())
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Registered {
    pub(super) address: u64,
    pub(super) len: u64,
    pub(super) access: u32,
}

pub(super) struct Inner {
    pub(super) makes: Vec<Make>,
    pub(super) pairs: HashMap<u32, Pair>,
    pub(super) queues: HashMap<u32, Queue>,
    pub(super) registered: HashMap<u32, Registered>,
    pub(super) next: u32,
    pub(super) log: Log,
    pub(super) events: Vec<VecDeque<Event>>,
    pub(super) wakes: Vec<Option<OwnedFd>>,
    pub(super) open: usize,
    /// Requests that each poll carries out.
    pub(super) portion: usize,
    pub(super) random: u64,
    /// Fail the request after so many with this status.
    pub(super) fail: Option<(u64, sys::ibv_wc_status)>,
    pub(super) carried_out: u64,
    pub(super) refuse_destroy: bool,
    pub(super) refuse_deregistration: bool,
    pub(super) data_path: (PostSend, PollCq),
}

pub type PostSend =
    unsafe extern "C" fn(*mut sys::ibv_qp, *mut sys::ibv_send_wr, *mut *mut sys::ibv_send_wr) -> c_int;
pub type PollCq = unsafe extern "C" fn(*mut sys::ibv_cq, c_int, *mut sys::ibv_wc) -> c_int;

#[derive(Clone, Copy)]
pub(super) struct Event(pub(super) sys::ibv_event_type, pub(super) usize);

/// See the [module](self). A clone is the same world.
#[derive(Clone, Debug)]
pub struct World {
    inner: Arc<Mutex<Inner>>,
    /// Whether calls that reach the device's firmware wait.
    firmware: Arc<(Mutex<bool>, Condvar)>,
}

/// How long such a call waits at most, so that a transport that waits with it fails and does not hang.
const FIRMWARE_LIMIT: Duration = Duration::from_secs(5);

impl World {
    pub fn new(makes: &[Make]) -> World {
        let events = makes.iter().map(|_| VecDeque::new()).collect();
        let wakes = makes.iter().map(|_| None).collect();
        let inner = Inner {
            makes: makes.to_vec(),
            pairs: HashMap::new(),
            queues: HashMap::new(),
            registered: HashMap::new(),
            next: 0x100,
            log: Log::default(),
            events,
            wakes,
            open: 0,
            portion: 64,
            random: 88172645463325252,
            fail: None,
            carried_out: 0,
            refuse_destroy: false,
            refuse_deregistration: false,
            data_path: (queues::post_send, queues::poll_cq),
        };
        World { inner: Arc::new(Mutex::new(inner)), firmware: Arc::default() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The verbs of this world, for this thread's calls that list devices.
    pub fn verbs(&self) -> Verbs {
        table::verbs(Some(self), true)
    }

    /// The verbs of a machine whose kernel has no RDMA.
    pub fn verbs_without_kernel() -> Verbs {
        table::verbs(None, true)
    }

    /// The verbs as an old library has them.
    pub fn old_verbs(&self) -> Verbs {
        table::verbs(Some(self), false)
    }

    pub fn log(&self) -> Log {
        self.lock().log.clone()
    }

    pub fn clear_log(&self) {
        self.lock().log = Log::default();
    }

    /// Requests that each poll carries out; 0 stops the wire.
    pub fn set_portion(&self, requests: usize) {
        self.lock().portion = requests;
    }

    /// The request after so many fails with this status.
    pub fn fail_after(&self, requests: u64, status: sys::ibv_wc_status) {
        let mut inner = self.lock();
        inner.fail = Some((inner.carried_out + requests, status));
    }

    /// Lets the firmware stop answering, or answer again.
    pub fn block_firmware(&self, blocked: bool) {
        *self.firmware.0.lock().unwrap_or_else(PoisonError::into_inner) = blocked;
        self.firmware.1.notify_all();
    }

    /// Waits while the firmware does not answer.
    pub(super) fn firmware(&self) {
        let blocked = self.firmware.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.firmware.1.wait_timeout_while(blocked, FIRMWARE_LIMIT, |blocked| *blocked);
        drop(waited);
    }

    /// Takes slots of every send queue out of use.
    pub fn steal_slots(&self, slots: u32) {
        self.lock().pairs.values_mut().for_each(|pair| pair.depth -= slots);
    }

    /// Takes places of every completion queue out of use.
    pub fn steal_completions(&self, places: usize) {
        self.lock().queues.values_mut().for_each(|queue| queue.capacity -= places);
    }

    pub fn refuse_destroy(&self) {
        self.lock().refuse_destroy = true;
    }

    pub fn refuse_deregistration(&self, refuses: bool) {
        self.lock().refuse_deregistration = refuses;
    }

    /// Devices that are opened from now on post and poll with these.
    pub fn set_data_path(&self, post_send: PostSend, poll_cq: PollCq) {
        self.lock().data_path = (post_send, poll_cq);
    }

    /// What is still open, made or registered.
    pub fn left(&self) -> (usize, usize, usize, usize) {
        let inner = self.lock();
        (inner.open, inner.pairs.len(), inner.queues.len(), inner.registered.len())
    }

    /// The state of every queue pair, by number.
    pub fn states(&self) -> Vec<(u32, sys::ibv_qp_state)> {
        let mut states: Vec<_> =
            self.lock().pairs.iter().map(|(number, pair)| (*number, pair.state)).collect();
        states.sort_by_key(|(number, _)| *number);
        states
    }

    /// Lets a device report an asynchronous event, of a queue pair if there is a number.
    pub fn event(&self, device: usize, event: sys::ibv_event_type, pair: Option<u32>) {
        let mut inner = self.lock();
        let address = pair.map_or(0, |number| inner.pairs[&number].address);
        inner.raise(device, event, address);
    }

    /// Lets a device report an asynchronous event of one of its ports.
    pub fn port_event(&self, device: usize, event: sys::ibv_event_type, port: u8) {
        // The event's element holds the number where others hold an address.
        self.lock().raise(device, event, port.into());
    }
}

impl Inner {
    pub(super) fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    fn raise(&mut self, device: usize, event: sys::ibv_event_type, address: usize) {
        self.events[device].push_back(Event(event, address));
        if let Some(wake) = &self.wakes[device] {
            let _ = rustix::io::write(wake, &[0]);
        }
    }

    pub(super) fn complete(&mut self, number: u32, id: u64, status: sys::ibv_wc_status, asks: bool) {
        let pair = self.pairs.get_mut(&number).unwrap();
        pair.silent += 1;
        if !asks && status == sys::IBV_WC_SUCCESS {
            return;
        }
        let frees = core::mem::take(&mut pair.silent);
        let queue = self.queues.get_mut(&pair.completions).unwrap();
        if queue.entries.len() == queue.capacity {
            self.log.overruns += 1;
            return;
        }
        let wc = sys::ibv_wc { wr_id: id, status, qp_num: number, vendor_err: 0x5a, ..Default::default() };
        queue.entries.push_back((wc, number, frees));
    }

    pub(super) fn flush(&mut self, number: u32) {
        let pair = self.pairs.get_mut(&number).unwrap();
        pair.state = sys::IBV_QPS_ERR;
        for request in core::mem::take(&mut pair.queue) {
            self.complete(number, request.id, sys::IBV_WC_WR_FLUSH_ERR, true);
        }
    }

    fn reaches(&self, key: u32, address: u64, len: u32, access: u32) -> bool {
        self.registered.get(&key).is_some_and(|memory| {
            memory.access & access == access
                && address >= memory.address
                && address + u64::from(len) <= memory.address + memory.len
        })
    }

    /// Carries out the oldest request of a queue pair.
    fn carry_out(&mut self, number: u32) {
        let pair = self.pairs.get_mut(&number).unwrap();
        let (peer, request) = (pair.peer, pair.queue.pop_front().unwrap());
        let count = self.carried_out;
        self.carried_out += 1;
        let listens = self.pairs.get(&peer).is_some_and(|there| {
            there.peer == number && [sys::IBV_QPS_RTR, sys::IBV_QPS_RTS].contains(&there.state)
        });
        let status = if self.fail.is_some_and(|(at, _)| at == count) {
            self.fail.take().unwrap().1
        } else if request.inline.is_none() && !self.reaches(request.local.1, request.local.0, request.len, 0)
        {
            sys::IBV_WC_LOC_PROT_ERR
        } else if !listens {
            sys::IBV_WC_RETRY_EXC_ERR
        } else if !self.reaches(
            request.remote.1,
            request.remote.0,
            request.len,
            sys::IBV_ACCESS_REMOTE_WRITE.0,
        ) {
            let (device, address) = (self.pairs[&peer].device, self.pairs[&peer].address);
            self.flush(peer);
            self.raise(device, sys::IBV_EVENT_QP_ACCESS_ERR, address);
            sys::IBV_WC_REM_ACCESS_ERR
        } else {
            let mut inline = request.inline.map(u64::from_ne_bytes);
            let from = match &mut inline {
                Some(word) => (word as *mut u64).cast(),
                None => request.local.0 as *mut u8,
            };
            // SAFETY: both ranges were found in registered memory, which the transport keeps; the tests read it through
            // regions alone. The inline word is this function's own.
            unsafe { copy_bytes(from, request.remote.0 as *mut u8, request.len as usize) };
            sys::IBV_WC_SUCCESS
        };
        self.complete(number, request.id, status, request.asks);
        if status != sys::IBV_WC_SUCCESS {
            self.flush(number);
        }
    }

    /// Carries out requests of all queue pairs, in an order that changes.
    pub(super) fn pump(&mut self) {
        for _ in 0..self.portion {
            let mut ready: Vec<u32> = self
                .pairs
                .iter()
                .filter(|(_, pair)| !pair.queue.is_empty())
                .map(|(number, _)| *number)
                .collect();
            ready.sort_unstable();
            if ready.is_empty() {
                return;
            }
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            self.carry_out(ready[self.random as usize % ready.len()]);
        }
    }
}
