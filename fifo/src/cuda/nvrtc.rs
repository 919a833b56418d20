//! The run-time compiler, NVRTC: kernels against the [device headers](crate::header) on a machine without `nvcc`.
//!
//! ```no_run
//! # use portway_fifo::cuda::{Context, Driver, Module, nvrtc::Compiler};
//! # let context = Context::new(&Driver::load()?, 0)?;
//! let source = r#"
//!     #include "portway/fifo.cuh"
//!     extern "C" __global__ void push(portway::FifoHandle fifo, portway::u64 word) {
//!         portway::push(fifo, {word, threadIdx.x});
//!     }"#;
//! let compute_capability = context.attributes().compute_capability;
//! let cubin = Compiler::load()?.compile("push.cu", source, compute_capability, &[])?;
//! // SAFETY: the image comes from the compiler.
//! let module = unsafe { Module::load(&context, &cubin) }?;
//! # Ok::<(), portway_fifo::Error>(())
//! ```

use core::ffi::{CStr, c_char, c_int, c_void};
use core::{fmt, ptr};
use std::ffi::CString;

use libloading::Library;

use crate::{Error, header};

/// The libraries of the toolkits whose compilers know the devices of today, the newest first.
const LIBRARIES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.12"];

const SUCCESS: c_int = 0;
const COMPILATION_FAILED: c_int = 6;

type Program = *mut c_void;
type Texts = *const *const c_char;

/// Declares the functions that are called, under the names by which they are exported.
macro_rules! table {
    ($( fn $name:ident($($arg:ident: $type:ty),*); )*) => {
        #[allow(non_snake_case)]
        struct Table {
            nvrtcGetErrorString: unsafe extern "C" fn(c_int) -> *const c_char,
            $( $name: unsafe extern "C" fn($($type),*) -> c_int, )*
        }

        impl Table {
            /// # Safety
            /// - `library` is NVRTC.
            unsafe fn resolve(library: &Library, path: &str) -> Result<Self, Error> {
                let missing = |function| {
                    move |_| Error::MissingFunction { library: path.to_owned(), function }
                };
                Ok(Table {
                    nvrtcGetErrorString: {
                        // SAFETY: the caller vouches for the types.
                        let symbol = unsafe { library.get(b"nvrtcGetErrorString\0") };
                        *symbol.map_err(missing("nvrtcGetErrorString"))?
                    },
                    $( $name: {
                        // SAFETY: as above.
                        let symbol = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                        *symbol.map_err(missing(stringify!($name)))?
                    }, )*
                })
            }
        }

        #[allow(non_snake_case)]
        impl Compiler {
            $(
                /// # Safety
                /// - NVRTC's own rules for this function are kept.
                unsafe fn $name(&self $(, $arg: $type)*) -> Result<(), Error> {
                    // SAFETY: the caller keeps the function's rules.
                    let status = unsafe { (self.table.$name)($($arg),*) };
                    self.check(stringify!($name), status)
                }
            )*
        }
    };
}

table! {
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int);
    fn nvrtcCreateProgram(
        program: *mut Program, source: *const c_char, name: *const c_char,
        headers: c_int, texts: Texts, names: Texts
    );
    fn nvrtcDestroyProgram(program: *mut Program);
    fn nvrtcCompileProgram(program: Program, count: c_int, options: Texts);
    fn nvrtcGetProgramLogSize(program: Program, len: *mut usize);
    fn nvrtcGetProgramLog(program: Program, log: *mut c_char);
    fn nvrtcGetCUBINSize(program: Program, len: *mut usize);
    fn nvrtcGetCUBIN(program: Program, cubin: *mut c_char);
}

/// NVRTC, opened when first used.
pub struct Compiler {
    table: Table,
    version: (u32, u32),
}

impl Compiler {
    /// Opens `libnvrtc.so.13` or, where that is not there, `libnvrtc.so.12` from the system's library path.
    ///
    /// # Errors
    /// [`Error::NoLibrary`], [`Error::MissingFunction`] or [`Error::Driver`].
    pub fn load() -> Result<Self, Error> {
        let mut none = None;
        for path in LIBRARIES {
            match Self::open(path) {
                Err(error @ Error::NoLibrary { .. }) => none = none.or(Some(error)),
                found => return found,
            }
        }
        Err(none.unwrap_or(Error::Unsupported { what: "compiling at run time" }))
    }

