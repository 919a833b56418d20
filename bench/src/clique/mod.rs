//! The `clique` layer: what it takes until communicators can be used, over NCCL where it is, and over a library in
//! software everywhere.

mod barrier;
mod bring_up;
mod nccl;
mod rendezvous;
mod rows;
mod software;

use portway_clique::CliqueError;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::args::Args;
use crate::failure::Failure;
use crate::layer::Layer;
use crate::report::{Control, Report, TimeUnit};

pub use nccl::lacks;

/// See the module.
pub const LAYER: Layer = Layer {
    name: NAME,
    measures: "making communicators: id exchange, verification, initialisation, barrier, first use, destroy",
    needs: "nothing",
    find: |_| Ok(run),
    flags: &["histogram", "unsorted"],
    transport: "",
    unit: TimeUnit::Microseconds,
};

const NAME: &str = "clique";

const NOTES: [&str; 10] = [
    "times are whole, from begin to end, of the participant that took longest, part by part; processes are played",
    "by threads that meet in process; no thread is pinned. bring-up = all parts but destroy, with what lies between",
    "first use = all-reduce, all-gather and a ring of sends, small and large, with checked results; each clique is",
    "then used by all ranks, and wrong counts the cliques in which a rank did not find the sum",
    "cold = the first clique over a library, warm = the following ones",
    "in software: the library is our own and moves next to nothing, so this is what our own part takes",
    "barrier = one pass of 8 local threads, of the thread that waits longest in the median; at most 50 us is the aim;",
    "cold = the first pass of each run, ramp = the others that do not count",
    "rendezvous = from the first to come until all of 64 have heard all, each a thread with a connection of its own",
    "to the store, in this process; at most 1 s is the aim for processes",
];

fn run(args: &Args, report: &mut Report) -> Result<(), Failure> {
    unpin(&report.machine.cores);
    for note in NOTES {
        report.note(NAME, note);
    }
    software::rows(args, report)?;
    barrier::rows(args, report)?;
    rendezvous::row(args, report)?;
    if args.check() {
        report.control(Control::new(NAME, software::TEST, 3, software::found()?));
        report.control(Control::new(NAME, barrier::TEST, 1, barrier::found(args)?));
        report.control(Control::new(NAME, rendezvous::TEST, 1, rendezvous::found(args)?));
    }
    nccl::rows(args, report)
}

/// Threads begin where the one runs that starts them, and an earlier layer may have pinned this one.
fn unpin(cores: &[usize]) {
    let mut set = CpuSet::new();
    cores.iter().for_each(|core| set.set(*core));
    if let Err(error) = sched_setaffinity(None, &set) {
        eprintln!("portway-bench: threads stay where an earlier layer has pinned them: {error}");
    }
}

/// Runs a body for each item, on a thread of its own. What a body waits for has a deadline.
fn each<T: Send, R: Send>(
    name: &str,
    items: impl IntoIterator<Item = T>,
    body: impl Fn(T) -> Result<R, CliqueError> + Sync,
) -> Result<Vec<R>, Failure> {
    let body = &body;
    std::thread::scope(|scope| {
        let threads: Vec<_> = items.into_iter().map(|item| scope.spawn(move || body(item))).collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(result) => result.map_err(|source| Failure::clique(name, source)),
            Err(_) => Err(Failure::Panicked { measurement: name.into() }),
        });
        joined.collect()
    })
}
