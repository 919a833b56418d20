//! The functions of NCCL that this crate calls, and the types and numbers that go through them.
//!
//! A status is a plain integer: a newer library may return one that nobody here has heard of, and reading that as an
//! enum would be undefined behaviour.

use core::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

use crate::backend::{BackendError, ID_BYTES};

/// `ncclResult_t`.
pub(super) type RawStatus = c_int;
/// `ncclComm_t`.
pub(super) type Comm = *mut c_void;
/// `cudaStream_t`, which is `CUstream`.
pub(super) type StreamHandle = *mut c_void;

/// `ncclUniqueId`. It is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; ID_BYTES]);

/// `ncclConfig_t` as of 2.27. Earlier libraries know a shorter one, which `size` tells; later ones have added to it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct RawConfig {
    pub(super) size: usize,
    pub(super) magic: c_uint,
    pub(super) version: c_uint,
    pub(super) blocking: c_int,
    pub(super) cga_cluster_size: c_int,
    pub(super) min_ctas: c_int,
    pub(super) max_ctas: c_int,
    pub(super) net_name: *const c_char,
    pub(super) split_share: c_int,
    pub(super) traffic_class: c_int,
    pub(super) comm_name: *const c_char,
    pub(super) collnet_enable: c_int,
    pub(super) cta_policy: c_int,
    pub(super) shrink_share: c_int,
    pub(super) nvls_ctas: c_int,
}

const _: () = assert!(size_of::<RawConfig>() == 72 && size_of::<UniqueId>() == ID_BYTES);
const _: () = assert!(size_of::<usize>() == 8, "NCCL needs a 64-bit host");

/// "Let the library choose."
pub(super) const UNDEFINED: c_int = c_int::MIN;
pub(super) const CONFIG_MAGIC: c_uint = 0xcafe_beef;
pub(super) const NO_COLOR: c_int = -1;
/// Shrinking first ends what is under way in the parent.
pub(super) const SHRINK_ABORT: c_int = 1;
pub(super) const REVOKE_DEFAULT: c_int = 0;

/// Declares the table: the functions as fields, and how they are found.
macro_rules! table {
    (
        required { $( fn $name:ident($($type:ty),*) -> $result:ty; )* }
        optional { $( fn $maybe:ident($($maybe_type:ty),*) -> $maybe_result:ty; )* }
    ) => {
        /// The functions of one opened library, under the names by which they are exported.
        #[allow(non_snake_case)]
        pub(super) struct Table {
            $( pub(super) $name: unsafe extern "C" fn($($type),*) -> $result, )*
            $( pub(super) $maybe: Option<unsafe extern "C" fn($($maybe_type),*) -> $maybe_result>, )*
        }

        impl Table {
            /// Finds every function.
            ///
            /// # Errors
            /// [`BackendError::NotInLibrary`] for the first required one that is not there.
            ///
            /// # Safety
            /// - `library` is NCCL or behaves like it: its functions have the types declared here.
            pub(super) unsafe fn resolve(library: &Library, path: &str) -> Result<Self, BackendError> {
                Ok(Table {
                    $( $name: {
                        // SAFETY: the caller vouches for the types.
                        let symbol = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                        *symbol.map_err(|_| BackendError::NotInLibrary {
                            call: stringify!($name),
                            library: path.to_owned(),
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
    };
}

table! {
    required {
        fn ncclGetVersion(*mut c_int) -> RawStatus;
        fn ncclGetUniqueId(*mut UniqueId) -> RawStatus;
        fn ncclGetErrorString(RawStatus) -> *const c_char;
        fn ncclGetLastError(Comm) -> *const c_char;
        fn ncclGroupStart() -> RawStatus;
        fn ncclGroupEnd() -> RawStatus;

        fn ncclCommInitRankConfig(*mut Comm, c_int, UniqueId, c_int, *mut RawConfig) -> RawStatus;
        fn ncclCommSplit(Comm, c_int, c_int, *mut Comm, *mut RawConfig) -> RawStatus;
        fn ncclCommFinalize(Comm) -> RawStatus;
        fn ncclCommDestroy(Comm) -> RawStatus;
        fn ncclCommAbort(Comm) -> RawStatus;
        fn ncclCommGetAsyncError(Comm, *mut RawStatus) -> RawStatus;
        fn ncclCommCount(Comm, *mut c_int) -> RawStatus;
        fn ncclCommUserRank(Comm, *mut c_int) -> RawStatus;
        fn ncclCommCuDevice(Comm, *mut c_int) -> RawStatus;

        fn ncclAllReduce(*const c_void, *mut c_void, usize, c_int, c_int, Comm, StreamHandle) -> RawStatus;
        fn ncclAllGather(*const c_void, *mut c_void, usize, c_int, Comm, StreamHandle) -> RawStatus;
        fn ncclSend(*const c_void, usize, c_int, c_int, Comm, StreamHandle) -> RawStatus;
        fn ncclRecv(*mut c_void, usize, c_int, c_int, Comm, StreamHandle) -> RawStatus;
    }
    optional {
        fn ncclCommInitRankScalable(*mut Comm, c_int, c_int, c_int, *mut UniqueId, *mut RawConfig) -> RawStatus;
        fn ncclCommShrink(Comm, *mut c_int, c_int, *mut Comm, *mut RawConfig, c_int) -> RawStatus;
        fn ncclCommRevoke(Comm, c_int) -> RawStatus;
    }
}
