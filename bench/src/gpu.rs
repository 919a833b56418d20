//! [`Gpu`]: the device for the measurements that a kernel takes part in, if there is one.

use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytemuck::Pod;
use portway_fifo::Error;
use portway_fifo::cuda::nvrtc::Compiler;
use portway_fifo::cuda::{Context, Driver, Function, Module, Stream};
use portway_fifo::{Platform, Region};

use crate::failure::Failure;
use crate::machine::{Pinning, pin};
use crate::progress;
use crate::report::Report;

/// See the module.
pub struct Gpu {
    pub context: Context,
    compiler: Compiler,
    stream: Stream,
}

/// Runs `body` with the GPU and the cores near it; without one, notes why not.
pub fn with(
    layer: &str,
    pinning: &Pinning,
    report: &mut Report,
    body: impl FnOnce(&Gpu, &Pinning, &mut Report) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let failed = |source| Failure::gpu("the GPU", source);
    match Gpu::open() {
        Err(error) => match lacking(&error) {
            Some(what) => report.note(layer, format!("gpu: waived: {what}: {error}")),
            None => return Err(failed(error)),
        },
        Ok(gpu) => {
            report.note(layer, gpu.describe());
            for warning in gpu.context.warnings() {
                report.note(layer, format!("gpu: {warning} {}", warning.remedy()));
            }
            let near = &pinning.among(&gpu.system_file("local_cpulist").unwrap_or_default());
            let core = near.consumer().map_or("no core of its own".into(), |core| format!("core {core}"));
            report.note(layer, format!("gpu: consumer or engine on {core}"));
            // This thread asks the driver now and then whether kernels have ended. Not on the consumer's core.
            pin(near.producer(0));
            body(&gpu, near, report)?;
            // Reached only when every kernel has ended: this waits for them without bound.
            gpu.close().map_err(failed)?;
        }
    }
    Ok(())
}

/// What this machine lacks for kernels, or why its GPU cannot be used.
pub fn lacks() -> Option<String> {
    match Gpu::open().and_then(Gpu::close) {
        Ok(()) => None,
        Err(error) => {
            Some(lacking(&error).map_or(String::new(), |what| format!("{what}: ")) + &error.to_string())
        }
    }
}

/// What a machine with a GPU lacks for a pair of them.
pub fn lacks_a_second() -> Option<String> {
    match Driver::load().and_then(|driver| driver.device_count()) {
        Ok(2..) => None,
        Ok(_) => Some("one GPU; --devices 0,0 puts two ranks on it".into()),
        Err(error) => Some(error.to_string()),
    }
}

/// What a machine without a usable GPU lacks, if the error says that there is none.
pub fn lacking(error: &Error) -> Option<&'static str> {
    /// `cuInit`: a stand-in for the driver, or no device.
    const NONE: [i32; 2] = [34, 100];
    match error {
        Error::NoLibrary { library, .. } if library.contains("nvrtc") => Some("no NVRTC"),
        Error::NoLibrary { .. } => Some("no CUDA driver"),
        Error::Driver { call: "cuInit", status, .. } if NONE.contains(status) => Some("no CUDA device"),
        _ => None,
    }
}

impl Gpu {
    fn open() -> Result<Self, Error> {
        let driver = Driver::load()?;
        let compiler = Compiler::load()?;
        let context = Context::new(&driver, 0)?;
        let stream = Stream::new(&context)?;
        Ok(Gpu { context, compiler, stream })
    }

    fn close(self) -> Result<(), Error> {
        let Gpu { context, stream, .. } = self;
        drop(stream);
        context.close()
    }

    fn describe(&self) -> String {
        let it = self.context.attributes();
        let (major, minor) = it.compute_capability;
        let cuda = self.context.driver().version();
        let nvrtc = self.compiler.version();
        let mut text = format!("gpu: {}, sm_{major}{minor}, {} SMs", it.name, it.multiprocessors);
        if let Ok(version) = std::fs::read_to_string("/sys/module/nvidia/version") {
            let _ = write!(text, ", driver {}", version.trim());
        }
        let _ = write!(text, ", CUDA {}.{}, NVRTC {}.{}", cuda / 1000, cuda % 1000 / 10, nvrtc.0, nvrtc.1);
        let _ = match (self.system_file("current_link_speed"), self.system_file("current_link_width")) {
            (Some(speed), Some(width)) => write!(text, ", link {speed} x{width}"),
            _ => write!(text, ", link unknown"),
        };
        text + ", " + &it.pci_bus_id
    }

    /// What the system says about the device's place on the bus.
    fn system_file(&self, name: &str) -> Option<String> {
        let path = format!("/sys/bus/pci/devices/{}/{name}", self.context.attributes().pci_bus_id);
        std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
    }

