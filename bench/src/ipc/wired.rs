//! [`Wired`]: two ends with an engine each, connected over the transport.

use std::time::Duration;

use portway_fifo::cuda::{Context, Kind};
use portway_fifo::{Fifo, Region};
use portway_proxy::transport::{LocalMemory, Transport};
use portway_proxy::{
    ChannelConfig, Config, Engine, Error, Idle, PortChannel, Proxy, RunConfig, Stop, TransportError,
};
use portway_transport_ipc::{self as ipc, Ipc, WordPlace};

use crate::args::Args;
use crate::failure::Failure;
use crate::machine::{Pinning, pin};

/// See the module.
pub struct Wired {
    pub ends: [End; 2],
    proxies: [Proxy; 2],
    transports: [Ipc; 2],
}

/// One end.
pub struct End {
    pub channel: PortChannel,
    /// Where its puts read.
    pub source: Region,
    /// Where its peer's puts write.
    pub destination: Region,
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

impl Wired {
    /// Connects two ends, in the memory of the device of each.
    pub fn new(
        contexts: [&Context; 2],
        place: WordPlace,
        len_bytes: u64,
        args: &Args,
        pinning: &Pinning,
    ) -> Result<Self, Error> {
        let deadline = args.deadline();
        let config = ipc::Config { word_place: place, spin: Duration::MAX, ..ipc::Config::default() };
        let refused = |error: ipc::Error| Error::Transport(error.into());
        let near = Ipc::open(contexts[0], config).map_err(refused)?;
        let far = near.beside(contexts[1]).map_err(refused)?;
        let transports = [near, far];
        let memories = [
            Memory::new(contexts[0], &transports[0], len_bytes)?,
            Memory::new(contexts[1], &transports[1], len_bytes)?,
        ];
        let [(a_end, a_bytes), (b_end, b_bytes)] = [transports[0].endpoint()?, transports[1].endpoint()?];
        // An executor runs where the thread that connects does, so each gets a core of its own, as far as there are any.
        pin(pinning.producer(3));
        let a_port = a_end.connect(&b_bytes, deadline);
        pin(pinning.producer(4));
        let b_port = b_end.connect(&a_bytes, deadline);
        pin(pinning.producer(0));
        let ports = [a_port?, b_port?];
        let mut ends = Vec::new();
        let mut proxies = Vec::new();
        for (here, port) in ports.into_iter().enumerate() {
            let (context, mine, theirs) = (contexts[here], &memories[here], &memories[1 - here]);
            let import = |memory| transports[here].import(&transports[1 - here].export(memory)?);
            let mut engine = Engine::new(context, Config { deadline, max_channels: 1, ..Config::default() })?;
            let fifo = portway_fifo::Config { timeout: deadline, ..portway_fifo::Config::default() };
            let (fifo, consumer) = Fifo::new(context, fifo)?;
            let (fifo, port) = (engine.add_fifo(fifo, consumer)?, engine.add_port(port)?);
            let channel = engine.add_channel(ChannelConfig {
                fifo,
                port,
                source: mine.source.clone(),
                destination: import(&theirs.destination)?,
                outbound: import(&theirs.signal)?,
                inbound: mine.signal.clone(),
            })?;
            let (source, destination) = (mine.source.region.clone(), mine.destination.region.clone());
            ends.push(End { channel, source, destination });
            // The first core is the measurement's own.
            let core = pinning.producer(1 + here).filter(|_| pinning.producer(2) != pinning.producer(0));
            let idle = if core.is_some() { Idle::Spin } else { Idle::Yield };
            let cpus = core.into_iter().collect();
            proxies.push(Proxy::start(engine, RunConfig { cpus, idle, ..RunConfig::default() })?);
        }
        let (Ok(ends), Ok(proxies)) = (ends.try_into(), <[Proxy; 2]>::try_from(proxies)) else {
            return Err(TransportError::Closed.into());
        };
        Ok(Wired { ends, proxies, transports })
    }

    /// Stops both engines. Fails if one did not drain, or if an executor is still at work.
    pub fn stop(self, measurement: &str, within: Duration) -> Result<(), Failure> {
        let Wired { ends, proxies, transports } = self;
        for proxy in proxies {
            let report = proxy.stop(Stop::Drain { within });
            if !report.drained || !report.quiesced {
                let triggers = report.stats.triggers;
                let (measurement, report) = (measurement.into(), format!("{report:?}"));
                return Err(Failure::Undone { measurement, triggers, report });
            }
        }
        drop((ends, transports));
        Ok(())
    }
}
