//! What a device can do: [`Attributes`], and what stands in the way of progress: [`Warning`].

use core::ffi::{c_char, c_int};
use core::fmt;

use crate::Error;
use crate::cuda::Driver;
use crate::cuda::table::{INVALID_VALUE, MODULE_LOADING_LAZY};

/// For whom writes that reach a device over the bus (GPUDirect RDMA) are in order without a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WriteOrdering {
    /// For nobody: a kernel that sees a signal may miss the data that came before it.
    None,
    /// For the kernels of the device that owns the memory.
    Owner,
    /// For the kernels of all devices.
    AllDevices,
}

/// What matters here of a device's properties. A capability that the driver is too old to know of is `false`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attributes {
    /// The product's name.
    pub name: String,
    /// The device's identity across processes and machines; of a MIG instance, the instance's own.
    pub uuid: [u8; 16],
    /// The address on the PCI bus as the system writes it in `/sys/bus/pci/devices`: `0000:3b:00.0`.
    pub pci_bus_id: String,
    /// Major and minor number of the compute capability: (9, 0) is `sm_90`.
    pub compute_capability: (u32, u32),
    /// How many multiprocessors the device has.
    pub multiprocessors: u32,
    /// The device and the processor use the same addresses.
    pub unified_addressing: bool,
    /// NICs can reach the device's memory.
    pub gpu_direct_rdma: bool,
    /// NICs can reach memory of [`Kind::Vmm`](crate::cuda::Kind::Vmm) that asks for it.
    pub gpu_direct_rdma_with_vmm: bool,
    /// For whom a NIC's writes are in order.
    pub write_ordering: WriteOrdering,
    /// Device memory can be handed to a NIC's driver as a dma-buf.
    pub dma_buf: bool,
    /// Device memory can be made, mapped and unmapped piece by piece (virtual memory management).
    pub vmm: bool,
    /// Such memory can be exported as a file descriptor.
    pub posix_fd: bool,
    /// Such memory can be exported as a fabric handle. Whether this process may is known when it tries.
    pub fabric: bool,
    /// A stream can write a 64-bit value to memory.
    pub stream_write_value: bool,
}

mod number {
    use core::ffi::c_int;

    pub(super) const MULTIPROCESSORS: c_int = 16;
    pub(super) const UNIFIED_ADDRESSING: c_int = 41;
    pub(super) const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
    pub(super) const COMPUTE_CAPABILITY_MINOR: c_int = 76;
    pub(super) const VMM: c_int = 102;
    pub(super) const POSIX_FD: c_int = 103;
    pub(super) const GPU_DIRECT_RDMA_WITH_VMM: c_int = 110;
    pub(super) const GPU_DIRECT_RDMA: c_int = 116;
    pub(super) const GPU_DIRECT_RDMA_WRITES_ORDERING: c_int = 118;
    pub(super) const STREAM_MEMORY_OPERATIONS_64: c_int = 122;
    pub(super) const DMA_BUF: c_int = 124;
    pub(super) const FABRIC: c_int = 128;
}

