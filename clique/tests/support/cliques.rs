//! Cliques of the software library, with participants that are threads of this process.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use portway_clique::backend::{DataType, ReduceOp};
use portway_clique::rendezvous::{Hub, InProcess};
use portway_clique::software::{Fabric, Software};
use portway_clique::{Clique, CliqueBuilder, CliqueError, FirstUse};

/// How long a bring-up may take that is to succeed: far more than it needs.
pub const PATIENT: Duration = Duration::from_secs(20);

/// Participants, each with its local ranks, on a fabric with a device a rank.
pub struct Job {
    pub fabric: Fabric,
    /// By participant: its place in the rendezvous.
    pub places: Vec<Arc<InProcess>>,
    /// By participant: its process.
    pub processes: Vec<Arc<Software>>,
    /// By participant: its ranks, which are its devices as well.
    pub ranks: Vec<Vec<u32>>,
    pub within: Duration,
    pub first_use: FirstUse,
}

/// How each participant's bring-up ended, and after how long.
pub type Outcome = (Result<Clique, CliqueError>, Duration);

impl Job {
    /// So many local ranks in each participant, numbered one after the other.
    pub fn new(local_ranks: &[u32]) -> Job {
        Job::on(Fabric::new(local_ranks.iter().sum()), local_ranks)
    }

    /// The same on a fabric that has as many devices.
    pub fn on(fabric: Fabric, local_ranks: &[u32]) -> Job {
        let size = local_ranks.iter().sum();
        let hub = Hub::new(local_ranks.len() as u32).unwrap();
        let mut next = 0;
        let ranks = local_ranks.iter().map(|count| {
            next += count;
            (next - count..next).collect()
        });
        Job {
            places: (0..local_ranks.len() as u32).map(|one| Arc::new(hub.join(one).unwrap())).collect(),
            processes: local_ranks.iter().map(|_| Arc::new(Software::new(&fabric))).collect(),
            ranks: ranks.collect(),
            fabric,
            within: PATIENT,
            first_use: first_use(size),
        }
    }

    pub fn size(&self) -> u32 {
        self.ranks.iter().map(|ranks| ranks.len() as u32).sum()
    }

    pub fn builder(&self, participant: usize, attempt: u64) -> CliqueBuilder {
        let builder = Clique::builder("test", self.size()).attempt(attempt).first_use(self.first_use.clone());
        let builder = builder.heartbeat(Duration::from_millis(5)).call_within(Duration::from_secs(10));
        self.ranks[participant].iter().fold(builder, |builder, rank| builder.local(*rank, *rank))
    }

    /// Brings all participants up, each on a thread of its own.
    pub fn bring_up(&self, attempt: u64) -> Vec<Outcome> {
        self.bring_up_with(attempt, |_, builder| Some(builder))
    }

    /// Brings up those participants for which `change` returns what they are to be.
    pub fn bring_up_with(
        &self,
        attempt: u64,
        change: impl Fn(usize, CliqueBuilder) -> Option<CliqueBuilder>,
    ) -> Vec<Outcome> {
        let mut threads = Vec::new();
        for (participant, place) in self.places.iter().cloned().enumerate() {
            let Some(builder) = change(participant, self.builder(participant, attempt)) else { continue };
            let (backend, within) = (self.processes[participant].clone(), self.within);
            let (done, is_done) = sync_channel(1);
            std::thread::spawn(move || {
                let start = Instant::now();
                let result = builder.bring_up(backend, place, within);
                let _ = done.send((result, start.elapsed()));
            });
            threads.push(is_done);
        }
        let limit = self.within + Duration::from_secs(10);
        threads
            .into_iter()
            .map(|is_done| is_done.recv_timeout(limit).expect("a bring-up that returns"))
            .collect()
    }

    /// As `bring_up`, for one that succeeds.
    pub fn up(&self, attempt: u64) -> Vec<Clique> {
        self.bring_up(attempt).into_iter().map(|(result, _)| result.unwrap()).collect()
    }
}

/// What the tests declare.
pub fn first_use(size: u32) -> FirstUse {
    let first = FirstUse::default().all_reduce(DataType::I32, ReduceOp::Sum).all_gather().large_bytes(4096);
    if size > 1 { first.ring(size) } else { first }
}

/// Runs a body for each item, each on a thread of its own; what they return, in order.
pub fn each<T: Send + 'static, R: Send + 'static>(
    limit: Duration,
    items: Vec<T>,
    body: impl Fn(usize, T) -> R + Clone + Send + 'static,
) -> Vec<R> {
    let mut threads = Vec::new();
    for (index, item) in items.into_iter().enumerate() {
        let (done, is_done) = sync_channel(1);
        let body = body.clone();
        let thread = std::thread::spawn(move || {
            let _ = done.send(body(index, item));
        });
        threads.push((thread, is_done));
    }
    let end = Instant::now() + limit;
    let wait =
        |(index, (thread, is_done)): (usize, (std::thread::JoinHandle<()>, std::sync::mpsc::Receiver<R>))| {
            match is_done.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(result) => result,
                Err(RecvTimeoutError::Timeout) => panic!("thread {index} is not done after {limit:?}"),
                Err(RecvTimeoutError::Disconnected) => match thread.join() {
                    Ok(()) => unreachable!("it sends before it returns"),
                    Err(panic) => std::panic::resume_unwind(panic),
                },
            }
        };
    threads.into_iter().enumerate().map(wait).collect()
}

/// Waits until something is true.
pub fn until(limit: Duration, what: &str, mut is_true: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_true() {
        assert!(start.elapsed() < limit, "waited {limit:?} for {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}
