//! Two processes with two ranks each, played by threads over the library in software: they come up, reduce, split and
//! close. Then one of them fails, and all say who and why; a second attempt works.
//!
//! ```text
//! cargo run -p portway-clique --example clique_in_software
//! ```

use std::error::Error;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use portway_clique::backend::{DataType, ReduceOp, Status};
use portway_clique::rendezvous::{Hub, InProcess};
use portway_clique::software::{Fabric, Fault, Kind, Software, Step};
use portway_clique::{Clique, CliqueError, FirstUse, Member};

const SIZE: u32 = 4;
const WITHIN: Duration = Duration::from_secs(10);

type Ranks = [u32; 2];

/// What each process does: brings its part of the clique up, with the ranks that are its devices as well.
fn bring_up(
    attempt: u64,
    ranks: Ranks,
    library: Arc<Software>,
    rendezvous: Arc<InProcess>,
) -> Result<Clique, CliqueError> {
    let first_use = FirstUse::default().all_reduce(DataType::F32, ReduceOp::Sum).ring(SIZE);
    let builder = Clique::builder("example", SIZE).attempt(attempt).first_use(first_use);
    let builder = ranks.iter().fold(builder, |builder, rank| builder.local(*rank, *rank));
    builder.bring_up(library, rendezvous, WITHIN)
}

/// What each rank does, on a thread of its own.
fn work(mut member: Member) -> Result<f32, CliqueError> {
    let mut buffers = member.buffers(4096)?;
    buffers.write(&(member.rank() as f32).to_le_bytes())?;
    member.all_reduce(&mut buffers, 1, DataType::F32, ReduceOp::Sum)?;
    member.wait(&mut buffers, WITHIN)?;
    let mut sum = [0; 4];
    buffers.read(&mut sum)?;
    // Even and odd ranks go on in cliques of their own.
    let half = member.split(Some(member.rank() % 2), 0)?.expect("a rank with a colour has a place");
    assert_eq!((half.rank(), half.size()), (member.rank() / 2, SIZE / 2));
    half.close(WITHIN)?;
    Ok(f32::from_le_bytes(sum))
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let fabric = Fabric::new(SIZE);
    let hub = Hub::new(2)?;
    let mut processes = Vec::new();
    for (participant, ranks) in [[0, 1], [2, 3]].into_iter().enumerate() {
        let (library, place) = (Arc::new(Software::new(&fabric)), Arc::new(hub.join(participant as u32)?));
        processes.push((ranks, library, place));
    }
    // Both processes, each on a thread.
    let everywhere = |attempt: u64| -> Vec<Result<Clique, CliqueError>> {
        let threads: Vec<_> = processes
            .iter()
            .cloned()
            .map(|(ranks, library, place)| thread::spawn(move || bring_up(attempt, ranks, library, place)))
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a process does not panic")).collect()
    };

    // Rank 3 fails in its initialisation. Both processes hear of it at once, and say the same.
    processes[1].1.inject(Fault::new(Step::InitProgress, Some(3), Kind::Fail(Status::SYSTEM_ERROR)));
    for result in everywhere(0) {
        println!("attempt 0: {}", result.map(drop).expect_err("rank 3 fails"));
    }

    processes[1].1.heal();
    let mut cliques = everywhere(1).into_iter().collect::<Result<Vec<_>, _>>()?;
    println!("attempt 1: up, {:?}", cliques[0].durations());
    let members: Vec<Member> = cliques.iter_mut().flat_map(Clique::members).collect();
    let threads: Vec<_> = members.into_iter().map(|member| thread::spawn(move || work(member))).collect();
    for (rank, thread) in threads.into_iter().enumerate() {
        println!("rank {rank}: the sum of all ranks is {}", thread.join().expect("a rank does not panic")?);
    }
    let threads: Vec<_> =
        cliques.into_iter().map(|clique| thread::spawn(move || clique.close(WITHIN))).collect();
    for thread in threads {
        println!("closed: {:?}", thread.join().expect("a process does not panic")?);
    }
    println!("left behind: {:?}", fabric.live());
    Ok(())
}
