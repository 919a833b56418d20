//! [`Gpu`]: a device with what a caller brings who works beside a clique: kernels, streams, memory, pageable copies,
//! and captured graphs; and NCCL's own call for it.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use libloading::Library;
use portway_clique::backend::RawComm;
use portway_clique::nccl::LIBRARY_VARIABLE;
use portway_fifo::cuda::nvrtc::Compiler;
use portway_fifo::cuda::{Context, Driver, Function, Kind, Module, Stream};
use portway_fifo::{Platform, Region, Words};

use super::wait_until;

type Handle = *mut c_void;

/// Declares functions of a library that only these tests call.
macro_rules! functions {
    ($table:ident of $names:expr; $( fn $name:ident($($type:ty),*); )*) => {
        #[allow(non_snake_case)]
        pub struct $table {
            $( pub $name: unsafe extern "C" fn($($type),*) -> c_int, )*
        }

        impl $table {
            pub fn load() -> Arc<Self> {
                let names: Vec<std::ffi::OsString> = $names;
                let open = |name: &std::ffi::OsString| {
                    // SAFETY: the library's initialisers are made for being loaded.
                    unsafe { Library::new(name) }.ok()
                };
                let library = names.iter().find_map(open).expect("the library, which the test has loaded before");
                let functions = $table {
                    $( $name: {
                        let name = concat!(stringify!($name), "\0").as_bytes();
                        // SAFETY: these are the library's functions, with the types that its interface gives them.
                        *unsafe { library.get(name) }.unwrap()
                    }, )*
                };
                std::mem::forget(library); // the functions stay good
                Arc::new(functions)
            }
        }
    };
}

functions! {
    Cuda of vec!["libcuda.so.1".into()];
    fn cuMemGetInfo_v2(*mut usize, *mut usize);
    fn cuMemAlloc_v2(*mut u64, usize);
    fn cuMemFree_v2(u64);
    fn cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, Handle);
    fn cuStreamBeginCapture_v2(Handle, c_int);
    fn cuStreamEndCapture(Handle, *mut Handle);
    fn cuGraphInstantiateWithFlags(*mut Handle, Handle, u64);
    fn cuGraphLaunch(Handle, Handle);
    fn cuGraphExecDestroy(Handle);
    fn cuGraphDestroy(Handle);
}

functions! {
    Collectives of match std::env::var_os(LIBRARY_VARIABLE) {
        Some(path) => vec![path],
        None => vec!["libnccl.so.2".into(), "libnccl.so".into()],
    };
    fn ncclAllReduce(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle);
}

const F32: c_int = 7;
const SUM: c_int = 0;

impl Collectives {
    /// A sum of floats, put into a stream while its device is current; the library's status.
    ///
    /// # Safety
    /// - The communicator is alive, of the device of the places, and not in progress.
    /// - The memory and the stream of the places outlive the work.
    pub unsafe fn all_reduce(&self, comm: RawComm, places: &Places) -> c_int {
        let Places { context, send, recv, count, stream } = places;
        let _current = context.current().unwrap();
        let (comm, stream, send, recv, count) = (comm.0 as Handle, *stream as Handle, *send, *recv, *count);
        let (send, recv) = (send as *const c_void, recv as *mut c_void);
        // SAFETY: the caller's.
        unsafe { (self.ncclAllReduce)(send, recv, count, F32, SUM, comm, stream) }
    }
}

const KERNELS: &str = r#"
typedef unsigned long long u64;

__device__ u64 now_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Says in words[0] that it runs, and stays until words[1] is set, or its time is over, which it says in words[2].
extern "C" __global__ void spin(volatile u64 *words, u64 limit_ns) {
    u64 start = now_ns();
    words[0] = 1;
    __threadfence_system();
    while (!words[1]) {
        if (now_ns() - start > limit_ns) {
            words[2] = 1;
            break;
        }
    }
}

// Work: each float becomes the value, after some arithmetic that ends there.
extern "C" __global__ void work(float *data, u64 count, float value) {
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        float x = (float)(i % 1024);
        for (int round = 0; round < 64; round++) x = x * 0.5f + 1.0f;
        data[i] = x > 0.0f ? value : x;
    }
}
"#;

fn ok(call: &str, status: c_int) {
    assert_eq!(status, 0, "{call}: status {status}");
}

/// A device with the kernels.
#[derive(Clone)]
pub struct Gpu {
    pub context: Context,
    cuda: Arc<Cuda>,
    spin: Function,
    work: Function,
}

