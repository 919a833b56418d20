//! The application: gets itself into the driver in one of many ways while a kernel runs.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use libloading::Library;
use portway_fifo::cuda::{Context, Function, Stream};

use crate::cuda_support::PATIENCE;

/// What the application is in while the kernel waits for the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    QueueFull,
    StreamSynchronise,
    EventSynchronise,
    DeviceSynchronise,
    Malloc,
    Free,
    HostAlloc,
    PageableCopy,
    LegacyCopy,
    Capture,
    FirstLaunch,
}

impl State {
    pub const ALL: [State; 11] = [
        State::QueueFull,
        State::StreamSynchronise,
        State::EventSynchronise,
        State::DeviceSynchronise,
        State::Malloc,
        State::Free,
        State::HostAlloc,
        State::PageableCopy,
        State::LegacyCopy,
        State::Capture,
        State::FirstLaunch,
    ];

    /// Whether it makes its call again and again: one comes back before the proxy is asked for anything.
    fn repeats(self) -> bool {
        matches!(self, State::Malloc | State::HostAlloc)
    }

    pub fn name(self) -> &'static str {
        match self {
            State::QueueFull => "launch queue full",
            State::StreamSynchronise => "stream synchronise",
            State::EventSynchronise => "event synchronise",
            State::DeviceSynchronise => "device synchronise",
            State::Malloc => "cudaMalloc",
            State::Free => "cudaFree",
            State::HostAlloc => "cudaHostAlloc",
            State::PageableCopy => "pageable copy to host",
            State::LegacyCopy => "legacy-stream copy",
            State::Capture => "stream capture",
            State::FirstLaunch => "first launch of a kernel",
        }
    }
}

/// More launches than a queue holds.
const LAUNCHES: u64 = 1500;
/// More allocations than are made while a kernel runs.
const ALLOCATIONS: usize = 4096;

type Handle = *mut c_void;

