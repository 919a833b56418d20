//! Every two ranks connected, all of them sending at the same time: bytes a second of each pair, and of all together.

use std::fmt::Write;
use std::ops::Range;

use bytemuck::{Pod, Zeroable, bytes_of};
use portway_fifo::cuda::nvrtc::Compiler;
use portway_fifo::cuda::{Context, Driver};
use portway_fifo::{Platform, Region};
use portway_transport_ipc::WordPlace;

use super::NAME;
use super::bandwidth::{puts, windows_of};
use super::gate::{self, Gate};
use super::kernels::{Gpus, Handle, Output, Plan, Side};
use super::mesh::{End, Mesh, Shape};
use super::plain::{Plain, Way};
use crate::failure::Failure;
use crate::gpu;
use crate::rate::over;
use crate::report::{Control, Phase, Reference, Report, Row, counted_first};
use crate::stats::median;

/// Bytes of a put unless the command line says otherwise.
const SIZES: [u64; 2] = [1 << 20, 16 << 20];

/// Bytes of a window at most, unless one put has more.
const WINDOW_BYTES: u64 = 128 << 20;

const TEST: &str = "all-pairs";

/// The most ranks: their blocks have to be on the devices at the same time.
pub const MOST_RANKS: usize = 16;

/// Ranks that are taken unless `--devices` says otherwise.
const DEFAULT_RANKS: u32 = 8;

/// `Route` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Route {
    end: Handle,
    sends: u64,
    receives: u64,
    corrupt: u64,
    unused: u64,
}

const _: () = assert!(size_of::<Route>() == 224);

/// The ranks, and the devices' contexts behind them.
struct Ranks {
    sides: Vec<Side>,
    contexts: Vec<Context>,
}

/// What one run of one shape found.
struct Found {
    /// Of each pair, in the order of the mesh's ends: microseconds of each window.
    pairs: Vec<Vec<f64>>,
    /// How many windows, the first ones, do not count.
    before: usize,
    /// Bytes of a window of a pair.
    bytes: u64,
    wrong: u64,
    /// GB/s of the reference.
    theirs: f64,
}

impl Found {
    /// GB/s of a pair in these windows.
    fn of_pair(&self, pair: usize, windows: &Range<usize>) -> f64 {
        self.rate(&self.pairs[pair][windows.clone()])
    }

    /// GB/s of all together, from the first put to the end of the last pair.
    fn total(&self, windows: &Range<usize>) -> f64 {
        let slowest = |window: usize| self.pairs.iter().map(|us| us[window]).fold(0.0, f64::max);
        self.pairs.len() as f64 * self.rate(&windows.clone().map(slowest).collect::<Vec<_>>())
    }

    fn rate(&self, us: &[f64]) -> f64 {
        median(us).map_or(f64::NAN, |spread| self.bytes as f64 / spread.median / 1e3)
    }

    /// The windows of a phase.
    fn windows(&self, phase: Phase) -> Range<usize> {
        let all = self.pairs.first().map_or(0, Vec::len);
        match phase {
            Phase::Cold => 0..self.before.min(1),
            Phase::Ramp => self.before.min(1)..self.before,
            Phase::Warm => self.before..all,
        }
    }
}

/// Rows for each number of engines and size. Without two GPUs, and with no ranks given, a note instead.
pub fn rows(gpus: &Gpus, report: &mut Report) -> Result<(), Failure> {
    let args = gpus.args;
    let driver = gpus.sides[0].context.driver();
    let failed = |source| Failure::gpu("all pairs", source);
    let ordinals: Vec<u32> = match (&args.gpus[..], gpu::lacks_a_second()) {
        ([], Some(why)) => {
            report.note(NAME, format!("all-pairs: waived: {why}"));
            return Ok(());
        }
        ([], None) => (0..driver.device_count().map_err(failed)?.min(DEFAULT_RANKS)).collect(),
        (given, _) => given.to_vec(),
    };
    let ranks = Ranks::open(driver, &ordinals).map_err(failed)?;
    report.note(NAME, format!("all-pairs = ranks on devices {ordinals:?}, a channel between each two, each way; all send at the same"));
    report.note(NAME, "time, windows of 128 MiB or 128 puts a pair. GB/s of a pair: to the return of its flush; of all: to the last's.");
    report.note(NAME, "proxies = engines of each rank. ref = cuMemcpyPeerAsync in a loop, all pairs at once, a thread and a");
    report.note(NAME, "stream for each");
    let mut proxies: Vec<usize> =
        args.proxies.iter().map(|&n| (n as usize).min(ordinals.len() - 1)).collect();
    proxies.dedup();
    let mut rows = Vec::new();
    for proxies in proxies {
        for size_bytes in args.sizes_or(&SIZES) {
            let runs: Vec<Found> = (0..args.most_runs)
                .map(|_| ranks.run(gpus, proxies, size_bytes, None))
                .collect::<Result<_, _>>()?;
            for phase in [Phase::Warm, Phase::Cold, Phase::Ramp] {
                rows.extend(of_phase(gpus, phase, proxies, size_bytes, &ranks.names(), &runs));
            }
            report.note(NAME, each_pair(proxies, size_bytes, &ranks.names(), &runs));
        }
    }
    report.results.extend(counted_first(rows));
    if args.check() {
        let found = ranks.run(gpus, 1, SIZES[0], Some(0))?;
        report.control(Control::new(NAME, TEST, 1, found.wrong));
    }
    ranks.close()
}

