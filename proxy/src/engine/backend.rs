//! [`Backend`]: what ops go through after their FIFO: channels and ports.

use core::ops::ControlFlow;
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::Arc;

use portway_fifo::{Consumer, Position, Trigger};

use super::port::PortState;
use crate::channel;
use crate::error::{ChannelError, TransportError};
use crate::request::{OpSet, Request};
use crate::stats::{Counts, stall_word};
use crate::transport::{Completion, Lane, MemoryId, Op, Put, Submit};
use crate::window::Window;

#[derive(Debug)]
pub(super) struct Backend {
    pub(super) ports: Vec<PortState>,
    pub(super) channels: Vec<ChannelState>,
    /// Channels with a backlog, each once, and those that ended with one.
    waiting: VecDeque<u32>,
    /// Channels whose frontier has to be stored, each once.
    moved: Vec<u32>,
    completions: Box<[Completion]>,
    pub(super) counts: Counts,
    deadline: Duration,
}

#[derive(Debug)]
pub(super) struct ChannelState {
    pub(super) shared: Arc<channel::Shared>,
    /// The peer's signal word and the one here: no other channel may have them, since both are counted from 0.
    pub(super) words: [MemoryId; 2],
    pub(super) fifo: u32,
    /// Its number in its FIFO.
    pub(super) number: u16,
    pub(super) port: u32,
    pub(super) lane: Lane,
    pub(super) source_len_bytes: u64,
    pub(super) destination_len_bytes: u64,
    /// Closed once the channel has ended.
    pub(super) window: Window,
    /// What the peer's signal word holds once every signal so far has arrived.
    pub(super) signal_value: u64,
    /// Completed something since the frontier was stored.
    pub(super) moved: bool,
}

/// How a run of triggers of one channel ended.
enum Run {
    /// There are no more.
    Over,
    /// With one that is not like most, and has not been taken.
    Other { position: Position, trigger: Trigger },
    /// With one that the port has no room for.
    Refused { position: Position, op: Op },
    /// With one at which the port failed.
    Failed(Box<TransportError>),
}

/// Completions taken from a port at a time.
const POLL_BATCH: usize = 64;

/// What stands where a port has not written a completion: a lane that no port has.
const NO_COMPLETION: Completion = Completion { lane: Lane(u32::MAX), sequence: 0 };

impl Backend {
    pub(super) fn new(max_channels: usize, deadline: Duration) -> Self {
        Backend {
            ports: Vec::new(),
            channels: Vec::with_capacity(max_channels),
            waiting: VecDeque::with_capacity(max_channels),
            moved: Vec::with_capacity(max_channels),
            completions: vec![NO_COMPLETION; POLL_BATCH].into_boxed_slice(),
            counts: Counts::default(),
            deadline,
        }
    }

    /// Takes triggers of one channel from the front of their FIFO, until `end` or one of another channel. False if the
    /// next one has to wait there, since the channel's window is full.
    #[inline]
    pub(super) fn take_run(
        &mut self,
        index: u32,
        consumer: &mut Consumer,
        end: Position,
        now_ns: u64,
    ) -> bool {
        let channel = &mut self.channels[index as usize];
        let port = &mut self.ports[channel.port as usize];
        let max = end.since(consumer.position()) as usize;
        let (mut run, mut accepted) = (Run::Over, 0);
        // One guard for all of them, since a guard costs as much as an op.
        let guarded = port.call(|port| {
            consumer.take(max, |position, trigger| {
                let request = Request::decode(trigger);
                if request.channel != channel.number {
                    return ControlFlow::Break(false);
                }
                // Most are like this; the rest is kept out of their way.
                if !channel.window.is_clear() || !request.is_sound_put(channel.lens()) {
                    run = Run::Other { position, trigger };
                    return ControlFlow::Break(false);
                }
                let op = channel.put_op(request);
                match port.submit(&op) {
                    Ok(Submit::Accepted) => {
                        channel.window.take_sent(position, now_ns);
                        accepted += 1;
                        return ControlFlow::Continue(());
                    }
                    Ok(Submit::Full) => run = Run::Refused { position, op },
                    Err(error) => run = Run::Failed(Box::new(error)),
                }
                ControlFlow::Break(true)
            });
            Ok(())
        });
        port.accepted(accepted);
        if let Err(error) = guarded {
            // A panic. The trigger is still there, and is thrown away with its channel's others.
            let port = channel.port as usize;
            self.fail_port(port, *error);
            return true;
        }
        match run {
            Run::Over => {}
            Run::Other { position, trigger } => {
                if !self.take(index, position, trigger, now_ns) {
                    return false;
                }
                consumer.advance();
            }
            Run::Refused { position, op } => self.take_refused(index, position, op, now_ns),
            Run::Failed(error) => self.take_failed(index, *error),
        }
        true
    }

