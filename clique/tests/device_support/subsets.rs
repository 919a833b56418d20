//! Cliques of overlapping sets of devices, made by several threads at the same time, over any library.

use std::sync::Arc;
use std::time::{Duration, Instant};

use portway_clique::backend::{Backend, DataType, ReduceOp};
use portway_clique::rendezvous::{Hub, InProcess};
use portway_clique::{Clique, CliqueError, FirstUse, Member};

use super::{PATIENT, alone, close, each, each_within, wait_until};

/// Sets of the first devices: all, every neighbouring pair in either order, halves, and single ones; of one device,
/// itself several times.
pub fn family(devices: u32) -> Vec<Vec<u32>> {
    if devices == 1 {
        return vec![vec![0]; 4];
    }
    let mut sets = vec![(0..devices).collect()];
    sets.extend((0..devices).map(|one| vec![one, (one + 1) % devices]));
    if devices >= 4 {
        let half = devices / 2;
        sets.extend([(0..half).collect(), (half..devices).collect(), (0..devices).step_by(2).collect()]);
    }
    sets.extend([vec![0], vec![devices - 1]]);
    sets
}

fn first_use() -> FirstUse {
    FirstUse::default().all_reduce(DataType::F32, ReduceOp::Sum).large_bytes(1 << 20)
}

/// Checked all-reduces of all ranks of a clique.
fn sums(members: Vec<Member>) {
    each(members, |mut member: Member| {
        let mut buffers = member.buffers(4000).unwrap();
        for round in 1..=3 {
            buffers.write(&((round * (member.rank() + 1)) as f32).to_le_bytes().repeat(1000)).unwrap();
            member.all_reduce(&mut buffers, 1000, DataType::F32, ReduceOp::Sum).unwrap();
            member.wait(&mut buffers, PATIENT).unwrap();
            let mut seen = vec![0; 4000];
            buffers.read(&mut seen).unwrap();
            let sum = (round * member.size() * (member.size() + 1) / 2) as f32;
            assert!(seen.chunks(4).all(|word| word == sum.to_le_bytes()), "{:?}, not {sum}", &seen[..4]);
        }
    });
}

/// How long a bring-up may take, and how late it may come back.
#[derive(Clone, Copy)]
pub struct Limit {
    pub within: Duration,
    pub late: Duration,
}

/// How the bring-up of a set ended for one participant, and after how long.
type Ended = (usize, Result<Clique, CliqueError>, Duration);

/// A clique of these devices, all ranks in one participant.
fn whole(
    backend: &Arc<dyn Backend>,
    name: &str,
    devices: &[u32],
    within: Duration,
) -> Result<Clique, CliqueError> {
    let builder = Clique::builder(name, devices.len() as u32).first_use(first_use());
    let builder = (0..).zip(devices).fold(builder, |builder, (rank, device)| builder.local(rank, *device));
    builder.bring_up(backend.clone(), alone(), within)
}

/// Looks at how it went: everything in time; each clique is up for all of its participants, or for none. Those that are
/// up work, one after the other, and are closed. Returns how many cliques came up, and the errors.
fn settle(cliques: usize, ended: Vec<Ended>, limit: Limit) -> (usize, Vec<CliqueError>) {
    let (mut up, mut errors) = (0, Vec::new());
    let mut by_clique: Vec<(Vec<Clique>, Vec<CliqueError>)> =
        (0..cliques).map(|_| (Vec::new(), Vec::new())).collect();
    for (clique, result, took) in ended {
        let how = result.as_ref().map_or_else(ToString::to_string, |_| "ready".to_owned());
        let Limit { within, late } = limit;
        assert!(took < within + late, "clique {clique}: back after {took:?}, of {within:?}: {how}");
        match result {
            Ok(ready) => by_clique[clique].0.push(ready),
            Err(error) => by_clique[clique].1.push(error),
        }
    }
    for (number, (mut ready, failed)) in by_clique.into_iter().enumerate() {
        assert!(
            ready.is_empty() || failed.is_empty(),
            "clique {number} is up for {} participants, and failed for others: {failed:?}",
            ready.len()
        );
        errors.extend(failed);
        if !ready.is_empty() {
            up += 1;
            sums(ready.iter_mut().flat_map(Clique::members).collect());
            close(ready);
        }
    }
    for error in &errors {
        if let CliqueError::Failed(failure) = error {
            let quarantine = failure.quarantine.clone();
            wait_until("what stayed to come back", PATIENT, || quarantine.count(), |count| *count == 0);
        }
    }
    (up, errors)
}

/// Several threads make a clique of every set each, at the same time, each thread in an order of its own.
pub fn by_threads_in_orders_of_their_own(
    backend: &Arc<dyn Backend>,
    devices: u32,
    threads: usize,
    limit: Limit,
) -> (usize, Vec<CliqueError>) {
    let sets = family(devices);
    let count = sets.len();
    let backend = backend.clone();
    let ended = each_within(
        (limit.within + limit.late) * count as u32 + PATIENT,
        (0..threads).collect(),
        move |thread| {
            let mut order: Vec<usize> = (0..count).collect();
            order.rotate_left(thread * 3 % count);
            if thread % 2 == 1 {
                order.reverse();
            }
            let make = |set: usize| {
                let start = Instant::now();
                let result =
                    whole(&backend, &format!("set {set} of thread {thread}"), &sets[set], limit.within);
                (thread * count + set, result, start.elapsed())
            };
            order.into_iter().map(make).collect::<Vec<Ended>>()
        },
    );
    settle(threads * count, ended.into_iter().flatten().collect(), limit)
}

/// A thread for each device takes part in the clique of every set that it is in, in the same order as all others, or
/// each starting somewhere else: then they wait for each other in a ring.
pub fn by_a_thread_for_each_device(
    backend: &Arc<dyn Backend>,
    devices: u32,
    same_order: bool,
    limit: Limit,
) -> (usize, Vec<CliqueError>) {
    let sets = family(devices);
    let count = sets.len();
    let hubs: Vec<Hub> = sets.iter().map(|set| Hub::new(set.len() as u32).unwrap()).collect();
    let places = |device: u32| {
        let mut places: Vec<(usize, u32, Arc<InProcess>)> = Vec::new();
        for (number, (set, hub)) in sets.iter().zip(&hubs).enumerate() {
            if let Some(rank) = set.iter().position(|one| *one == device) {
                places.push((number, rank as u32, Arc::new(hub.join(rank as u32).unwrap())));
            }
        }
        if !same_order {
            let from = device as usize % places.len();
            places.rotate_left(from);
        }
        (device, places)
    };
    let threads: Vec<_> = (0..devices).map(places).collect();
    let (backend, sizes) = (backend.clone(), sets.iter().map(|set| set.len() as u32).collect::<Vec<_>>());
    let ended = each_within(
        (limit.within + limit.late) * count as u32 + PATIENT,
        threads,
        move |(device, places)| {
            let mut ended = Vec::new();
            for (set, rank, place) in places {
                let start = Instant::now();
                let builder = Clique::builder(&format!("set {set}"), sizes[set]).first_use(first_use());
                let result = builder.local(rank, device).bring_up(backend.clone(), place, limit.within);
                ended.push((set, result, start.elapsed()));
            }
            ended
        },
    );
    settle(count, ended.into_iter().flatten().collect(), limit)
}