impl Gpu {
    pub fn open(driver: &Arc<Driver>, device: u32) -> Gpu {
        let context = Context::new(driver, device).unwrap();
        let capability = context.attributes().compute_capability;
        let compiler = Compiler::load().unwrap_or_else(|error| panic!("{error}"));
        let cubin =
            compiler.compile("clique.cu", KERNELS, capability, &[]).unwrap_or_else(|error| panic!("{error}"));
        // SAFETY: the image comes from the compiler.
        let module = unsafe { Module::load(&context, &cubin) }.unwrap();
        let (spin, work) = (module.function("spin").unwrap(), module.function("work").unwrap());
        Gpu { context, cuda: Cuda::load(), spin, work }
    }

    /// How many bytes of its memory are free.
    pub fn free_bytes(&self) -> usize {
        let _current = self.context.current().unwrap();
        let (mut free, mut total) = (0, 0);
        // SAFETY: both outlive the call.
        ok("cuMemGetInfo", unsafe { (self.cuda.cuMemGetInfo_v2)(&mut free, &mut total) });
        free
    }

    /// Allocates; `None` if there is not so much.
    fn allocate(&self, len_bytes: usize) -> Option<u64> {
        const OUT_OF_MEMORY: c_int = 2;
        let _current = self.context.current().unwrap();
        let mut address = 0;
        // SAFETY: `address` outlives the call.
        match unsafe { (self.cuda.cuMemAlloc_v2)(&mut address, len_bytes) } {
            OUT_OF_MEMORY => None,
            status => {
                ok("cuMemAlloc", status);
                Some(address)
            }
        }
    }

    fn free(&self, address: u64) {
        let _current = self.context.current().unwrap();
        // SAFETY: comes from `allocate`, and nothing uses it any more.
        ok("cuMemFree", unsafe { (self.cuda.cuMemFree_v2)(address) });
    }

    /// Takes all of its memory but so much, and whatever is too small to matter.
    pub fn fill(&self, leave_bytes: usize) -> Filled {
        let mut filled = Filled { gpu: self.clone(), taken: Vec::new() };
        let mut step = 1usize << 36;
        while step >= 64 << 10 {
            let free = self.free_bytes();
            // What is below the granularity of the count comes out of allocations that have room left.
            let wants = free >= leave_bytes + step || (leave_bytes == 0 && step < 4 << 20);
            match wants.then(|| self.allocate(step)).flatten() {
                Some(address) => filled.taken.push(address),
                None => step /= 2,
            }
        }
        filled
    }

    /// Starts a kernel that stays until it is released, or until `limit`, and waits until it runs.
    pub fn spin(&self, limit: Duration) -> Spin {
        let words = Words::new(self.context.host_memory(32).unwrap()).unwrap();
        let stream = Stream::new(&self.context).unwrap();
        let address = words.region().address().to_ne_bytes();
        let limit_ns = (limit.as_nanos() as u64).to_ne_bytes();
        // SAFETY: the kernel takes these two parameters; the words live until `Spin` has seen its end.
        unsafe { self.spin.launch(&stream, [1; 3], [1; 3], 0, &[&address, &limit_ns]) }.unwrap();
        let spin = Spin { words, stream };
        wait_until("the kernel to run", limit, || spin.words[0].load(Ordering::Acquire), |word| *word == 1);
        spin
    }

    pub fn lane(&self, count: usize) -> Lane {
        let buffer = || self.context.allocate(Kind::Legacy, count as u64 * 4).unwrap();
        let stream = Stream::new(&self.context).unwrap();
        Lane { gpu: self.clone(), stream, send: buffer(), recv: buffer(), count, seen: vec![0.0; count] }
    }
}

/// Memory that was taken from a GPU.
pub struct Filled {
    gpu: Gpu,
    taken: Vec<u64>,
}

impl Filled {
    /// Gives it back.
    pub fn free(mut self) {
        for address in std::mem::take(&mut self.taken) {
            self.gpu.free(address);
        }
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        // A test that fails leaves it to the process's end.
        self.taken.clear();
    }
}

/// A kernel that stays.
pub struct Spin {
    words: Words,
    stream: Stream,
}

impl Spin {
    /// Lets it go, and waits until it has; true if it had gone by itself, its time being over.
    pub fn release(self, limit: Duration) -> bool {
        self.words[1].store(1, Ordering::Release);
        let idle = wait_until(
            "the kernel to end",
            limit,
            || self.stream.is_idle(),
            |idle| !matches!(idle, Ok(false)),
        );
        assert!(idle.is_ok(), "the kernel's stream: {idle:?}");
        self.words[2].load(Ordering::Acquire) != 0
    }
}

impl Drop for Spin {
    fn drop(&mut self) {
        self.words[1].store(1, Ordering::Release);
    }
}

/// A thread's own stream and memory on its GPU: what a program does there between collectives.
pub struct Lane {
    gpu: Gpu,
    stream: Stream,
    send: Region,
    recv: Region,
    count: usize,
    /// Memory of the processor's that the driver has not been told of.
    seen: Vec<f32>,
}

