//! What the tests on a real device share: the device with its kernels, and two ends in pinned memory.
//!
//! Where there is no device, a test prints `waived:` and passes; with `PORTWAY_REQUIRE_CUDA=1` it fails instead. The
//! kernels are compiled at run time, so NVRTC must be there too.
#![allow(dead_code, reason = "each test file uses its part")]

use std::io::Write;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use portway_fifo::cuda::nvrtc::Compiler;
use portway_fifo::cuda::{Context, Driver, Function, Module, Stream};
use portway_fifo::{Error, Fifo, Platform, Region, Words};
use portway_proxy::transport::{LocalMemory, Port, RemoteMemory, Transport};
use portway_proxy::{
    ChannelConfig, Config, Engine, FifoId, FlushStream, Idle, Loopback, PortChannel, PortId, Proxy,
    RunConfig, header, loopback,
};

/// How long a test waits for what has to happen. Everything on the device gives up sooner.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A device with the kernels of `kernels.cu`.
pub struct Device {
    pub context: Context,
    pub module: Module,
    pub stream: Stream,
}

impl Device {
    /// The first device, or `None` after a line that says why `test` is waived.
    pub fn open(test: &str) -> Option<Self> {
        static KERNELS: OnceLock<Vec<u8>> = OnceLock::new();
        let both = Driver::load().and_then(|driver| Ok((driver, Compiler::load()?)));
        let (driver, compiler) = match both {
            Ok(both) => both,
            Err(lacking @ (Error::NoLibrary { .. } | Error::Driver { call: "cuInit", status: 100, .. })) => {
                let required = std::env::var("PORTWAY_REQUIRE_CUDA");
                assert_ne!(required.as_deref(), Ok("1"), "PORTWAY_REQUIRE_CUDA=1, and {lacking}");
                // Not through `eprintln!`, which the test harness keeps to itself.
                let _ = writeln!(std::io::stderr(), "waived: {test}: {lacking}");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let context = Context::new(&driver, 0).unwrap();
        let cubin = KERNELS.get_or_init(|| {
            let source = [header::PORT_CHANNEL, include_str!("../cuda_device/kernels.cu")].concat();
            let capability = context.attributes().compute_capability;
            compiler.compile("kernels.cu", &source, capability, &[]).unwrap_or_else(|e| panic!("{e}"))
        });
        // SAFETY: the image comes from the compiler.
        let module = unsafe { Module::load(&context, cubin) }.unwrap();
        let stream = Stream::new(&context).unwrap();
        Some(Device { context, module, stream })
    }

    /// A kernel, loaded.
    pub fn kernel(&self, name: &str) -> Function {
        self.module.function(name).unwrap()
    }

    /// Zeroed page-locked words.
    pub fn words(&self, len: u64) -> Words {
        Words::new(self.context.host_memory(len * 8).unwrap()).unwrap()
    }

    /// The name of the device and the version of its driver.
    pub fn name(&self) -> String {
        format!("{}, {:?}", self.context.attributes().name, self.context.driver())
    }
}

/// What the kernels count: `Tally` of `kernels.cu`, in device memory.
pub struct Tally(Region);

impl Tally {
    pub fn new(device: &Device) -> Self {
        Tally(device.context.device_memory(32).unwrap())
    }

    pub fn address(&self) -> u64 {
        self.0.address()
    }

    /// Calls that succeeded, calls that failed, the statuses that were returned, and misread bytes.
    pub fn read(&self) -> (u64, u64, Vec<u32>, u64) {
        let mut words = [0u64; 4];
        self.0.read(0, bytemuck::bytes_of_mut(&mut words)).unwrap();
        let [done, failed, statuses, misread] = words;
        (done, failed, (0..64).filter(|bit| statuses >> bit & 1 != 0).collect(), misread)
    }
}

/// A word of device memory.
pub fn device_word(region: &Region) -> u64 {
    let mut bytes = [0; 8];
    region.read(0, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

/// Waits for a condition; panics with what was awaited and what was seen if it does not come.
pub fn wait_until<T: std::fmt::Debug>(
    what: &str,
    mut see: impl FnMut() -> T,
    enough: impl Fn(&T) -> bool,
) -> T {
    let start = Instant::now();
    loop {
        let seen = see();
        if enough(&seen) {
            return seen;
        }
        assert!(start.elapsed() < PATIENCE, "waited {PATIENCE:?} for {what}, saw {seen:?}");
        std::thread::yield_now();
    }
}

/// What `needs_proxy` and the host tell each other: its words in `kernels.cu`.
pub struct Report(pub Words);

pub const RUNNING: usize = 0;
pub const GO: usize = 1;
pub const LEAVE: usize = 2;
pub const ROUNDS: usize = 3;
const STAGE: usize = 4;
pub const STATUS: usize = 5;
const MISREAD: usize = 6;
pub const FINISHED: usize = 7;

impl Report {
    pub fn new(device: &Device) -> Self {
        Report(device.words(8))
    }

    pub fn get(&self, word: usize) -> u64 {
        self.0[word].load(Ordering::Acquire)
    }

    pub fn set(&self, word: usize, value: u64) {
        self.0[word].store(value, Ordering::Release);
    }

    pub fn clear(&self) {
        (0..8).for_each(|word| self.set(word, 0));
    }

    /// Whether the kernel went through all its rounds and everything was right.
    pub fn succeeded(&self, rounds: u64) -> bool {
        [FINISHED, STATUS, MISREAD, ROUNDS].map(|word| self.get(word)) == [1, 0, 0, rounds]
    }

    /// What the kernel says of its end.
    pub fn text(&self) -> String {
        let stages = [
            "the host's go",
            "a put",
            "the copied tail",
            "the signal",
            "a flush",
            "the replica of the tail",
            "the host's leave",
            "its end",
        ];
        let stage = stages.get(self.get(STAGE) as usize).unwrap_or(&"nothing known");
        let status = self.get(STATUS);
        let name = ["ok", "timeout", "aborted", "broken by timeout", "broken by abort", "invalid", "failed"]
            .get(status as usize)
            .unwrap_or(&"unknown");
        format!(
            "the kernel {} at {stage} in round {} with status {status} ({name}), {} misread",
            if self.get(FINISHED) == 1 { "ended" } else { "has not ended, last seen" },
            self.get(ROUNDS),
            self.get(MISREAD)
        )
    }
}

/// One end's memories, pinned: the kernel and the processor both reach them.
#[derive(Clone, Debug)]
pub struct End {
    pub source: LocalMemory,
    pub destination: LocalMemory,
    pub signal: LocalMemory,
}

impl End {
    pub fn new(context: &Context, transport: &Loopback, len_bytes: u64) -> Self {
        let pinned = |len| transport.register(&context.host_memory(len).unwrap()).unwrap();
        End { source: pinned(len_bytes), destination: pinned(len_bytes), signal: pinned(8) }
    }
}

/// A channel of `here` that puts to `there`.
pub fn channel_config(
    transport: &Loopback,
    fifo: FifoId,
    port: PortId,
    here: &End,
    there: &End,
) -> ChannelConfig {
    let import = |memory: &LocalMemory| -> RemoteMemory {
        transport.import(&transport.export(memory).unwrap()).unwrap()
    };
    ChannelConfig {
        fifo,
        port,
        source: here.source.clone(),
        destination: import(&there.destination),
        outbound: import(&there.signal),
        inbound: here.signal.clone(),
    }
}

/// The two ports of a connection.
pub fn connect(a: &Loopback, b: &Loopback) -> [Box<dyn Port>; 2] {
    let (a_end, a_bytes) = a.endpoint().unwrap();
    let (b_end, b_bytes) = b.endpoint().unwrap();
    [a_end.connect(&b_bytes, PATIENCE).unwrap(), b_end.connect(&a_bytes, PATIENCE).unwrap()]
}

/// How to make a [`Pair`].
pub struct PairConfig {
    pub engine: Config,
    pub fifo: portway_fifo::Config,
    pub len_bytes: u64,
    pub a_port: loopback::Config,
    pub flush_stream: Option<Box<dyn FlushStream>>,
}

impl Default for PairConfig {
    fn default() -> Self {
        PairConfig {
            engine: Config::default(),
            fifo: portway_fifo::Config::default(),
            len_bytes: 4096,
            a_port: loopback::Config::default(),
            flush_stream: None,
        }
    }
}

/// Two ends in pinned memory, a channel from each to the other, and the proxy that serves them.
pub struct Pair {
    pub transport: Loopback,
    pub fifos: [FifoId; 2],
    pub rings: [Fifo; 2],
    pub ends: [End; 2],
    pub a: PortChannel,
    pub b: PortChannel,
    pub proxy: Proxy,
}

impl Pair {
    pub fn new(context: &Context, config: PairConfig) -> Self {
        Pair::with_port(context, config, |port| port)
    }

    /// The same, with `wrap` around the port that `a` puts through.
    pub fn with_port(
        context: &Context,
        config: PairConfig,
        wrap: impl FnOnce(Box<dyn Port>) -> Box<dyn Port>,
    ) -> Self {
        let transport = Loopback::new(config.a_port).unwrap();
        let [a_port, b_port] =
            connect(&transport.with_faults(config.a_port.faults), &transport.with_faults(Default::default()));
        let ends = [0, 1].map(|_| End::new(context, &transport, config.len_bytes));
        let mut engine = Engine::new(context, config.engine).unwrap();
        let ports = [engine.add_port(wrap(a_port)).unwrap(), engine.add_port(b_port).unwrap()];
        let [(a_fifo, a_id), (b_fifo, b_id)] = [0, 1].map(|_| {
            let (fifo, consumer) = Fifo::new(context, config.fifo.clone()).unwrap();
            let id = engine.add_fifo(fifo.clone(), consumer).unwrap();
            (fifo, id)
        });
        let a = channel_config(&transport, a_id, ports[0], &ends[0], &ends[1]);
        let b = channel_config(&transport, b_id, ports[1], &ends[1], &ends[0]);
        let (a, b) = (engine.add_channel(a).unwrap(), engine.add_channel(b).unwrap());
        let run = RunConfig { idle: Idle::Spin, flush_stream: config.flush_stream, ..RunConfig::default() };
        let proxy = Proxy::start(engine, run).unwrap();
        Pair { transport, fifos: [a_id, b_id], rings: [a_fifo, b_fifo], ends, a, b, proxy }
    }

    /// Addresses of the source that `a` puts from and of the destination that it puts to.
    pub fn addresses(&self) -> [u64; 2] {
        [self.ends[0].source.region.address(), self.ends[1].destination.region.address()]
    }
}
