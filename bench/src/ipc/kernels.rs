//! [`Gpus`]: the two ends' devices, and the kernels of `ipc.cu` on them.

use bytemuck::{Pod, Zeroable, bytes_of};
use portway_fifo::cuda::nvrtc::Compiler;
use portway_fifo::cuda::{Context, Module, Stream};
use portway_fifo::{Platform, Region};
use portway_proxy::PortChannelHandle;
use portway_transport_ipc::WordPlace;

use super::gate::{self, Gate};
use super::mesh::{End, Mesh, Shape};
use crate::args::Args;
use crate::failure::Failure;
use crate::gpu::{Gpu, cycle_ns, function};
use crate::machine::Pinning;

/// Threads of a block. One of them calls the channel, all fill and check.
const THREADS: u32 = 1024;

/// All of `ipc.cu`.
const KERNELS: [&str; 5] = ["floor_trips", "messages", "pairs", "trips", "windows"];

/// The kernels behind the text of the header that they include.
pub fn source() -> String {
    [portway_proxy::header::PORT_CHANNEL, include_str!("../../device/ipc.cu")].concat()
}

/// What every measurement needs. The two sides may be on one device.
pub struct Gpus<'a> {
    pub sides: [Side; 2],
    pub args: &'a Args,
    pub pinning: &'a Pinning,
    /// Of the second device, if there is one.
    second: Option<Context>,
}

pub struct Side {
    pub context: Context,
    pub module: Module,
    pub stream: Stream,
}

impl Side {
    pub fn new(context: &Context, compiler: &Compiler) -> Result<Self, portway_fifo::Error> {
        let capability = context.attributes().compute_capability;
        let image = compiler.compile("ipc.cu", &source(), capability, &[])?;
        // SAFETY: the image comes from the compiler.
        let module = unsafe { Module::load(context, &image) }?;
        // A kernel that is loaded when first launched would wait for another that waits for it.
        for kernel in KERNELS {
            module.function(kernel)?;
        }
        Ok(Side { context: context.clone(), module, stream: Stream::new(context)? })
    }

    /// Launches a kernel, whose last parameters are its gate and where its blocks write.
    pub fn launch(
        &self,
        measurement: &str,
        kernel: &str,
        parameters: &[&[u8]],
        gate: &Gate,
        output: &Output,
    ) -> Result<(), Failure> {
        let (gate, cycles, done) = (gate.parameter(), output.cycles.address(), output.done.address());
        let parameters = [parameters, &[bytes_of(&gate), bytes_of(&cycles), bytes_of(&done)]].concat();
        let blocks = output.blocks as u32;
        let function = function(&self.module, kernel)?;
        // SAFETY: the kernel takes these parameters. Its memory outlives it: what is dropped is freed by `reclaim` alone,
        // which is called once it has ended.
        unsafe { function.launch(&self.stream, [blocks, 1, 1], [THREADS, 1, 1], 0, &parameters) }
            .map_err(|source| Failure::gpu(measurement, source))
    }
}

/// `Plan` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Plan {
    pub len_bytes: u64,
    pub puts: u64,
    pub count: u64,
    pub follows: u64,
    pub check: u64,
    pub corrupt: u64,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Handle {
    channel: PortChannelHandle,
    source: u64,
    destination: u64,
}

impl Handle {
    pub fn of(end: &End) -> Self {
        let (source, destination) = (end.source.address(), end.destination.address());
        Handle { channel: end.channel.handle(), source, destination }
    }
}

/// `Done` of the kernels.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Done {
    pub wrong: u64,
    status: u64,
    ns: [u64; 2],
    cycles: [u64; 2],
}

const _: () = assert!(size_of::<Handle>() == 192 && size_of::<Plan>() == 48 && size_of::<Done>() == 48);

/// What a block of a kernel found: its samples in microseconds.
pub struct Found {
    pub us: Vec<f64>,
    pub wrong: u64,
}

/// Where the blocks of a kernel write.
pub struct Output {
    pub cycles: Region,
    pub done: Region,
    blocks: u64,
    samples: u64,
}

impl Output {
    /// For as many blocks, with so many samples each.
    pub fn new(context: &Context, blocks: u64, samples: u64) -> Result<Self, portway_fifo::Error> {
        let done = context.device_memory(blocks * size_of::<Done>() as u64)?;
        let cycles = context.device_memory((8 * blocks).saturating_mul(samples))?;
        Ok(Output { cycles, done, blocks, samples })
    }

    /// What is there of each block once the kernel has ended.
    pub fn read(&self, measurement: &str) -> Result<Vec<Found>, Failure> {
        let failed = |source| Failure::gpu(measurement, source);
        let mut done = vec![Done::zeroed(); self.blocks as usize];
        self.done.read(0, bytemuck::cast_slice_mut(&mut done)).map_err(failed)?;
        Failure::on_device(measurement, done.iter().map(|done| done.status))?;
        let mut cycles = vec![0u64; (self.blocks * self.samples) as usize];
        self.cycles.read(0, bytemuck::cast_slice_mut(&mut cycles)).map_err(failed)?;
        let found = |(done, cycles): (&Done, &[u64])| {
            let us = cycle_ns(done.ns, done.cycles) / 1e3;
            Found { us: cycles.iter().map(|&cycles| cycles as f64 * us).collect(), wrong: done.wrong }
        };
        Ok(done.iter().zip(cycles.chunks_exact(self.samples as usize)).map(found).collect())
    }

