//! Random puts, signals, flushes, aborts, failures and restarts, for as long as one likes:
//!
//! ```text
//! soak run SECONDS SEED                       over loopback
//! soak run SECONDS SEED gpu                   over loopback in pinned memory; kernels of the first GPU make the calls
//! soak run SECONDS SEED ib DEVICE DEVICE      over verbs
//! soak run SECONDS SEED ipc GPU GPU           over CUDA IPC in the memory of two GPUs, or one twice; kernels make the calls
//! soak replay SEED EPISODE [gpu|ib ...|ipc ...]      one episode again, as often as it takes to see it fail: 100 times at most
//! soak leak SECONDS SEED memory|threads|descriptors      the control: what leaks on purpose is found out
//! ```
//!
//! With kernels, set `CUDA_DEVICE_MAX_CONNECTIONS=32`: streams that share one of the driver's queues wait for each other, and
//! an episode has up to ten.
//!
//! What an episode does follows from the seed and its number alone; only the interleaving of its threads does not. After
//! each, all memory can be released and all threads are gone; over the whole run memory, threads and descriptors of
//! this process stay flat.

mod episode;
mod flat;
mod gpu;
mod over;
mod plan;

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::File;
use std::time::{Duration, Instant};

use flat::Flat;
use over::{Found, Over};

/// What the control leaks an episode.
#[derive(Clone, Copy)]
enum Leak {
    Nothing,
    Memory,
    Threads,
    Descriptors,
}

impl Leak {
    fn leak(self) -> Result<(), Box<dyn Error>> {
        match self {
            Leak::Nothing => {}
            Leak::Memory => drop(vec![1u8; 64 << 10].leak()),
            // For a minute: longer than the control runs, and not without end.
            Leak::Threads => drop(std::thread::spawn(|| std::thread::sleep(Duration::from_secs(60)))),
            Leak::Descriptors => core::mem::forget(File::open("/dev/null")?),
        }
        Ok(())
    }
}

fn run(seconds: u64, seed: u64, over: &Over, leak: Leak) -> Result<(), Box<dyn Error>> {
    let time = Duration::from_secs(seconds);
    let (started, mut episodes, mut calls, mut flat) = (Instant::now(), 0, 0, Flat::default());
    let (mut endings, mut told) = (BTreeMap::new(), Instant::now());
    while started.elapsed() < time {
        let plan = over.plan(seed, episodes);
        if let Err(error) = over.run(&plan) {
            return Err(format!("seed {seed}, episode {episodes} ({:?}): {error}", plan.ending).into());
        }
        leak.leak()?;
        *endings.entry(format!("{:?}", plan.ending)).or_insert(0) += 1;
        episodes += 1;
        calls += plan.dialogues.iter().map(|dialogue| dialogue.calls.len()).sum::<usize>();
        flat.note(started.elapsed().as_secs_f64() / time.as_secs_f64())?;
        if episodes == 1 || told.elapsed() >= Duration::from_secs(60) {
            told = Instant::now();
            let seen = flat::Use::now()?;
            println!("soak: after {} s, {episodes} episodes: {seen:?}", started.elapsed().as_secs());
        }
    }
    let (measure, last) = flat.check().map_err(|error| format!("{error}, after {episodes} episodes"))?;
    println!(
        "soak: ok, {episodes} episodes of {calls} calls in {seconds} s with seed {seed}, {endings:?}; at most {measure:?} in \
         the second quarter, {last:?} in the last"
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let find = |over: &[&str]| -> Result<Option<Over>, Box<dyn Error>> {
        match Over::find(over)? {
            Found::Over(over) => Ok(Some(over)),
            Found::Lacking(what) => {
                println!("soak {}: waived: {what}", over[0]);
                Ok(None)
            }
        }
    };
    match arguments[..] {
        ["run", seconds, seed, ref over @ ..] => {
            let Some(over) = find(over)? else { return Ok(()) };
            run(seconds.parse()?, seed.parse()?, &over, Leak::Nothing)
        }
        ["replay", seed, episode, ref over @ ..] => {
            let Some(over) = find(over)? else { return Ok(()) };
            let plan = over.plan(seed.parse()?, episode.parse()?);
            println!("{plan:?}");
            for time in 0..100 {
                over.run(&plan).map_err(|error| format!("at time {time}: {error}"))?;
            }
            println!("soak: ok, 100 times");
            Ok(())
        }
        ["leak", seconds, seed, what] => {
            let leak = match what {
                "memory" => Leak::Memory,
                "threads" => Leak::Threads,
                "descriptors" => Leak::Descriptors,
                _ => return Err(format!("no leak of {what}").into()),
            };
            match run(seconds.parse()?, seed.parse()?, &Over::Loopback(None), leak) {
                Err(error) if error.to_string().starts_with("not flat:") => {
                    println!("soak: a leak of {what} is found: {error}");
                    Ok(())
                }
                Err(error) => Err(error),
                Ok(()) => Err(format!("a leak of {what} was not found").into()),
            }
        }
        _ => Err(
            "usage: soak run SECONDS SEED [OVER] | replay SEED EPISODE [OVER] | leak SECONDS SEED WHAT; OVER: gpu, ib A B, ipc A B"
                .into(),
        ),
    }
}
