//! An all-gather and a ring all-reduce over port channels, the result checked:
//!
//! ```text
//! collectives loopback             four ranks in memory of this process
//! collectives ib [DEVICE...]       four ranks over verbs, on these devices in turn; soft-RoCE will do
//! collectives ipc [GPU...]         a rank on each of these GPUs, `0 0` for two on one; or a rank a GPU, if there are two
//! ```
//!
//! The code of the ring is the same for all. Behind it comes the time that NCCL takes for the same, where there are NCCL
//! and a GPU a rank. A rank of the ring sums on the host, by its own copies to and from its window, and that is in its
//! time. What a machine lacks is waived by name.

mod machine;
mod nccl;
mod ring;

use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use machine::{Found, Machine};
use ring::{LIMIT, Rank};

const RANKS: usize = 4;
const ROUNDS: u64 = 20;

/// A rank's contribution to a chunk in a round.
fn word(round: u64, rank: usize, chunk: usize, at: usize) -> u64 {
    round.wrapping_mul(1_000_003) ^ ((rank as u64 + 1) << 40) ^ ((chunk as u64) << 20) ^ at as u64
}

fn words(round: u64, rank: usize, chunk: usize, len: usize) -> Vec<u64> {
    (0..len).map(|at| word(round, rank, chunk, at)).collect()
}

/// The sums of a chunk over all ranks.
fn expected(round: u64, ranks: usize, chunk: usize, len: usize) -> Vec<u64> {
    let sum = |at| (0..ranks).fold(0u64, |sum, rank| sum.wrapping_add(word(round, rank, chunk, at)));
    (0..len).map(sum).collect()
}

fn check(what: &str, round: u64, chunk: usize, seen: &[u64], expected: &[u64]) -> Result<(), String> {
    match seen.iter().zip(expected).position(|(seen, expected)| seen != expected) {
        None => Ok(()),
        Some(at) => Err(format!(
            "{what}, round {round}, chunk {chunk}, word {at}: expected {:#x}, seen {:#x}",
            expected[at], seen[at]
        )),
    }
}

/// Where the ranks of this process wait for each other, so that none's time has another's checks in it.
#[derive(Debug, Default)]
pub struct Meeting(AtomicUsize);

impl Meeting {
    /// Waits until all of `ranks` have called this as often.
    fn meet(&self, ranks: usize) -> Result<(), String> {
        let come = 1 + self.0.fetch_add(1, Ordering::AcqRel);
        let (start, expected) = (Instant::now(), come.next_multiple_of(ranks));
        while self.0.load(Ordering::Acquire) < expected {
            if start.elapsed() > LIMIT {
                let seen = self.0.load(Ordering::Acquire);
                return Err(format!(
                    "waited {LIMIT:?} for the other ranks: expected {expected}, seen {seen}"
                ));
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// All rounds of one rank; how long it was inside each of the collectives.
fn rounds(
    rank: &Rank,
    number: usize,
    (ranks, meeting): (usize, &Meeting),
    len: usize,
) -> Result<[Duration; 2], Box<dyn Error + Send + Sync>> {
    let mut inside = [Duration::ZERO; 2];
    for round in 0..ROUNDS {
        rank.write(number, &words(round, number, number, len))?;
        meeting.meet(ranks)?;
        let start = Instant::now();
        rank.all_gather()?;
        inside[0] += start.elapsed();
        for chunk in 0..ranks {
            check("all-gather", round, chunk, &rank.read(chunk)?, &words(round, chunk, chunk, len))?;
        }
        for chunk in 0..ranks {
            rank.write(chunk, &words(round, number, chunk, len))?;
        }
        meeting.meet(ranks)?;
        let start = Instant::now();
        rank.all_reduce()?;
        inside[1] += start.elapsed();
        for chunk in 0..ranks {
            check("all-reduce", round, chunk, &rank.read(chunk)?, &expected(round, ranks, chunk, len))?;
        }
    }
    Ok(inside)
}

fn run(name: &str, machines: Vec<Machine>, len: usize) -> Result<(), Box<dyn Error + Send + Sync>> {
    let count = machines.len();
    let ring = ring::connect(&machines, len)?;
    let meeting = Meeting::default();
    let inside: Vec<_> = std::thread::scope(|scope| {
        let of = |(number, rank)| {
            let meeting = &meeting;
            scope.spawn(move || rounds(rank, number, (count, meeting), len))
        };
        let threads: Vec<_> = ring.iter().enumerate().map(of).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let mut slowest = [Duration::ZERO; 2];
    for (rank, inside) in inside.into_iter().enumerate() {
        let inside = inside.map_err(|error| format!("rank {rank}: {error}"))?;
        slowest = [0, 1].map(|at| slowest[at].max(inside[at]));
    }
    for rank in ring {
        rank.stop()?;
    }
    tell(name, count, len, slowest.map(|time| time / ROUNDS as u32));
    Ok(())
}

fn tell(name: &str, ranks: usize, len: usize, [gather, reduce]: [Duration; 2]) {
    let bytes = 8 * len * ranks;
    println!(
        "{name}: {ranks} ranks, {bytes} bytes, {ROUNDS} rounds: ok; all-gather {gather:?}, all-reduce {reduce:?}"
    );
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (name, rest) = arguments.split_first().map_or(("loopback", &[][..]), |(name, rest)| (name, rest));
    let gpus = if name == "ipc" { rest } else { &[] };
    let nccl = nccl::find(RANKS, gpus);
    for len in [1, 1_000, 65_536] {
        let found = match name {
            "loopback" => machine::over_loopback(RANKS),
            "ib" => machine::over_ib(RANKS, rest),
            "ipc" => machine::over_ipc(RANKS, rest),
            _ => return Err(format!("no transport {name}: loopback, ib or ipc").into()),
        };
        match found.map_err(|error| error.to_string())? {
            Found::Machines(machines) => run(name, machines, len)?,
            Found::Lacking(what) => {
                println!("{name}: waived: {what}");
                break;
            }
        }
        if let Ok((library, devices)) = &nccl {
            tell("nccl", devices.len(), len, nccl::run(library.clone(), devices, len)?);
        }
    }
    if let Err(lacking) = nccl {
        println!("nccl: waived: {lacking}");
    }
    Ok(())
}
