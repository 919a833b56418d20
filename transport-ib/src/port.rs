//! [`IbPort`]: a connection. What the engine calls, and the only code that runs for every op.

use core::fmt;
use std::sync::Arc;

use portway_proxy::TransportError;
use portway_proxy::transport::{Binding, Close, Completion, Lane, Op, Port, Submit};

use crate::chain::{Chain, PostSend};
use crate::error::{failure, of_this_side};
use crate::keeper::{Ailment, At, Job, Stage};
use crate::ledger::Ledger;
use crate::memory::Bound;
use crate::pair::{Begun, Bindings, NUMBER_BITS, Pair};
use crate::queues::Queues;
use crate::sys;
use crate::transport::Inner;

/// Completions taken from the device at a time.
const BATCH: usize = 16;
/// How often per poll.
const BATCHES: usize = 4;

type PollCq = unsafe extern "C" fn(*mut sys::ibv_cq, i32, *mut sys::ibv_wc) -> i32;

/// Where the port stands.
#[derive(Debug)]
enum State {
    Open,
    /// It has failed, and its queue pairs are on their way to the state ERR. Nothing has been reported.
    Failing(TransportError),
    Failed(TransportError),
}

pub(crate) struct IbPort {
    state: State,
    pairs: Box<[Pair]>,
    lanes: Vec<Bindings>,
    completions: *mut sys::ibv_cq,
    post_send: PostSend,
    poll_cq: PollCq,
    taken: Box<[sys::ibv_wc; BATCH]>,
    ailment: Arc<Ailment>,
    longest_bytes: u32,
    /// Given to the keeper when the port closes.
    queues: Option<Arc<Queues>>,
    stage: Arc<Stage>,
    bound: Vec<Bound>,
    peer: String,
    peer_transport: u64,
    inner: Arc<Inner>,
}

// SAFETY: the queues that the pointers point to may be used from any thread, and live while `queues` holds them; the
// port uses them only in the state `Open`, in which it does.
unsafe impl Send for IbPort {}

impl fmt::Debug for IbPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IbPort")
            .field("peer", &self.peer)
            .field("state", &self.state)
            .field("lanes", &self.lanes.len())
            .finish_non_exhaustive()
    }
}

/// Tables of a provider that lacks a function of the data path; no provider of RC queue pairs does.
unsafe extern "C" fn no_post(
    _: *mut sys::ibv_qp,
    _: *mut sys::ibv_send_wr,
    _: *mut *mut sys::ibv_send_wr,
) -> i32 {
    rustix::io::Errno::OPNOTSUPP.raw_os_error()
}

unsafe extern "C" fn no_poll(_: *mut sys::ibv_cq, _: i32, _: *mut sys::ibv_wc) -> i32 {
    -1
}

impl IbPort {
    pub(crate) fn new(
        inner: Arc<Inner>,
        queues: Queues,
        peer: String,
        peer_transport: u64,
        longest_bytes: u32,
    ) -> Self {
        let config = &inner.config;
        let pair = |(index, &pair): (usize, &*mut sys::ibv_qp)| Pair {
            pair,
            ledger: Ledger::new(config.depth, config.signal_every, (index as u64) << NUMBER_BITS),
            chain: Chain::new(config.depth as usize),
            begun: None,
        };
        // SAFETY: the context is open.
        let context = unsafe { &*inner.keeper.device().context() };
        IbPort {
            state: State::Open,
            pairs: queues.pairs().iter().enumerate().map(pair).collect(),
            lanes: Vec::new(),
            completions: queues.completions(),
            post_send: context.ops.post_send.unwrap_or(no_post),
            poll_cq: context.ops.poll_cq.unwrap_or(no_poll),
            taken: Box::new([sys::ibv_wc::default(); BATCH]),
            ailment: inner.keeper.join_ailments(queues.pairs()),
            longest_bytes,
            queues: Some(Arc::new(queues)),
            stage: Arc::default(),
            bound: Vec::new(),
            peer,
            peer_transport,
            inner: inner.clone(),
        }
    }

