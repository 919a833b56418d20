//! [`RawSide`]: the same messages over plain verbs, with nothing between the thread that measures and the device.
//!
//! The transport sets the queue pairs up, so that they have the same settings; then they are posted to and polled here.

use std::sync::atomic::Ordering;

use portway_fifo::{Heap, Region, Words};
use portway_proxy::TransportError;
use portway_proxy::transport::{Port, Transport};
use portway_transport_ib::{Ib, sys};

use super::{NAME, failed, open_both, recorded};
use crate::args::Args;
use crate::failure::Failure;
use crate::put::side::{Memory, Place, Side};
use crate::trial::Trial;

/// Completions polled at a time.
const BATCH: usize = 16;
/// Every how-manieth request asks for a completion, as the transport's default is.
const EVERY: u64 = 32;
/// A request's id is its number, and its lane above these bits.
const NUMBER_BITS: u32 = 48;

/// What was chosen for the two ends.
pub struct Setup {
    pub devices: [String; 2],
    pub gid_indices: [Option<u8>; 2],
}

/// Connects two ends to see what is chosen for them.
pub fn setup(args: &Args) -> Result<Setup, Failure> {
    let sides = connect(args, "ib, connecting", 8)?;
    Ok(Setup {
        devices: sides.each_ref().map(|side| side.ib.device().to_owned()),
        gid_indices: sides.each_ref().map(|side| side.gid_index),
    })
}

/// A request with what it refers to.
struct Request {
    request: sys::ibv_send_wr,
    piece: sys::ibv_sge,
    /// The value of a signal. The device copies it while it is posted.
    value: u64,
}

/// A queue pair, and the signals of both directions.
struct Lane {
    pair: *mut sys::ibv_qp,
    /// Requests that are posted together, linked in order.
    chain: Box<[Request]>,
    len: usize,
    /// Numbers of requests, counted from 0.
    built: u64,
    complete: u64,
    asked: u64,
    /// The peer's word, and what it holds once everything has arrived.
    there: (u64, u32),
    value: u64,
    /// The word here, and what of it was seen.
    here: Words,
    seen: u64,
}

/// See the module. The memory of a side that is dropped is not registered any more, so the device refuses what is late.
pub struct RawSide {
    lanes: Vec<Lane>,
    completions: *mut sys::ibv_cq,
    post_send: PostSend,
    poll_cq: PollCq,
    source_key: u32,
    /// The peer's destination.
    destination: (u64, u32),
    memory: Memory,
    depth: u64,
    inline_bytes: u64,
    gid_index: Option<u8>,
    /// Owns the queues; nobody else uses it.
    _port: Box<dyn Port>,
    ib: Ib,
}

// SAFETY: queues may be used from any thread, and `_port` keeps them; the requests point into the chain, which is a box.
unsafe impl Send for RawSide {}

type PostSend =
    unsafe extern "C" fn(*mut sys::ibv_qp, *mut sys::ibv_send_wr, *mut *mut sys::ibv_send_wr) -> i32;
type PollCq = unsafe extern "C" fn(*mut sys::ibv_cq, i32, *mut sys::ibv_wc) -> i32;

/// Registered memory, with the keys by which its device and a peer's reach it.
struct Registered {
    region: Region,
    local_key: u32,
    remote_key: u32,
}

impl Registered {
    /// The memory that `register` makes known, with the key that the device gave it.
    fn by(register: impl FnOnce() -> Result<Region, TransportError>) -> Result<Self, TransportError> {
        recorded::take();
        let region = register()?;
        match recorded::take().regions[..] {
            [made] => {
                // SAFETY: the device made it just now, and the transport keeps it.
                let sys::ibv_mr { lkey: local_key, rkey: remote_key, .. } = *unsafe { &*made };
                Ok(Registered { region, local_key, remote_key })
            }
            _ => Err(unsupported("memory of several parts")),
        }
    }

    fn remote(&self) -> (u64, u32) {
        (self.region.address(), self.remote_key)
    }
}

fn unsupported(what: &'static str) -> TransportError {
    portway_fifo::Error::Unsupported { what }.into()
}

/// An end's memory: a word is for each queue pair.
struct Memories {
    source: Registered,
    destination: Registered,
    words: Vec<Registered>,
}

fn memories(args: &Args, ib: &Ib, len_bytes: u64) -> Result<Memories, TransportError> {
    let data = || Registered::by(|| Ok(ib.register(&Heap.allocate(len_bytes)?)?.region));
    let word = |_| Registered::by(|| Ok(ib.signal_word()?.region));
    let words = (0..args.queue_pairs).map(word).collect::<Result<_, _>>()?;
    Ok(Memories { source: data()?, destination: data()?, words })
}

