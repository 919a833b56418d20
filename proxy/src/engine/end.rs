//! How channels, FIFOs, ports and the engine itself end.

use core::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use portway_fifo::Position;

use super::{Closing, Engine, PortId, PortState};
use crate::error::{ChannelError, Error, TransportError};
use crate::request::{Request, RequestFault};
use crate::transport::{Close, Port};

impl Engine {
    /// Ends every channel and aborts every FIFO, then closes the ports. True once all of them are quiesced; call
    /// again until then.
    pub fn shut_down(&mut self) -> bool {
        for index in 0..self.channels.len() {
            let channel = self.channels[index].shared.number;
            self.end_channel(index, ChannelError::Stopped { channel });
        }
        self.shared.end_all();
        for index in 0..self.ports.len() {
            self.close_port_once(index);
        }
        self.show_counts();
        self.ports.iter().all(|port| matches!(port.closing, Closing::Quiesced))
    }

    /// Whether a port is on its way to be quiesced, after [`shut_down`](Self::shut_down).
    pub(crate) fn is_closing(&self) -> bool {
        self.ports.iter().any(|port| matches!(port.closing, Closing::Pending))
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
        self.fail_port(port.index, TransportError::Closed);
        self.close_port_once(port.index);
        self.show_counts();
        match &self.ports[port.index].closing {
            Closing::Open | Closing::Pending => Ok(false),
            Closing::Quiesced => Ok(true),
            Closing::Failed(error) => Err(error.clone().into()),
        }
    }

    /// Ends a channel: shows what has completed, then sets the error word, before anything else. Ops that its port has
    /// accepted go on in there.
    #[cold]
    pub(super) fn end_channel(&mut self, index: usize, error: ChannelError) {
        let channel = &mut self.channels[index];
        if channel.ended {
            return;
        }
        channel.shared.set_frontier(channel.window.frontier());
        channel.shared.end(error);
        channel.ended = true;
        self.counts.discarded += channel.window.drop_backlog();
        self.counts.channels_ended += 1;
    }

    #[cold]
    pub(super) fn fail_port(&mut self, index: usize, error: TransportError) {
        if self.ports[index].failed.is_some() {
            return;
        }
        self.ports[index].failed = Some(error.clone());
        for channel in 0..self.channels.len() {
            if self.channels[channel].port as usize == index {
                let number = self.channels[channel].shared.number;
                self.end_channel(channel, ChannelError::Port { channel: number, source: error.clone() });
            }
        }
    }

    /// Ends the channels of a FIFO that was aborted or broke, and does not look at it again until a reset.
    #[cold]
    pub(super) fn close_fifo(&mut self, index: usize, error: &portway_fifo::Error) {
        self.fifos[index].closed = true;
        self.end_fifo_channels(index, |channel| ChannelError::Fifo { channel, source: error.clone() });
    }

    /// A trigger that names no channel was not written by our device code: nothing in that FIFO can be trusted.
    #[cold]
    pub(super) fn refuse_fifo(
        &mut self,
        index: usize,
        position: Position,
        fault: RequestFault,
        request: Request,
    ) {
        self.fifos[index].fifo.abort();
        self.fifos[index].closed = true;
        let channel = request.channel;
        self.end_fifo_channels(index, |_| ChannelError::Request { channel, position, fault, request });
    }

    fn end_fifo_channels(&mut self, index: usize, error: impl Fn(u16) -> ChannelError) {
        for channel in 0..self.channels.len() {
            if self.channels[channel].fifo as usize == index {
                let number = self.channels[channel].shared.number;
                self.end_channel(channel, error(number));
            }
        }
    }

    pub(super) fn close_port_once(&mut self, index: usize) {
        let port = &mut self.ports[index];
        if !matches!(port.closing, Closing::Open | Closing::Pending) {
            return;
        }
        port.closing = match port.call(|port| port.close()) {
            Ok(Close::Quiesced) => Closing::Quiesced,
            Ok(Close::Pending) => Closing::Pending,
            Err(error) => Closing::Failed(error),
        };
    }

    /// A panic came out of a step, and not out of a port: our own mistake. No channel and no FIFO can rely on this
    /// engine any more.
    #[cold]
    pub(super) fn fail(&mut self, payload: Box<dyn Any + Send>) {
        let error = panicked("the engine", payload);
        (0..self.ports.len()).for_each(|port| self.fail_port(port, error.clone()));
        self.shared.end_all();
    }
}

impl Drop for Engine {
    /// Ends every wait. What ports still have under way is theirs to keep alive.
    fn drop(&mut self) {
        self.shared.end_all();
        for port in self.ports.drain(..) {
            // A panic in one of these drops must not meet another.
            let _ = guarded(|| {
                drop(port);
                Ok(())
            });
        }
    }
}

impl PortState {
    /// Calls the port. A panic in there becomes its error.
    #[inline]
    pub(super) fn call<R>(
        &mut self,
        body: impl FnOnce(&mut dyn Port) -> Result<R, TransportError>,
    ) -> Result<R, TransportError> {
        guarded(|| body(&mut *self.port))
    }
}

#[inline]
fn guarded<R>(call: impl FnOnce() -> Result<R, TransportError>) -> Result<R, TransportError> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| Err(panicked("the port", payload)))
}

#[cold]
fn panicked(what: &'static str, payload: Box<dyn Any + Send>) -> TransportError {
    let message = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
        .to_owned();
    // What was thrown may panic again when it is dropped.
    if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        core::mem::forget(second);
    }
    TransportError::Panicked { what, message }
}
