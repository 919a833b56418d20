//! [`Setting`]: who makes cliques together, again and again.

use std::sync::Arc;
use std::time::Duration;

use portway_clique::backend::{Backend, DataType, ReduceOp};
use portway_clique::rendezvous::{Hub, InProcess};
use portway_clique::{Clique, CliqueError, FirstUse, Member};

use super::{NAME, each};
use crate::failure::Failure;

/// What is timed, in the order in which it happens.
pub const PARTS: [&str; 8] = [
    "gathering",
    "verification",
    "id exchange",
    "initialisation",
    "barrier",
    "first use",
    "bring-up",
    "destroy",
];
/// The places of some of them.
pub const FIRST_USE: usize = 5;
pub const BRING_UP: usize = 6;

/// Microseconds of each of [`PARTS`].
pub type Took = [f64; PARTS.len()];

/// Processes with ranks, the same number each; rank and device have the same number.
pub struct Setting {
    name: String,
    processes: Vec<(Arc<dyn Backend>, Arc<InProcess>)>,
    ranks: u32,
    first_use: FirstUse,
    within: Duration,
    attempts: u64,
}

impl Setting {
    /// A process for each library.
    pub fn new(
        libraries: Vec<Arc<dyn Backend>>,
        ranks: u32,
        large_bytes: usize,
        within: Duration,
    ) -> Result<Self, Failure> {
        let name = format!("{NAME} of {ranks} ranks in {} processes", libraries.len());
        let failed = |source| Failure::clique(&name, source);
        let hub = Hub::new(libraries.len() as u32).map_err(failed)?;
        let join = |(at, library)| Ok((library, Arc::new(hub.join(at as u32)?)));
        let processes =
            libraries.into_iter().enumerate().map(join).collect::<Result<_, _>>().map_err(failed)?;
        let first_use = FirstUse::default().all_reduce(DataType::F32, ReduceOp::Sum).all_gather();
        let first_use = if ranks > 1 { first_use.ring(ranks) } else { first_use };
        let first_use = first_use.large_bytes(large_bytes);
        Ok(Setting { name, processes, ranks, first_use, within, attempts: 0 })
    }

    pub fn processes(&self) -> u64 {
        self.processes.len() as u64
    }

    pub fn ranks(&self) -> u64 {
        self.ranks.into()
    }

    /// Makes a clique, uses it and closes it. Returns what that took, and whether a rank has found a wrong sum. If told
    /// so, the last rank puts in something else than the others expect.
    pub fn once(&mut self, corrupt: bool) -> Result<(Took, bool), Failure> {
        let (name, ranks, within) = (self.name.clone(), self.ranks, self.within);
        let brought = self.bring_up(|_| ranks)?;
        let mut cliques = brought
            .into_iter()
            .collect::<Result<Vec<_>, _>>()
            .map_err(|source| Failure::clique(&name, source))?;
        let mut took = [0.0; PARTS.len()];
        let mut note = |part: usize, time: Duration| took[part] = f64::max(took[part], us(time));
        for clique in &cliques {
            let all = clique.durations();
            let parts = [
                all.gathering,
                all.verification,
                all.id_exchange,
                all.initialisation,
                all.barrier,
                all.first_use,
                all.total,
            ];
            parts.into_iter().enumerate().for_each(|(part, time)| note(part, time));
        }
        let members: Vec<Member> = cliques.iter_mut().flat_map(Clique::members).collect();
        let spoilt = corrupt.then(|| ranks - 1);
        let wrong = each(&name, members, |member| finds_wrong(member, spoilt, within))?;
        for closed in each(&name, cliques, |clique| clique.close(within))? {
            note(PARTS.len() - 1, closed.destroy);
        }
        Ok((took, wrong.contains(&true)))
    }

    /// Whether a size that is one too large in the last process is found by all, before the library is asked.
    pub fn finds_a_wrong_size(&mut self) -> Result<bool, Failure> {
        let (last, ranks) = (self.processes.len() - 1, self.ranks);
        let brought = self.bring_up(|process| if process == last { ranks + 1 } else { ranks })?;
        Ok(brought.iter().all(|result| matches!(result, Err(CliqueError::Disagreement(_)))))
    }

    /// Whether the first use finds that a result is wrong.
    pub fn finds_a_wrong_result(&mut self) -> Result<bool, Failure> {
        let ranks = self.ranks;
        let says = |result: &Result<Clique, CliqueError>| {
            result.as_ref().err().is_some_and(|error| error.to_string().contains("of the result is"))
        };
        Ok(self.bring_up(|_| ranks)?.iter().all(says))
    }

    /// All processes bring their parts up, with the size that each of them says.
    fn bring_up(
        &mut self,
        size_of: impl Fn(usize) -> u32 + Sync,
    ) -> Result<Vec<Result<Clique, CliqueError>>, Failure> {
        self.attempts += 1;
        let a_process = self.ranks / self.processes.len() as u32;
        each(&self.name, self.processes.iter().enumerate(), |(process, (library, place))| {
            let builder = Clique::builder("bench", size_of(process)).attempt(self.attempts);
            let first = process as u32 * a_process;
            let builder = (first..first + a_process).fold(builder, |builder, rank| builder.local(rank, rank));
            let builder = builder.first_use(self.first_use.clone());
            Ok(builder.bring_up(library.clone(), place.clone(), self.within))
        })
    }
}

/// An all-reduce by one rank: whether it has not found the sum.
fn finds_wrong(mut member: Member, spoilt: Option<u32>, within: Duration) -> Result<bool, CliqueError> {
    const COUNT: usize = 1024;
    let own = |rank: u32| rank as f32 + 1.0;
    let expected: f32 = (0..member.size()).map(own).sum();
    let added = if spoilt == Some(member.rank()) { 1.0 } else { 0.0 };
    let mut buffers = member.buffers(COUNT * 4)?;
    buffers.write(&(own(member.rank()) + added).to_le_bytes().repeat(COUNT))?;
    // Nobody allocates any more when the first kernel begins to wait for the others.
    member.barrier()?;
    member.all_reduce(&mut buffers, COUNT, DataType::F32, ReduceOp::Sum)?;
    member.wait(&mut buffers, within)?;
    let mut seen = vec![0; COUNT * 4];
    buffers.read(&mut seen)?;
    // Nor frees before the last one has ended.
    member.barrier()?;
    Ok(seen.chunks_exact(4).any(|word| word != expected.to_le_bytes()))
}

pub fn us(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}