    /// Takes a trigger of whatever kind. False if it has to wait.
    #[inline(never)]
    fn take(&mut self, index: u32, position: Position, trigger: Trigger, now_ns: u64) -> bool {
        let request = Request::decode(trigger);
        let channel = &mut self.channels[index as usize];
        if channel.has_ended() {
            self.counts.discarded += 1;
        } else if channel.window.is_full() {
            self.counts.stalls += 1;
            self.counts.last_stall = stall_word(channel.fifo, channel.number);
            return false;
        } else if let Some(fault) = request.fault(channel.lens()) {
            let (fifo, channel) = (channel.fifo as usize, channel.number);
            self.counts.discarded += 1;
            let error = ChannelError::Request { fifo, channel, position, fault, request };
            self.end_channel(index as usize, error);
        } else {
            let op = channel.op(request);
            if channel.window.backlog() != 0 {
                // It waits for its turn.
                channel.window.take_waiting(op, position, now_ns);
                return true;
            }
            match self.ports[channel.port as usize].submit(&op) {
                Ok(Submit::Accepted) => channel.window.take_sent(position, now_ns),
                Ok(Submit::Full) => self.take_refused(index, position, op, now_ns),
                Err(error) => self.take_failed(index, *error),
            }
        }
        true
    }

    /// Takes an op for which its port has no room.
    #[cold]
    fn take_refused(&mut self, index: u32, position: Position, op: Op, now_ns: u64) {
        self.counts.refusals += 1;
        self.waiting.push_back(index);
        self.channels[index as usize].window.take_waiting(op, position, now_ns);
    }

    /// Takes an op at which its port failed.
    #[cold]
    fn take_failed(&mut self, index: u32, error: TransportError) {
        self.counts.discarded += 1;
        let port = self.channels[index as usize].port;
        self.fail_port(port as usize, error);
    }