/// Where an all-reduce of a lane reads, writes, how much, and its stream, for another thread.
#[derive(Clone)]
pub struct Places {
    context: Context,
    send: u64,
    recv: u64,
    count: usize,
    stream: usize,
}

impl Lane {
    pub fn places(&self) -> Places {
        let (send, recv) = (self.send.address(), self.recv.address());
        let context = self.gpu.context.clone();
        Places { context, send, recv, count: self.count, stream: self.stream.raw() as usize }
    }

    /// Puts a kernel into the stream that fills what is to be sent.
    pub fn work(&self, value: f32) {
        let parameters: [&[u8]; 3] =
            [&self.send.address().to_ne_bytes(), &(self.count as u64).to_ne_bytes(), &value.to_ne_bytes()];
        // SAFETY: the kernel takes these three parameters; the memory is freed by nobody before the end of the process.
        unsafe { self.gpu.work.launch(&self.stream, [64, 1, 1], [256, 1, 1], 0, &parameters) }.unwrap();
    }

    /// Copies what was received to pageable memory, in the stream. The call comes back once the stream has done all
    /// that was before it: where a collective does not end, this does not either.
    pub fn pageable_copy(&mut self) {
        let _current = self.gpu.context.current().unwrap();
        let (to, len_bytes) = (self.seen.as_mut_ptr().cast(), self.count * 4);
        let (from, stream) = (self.recv.address(), self.stream.raw());
        // SAFETY: both are as long, and a copy to pageable memory is complete when the call returns.
        ok("cuMemcpyDtoHAsync", unsafe { (self.gpu.cuda.cuMemcpyDtoHAsync_v2)(to, from, len_bytes, stream) });
    }

    /// Whether the stream has done everything.
    pub fn is_idle(&self) -> bool {
        self.stream.is_idle().unwrap_or_else(|error| panic!("the stream's work: {error}"))
    }

    /// Waits until the stream has done everything, and looks at the copy.
    pub fn check(&self, expected: f32, limit: Duration, what: &str) {
        wait_until(what, limit, || self.is_idle(), |idle| *idle);
        let wrong = self.seen.iter().position(|seen| *seen != expected);
        assert_eq!(wrong.map(|at| (at, self.seen[at])), None, "{what}: not {expected} there");
    }

    /// Memory that is allocated and freed between collectives.
    pub fn scratch(&self, len_bytes: usize) -> Scratch {
        let address = self.gpu.allocate(len_bytes).expect("memory for a scratch buffer");
        Scratch { gpu: self.gpu.clone(), address }
    }

    /// Captures what `body` puts into the stream. It may be put there by another thread.
    pub fn capture(&self, body: impl FnOnce()) -> Graph {
        const RELAXED: c_int = 2;
        let cuda = &self.gpu.cuda;
        let _current = self.gpu.context.current().unwrap();
        // SAFETY: the stream is alive.
        ok("cuStreamBeginCapture", unsafe { (cuda.cuStreamBeginCapture_v2)(self.stream.raw(), RELAXED) });
        body();
        let (mut graph, mut exec): (Handle, Handle) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the stream is being captured; `graph` outlives the call.
        ok("cuStreamEndCapture", unsafe { (cuda.cuStreamEndCapture)(self.stream.raw(), &mut graph) });
        // SAFETY: the graph is alive; `exec` outlives the call.
        ok("cuGraphInstantiate", unsafe { (cuda.cuGraphInstantiateWithFlags)(&mut exec, graph, 0) });
        Graph { gpu: self.gpu.clone(), graph: graph as usize, exec: exec as usize }
    }

    /// Puts a graph into the stream.
    pub fn launch(&self, graph: &Graph) {
        let _current = self.gpu.context.current().unwrap();
        // SAFETY: both are alive.
        let status = unsafe { (self.gpu.cuda.cuGraphLaunch)(graph.exec as Handle, self.stream.raw()) };
        ok("cuGraphLaunch", status);
    }
}

/// Some memory, freed when dropped.
pub struct Scratch {
    gpu: Gpu,
    address: u64,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.gpu.free(self.address);
    }
}

/// A captured graph that can be launched.
pub struct Graph {
    gpu: Gpu,
    graph: usize,
    exec: usize,
}

impl Graph {
    /// Destroys it.
    pub fn destroy(self) {
        let _current = self.gpu.context.current().unwrap();
        // SAFETY: alive, not running, and not used again.
        ok("cuGraphExecDestroy", unsafe { (self.gpu.cuda.cuGraphExecDestroy)(self.exec as Handle) });
        // SAFETY: as above.
        ok("cuGraphDestroy", unsafe { (self.gpu.cuda.cuGraphDestroy)(self.graph as Handle) });
    }
}
