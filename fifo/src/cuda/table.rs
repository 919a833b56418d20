//! The driver's functions that this crate calls, and the types and numbers that go through them.
//!
//! A status is a plain integer: a newer driver may return codes that nobody here has heard of, and reading one as an
//! enum would be undefined behaviour.

use core::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

use crate::Error;
use crate::cuda::Driver;

/// What every function returns: 0, or the driver's code for what went wrong.
pub(super) type Status = c_int;
/// An address that the device understands.
pub(super) type DevicePtr = u64;
/// A context, stream, module or function.
pub(super) type Handle = *mut c_void;

pub(super) const SUCCESS: Status = 0;
pub(super) const INVALID_VALUE: Status = 1;
pub(super) const OUT_OF_MEMORY: Status = 2;
pub(super) const NOT_FOUND: Status = 500;
pub(super) const PEER_ACCESS_ALREADY_ENABLED: Status = 704;
pub(super) const NOT_READY: Status = 600;
pub(super) const NOT_SUPPORTED: Status = 801;

pub(super) const MEM_HOST_ALLOC_PORTABLE: c_uint = 1;
pub(super) const MEM_HOST_ALLOC_DEVICE_MAP: c_uint = 2;
pub(super) const MEM_HOST_REGISTER_PORTABLE: c_uint = 1;
pub(super) const MEM_HOST_REGISTER_DEVICE_MAP: c_uint = 2;
pub(super) const IPC_LAZY_PEER_ACCESS: c_uint = 1;
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
pub(super) const CAPTURE_MODE_RELAXED: c_int = 2;
pub(super) const MODULE_LOADING_LAZY: c_int = 2;
pub(super) const RANGE_HANDLE_DMA_BUF_FD: c_int = 1;

pub(super) const ALLOCATION_PINNED: c_int = 1;
pub(super) const LOCATION_DEVICE: c_int = 1;
pub(super) const ACCESS_READ_WRITE: c_int = 3;
pub(super) const GRANULARITY_MINIMUM: c_int = 0;
pub(super) const HANDLE_TYPE_POSIX_FD: c_int = 1;
pub(super) const HANDLE_TYPE_FABRIC: c_int = 8;

/// What [`Driver::cuPointerGetAttribute`] can be asked.
pub(super) mod pointer {
    use core::ffi::c_int;

    pub(crate) const MEMORY_TYPE: c_int = 2;
    pub(crate) const DEVICE_POINTER: c_int = 3;
    pub(crate) const IS_MANAGED: c_int = 8;
    pub(crate) const DEVICE_ORDINAL: c_int = 9;
    pub(crate) const IS_LEGACY_IPC_CAPABLE: c_int = 10;
    pub(crate) const ALLOWED_HANDLE_TYPES: c_int = 14;
    pub(crate) const POOL_HANDLE: c_int = 17;

    pub(crate) const TYPE_HOST: u64 = 1;
    pub(crate) const TYPE_DEVICE: u64 = 2;
}

/// `CUipcMemHandle`, which goes by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct LegacyHandle(pub(super) [u8; 64]);

/// `CUmemLocation`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Location {
    pub(super) kind: c_int,
    pub(super) id: c_int,
}

/// `CUmemAllocationProp`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct AllocationProperties {
    pub(super) kind: c_int,
    pub(super) handle_types: c_int,
    pub(super) location: Location,
    pub(super) windows_only: *mut c_void,
    pub(super) compression: u8,
    pub(super) gpu_direct_rdma: u8,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct AccessDescription {
    pub(super) location: Location,
    pub(super) flags: c_int,
}

const _: () = assert!(size_of::<AllocationProperties>() == 32 && size_of::<AccessDescription>() == 12);
const _: () = assert!(size_of::<usize>() == 8, "CUDA needs a 64-bit host");

