//! Two GPUs of this machine, or one twice: a put from the memory of one to that of the other, and a signal behind it.
//!
//! `cargo run -p portway-transport-ipc --example two_gpus`
//!
//! The host plays the kernels here, so that this runs without a compiler for device code.

use std::error::Error;
use std::time::Duration;

use portway_fifo::cuda::{Context, Driver};
use portway_fifo::{Fifo, Heap, Platform};
use portway_proxy::transport::{LocalMemory, Transport};
use portway_proxy::{ChannelConfig, Config, Engine, Proxy, RunConfig, Stop};
use portway_transport_ipc::{self as ipc, Ipc};

const LEN_BYTES: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(5);

/// What one end lets its peer write to, and what it puts from.
struct End {
    source: LocalMemory,
    destination: LocalMemory,
    signal: LocalMemory,
}

fn end(transport: &Ipc, context: &Context) -> Result<End, Box<dyn Error>> {
    Ok(End {
        source: transport.register(&context.device_memory(LEN_BYTES)?)?,
        destination: transport.register(&context.device_memory(LEN_BYTES)?)?,
        signal: transport.signal_word()?,
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let driver = match Driver::load() {
        Ok(driver) => driver,
        Err(lacking) => {
            println!("waived: {lacking}");
            return Ok(());
        }
    };
    let second = u32::from(driver.device_count()? > 1);
    let contexts = [Context::new(&driver, 0)?, Context::new(&driver, second)?];
    // Between processes each opens a transport of its own, and the bytes of `export` and `endpoint` travel.
    let near = Ipc::open(&contexts[0], ipc::Config::default())?;
    let far = near.beside(&contexts[1])?;
    let (alice, bob) = (end(&near, &contexts[0])?, end(&far, &contexts[1])?);
    let ((alices_end, alices_bytes), (bobs_end, bobs_bytes)) = (near.endpoint()?, far.endpoint()?);
    let ports = [alices_end.connect(&bobs_bytes, LIMIT)?, bobs_end.connect(&alices_bytes, LIMIT)?];

    // On a machine with kernels, FIFO and engine take their words from the context instead of the heap.
    let mut engine = Engine::new(&Heap, Config::default())?;
    let mut producers = Vec::new();
    let sides = [(&near, &alice, &far, &bob), (&far, &bob, &near, &alice)];
    for (port, (mine, here, theirs, there)) in ports.into_iter().zip(sides) {
        let destination = mine.import(&theirs.export(&there.destination)?)?;
        println!("destination: {}", mine.describe(&destination)?);
        let (fifo, consumer) =
            Fifo::new(&Heap, portway_fifo::Config { timeout: LIMIT, ..Default::default() })?;
        let config = ChannelConfig {
            fifo: engine.add_fifo(fifo, consumer)?,
            port: engine.add_port(port)?,
            source: here.source.clone(),
            destination,
            outbound: mine.import(&theirs.export(&there.signal)?)?,
            inbound: here.signal.clone(),
        };
        producers.push(engine.add_channel(config)?.producer()?);
    }
    let proxy = Proxy::start(engine, RunConfig::default())?;

    let letter = b"bytes first, then the signal";
    alice.source.region.write(0, letter)?;
    producers[0].put_signal(0, 1024, letter.len() as u64)?;
    producers[1].wait()?;
    let mut seen = vec![0; letter.len()];
    bob.destination.region.read(1024, &mut seen)?;
    println!("bob has {:?}", String::from_utf8_lossy(&seen));
    assert_eq!(seen, letter);
    producers[0].flush()?;
    println!("alice may reuse her source");

    let report = proxy.stop(Stop::Drain { within: LIMIT });
    println!("drained: {}, triggers: {}", report.drained, report.stats.triggers);
    Ok(())
}