    fn open(path: &str) -> Result<Self, Error> {
        // SAFETY: loading runs the library's initialisers; the compiler's are made for that.
        let library = unsafe { Library::new(path) }
            .map_err(|e| Error::NoLibrary { library: path.to_owned(), reason: e.to_string() })?;
        // SAFETY: the path is one of NVRTC's.
        let table = unsafe { Table::resolve(&library, path) }?;
        core::mem::forget(library); // the functions in the table stay good
        let mut compiler = Compiler { table, version: (0, 0) };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both results outlive the call.
        unsafe { compiler.nvrtcVersion(&mut major, &mut minor) }?;
        compiler.version = (major.unsigned_abs(), minor.unsigned_abs());
        Ok(compiler)
    }

    /// Major and minor version of the compiler.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Compiles CUDA C++ to a cubin for devices of the given compute capability. The device headers are there for it
    /// to include; `name` stands in the messages; `options` are further ones of the compiler's.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's messages; [`Error::Unsupported`] for a text with a zero byte;
    /// [`Error::Driver`] for other refusals.
    pub fn compile(
        &self,
        name: &str,
        source: &str,
        compute_capability: (u32, u32),
        options: &[&str],
    ) -> Result<Vec<u8>, Error> {
        let text = |text: &str| {
            CString::new(text).map_err(|_| Error::Unsupported { what: "a zero byte in a text to compile" })
        };
        let headers = header::ALL;
        let names = headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>, _>>()?;
        let texts = headers.iter().map(|(_, body)| text(body)).collect::<Result<Vec<_>, _>>()?;
        let (major, minor) = compute_capability;
        // A real architecture, not a virtual one: so the instructions are checked here and not when they are loaded.
        let mut arguments =
            vec![text(&format!("--gpu-architecture=sm_{major}{minor}"))?, text("--std=c++17")?];
        for option in options {
            arguments.push(text(option)?);
        }
        let program =
            OpenProgram::new(self, &text(source)?, &text(name)?, &pointers(&texts), &pointers(&names))?;
        program.compile(&pointers(&arguments))?;
        program.cubin()
    }

    fn check(&self, call: &'static str, status: c_int) -> Result<(), Error> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: takes any number and returns a text of the library's own.
        let name = unsafe { (self.table.nvrtcGetErrorString)(status) };
        let name = if name.is_null() {
            "unknown".to_owned()
        } else {
            // SAFETY: the text is ended by a zero and lives as long as the library.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        Err(Error::Driver { call, status, name })
    }
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Compiler(NVRTC {}.{})", self.version.0, self.version.1)
    }
}

fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).collect()
}

/// A program of NVRTC's, destroyed at the end.
struct OpenProgram<'a> {
    compiler: &'a Compiler,
    raw: Program,
}

impl<'a> OpenProgram<'a> {
    fn new(
        compiler: &'a Compiler,
        source: &CStr,
        name: &CStr,
        texts: &[*const c_char],
        names: &[*const c_char],
    ) -> Result<Self, Error> {
        let mut raw: Program = ptr::null_mut();
        // SAFETY: all texts are ended by a zero and outlive the call, and there are as many names as headers.
        unsafe {
            compiler.nvrtcCreateProgram(
                &mut raw,
                source.as_ptr(),
                name.as_ptr(),
                texts.len().min(names.len()) as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        }?;
        Ok(OpenProgram { compiler, raw })
    }

    fn compile(&self, options: &[*const c_char]) -> Result<(), Error> {
        // SAFETY: the program lives; the options are ended by a zero and outlive the call.
        let result =
            unsafe { self.compiler.nvrtcCompileProgram(self.raw, options.len() as c_int, options.as_ptr()) };
        match result {
            Err(Error::Driver { status: COMPILATION_FAILED, .. }) => Err(Error::Compile { log: self.log()? }),
            other => other,
        }
    }

    fn log(&self) -> Result<String, Error> {
        let mut len = 0;
        // SAFETY: the program lives, and `len` outlives the call.
        unsafe { self.compiler.nvrtcGetProgramLogSize(self.raw, &mut len) }?;
        let mut log = vec![0u8; len];
        // SAFETY: the program lives, and `log` has the length that it asks for.
        unsafe { self.compiler.nvrtcGetProgramLog(self.raw, log.as_mut_ptr().cast()) }?;
        Ok(String::from_utf8_lossy(&log).trim_end_matches('\0').trim_end().to_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>, Error> {
        let mut len = 0;
        // SAFETY: the program lives, and `len` outlives the call.
        unsafe { self.compiler.nvrtcGetCUBINSize(self.raw, &mut len) }?;
        let mut cubin = vec![0u8; len];
        // SAFETY: the program lives, and `cubin` has the length that it asks for.
        unsafe { self.compiler.nvrtcGetCUBIN(self.raw, cubin.as_mut_ptr().cast()) }?;
        Ok(cubin)
    }
}

impl Drop for OpenProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: the program lives, and nobody uses it after this.
        let _ = unsafe { self.compiler.nvrtcDestroyProgram(&mut self.raw) };
    }
}