/// Two sides over the device.
pub fn connect(args: &Args, measurement: &str, len_bytes: u64) -> Result<[RawSide; 2], Failure> {
    let of = |error| failed(measurement, error);
    let verbs = recorded::verbs(args.inline_bytes as u32).map_err(|error| of(error.into()))?;
    let [a, b] = open_both(args, &verbs, measurement)?;
    let [a_memories, b_memories] =
        [memories(args, &a, len_bytes).map_err(of)?, memories(args, &b, len_bytes).map_err(of)?];
    let endpoint = |ib: &Ib| {
        recorded::take();
        let (endpoint, bytes) = ib.endpoint()?;
        Ok((endpoint, bytes, recorded::take()))
    };
    let (a_end, a_bytes, a_made) = endpoint(&a).map_err(of)?;
    let (b_end, b_bytes, b_made) = endpoint(&b).map_err(of)?;
    let a_port = a_end.connect(&b_bytes, args.deadline()).map_err(of)?;
    let a_gid = recorded::take().gid_index;
    let b_port = b_end.connect(&a_bytes, args.deadline()).map_err(of)?;
    let b_gid = recorded::take().gid_index;
    let first = RawSide::new(args, (a, a_port, a_made, a_gid), &a_memories, &b_memories).map_err(of)?;
    let second = RawSide::new(args, (b, b_port, b_made, b_gid), &b_memories, &a_memories).map_err(of)?;
    Ok([first, second])
}

impl RawSide {
    fn new(
        args: &Args,
        (ib, port, made, gid_index): (Ib, Box<dyn Port>, recorded::Made, Option<u8>),
        mine: &Memories,
        theirs: &Memories,
    ) -> Result<Self, TransportError> {
        let ([completions], [first, ..]) = (&made.queues[..], &made.pairs[..]) else {
            return Err(unsupported("a connection without queues of its own"));
        };
        // SAFETY: the device made it just now, and the port keeps it.
        let context = unsafe { (**first).context };
        // SAFETY: a queue pair's context lives longer than it.
        let ops = unsafe { &(*context).ops };
        let (Some(post_send), Some(poll_cq)) = (ops.post_send, ops.poll_cq) else {
            return Err(unsupported("posting and polling"));
        };
        let lane = |((&pair, here), there): ((&*mut sys::ibv_qp, &Registered), &Registered)| {
            Ok(Lane {
                pair,
                chain: (0..2 * args.post_list).map(|_| Request::default()).collect(),
                len: 0,
                built: 0,
                complete: 0,
                asked: 0,
                there: there.remote(),
                value: 0,
                here: Words::new(here.region.clone())?,
                seen: 0,
            })
        };
        let lanes = made.pairs.iter().zip(&mine.words).zip(&theirs.words).map(lane);
        Ok(RawSide {
            lanes: lanes.collect::<Result<_, TransportError>>()?,
            completions: *completions,
            post_send,
            poll_cq,
            source_key: mine.source.local_key,
            destination: theirs.destination.remote(),
            memory: Memory {
                source: Words::new(mine.source.region.clone())?,
                destination: Words::new(mine.destination.region.clone())?,
            },
            depth: 2 * args.tx_depth,
            inline_bytes: args.inline_bytes,
            gid_index,
            _port: port,
            ib,
        })
    }

    fn lane_of(&self, n: u64) -> usize {
        (n % self.lanes.len() as u64) as usize
    }

    /// Waits until so many requests fit into a lane's queue.
    fn make_room(&mut self, lane: usize, requests: u64, trial: &Trial) -> Result<(), Failure> {
        let mut wait = trial.wait("room in the send queue", requests);
        loop {
            let at = &self.lanes[lane];
            let room = self.depth - (at.built - at.complete);
            if room >= requests {
                return Ok(());
            }
            self.post(lane, trial)?;
            self.take(trial)?;
            wait.look(room)?;
        }
    }

    /// Takes note of completions.
    fn take(&mut self, trial: &Trial) -> Result<(), Failure> {
        let mut taken = [sys::ibv_wc::default(); BATCH];
        // SAFETY: the port keeps the queue; there is room for a batch.
        let count = unsafe { (self.poll_cq)(self.completions, BATCH as i32, taken.as_mut_ptr()) };
        let refused = |operation, status, vendor| {
            failed(trial.name(), TransportError::Device { operation, status, vendor, source: None })
        };
        let Ok(count) = usize::try_from(count) else { return Err(refused("ibv_poll_cq", count, 0)) };
        for wc in &taken[..count] {
            if wc.status != sys::IBV_WC_SUCCESS {
                return Err(refused("raw write", wc.status.0 as i32, wc.vendor_err));
            }
            let lane = &mut self.lanes[(wc.wr_id >> NUMBER_BITS) as usize];
            lane.complete = (wc.wr_id & ((1 << NUMBER_BITS) - 1)) + 1;
        }
        Ok(())
    }