    /// Compiles kernels and loads them.
    pub fn module(&self, name: &str, source: &str) -> Result<Module, Error> {
        let capability = self.context.attributes().compute_capability;
        let image = self.compiler.compile(name, source, capability, &[])?;
        // SAFETY: the image comes from the compiler.
        unsafe { Module::load(&self.context, &image) }
    }

    /// Zeroed device memory for a number of values.
    pub fn memory<T: Pod>(&self, len: u64) -> Result<Region, Error> {
        self.context.device_memory(len.saturating_mul(size_of::<T>() as u64).max(1))
    }

    /// The values in device memory, once no kernel writes them.
    pub fn read<T: Pod>(&self, memory: &Region, len: u64) -> Result<Vec<T>, Error> {
        let mut values = vec![T::zeroed(); len as usize];
        memory.read(0, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    /// Runs kernels, and meanwhile `serve` on the consumer's core. `serve` goes on until it is told that the kernels have
    /// ended and there is nothing left to do. They are waited for three times as long as a call in them waits.
    pub fn run<T: Send>(
        &self,
        measurement: &str,
        deadline: Duration,
        pinning: &Pinning,
        launch: impl FnOnce(&Stream) -> Result<(), Error>,
        serve: impl FnOnce(&AtomicBool) -> T + Send,
    ) -> Result<T, Failure> {
        progress::begin(measurement);
        let ended = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            let server = scope.spawn(|| {
                pin(pinning.consumer());
                serve(ended)
            });
            let result = launch(&self.stream).and_then(|()| self.wait(deadline));
            ended.store(true, Ordering::Release);
            let served = server.join().map_err(|_| Failure::Panicked { measurement: measurement.into() });
            result.map_err(|source| Failure::gpu(measurement, source)).and(served)
        })
    }

    /// Waits for the kernels, three times as long as a call in them waits.
    pub fn wait(&self, deadline: Duration) -> Result<(), Error> {
        self.stream.wait((deadline * 3).min(portway_fifo::MAX_TIMEOUT))
    }

    /// The stream that everything runs in.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Frees what measurements that have ended have dropped.
    pub fn reclaim(&self, measurement: &str) -> Result<(), Failure> {
        self.context.reclaim().map(drop).map_err(|source| Failure::gpu(measurement, source))
    }
}

/// A kernel's name and what loads it, so that its first launch loads nothing.
pub fn function(module: &Module, name: &str) -> Result<Function, Failure> {
    module.function(name).map_err(|source| Failure::gpu(name, source))
}

/// Nanoseconds of a cycle, from a time that both clocks of the GPU have measured.
pub fn cycle_ns(ns: [u64; 2], cycles: [u64; 2]) -> f64 {
    ns[1].wrapping_sub(ns[0]) as f64 / (cycles[1].wrapping_sub(cycles[0]) as f64).max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn the_kernels_compile_where_there_is_a_compiler() {
        let compiler = match Compiler::load() {
            Ok(compiler) => compiler,
            Err(lacking @ Error::NoLibrary { .. }) => {
                // Not through `eprintln!`, which the test harness keeps to itself.
                let _ = writeln!(std::io::stderr(), "waived: the_kernels_compile: {lacking}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        for (name, source) in [
            ("fifo.cu", crate::fifo::gpu::kernels()),
            ("put.cu", crate::put::gpu::kernels()),
            ("ipc.cu", crate::ipc::kernels::source()),
        ] {
            let cubin = compiler.compile(name, &source, (9, 0), &[]).unwrap_or_else(|e| panic!("{e}"));
            for text in source.split("extern \"C\" __global__ void ").skip(1) {
                // The bounds of its launch may stand before its name.
                let text = match text.strip_prefix("__launch_bounds__(") {
                    Some(bounds) => bounds.split_once(')').map_or(bounds, |(_, after)| after),
                    None => text,
                };
                let kernel = text.split('(').next().unwrap_or(text).trim();
                let symbol = format!("\0{kernel}\0");
                let found = cubin.windows(symbol.len()).any(|window| window == symbol.as_bytes());
                assert!(found, "no {kernel} in {name}");
            }
        }
    }

    #[test]
    fn only_what_is_not_there_is_waived() {
        let cu_init = |status| Error::Driver { call: "cuInit", status, name: String::new() };
        assert!(lacking(&cu_init(100)).is_some());
        assert!(lacking(&cu_init(999)).is_none());
        let missing = |library: &str| Error::NoLibrary { library: library.into(), reason: String::new() };
        assert_eq!(lacking(&missing("libcuda.so.1")), Some("no CUDA driver"));
        assert_eq!(lacking(&missing("libnvrtc.so.12")), Some("no NVRTC"));
    }

    #[test]
    fn a_cycle_is_time_over_cycles() {
        assert_eq!(cycle_ns([100, 300], [1000, 1400]), 0.5);
    }
}
