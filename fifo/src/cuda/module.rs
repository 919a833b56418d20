//! [`Module`] and [`Function`]: kernels, as far as tests, examples and measurements need them.

use core::ffi::c_void;
use core::{fmt, ptr};
use std::ffi::CString;
use std::sync::Arc;

use crate::Error;
use crate::cuda::context::Inner;
use crate::cuda::quarantine::Resource;
use crate::cuda::table::Handle;
use crate::cuda::{Context, Stream};

/// Device code in a context. Clones share it; its [`Function`]s keep it loaded.
#[derive(Clone)]
pub struct Module {
    inner: Arc<ModuleInner>,
}

struct ModuleInner {
    context: Arc<Inner>,
    raw: usize,
}

impl Module {
    /// Loads PTX text, a cubin or a fatbin.
    ///
    /// # Errors
    /// [`Error::Driver`]: with status 209 if there is no code for this device in it, 218 if its PTX is wrong, 222 if
    /// its PTX is newer than the driver.
    ///
    /// # Safety
    /// - `image` is PTX text, or a whole cubin or fatbin: the driver believes the lengths that are written in it.
    pub unsafe fn load(context: &Context, image: &[u8]) -> Result<Self, Error> {
        let inner = context.inner();
        // A copy of words: aligned as an executable file must be, and ended by a zero, as a text must be.
        let mut words = vec![0u64; image.len() / 8 + 1];
        bytemuck::cast_slice_mut(&mut words)[..image.len()].copy_from_slice(image);
        let _current = inner.enter()?;
        let mut raw: Handle = ptr::null_mut();
        // SAFETY: `raw` outlives the call; the image is whole, says the caller, and ended by a zero.
        unsafe { inner.driver.cuModuleLoadData(&mut raw, words.as_ptr().cast()) }?;
        Ok(Module { inner: Arc::new(ModuleInner { context: inner.clone(), raw: raw as usize }) })
    }

    /// Finds a kernel (`extern "C" __global__`) and loads it, so that its first launch loads nothing.
    ///
    /// # Errors
    /// [`Error::Driver`], with status 500 if there is none of that name; [`Error::Unsupported`] for a name with a zero
    /// byte.
    pub fn function(&self, name: &str) -> Result<Function, Error> {
        let context = &self.inner.context;
        let name = CString::new(name)
            .map_err(|_| Error::Unsupported { what: "a kernel's name with a zero byte" })?;
        let _current = context.enter()?;
        let mut raw: Handle = ptr::null_mut();
        // SAFETY: `raw` and the name outlive the call, and the module lives while `self` does.
        unsafe { context.driver.cuModuleGetFunction(&mut raw, self.inner.raw as Handle, name.as_ptr()) }?;
        // A driver without it loads a kernel when it is looked up.
        if context.driver.table().cuFuncLoad.is_some() {
            // SAFETY: the function was found just above.
            unsafe { context.driver.cuFuncLoad(raw) }?;
        }
        Ok(Function { module: self.inner.clone(), raw: raw as usize })
    }
}

impl Drop for ModuleInner {
    fn drop(&mut self) {
        self.context.quarantine.put(Resource::Module(self.raw));
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Module({:#x}, device {})", self.inner.raw, self.inner.context.ordinal)
    }
}

/// A kernel. It keeps its module loaded.
#[derive(Clone)]
pub struct Function {
    module: Arc<ModuleInner>,
    raw: usize,
}

impl Function {
    /// Puts the kernel into a stream. `parameters` are the bytes of each of its parameters, in order:
    /// `&[bytes_of(&fifo.handle()), bytes_of(&count)]`.
    ///
    /// The call returns before the kernel runs, unless the device's launch queue is full (about a thousand launches):
    /// then it blocks until there is room.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the stream is of another context; [`Error::Driver`].
    ///
    /// # Safety
    /// - There are as many parameters, of the same lengths, as the kernel takes.
    /// - All memory that the kernel uses outlives its run, and what it does there fits the other users of that memory.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        parameters: &[&[u8]],
    ) -> Result<(), Error> {
        let context = &self.module.context;
        if !Arc::ptr_eq(context, stream.context()) {
            return Err(Error::Unsupported { what: "launching into a stream of another context" });
        }
        let mut pointers: Vec<*mut c_void> =
            parameters.iter().map(|bytes| bytes.as_ptr().cast_mut().cast()).collect();
        let _current = context.enter()?;
        // SAFETY: the function and the stream live while `self` and `stream` do. The driver copies the parameters, of
        // which it knows the lengths, before it returns; the caller vouches that they are the kernel's.
        unsafe {
            context.driver.cuLaunchKernel(
                self.raw as Handle,
                grid[0],
                grid[1],
                grid[2],
                block[0],
                block[1],
                block[2],
                shared_bytes,
                stream.raw(),
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        }
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Function({:#x}, device {})", self.raw, self.module.context.ordinal)
    }
}
