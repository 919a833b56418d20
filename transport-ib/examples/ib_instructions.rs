//! What `ci/ib-instructions.sh` counts: the engine and the port, over a verbs table whose data path does next to nothing.
//!
//! usage: ib_instructions BURSTS [dearer]
//!
//! The way to the doorbell that is `dearer` has a little more work an op: the control, which has to be noticed.
//!
//! `step_to_the_doorbell` takes a burst from the FIFO and posts it, and finds no completion yet;
//! `step_to_the_frontier` finds an empty FIFO and the burst's completions. The program checks what it can: every op
//! completes, and a burst takes at most two doorbells.

#[path = "../tests/support/mod.rs"]
mod support;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use portway_fifo::{Fifo, Heap};
use portway_proxy::transport::Transport;
use portway_proxy::{ChannelConfig, Engine};
use portway_transport_ib::{Config, Ib, sys};
use support::fabric::{Make, World};
use support::link::connect;

/// Triggers that a step finds: the engine's batch.
const BURST: u64 = 32;
/// Requests of a put with its signal.
const REQUESTS: u64 = 2;
/// Requests of which one asks for a completion.
const EVERY: u64 = 32;

static DOORBELLS: AtomicU64 = AtomicU64::new(0);
static COMPLETED: AtomicU64 = AtomicU64::new(0);

/// Rings the doorbell and does nothing.
unsafe extern "C" fn post_send(
    _: *mut sys::ibv_qp,
    _: *mut sys::ibv_send_wr,
    _: *mut *mut sys::ibv_send_wr,
) -> i32 {
    DOORBELLS.fetch_add(1, Ordering::Relaxed);
    0
}

/// Whether the device is done with what was posted.
static DONE: AtomicBool = AtomicBool::new(false);

/// The completions of a burst, as many as a device would give.
unsafe extern "C" fn poll_cq(_: *mut sys::ibv_cq, _: i32, out: *mut sys::ibv_wc) -> i32 {
    if !DONE.swap(false, Ordering::Relaxed) {
        return 0;
    }
    let mut count = 0;
    for _ in 0..BURST * REQUESTS / EVERY {
        let done = COMPLETED.fetch_add(EVERY, Ordering::Relaxed) + EVERY;
        let wc = sys::ibv_wc { wr_id: done - 1, ..Default::default() };
        let place = out.wrapping_add(count as usize);
        // SAFETY: the port has room for 16.
        unsafe { place.write(wc) };
        count += 1;
    }
    count
}

#[inline(never)]
fn step_to_the_doorbell(engine: &mut Engine, now: Duration, more: u64) -> u64 {
    for work in 0..more {
        std::hint::black_box(work);
    }
    engine.step(now).completions
}

#[inline(never)]
fn step_to_the_frontier(engine: &mut Engine, now: Duration) -> u64 {
    DONE.store(true, Ordering::Relaxed);
    engine.step(now).completions
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let bursts: u64 = std::env::args().nth(1).unwrap_or_default().parse()?;
    let more = if std::env::args().nth(2).as_deref() == Some("dearer") { 4 * BURST } else { 0 };
    let world = World::new(&[Make::default()]);
    world.set_data_path(post_send, poll_cq);
    let ib = Ib::open_with(&world.verbs(), Config { signal_every: EVERY as u32, ..Config::default() })?;
    let memory = || ib.register(&Heap.allocate(1 << 20)?);
    let (source, destination) = (memory()?, memory()?);
    let (inbound, outbound) = (ib.signal_word()?, ib.signal_word()?);
    let (port, _peer) = connect(&ib, &ib)?;
    let mut engine =
        Engine::new(&Heap, portway_proxy::Config { batch: BURST as usize, ..Default::default() })?;
    let (fifo, consumer) = Fifo::new(&Heap, portway_fifo::Config::default())?;
    let fifo = engine.add_fifo(fifo, consumer)?;
    let port = engine.add_port(port)?;
    let channel = engine.add_channel(ChannelConfig {
        fifo,
        port,
        source,
        destination: ib.import(&ib.export(&destination)?)?,
        outbound: ib.import(&ib.export(&outbound)?)?,
        inbound,
    })?;
    let producer = channel.producer()?;
    let mut completions = 0;
    for burst in 0..bursts {
        for op in 0..BURST {
            producer.put_signal(op * 64, op * 128, 64)?;
        }
        let now = Duration::from_micros(burst);
        completions += step_to_the_doorbell(&mut engine, now, more);
        completions += step_to_the_frontier(&mut engine, now);
    }
    let doorbells = DOORBELLS.load(Ordering::Relaxed);
    println!("ops {} completions {completions} doorbells {doorbells}", bursts * BURST);
    if completions != bursts * BURST || doorbells > 2 * bursts {
        return Err("an op is not complete, or a burst took more than two doorbells".into());
    }
    Ok(())
}
