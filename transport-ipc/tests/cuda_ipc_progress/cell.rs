//! One cell: an application's state, a kernel that needs a put meanwhile, and another that needs an unrelated channel.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytemuck::bytes_of;
use portway_fifo::cuda::{Context, Function, Kind, Stream, nvrtc::Compiler};
use portway_fifo::{Fifo, Platform, Region};
use portway_proxy::transport::{LocalMemory, Port, RemoteMemory, Transport};
use portway_proxy::{
    ChannelConfig, ChannelError, Config, Engine, Idle, Loopback, PortChannel, Proxy, RunConfig, Stop,
    loopback,
};
use portway_transport_ipc::{self as ipc, Cause, Error, Ipc};

use crate::Setting;
use crate::application::{Application, Functions, Prepared, State};
use crate::cuda_support::{self, Device, FINISHED, GO, PATIENCE, RUNNING, Report};
use crate::inline::Inline;

/// Who submits the copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// The transport's executor.
    Executor,
    /// The control: the engine's own thread.
    Engine,
}

impl Who {
    pub fn name(self) -> &'static str {
        match self {
            Who::Executor => "executor",
            Who::Engine => "control: engine",
        }
    }
}

/// When a port whose copies do not run fails.
const STALL: Duration = Duration::from_millis(700);
/// How long each of the kernel's calls waits: longer than that; and in the control, where nothing else ends the wait.
const CALL: Duration = Duration::from_secs(5);
const CALL_OF_CONTROL: Duration = Duration::from_millis(700);
/// How long the put has been under way when the unrelated channel is asked.
const HEAD_START: Duration = Duration::from_millis(50);
/// A channel that takes longer stands still.
const SERVED: Duration = Duration::from_millis(300);
/// How long kernels wait for the host's go.
const GATE: Duration = Duration::from_secs(30);
/// How often each kernel needs the proxy.
const ROUNDS: u64 = 8;
const LEN_BYTES: u64 = 4096;

/// What came of a cell.
pub struct Outcome {
    pub ok: bool,
    pub summary: String,
    pub detail: String,
}

/// What came of a run.
struct Run {
    /// How the kernel's channel ended, if it did.
    ended: Option<ChannelError>,
    /// How long the unrelated channel took.
    unrelated: Duration,
    /// Whether the kernel had not got its puts by then.
    put_waited: bool,
}

/// What all cells of a process use.
pub struct Rig {
    device: Device,
    /// Where the puts go.
    far: Context,
    functions: Arc<Functions>,
    /// A cubin with one kernel, loaded afresh for each first launch.
    unloaded: Vec<u8>,
    /// A stream that the legacy stream waits for, and one for the second kernel.
    blocking: Stream,
    second: Stream,
    kernel: Function,
    nothing: Function,
    transports: [Ipc; 2],
}

/// A kernel's two channels, and where its data is.
struct Ends {
    a: PortChannel,
    b: PortChannel,
    source: Region,
    destination: Region,
    /// What has to be released.
    memories: Vec<(Ipc, LocalMemory)>,
}

impl Rig {
    pub fn new(device: Device) -> Self {
        let functions = Functions::load();
        let context = &device.context;
        let capability = context.attributes().compute_capability;
        let source = "extern \"C\" __global__ void unloaded() {}";
        let unloaded = Compiler::load().unwrap().compile("unloaded.cu", source, capability, &[]).unwrap();
        let blocking = {
            let _current = context.current().unwrap();
            let mut raw = std::ptr::null_mut();
            // SAFETY: `raw` outlives the call.
            assert_eq!(unsafe { (functions.cuStreamCreate)(&mut raw, 0) }, 0);
            // SAFETY: the stream is never destroyed.
            unsafe { Stream::from_raw(context, raw, Arc::new(())) }
        };
        let two = context.driver().device_count().unwrap() > 1 && context.can_reach(1).unwrap();
        let far = if two { Context::new(context.driver(), 1).unwrap() } else { context.clone() };
        let config = ipc::Config { stall_limit: STALL, ..ipc::Config::default() };
        let near = Ipc::open(context, config).unwrap();
        let transports = [near.clone(), near.beside(&far).unwrap()];
        let (kernel, nothing) = (device.kernel("needs_proxy"), device.kernel("nothing"));
        let second = Stream::new(context).unwrap();
        Rig { device, far, functions, unloaded, blocking, second, kernel, nothing, transports }
    }

