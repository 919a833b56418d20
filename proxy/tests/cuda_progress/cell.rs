//! One cell of the matrix: an application's state, a kernel that needs the proxy meanwhile, and how the proxy tells it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytemuck::bytes_of;
use portway_fifo::cuda::{Function, Stream, nvrtc::Compiler};
use portway_fifo::{Platform, Words};
use portway_proxy::transport::{Binding, Close, Completion, Lane, Op, Port, Submit};
use portway_proxy::{CudaFlushStream, Stop, TransportError};

use crate::application::{Application, Functions, Prepared, State};
use crate::cuda_support::{Device, FINISHED, GO, PATIENCE, Pair, PairConfig, RUNNING, Report};

/// How the kernel learns of the proxy's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Through pinned memory alone, as our proxy does; the tail flusher runs beside it.
    Pinned,
    /// The control: through a copy of the tail that the thread which steps the engine makes before it publishes.
    Copied,
}

impl Path {
    pub fn name(self) -> &'static str {
        match self {
            Path::Pinned => "pinned",
            Path::Copied => "copied",
        }
    }

    /// How long each of the kernel's calls waits. In the control they have to end soon.
    fn timeout(self) -> Duration {
        match self {
            Path::Pinned => Duration::from_secs(5),
            Path::Copied => Duration::from_millis(300),
        }
    }

    /// How often the kernel needs the proxy.
    fn rounds(self) -> u64 {
        match self {
            Path::Pinned => 8,
            Path::Copied => 4,
        }
    }
}

/// How long the kernel waits for the host's go.
const GATE: Duration = Duration::from_secs(30);

/// What all cells of a process use.
pub struct Rig {
    device: Device,
    functions: Arc<Functions>,
    /// A cubin with one kernel, loaded afresh for each first launch.
    unloaded: Vec<u8>,
    /// A stream that the legacy stream waits for.
    blocking: Stream,
    kernel: Function,
    nothing: Function,
}

/// What came of a cell.
pub struct Outcome {
    pub ok: bool,
    pub summary: String,
    pub detail: String,
}

impl Rig {
    pub fn new(device: Device) -> Self {
        let functions = Functions::load();
        let capability = device.context.attributes().compute_capability;
        let source = "extern \"C\" __global__ void unloaded() {}";
        let unloaded = Compiler::load().unwrap().compile("unloaded.cu", source, capability, &[]).unwrap();
        let blocking = {
            let _current = device.context.current().unwrap();
            let mut raw = std::ptr::null_mut();
            // SAFETY: `raw` outlives the call.
            assert_eq!(unsafe { (functions.cuStreamCreate)(&mut raw, 0) }, 0);
            // SAFETY: the stream is never destroyed.
            unsafe { Stream::from_raw(&device.context, raw, Arc::new(())) }
        };
        let (kernel, nothing) = (device.kernel("needs_proxy"), device.kernel("nothing"));
        Rig { device, functions, unloaded, blocking, kernel, nothing }
    }

    pub fn device_name(&self) -> String {
        self.device.name()
    }

    pub fn run(&self, path: Path, state: State, runs: u64) -> Outcome {
        let outcome = match path {
            Path::Pinned => self.pinned(state, runs),
            Path::Copied => self.copied(state),
        };
        self.device.context.reclaim().unwrap();
        outcome
    }

    fn pair_config(&self, path: Path) -> PairConfig {
        let fifo = portway_fifo::Config {
            slots: 512,
            timeout: path.timeout(),
            replica: path == Path::Pinned,
            ..Default::default()
        };
        PairConfig { fifo, ..PairConfig::default() }
    }

    fn pinned(&self, state: State, runs: u64) -> Outcome {
        let stream = CudaFlushStream::new(&self.device.context).unwrap();
        let config = PairConfig { flush_stream: Some(Box::new(stream)), ..self.pair_config(Path::Pinned) };
        let pair = Pair::new(&self.device.context, config);
        let report = Report::new(&self.device);
        let (mut passed, mut stuck, mut detail) = (0, 0, String::new());
        for _ in 0..runs {
            match self.once(&pair, &report, Path::Pinned, state, 0) {
                Ok(was_stuck) => {
                    passed += 1;
                    stuck += u64::from(was_stuck);
                }
                Err(error) => {
                    detail = error;
                    break;
                }
            }
        }
        let stopped = pair.proxy.stop(Stop::Drain { within: PATIENCE });
        let ended = stopped.drained && stopped.quiesced && stopped.quarantined.is_empty();
        if !ended && detail.is_empty() {
            detail = format!("the proxy did not stop as it should: {stopped:?}");
        }
        if detail.is_empty() {
            detail = format!("application inside its call in {stuck} of {runs}");
        }
        let summary = format!("{passed}/{runs}");
        Outcome { ok: passed == runs && ended, summary, detail }
    }

