//! [`IbEndpoint`]: queue pairs that wait for the peer's message.

use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use portway_proxy::TransportError;
use portway_proxy::transport::{Endpoint, Port};

use crate::error::Error;
use crate::gid::{self, Entry, Gid};
use crate::message;
use crate::port::IbPort;
use crate::queues::{Queues, Route};
use crate::transport::{Inner, random};

/// One end of a connection. Nothing is sent before both ends are connected; a request to a peer that is not connected
/// yet is repeated as often as the configuration says.
#[derive(Debug)]
pub(crate) struct IbEndpoint {
    queues: Queues,
    inner: Arc<Inner>,
    message: message::Endpoint,
    offers: Vec<Entry>,
}

impl IbEndpoint {
    /// The end, and what its peer has to know.
    pub(crate) fn new(inner: &Arc<Inner>) -> Result<(Self, Vec<u8>), TransportError> {
        let config = &inner.config;
        let device = inner.keeper.device();
        let port = &device.port;
        let table = device.gids()?;
        let offers = gid::offers(port.roce, &table, config.gid_index).map_err(|why| Error::Gid {
            port: format!("{}:{}", device.name, port.number),
            why,
            seen: table.iter().map(Entry::to_string).collect(),
        })?;
        let queues = Queues::new(&inner.keeper, config)?;
        let message = message::Endpoint {
            transport: inner.memories.transport,
            nonce: random(),
            roce: port.roce,
            mtu: port.mtu,
            lid: port.lid,
            // Random, so that packets of an earlier connection with this queue pair number are not taken for this one's.
            first_psn: random() as u32 & 0xff_ffff,
            max_message_bytes: port.max_message_bytes,
            queue_pairs: queues.numbers(),
            gids: offers.iter().map(|entry| entry.gid).collect(),
        };
        let bytes = message.encode();
        Ok((IbEndpoint { queues, inner: inner.clone(), message, offers }, bytes))
    }

    /// How to reach the peer, and what it is called.
    fn route(&self, peer: &message::Endpoint) -> Result<(Route, String), TransportError> {
        let mine = &self.message;
        let refuse = |expected: String, seen: String| {
            Err(TransportError::Malformed { what: "endpoint", expected, seen })
        };
        let layer = |roce: bool| if roce { "RoCE" } else { "InfiniBand" };
        if peer.nonce == mine.nonce {
            return refuse("another endpoint".into(), "this one".into());
        }
        if peer.roce != mine.roce {
            return refuse(layer(mine.roce).into(), layer(peer.roce).into());
        }
        if peer.queue_pairs.len() != mine.queue_pairs.len() {
            let count = |end: &message::Endpoint| format!("{} queue pairs", end.queue_pairs.len());
            return refuse(count(mine), count(peer));
        }
        let Some((my, their)) = gid::pick(&mine.gids, &peer.gids, mine.nonce < peer.nonce) else {
            let list = |gids: &[Gid]| gids.iter().map(Gid::to_string).collect::<Vec<_>>().join(", ");
            return refuse(format!("a GID that {} can reach", list(&mine.gids)), list(&peer.gids));
        };
        let their_gid = peer.gids[their];
        // InfiniBand needs the global header only between subnets, or when told so.
        let same_subnet = their_gid.0[..8] == mine.gids[my].0[..8];
        let global = mine.roce || !same_subnet || self.inner.config.gid_index.is_some();
        let route = Route {
            mtu: mine.mtu.min(peer.mtu),
            queue_pairs: peer.queue_pairs.clone(),
            first_psn_there: peer.first_psn,
            first_psn_here: mine.first_psn,
            lid: peer.lid,
            global: global.then(|| (self.offers[my].index, their_gid)),
        };
        let name = match mine.roce {
            true => format!("queue pair {} of {their_gid}", peer.queue_pairs[0]),
            false => format!("queue pair {} of LID {}", peer.queue_pairs[0], peer.lid),
        };
        Ok((route, name))
    }
}

impl Endpoint for IbEndpoint {
    /// Waits for no peer, so the caller's timeout is not used. On RoCE the kernel looks up the hardware address of the
    /// peer or its router, for each queue pair; that call cannot be cut short and has a limit of its own, whose end is
    /// the [`TransportError::Timeout`].
    fn connect(self: Box<Self>, peer: &[u8], _: Duration) -> Result<Box<dyn Port>, TransportError> {
        let peer = message::Endpoint::decode(peer)?;
        let (route, name) = self.route(&peer)?;
        let IbEndpoint { queues, inner, message, .. } = *self;
        let begin = Instant::now();
        queues.connect(&inner.config, &route).map_err(|error| match error {
            Error::Device { errno, .. } if errno == rustix::io::Errno::TIMEDOUT.raw_os_error() => {
                let (what, after) = ("the hardware address", begin.elapsed());
                TransportError::Timeout { what, peer: name.clone(), after }
            }
            error => error.into(),
        })?;
        let longest_bytes = message.max_message_bytes.min(peer.max_message_bytes);
        Ok(Box::new(IbPort::new(inner, queues, name, peer.transport, longest_bytes)))
    }
}
