//! [`Mesh`]: ranks on GPUs, with a channel between each two of them, each way, over the transport.

use std::collections::BTreeSet;
use std::time::Duration;

use portway_fifo::cuda::{Context, Kind};
use portway_fifo::{Fifo, Region};
use portway_proxy::transport::{LocalMemory, Port, Transport};
use portway_proxy::{
    ChannelConfig, Config, Engine, Error, Idle, PortChannel, RunConfig, Stop, TransportError,
};
use portway_transport_ipc::{self as ipc, Ipc, WordPlace};

use crate::args::Args;
use crate::failure::Failure;
use crate::machine::{Pinning, pin};
use crate::running::Running;

/// See the [module](self).
pub struct Mesh {
    /// Those of the first rank, in the order of its peers, then those of the next.
    pub ends: Vec<End>,
    proxies: Vec<Running>,
    transports: Vec<Ipc>,
}

/// One end of a pair.
pub struct End {
    /// The rank that it belongs to.
    pub rank: usize,
    /// The rank that it puts to.
    pub peer: usize,
    pub channel: PortChannel,
    /// Where its puts read.
    pub source: Region,
    /// Where its peer's puts write.
    pub destination: Region,
}

/// What a mesh is made of.
pub struct Shape<'a> {
    /// Of each rank; ranks may share a device.
    pub contexts: Vec<&'a Context>,
    /// Where signal words lie.
    pub place: WordPlace,
    /// Bytes of each memory that puts read or write.
    pub len_bytes: u64,
    /// Engines of each rank, over which its channels are spread; at most one a channel.
    pub proxies: usize,
}

struct Memory {
    source: LocalMemory,
    destination: LocalMemory,
    signal: LocalMemory,
}

impl Memory {
    fn new(context: &Context, transport: &Ipc, len_bytes: u64) -> Result<Self, TransportError> {
        let register = || transport.register(&context.allocate(Kind::Vmm, len_bytes)?);
        Ok(Memory { source: register()?, destination: register()?, signal: transport.signal_word()? })
    }
}

/// The peers of a rank.
fn peers(rank: usize, ranks: usize) -> impl Iterator<Item = usize> {
    (0..ranks).filter(move |&peer| peer != rank)
}

/// Where an end stands among all.
fn number(rank: usize, peer: usize, ranks: usize) -> usize {
    rank * (ranks - 1) + if peer > rank { peer - 1 } else { peer }
}

/// Which thread runs where: engines behind the measurement's own core, then executors, each on a core of its own if there
/// are enough. Otherwise they share, and nobody spins: a thread that does would keep another from its core for milliseconds.
struct Cores<'a> {
    pinning: &'a Pinning,
    engines: usize,
    executors: usize,
}

impl Cores<'_> {
    fn are_enough(&self) -> bool {
        let threads = 1 + self.engines + self.executors;
        let cores: BTreeSet<_> = (0..threads).map(|n| self.pinning.producer(n)).collect();
        cores.len() == threads
    }

    fn engine(&self, n: usize) -> RunConfig {
        let cpus = self.pinning.producer(1 + n).into_iter().collect();
        let idle = if self.are_enough() { Idle::Spin } else { Idle::Yield };
        RunConfig { cpus, idle, ..RunConfig::default() }
    }

    fn executor(&self, n: usize) -> Option<usize> {
        self.pinning.producer(1 + self.engines + n)
    }
}

