//! [`IpcEndpoint`]: an end of a connection that waits for the peer's message.

use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use portway_proxy::TransportError;
use portway_proxy::transport::{Endpoint, Port};

use crate::error::Error;
use crate::executor::{Executor, Peer};
use crate::import::open_line;
use crate::memory::{Presence, random};
use crate::message;
use crate::port::IpcPort;
use crate::socket::{Line, Question, Request, Status};
use crate::track::Track;
use crate::transport::Inner;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct IpcEndpoint {
    inner: Arc<Inner>,
    /// Taken by the port.
    own: Option<(Track, Presence)>,
    message: message::Endpoint,
}

impl Drop for IpcEndpoint {
    fn drop(&mut self) {
        // Nothing was ever put into its stream.
        if let Some((track, _)) = self.own.take() {
            self.inner.rack.give_back(track);
        }
    }
}

impl IpcEndpoint {
    /// The end, and what its peer has to know.
    pub(crate) fn new(inner: &Arc<Inner>) -> Result<(Self, Vec<u8>), TransportError> {
        let track = inner.rack.take(&inner.context)?;
        let message = message::Endpoint { author: inner.author(), nonce: random() };
        let presence = inner.hub.tables.present(inner.transport, message.nonce);
        Ok((IpcEndpoint { inner: inner.clone(), own: Some((track, presence)), message }, message.encode()))
    }

    /// A line to the peer's process, unless that is this one.
    fn reach(&self, peer: &message::Endpoint, timeout: Duration) -> Result<Option<Line>, TransportError> {
        if timeout > portway_fifo::MAX_TIMEOUT {
            return Err(portway_fifo::Error::TimeoutRange { timeout }.into());
        }
        let until = Instant::now() + timeout;
        let Inner { hub, context, .. } = &*self.inner;
        let name = peer.author.process.name(&hub.process);
        if !peer.author.process.same_machine(&hub.process) {
            return Err(Error::OtherMachine { peer: name }.into());
        }
        if peer.nonce == self.message.nonce {
            let (expected, seen) = ("another endpoint".into(), "this one".into());
            return Err(TransportError::Malformed { what: "endpoint", expected, seen });
        }
        if let Some(ordinal) = context.driver().ordinal_of(&peer.author.device)? {
            if !context.can_reach(ordinal)? {
                let (ours, theirs) = (context.attributes().uuid, peer.author.device);
                return Err(Error::NoPeerAccess { ours, theirs }.into());
            }
        }
        let closed = Error::Gone { peer: name, why: "its endpoint is closed" };
        if peer.author.hub == hub.id {
            let present = hub.tables.is_present(peer.author.transport, peer.nonce);
            return if present { Ok(None) } else { Err(closed.into()) };
        }
        let line = open_line(&peer.author, hub, timeout)?;
        let (transport, nonce) = (peer.author.transport, peer.nonce);
        let request = Request { question: Question::Endpoint, transport, index: 0, nonce };
        match line.ask_until(&request, until)?.0 {
            Status::Yes => Ok(Some(line)),
            _ => Err(closed.into()),
        }
    }
}

impl Endpoint for IpcEndpoint {
    fn connect(mut self: Box<Self>, peer: &[u8], timeout: Duration) -> Result<Box<dyn Port>, TransportError> {
        let peer = message::Endpoint::decode(peer)?;
        let line = self.reach(&peer, timeout)?;
        let (track, presence) = self.own.take().ok_or(TransportError::Closed)?;
        let inner = self.inner.clone();
        let (transport, nonce) = (peer.author.transport, peer.nonce);
        let process = peer.author.process.name(&inner.hub.process);
        let name = format!("{process} on {}", crate::error::uuid(&peer.author.device));
        let link = Executor::start(&inner, track, Peer { name: name.clone(), transport, nonce, line })?;
        Ok(Box::new(IpcPort::new(inner, link, name, transport, presence)))
    }
}
