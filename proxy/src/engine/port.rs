//! [`PortState`]: a port as the engine keeps it, and the guard around every call of it.

use core::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::TransportError;
use crate::transport::{Close, Op, Port, Submit};

#[derive(Debug)]
pub(super) struct PortState {
    port: Box<dyn Port>,
    /// Lane to index of the channel.
    pub(super) lanes: Vec<u32>,
    /// Submitted to since the last kick.
    touched: bool,
    /// Ops that it accepted and has not reported.
    pub(super) under_way: u64,
    pub(super) failed: Option<TransportError>,
    pub(super) closing: Closing,
}

#[derive(Clone, Debug)]
pub(super) enum Closing {
    /// Not asked to.
    Open,
    Pending,
    Quiesced,
    /// It is as quiet as it will get, and what it had bound stays bound.
    Failed(TransportError),
}

impl PortState {
    pub(super) fn new(port: Box<dyn Port>) -> Self {
        PortState {
            port,
            lanes: Vec::new(),
            touched: false,
            under_way: 0,
            failed: None,
            closing: Closing::Open,
        }
    }

    /// Calls the port. A panic in there becomes its error.
    #[inline]
    pub(super) fn call<R>(
        &mut self,
        body: impl FnOnce(&mut dyn Port) -> Result<R, TransportError>,
    ) -> Result<R, Box<TransportError>> {
        // Boxed inside the guard, which copies what it returns.
        let call = AssertUnwindSafe(|| body(&mut *self.port).map_err(Box::new));
        match catch_unwind(call) {
            Ok(answer) => answer,
            Err(payload) => Err(Box::new(panicked("the port", payload))),
        }
    }

    /// Offers an op.
    #[inline]
    pub(super) fn submit(&mut self, op: &Op) -> Result<Submit, Box<TransportError>> {
        let answer = self.call(|port| port.submit(op));
        self.accepted(u64::from(matches!(answer, Ok(Submit::Accepted))));
        answer
    }

    /// Counts ops that the port has accepted.
    #[inline]
    pub(super) fn accepted(&mut self, ops: u64) {
        self.touched |= ops != 0;
        self.under_way += ops;
    }

    /// Kicks the port if it was submitted to.
    pub(super) fn kick(&mut self) -> Result<(), Box<TransportError>> {
        if !core::mem::take(&mut self.touched) {
            return Ok(());
        }
        self.call(|port| port.kick())
    }

    /// Begins or goes on to close the port.
    pub(super) fn close(&mut self) {
        if let Closing::Open | Closing::Pending = self.closing {
            self.closing = match self.call(|port| port.close()) {
                Ok(Close::Quiesced) => Closing::Quiesced,
                Ok(Close::Pending) => Closing::Pending,
                Err(error) => Closing::Failed(*error),
            };
        }
    }

    /// Drops the port. A panic in there goes no further, so that it cannot meet another.
    pub(super) fn discard(self) {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(self))) {
            panicked("the port", payload);
        }
    }
}

/// The error that a panic of `what` comes to.
#[cold]
pub(super) fn panicked(what: &'static str, payload: Box<dyn Any + Send>) -> TransportError {
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
