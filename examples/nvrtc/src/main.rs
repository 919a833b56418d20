//! A kernel that NVRTC compiles when this program runs pushes triggers of its own; the host takes and checks them.
//! Without a GPU it compiles the kernel and says so; without NVRTC it says that.

use std::error::Error;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytemuck::bytes_of;
use portway_fifo::cuda::nvrtc::Compiler;
use portway_fifo::cuda::{Context, Driver, Module, Stream};
use portway_fifo::{Config, Fifo, Platform, Words};

const THREADS: u32 = 256;
/// How long a call waits, in the kernel and here.
const LIMIT: Duration = Duration::from_secs(5);

/// Each thread hands its number and the cube of it to the host.
const KERNEL: &str = r#"
#include "portway/fifo.cuh"

extern "C" __global__ void cubes(portway::FifoHandle fifo, portway::u64 *failed) {
  const portway::u64 n = threadIdx.x;
  const portway::Pushed pushed = portway::push(fifo, {{n, n * n * n}});
  if (pushed.status != portway::Status::kOk) *failed = 1 + static_cast<portway::u64>(pushed.status);
}
"#;

fn main() -> Result<(), Box<dyn Error>> {
    use portway_fifo::Error::{Driver as Refused, NoLibrary};
    let compiler = match Compiler::load() {
        Ok(compiler) => compiler,
        Err(lacking @ NoLibrary { .. }) => {
            println!("waived: {lacking}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let driver = match Driver::load() {
        Ok(driver) => driver,
        Err(lacking @ (NoLibrary { .. } | Refused { call: "cuInit", status: 100, .. })) => {
            let image = compiler.compile("cubes.cu", KERNEL, (9, 0), &[])?;
            println!("waived: the kernel compiles to {} bytes, but {lacking}", image.len());
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let context = Context::new(&driver, 0)?;
    run(&context, &compiler)?;
    Ok(context.close()?)
}

fn run(context: &Context, compiler: &Compiler) -> Result<(), Box<dyn Error>> {
    let (fifo, mut consumer) = Fifo::new(context, Config { timeout: LIMIT, ..Config::default() })?;
    let image = compiler.compile("cubes.cu", KERNEL, context.attributes().compute_capability, &[])?;
    // SAFETY: the image comes from the compiler.
    let module = unsafe { Module::load(context, &image) }?;
    let kernel = module.function("cubes")?;
    let stream = Stream::new(context)?;
    let failed = Words::new(context.host_memory(8)?)?;
    let (handle, failed_at) = (fifo.handle(), failed.region().address());
    // SAFETY: the kernel takes these parameters; FIFO and word outlive it, since the stream is waited for below.
    unsafe {
        kernel.launch(&stream, [1; 3], [THREADS, 1, 1], 0, &[bytes_of(&handle), bytes_of(&failed_at)])
    }?;
    let (expected, mut seen, mut wrong) = (THREADS as usize, 0, 0);
    let started = Instant::now();
    while seen < expected && started.elapsed() < LIMIT {
        seen += consumer.drain(64, |_, trigger| {
            let [n, cube] = trigger.words();
            wrong += usize::from(n >= expected as u64 || cube != n * n * n);
        });
    }
    if seen < expected {
        fifo.abort(); // ends the kernel's waits
    }
    stream.wait(3 * LIMIT)?;
    let failed = failed[0].load(Ordering::Acquire);
    println!("{seen} of {expected} triggers, {wrong} of them wrong, status of the kernel {failed}");
    if (seen, wrong, failed) == (expected, 0, 0) { Ok(()) } else { Err("not as it should be".into()) }
}
