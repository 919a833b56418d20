//! The floor of a put: two kernels and two words, without FIFO and engine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytemuck::bytes_of;
use portway_fifo::cuda::{Context, Kind, Stream};
use portway_fifo::{Error, Platform, Region, Words};
use portway_transport_ipc::WordPlace;

use crate::failure::Failure;
use crate::ipc::NAME;
use crate::ipc::kernels::{Gpus, Plan};
use crate::machine::pin;

/// Memory of one side, which the other side's stream writes to.
struct Side {
    source: Region,
    destination: Region,
    /// What the kernel stores to, and the host sees.
    trigger: Words,
    /// What the kernel waits for.
    flag: Region,
    /// Its stream puts to the other side.
    stream: Stream,
}

impl Side {
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
        Ok(Side { source: memory()?, destination: memory()?, trigger, flag, stream })
    }
}

/// Two sides that reach each other's memory.
fn sides(gpus: &Gpus, place: WordPlace, len_bytes: u64) -> Result<[Side; 2], Error> {
    let contexts = [&gpus.sides[0].context, &gpus.sides[1].context];
    let made = [Side::new(contexts[0], place, len_bytes)?, Side::new(contexts[1], place, len_bytes)?];
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
    crate::progress::begin(&name);
    let failed = |source| Failure::gpu(&name, source);
    let both = sides(gpus, place, size_bytes.max(8)).map_err(failed)?;
    let plan = |follows| Plan { len_bytes: size_bytes, puts: 1, count, follows, check: 0, corrupt: u64::MAX };
    let plans = [plan(0), plan(1)];
    let outputs = [gpus.output(&name, 0, count)?, gpus.output(&name, 1, count)?];
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
            let words = both.each_ref().map(|side| [side.trigger.region().address(), side.flag.address()]);
            let parameters = |here: usize| {
                let [trigger, flag] = &words[here];
                vec![bytes_of(trigger), bytes_of(flag), bytes_of(&plans[here])]
            };
            gpus.launch(&name, "floor_trips", &outputs, parameters)?;
            Ok([outputs[0].read_one(&name)?, outputs[1].read_one(&name)?])
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
    Ok(lead.us.iter().map(|us| us / 2.0).collect())
}

/// Sees the kernel's word move, and does what a put and its signal need.
fn serve(mine: &Side, theirs: &Side, size_bytes: u64, ended: &AtomicBool) -> Result<(), Error> {
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
