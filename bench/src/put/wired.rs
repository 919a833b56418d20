//! [`Wired`]: two ends, connected, with an engine that serves both.

use std::time::Duration;

use portway_fifo::{Fifo, Platform, Region};
use portway_proxy::transport::{LocalMemory, RemoteMemory, Transport};
use portway_proxy::{
    ChannelConfig, Config, Engine, Error, Idle, Loopback, MAX_PUT_BYTES, PortChannel, RunConfig, Stop,
    loopback,
};

use crate::failure::Failure;
use crate::running::Running;

/// See the module.
pub struct Wired {
    pub ends: [End; 2],
    proxy: Running,
}

/// One of two ends.
pub struct End {
    /// One a lane of its port, all with the same source and destination.
    pub channels: Vec<PortChannel>,
    /// Where its puts read.
    pub source: Region,
    /// Where its peer's puts write.
    pub destination: Region,
}

/// What one end lets the other write to, and what it puts from.
struct Memory {
    source: LocalMemory,
    destination: LocalMemory,
    signals: Vec<LocalMemory>,
}

/// How two ends are connected, and how the engine that serves both is set up.
pub struct Wiring<'a> {
    pub transports: [&'a dyn Transport; 2],
    /// Makes a signal word of one of them.
    pub signal_word: &'a dyn Fn(&dyn Transport) -> Result<LocalMemory, Error>,
    /// Channels each way.
    pub channels: usize,
    pub engine: Config,
    /// The engine's core.
    pub core: Option<usize>,
}

impl Wired {
    /// Connects two ends over loopback, with regions of `len_bytes` each, all in memory of `platform` that the processor
    /// reaches, and starts their engine on a core.
    pub fn new(
        platform: &dyn Platform,
        len_bytes: u64,
        deadline: Duration,
        core: Option<usize>,
    ) -> Result<Self, Error> {
        let transport = Loopback::new(loopback::Config::default())?;
        let wiring = Wiring {
            transports: [&transport, &transport],
            signal_word: &|transport| Ok(transport.register(&platform.host_memory(8)?)?),
            channels: 1,
            engine: Config { deadline, max_channels: 2, ..Config::default() },
            core,
        };
        Wired::between(platform, len_bytes, wiring)
    }

    /// The same over other transports.
    pub fn between(platform: &dyn Platform, len_bytes: u64, wiring: Wiring) -> Result<Self, Error> {
        let core = wiring.core;
        let (engine, ends) = wire(platform, len_bytes, wiring)?;
        // One core alone has to be shared.
        let idle = if core.is_some() { Idle::Spin } else { Idle::Yield };
        let cpus = core.into_iter().collect();
        let proxy = Running::start(engine, RunConfig { cpus, idle, ..RunConfig::default() })?;
        Ok(Wired { ends, proxy })
    }

    /// Stops the engine, and fails if it has not done what it was asked for: `triggers` triggers and no other.
    pub fn stop(self, measurement: &str, triggers: u64, within: Duration) -> Result<(), Failure> {
        let Some(report) = self.proxy.stop(Stop::Drain { within }) else {
            return Err(Failure::Ended { measurement: measurement.into() });
        };
        let stats = &report.stats;
        let done = report.drained && stats.triggers == triggers && stats.completions == triggers;
        if !done {
            let measurement = measurement.into();
            return Err(Failure::Undone { measurement, triggers, report: format!("{report:?}") });
        }
        Ok(())
    }
}

/// The triggers of a put: long ones are split.
pub fn triggers(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(MAX_PUT_BYTES)
}

/// Connects two ends, with an engine that nobody steps yet.
pub fn wire(platform: &dyn Platform, len_bytes: u64, wiring: Wiring) -> Result<(Engine, [End; 2]), Error> {
    let Wiring { transports, signal_word, channels, engine, .. } = wiring;
    let deadline = engine.deadline;
    let memory = |transport: &dyn Transport| -> Result<Memory, Error> {
        let register = || Ok::<_, Error>(transport.register(&platform.host_memory(len_bytes)?)?);
        Ok(Memory {
            source: register()?,
            destination: register()?,
            signals: (0..channels).map(|_| signal_word(transport)).collect::<Result<_, _>>()?,
        })
    };
    let [a, b] = transports;
    let memories = [memory(a)?, memory(b)?];
    let [(a_end, a_bytes), (b_end, b_bytes)] = [a.endpoint()?, b.endpoint()?];
    let ports = [a_end.connect(&b_bytes, deadline)?, b_end.connect(&a_bytes, deadline)?];

    let mut engine = Engine::new(platform, engine)?;
    let mut end = |here: usize, port| -> Result<End, Error> {
        let (mine, theirs) = (&memories[here], &memories[1 - here]);
        let import = |memory: &LocalMemory| -> Result<RemoteMemory, Error> {
            Ok(transports[here].import(&transports[1 - here].export(memory)?)?)
        };
        let config = portway_fifo::Config { timeout: deadline, ..Default::default() };
        let (fifo, consumer) = Fifo::new(platform, config)?;
        let (fifo, port) = (engine.add_fifo(fifo, consumer)?, engine.add_port(port)?);
        let mut channel = |(outbound, inbound): (&LocalMemory, &LocalMemory)| {
            engine.add_channel(ChannelConfig {
                fifo,
                port,
                source: mine.source.clone(),
                destination: import(&theirs.destination)?,
                outbound: import(outbound)?,
                inbound: inbound.clone(),
            })
        };
        let channels = theirs.signals.iter().zip(&mine.signals).map(&mut channel);
        Ok(End {
            channels: channels.collect::<Result<_, _>>()?,
            source: mine.source.region.clone(),
            destination: mine.destination.region.clone(),
        })
    };
    let [a_port, b_port] = ports;
    let ends = [end(0, a_port)?, end(1, b_port)?];
    Ok((engine, ends))
}
