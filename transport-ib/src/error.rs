//! [`Error`]: what the transport says, and how a work completion's status becomes an error of a port.

use std::sync::Arc;

use portway_proxy::TransportError;

use crate::sys;

/// Why a transport could not be opened, or an endpoint not be made.
///
/// By who is at fault:
/// - **the machine**: `NoLibrary`, `NoKernelSupport`, `NoDevice`, `NoActivePort`, `Device`, `Unfit`;
/// - **the caller**: `Config`;
/// - **the network's set-up**: `Gid`.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// `libibverbs.so.1` is not there, or lacks a function.
    #[error("no verbs library: {message}; install it (Debian: libibverbs1, ibverbs-providers)")]
    NoLibrary {
        /// What the loader said.
        message: String,
    },
    /// The library is there, the kernel has no RDMA support (module `ib_uverbs` not loaded, or `/dev/infiniband` hidden).
    #[error(
        "the verbs library finds no kernel support: load ib_uverbs, and let this process see /sys/class/infiniband and \
         /dev/infiniband"
    )]
    NoKernelSupport,
    /// There is no RDMA device, or none with the name that was asked for.
    #[error("no RDMA device{}; there are: {}. Name one that is there, or load the driver of another; `rdma link` shows them",
        named(.name), list(.present))]
    NoDevice {
        /// The name that was asked for.
        name: Option<String>,
        /// The names of those that are there.
        present: Vec<String>,
    },
    /// No port that could be used is active.
    #[error("no active RDMA port; seen: {}. Bring a link up; `rdma link` shows them", list(.seen))]
    NoActivePort {
        /// Every port that was looked at, as `device:port state`.
        seen: Vec<String>,
    },
    /// The device or its driver refused.
    #[error("{operation} failed{}: the kernel's log may say why", with(*.errno))]
    Device {
        /// What was tried.
        operation: &'static str,
        /// The system's number of the error, 0 if the library left none.
        errno: i32,
    },
    /// The device cannot do what this transport needs.
    #[error("device {device} is not fit: {why}; change that, or use another device")]
    Unfit {
        /// Its name.
        device: String,
        /// What it lacks.
        why: String,
    },
    /// A number in the configuration is out of range.
    #[error("{what} is {value}: must be {must_be}")]
    Config {
        /// Which one.
        what: &'static str,
        /// What it is.
        value: u64,
        /// What it may be.
        must_be: &'static str,
    },
    /// No GID to be reached by.
    #[error("no GID to use on {port}: {why}; seen: {}. Set gid_index to insist on one", list(.seen))]
    Gid {
        /// The device and port.
        port: String,
        /// Why none will do.
        why: &'static str,
        /// The table, an entry each.
        seen: Vec<String>,
    },
}

fn named(name: &Option<String>) -> String {
    name.as_ref().map(|name| format!(" named {name}")).unwrap_or_default()
}

