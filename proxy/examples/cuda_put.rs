//! A kernel puts bytes and a signal through the proxy; the other half of its grid waits for the signal and checks them.
//!
//! `cargo run -p portway-proxy --features cuda --example cuda_put`
//!
//! Needs a GPU with its driver, and NVRTC; without them it says so and ends.

use std::error::Error;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytemuck::bytes_of;
use portway_fifo::cuda::nvrtc::Compiler;
use portway_fifo::cuda::{Context, Driver, Module, Stream};
use portway_fifo::{Fifo, Platform, Words};
use portway_proxy::transport::{LocalMemory, Transport};
use portway_proxy::{
    ChannelConfig, Config, Engine, Loopback, PortChannel, Proxy, RunConfig, Stop, header, loopback,
};

const WORDS: u64 = 512;
const LEN_BYTES: u64 = WORDS * 8;
/// How long a call waits, in the kernel and here. Nothing waits longer.
const LIMIT: Duration = Duration::from_secs(5);

const KERNEL: &str = r#"
using namespace portway;

// Block 0 is Alice, who puts; block 1 is Bob, who waits. `report`: both statuses, and how many words were wrong.
extern "C" __global__ void put_and_check(PortChannel alice, PortChannel bob, u64 *source, const u64 *destination,
                                         u64 words, u64 *report) {
  if (blockIdx.x == 0) {
    for (u64 i = 0; i < words; i++) source[i] = i * i + 1;
    report[0] = static_cast<u64>(alice.put_signal_flush(0, 0, words * 8)); // now she may reuse her source
  } else {
    const Status status = bob.wait();
    u64 wrong = 0;
    for (u64 i = 0; i < words; i++) wrong += destination[i] != i * i + 1;
    report[1] = static_cast<u64>(status);
    report[2] = wrong;
  }
}
"#;

/// What one end lets its peer write to, and what it puts from: pinned memory, which the kernel and the proxy both reach.
struct End {
    source: LocalMemory,
    destination: LocalMemory,
    signal: LocalMemory,
}

fn end(context: &Context, transport: &Loopback) -> Result<End, Box<dyn Error>> {
    let pinned =
        |len| -> Result<LocalMemory, Box<dyn Error>> { Ok(transport.register(&context.host_memory(len)?)?) };
    Ok(End { source: pinned(LEN_BYTES)?, destination: pinned(LEN_BYTES)?, signal: pinned(8)? })
}

/// A channel to either side, and the proxy that serves both.
fn start(
    context: &Context,
    transport: &Loopback,
    ends: [&End; 2],
) -> Result<(Proxy, [PortChannel; 2]), Box<dyn Error>> {
    let (alices, alices_bytes) = transport.endpoint()?;
    let (bobs, bobs_bytes) = transport.endpoint()?;
    let ports = [alices.connect(&bobs_bytes, LIMIT)?, bobs.connect(&alices_bytes, LIMIT)?];
    let mut engine = Engine::new(context, Config::default())?;
    let mut channels = Vec::new();
    for (port, (here, there)) in ports.into_iter().zip([(ends[0], ends[1]), (ends[1], ends[0])]) {
        let config = portway_fifo::Config { timeout: LIMIT, ..Default::default() };
        let (fifo, consumer) = Fifo::new(context, config)?;
        let config = ChannelConfig {
            fifo: engine.add_fifo(fifo, consumer)?,
            port: engine.add_port(port)?,
            source: here.source.clone(),
            destination: transport.import(&transport.export(&there.destination)?)?,
            outbound: transport.import(&transport.export(&there.signal)?)?,
            inbound: here.signal.clone(),
        };
        channels.push(engine.add_channel(config)?);
    }
    let [a, b] = [channels.remove(0), channels.remove(0)];
    Ok((Proxy::start(engine, RunConfig::default())?, [a, b]))
}

fn run(context: &Context, compiler: &Compiler) -> Result<(), Box<dyn Error>> {
    // What can keep a proxy from making progress is better known before anything waits for it.
    for warning in context.warnings() {
        eprintln!("warning: {warning} {}", warning.remedy());
    }
    let transport = Loopback::new(loopback::Config::default())?;
    let (alice, bob) = (end(context, &transport)?, end(context, &transport)?);
    let (proxy, channels) = start(context, &transport, [&alice, &bob])?;

    let source = [header::PORT_CHANNEL, KERNEL].concat();
    let capability = context.attributes().compute_capability;
    let image = compiler.compile("cuda_put.cu", &source, capability, &[])?;
    // SAFETY: the image comes from the compiler.
    let module = unsafe { Module::load(context, &image) }?;
    let kernel = module.function("put_and_check")?; // loads it: nothing is left for the first launch to do
    let stream = Stream::new(context)?;
    let report = Words::new(context.host_memory(24)?)?;
    report.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));

    let handles = channels.each_ref().map(PortChannel::handle);
    let addresses = [&alice.source, &bob.destination].map(|memory| memory.region.address());
    let report_at = report.region().address();
    let parameters = [
        bytes_of(&handles[0]),
        bytes_of(&handles[1]),
        bytes_of(&addresses[0]),
        bytes_of(&addresses[1]),
        bytes_of(&WORDS),
        bytes_of(&report_at),
    ];
    // SAFETY: the kernel takes these parameters, and all its memory lives until the stream is done.
    unsafe { kernel.launch(&stream, [2, 1, 1], [1; 3], 0, &parameters) }?;
    let finished = stream.wait(3 * LIMIT);
    let report: Vec<u64> = report.iter().map(|word| word.load(Ordering::Acquire)).collect();
    let stopped = proxy.stop(Stop::Drain { within: LIMIT });
    finished?;
    println!("put: status {}, wait: status {}, wrong words: {}", report[0], report[1], report[2]);
    println!("drained: {}, triggers: {}", stopped.drained, stopped.stats.triggers);
    if report != [0, 0, 0] || !stopped.drained {
        return Err("the bytes did not arrive as they should".into());
    }
    println!("{LEN_BYTES} bytes put, signalled and checked by the GPU");
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    use portway_fifo::Error::{Driver as Refused, NoLibrary};
    let both = Driver::load().and_then(|driver| Ok((driver, Compiler::load()?)));
    let (driver, compiler) = match both {
        Ok(both) => both,
        Err(lacking @ (NoLibrary { .. } | Refused { call: "cuInit", status: 100, .. })) => {
            println!("waived: {lacking}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let context = Context::new(&driver, 0)?;
    run(&context, &compiler)?;
    Ok(context.close()?)
}