    /// Posts what is in a lane's chain.
    fn post(&mut self, lane: usize, trial: &Trial) -> Result<(), Failure> {
        let post_send = self.post_send;
        let lane = &mut self.lanes[lane];
        let Some(last) = lane.len.checked_sub(1) else { return Ok(()) };
        lane.ask_for_last();
        lane.len = 0;
        let after = core::mem::replace(&mut lane.chain[last].request.next, core::ptr::null_mut());
        let mut bad = core::ptr::null_mut();
        // SAFETY: the port keeps the queue pair; the chain is linked and ends; what it reads is registered.
        let status = unsafe { post_send(lane.pair, &mut lane.chain[0].request, &mut bad) };
        lane.chain[last].request.next = after;
        if status != 0 {
            let operation = "ibv_post_send";
            let error = TransportError::Device { operation, status, vendor: 0, source: None };
            return Err(failed(trial.name(), error));
        }
        Ok(())
    }

    /// Ends a message in a lane's chain with its signal.
    fn end_message(&mut self, at: usize, trial: &Trial) -> Result<(), Failure> {
        let lane = &mut self.lanes[at];
        lane.value += 1;
        let value = lane.value;
        let there = lane.there;
        let slot = lane.next(at, sys::IBV_SEND_INLINE, there);
        slot.value = value;
        slot.piece = sys::ibv_sge { addr: &raw const slot.value as u64, length: 8, lkey: 0 };
        if lane.built - lane.asked >= EVERY {
            lane.ask_for_last();
        }
        if lane.len + 2 > lane.chain.len() { self.post(at, trial) } else { Ok(()) }
    }
}

impl Default for Request {
    fn default() -> Self {
        Request {
            request: sys::ibv_send_wr { num_sge: 1, opcode: sys::IBV_WR_RDMA_WRITE, ..Default::default() },
            piece: sys::ibv_sge::default(),
            value: 0,
        }
    }
}

impl Lane {
    /// The chain's next request, linked to the one before.
    fn next(&mut self, lane: usize, flags: sys::ibv_send_flags, there: (u64, u32)) -> &mut Request {
        let at = self.len;
        self.len += 1;
        let [before, slot] = match at.checked_sub(1) {
            Some(before) => match &mut self.chain[before..=at] {
                [before, slot] => [Some(before), Some(slot)],
                _ => [None, None],
            },
            None => [None, self.chain.first_mut()],
        };
        let Some(slot) = slot else { unreachable!("a chain is posted before it is full") };
        if let Some(before) = before {
            before.request.next = &mut slot.request;
        }
        slot.request.sg_list = &mut slot.piece;
        slot.request.wr_id = self.built | (lane as u64) << NUMBER_BITS;
        slot.request.send_flags = flags.0;
        slot.request.wr.rdma =
            sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: there.0, rkey: there.1 };
        self.built += 1;
        slot
    }

    /// Makes the last request ask for a completion.
    fn ask_for_last(&mut self) {
        if let Some(last) = self.len.checked_sub(1) {
            self.chain[last].request.send_flags |= sys::IBV_SEND_SIGNALED.0;
            self.asked = self.built;
        }
    }
}

impl Side for RawSide {
    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn lanes(&self) -> u64 {
        self.lanes.len() as u64
    }

    fn put_signal(&mut self, n: u64, place: Place, trial: &Trial) -> Result<(), Failure> {
        let at = self.lane_of(n);
        self.make_room(at, 2, trial)?;
        let piece = sys::ibv_sge {
            addr: self.memory.source.region().address() + place.offset_bytes,
            length: place.len_bytes as u32,
            lkey: self.source_key,
        };
        let there = (self.destination.0 + place.offset_bytes, self.destination.1);
        let is_inline = place.len_bytes <= self.inline_bytes;
        let flags = if is_inline { sys::IBV_SEND_INLINE } else { sys::ibv_send_flags(0) };
        self.lanes[at].next(at, flags, there).piece = piece;
        self.end_message(at, trial)
    }

    fn signal(&mut self, n: u64, trial: &Trial) -> Result<(), Failure> {
        let at = self.lane_of(n);
        self.make_room(at, 1, trial)?;
        self.end_message(at, trial)
    }

    fn kick(&mut self, trial: &Trial) -> Result<(), Failure> {
        (0..self.lanes.len()).try_for_each(|lane| self.post(lane, trial))
    }

    fn poll(&mut self, n: u64, _: &Trial) -> Result<bool, Failure> {
        let at = self.lane_of(n);
        let lane = &mut self.lanes[at];
        let arrived = lane.here[0].load(Ordering::Acquire).wrapping_sub(lane.seen) as i64 > 0;
        lane.seen += u64::from(arrived);
        Ok(arrived)
    }
}

/// The name of the reference in rows.
pub const REFERENCE: &str = "raw-verbs";

/// The name of a measurement of it.
pub fn name(test: &str, size_bytes: u64) -> String {
    format!("{NAME} {test} by {REFERENCE}, {size_bytes} bytes")
}