    /// Twice, each time with a proxy of its own, since a kernel that gave up leaves its channel in the middle.
    fn copied(&self, state: State) -> Outcome {
        let mut outcomes = Vec::new();
        let mut detail = String::new();
        for _ in 0..2 {
            let copied = self.device.context.device_memory(8).unwrap();
            let seen = Arc::new(Seen::default());
            let copies = Copies {
                functions: self.functions.clone(),
                context: self.device.context.raw() as usize,
                stream: Stream::new(&self.device.context).unwrap(),
                staging: self.device.words(64),
                target: copied.address(),
                ops: 0,
                seen: seen.clone(),
            };
            let config = self.pair_config(Path::Copied);
            let pair =
                Pair::with_port(&self.device.context, config, |port| Box::new(Copying { port, copies }));
            let report = Report::new(&self.device);
            let result = self.once(&pair, &report, Path::Copied, state, copied.address());
            // The kernel is gone, so whatever it blocked goes on.
            let stopped = pair.proxy.stop(Stop::Drain { within: Duration::from_secs(5) });
            let longest = Duration::from_nanos(seen.longest_ns.load(Ordering::Acquire));
            let outcome = match &result {
                Ok(_) => "runs",
                Err(_) if report.get(FINISHED) == 0 => "lost",
                Err(_) if longest >= Path::Copied.timeout() / 2 => "blocks",
                Err(_) => "never runs",
            };
            if let Err(error) = result {
                let status = seen.status.load(Ordering::Acquire);
                let drained = stopped.drained;
                detail =
                    format!("{error}; longest copy call {longest:?}, status {status}, drained {drained}");
            }
            outcomes.push(outcome);
        }
        let ok = !outcomes.contains(&"lost");
        outcomes.dedup();
        Outcome { ok, summary: outcomes.join(" or "), detail }
    }

    /// One kernel that needs the proxy while the application is in its state. Whether the application was inside its
    /// call all the time, or what went wrong.
    fn once(
        &self,
        pair: &Pair,
        report: &Report,
        path: Path,
        state: State,
        copied: u64,
    ) -> Result<bool, String> {
        let context = &self.device.context;
        let stream = if state == State::LegacyCopy { &self.blocking } else { &self.device.stream };
        let prepared = Prepared::new(&self.functions, context, state, stream, &self.nothing, &self.unloaded);
        report.clear();
        let (a, b) = (pair.a.handle(), pair.b.handle());
        let [source, destination] = pair.addresses();
        let (gate_ns, report_at) = (GATE.as_nanos() as u64, report.0.region().address());
        let numbers = [source, destination, copied, 0, path.rounds(), 0, gate_ns, report_at];
        let mut parameters = vec![bytes_of(&a), bytes_of(&b)];
        parameters.extend(numbers.iter().map(bytes_of));
        // SAFETY: the kernel takes these parameters, and its memory lives until the stream is done, or longer.
        unsafe { self.kernel.launch(stream, [1; 3], [1; 3], 0, &parameters) }
            .map_err(|error| error.to_string())?;
        come("the kernel", report, RUNNING)?;
        // From here to the kernel's end this thread makes no call of the driver.
        let application = Application::start(prepared);
        let prepared = application.prepared.clone();
        let was_stuck = application.is_stuck() && report.get(FINISHED) == 0;
        report.set(GO, 1);
        come("the kernel's end", report, FINISHED)?;
        let ended = application.end();
        stream.wait(PATIENCE).map_err(|error| error.to_string())?;
        prepared.clean();
        if !report.succeeded(path.rounds()) {
            return Err(report.text());
        }
        ended.map(|()| was_stuck)
    }
}

/// Waits until the kernel has set a word.
fn come(what: &str, report: &Report, word: usize) -> Result<(), String> {
    let start = Instant::now();
    while report.get(word) != 1 {
        if start.elapsed() > PATIENCE {
            return Err(format!("waited {PATIENCE:?} for {what}: {}", report.text()));
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    Ok(())
}

/// What the control's copies came to.
#[derive(Debug, Default)]
struct Seen {
    longest_ns: AtomicU64,
    /// The last status that was not 0.
    status: AtomicI64,
}

/// Copies a count of ops to device memory, from page-locked memory, on a stream of its own.
struct Copies {
    functions: Arc<Functions>,
    context: usize,
    stream: Stream,
    staging: Words,
    target: u64,
    ops: u64,
    seen: Arc<Seen>,
}

impl Copies {
    /// On the engine's thread.
    fn copy(&mut self) {
        if self.ops == 0 {
            // SAFETY: the context lives as long as the stream.
            unsafe { (self.functions.cuCtxSetCurrent)(self.context as *mut _) };
        }
        let slot = self.ops % 64;
        self.ops += 1;
        self.staging[slot as usize].store(self.ops, Ordering::Release);
        let from = self.staging.region().address() + slot * 8;
        let start = Instant::now();
        // SAFETY: both words live as long as `self`, whose memory stays mapped until the device has finished.
        let status = unsafe {
            (self.functions.cuMemcpyHtoDAsync_v2)(self.target, from as *const _, 8, self.stream.raw())
        };
        self.seen.longest_ns.fetch_max(start.elapsed().as_nanos() as u64, Ordering::AcqRel);
        if status != 0 {
            self.seen.status.store(i64::from(status), Ordering::Release);
        }
    }
}

/// A port whose every submit first copies the tail as it will be.
struct Copying {
    port: Box<dyn Port>,
    copies: Copies,
}

impl fmt::Debug for Copying {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Copying({:?}, {} ops)", self.port, self.copies.ops)
    }
}

impl Port for Copying {
    fn bind(&mut self, binding: &Binding) -> Result<Lane, TransportError> {
        self.port.bind(binding)
    }

    fn submit(&mut self, op: &Op) -> Result<Submit, TransportError> {
        self.copies.copy();
        self.port.submit(op)
    }

    fn kick(&mut self) -> Result<(), TransportError> {
        self.port.kick()
    }

    fn poll(&mut self, completions: &mut [Completion]) -> Result<usize, TransportError> {
        self.port.poll(completions)
    }

    fn close(&mut self) -> Result<Close, TransportError> {
        self.port.close()
    }
}