    /// Runs a cell: each run has a proxy and ports of its own, over the same transports.
    pub fn run(&self, setting: Setting, who: Who, state: State, runs: u64) -> Outcome {
        let runs = if who == Who::Engine { 2 } else { runs };
        let (mut passed, mut named, mut slowest, mut causes) = (0, 0, Duration::ZERO, Vec::<String>::new());
        for run in 0..runs {
            let summary = format!("{passed} passed and {named} named of {runs}");
            let failed =
                |detail: String| Outcome { ok: false, summary, detail: format!("run {run}: {detail}") };
            let result = match self.once(who, Some(state)) {
                Ok(result) => result,
                Err(error) => return failed(error),
            };
            if who == Who::Engine {
                // It shows only where the engine's thread is held.
                let held = state == State::Free;
                if held != (result.unrelated > SERVED) {
                    return failed(format!("the unrelated channel took {:?}", result.unrelated));
                }
                (passed, slowest) = (passed + 1, slowest.max(result.unrelated));
                continue;
            }
            if result.unrelated > SERVED {
                return failed(format!("the unrelated channel took {:?}", result.unrelated));
            }
            slowest = slowest.max(result.unrelated);
            match &result.ended {
                None => passed += 1,
                Some(error) => match stall(error) {
                    Some(cause) if setting.may_stall(state) && result.put_waited => {
                        named += 1;
                        if !causes.contains(&cause) {
                            causes.push(cause);
                        }
                        // The process goes on, and a new channel works.
                        match self.once(who, None) {
                            Ok(Run { ended: None, .. }) => {}
                            Ok(Run { ended: Some(error), .. }) => return failed(format!("then: {error}")),
                            Err(error) => return failed(format!("then: {error}")),
                        }
                    }
                    _ => return failed(format!("{error:?}")),
                },
            }
        }
        let held = self.transports[0].quarantined();
        let summary = match who {
            Who::Engine => format!("the unrelated channel took up to {slowest:?}"),
            Who::Executor => format!("{passed} passed, {named} named"),
        };
        let detail = format!("unrelated channel: at most {slowest:?}; {}", causes.join("; "));
        Outcome { ok: held.executors == 0, summary, detail }
    }

    /// One kernel that needs a put while the application is in a state, and one that needs another channel.
    fn once(&self, who: Who, state: Option<State>) -> Result<Run, String> {
        let text = |error: portway_proxy::Error| error.to_string();
        let context = &self.device.context;
        let reports = [Report::new(&self.device), Report::new(&self.device)];
        reports.iter().for_each(Report::clear);
        let (proxy, put, other) = self.wire(who).map_err(text)?;
        let stream = if state == Some(State::LegacyCopy) { &self.blocking } else { &self.device.stream };
        let prepared = state.map(|state| {
            Prepared::new(&self.functions, context, state, stream, &self.nothing, &self.unloaded)
        });
        for (ends, report, stream) in [(&put, &reports[0], stream), (&other, &reports[1], &self.second)] {
            self.launch(ends, report, stream)?;
        }
        for report in &reports {
            come("a kernel", report, RUNNING)?;
        }
        // From here to the first kernel's end this thread makes no call of the driver.
        let application = prepared.map(Application::start);
        reports[0].set(GO, 1);
        if application.is_some() {
            std::thread::sleep(HEAD_START);
        }
        let start = Instant::now();
        reports[1].set(GO, 1);
        come("the end of the unrelated kernel", &reports[1], FINISHED)?;
        let unrelated = start.elapsed();
        let put_waited = reports[0].get(FINISHED) == 0;
        come("the kernel's end", &reports[0], FINISHED)?;
        if let Some(application) = application {
            let prepared = application.prepared.clone();
            application.end()?;
            prepared.clean();
        }
        stream.wait(PATIENCE).map_err(|error| error.to_string())?;
        self.second.wait(PATIENCE).map_err(|error| error.to_string())?;
        let ended = put.a.error();
        let stopped = proxy.stop(Stop::Drain { within: Duration::from_secs(10) });
        if who == Who::Executor {
            if !reports[1].succeeded(ROUNDS) {
                return Err(format!("the unrelated kernel: {}", reports[1].text()));
            }
            if ended.is_none() && !reports[0].succeeded(ROUNDS) {
                return Err(reports[0].text());
            }
            if !stopped.quiesced || !stopped.quarantined.is_empty() {
                return Err(format!("the proxy did not stop as it should: {stopped:?}"));
            }
        }
        for (transport, memory) in &put.memories {
            // In the control a port of ours may be closing still.
            let released = transport.release(memory).map_err(|error| error.to_string());
            if who == Who::Executor {
                released?;
            }
        }
        drop((put, other));
        context.reclaim().map_err(|error| error.to_string())?;
        Ok(Run { ended, unrelated, put_waited })
    }

    fn launch(&self, ends: &Ends, report: &Report, stream: &Stream) -> Result<(), String> {
        let (a, b) = (ends.a.handle(), ends.b.handle());
        let (source, destination) = (ends.source.address(), ends.destination.address());
        let (gate_ns, report_at) = (GATE.as_nanos() as u64, report.0.region().address());
        let numbers = [source, destination, 0, 0, ROUNDS, 0, gate_ns, report_at];
        let mut parameters = vec![bytes_of(&a), bytes_of(&b)];
        parameters.extend(numbers.iter().map(bytes_of));
        // SAFETY: the kernel takes these parameters, and its memory lives until the stream is done, or longer.
        unsafe { self.kernel.launch(stream, [1; 3], [1; 3], 0, &parameters) }
            .map_err(|error| error.to_string())
    }