    /// The error of a port that is not in use, once its queue pairs are in the state ERR.
    #[cold]
    fn closed(&mut self) -> Result<(), TransportError> {
        if let State::Failing(error) = &self.state {
            if self.stage.at() == At::Open {
                return Ok(());
            }
            self.state = State::Failed(error.clone());
        }
        match &self.state {
            State::Failed(error) => Err(error.clone()),
            _ => Ok(()),
        }
    }

    fn is_open(&self) -> bool {
        matches!(self.state, State::Open)
    }

    /// Stops everything: the queue pairs go to the state ERR, and then the error is reported.
    #[cold]
    fn fail(&mut self, error: TransportError) {
        if !self.is_open() {
            return;
        }
        self.state = State::Failing(error);
        if let Some(queues) = &self.queues {
            self.inner.keeper.give(Job::Fail(queues.clone(), self.stage.clone()));
        }
    }

    /// The caller's mistake: reported at once, nothing of it has reached the device.
    #[cold]
    fn refuse(&mut self, error: TransportError) -> TransportError {
        self.fail(error.clone());
        self.state = State::Failed(error.clone());
        error
    }

    #[cold]
    fn ail(&mut self, event: sys::ibv_event_type) {
        let operation = match event {
            sys::IBV_EVENT_QP_ACCESS_ERR => "write of the peer refused here, key or range (QP_ACCESS_ERR)",
            sys::IBV_EVENT_QP_REQ_ERR => "invalid request of the peer (QP_REQ_ERR)",
            sys::IBV_EVENT_QP_FATAL => "queue pair (QP_FATAL)",
            sys::IBV_EVENT_CQ_ERR => "completion queue (CQ_ERR)",
            _ => "device (DEVICE_FATAL)",
        };
        let status = event.0 as i32;
        self.fail(match event {
            sys::IBV_EVENT_QP_ACCESS_ERR | sys::IBV_EVENT_QP_REQ_ERR => {
                TransportError::Remote { peer: self.peer.clone(), operation, status, vendor: 0 }
            }
            _ => of_this_side(&self.peer, operation, status, 0),
        });
    }

    /// Hands every chain to the device.
    #[inline]
    fn post(&mut self) {
        for index in 0..self.pairs.len() {
            let pair = &mut self.pairs[index];
            if pair.chain.is_empty() {
                continue;
            }
            pair.ask_for_last();
            // SAFETY: the port is open, so the queue pair is not destroyed, and what the requests read is bound.
            if let Err(status) = unsafe { pair.chain.post(self.post_send, pair.pair) } {
                self.not_posted(status);
                return;
            }
        }
    }

    #[cold]
    fn not_posted(&mut self, status: i32) {
        let status = if status < 0 { crate::error::errno() } else { status };
        self.fail(of_this_side(&self.peer, "ibv_post_send", status, 0));
    }

    /// Takes note of what the device has completed.
    #[inline]
    fn take(&mut self) {
        for _ in 0..BATCHES {
            // SAFETY: the port is open, so the queue is not destroyed; there is room for a batch.
            let count = unsafe { (self.poll_cq)(self.completions, BATCH as i32, self.taken.as_mut_ptr()) };
            let Ok(count) = usize::try_from(count) else {
                let operation = "ibv_poll_cq";
                self.fail(of_this_side(&self.peer, operation, count, 0));
                return;
            };
            for index in 0..count.min(BATCH) {
                let sys::ibv_wc { wr_id, status, .. } = self.taken[index];
                let pair = self.pairs.get_mut((wr_id >> NUMBER_BITS) as usize);
                if status != sys::IBV_WC_SUCCESS || !pair.is_some_and(|pair| pair.ledger.completed(wr_id)) {
                    self.failed_request(count);
                    return;
                }
            }
            if count < BATCH {
                return;
            }
        }
    }