impl Attributes {
    pub(super) fn read(driver: &Driver, device: c_int) -> Result<Self, Error> {
        let number = |attribute| -> Result<u32, Error> {
            let mut value = 0;
            // SAFETY: `value` outlives the call.
            match unsafe { driver.cuDeviceGetAttribute(&mut value, attribute, device) } {
                Ok(()) => Ok(value.unsigned_abs()),
                // The driver does not know the attribute.
                Err(Error::Driver { status: INVALID_VALUE, .. }) => Ok(0),
                Err(error) => Err(error),
            }
        };
        let flag = |attribute| number(attribute).map(|value| value != 0);
        let mut uuid = [0; 16];
        // SAFETY: `uuid` outlives the call and has the length of a UUID.
        unsafe { driver.cuDeviceGetUuid_v2(&mut uuid, device) }?;
        Ok(Attributes {
            // SAFETY: `text` passes a buffer and its length.
            name: text(|buffer, len| unsafe { driver.cuDeviceGetName(buffer, len, device) })?,
            uuid,
            // SAFETY: as above.
            pci_bus_id: text(|buffer, len| unsafe { driver.cuDeviceGetPCIBusId(buffer, len, device) })?
                .to_ascii_lowercase(),
            compute_capability: (
                number(number::COMPUTE_CAPABILITY_MAJOR)?,
                number(number::COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: number(number::MULTIPROCESSORS)?,
            unified_addressing: flag(number::UNIFIED_ADDRESSING)?,
            gpu_direct_rdma: flag(number::GPU_DIRECT_RDMA)?,
            gpu_direct_rdma_with_vmm: flag(number::GPU_DIRECT_RDMA_WITH_VMM)?,
            write_ordering: match number(number::GPU_DIRECT_RDMA_WRITES_ORDERING)? {
                200.. => WriteOrdering::AllDevices,
                100..200 => WriteOrdering::Owner,
                _ => WriteOrdering::None,
            },
            dma_buf: flag(number::DMA_BUF)? && driver.table().cuMemGetHandleForAddressRange.is_some(),
            vmm: flag(number::VMM)? && driver.table().has_vmm(),
            posix_fd: flag(number::POSIX_FD)? && driver.table().cuMemExportToShareableHandle.is_some(),
            fabric: flag(number::FABRIC)? && driver.table().cuMemExportToShareableHandle.is_some(),
            stream_write_value: flag(number::STREAM_MEMORY_OPERATIONS_64)?
                && driver.table().cuStreamWriteValue64_v2.is_some(),
        })
    }
}

/// Reads a text that a call writes into a buffer of a given length.
fn text(fill: impl FnOnce(*mut c_char, c_int) -> Result<(), Error>) -> Result<String, Error> {
    let mut buffer = [0u8; 256];
    fill(buffer.as_mut_ptr().cast(), buffer.len() as c_int)?;
    let end = buffer.iter().position(|&byte| byte == 0).unwrap_or(buffer.len());
    Ok(String::from_utf8_lossy(&buffer[..end]).into_owned())
}

/// Something about the process that can keep a proxy, or a kernel that waits for it, from making progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// Kernels are loaded at their first launch. While a kernel spins, the first launch of another one does not return,
    /// and until it does no copy and no written value of any stream runs either.
    LazyLoading,
    /// All streams share one hardware queue (`CUDA_DEVICE_MAX_CONNECTIONS` is 1). Once it is full, small copies and
    /// launches block, and so do written values on a stream that was not primed.
    OneConnection,
}

impl Warning {
    /// What to do about it.
    pub fn remedy(self) -> &'static str {
        match self {
            Warning::LazyLoading => {
                "Set CUDA_MODULE_LOADING=EAGER, or load every kernel before anything waits on the device."
            }
            Warning::OneConnection => {
                "Unset CUDA_DEVICE_MAX_CONNECTIONS or raise it; else keep copies and launches off every path that a running kernel waits for."
            }
        }
    }

    /// What there is to warn about in this process.
    pub(super) fn collect(driver: &Driver) -> Result<Vec<Self>, Error> {
        let mut warnings = Vec::new();
        let mut mode = 0;
        // A driver without this function is older than lazy loading.
        if driver.table().cuModuleGetLoadingMode.is_some() {
            // SAFETY: `mode` outlives the call.
            unsafe { driver.cuModuleGetLoadingMode(&mut mode) }?;
        }
        if mode == MODULE_LOADING_LAZY {
            warnings.push(Warning::LazyLoading);
        }
        if std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").is_ok_and(|value| value.trim() == "1") {
            warnings.push(Warning::OneConnection);
        }
        Ok(warnings)
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Warning::LazyLoading => "Kernels are loaded lazily: a first launch can stall the device.",
            Warning::OneConnection => {
                "CUDA_DEVICE_MAX_CONNECTIONS is 1: a full launch queue blocks other streams."
            }
        })
    }
}
