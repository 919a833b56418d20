//! The step: triggers to ops, ops to ports, completions to frontiers.

use core::time::Duration;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{ChannelState, Engine, NO_COMPLETION, POLL_BATCH};
use crate::error::{ChannelError, TransportError};
use crate::request::{OpSet, Request, RequestFault};
use crate::stats::stall_word;
use crate::transport::{Completion, Op, Put, Submit};
use crate::window::Stray;

/// How often deadlines are looked at and idle ports polled.
const HOUSEKEEPING_NS: u64 = 1_000_000;

/// What a step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Triggers taken.
    pub triggers: u64,
    /// Ops that completed.
    pub completions: u64,
}

impl Step {
    /// Whether there was nothing to do.
    pub fn is_idle(self) -> bool {
        self == Step::default()
    }
}

/// What became of the trigger at a FIFO's front.
enum Taken {
    Yes,
    /// Its channel's window is full.
    Stalled,
    /// It names no channel.
    Lost(RequestFault),
}

impl Engine {
    /// Does what is ready, once. `now` is the time since any fixed moment and never goes back.
    ///
    /// From every FIFO it takes up to a batch; it offers the ops to their ports, kicks and polls these, moves the
    /// frontiers of the channels, and publishes each FIFO's tail at most once. A panic in a port ends that port's
    /// channels and nothing else.
    pub fn step(&mut self, now: Duration) -> Step {
        let now_ns = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        let (triggers, completions) = (self.counts.triggers, self.counts.completions);
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| self.work(now_ns))) {
            self.fail(payload);
        }
        self.show_counts();
        Step {
            triggers: self.counts.triggers - triggers,
            completions: self.counts.completions - completions,
        }
    }

    fn work(&mut self, now_ns: u64) {
        self.send_backlogs();
        for index in 0..self.fifos.len() {
            if !self.fifos[index].closed {
                self.drain(index, now_ns);
            }
        }
        let keep_house = now_ns >= self.next_housekeeping_ns;
        for index in 0..self.ports.len() {
            self.kick_and_poll(index, keep_house);
        }
        self.store_frontiers();
        if keep_house {
            self.next_housekeeping_ns = now_ns.saturating_add(HOUSEKEEPING_NS);
            self.end_overdue(now_ns);
        }
    }

    /// Offers the backlogs to their ports again, oldest op first.
    fn send_backlogs(&mut self) {
        for _ in 0..self.waiting.len() {
            let Some(index) = self.waiting.pop_front() else { return };
            self.send(index as usize);
            if self.channels[index as usize].window.backlog() != 0 {
                self.waiting.push_back(index);
            }
        }
        // Another one is first next time: whoever is first may take all the room that a port has.
        if self.waiting.len() > 1 {
            self.waiting.rotate_left(1);
        }
    }

    /// Takes up to a batch from a FIFO, and closes it if it was aborted or broke.
    fn drain(&mut self, index: usize, now_ns: u64) {
        let Some(mut consumer) = self.fifos[index].consumer.take() else { return };
        // Asked first, so that what was pushed before an abort is not missed for less than a batch.
        let closed = consumer.closed();
        let mut taken = 0;
        while taken < self.config.batch {
            let Some(trigger) = consumer.peek() else { break };
            let request = Request::decode(trigger);
            match self.take(index, consumer.position(), &request, now_ns) {
                Taken::Yes => {}
                Taken::Stalled => break,
                Taken::Lost(fault) => {
                    self.refuse_fifo(index, consumer.position(), fault, request);
                    break;
                }
            }
            consumer.advance();
            taken += 1;
        }
        self.counts.triggers += taken as u64;
        if consumer.publish() {
            self.counts.publishes += 1;
        }
        self.fifos[index].consumer = Some(consumer);
        if let Some(error) = closed {
            self.close_fifo(index, &error);
        }
    }

    /// Hands one trigger to its channel.
    #[inline]
    fn take(
        &mut self,
        fifo: usize,
        position: portway_fifo::Position,
        request: &Request,
        now_ns: u64,
    ) -> Taken {
        let numbers = &self.fifos[fifo].channels;
        let Some(&index) = numbers.get(usize::from(request.channel)) else {
            return Taken::Lost(RequestFault::UnknownChannel { channels: numbers.len() });
        };
        let index = index as usize;
        let channel = &mut self.channels[index];
        if channel.ended {
            self.counts.discarded += 1;
            return Taken::Yes;
        }
        if channel.window.is_full() {
            self.counts.stalls += 1;
            self.counts.last_stall = stall_word(fifo, request.channel);
            return Taken::Stalled;
        }
        let lens = (channel.shared.source_len_bytes, channel.shared.destination_len_bytes);
        if let Some(fault) = request.fault(lens.0, lens.1) {
            let error =
                ChannelError::Request { channel: request.channel, position, fault, request: *request };
            self.counts.discarded += 1;
            self.end_channel(index, error);
            return Taken::Yes;
        }
        let op = channel.op(request);
        channel.window.take(op, position, now_ns);
        // Behind a backlog it waits for its turn.
        if channel.window.backlog() == 1 {
            self.send(index);
            if self.channels[index].window.backlog() == 1 {
                self.waiting.push_back(index as u32);
            }
        }
        Taken::Yes
    }

    /// Offers a channel's backlog to its port until that is full.
    fn send(&mut self, index: usize) {
        let channel = &mut self.channels[index];
        let port = &mut self.ports[channel.port as usize];
        while let Some(op) = channel.window.next_to_send() {
            match port.call(|port| port.submit(op)) {
                Ok(Submit::Accepted) => {
                    channel.window.sent();
                    port.touched = true;
                    port.under_way += 1;
                }
                Ok(Submit::Full) => {
                    self.counts.refusals += 1;
                    return;
                }
                Err(error) => {
                    let port = channel.port as usize;
                    return self.fail_port(port, error);
                }
            }
        }
    }

    fn kick_and_poll(&mut self, index: usize, keep_house: bool) {
        let port = &mut self.ports[index];
        if port.failed.is_some() {
            // What it still has under way is waited for by nobody, but has to end before its memory is free.
            if keep_house {
                self.close_port_once(index);
            }
            return;
        }
        if port.touched {
            port.touched = false;
            if let Err(error) = port.call(|port| port.kick()) {
                return self.fail_port(index, error);
            }
        }
        if port.under_way != 0 || keep_house {
            self.poll(index);
        }
    }

    /// Takes what a port has to report, once; true if there may be more.
    fn poll(&mut self, index: usize) -> bool {
        let completions = &mut self.completions;
        match self.ports[index].call(|port| port.poll(completions)) {
            Ok(count) if count <= POLL_BATCH => {
                self.complete(index, count);
                return count == POLL_BATCH && self.ports[index].failed.is_none();
            }
            Ok(count) => self.fail_port(index, TransportError::Overreported { count, room: POLL_BATCH }),
            Err(error) => self.fail_port(index, error),
        }
        false
    }

    /// Takes note of the first `count` of `self.completions`, all of one port.
    fn complete(&mut self, port_index: usize, count: usize) {
        for at in 0..count {
            // One that a port counts and has not written must not pass for an older one.
            let Completion { lane, sequence } =
                core::mem::replace(&mut self.completions[at], NO_COMPLETION);
            let port = &mut self.ports[port_index];
            let stray = match port.lanes.get(lane.0 as usize) {
                Some(&index) => {
                    let channel = &mut self.channels[index as usize];
                    let result = channel.window.complete(sequence);
                    if result.is_ok() && !channel.moved {
                        channel.moved = true;
                        self.moved.push(index);
                    }
                    result.err().map(|stray| match stray {
                        Stray::NeverSent => "a completion of an op that was never accepted",
                        Stray::Repeated => "a second completion of an op",
                    })
                }
                None => Some("a completion of a lane that was never bound"),
            };
            if let Some(what) = stray {
                return self.fail_port(port_index, TransportError::Contract { what, lane: lane.0, sequence });
            }
            port.under_way -= 1;
            self.counts.completions += 1;
        }
    }

    /// Stores the frontiers that moved, each once.
    fn store_frontiers(&mut self) {
        for index in self.moved.drain(..) {
            let channel = &mut self.channels[index as usize];
            channel.moved = false;
            if !channel.ended {
                channel.shared.set_frontier(channel.window.frontier());
            }
        }
    }

    fn end_overdue(&mut self, now_ns: u64) {
        for index in 0..self.channels.len() {
            if self.overdue(index, now_ns).is_none() {
                continue;
            }
            // The engine may have been away for long. What the port has to report by now comes first.
            let port = self.channels[index].port as usize;
            let polls = self.ports[port].under_way / POLL_BATCH as u64 + 1;
            let _ = (0..polls).take_while(|_| self.poll(port)).count();
            if let Some(error) = self.overdue(index, now_ns) {
                self.end_channel(index, error);
            }
        }
        self.store_frontiers();
    }

    /// The error of a channel whose oldest op has been under way for too long.
    fn overdue(&self, index: usize, now_ns: u64) -> Option<ChannelError> {
        let channel = &self.channels[index];
        if channel.ended {
            return None;
        }
        let (oldest, sent) = channel.window.oldest()?;
        let after = Duration::from_nanos(now_ns.saturating_sub(oldest.taken_at_ns));
        (after > self.config.deadline).then_some(ChannelError::Deadline {
            channel: channel.shared.number,
            position: oldest.position,
            after,
            sent,
        })
    }

    pub(super) fn show_counts(&mut self) {
        if self.counts != self.shown {
            self.shared.board.show(self.counts);
            self.shown = self.counts;
        }
    }
}

impl ChannelState {
    /// The op that a request asks for, and the channel's next numbers.
    #[inline]
    fn op(&mut self, request: &Request) -> Op {
        let put = request.op.has(OpSet::PUT);
        let signal = request.op.has(OpSet::SIGNAL).then(|| {
            let n = if put { 1 } else { u64::from(request.size) };
            self.signal_value = self.signal_value.wrapping_add(n);
            self.signal_value
        });
        Op {
            lane: self.lane,
            sequence: self.window.next_sequence(),
            put: put.then_some(Put {
                source_offset_bytes: request.source_offset_bytes,
                destination_offset_bytes: request.destination_offset_bytes,
                len_bytes: u64::from(request.size),
            }),
            signal,
            flush: request.op.has(OpSet::FLUSH),
        }
    }
}