/// GB/s of each pair in a phase, the median of the runs.
fn medians(pairs: usize, phase: Phase, runs: &[Found]) -> Vec<f64> {
    let of_pair = |pair: usize| {
        over(runs, |found| found.of_pair(pair, &found.windows(phase))).map_or(f64::NAN, |s| s.median)
    };
    (0..pairs).map(of_pair).collect()
}

/// The rows of a phase of one shape: all pairs, and the middle and the slowest one. None if there were no such windows.
fn of_phase(
    gpus: &Gpus,
    phase: Phase,
    proxies: usize,
    size_bytes: u64,
    names: &[(usize, usize)],
    runs: &[Found],
) -> Vec<Row> {
    let windows: u64 = runs.iter().map(|found| found.windows(phase).len() as u64).sum();
    if windows == 0 {
        return Vec::new();
    }
    let counts = phase == Phase::Warm;
    let pairs = medians(names.len(), phase, runs);
    let row = |subject: &str, bandwidth_gb_per_s, reference| Row {
        layer: NAME.into(),
        test: TEST.into(),
        subject: subject.into(),
        phase,
        shape: [("pairs".to_owned(), names.len() as u64), ("proxies".to_owned(), proxies as u64)].into(),
        size_bytes,
        runs: runs.len() as u64,
        iterations: windows * puts(size_bytes, WINDOW_BYTES) * names.len() as u64,
        bandwidth_gb_per_s,
        reference,
        wrong: (counts && gpus.args.check()).then(|| runs.iter().map(|found| found.wrong).sum()),
        ..Row::default()
    };
    let reference = |found: &Found| found.total(&found.windows(phase)) / found.theirs;
    let reference = over(runs, reference).filter(|_| counts).map(|ratio| Reference {
        bandwidth_gb_per_s: over(runs, |found| found.theirs),
        ..Reference::new("cuMemcpyPeerAsync", ratio)
    });
    let total = over(runs, |found| found.total(&found.windows(phase))).map(|spread| spread.median);
    let slowest = pairs.iter().copied().fold(f64::INFINITY, f64::min);
    vec![
        row("all together", total, reference),
        row("a pair, median", median(&pairs).map(|spread| spread.median), None),
        row("a pair, slowest", Some(slowest), None),
    ]
}

/// A note with each pair.
fn each_pair(proxies: usize, size_bytes: u64, names: &[(usize, usize)], runs: &[Found]) -> String {
    let mut text = format!("all-pairs, {size_bytes} B, proxies {proxies}, GB/s from>to:");
    for ((from, to), rate) in names.iter().zip(medians(names.len(), Phase::Warm, runs)) {
        let _ = write!(text, " {from}>{to} {rate:.1}");
    }
    text
}

impl Ranks {
    /// Opens each device once, and makes a rank for each of the list.
    fn open(driver: &std::sync::Arc<Driver>, ordinals: &[u32]) -> Result<Self, portway_fifo::Error> {
        let mut devices: Vec<u32> = ordinals.to_vec();
        devices.sort_unstable();
        devices.dedup();
        let contexts =
            devices.iter().map(|&device| Context::new(driver, device)).collect::<Result<Vec<_>, _>>()?;
        let compiler = Compiler::load()?;
        let on = |device: &u32| &contexts[devices.partition_point(|known| known < device)];
        let sides =
            ordinals.iter().map(|device| Side::new(on(device), &compiler)).collect::<Result<_, _>>()?;
        Ok(Ranks { sides, contexts })
    }

    fn close(self) -> Result<(), Failure> {
        let Ranks { sides, contexts } = self;
        drop(sides);
        for context in contexts {
            context.close().map_err(|source| Failure::gpu("closing the GPUs", source))?;
        }
        Ok(())
    }

    /// Who puts to whom, in the order of the mesh's ends.
    fn names(&self) -> Vec<(usize, usize)> {
        let ranks = self.sides.len();
        let peers = |rank| (0..ranks).filter(move |&peer| peer != rank).map(move |peer| (rank, peer));
        (0..ranks).flat_map(peers).collect()
    }

