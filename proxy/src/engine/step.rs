//! The step, and how an engine ends.

use core::any::Any;
use core::time::Duration;
use std::panic::{AssertUnwindSafe, catch_unwind};

use portway_fifo::Position;

use super::port::{Closing, panicked};
use super::{Engine, PortId};
use crate::error::{ChannelError, Error, TransportError};
use crate::request::{Request, RequestFault};

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

impl Engine {
    /// Does what is ready, once. `now` is the time since any fixed moment and never goes back.
    ///
    /// From every FIFO it takes up to a batch; it offers the ops to their ports, kicks and polls these, moves the
    /// frontiers of the channels, and publishes each FIFO's tail at most once. A panic in a port ends that port's
    /// channels and nothing else.
    pub fn step(&mut self, now: Duration) -> Step {
        let now_ns = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX).min(u64::MAX - 1);
        let before = self.backend.counts;
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| self.work(now_ns))) {
            self.fail(payload);
        }
        self.show_counts();
        let now = self.backend.counts;
        Step { triggers: now.triggers - before.triggers, completions: now.completions - before.completions }
    }

    fn work(&mut self, now_ns: u64) {
        self.backend.send_backlogs();
        for index in 0..self.fifos.len() {
            if !self.fifos[index].closed {
                self.drain(index, now_ns);
            }
        }
        let keep_house = now_ns >= self.next_housekeeping_ns;
        self.backend.kick_and_poll(keep_house);
        self.backend.store_frontiers();
        if keep_house {
            self.next_housekeeping_ns = now_ns.saturating_add(HOUSEKEEPING_NS);
            self.backend.end_overdue(now_ns);
        }
    }

    /// Takes up to a batch from a FIFO, and closes it if it was aborted or broke.
    #[inline(never)] // Apart from the rest of the step its loop has the registers to itself.
    fn drain(&mut self, index: usize, now_ns: u64) {
        let fifo = &mut self.fifos[index];
        let Some(consumer) = &mut fifo.consumer else { return };
        // Asked first, so that what was pushed before an abort is not missed for less than a batch.
        let closed = consumer.closed();
        let mut unknown = None;
        let start = consumer.position();
        let end = start.plus(self.config.batch as u64);
        while consumer.position() != end {
            let Some(trigger) = consumer.peek() else { break };
            let Some(&channel) = fifo.channels.get(Request::channel_of(trigger)) else {
                unknown = Some((consumer.position(), Request::decode(trigger)));
                break;
            };
            if !self.backend.take_run(channel, consumer, end, now_ns) {
                break;
            }
        }
        self.backend.counts.triggers += consumer.position().since(start);
        if consumer.publish() {
            self.backend.counts.publishes += 1;
        }
        if let Some((position, request)) = unknown {
            self.refuse_fifo(index, position, request);
        } else if let Some(error) = closed {
            self.close_fifo(index, &error);
        }
    }

    /// Ends the channels of a FIFO that was aborted or broke, and does not look at it again until a reset.
    #[cold]
    pub(super) fn close_fifo(&mut self, index: usize, error: &portway_fifo::Error) {
        self.end_fifo(index, |channel| ChannelError::Fifo { fifo: index, channel, source: error.clone() });
    }

    /// A trigger that names no channel was not written by our device code: nothing in that FIFO can be trusted.
    #[cold]
    fn refuse_fifo(&mut self, index: usize, position: Position, request: Request) {
        self.fifos[index].fifo.abort();
        let fault = RequestFault::UnknownChannel { channels: self.fifos[index].channels.len() };
        let channel = request.channel;
        self.end_fifo(index, |_| ChannelError::Request { fifo: index, channel, position, fault, request });
    }

    fn end_fifo(&mut self, index: usize, error: impl Fn(u16) -> ChannelError) {
        self.fifos[index].closed = true;
        self.backend
            .end_channels(|channel| (channel.fifo as usize == index).then(|| error(channel.shared.number)));
    }

    /// Ends every channel and aborts every FIFO, then closes the ports. True once all of them are quiesced; call
    /// again until then.
    pub fn shut_down(&mut self) -> bool {
        self.backend.end_channels(|channel| {
            let (fifo, channel) = (channel.fifo as usize, channel.shared.number);
            Some(ChannelError::Stopped { fifo, channel })
        });
        self.shared.end_all();
        // Their channels have ended already: this only keeps a later step from calling them for anything but to close.
        (0..self.backend.ports.len()).for_each(|port| self.backend.fail_port(port, TransportError::Closed));
        let ports = &mut self.backend.ports;
        ports.iter_mut().for_each(|port| port.close());
        let quiesced = ports.iter().all(|port| matches!(port.closing, Closing::Quiesced));
        self.show_counts();
        quiesced
    }

    /// Whether a port is on its way to be quiesced, after [`shut_down`](Self::shut_down).
    pub(crate) fn is_closing(&self) -> bool {
        self.backend.ports.iter().any(|port| matches!(port.closing, Closing::Pending))
    }

    /// Ends a port's channels and begins to close it; true once it is quiesced and what it had bound can be released.
    /// Call again until then.
    ///
    /// # Errors
    /// [`Error::Foreign`]. [`Error::Transport`] if the port failed or panicked while it closed: what it had bound stays
    /// bound.
    pub fn close_port(&mut self, port: PortId) -> Result<bool, Error> {
        if port.engine != self.shared.id {
            return Err(Error::Foreign { what: "port", index: port.index });
        }
        self.backend.fail_port(port.index, TransportError::Closed);
        let state = &mut self.backend.ports[port.index];
        state.close();
        let closing = state.closing.clone();
        self.show_counts();
        match closing {
            Closing::Open | Closing::Pending => Ok(false),
            Closing::Quiesced => Ok(true),
            Closing::Failed(error) => Err(error.into()),
        }
    }

    /// A panic came out of a step, and not out of a port: our own mistake. No channel and no FIFO can rely on this
    /// engine any more.
    #[cold]
    fn fail(&mut self, payload: Box<dyn Any + Send>) {
        let error = panicked("the engine", payload);
        (0..self.backend.ports.len()).for_each(|port| self.backend.fail_port(port, error.clone()));
        self.shared.end_all();
        // What it stumbled over is still there.
        self.fifos.iter_mut().for_each(|fifo| fifo.closed = true);
    }

    fn show_counts(&mut self) {
        if self.backend.counts != self.shown {
            self.shown = self.backend.counts;
            self.shared.board.show(self.shown);
        }
    }
}