fn with(errno: i32) -> String {
    match errno {
        0 => String::new(),
        _ => format!(" with errno {errno} ({})", std::io::Error::from_raw_os_error(errno)),
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

impl From<Error> for TransportError {
    fn from(error: Error) -> Self {
        let (operation, status) = match &error {
            Error::Device { operation, errno } => (*operation, *errno),
            Error::Gid { .. } => ("choosing a GID", 0),
            _ => ("opening the device", 0),
        };
        TransportError::Device { operation, status, vendor: 0, source: Some(Arc::new(error)) }
    }
}

/// The thread's last error number.
pub(crate) fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// A verbs call that returns null or an object, and says why in the thread's error number.
pub(crate) fn made<T>(operation: &'static str, object: *mut T) -> Result<*mut T, Error> {
    if object.is_null() { Err(Error::Device { operation, errno: errno() }) } else { Ok(object) }
}

/// A verbs call that returns 0 or an error number. Old providers return -1 and set the thread's number.
pub(crate) fn done(operation: &'static str, status: i32) -> Result<(), Error> {
    match status {
        0 => Ok(()),
        -1 => Err(Error::Device { operation, errno: errno() }),
        _ => Err(Error::Device { operation, errno: status.abs() }),
    }
}

/// Which connection an error of this side's device belongs to.
#[derive(Debug, thiserror::Error)]
#[error("on the way to {0}")]
struct OnTheWayTo(String);

/// An error of this side's device that befell a connection to `peer`, which is its source.
pub(crate) fn of_this_side(peer: &str, operation: &'static str, status: i32, vendor: u32) -> TransportError {
    TransportError::Device { operation, status, vendor, source: Some(Arc::new(OnTheWayTo(peer.to_owned()))) }
}

/// What the failure of a request of `peer`'s connection is called.
///
/// Causes on this side become [`TransportError::Device`], those of the peer and the way to it
/// [`TransportError::Remote`]; a provider may report a local cause as a flush.
pub(crate) fn failure(peer: &str, status: sys::ibv_wc_status, vendor: u32) -> TransportError {
    let (local, operation) = match status {
        sys::IBV_WC_LOC_LEN_ERR => (true, "write: length refused by this device (LOC_LEN_ERR)"),
        sys::IBV_WC_LOC_QP_OP_ERR => (true, "write: queue pair or link of this side (LOC_QP_OP_ERR)"),
        sys::IBV_WC_LOC_PROT_ERR => (true, "write: source memory not registered any more (LOC_PROT_ERR)"),
        sys::IBV_WC_LOC_ACCESS_ERR => (true, "write: source memory not accessible (LOC_ACCESS_ERR)"),
        sys::IBV_WC_FATAL_ERR => (true, "write: device failed (FATAL_ERR)"),
        sys::IBV_WC_WR_FLUSH_ERR => (true, "write: queue pair went to the error state (WR_FLUSH_ERR)"),
        sys::IBV_WC_RETRY_EXC_ERR => (false, "write: no acknowledgement, retries used up (RETRY_EXC_ERR)"),
        sys::IBV_WC_RNR_RETRY_EXC_ERR => {
            (false, "write: receiver not ready, retries used up (RNR_RETRY_EXC_ERR)")
        }
        sys::IBV_WC_REM_ACCESS_ERR => {
            (false, "write: peer's memory refused it, key or range (REM_ACCESS_ERR)")
        }
        sys::IBV_WC_REM_INV_REQ_ERR => (false, "write: peer refused the request (REM_INV_REQ_ERR)"),
        sys::IBV_WC_REM_OP_ERR => (false, "write: peer could not carry it out (REM_OP_ERR)"),
        sys::IBV_WC_REM_ABORT_ERR => (false, "write: peer aborted it (REM_ABORT_ERR)"),
        _ => (false, "write"),
    };
    let status = status.0 as i32;
    if local {
        of_this_side(peer, operation, status, vendor)
    } else {
        TransportError::Remote { peer: peer.to_owned(), operation, status, vendor }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_status_keeps_peer_status_and_vendor_code() {
        match failure("rxe1", sys::IBV_WC_RETRY_EXC_ERR, 0x81) {
            TransportError::Remote { peer, operation, status, vendor } => {
                assert_eq!((peer.as_str(), status, vendor), ("rxe1", 12, 0x81));
                assert!(operation.contains("RETRY_EXC_ERR"), "{operation}");
            }
            other => panic!("{other:?}"),
        }
        let TransportError::Device { status, vendor, .. } = failure("rxe1", sys::IBV_WC_LOC_PROT_ERR, 7)
        else {
            panic!("a cause on this side is the device's")
        };
        assert_eq!((status, vendor), (4, 7));
        // A status that this version does not know is kept as a number.
        let TransportError::Remote { status, .. } = failure("rxe1", sys::ibv_wc_status(99), 0) else {
            panic!("unknown")
        };
        assert_eq!(status, 99);
    }

    #[test]
    fn errors_of_calls_name_the_call_and_the_number() {
        let Err(Error::Device { operation, errno }) = done("query port", 22) else { panic!() };
        assert_eq!((operation, errno), ("query port", 22));
        assert!(done("query port", 0).is_ok());
        let text =
            Error::NoDevice { name: Some("mlx5_9".into()), present: vec!["mlx5_0".into()] }.to_string();
        assert!(text.starts_with("no RDMA device named mlx5_9; there are: mlx5_0. "), "{text}");
    }
}