impl Mesh {
    /// Connects every two ranks.
    pub fn new(shape: &Shape<'_>, args: &Args, pinning: &Pinning) -> Result<Self, Error> {
        let Shape { contexts, place, len_bytes, proxies } = shape;
        let (ranks, deadline) = (contexts.len(), args.deadline());
        let pairs = || (0..ranks).flat_map(|rank| peers(rank, ranks).map(move |peer| (rank, peer)));
        let refused = |error: ipc::Error| Error::Transport(error.into());
        let config = ipc::Config { word_place: *place, spin: Duration::MAX, ..ipc::Config::default() };
        let first = Ipc::open(contexts[0], config).map_err(refused)?;
        let others = contexts[1..].iter().map(|context| first.beside(context).map_err(refused));
        let transports: Vec<Ipc> =
            std::iter::once(Ok(first.clone())).chain(others).collect::<Result<_, _>>()?;
        let memories = pairs()
            .map(|(rank, _)| Memory::new(contexts[rank], &transports[rank], *len_bytes))
            .collect::<Result<Vec<_>, _>>()?;
        let cores = Cores { pinning, engines: ranks * proxies, executors: ranks * (ranks - 1) };
        let mut ports = connect(&transports, deadline, &cores)?;
        let (mut ends, mut running) = (Vec::new(), Vec::new());
        for rank in 0..ranks {
            let context = contexts[rank];
            let mut engines = Vec::new();
            for _ in 0..*proxies {
                let mut engine =
                    Engine::new(context, Config { deadline, max_channels: ranks, ..Config::default() })?;
                let fifo = portway_fifo::Config { timeout: deadline, ..portway_fifo::Config::default() };
                let (fifo, consumer) = Fifo::new(context, fifo)?;
                let fifo = engine.add_fifo(fifo, consumer)?;
                engines.push((engine, fifo));
            }
            for (at, peer) in peers(rank, ranks).enumerate() {
                let (engine, fifo) = &mut engines[at % proxies];
                let (here, there) = (number(rank, peer, ranks), number(peer, rank, ranks));
                let (mine, theirs) = (&memories[here], &memories[there]);
                let import = |memory| transports[rank].import(&transports[peer].export(memory)?);
                let port = ports[here].take().ok_or(TransportError::Closed)?;
                let port = engine.add_port(port)?;
                let channel = engine.add_channel(ChannelConfig {
                    fifo: *fifo,
                    port,
                    source: mine.source.clone(),
                    destination: import(&theirs.destination)?,
                    outbound: import(&theirs.signal)?,
                    inbound: mine.signal.clone(),
                })?;
                let (source, destination) = (mine.source.region.clone(), mine.destination.region.clone());
                ends.push(End { rank, peer, channel, source, destination });
            }
            for (engine, _) in engines {
                running.push(Running::start(engine, cores.engine(running.len()))?);
            }
        }
        Ok(Mesh { ends, proxies: running, transports })
    }

    /// Stops all engines; what is left are the ends' memories. Fails if one did not drain, or if an executor is still at
    /// work.
    pub fn stop(self, measurement: &str, within: Duration) -> Result<Vec<End>, Failure> {
        let Mesh { ends, proxies, transports } = self;
        for proxy in proxies {
            let Some(report) = proxy.stop(Stop::Drain { within }) else {
                return Err(Failure::Ended { measurement: measurement.into() });
            };
            if !report.drained || !report.quiesced {
                let triggers = report.stats.triggers;
                let (measurement, report) = (measurement.into(), format!("{report:?}"));
                return Err(Failure::Undone { measurement, triggers, report });
            }
        }
        drop(transports);
        Ok(ends)
    }
}

/// A port for each end. An executor runs where the thread that connects does.
fn connect(
    transports: &[Ipc],
    timeout: Duration,
    cores: &Cores<'_>,
) -> Result<Vec<Option<Box<dyn Port>>>, TransportError> {
    let ranks = transports.len();
    let mut ports: Vec<Option<Box<dyn Port>>> = (0..ranks * (ranks - 1)).map(|_| None).collect();
    let mut connected = 0;
    let mut result = Ok(());
    'all: for rank in 0..ranks {
        for peer in rank + 1..ranks {
            let both = || {
                let (near, far) = (transports[rank].endpoint()?, transports[peer].endpoint()?);
                pin(cores.executor(connected));
                let near_port = near.0.connect(&far.1, timeout)?;
                pin(cores.executor(connected + 1));
                Ok((near_port, far.0.connect(&near.1, timeout)?))
            };
            match both() {
                Ok((near, far)) => {
                    ports[number(rank, peer, ranks)] = Some(near);
                    ports[number(peer, rank, ranks)] = Some(far);
                }
                Err(error) => {
                    result = Err(error);
                    break 'all;
                }
            }
            connected += 2;
        }
    }
    pin(cores.pinning.producer(0));
    result.map(|()| ports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_numbered_by_rank_and_then_by_peer() {
        for ranks in [2, 3, 8] {
            let pairs = (0..ranks).flat_map(|rank| peers(rank, ranks).map(move |peer| (rank, peer)));
            let numbers: Vec<_> = pairs.map(|(rank, peer)| number(rank, peer, ranks)).collect();
            assert!(numbers.iter().copied().eq(0..ranks * (ranks - 1)), "{numbers:?}");
        }
    }
}