impl Drop for Engine {
    /// Ends every wait. What ports still have under way is theirs to keep alive.
    fn drop(&mut self) {
        self.shared.end_all();
        self.backend.ports.drain(..).for_each(|port| port.discard());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use portway_fifo::{Config, Fifo, Heap, Trigger};

    use super::*;

    fn engine() -> (Engine, Fifo) {
        let mut engine = Engine::new(&Heap, super::super::Config::default()).unwrap();
        let (fifo, consumer) = Fifo::new(&Heap, Config::default()).unwrap();
        engine.add_fifo(fifo.clone(), consumer).unwrap();
        (engine, fifo)
    }

    /// Steps an engine on another thread while this one holds `held`. Whether it came back.
    fn steps_beside<L>(held: L, mut body: impl FnMut() + Send + 'static) -> bool {
        let (done, is_done) = sync_channel(1);
        let thread = std::thread::spawn(move || {
            body();
            // The receiver waits for it, or has given up.
            let _ = done.send(());
        });
        let came_back = is_done.recv_timeout(Duration::from_millis(500)).is_ok();
        drop(held);
        assert!(thread.join().is_ok());
        came_back
    }

    #[test]
    fn a_step_takes_no_lock() {
        let (mut engine, fifo) = engine();
        let shared = engine.shared().clone();
        fifo.producer().unwrap().push(Trigger::new([0, 0]).unwrap()).unwrap();
        // That trigger names no channel: even to end a FIFO takes none.
        let held = (shared.fifos.lock().unwrap(), shared.channels.lock().unwrap());
        let tail = fifo.clone();
        assert!(steps_beside(held, move || {
            engine.step(Duration::from_secs(1));
            assert!(tail.producer().unwrap().sync(tail.tail()).is_err());
        }));
        // The control: what does take a lock is noticed.
        let held = (shared.fifos.lock().unwrap(), shared.channels.lock().unwrap());
        let other = shared.clone();
        assert!(!steps_beside(held, move || other.end_all()));
    }

    #[test]
    fn our_own_panic_ends_everything_by_name() {
        let (mut engine, fifo) = engine();
        let producer = fifo.producer().unwrap();
        // A channel that there is not.
        engine.fifos[0].channels.push(7);
        let position = producer.push(Trigger::new([0, 0]).unwrap()).unwrap();
        assert!(engine.step(Duration::from_secs(1)).is_idle());
        assert!(matches!(producer.sync(position), Err(portway_fifo::Error::Aborted)));
        // It can still be stepped, shut down and dropped.
        engine.step(Duration::from_secs(2));
        assert!(engine.shut_down());
    }
}