    /// A batch of completions has one that is not a success: what went wrong first is the cause, and what the queue pair
    /// flushed after it is not.
    #[cold]
    fn failed_request(&mut self, count: usize) {
        let failed = |wc: &&sys::ibv_wc| wc.status != sys::IBV_WC_SUCCESS;
        let taken = &self.taken[..count.min(BATCH)];
        let cause = taken.iter().filter(failed).find(|wc| wc.status != sys::IBV_WC_WR_FLUSH_ERR);
        let error = match cause.or_else(|| taken.iter().find(failed)) {
            Some(wc) => failure(&self.op_of(wc.wr_id), wc.status, wc.vendor_err),
            None => {
                let operation = "completion of a request that is not under way";
                of_this_side(&self.peer, operation, 0, 0)
            }
        };
        self.fail(error);
    }

    /// The peer, and which op of which lane a request to it was part of.
    fn op_of(&self, id: u64) -> String {
        let pair = self.pairs.get((id >> NUMBER_BITS) as usize);
        match pair.and_then(|pair| pair.ledger.op_of(id)) {
            Some(op) => format!("{} (lane {}, op {})", self.peer, op.lane.0, op.sequence),
            None => self.peer.clone(),
        }
    }

    /// Goes on with ops that did not fit, now that there may be room.
    #[inline]
    fn go_on(&mut self) {
        let mut built = false;
        for pair in &mut self.pairs {
            if let Some(begun) = pair.begun.take() {
                pair.build_on(&self.lanes[begun.op.lane.0 as usize], begun, self.longest_bytes);
                built = true;
            }
        }
        if built {
            self.post();
        }
    }
}

impl Port for IbPort {
    fn bind(&mut self, binding: &Binding) -> Result<Lane, TransportError> {
        self.closed()?;
        let memories = &self.inner.memories;
        let (source_bound, source) = memories.bind_local("source", binding.source)?;
        let of_peer = |what, id| {
            let (bound, remote) = memories.bind_remote(what, id)?;
            let memory = &remote.memory;
            if memory.transport != self.peer_transport {
                return Err(TransportError::Malformed {
                    what,
                    expected: format!("memory of the peer's transport {:#x}", self.peer_transport),
                    seen: format!("memory of transport {:#x}", memory.transport),
                });
            }
            Ok((bound, remote))
        };
        let (destination_bound, destination) = of_peer("destination", binding.destination)?;
        let (signal_bound, signal) = of_peer("signal word", binding.signal)?;
        let (destination, signal) = (&destination.memory, &signal.memory);
        let word = match signal.spans[..] {
            // Other memory may be written out of order: a signal there could overtake its data.
            [word] if signal.is_word && word.len_bytes == 8 && word.address % 8 == 0 => word,
            _ => {
                let expected = "a transport's signal word, 8 bytes at a multiple of 8".into();
                let what = if signal.is_word { "signal word" } else { "memory for data" };
                let (len_bytes, address) = (signal.len_bytes(), signal.spans[0].address);
                let seen = format!("{what}, {len_bytes} bytes at {address:#x}");
                return Err(TransportError::Malformed { what: "signal word", expected, seen });
            }
        };
        if signal.place != destination.place {
            // Nothing orders a write to one memory before a write to another.
            let what = "a signal word that does not lie in the memory of the data";
            return Err(portway_fifo::Error::Unsupported { what }.into());
        }
        let region = &source.region;
        if destination.transport == memories.transport {
            let (begin, end) = (region.address(), region.address() + region.len_bytes());
            if let Some(span) =
                destination.spans.iter().find(|s| s.address < end && begin < s.address + s.len_bytes)
            {
                return Err(TransportError::Overlap {
                    source_address: begin,
                    destination_address: span.address,
                });
            }
        }
        let (from, to) = (&source.spans[..], &destination.spans[..]);
        let lens = (region.len_bytes(), destination.len_bytes());
        let direct_bytes = match (from, to) {
            ([_], [_]) => lens.0.min(lens.1).min(self.longest_bytes.into()),
            _ => 0,
        };
        let lane = Lane(self.lanes.len() as u32);
        self.lanes.push(Bindings {
            pair: lane.0 % self.pairs.len() as u32,
            signal_key: word.key,
            signal_address: word.address,
            source_len_bytes: lens.0,
            destination_len_bytes: lens.1,
            direct_bytes,
            // Every memory has a span: it was registered, or its message was checked.
            from: from[0],
            to: to[0],
            source: from.into(),
            destination: to.into(),
        });
        self.bound.extend([source_bound, destination_bound, signal_bound]);
        Ok(lane)
    }

