//! [`Wired`]: two ends, connected, with an engine that serves both.

use std::time::Duration;

use portway_fifo::{Fifo, Platform, Region};
use portway_proxy::transport::{LocalMemory, RemoteMemory, Transport};
use portway_proxy::{
    ChannelConfig, Config, Engine, Error, Idle, Loopback, PortChannel, Proxy, RunConfig, Stop, loopback,
};

use crate::failure::Failure;

/// See the module.
pub struct Wired {
    pub ends: [End; 2],
    proxy: Proxy,
}

/// One of two ends.
pub struct End {
    pub channel: PortChannel,
    /// Where its puts read.
    pub source: Region,
    /// Where its peer's puts write.
    pub destination: Region,
}

/// What one end lets the other write to, and what it puts from.
struct Memory {
    source: LocalMemory,
    destination: LocalMemory,
    signal: LocalMemory,
}

impl Wired {
    /// Connects two ends with regions of `len_bytes` each, all in memory of `platform` that the processor reaches, and
    /// starts their engine on a core.
    pub fn new(
        platform: &dyn Platform,
        len_bytes: u64,
        deadline: Duration,
        core: Option<usize>,
    ) -> Result<Self, Error> {
        let transport = Loopback::new(loopback::Config::default())?;
        let memory = || -> Result<Memory, Error> {
            let register = |len_bytes| Ok::<_, Error>(transport.register(&platform.host_memory(len_bytes)?)?);
            Ok(Memory {
                source: register(len_bytes)?,
                destination: register(len_bytes)?,
                signal: register(8)?,
            })
        };
        let import = |memory: &LocalMemory| -> Result<RemoteMemory, Error> {
            Ok(transport.import(&transport.export(memory)?)?)
        };
        let memories = [memory()?, memory()?];
        let [(a, a_bytes), (b, b_bytes)] = [transport.endpoint()?, transport.endpoint()?];
        let ports = [a.connect(&b_bytes, deadline)?, b.connect(&a_bytes, deadline)?];

        let mut engine = Engine::new(platform, Config { deadline, max_channels: 2, ..Config::default() })?;
        let mut end = |here: &Memory, there: &Memory, port| -> Result<End, Error> {
            let config = portway_fifo::Config { timeout: deadline, ..Default::default() };
            let (fifo, consumer) = Fifo::new(platform, config)?;
            let (fifo, port) = (engine.add_fifo(fifo, consumer)?, engine.add_port(port)?);
            let channel = engine.add_channel(ChannelConfig {
                fifo,
                port,
                source: here.source.clone(),
                destination: import(&there.destination)?,
                outbound: import(&there.signal)?,
                inbound: here.signal.clone(),
            })?;
            let (source, destination) = (here.source.region.clone(), here.destination.region.clone());
            Ok(End { channel, source, destination })
        };
        let [a, b] = &memories;
        let [a_port, b_port] = ports;
        let ends = [end(a, b, a_port)?, end(b, a, b_port)?];
        // One core alone has to be shared.
        let idle = if core.is_some() { Idle::Spin } else { Idle::Yield };
        let cpus = core.into_iter().collect();
        let proxy = Proxy::start(engine, RunConfig { cpus, idle, ..RunConfig::default() })?;
        Ok(Wired { ends, proxy })
    }

    /// Stops the engine, and fails if it has not done what it was asked for: `triggers` triggers and no other.
    pub fn stop(self, measurement: &str, triggers: u64, within: Duration) -> Result<(), Failure> {
        let report = self.proxy.stop(Stop::Drain { within });
        let stats = &report.stats;
        let done = report.drained && stats.triggers == triggers && stats.completions == triggers;
        if !done {
            let measurement = measurement.into();
            return Err(Failure::Undone { measurement, triggers, report: format!("{report:?}") });
        }
        Ok(())
    }
}