/// Declares the table: the functions as fields, how they are found, and for each an `unsafe` method of [`Driver`] that
/// calls it and makes its status a result.
macro_rules! table {
    (
        required { $( fn $name:ident($($arg:ident: $type:ty),*); )* }
        optional { $( fn $maybe:ident($($maybe_arg:ident: $maybe_type:ty),*); )* }
    ) => {
        /// The functions of one opened driver, under the names by which they are exported.
        #[allow(non_snake_case)]
        pub(super) struct Table {
            $( pub(super) $name: unsafe extern "C" fn($($type),*) -> Status, )*
            $( pub(super) $maybe: Option<unsafe extern "C" fn($($maybe_type),*) -> Status>, )*
        }

        impl Table {
            /// Finds every function.
            ///
            /// # Errors
            /// [`Error::MissingFunction`] for the first required one that is not there.
            ///
            /// # Safety
            /// - `library` is a CUDA driver or behaves like one: its functions have the types declared here.
            pub(super) unsafe fn resolve(library: &Library, path: &str) -> Result<Self, Error> {
                Ok(Table {
                    $( $name: {
                        // SAFETY: the caller vouches for the types.
                        let symbol = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                        *symbol.map_err(|_| Error::MissingFunction {
                            library: path.to_owned(),
                            function: stringify!($name),
                        })?
                    }, )*
                    $( $maybe: {
                        // SAFETY: as above.
                        let symbol = unsafe { library.get(concat!(stringify!($maybe), "\0").as_bytes()) };
                        symbol.ok().map(|symbol| *symbol)
                    }, )*
                })
            }
        }

        #[allow(non_snake_case, clippy::too_many_arguments)]
        #[allow(dead_code, reason = "where a status is no error, the field is called itself")]
        impl Driver {
            /// The functions without which a driver is too old.
            #[doc(hidden)]
            pub const REQUIRED_FUNCTIONS: &[&str] = &[$( stringify!($name) ),*];

            /// The functions whose absence is [`Error::Unsupported`] where they are needed.
            #[doc(hidden)]
            pub const OPTIONAL_FUNCTIONS: &[&str] = &[$( stringify!($maybe) ),*];

            $(
                /// # Safety
                /// - The driver's own rules for this function are kept.
                pub(super) unsafe fn $name(&self $(, $arg: $type)*) -> Result<(), Error> {
                    // SAFETY: the caller keeps the function's rules.
                    let status = unsafe { (self.table().$name)($($arg),*) };
                    self.check(stringify!($name), status)
                }
            )*
            $(
                /// # Safety
                /// - The driver's own rules for this function are kept.
                pub(super) unsafe fn $maybe(&self $(, $maybe_arg: $maybe_type)*) -> Result<(), Error> {
                    let Some(function) = self.table().$maybe else {
                        return Err(Error::Unsupported { what: concat!("this driver has no ", stringify!($maybe)) });
                    };
                    // SAFETY: the caller keeps the function's rules.
                    let status = unsafe { function($($maybe_arg),*) };
                    self.check(stringify!($maybe), status)
                }
            )*
        }
    };
}

