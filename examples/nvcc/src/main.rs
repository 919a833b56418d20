//! A kernel that nvcc compiled when this program was built pushes triggers of its own; the host takes and checks them.
//! Without nvcc, or without a GPU, it says so and ends.

#[cfg(not(kernel))]
fn main() {
    println!("waived: built without nvcc, so there is no kernel");
}

#[cfg(kernel)]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    gpu::main()
}

#[cfg(kernel)]
mod gpu {
    use std::error::Error;
    use std::sync::atomic::Ordering;
    use std::time::{Duration, Instant};

    use bytemuck::bytes_of;
    use portway_fifo::cuda::{Context, Driver, Module, Stream};
    use portway_fifo::{Config, Fifo, Platform, Words};

    const KERNEL: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/squares.fatbin"));
    const BLOCKS: u32 = 64;
    const THREADS: u32 = 256;
    /// How long a call waits, in the kernel and here.
    const LIMIT: Duration = Duration::from_secs(5);

    pub fn main() -> Result<(), Box<dyn Error>> {
        use portway_fifo::Error::{Driver as Refused, NoLibrary};
        let driver = match Driver::load() {
            Ok(driver) => driver,
            Err(lacking @ (NoLibrary { .. } | Refused { call: "cuInit", status: 100, .. })) => {
                println!("waived: a kernel of {} bytes is there, but {lacking}", KERNEL.len());
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        let context = Context::new(&driver, 0)?;
        run(&context)?;
        Ok(context.close()?)
    }

    fn run(context: &Context) -> Result<(), Box<dyn Error>> {
        let (fifo, mut consumer) = Fifo::new(context, Config { timeout: LIMIT, ..Config::default() })?;
        // SAFETY: the image comes from nvcc.
        let module = unsafe { Module::load(context, KERNEL) }?;
        let kernel = module.function("squares")?;
        let stream = Stream::new(context)?;
        let failed = Words::new(context.host_memory(8)?)?;
        let (handle, failed_at) = (fifo.handle(), failed.region().address());
        // SAFETY: the kernel takes these parameters; FIFO and word outlive it, since the stream is waited for below.
        unsafe {
            kernel.launch(
                &stream,
                [BLOCKS, 1, 1],
                [THREADS, 1, 1],
                0,
                &[bytes_of(&handle), bytes_of(&failed_at)],
            )
        }?;
        let (expected, mut seen, mut wrong) = ((BLOCKS * THREADS) as usize, 0, 0);
        let started = Instant::now();
        while seen < expected && started.elapsed() < LIMIT {
            seen += consumer.drain(64, |_, trigger| {
                let [n, square] = trigger.words();
                wrong += usize::from(n >= expected as u64 || square != n * n);
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
}