    /// What is there of the only block.
    pub fn read_one(&self, measurement: &str) -> Result<Found, Failure> {
        self.read(measurement)?.pop().ok_or_else(|| Failure::Ended { measurement: measurement.into() })
    }
}

impl<'a> Gpus<'a> {
    /// The first device, and the second if there is one that it reaches; else the first twice.
    pub fn open(gpu: &Gpu, args: &'a Args, pinning: &'a Pinning) -> Result<Self, Failure> {
        let failed = |source| Failure::gpu("opening the GPUs", source);
        let first = &gpu.context;
        let count = first.driver().device_count().map_err(failed)?;
        // Said before the minutes are spent, not after.
        if let Some(&number) = args.gpus.iter().find(|number| **number >= count) {
            return Err(Failure::NoSuchGpu { number, count });
        }
        let two = count > 1 && first.can_reach(1).map_err(failed)?;
        let second = match two {
            true => Some(Context::new(first.driver(), 1).map_err(failed)?),
            false => None,
        };
        let compiler = Compiler::load().map_err(failed)?;
        let far = second.as_ref().unwrap_or(first);
        let side = |context| Side::new(context, &compiler).map_err(failed);
        let sides = [side(first)?, side(far)?];
        Ok(Gpus { sides, args, pinning, second })
    }

    pub fn describe(&self) -> String {
        match &self.second {
            Some(second) => format!("between two GPUs; the second: {}", second.attributes().pci_bus_id),
            None => "ONE GPU: both ends are on it, so copies stay within its memory".into(),
        }
    }

    pub fn close(self) -> Result<(), Failure> {
        let Gpus { sides, second, .. } = self;
        drop(sides);
        match second {
            Some(context) => context.close().map_err(|source| Failure::gpu("closing the second GPU", source)),
            None => Ok(()),
        }
    }

    pub fn contexts(&self) -> [&Context; 2] {
        self.sides.each_ref().map(|side| &side.context)
    }

    /// Runs a kernel, which takes so many samples, at both ends of a new connection, with memories of `len_bytes`; what each
    /// found.
    pub fn run(
        &self,
        measurement: &str,
        (kernel, samples): (&str, u64),
        place: WordPlace,
        len_bytes: u64,
        plans: [Plan; 2],
    ) -> Result<[Found; 2], Failure> {
        crate::progress::begin(measurement);
        let shape = Shape { contexts: self.contexts().into(), place, len_bytes, proxies: 1 };
        let mesh = Mesh::new(&shape, self.args, self.pinning)
            .map_err(|source| Failure::proxy(measurement, source))?;
        let outputs = [self.output(measurement, 0, samples)?, self.output(measurement, 1, samples)?];
        let handles = mesh.ends.iter().map(Handle::of).collect::<Vec<_>>();
        self.launch(measurement, kernel, &outputs, |at| vec![bytes_of(&handles[at]), bytes_of(&plans[at])])?;
        let found = [outputs[0].read_one(measurement)?, outputs[1].read_one(measurement)?];
        let ends = mesh.stop(measurement, self.args.deadline())?;
        drop((ends, outputs));
        self.reclaim(measurement)?;
        Ok(found)
    }

    /// Launches a kernel at both ends, lets both begin, and waits for their ends. Their parameters before the gate are told
    /// by `parameters`.
    pub fn launch<'p>(
        &self,
        measurement: &str,
        kernel: &str,
        outputs: &[Output; 2],
        parameters: impl Fn(usize) -> Vec<&'p [u8]>,
    ) -> Result<(), Failure> {
        let failed = |source| Failure::gpu(measurement, source);
        let gate = |at: usize| Gate::new(&self.sides[at].context, 1).map_err(failed);
        let gates = [gate(0)?, gate(1)?];
        for (at, side) in self.sides.iter().enumerate() {
            side.launch(measurement, kernel, &parameters(at), &gates[at], &outputs[at])?;
        }
        let opened = gate::open(measurement, &gates, 1, self.args.deadline());
        // Whatever came of it, no kernel may be left when memory goes.
        for side in &self.sides {
            side.stream.wait(self.limit()).map_err(failed)?;
        }
        opened
    }

    pub fn output(&self, measurement: &str, side: usize, samples: u64) -> Result<Output, Failure> {
        Output::new(&self.sides[side].context, 1, samples).map_err(|source| Failure::gpu(measurement, source))
    }

    /// How long a kernel is waited for: three times as long as a call in it waits, and the time that it may need.
    pub fn limit(&self) -> std::time::Duration {
        (self.args.deadline() * 3).max(std::time::Duration::from_secs(120)).min(portway_fifo::MAX_TIMEOUT)
    }

    /// Frees what was dropped, on both devices.
    pub fn reclaim(&self, measurement: &str) -> Result<(), Failure> {
        for context in self.contexts() {
            context.reclaim().map_err(|source| Failure::gpu(measurement, source))?;
        }
        Ok(())
    }
}
