//! The references: the driver's own calls, by threads of the host, without the transport.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytemuck::bytes_of;
use portway_fifo::cuda::{Context, Kind, Stream};
use portway_fifo::{Error, Platform, Region, Words};
use portway_transport_ipc::WordPlace;

use super::NAME;
use super::kernels::{Gpus, Plan};
use crate::failure::Failure;
use crate::machine::pin;

/// Memory of one side, which the other side's stream writes to.
struct Plain {
    source: Region,
    destination: Region,
    /// What the kernel stores to, and the host sees.
    trigger: Words,
    /// What the kernel waits for.
    flag: Region,
    /// Its stream puts to the other side.
    stream: Stream,
}

impl Plain {
    fn new(context: &Context, place: WordPlace, len_bytes: u64) -> Result<Self, Error> {
        let flag = match place {
            WordPlace::Pinned => context.host_memory(8)?,
            WordPlace::Device => context.device_memory(8)?,
        };
        let stream = Stream::new(context)?;
        stream.prime()?;
        stream.wait(Duration::from_secs(10))?;
        let memory = || context.allocate(Kind::Vmm, len_bytes);
        let trigger = Words::new(context.host_memory(8)?)?;
        Ok(Plain { source: memory()?, destination: memory()?, trigger, flag, stream })
    }
}

/// Two sides that reach each other's memory.
fn sides(gpus: &Gpus, place: WordPlace, len_bytes: u64) -> Result<[Plain; 2], Error> {
    let contexts = [&gpus.sides[0].context, &gpus.sides[1].context];
    let made = [Plain::new(contexts[0], place, len_bytes)?, Plain::new(contexts[1], place, len_bytes)?];
    for here in 0..2 {
        let there = 1 - here;
        for region in [&made[there].destination, &made[there].flag] {
            contexts[here].reach(contexts[there], region)?;
        }
    }
    Ok(made)
}

/// The floor: half of each round trip in microseconds between two kernels that store to a word and wait for a flag, with a
/// thread a side that submits what a put needs. A signal alone, where that is a store, is a store.
pub fn floor(gpus: &Gpus, place: WordPlace, size_bytes: u64, count: u64) -> Result<Vec<f64>, Failure> {
    let name = format!("{NAME} floor, {size_bytes} bytes");
    let failed = |source| Failure::gpu(&name, source);
    let both = sides(gpus, place, size_bytes.max(8)).map_err(failed)?;
    let plan = |follows| Plan { len_bytes: size_bytes, puts: 1, count, follows, check: 0, corrupt: u64::MAX };
    let plans = [plan(0), plan(1)];
    let outputs = [gpus.output(&name, 0, &plans)?, gpus.output(&name, 1, &plans)?];
    let ended = &AtomicBool::new(false);
    let [lead, follow] = std::thread::scope(|scope| {
        let threads = [0, 1].map(|here| {
            let (mine, theirs) = (&both[here], &both[1 - here]);
            let core = gpus.pinning.producer(1 + here);
            scope.spawn(move || {
                pin(core);
                serve(mine, theirs, size_bytes, ended)
            })
        });
        let run = || -> Result<_, Failure> {
            for (here, mine) in both.iter().enumerate() {
                let (trigger, flag) = (mine.trigger.region().address(), mine.flag.address());
                let parameters = [bytes_of(&trigger), bytes_of(&flag), bytes_of(&plans[here])];
                gpus.launch(&name, here, "floor_trips", &parameters, &outputs[here])?;
            }
            for side in &gpus.sides {
                side.stream.wait(gpus.limit()).map_err(failed)?;
            }
            Ok([outputs[0].read(&name)?, outputs[1].read(&name)?])
        };
        let found = run();
        ended.store(true, Ordering::Release);
        for thread in threads {
            let served = thread.join().map_err(|_| Failure::Panicked { measurement: name.clone() })?;
            served.map_err(failed)?;
        }
        found
    })?;
    drop((both, outputs, follow));
    gpus.reclaim(&name)?;
    // The second kernel does nothing between.
    Ok(lead.us.iter().skip(100).map(|us| us / 2.0).collect())
}

/// Sees the kernel's word move, and does what a put and its signal need.
fn serve(mine: &Plain, theirs: &Plain, size_bytes: u64, ended: &AtomicBool) -> Result<(), Error> {
    let host = if theirs.flag.place().is_host() { Some(Words::new(theirs.flag.clone())?) } else { None };
    let mut seen = 0;
    while !ended.load(Ordering::Acquire) {
        let trigger = mine.trigger[0].load(Ordering::Acquire);
        if trigger == seen {
            std::hint::spin_loop();
            continue;
        }
        seen = trigger;
        if let (0, Some(flag)) = (size_bytes, &host) {
            flag[0].store(seen, Ordering::Release);
            continue;
        }
        let stream = mine.stream.enter()?;
        if size_bytes > 0 {
            let (to, from) = (theirs.destination.address(), mine.source.address());
            // SAFETY: both memories are alive, as long as this, and accessed by the device alone.
            unsafe { stream.copy(to, from, size_bytes) }?;
        }
        // SAFETY: the word is alive, and accessed atomically only.
        unsafe { stream.write_value(theirs.flag.address(), seen) }?;
    }
    Ok(())
}

/// GB/s of copies in a loop: a window of so many, each where a put of the transport's window lands.
pub fn copies(gpus: &Gpus, size_bytes: u64, count: u64, both_ways: bool) -> Result<f64, Failure> {
    const WINDOWS: u64 = 3;
    let name = format!("{NAME} plain copies, {size_bytes} bytes");
    let failed = |source| Failure::gpu(&name, source);
    let both = sides(gpus, WordPlace::Pinned, size_bytes * count).map_err(failed)?;
    let ways = if both_ways { 2 } else { 1 };
    let mut seconds = Vec::new();
    for window in 1..=WINDOWS {
        let start = Instant::now();
        for at in 0..count {
            for here in 0..ways {
                let (mine, theirs) = (&both[here], &both[1 - here]);
                let offset = at * size_bytes;
                let (to, from) = (theirs.destination.address() + offset, mine.source.address() + offset);
                let copied = mine.stream.enter().and_then(|stream| {
                    // SAFETY: both memories are alive, as long as `both`, and accessed by the device alone.
                    unsafe { stream.copy(to, from, size_bytes) }
                });
                copied.map_err(failed)?;
            }
        }
        for mine in &both[..ways] {
            // SAFETY: the word is alive, and accessed atomically only.
            unsafe { mine.stream.write_value(mine.trigger.region().address(), window) }.map_err(failed)?;
        }
        for mine in &both[..ways] {
            while mine.trigger[0].load(Ordering::Acquire) != window {
                if start.elapsed() > gpus.limit() {
                    let seen = mine.trigger[0].load(Ordering::Acquire);
                    let (what, after) = ("the end of plain copies", gpus.limit());
                    return Err(failed(Error::Timeout { what, expected: window, seen, after }));
                }
            }
        }
        seconds.push(start.elapsed().as_secs_f64());
    }
    drop(both);
    gpus.reclaim(&name)?;
    let middle = crate::stats::median(&seconds[1..]).map_or(f64::NAN, |spread| spread.median);
    Ok((ways as u64 * count * size_bytes) as f64 / middle / 1e9)
}