    #[inline]
    fn submit(&mut self, op: &Op) -> Result<Submit, TransportError> {
        let lane = self.lanes.get(op.lane.0 as usize);
        if let (State::Open, Some(lane)) = (&self.state, lane) {
            let requests = u64::from(op.put.is_some()) + u64::from(op.signal.is_some());
            let direct = op.put.as_ref().is_none_or(|put| lane.is_direct(put));
            if let (true, Some(pair)) = (direct, self.pairs.get_mut(lane.pair as usize)) {
                if pair.ledger.takes_whole_op(requests) {
                    pair.build(lane, op, requests);
                    return Ok(Submit::Accepted);
                }
            }
        }
        self.submit_other(op)
    }

    #[inline]
    fn kick(&mut self) -> Result<(), TransportError> {
        if !self.is_open() {
            return self.closed();
        }
        self.post();
        Ok(())
    }

    #[inline]
    fn poll(&mut self, completions: &mut [Completion]) -> Result<usize, TransportError> {
        if let Some(event) = self.ailment.event() {
            self.ail(event);
        }
        if self.is_open() {
            self.take();
        }
        if !self.is_open() {
            return self.closed().map(|()| 0);
        }
        self.go_on();
        let mut count = 0;
        for pair in &mut self.pairs {
            while count < completions.len() {
                let Some(completion) = pair.ledger.next_complete() else { break };
                completions[count] = completion;
                count += 1;
            }
        }
        Ok(count)
    }

    fn close(&mut self) -> Result<Close, TransportError> {
        if !matches!(self.state, State::Failed(_)) {
            self.state = State::Failed(TransportError::Closed);
        }
        self.give_away();
        match self.stage.at() {
            At::Destroyed => Ok(Close::Quiesced),
            At::Stuck { errno } => Err(TransportError::Device {
                operation: "destroying queue pairs, whose memory stays bound,",
                status: errno.into(),
                vendor: 0,
                source: None,
            }),
            At::Open | At::Error => Ok(Close::Pending),
        }
    }
}

impl IbPort {
    /// Submits what is not an op of one or two requests that fit.
    #[cold]
    #[inline(never)]
    fn submit_other(&mut self, op: &Op) -> Result<Submit, TransportError> {
        if !self.is_open() {
            return self.closed().map(|()| Submit::Full);
        }
        let lens_bytes = |lane: Lane| self.lanes[lane.0 as usize].lens_bytes();
        if let Some(error) = TransportError::of_op(op, self.lanes.len(), lens_bytes) {
            return Err(self.refuse(error));
        }
        let lane = &self.lanes[op.lane.0 as usize];
        let pair = &mut self.pairs[lane.pair as usize];
        if !pair.ledger.takes_op() {
            return Ok(Submit::Full);
        }
        pair.build_on(lane, Begun { op: *op, moved_bytes: 0 }, self.longest_bytes);
        Ok(Submit::Accepted)
    }

    /// Gives the queues and the bound memory to the keeper, once.
    fn give_away(&mut self) {
        if let Some(queues) = self.queues.take() {
            let bound = core::mem::take(&mut self.bound);
            self.inner.keeper.give(Job::Destroy(queues, self.stage.clone(), bound));
        }
    }
}

impl Drop for IbPort {
    fn drop(&mut self) {
        self.give_away();
    }
}