/// Declares the driver's functions that only this test calls. The product's own are in `portway_fifo::cuda`.
macro_rules! functions {
    ($( fn $name:ident($($type:ty),*); )*) => {
        #[allow(non_snake_case)]
        pub struct Functions {
            $( pub $name: unsafe extern "C" fn($($type),*) -> c_int, )*
        }

        impl Functions {
            pub fn load() -> Arc<Self> {
                // SAFETY: the driver's initialisers are made for being loaded.
                let library = unsafe { Library::new("libcuda.so.1") }.unwrap();
                let functions = Functions {
                    $( $name: {
                        let name = concat!(stringify!($name), "\0").as_bytes();
                        // SAFETY: these are the driver's functions, with the types that its interface gives them.
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
    fn cuCtxSetCurrent(Handle);
    fn cuCtxSynchronize();
    fn cuStreamCreate(*mut Handle, c_uint);
    fn cuStreamDestroy_v2(Handle);
    fn cuStreamSynchronize(Handle);
    fn cuStreamBeginCapture_v2(Handle, c_int);
    fn cuStreamEndCapture(Handle, *mut Handle);
    fn cuGraphDestroy(Handle);
    fn cuEventCreate(*mut Handle, c_uint);
    fn cuEventRecord(Handle, Handle);
    fn cuEventSynchronize(Handle);
    fn cuEventDestroy_v2(Handle);
    fn cuMemAlloc_v2(*mut u64, usize);
    fn cuMemFree_v2(u64);
    fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    fn cuMemFreeHost(*mut c_void);
    fn cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, Handle);
    fn cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, Handle);
    fn cuMemcpyDtoD_v2(u64, u64, usize);
    fn cuModuleLoadData(*mut Handle, *const c_void);
    fn cuModuleGetFunction(*mut Handle, Handle, *const c_char);
    fn cuModuleUnload(Handle);
    fn cuLaunchKernel(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
}

fn ok(call: &str, status: c_int) -> Result<(), String> {
    if status == 0 { Ok(()) } else { Err(format!("{call}: status {status}")) }
}

/// What the application has beforehand, so that it does nothing but its one call while the kernel runs.
pub struct Prepared {
    functions: Arc<Functions>,
    context: Context,
    state: State,
    /// The kernel's stream.
    stream: Stream,
    nothing: Function,
    /// Handles and addresses that the state needs, as numbers so that they can go to a thread.
    event: usize,
    capturing: usize,
    module: usize,
    memory: u64,
}

/// Device memory that copies touch and that the free frees.
const MEMORY_BYTES: usize = 32 << 20;

impl Prepared {
    pub fn new(
        functions: &Arc<Functions>,
        context: &Context,
        state: State,
        stream: &Stream,
        nothing: &Function,
        unloaded: &[u8],
    ) -> Self {
        let _current = context.current().unwrap();
        let f = functions;
        let (mut event, mut capturing, mut module): (Handle, Handle, Handle) =
            (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let mut memory = 0;
        match state {
            State::EventSynchronise => {
                // SAFETY: `event` outlives the call.
                ok("cuEventCreate", unsafe { (f.cuEventCreate)(&mut event, 2) }).unwrap();
            }
            State::Capture => {
                // SAFETY: `capturing` outlives the call.
                ok("cuStreamCreate", unsafe { (f.cuStreamCreate)(&mut capturing, 1) }).unwrap();
            }
            State::FirstLaunch => {
                // SAFETY: the image is a whole cubin and aligned; `module` outlives the call.
                let status = unsafe { (f.cuModuleLoadData)(&mut module, unloaded.as_ptr().cast()) };
                ok("cuModuleLoadData", status).unwrap();
            }
            State::Free | State::PageableCopy | State::LegacyCopy => {
                // SAFETY: `memory` outlives the call.
                ok("cuMemAlloc", unsafe { (f.cuMemAlloc_v2)(&mut memory, MEMORY_BYTES) }).unwrap();
            }
            _ => {}
        }
        Prepared {
            functions: f.clone(),
            context: context.clone(),
            state,
            stream: stream.clone(),
            nothing: nothing.clone(),
            event: event as usize,
            capturing: capturing as usize,
            module: module as usize,
            memory,
        }
    }

    /// Does it, while the kernel runs. `progress` counts what it has got through; `is_over` is set once the kernel has
    /// ended.
    fn run(&self, progress: &AtomicU64, is_over: &AtomicBool) -> Result<(), String> {
        let f = &*self.functions;
        // SAFETY: the context lives while `self` does. The thread ends without it.
        ok("cuCtxSetCurrent", unsafe { (f.cuCtxSetCurrent)(self.context.raw()) })?;
        let step = || progress.fetch_add(1, Ordering::AcqRel);
        step();
        match self.state {
            State::QueueFull => {
                for _ in 0..LAUNCHES {
                    // SAFETY: the kernel takes nothing and touches nothing.
                    unsafe { self.nothing.launch(&self.stream, [1; 3], [1; 3], 0, &[]) }
                        .map_err(|error| error.to_string())?;
                    step();
                }
                Ok(())
            }
            State::StreamSynchronise => {
                // SAFETY: the stream lives while `self` does.
                ok("cuStreamSynchronize", unsafe { (f.cuStreamSynchronize)(self.stream.raw()) })
            }
            State::EventSynchronise => {
                let event = self.event as Handle;
                // SAFETY: event and stream live while `self` does.
                ok("cuEventRecord", unsafe { (f.cuEventRecord)(event, self.stream.raw()) })?;
                // SAFETY: as above.
                ok("cuEventSynchronize", unsafe { (f.cuEventSynchronize)(event) })
            }
            // SAFETY: the context is current.
            State::DeviceSynchronise => ok("cuCtxSynchronize", unsafe { (f.cuCtxSynchronize)() }),
            State::Malloc => {
                let mut addresses = Vec::new();
                while addresses.len() < ALLOCATIONS && !is_over.load(Ordering::Acquire) {
                    let mut address = 0;
                    // SAFETY: `address` outlives the call.
                    ok("cuMemAlloc", unsafe { (f.cuMemAlloc_v2)(&mut address, 2 << 20) })?;
                    addresses.push(address);
                    step();
                }
                until_over(is_over)?;
                for address in addresses {
                    // SAFETY: allocated just above.
                    ok("cuMemFree", unsafe { (f.cuMemFree_v2)(address) })?;
                }
                Ok(())
            }
            // SAFETY: allocated in `new`, and used by nobody.
            State::Free => ok("cuMemFree", unsafe { (f.cuMemFree_v2)(self.memory) }),
            State::HostAlloc => {
                let mut addresses = Vec::new();
                while addresses.len() < ALLOCATIONS && !is_over.load(Ordering::Acquire) {
                    let mut address = ptr::null_mut();
                    // SAFETY: `address` outlives the call.
                    ok("cuMemHostAlloc", unsafe { (f.cuMemHostAlloc)(&mut address, 64 << 10, 0) })?;
                    addresses.push(address);
                    step();
                }
                until_over(is_over)?;
                for address in addresses {
                    // SAFETY: allocated just above.
                    ok("cuMemFreeHost", unsafe { (f.cuMemFreeHost)(address) })?;
                }
                Ok(())
            }
            State::PageableCopy => {
                let mut page = vec![0u8; 1 << 20];
                let (to, len, stream) = (page.as_mut_ptr().cast(), page.len(), self.stream.raw());
                // SAFETY: the buffer lives until the stream is done, which is waited for below.
                ok("cuMemcpyDtoHAsync", unsafe { (f.cuMemcpyDtoHAsync_v2)(to, self.memory, len, stream) })?;
                step();
                // SAFETY: the stream lives while `self` does.
                ok("cuStreamSynchronize", unsafe { (f.cuStreamSynchronize)(stream) })
            }
            State::LegacyCopy => {
                let to = self.memory + MEMORY_BYTES as u64 / 2;
                // SAFETY: both ranges lie in memory allocated in `new`, and are used by nobody else.
                ok("cuMemcpyDtoD", unsafe { (f.cuMemcpyDtoD_v2)(to, self.memory, 4096) })?;
                step();
                // SAFETY: null is the legacy stream, which stands behind the kernel's.
                ok("cuStreamSynchronize", unsafe { (f.cuStreamSynchronize)(ptr::null_mut()) })
            }
            State::Capture => self.capture(progress, is_over),
            State::FirstLaunch => {
                let (mut kernel, name) = (ptr::null_mut(), c"unloaded");
                // SAFETY: the module lives while `self` does, and both arguments outlive the call.
                let found =
                    unsafe { (f.cuModuleGetFunction)(&mut kernel, self.module as Handle, name.as_ptr()) };
                ok("cuModuleGetFunction", found)?;
                let none = ptr::null_mut();
                let mut parameters = [ptr::null_mut::<c_void>(); 1];
                let (stream, parameters) = (ptr::null_mut(), parameters.as_mut_ptr());
                // SAFETY: the kernel takes nothing and touches nothing.
                let launched =
                    unsafe { (f.cuLaunchKernel)(kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, none) };
                ok("cuLaunchKernel", launched)
            }
        }
    }

    /// Stays in a capture until the kernel has ended. The capture has to be whole then.
    fn capture(&self, progress: &AtomicU64, is_over: &AtomicBool) -> Result<(), String> {
        let f = &*self.functions;
        let raw = self.capturing as Handle;
        // SAFETY: the stream was made in `new`; mode 0 is global: other threads' unsafe calls would end it.
        ok("cuStreamBeginCapture", unsafe { (f.cuStreamBeginCapture_v2)(raw, 0) })?;
        // SAFETY: the stream lives until `clean` destroys it, after this.
        let stream = unsafe { Stream::from_raw(&self.context, raw, Arc::new(())) };
        for _ in 0..10 {
            // SAFETY: the kernel takes nothing and touches nothing.
            unsafe { self.nothing.launch(&stream, [1; 3], [1; 3], 0, &[]) }
                .map_err(|error| error.to_string())?;
            progress.fetch_add(1, Ordering::AcqRel);
        }
        until_over(is_over)?;
        let mut graph = ptr::null_mut();
        // SAFETY: the stream captures, and `graph` outlives the call.
        ok("cuStreamEndCapture", unsafe { (f.cuStreamEndCapture)(raw, &mut graph) })?;
        // SAFETY: the graph was made just above.
        ok("cuGraphDestroy", unsafe { (f.cuGraphDestroy)(graph) })
    }

    /// Gives everything back, once nothing runs.
    pub fn clean(&self) {
        let _current = self.context.current().unwrap();
        let f = &*self.functions;
        // SAFETY: the context is current. No kernel waits for this thread.
        ok("cuCtxSynchronize", unsafe { (f.cuCtxSynchronize)() }).unwrap();
        if self.event != 0 {
            // SAFETY: made in `new`, and used by nobody any more.
            ok("cuEventDestroy", unsafe { (f.cuEventDestroy_v2)(self.event as Handle) }).unwrap();
        }
        if self.capturing != 0 {
            // SAFETY: as above.
            ok("cuStreamDestroy", unsafe { (f.cuStreamDestroy_v2)(self.capturing as Handle) }).unwrap();
        }
        if self.module != 0 {
            // SAFETY: as above.
            ok("cuModuleUnload", unsafe { (f.cuModuleUnload)(self.module as Handle) }).unwrap();
        }
        if self.memory != 0 && self.state != State::Free {
            // SAFETY: as above.
            ok("cuMemFree", unsafe { (f.cuMemFree_v2)(self.memory) }).unwrap();
        }
    }
}

fn until_over(is_over: &AtomicBool) -> Result<(), String> {
    let start = Instant::now();
    while !is_over.load(Ordering::Acquire) {
        if start.elapsed() > PATIENCE {
            return Err(format!("waited {PATIENCE:?} for the kernel's end"));
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

/// The application's thread.
pub struct Application {
    progress: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<Result<(), String>>,
    pub prepared: Arc<Prepared>,
}

impl Application {
    /// Starts it, and returns once it does not get on any more, or calls again and again.
    pub fn start(prepared: Prepared) -> Self {
        let prepared = Arc::new(prepared);
        let (progress, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let thread = {
            let (prepared, progress, is_over) = (prepared.clone(), progress.clone(), is_over.clone());
            std::thread::spawn(move || prepared.run(&progress, &is_over))
        };
        let application = Application { progress, is_over, thread, prepared };
        let quiet =
            Duration::from_millis(if application.prepared.state == State::QueueFull { 10 } else { 4 });
        let start = Instant::now();
        let mut last = (0, start);
        while !application.thread.is_finished() && (last.0 == 0 || last.1.elapsed() < quiet) {
            let now = application.progress.load(Ordering::Acquire);
            if application.prepared.state.repeats() && now > 1 {
                break;
            }
            if now != last.0 {
                last = (now, Instant::now());
            }
            assert!(start.elapsed() < PATIENCE, "the application does not begin");
            std::thread::sleep(Duration::from_micros(100));
        }
        application
    }

    /// Whether it is inside its call, one of its calls, or its capture.
    pub fn is_stuck(&self) -> bool {
        let done = self.progress.load(Ordering::Acquire) as usize;
        let has_all = self.prepared.state.repeats() && done > ALLOCATIONS;
        !self.thread.is_finished() && !has_all
    }

    /// After the kernel's end: waits for the application's own.
    pub fn end(self) -> Result<(), String> {
        self.is_over.store(true, Ordering::Release);
        let start = Instant::now();
        while !self.thread.is_finished() {
            if start.elapsed() > PATIENCE {
                return Err(format!("the application did not come back in {PATIENCE:?}"));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        self.thread.join().unwrap_or_else(|_| Err("the application panicked".to_owned()))?;
        Ok(())
    }
}