    /// An engine with the channel under test and an unrelated one, which needs no driver.
    fn wire(&self, who: Who) -> Result<(Proxy, Ends, Ends), portway_proxy::Error> {
        let context = &self.device.context;
        let mut engine =
            Engine::new(context, Config { deadline: Duration::from_secs(20), ..Config::default() })?;
        let [near, far] = &self.transports;
        let memory = |transport: &Ipc, context: &Context| {
            let register = || transport.register(&context.allocate(Kind::Vmm, LEN_BYTES)?);
            Ok::<_, portway_proxy::TransportError>([register()?, register()?, transport.signal_word()?])
        };
        let (a, b) = (memory(near, context)?, memory(far, &self.far)?);
        // The kernel looks at what has arrived.
        context.reach(&self.far, &b[1].region)?;
        let [mut a_port, b_port] = connect_ipc(near, far)?;
        let call = match who {
            Who::Executor => CALL,
            Who::Engine => {
                a_port = Box::new(self.inline(&a[0], &b[1], &b[2])?);
                CALL_OF_CONTROL
            }
        };
        let mut put = channels(context, &mut engine, [near, far], [a_port, b_port], [&a, &b], call)?;
        put.memories = a.iter().map(|memory| (near.clone(), memory.clone())).collect();
        put.memories.extend(b.iter().map(|memory| (far.clone(), memory.clone())));
        let loopback = Loopback::new(loopback::Config::default())?;
        let pinned = || {
            let register = |len| loopback.register(&context.host_memory(len)?);
            Ok::<_, portway_proxy::TransportError>([register(LEN_BYTES)?, register(LEN_BYTES)?, register(8)?])
        };
        let (c, d) = (pinned()?, pinned()?);
        let ports = cuda_support::connect(&loopback, &loopback);
        let other = channels(context, &mut engine, [&loopback, &loopback], ports, [&c, &d], CALL)?;
        let proxy = Proxy::start(engine, RunConfig { idle: Idle::Spin, ..RunConfig::default() })?;
        Ok((proxy, put, other))
    }

    fn inline(
        &self,
        source: &LocalMemory,
        destination: &LocalMemory,
        word: &LocalMemory,
    ) -> Result<Inline, portway_fifo::Error> {
        let stream = Stream::new(&self.device.context)?;
        stream.prime()?;
        stream.wait(PATIENCE)?;
        Ok(Inline {
            stream,
            source: source.region.address(),
            destination: destination.region.address(),
            word: word.region.address(),
            done: self.device.words(1),
            under_way: VecDeque::new(),
            submitted: 0,
            completed: 0,
        })
    }
}

/// The two ports of a connection.
fn connect_ipc(near: &Ipc, far: &Ipc) -> Result<[Box<dyn Port>; 2], portway_proxy::TransportError> {
    let ((a_end, a_bytes), (b_end, b_bytes)) = (near.endpoint()?, far.endpoint()?);
    Ok([a_end.connect(&b_bytes, PATIENCE)?, b_end.connect(&a_bytes, PATIENCE)?])
}

/// A channel each way, each in a FIFO of its own. Of each end: source, destination, signal word.
fn channels(
    context: &Context,
    engine: &mut Engine,
    transports: [&dyn Transport; 2],
    ports: [Box<dyn Port>; 2],
    memories: [&[LocalMemory; 3]; 2],
    call: Duration,
) -> Result<Ends, portway_proxy::Error> {
    let mut made = Vec::new();
    for (here, port) in ports.into_iter().enumerate() {
        let (mine, theirs) = (memories[here], memories[1 - here]);
        let import = |memory: &LocalMemory| -> Result<RemoteMemory, portway_proxy::TransportError> {
            transports[here].import(&transports[1 - here].export(memory)?)
        };
        let config = portway_fifo::Config { timeout: call, ..portway_fifo::Config::default() };
        let (fifo, consumer) = Fifo::new(context, config)?;
        let (fifo, port) = (engine.add_fifo(fifo, consumer)?, engine.add_port(port)?);
        made.push(engine.add_channel(ChannelConfig {
            fifo,
            port,
            source: mine[0].clone(),
            destination: import(&theirs[1])?,
            outbound: import(&theirs[2])?,
            inbound: mine[2].clone(),
        })?);
    }
    let (source, destination) = (memories[0][0].region.clone(), memories[1][1].region.clone());
    let b = made.pop().expect("two channels");
    let a = made.pop().expect("two channels");
    Ok(Ends { a, b, source, destination, memories: Vec::new() })
}

/// What a stall of an executor says, if that is why a channel has ended.
fn stall(error: &ChannelError) -> Option<String> {
    let ChannelError::Port { source, .. } = error else { return None };
    match Error::of(source) {
        Some(Error::Stalled { place, causes, .. }) if *causes != [Cause::Device] => {
            let causes: Vec<String> = causes.iter().map(Cause::to_string).collect();
            Some(format!("stalled {place}, likely: {}", causes.join("; or ")))
        }
        _ => None,
    }
}

/// Waits until a kernel has set a word.
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
