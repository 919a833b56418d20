//! The same collectives by NCCL, to compare with: through the members of a clique, so that this cannot hang either.
//!
//! A time here is that of one call and the wait for its stream. Both are a rank's own, as in the ring.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use portway_clique::backend::{Backend, DataType, ReduceOp};
use portway_clique::nccl::Nccl;
use portway_clique::rendezvous::Hub;
use portway_clique::{Clique, FirstUse, Member};
use portway_fifo::cuda::Driver;

use crate::ring::LIMIT;
use crate::{Meeting, ROUNDS, check, expected, machine, words};

type Result<T> = core::result::Result<T, Box<dyn Error + Send + Sync>>;

/// NCCL and the GPUs for it, one a rank, or why it cannot be compared with.
pub fn find(ranks: usize, names: &[String]) -> core::result::Result<(Arc<Nccl>, Vec<u32>), String> {
    let gpus = Driver::load().and_then(|driver| driver.device_count()).map_err(|error| error.to_string())?;
    let devices = machine::ordinals(ranks, gpus, names).map_err(|error| error.to_string())?;
    for (at, device) in devices.iter().enumerate() {
        if devices[..at].contains(device) {
            return Err(format!("it takes a GPU for each rank, and {device} is here for two"));
        }
    }
    if devices.len() < 2 {
        return Err(format!("two GPUs are needed, {gpus} found"));
    }
    Ok((Nccl::load().map_err(|error| error.to_string())?, devices))
}

/// Both collectives over these devices, the results checked; what a call takes.
pub fn run(library: Arc<dyn Backend>, devices: &[u32], len: usize) -> Result<[Duration; 2]> {
    let ranks = devices.len();
    let meet = Arc::new(Hub::new(1)?.join(0)?);
    let uses = FirstUse::default().all_gather().all_reduce(DataType::U64, ReduceOp::Sum);
    let mut builder = Clique::builder("collectives", ranks as u32).first_use(uses);
    for (rank, device) in devices.iter().enumerate() {
        builder = builder.local(rank as u32, *device);
    }
    let mut clique = builder.bring_up(library, meet, 3 * LIMIT)?;
    let meeting = Meeting::default();
    let inside: Vec<Result<[Duration; 2]>> = std::thread::scope(|scope| {
        let of = |mut member: Member| {
            let meeting = &meeting;
            scope.spawn(move || rounds(&mut member, (ranks, meeting), len))
        };
        let threads: Vec<_> = clique.members().into_iter().map(of).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let mut slowest = [Duration::ZERO; 2];
    for inside in inside {
        let inside = inside?;
        slowest = [0, 1].map(|at| slowest[at].max(inside[at]));
    }
    clique.close(LIMIT)?;
    Ok(slowest.map(|time| time / ROUNDS as u32))
}

/// All rounds of one rank; how long it was inside each of the collectives.
fn rounds(member: &mut Member, (ranks, meeting): (usize, &Meeting), len: usize) -> Result<[Duration; 2]> {
    let rank = member.rank() as usize;
    let mut buffers = member.buffers(8 * len * ranks)?;
    let mut inside = [Duration::ZERO; 2];
    for round in 0..ROUNDS {
        buffers.write(&to_bytes(&words(round, rank, rank, len)))?;
        meeting.meet(ranks)?;
        let start = Instant::now();
        member.all_gather(&mut buffers, len, DataType::U64)?;
        member.wait(&mut buffers, LIMIT)?;
        inside[0] += start.elapsed();
        let mut seen = vec![0; 8 * len * ranks];
        buffers.read(&mut seen)?;
        for (chunk, seen) in seen.chunks_exact(8 * len).enumerate() {
            check("NCCL's all-gather", round, chunk, &to_words(seen), &words(round, chunk, chunk, len))?;
        }
        let mine: Vec<u64> = (0..ranks).flat_map(|chunk| words(round, rank, chunk, len)).collect();
        buffers.write(&to_bytes(&mine))?;
        meeting.meet(ranks)?;
        let start = Instant::now();
        member.all_reduce(&mut buffers, len * ranks, DataType::U64, ReduceOp::Sum)?;
        member.wait(&mut buffers, LIMIT)?;
        inside[1] += start.elapsed();
        buffers.read(&mut seen)?;
        for (chunk, seen) in seen.chunks_exact(8 * len).enumerate() {
            check("NCCL's all-reduce", round, chunk, &to_words(seen), &expected(round, ranks, chunk, len))?;
        }
    }
    meeting.meet(ranks)?; // nobody frees its buffers while another still runs
    Ok(inside)
}

fn to_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn to_words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes"))).collect()
}

#[cfg(test)]
mod tests {
    use portway_clique::software::{Fabric, Software};

    use super::*;

    /// What compares is right without NCCL too.
    #[test]
    fn the_reference_runs_over_a_library_in_software() {
        let library = Arc::new(Software::new(&Fabric::new(3)));
        let times = run(library, &[0, 1, 2], 1_000).unwrap();
        assert!(times.iter().all(|time| *time > Duration::ZERO), "{times:?}");
    }

    #[test]
    fn one_gpu_for_two_ranks_is_no_comparison() {
        let names = ["0".to_owned(), "0".to_owned()];
        // Without a driver it is that which lacks.
        assert!(find(2, &names).is_err());
        assert!(machine::ordinals(2, 1, &["x".into()]).is_err());
        assert_eq!(machine::ordinals(4, 2, &[]).unwrap(), [0, 1]);
    }
}