    /// Offers the backlogs to their ports again, oldest op first.
    pub(super) fn send_backlogs(&mut self) {
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

    /// Offers a channel's backlog to its port until that is full.
    fn send(&mut self, index: usize) {
        let channel = &mut self.channels[index];
        let port = &mut self.ports[channel.port as usize];
        while let Some(op) = channel.window.next_to_send() {
            match port.submit(op) {
                Ok(Submit::Accepted) => channel.window.sent(),
                Ok(Submit::Full) => {
                    self.counts.refusals += 1;
                    return;
                }
                Err(error) => {
                    let port = channel.port;
                    return self.fail_port(port as usize, *error);
                }
            }
        }
    }

    /// Kicks the ports that were submitted to, and polls those that may have something to report.
    pub(super) fn kick_and_poll(&mut self, keep_house: bool) {
        for index in 0..self.ports.len() {
            let port = &mut self.ports[index];
            if port.failed.is_some() {
                // What it still has under way is waited for by nobody, but has to end before its memory is free.
                if keep_house {
                    port.close();
                }
                continue;
            }
            if let Err(error) = port.kick() {
                self.fail_port(index, *error);
            } else if port.under_way != 0 || keep_house {
                self.poll(index);
            }
        }
    }

    /// Takes what a port has to report, once. True if there may be more.
    fn poll(&mut self, index: usize) -> bool {
        let completions = &mut self.completions;
        match self.ports[index].call(|port| port.poll(completions)) {
            Ok(count) if count <= POLL_BATCH => return self.complete(index, count) && count == POLL_BATCH,
            Ok(count) => self.fail_port(index, TransportError::Overreported { count, room: POLL_BATCH }),
            Err(error) => self.fail_port(index, *error),
        }
        false
    }

    /// Takes note of the first `count` of `self.completions`, all of one port. False if one is not true.
    fn complete(&mut self, port_index: usize, count: usize) -> bool {
        let port = &mut self.ports[port_index];
        let mut done = 0;
        let mut stray = None;
        for completion in &mut self.completions[..count] {
            // One that a port counts and has not written must not pass for an older one.
            let Completion { lane, sequence } = core::mem::replace(completion, NO_COMPLETION);
            let Some(&index) = port.lanes.get(lane.0 as usize) else {
                stray = Some(("a completion of a lane that was never bound", lane, sequence));
                break;
            };
            let channel = &mut self.channels[index as usize];
            if let Err(error) = channel.window.complete(sequence) {
                stray = Some((error.what(), lane, sequence));
                break;
            }
            if !channel.moved {
                channel.moved = true;
                self.moved.push(index);
            }
            done += 1;
        }
        port.under_way -= done;
        self.counts.completions += done;
        if let Some((what, lane, sequence)) = stray {
            self.fail_port(port_index, TransportError::Contract { what, lane: lane.0, sequence });
        }
        stray.is_none()
    }

    /// Stores the frontiers that moved, each once.
    pub(super) fn store_frontiers(&mut self) {
        for index in self.moved.drain(..) {
            let channel = &mut self.channels[index as usize];
            channel.moved = false;
            if !channel.has_ended() {
                channel.shared.set_frontier(channel.window.frontier());
            }
        }
    }

    pub(super) fn end_overdue(&mut self, now_ns: u64) {
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
        if channel.has_ended() {
            return None;
        }
        let (oldest, sent) = channel.window.oldest()?;
        let after = Duration::from_nanos(now_ns.saturating_sub(oldest.taken_at_ns));
        (after > self.deadline).then_some(ChannelError::Deadline {
            fifo: channel.fifo as usize,
            channel: channel.shared.number,
            position: oldest.position,
            after,
            sent,
        })
    }

    /// Ops that were taken and are neither complete nor thrown away.
    pub(super) fn under_way(&self) -> u64 {
        let in_ports: u64 = self.ports.iter().map(|port| port.under_way).sum();
        let backlogs: u64 = self.channels.iter().map(|channel| channel.window.backlog()).sum();
        in_ports + backlogs
    }

    /// Ends a channel: shows what has completed, then sets the error word, before anything else. Ops that its port has
    /// accepted go on in there.
    #[cold]
    pub(super) fn end_channel(&mut self, index: usize, error: ChannelError) {
        let channel = &mut self.channels[index];
        if channel.has_ended() {
            return;
        }
        channel.shared.set_frontier(channel.window.frontier());
        channel.shared.end(error);
        self.counts.discarded += channel.window.close();
        self.counts.channels_ended += 1;
    }

    /// Ends the channels for which `error` finds one.
    pub(super) fn end_channels(&mut self, error: impl Fn(&ChannelState) -> Option<ChannelError>) {
        for index in 0..self.channels.len() {
            if let Some(error) = error(&self.channels[index]) {
                self.end_channel(index, error);
            }
        }
    }

    /// Ends a port's channels, unless that has been done.
    #[cold]
    pub(super) fn fail_port(&mut self, index: usize, error: TransportError) {
        let failed = &mut self.ports[index].failed;
        if failed.is_some() {
            return;
        }
        *failed = Some(error.clone());
        self.end_channels(|channel| {
            let number = channel.shared.number;
            let fifo = channel.fifo as usize;
            let error = || ChannelError::Port { fifo, channel: number, source: error.clone() };
            (channel.port as usize == index).then(error)
        });
    }
}

impl ChannelState {
    pub(super) fn has_ended(&self) -> bool {
        self.window.is_closed()
    }

    /// The lengths of the source and the destination region.
    #[inline]
    fn lens(&self) -> (u64, u64) {
        (self.source_len_bytes, self.destination_len_bytes)
    }

    /// The op that a request asks for, and the channel's next numbers.
    #[inline]
    fn op(&mut self, request: Request) -> Op {
        if request.op.has(OpSet::PUT) {
            return self.put_op(request);
        }
        let signal = request.op.has(OpSet::SIGNAL).then(|| self.next_signal(u64::from(request.size)));
        let (lane, sequence) = (self.lane, self.window.next_sequence());
        Op { lane, sequence, put: None, signal, flush: request.op.has(OpSet::FLUSH) }
    }

    /// The same of a request with a put.
    #[inline]
    fn put_op(&mut self, request: Request) -> Op {
        let signal = request.op.has(OpSet::SIGNAL).then(|| self.next_signal(1));
        let put = Put {
            source_offset_bytes: request.source_offset_bytes,
            destination_offset_bytes: request.destination_offset_bytes,
            len_bytes: u64::from(request.size),
        };
        let (lane, sequence) = (self.lane, self.window.next_sequence());
        Op { lane, sequence, put: Some(put), signal, flush: request.op.has(OpSet::FLUSH) }
    }

    #[inline]
    fn next_signal(&mut self, n: u64) -> u64 {
        self.signal_value = self.signal_value.wrapping_add(n);
        self.signal_value
    }
}
