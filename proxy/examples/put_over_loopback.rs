//! Two ends in one process: one puts bytes and signals, the other waits and looks.
//!
//! `cargo run -p portway-proxy --example put_over_loopback`

use std::error::Error;
use std::time::Duration;

use portway_fifo::{Fifo, Heap};
use portway_proxy::transport::{LocalMemory, RemoteMemory, Transport};
use portway_proxy::{ChannelConfig, Config, Engine, Idle, Loopback, Proxy, RunConfig, Stop, loopback};

const LEN_BYTES: u64 = 4096;
const LIMIT: Duration = Duration::from_secs(5);

/// What one end lets its peer write to, and what it puts from.
struct End {
    source: LocalMemory,
    destination: LocalMemory,
    signal: LocalMemory,
}

fn end(transport: &Loopback) -> Result<End, Box<dyn Error>> {
    Ok(End {
        source: transport.register(&Heap.allocate(LEN_BYTES)?)?,
        destination: transport.register(&Heap.allocate(LEN_BYTES)?)?,
        signal: transport.signal_word()?,
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let transport = Loopback::new(loopback::Config::default())?;
    let (alice, bob) = (end(&transport)?, end(&transport)?);

    // Each end sends the other what these calls return; here both are in one process.
    let import = |memory: &LocalMemory| -> Result<RemoteMemory, Box<dyn Error>> {
        Ok(transport.import(&transport.export(memory)?)?)
    };
    let (alices_end, alices_bytes) = transport.endpoint()?;
    let (bobs_end, bobs_bytes) = transport.endpoint()?;
    let ports = [alices_end.connect(&bobs_bytes, LIMIT)?, bobs_end.connect(&alices_bytes, LIMIT)?];

    // One engine serves both. On a GPU machine each GPU has its own, and kernels push into the FIFOs.
    let mut engine = Engine::new(&Heap, Config::default())?;
    let mut producers = Vec::new();
    for (port, (here, there)) in ports.into_iter().zip([(&alice, &bob), (&bob, &alice)]) {
        let (fifo, consumer) =
            Fifo::new(&Heap, portway_fifo::Config { timeout: LIMIT, ..Default::default() })?;
        let config = ChannelConfig {
            fifo: engine.add_fifo(fifo, consumer)?,
            port: engine.add_port(port)?,
            source: here.source.clone(),
            destination: import(&there.destination)?,
            outbound: import(&there.signal)?,
            inbound: here.signal.clone(),
        };
        producers.push(engine.add_channel(config)?.producer()?);
    }
    let proxy = Proxy::start(engine, RunConfig { idle: Idle::Yield, ..RunConfig::default() })?;

    // What two kernels would do. Every call ends: with success, with an error, or after the FIFO's timeout.
    let (alices_channel, bobs_channel) = (&producers[0], &producers[1]);
    let letter = b"bytes first, then the signal";
    alice.source.region.write(0, letter)?;
    alices_channel.put_signal(0, 1024, letter.len() as u64)?;
    bobs_channel.wait()?;
    let mut seen = vec![0; letter.len()];
    bob.destination.region.read(1024, &mut seen)?;
    println!("bob has {:?}", String::from_utf8_lossy(&seen));
    assert_eq!(seen, letter);
    alices_channel.flush()?;
    println!("alice may reuse her source");

    let report = proxy.stop(Stop::Drain { within: LIMIT });
    println!("drained: {}, triggers: {}", report.drained, report.stats.triggers);
    Ok(())
}
