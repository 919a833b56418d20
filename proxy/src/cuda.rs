//! [`CudaFlushStream`]: the tail flusher's way to a CUDA device.

use core::time::Duration;

use portway_fifo::Error;
use portway_fifo::cuda::{Context, Stream};

use crate::error::TransportError;
use crate::flusher::FlushStream;

/// How long the copy that primes a stream may take.
const PRIME_TIMEOUT: Duration = Duration::from_secs(10);

/// A stream that writes the tail to its replica in device memory, for
/// [`RunConfig::flush_stream`](crate::RunConfig::flush_stream).
///
/// It is [primed](Stream::prime) once and then carries written values only. So a full launch queue does not block it,
/// not even with `CUDA_DEVICE_MAX_CONNECTIONS=1`. It may still block, or its writes may not run for as long as a kernel
/// does, for example while another kernel is loaded lazily. Nothing waits for it: the statistics say so, and that is
/// all.
///
/// ```no_run
/// # use portway_fifo::cuda::{Context, Driver};
/// # use portway_proxy::{CudaFlushStream, Engine, Proxy, RunConfig};
/// # fn start(engine: Engine) -> Result<Proxy, Box<dyn std::error::Error>> {
/// let context = Context::new(&Driver::load()?, 0)?;
/// let stream = CudaFlushStream::new(&context)?;
/// let config = RunConfig { flush_stream: Some(Box::new(stream)), ..RunConfig::default() };
/// Ok(Proxy::start(engine, config)?)
/// # }
/// ```
#[derive(Debug)]
pub struct CudaFlushStream {
    stream: Stream,
}

impl CudaFlushStream {
    /// A new stream of the context, primed. Calls the driver, so make it before kernels run that wait for this thread.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device or the driver cannot write 64-bit values from a stream; [`Error::Timeout`]
    /// if the stream was not primed within 10 seconds; [`Error::Driver`].
    pub fn new(context: &Context) -> Result<Self, Error> {
        if !context.attributes().stream_write_value {
            return Err(Error::Unsupported { what: "writing a 64-bit value from a stream" });
        }
        let stream = Stream::new(context)?;
        stream.prime()?;
        stream.wait(PRIME_TIMEOUT)?;
        Ok(CudaFlushStream { stream })
    }
}

impl FlushStream for CudaFlushStream {
    unsafe fn write(&mut self, address: u64, value: u64) -> Result<(), TransportError> {
        // SAFETY: the flusher passes the replica of a FIFO that it keeps alive, an aligned word of its device memory
        // that is accessed atomically only. Memory of a context stays mapped until the device has finished with it.
        Ok(unsafe { self.stream.write_value(address, value) }?)
    }
}