table! {
    required {
        fn cuInit(flags: c_uint);
        fn cuDriverGetVersion(version: *mut c_int);

        fn cuDeviceGetCount(count: *mut c_int);
        fn cuDeviceGet(device: *mut c_int, ordinal: c_int);
        fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int);
        fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int);
        fn cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int);
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int);

        fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int);
        fn cuDevicePrimaryCtxRelease_v2(device: c_int);
        fn cuCtxPushCurrent_v2(context: Handle);
        fn cuCtxPopCurrent_v2(context: *mut Handle);
        fn cuCtxGetDevice(device: *mut c_int);
        fn cuCtxSynchronize();
        fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int);

        fn cuMemHostAlloc(host: *mut *mut c_void, len: usize, flags: c_uint);
        fn cuMemHostGetDevicePointer_v2(address: *mut DevicePtr, host: *mut c_void, flags: c_uint);
        fn cuMemFreeHost(host: *mut c_void);
        fn cuMemAlloc_v2(address: *mut DevicePtr, len: usize);
        fn cuMemFree_v2(address: DevicePtr);
        fn cuMemGetAddressRange_v2(base: *mut DevicePtr, len: *mut usize, address: DevicePtr);
        fn cuPointerGetAttribute(data: *mut c_void, attribute: c_int, address: DevicePtr);
        fn cuIpcGetMemHandle(handle: *mut [u8; 64], address: DevicePtr);
        fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: DevicePtr, len: usize, stream: Handle);
        fn cuMemcpyHtoDAsync_v2(to: DevicePtr, from: *const c_void, len: usize, stream: Handle);
        fn cuMemsetD8Async(to: DevicePtr, value: u8, len: usize, stream: Handle);

        fn cuStreamCreate(stream: *mut Handle, flags: c_uint);
        fn cuStreamDestroy_v2(stream: Handle);
        fn cuStreamQuery(stream: Handle);

        fn cuModuleLoadData(module: *mut Handle, image: *const c_void);
        fn cuModuleUnload(module: Handle);
        fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char);
        fn cuLaunchKernel(
            function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint, shared_bytes: c_uint,
            stream: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void
        );
    }
    optional {
        fn cuGetErrorName(status: Status, name: *mut *const c_char);
        fn cuModuleGetLoadingMode(mode: *mut c_int);
        fn cuFuncLoad(function: Handle);
        fn cuStreamWriteValue64_v2(stream: Handle, address: DevicePtr, value: u64, flags: c_uint);

        fn cuMemGetAllocationGranularity(len: *mut usize, properties: *const AllocationProperties, option: c_int);
        fn cuMemAddressReserve(address: *mut DevicePtr, len: usize, align: usize, at: DevicePtr, flags: u64);
        fn cuMemAddressFree(address: DevicePtr, len: usize);
        fn cuMemCreate(handle: *mut u64, len: usize, properties: *const AllocationProperties, flags: u64);
        fn cuMemRelease(handle: u64);
        fn cuMemMap(address: DevicePtr, len: usize, offset: usize, handle: u64, flags: u64);
        fn cuMemUnmap(address: DevicePtr, len: usize);
        fn cuMemSetAccess(address: DevicePtr, len: usize, access: *const AccessDescription, count: usize);
        fn cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void);
        fn cuMemExportToShareableHandle(shareable: *mut c_void, handle: u64, kind: c_int, flags: u64);
        fn cuMemImportFromShareableHandle(handle: *mut u64, shareable: *mut c_void, kind: c_int);
        fn cuIpcOpenMemHandle_v2(address: *mut DevicePtr, handle: LegacyHandle, flags: c_uint);
        fn cuIpcCloseMemHandle(address: DevicePtr);
        fn cuMemHostRegister_v2(host: *mut c_void, len: usize, flags: c_uint);
        fn cuMemHostUnregister(host: *mut c_void);
        fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int);
        fn cuCtxEnablePeerAccess(peer: Handle, flags: c_uint);
        fn cuMemcpyAsync(to: DevicePtr, from: DevicePtr, len: usize, stream: Handle);
        fn cuMemGetHandleForAddressRange(
            handle: *mut c_void, address: DevicePtr, len: usize, kind: c_int, flags: u64
        );
    }
}

impl Table {
    /// Whether memory can be made, mapped and unmapped piece by piece.
    pub(super) fn has_vmm(&self) -> bool {
        self.cuMemGetAllocationGranularity.is_some()
            && self.cuMemAddressReserve.is_some()
            && self.cuMemAddressFree.is_some()
            && self.cuMemCreate.is_some()
            && self.cuMemRelease.is_some()
            && self.cuMemMap.is_some()
            && self.cuMemUnmap.is_some()
            && self.cuMemSetAccess.is_some()
    }
}