    /// One run of windows, and of plain copies between the same memories.
    fn run(
        &self,
        gpus: &Gpus,
        proxies: usize,
        size_bytes: u64,
        corrupt: Option<u64>,
    ) -> Result<Found, Failure> {
        let name = format!("{NAME} all pairs, {size_bytes} bytes, {proxies} proxies");
        crate::progress::begin(&name);
        let contexts = self.sides.iter().map(|side| &side.context).collect();
        let len_bytes = puts(size_bytes, WINDOW_BYTES) * size_bytes;
        let shape = Shape { contexts, place: WordPlace::default(), len_bytes, proxies };
        let mesh =
            Mesh::new(&shape, gpus.args, gpus.pinning).map_err(|source| Failure::proxy(&name, source))?;
        let found = self.windows(gpus, &name, &mesh, size_bytes, corrupt)?;
        // Engines that still ran would take cores from the plain copies.
        let ends = mesh.stop(&name, gpus.args.deadline())?;
        let found = Found { theirs: self.copies(gpus, &name, &ends, size_bytes)?, ..found };
        drop(ends);
        for context in &self.contexts {
            context.reclaim().map_err(|source| Failure::gpu(&name, source))?;
        }
        Ok(found)
    }

    fn windows(
        &self,
        gpus: &Gpus,
        name: &str,
        mesh: &Mesh,
        size_bytes: u64,
        corrupt: Option<u64>,
    ) -> Result<Found, Failure> {
        let (ranks, puts) = (self.sides.len(), puts(size_bytes, WINDOW_BYTES));
        let (before, counted) = windows_of(gpus.args, puts);
        let count = before + counted;
        let failed = |source| Failure::gpu(name, source);
        let check = gpus.args.check().into();
        let plan = Plan { len_bytes: size_bytes, puts, count, follows: 0, check, corrupt: u64::MAX };
        let mut launched = Vec::new();
        for (rank, side) in self.sides.iter().enumerate() {
            let ends = &mesh.ends[rank * (ranks - 1)..(rank + 1) * (ranks - 1)];
            launched.push(Launched::new(side, ends, count, corrupt.filter(|_| rank == 0)).map_err(failed)?);
        }
        for (side, at) in self.sides.iter().zip(&launched) {
            let routes = at.routes.address();
            let parameters = [bytes_of(&routes), bytes_of(&plan)];
            side.launch(name, "pairs", &parameters, &at.gate, &at.output)?;
        }
        let gates = launched.iter().map(|at| &at.gate);
        let started =
            (1..=count).try_for_each(|nth| gate::open(name, gates.clone(), nth, gpus.args.deadline()));
        // Whatever came of the windows, no kernel may be left when memory goes.
        for side in &self.sides {
            side.stream.wait(gpus.limit()).map_err(failed)?;
        }
        let mut blocks = Vec::new();
        for at in &launched {
            blocks.extend(at.output.read(name)?);
        }
        started?;
        let wrong = blocks.iter().map(|block| block.wrong).sum();
        let pairs = blocks.into_iter().map(|block| block.us).collect();
        Ok(Found { pairs, before: before as usize, bytes: puts * size_bytes, wrong, theirs: f64::NAN })
    }

    fn copies<'m>(
        &'m self,
        gpus: &Gpus,
        name: &str,
        ends: &'m [End],
        size_bytes: u64,
    ) -> Result<f64, Failure> {
        let landing = |end: &End| ends.iter().find(|other| (other.rank, other.peer) == (end.peer, end.rank));
        // Every end has its other.
        let way = |(at, end): (usize, &'m End)| {
            let back = landing(end)?;
            Some(Way {
                contexts: [&self.sides[end.rank].context, &self.sides[end.peer].context],
                source: &end.source,
                destination: &back.destination,
                core: gpus.pinning.producer(1 + at),
            })
        };
        let ways = ends.iter().enumerate().filter_map(way).collect();
        let puts = puts(size_bytes, WINDOW_BYTES);
        let seconds = Plain::new(name, gpus.limit(), ways)?.window_s(size_bytes, puts, false)?;
        Ok((ends.len() as u64 * puts * size_bytes) as f64 / seconds / 1e9)
    }
}

/// A rank's kernel, and what it shares with the host.
struct Launched {
    routes: Region,
    gate: Gate,
    output: Output,
}

impl Launched {
    fn new(
        side: &Side,
        ends: &[End],
        windows: u64,
        corrupt: Option<u64>,
    ) -> Result<Self, portway_fifo::Error> {
        let id = |from: usize, to: usize| (from * MOST_RANKS + to) as u64;
        let route = |(at, end): (usize, &End)| Route {
            end: Handle::of(end),
            sends: id(end.rank, end.peer),
            receives: id(end.peer, end.rank),
            corrupt: corrupt.filter(|_| at == 0).unwrap_or(u64::MAX),
            unused: 0,
        };
        let table: Vec<Route> = ends.iter().enumerate().map(route).collect();
        let (context, blocks) = (&side.context, ends.len() as u64);
        let routes = context.device_memory(size_of_val(&table[..]) as u64)?;
        routes.write(0, bytemuck::cast_slice(&table))?;
        let (gate, output) = (Gate::new(context, blocks)?, Output::new(context, blocks, windows)?);
        Ok(Launched { routes, gate, output })
    }
}
